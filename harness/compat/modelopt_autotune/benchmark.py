"""Times models on one backend, in a worker process, with counted warm-up and timing runs."""

from __future__ import annotations

import logging
import shlex
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from harness import registry
from harness.api import Candidate
from harness.compat.modelopt_autotune.common import AutotunerError
from harness.compat.modelopt_autotune.sampling_policy import fixed_sampling, latency_ms, reference_sampling, write_log
from harness.config.sections import Confirmation, Limits, PluginSpec
from harness.errors import UserError
from harness.graph.io.files import digest_file
from harness.records import MAIN_BENCHMARKER, Failed, Measured, Outcome
from harness.search_loop.trial import NoisePolicy, make_trial_fn
from harness.timing.confirmation import ConfirmationSummary, Contender, confirm, summarize_turns
from harness.timing.workers.engines import Engines, WorkerSpec
from harness.timing.workers.sandbox import open_engines

__all__ = [
    "Benchmark", "TensorRTPyBenchmark", "TrtExecBenchmark", "backend_use", "benchmark_onnx_model", "current_benchmark",
    "init_benchmark_instance", "split_arguments",
]  # fmt: skip

_logger = logging.getLogger(__name__)
_current_benchmarks: ContextVar[Benchmark | None] = ContextVar("benchmark", default=None)
"""The one piece of state that the door's functions share, because ModelOpt's do."""
_LIMITS = Limits(build_s=1800, measure_s=3600)
_TENSORRT_OPTION_NAMES: Mapping[str, tuple[str, ...]] = {
    "plugin_libraries": ("plugin_libraries", "plugins"),
    "timing_cache_file": ("timing_cache_file",),
    "trtexec_args": ("extra", "trtexec_args", "extra_args", "args"),
}
"""What ModelOpt calls an option of TensorRT, and what a benchmarker's constructor may."""
_REMEDIES = {
    "plugin_libraries": "backends tensorrt and trtexec take them",
    "trtexec_args": "they are for the program trtexec: --use_trtexec, or backend trtexec",
}


class Benchmark:
    """Builds and times models, one at a time; what crashes is the worker.

    Args:
        backend: The benchmarker and its parameters.
        warmup_runs: Inferences before the first that counts.
        timing_runs: Inferences that count, at least three.

    Raises:
        UserError: The backend is not installed or cannot be made.
    """

    def __init__(self, backend: PluginSpec, *, warmup_runs: int = 5, timing_runs: int = 20) -> None:
        if warmup_runs < 0 or timing_runs < 1:
            raise AutotunerError(
                f"warmup_runs is at least 0 and timing_runs at least 1, but got {warmup_runs} and {timing_runs}"
            )
        self.backend = backend
        self.warmup_runs = warmup_runs
        self.timing_runs = timing_runs
        stack = ExitStack()
        self.close = weakref.finalize(self, stack.close)
        """Ends the worker; goes without saying at exit."""
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qdq-benchmark-")))
        self._worker = WorkerSpec(benchmarkers={MAIN_BENCHMARKER: backend}, workdir=self._folder)
        self._opened = stack.enter_context(ExitStack())
        self._engines = self._opened.enter_context(open_engines(self._worker, _LIMITS))
        self._level_ms: float | None = None

    def time_against_reference(self, reference: Path, level_ms: float) -> None:
        """Time from now on in turns with a model, which takes the machine's pace out of the readings.

        Warm-up and readings are then as in an experiment, see `harness.timing.reference_sampling`.

        Args:
            reference: The float model.
            level_ms: Its latency, which sets the scale.
        """
        self._measure_against_reference(reference, level_ms)

    def time_without_reference(self) -> None:
        """Time each model by itself again, as at first."""
        if self._level_ms is not None:
            self._measure_against_reference(None, None)

    def _measure_against_reference(self, reference: Path | None, level_ms: float | None) -> None:
        self._opened.close()
        self._worker, self._level_ms = replace(self._worker, reference=reference), level_ms
        self._engines = self._opened.enter_context(open_engines(self._worker, _LIMITS))

    def describe(self) -> Mapping[str, Any]:
        """The backend's own facts."""
        return self._engines.describe()

    def run(
        self, path_or_bytes: str | Path | bytes, log_file: str | None = None, flush_timing_cache: bool = False
    ) -> float:
        """Median latency in milliseconds; infinite where the model could not be built or timed (the log says why).

        Args:
            path_or_bytes: The model.
            log_file: Takes the readings and facts of the engine, or the reason of the failure.
            flush_timing_cache: Taken for compatibility; a backend looks after its own caches.
        """
        path = self._folder / "model.onnx"
        if isinstance(path_or_bytes, bytes):
            path.write_bytes(path_or_bytes)
        else:
            path = Path(path_or_bytes)
        candidate = Candidate(digest=digest_file(path)[:16], edges=(), source=lambda: path)
        return latency_ms(self.measure(candidate, log_file))

    __call__ = run

    def measure(self, candidate: Candidate, log_file: str | Path | None = None) -> Outcome:
        """Build and time a candidate, and say in the log what came of it."""
        outcome = self._measure_alone(candidate)
        if log_file is not None:
            write_log(outcome, candidate, Path(log_file))
        if isinstance(outcome, Failed):
            _logger.warning("%s: %s: %s", candidate.digest, outcome.stage, outcome.reason)
        return outcome

    def _measure_alone(self, candidate: Candidate) -> Outcome:
        if self._level_ms is not None:
            sampling = reference_sampling(self.timing_runs, self._level_ms)
            return make_trial_fn(self._engines, sampling, care=NoisePolicy(reference_latency_ms=self._level_ms))(
                candidate, None
            )
        built = self._engines.build(candidate)
        if isinstance(built, Failed):
            return built
        try:
            if self.warmup_runs:
                warm = self._engines.sample(built.handle, fixed_sampling(self.warmup_runs))
                if isinstance(warm, Failed):
                    return warm
            samples = self._engines.sample(built.handle, fixed_sampling(self.timing_runs))
            if isinstance(samples, Failed):
                return samples
            return Measured(
                samples_ms=samples.latency_ms,
                discarded_ms=samples.discarded_ms,
                warmup=self.warmup_runs,
                stable=samples.stable,
                build_s=built.build_s,
                measure_s=samples.measure_s,
                info=built.info,
            )
        finally:
            self._engines.release(built.handle)

    def open_fresh_engines(self) -> AbstractContextManager[Engines]:
        """Engines in a worker of their own."""
        return open_engines(self._worker, _LIMITS)

    def confirm(self, final: Candidate, baseline: Candidate, builds: int = 3) -> ConfirmationSummary:
        """Build a model and the float model afresh, time them in turns, and judge; see `harness.timing.confirmation`.

        Raises:
            UserError: The baseline fails.
        """
        samples = max(3, min(20, self.timing_runs // 5))
        events = confirm(
            [Contender(name="final", candidate=final)],
            Contender(name="baseline", candidate=baseline),
            open_engines=self.open_fresh_engines,
            schedule=Confirmation(builds=builds, rounds=4, samples=samples),
            rng=np.random.default_rng(0),
        )
        return summarize_turns(list(events), baseline="baseline")


class TensorRTPyBenchmark(Benchmark):
    """TensorRT through its Python interface; see `Benchmark`.

    Raises:
        UserError: There is no TensorRT.
    """

    def __init__(
        self,
        timing_cache_file: str | None = None,
        warmup_runs: int = 5,
        timing_runs: int = 20,
        plugin_libraries: Sequence[str] | None = None,
    ) -> None:
        options = {"timing_cache_file": timing_cache_file, "plugin_libraries": plugin_libraries}
        super().__init__(backend_use("tensorrt", options), warmup_runs=warmup_runs, timing_runs=timing_runs)


class TrtExecBenchmark(Benchmark):
    """TensorRT through the command trtexec; see `Benchmark`.

    Raises:
        UserError: There is no trtexec.
    """

    def __init__(
        self,
        timing_cache_file: str | None = None,
        warmup_runs: int = 5,
        timing_runs: int = 10,
        plugin_libraries: Sequence[str] | None = None,
        trtexec_args: Sequence[str] | str | None = None,
    ) -> None:
        arguments = split_arguments(trtexec_args) if isinstance(trtexec_args, str) else trtexec_args
        options = {
            "timing_cache_file": timing_cache_file,
            "plugin_libraries": plugin_libraries,
            "trtexec_args": arguments,
        }
        super().__init__(backend_use("trtexec", options), warmup_runs=warmup_runs, timing_runs=timing_runs)


def backend_use(name: str, options: Mapping[str, Any], params: Mapping[str, Any] | None = None) -> PluginSpec:
    """A backend with those of TensorRT's options that were given.

    A backend without timing cache does without it; plug-in libraries and arguments that it does not take are refused.

    Args:
        options: By ModelOpt's name; None or empty: not given.
        params: Further parameters of the backend.

    Raises:
        UserError: No such backend is installed, or it does not take an option.
    """
    try:
        taken = registry.plugin_signature("benchmarker", name).parameters
    except UserError as error:
        if name in ("tensorrt", "trtexec"):
            raise AutotunerError(
                f"{name} is not installed here: it needs an NVIDIA GPU and pip install 'qdq-bench[tensorrt]'; "
                f"without one use --backend openvino or onnxruntime ({error})"
            ) from error
        raise
    found = dict(params or {})
    for option, value in options.items():
        if not value:
            continue
        known = next((each for each in _TENSORRT_OPTION_NAMES[option] if each in taken), None)
        if known is not None:
            found[known] = [*found.get(known, ()), *value] if isinstance(value, list | tuple) else value
        elif option != "timing_cache_file":
            raise AutotunerError(f"{option}: backend {name!r} takes none; {_REMEDIES[option]}")
    return PluginSpec(use=name, params=found)


def split_arguments(text: str) -> list[str]:
    """Arguments of a command as a shell would split them.

    Raises:
        AutotunerError: A quotation that does not end.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise AutotunerError(f"arguments of trtexec: {error}: {text}; each quotation mark needs its second") from error


def init_benchmark_instance(  # noqa: PLR0913 - the signature is ModelOpt's
    use_trtexec: bool = False,
    plugin_libraries: Sequence[str] | None = None,
    timing_cache_file: str | None = None,
    warmup_runs: int = 5,
    timing_runs: int = 20,
    trtexec_args: Sequence[str] | str | None = None,
    *,
    backend: str | None = None,
    params: Mapping[str, Any] | None = None,
) -> Benchmark:
    """Choose what `benchmark_onnx_model` and the workflow time models on; a second call replaces the first.

    Args:
        use_trtexec: The backend is trtexec.
        plugin_libraries: Shared libraries with operators of TensorRT.
        timing_cache_file: TensorRT's cache of kernel timings; other backends have none.
        warmup_runs: Inferences before the first that counts.
        timing_runs: Inferences that count.
        trtexec_args: Further arguments of trtexec.
        backend: Name of the benchmarker; by default OpenVINO, which needs no GPU.
        params: Its parameters.

    Raises:
        UserError: The backend is not there or does not take an option.
    """
    if use_trtexec and backend not in (None, "trtexec"):
        raise AutotunerError(f"use_trtexec and backend {backend!r}: choose one")
    name = "trtexec" if use_trtexec else backend or "openvino"
    arguments = split_arguments(trtexec_args) if isinstance(trtexec_args, str) else trtexec_args
    options = {"plugin_libraries": plugin_libraries, "timing_cache_file": timing_cache_file, "trtexec_args": arguments}
    made = Benchmark(backend_use(name, options, params), warmup_runs=warmup_runs, timing_runs=timing_runs)
    before = current_benchmark()
    if before is not None:
        before.close()
    _current_benchmarks.set(made)
    return made


def current_benchmark() -> Benchmark | None:
    """What `init_benchmark_instance` made last, unless that was closed."""
    found = _current_benchmarks.get()
    return found if found is not None and found.close.alive else None


def benchmark_onnx_model(
    model_path: str | Path | bytes, log_file: str | None = None, flush_timing_cache: bool = False
) -> float:
    """Median latency of a model in milliseconds; infinite where there is none. See `Benchmark.run`."""
    benchmark = current_benchmark()
    if benchmark is None:
        _logger.error("Benchmark instance not initialized: call init_benchmark_instance() first")
        return float("inf")
    return benchmark.run(model_path, log_file, flush_timing_cache)
