"""Benchmark of models on one backend, in a worker process, under ModelOpt's names."""

from __future__ import annotations

import json
import logging
import shlex
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from harness.base.errors import UserError
from harness.base.paths import trust_plugins
from harness.base.statistics import median_ci
from harness.compat.modelopt_autotune.settings import MIN_TIMING_RUNS, AutotunerError
from harness.config.sections import MAX_SAMPLING_MS, Limits, PluginSpec, Sampling
from harness.graph.io.digests import digest_file
from harness.measure.records import MAIN_BENCHMARKER, Failed, Outcome
from harness.measure.sampling import Samples
from harness.plugins import registry
from harness.plugins.api import Candidate
from harness.run.search.trial import NoisePolicy, measure
from harness.workers.engines import BuiltEngine, EngineRequest, Engines, Sample, ScoringCallback, WorkerSpec
from harness.workers.sandbox import open_engines

_logger = logging.getLogger(__name__)
_current_benchmarks: ContextVar[Benchmark | None] = ContextVar("benchmark", default=None)
"""Benchmark that `benchmark_onnx_model` and the workflow share, as in ModelOpt."""
_LIMITS = Limits(build_s=1800, measure_s=3600)
NOISY_RELATIVE_ERROR = 0.02
_TENSORRT_OPTION_NAMES: Mapping[str, tuple[str, ...]] = {
    "plugin_libraries": ("plugin_libraries", "plugins"),
    "timing_cache_file": ("timing_cache_file",),
    "trtexec_args": ("extra", "trtexec_args", "extra_args", "args"),
}
"""Names of the parameter in benchmarkers' constructors, by ModelOpt's name of an option of TensorRT."""
_REMEDIES = {
    "plugin_libraries": "backends tensorrt and trtexec take them",
    "trtexec_args": "they are for the program trtexec: --use_trtexec, or backend trtexec",
}


class Benchmark:
    """Build and time models one at a time in a worker process.

    Args:
        backend: Benchmarker and its parameters.
        warmup_runs: Number of inferences before timing.
        timing_runs: Number of timed inferences; at least three are timed.

    Attributes:
        close: Function that ends the worker; also called at exit.
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
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qdq-benchmark-")))
        self._worker = WorkerSpec(benchmarkers={MAIN_BENCHMARKER: backend}, workdir=self._folder)
        self._opened = stack.enter_context(ExitStack())
        self._engines = self._opened.enter_context(open_engines(self._worker, _LIMITS))
        self._reference_ms: float | None = None

    def time_against_reference(self, reference: Path | None, latency_ms: float | None) -> None:
        """Time models in turns with a reference from now on, as an experiment does; see `reference_sampling`.

        Args:
            reference: The float model; None: time each model alone, as at first.
            latency_ms: Latency of the reference in ms, to which readings are scaled.
        """
        if latency_ms is None and self._reference_ms is None:
            return
        self._opened.close()
        self._worker, self._reference_ms = replace(self._worker, reference=reference), latency_ms
        self._engines = self._opened.enter_context(open_engines(self._worker, _LIMITS))

    def describe(self) -> Mapping[str, Any]:
        """Return the facts of the backend: name, version, device and options."""
        return self._engines.describe()

    def run(
        self, path_or_bytes: str | Path | bytes, log_file: str | None = None, flush_timing_cache: bool = False
    ) -> float:
        """Return the median latency of a model in ms; infinite if it cannot be built or timed.

        Args:
            log_file: File for the readings and facts of the engine, or the reason of the failure.
            flush_timing_cache: Accepted for compatibility with ModelOpt, without effect.
        """
        path = self._folder / "model.onnx"
        if isinstance(path_or_bytes, bytes):
            path.write_bytes(path_or_bytes)
        else:
            path = Path(path_or_bytes)
        candidate = Candidate(digest=digest_file(path)[:16], edges=(), source=lambda: path)
        outcome = self.measure(candidate, log_file)
        return float("inf") if isinstance(outcome, Failed) else median_ci(outcome.samples_ms).value

    __call__ = run

    def measure(self, candidate: Candidate, log_file: str | Path | None = None) -> Outcome:
        """Build and time a candidate, and write the outcome to `log_file` if it is given."""
        if self._reference_ms is None:
            engines: Engines = _CountedWarmup(self._engines, self.warmup_runs)
            sampling = _fixed_sampling(self.timing_runs)
        else:  # as long as an experiment times it, and at least as long as these inferences of the float model take
            engines, usual = self._engines, Sampling()
            limit_ms = max(usual.max_ms, self.timing_runs * self._reference_ms)
            sampling = usual.model_copy(update={"max_ms": limit_ms})
        noise = NoisePolicy(reference_latency_ms=self._reference_ms)
        outcome = measure(candidate, None, engines=engines, sampling=sampling, noise=noise)
        if isinstance(outcome, Failed):
            head = f"failed: {outcome.stage}: {outcome.reason}"
            _logger.warning("%s: %s: %s", candidate.digest, outcome.stage, outcome.reason)
        else:
            interval = median_ci(outcome.samples_ms)
            head = f"latency {interval.value:.4f} ms, 95 % interval {interval.low:.4f} to {interval.high:.4f} ms"
        if log_file is not None:
            body = {"digest": candidate.digest, "quantized_edges": len(candidate.edges), **asdict(outcome)}
            tail, path = body.pop("log_tail", ""), Path(log_file)
            lines = [f"{key}: {json.dumps(value, default=str)}" for key, value in body.items() if value]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join([head, *lines, tail]).rstrip() + "\n", encoding="utf-8")
        return outcome

    def open_fresh_engines(self) -> AbstractContextManager[Engines]:
        """Open engines in another worker."""
        return open_engines(self._worker, _LIMITS)


class TensorRTPyBenchmark(Benchmark):
    """Benchmark with TensorRT's Python interface; raises `UserError` if TensorRT is missing."""

    def __init__(
        self,
        timing_cache_file: str | None = None,
        warmup_runs: int = 5,
        timing_runs: int = 20,
        plugin_libraries: Sequence[str] | None = None,
    ) -> None:
        backend = backend_spec("tensorrt", plugin_libraries=plugin_libraries, timing_cache_file=timing_cache_file)
        super().__init__(backend, warmup_runs=warmup_runs, timing_runs=timing_runs)


class TrtExecBenchmark(Benchmark):
    """Benchmark with TensorRT's program trtexec; raises `UserError` if it is missing."""

    def __init__(
        self,
        timing_cache_file: str | None = None,
        warmup_runs: int = 5,
        timing_runs: int = 10,
        plugin_libraries: Sequence[str] | None = None,
        trtexec_args: Sequence[str] | str | None = None,
    ) -> None:
        backend = backend_spec(
            "trtexec",
            plugin_libraries=plugin_libraries,
            timing_cache_file=timing_cache_file,
            trtexec_args=trtexec_args,
        )
        super().__init__(backend, warmup_runs=warmup_runs, timing_runs=timing_runs)


def init_benchmark_instance(
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
    """Set the benchmark of `benchmark_onnx_model` and the workflow, in place of an earlier one.

    Args:
        use_trtexec: Same as backend "trtexec".
        plugin_libraries: Shared libraries with operators of TensorRT.
        timing_cache_file: TensorRT's cache of kernel timings; other backends have none.
        warmup_runs: Number of inferences before timing.
        timing_runs: Number of timed inferences; at least three are timed.
        trtexec_args: Further arguments of trtexec.
        backend: Name of the benchmarker; None: OpenVINO, which needs no GPU.
        params: Its parameters.
    """
    use = backend_spec(
        backend,
        params,
        use_trtexec=use_trtexec,
        plugin_libraries=plugin_libraries,
        timing_cache_file=timing_cache_file,
        trtexec_args=trtexec_args,
    )
    benchmark = Benchmark(use, warmup_runs=warmup_runs, timing_runs=timing_runs)
    before = current_benchmark()
    if before is not None:
        before.close()
    _current_benchmarks.set(benchmark)
    return benchmark


def current_benchmark() -> Benchmark | None:
    """Return the benchmark that `init_benchmark_instance` made last; None if it is closed."""
    benchmark = _current_benchmarks.get()
    return benchmark if benchmark is not None and benchmark.close.alive else None


def benchmark_onnx_model(
    model_path: str | Path | bytes, log_file: str | None = None, flush_timing_cache: bool = False
) -> float:
    """Return the median latency of a model in ms; infinite if it fails or no benchmark is set. See `Benchmark.run`."""
    benchmark = current_benchmark()
    if benchmark is None:
        _logger.error("Benchmark instance not initialized: call init_benchmark_instance() first")
        return float("inf")
    return benchmark.run(model_path, log_file, flush_timing_cache)


def backend_spec(
    backend: str | None,
    params: Mapping[str, Any] | None = None,
    *,
    use_trtexec: bool = False,
    plugin_libraries: Sequence[str] | None = None,
    timing_cache_file: str | None = None,
    trtexec_args: Sequence[str] | str | None = None,
) -> PluginSpec:
    """Return a backend with its parameters and options of TensorRT; for the arguments see `init_benchmark_instance`.

    Backends without a timing cache ignore it; other options that a backend lacks are errors.
    """
    if use_trtexec and backend not in (None, "trtexec"):
        raise AutotunerError(f"use_trtexec and backend {backend!r}: choose one")
    name = "trtexec" if use_trtexec else backend or "openvino"
    try:
        accepted = registry.plugin_signature("benchmarker", name).parameters
    except UserError as error:
        if name in ("tensorrt", "trtexec"):
            raise AutotunerError(
                f"{name} is not installed here: it needs an NVIDIA GPU and pip install 'qdq-bench[tensorrt]'; "
                f"without one use --backend openvino or onnxruntime ({error})"
            ) from error
        raise
    if isinstance(trtexec_args, str):
        try:
            trtexec_args = shlex.split(trtexec_args)
        except ValueError as error:
            raise AutotunerError(
                f"arguments of trtexec: {error}: {trtexec_args}; a quotation mark is not closed"
            ) from error
    options = {
        "plugin_libraries": plugin_libraries,
        "timing_cache_file": timing_cache_file,
        "trtexec_args": trtexec_args,
    }
    values = dict(params or {})
    for option, value in options.items():
        parameter = next((each for each in _TENSORRT_OPTION_NAMES[option] if each in accepted), None)
        if value and parameter is not None:
            values[parameter] = [*values.get(parameter, ()), *value] if isinstance(value, list | tuple) else value
        elif value and option != "timing_cache_file":
            raise AutotunerError(f"{option}: backend {name!r} does not have it; {_REMEDIES[option]}")
    if values:  # the options come from the user's own command line or program
        trust_plugins()
    return PluginSpec(use=name, params=values)


def is_noisy(outcome: Outcome) -> bool:
    """Return whether the median of an outcome is uncertain by more than 2 %, too much to compare single readings.

    If other processes use the cores, an inference takes either its own time or that plus a time slice of the operating
    system, and the median is one or the other.
    """
    if isinstance(outcome, Failed):
        return False
    return not outcome.stable or median_ci(outcome.samples_ms).relative_width / 2 > NOISY_RELATIVE_ERROR


class _CountedWarmup(Engines):
    """Engines with a fixed number of inferences before each timing."""

    def __init__(self, engines: Engines, runs: int) -> None:
        self._engines = engines
        self._runs = runs

    def describe(self, benchmarker: str = MAIN_BENCHMARKER) -> Mapping[str, Any]:
        return self._engines.describe(benchmarker)

    def build(self, candidate: Candidate, benchmarker: str = MAIN_BENCHMARKER) -> BuiltEngine | Failed:
        return self._engines.build(candidate, benchmarker)

    def request(self, request: EngineRequest[Any], on_progress: ScoringCallback | None = None) -> Any:
        if isinstance(request, Sample) and self._runs:
            warm = self._engines.sample(request.handle, _fixed_sampling(self._runs))
            if isinstance(warm, Failed):
                return warm
        result = self._engines.request(request, on_progress)
        return replace(result, warmup=self._runs) if isinstance(result, Samples) else result


def _fixed_sampling(runs: int) -> Sampling:
    count = max(MIN_TIMING_RUNS, runs)
    return Sampling(warmup_ms=0.0, min_samples=count, max_samples=count, max_ms=MAX_SAMPLING_MS)
