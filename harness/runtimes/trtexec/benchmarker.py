"""Latency by the command-line tool trtexec: the GPU compute time of its export file, not its printed latency."""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from harness.base.errors import BuildFailed, CandidateError, MeasureFailed, UserError
from harness.base.paths import cache_dir
from harness.plugins.api import Array, Artifact, Candidate, Capabilities, Layer
from harness.runtimes.cuda.device import Device, open_device
from harness.runtimes.host_clock import to_float32
from harness.runtimes.tensorrt.inspection import read_layers
from harness.runtimes.tensorrt.library import STRONG_TYPING_ONLY_MAJOR, CachePolicy, timing_cache_path
from harness.runtimes.tensorrt.model_checks import read_io_dtypes
from harness.runtimes.tensorrt.options import Precision, ShapeProfile, Typing, read_options
from harness.runtimes.trtexec.flags import (
    build_flags,
    check_extra_flags,
    error_lines,
    find_trtexec,
    merge_flags,
    read_outputs,
    read_profile,
    read_times,
    run_flags,
    run_trtexec,
)

MIN_ITERATIONS = 50
"""Inferences of one run of trtexec: starting it takes longer than they do."""
MAX_LEFTOVER_AGE_S = 1.0
"""Readings that are left over serve the next call within this time; later ones are taken anew."""


@dataclass(frozen=True, slots=True)
class _TrtexecEngine:
    """Serialized engine with the information to run it.

    Attributes:
        profiles: Shapes of dynamic inputs by name.
    """

    plan: Path
    profiles: Mapping[str, ShapeProfile]
    outputs: Mapping[str, np.dtype[Any]]
    inputs: Mapping[str, np.dtype[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrtexecHandle:
    """Path and version of trtexec, and its GPU."""

    program: str
    version: str
    device: Device

    @property
    def major(self) -> int:
        """Return the major version."""
        return int(self.version.partition(".")[0])


class TrtexecBenchmarker:
    """Build and time models with the program trtexec of TensorRT 10 or 11, each in a new process.

    Args:
        path: Path of the program; None: trtexec on PATH.
        precision: Precision of float operations; see benchmarker `tensorrt`.
        typing: "strong": operators run in the types of the file; "weak", for TensorRT 10 only: lower precisions are
            allowed.
        profiles: Shapes of dynamic inputs; see benchmarker `tensorrt`.
        workspace_gb: Scratch memory that kernels may use, in units of 10^9 bytes; None: all memory of the GPU.
        optimization_level: Effort of the builder, 0 to 5; None: trtexec's default.
        timing_cache: "cold", "shared" or "frozen"; see benchmarker `tensorrt`.
        timing_cache_file: File of the timing cache; None: one for each trtexec and kind of GPU in the cache folder.
        cuda_graph: Whether the engine is timed as a CUDA graph.
        warm_up_ms: Milliseconds of warm-up of each run of trtexec.
        timeout_s: Time limit of each run of trtexec in seconds.
        device: Number of the GPU.
        plugins: Libraries with plugins, for builds and runs (--staticPlugins).
        extra: Further arguments for builds and runs, for instance those of remote autotuning:
            `[--safe, --skipInference, "--remoteAutoTuningConfig=ssh://..."]`; --skipInference is left out of runs.
        profile: Whether layers are recorded in detail for `layers`; do not compare such engines.

    Raises:
        ValueError: A parameter has an unknown value, or a profile is invalid.
    """

    capabilities = Capabilities(dialect="tensorrt", interleaved=False)
    code_params = ("plugins", "extra", "timing_cache_file")
    program_params = ("path",)

    def __init__(
        self,
        *,
        path: str | None = None,
        precision: Precision = "auto",
        typing: Typing = "strong",
        profiles: Mapping[str, Any] | None = None,
        workspace_gb: float | None = None,
        optimization_level: int | None = None,
        timing_cache: CachePolicy = "shared",
        timing_cache_file: str | None = None,
        cuda_graph: bool = True,
        warm_up_ms: float = 200.0,
        timeout_s: float = 600.0,
        device: int = 0,
        plugins: tuple[str, ...] | list[str] = (),
        extra: tuple[str, ...] | list[str] = (),
        profile: bool = False,
    ) -> None:
        check_extra_flags(extra, 0)
        self._path, self._extra, self._device = path, tuple(extra), device
        self._plugins = tuple(plugins)
        self._options = read_options(
            precision, typing, profiles, workspace_gb, optimization_level, timing_cache, profile
        )
        self._cache_file, self._graph = timing_cache_file, cuda_graph
        self.warm_up_ms, self._timeout_s = warm_up_ms, timeout_s

    @cached_property
    def _trtexec_handle(self) -> _TrtexecHandle:
        """Return trtexec and the GPU, which are looked up at the first use."""
        device = open_device(self._device)[1]
        program, version = find_trtexec(self._path)
        tool = _TrtexecHandle(program=program, version=version, device=device)
        try:
            check_extra_flags(self._extra, tool.major)
        except ValueError as error:
            raise UserError(f"benchmarker 'trtexec': {error}") from error
        self._options.check_runtime(f"trtexec {version}", tool.major, device)
        return tool

    @cached_property
    def _plugin_libraries(self) -> tuple[Path, ...]:
        found = {name: Path(name).expanduser().resolve() for name in self._plugins}
        for name, path in found.items():
            if not path.is_file():
                raise UserError(f"plugins: {name}: no such file")
        return tuple(found.values())

    def build(self, candidate: Candidate, workdir: Path) -> Artifact:
        """Build the candidate's engine into the folder.

        Raises:
            BuildFailed: trtexec fails, takes too long, or the model is known to be refused.
            UserError: There is no trtexec or no GPU.
        """
        source = self._options.source(candidate.source(), workdir, self._trtexec_handle.device)
        plan = workdir / "model.plan"
        flags = build_flags(source.path, plan, source.options, self._trtexec_handle.major, quantized=source.has_qdq)
        output = self._run_trtexec([*flags, *self._cache_flags(workdir)], BuildFailed)
        if not plan.is_file():
            raise BuildFailed(f"trtexec wrote no engine: {error_lines(output)}")
        inputs, outputs = read_io_dtypes(source.structure)
        engine = _TrtexecEngine(plan=plan, profiles=source.options.profiles, inputs=inputs, outputs=outputs)
        return Artifact(engine=engine, info={"plan_bytes": plan.stat().st_size, "flags": flags[3:]})

    def cast(self, path: Path, folder: Path) -> Path:
        return self._options.write_cast_model(path, folder)

    @contextmanager
    def open(self, artifact: Artifact) -> Iterator[_TrtexecProbe]:
        """Open a probe that starts trtexec for every series of readings."""
        yield _TrtexecProbe(self, artifact.engine)

    def layers(self, artifact: Artifact) -> tuple[Layer, ...]:
        """Return the layers of the engine with their times from a run under trtexec's profiler.

        Raises:
            MeasureFailed: trtexec fails, or its files cannot be read.
        """
        folder = artifact.engine.plan.parent
        info, times = folder / "layers.json", folder / "profile.json"
        files = [f"--exportLayerInfo={info}", f"--exportProfile={times}"]
        if self._trtexec_handle.major < STRONG_TYPING_ONLY_MAJOR:
            files.append("--separateProfileRun")  # always so in 11
        self.trtexec(artifact.engine, [*files, f"--iterations={MIN_ITERATIONS}", "--duration=0"])
        try:
            rows = read_profile(times)
            return read_layers(info.read_text(encoding="utf-8"), rows)
        except OSError as error:
            raise MeasureFailed(f"trtexec wrote no layers: {error}") from error

    def describe(self) -> Mapping[str, Any]:
        """Return the facts that results record; see `harness.plugins.api.Benchmarker`.

        Raises:
            UserError: trtexec or a GPU is missing on this machine; the message has the remedy.
        """
        tool = self._trtexec_handle
        return {
            "name": "trtexec",
            "version": tool.version,
            "device": tool.device.name,
            "options": {
                **self._options.describe(tool.device),
                "cuda_graph": self._graph,
                "warm_up_ms": self.warm_up_ms,
                "extra": list(self._extra),
                **({"plugins": [path.name for path in self._plugin_libraries]} if self._plugin_libraries else {}),
            },
            **self._options.describe_float_precision(tool.device),
        }

    def gpu(self) -> str:
        return self._trtexec_handle.device.uuid

    def trtexec(self, engine: _TrtexecEngine, arguments: Sequence[str]) -> str:
        """Run an engine with further arguments of trtexec, and return what trtexec prints.

        Raises:
            MeasureFailed: trtexec fails or takes too long.
        """
        flags = run_flags(engine.plan, engine.profiles, self._trtexec_handle.major, graph=self._graph)
        return self._run_trtexec([*flags, *arguments], MeasureFailed)

    def _cache_flags(self, workdir: Path) -> list[str]:
        """Return the arguments for the timing cache; a frozen one is copied, because trtexec writes to it."""
        if self._options.timing_cache == "cold":
            return []
        default = timing_cache_path(cache_dir(), f"trtexec-{self._trtexec_handle.version}", self._trtexec_handle.device)
        file = Path(self._cache_file).expanduser() if self._cache_file else default
        if self._options.timing_cache == "frozen":
            if not file.is_file():
                raise UserError(f"timing cache {file}: no such file, and a frozen cache is never made; run shared once")
            file = Path(shutil.copy(file, workdir / "timing.cache"))
        file.parent.mkdir(parents=True, exist_ok=True)
        return [f"--timingCacheFile={file}"]

    def _run_trtexec(self, arguments: Sequence[str], failure: type[CandidateError]) -> str:
        plugins = [f"--staticPlugins={path}" for path in self._plugin_libraries]
        command = merge_flags([*arguments, f"--device={self._device}", *plugins], self._extra)
        return run_trtexec([self._trtexec_handle.program, *command], self._timeout_s, failure)


class _TrtexecProbe:
    """Probe of one engine, whose readings come from runs of trtexec."""

    def __init__(self, owner: TrtexecBenchmarker, engine: _TrtexecEngine) -> None:
        self._owner, self._engine = owner, engine
        self._left: deque[float] = deque()
        self._taken_s = 0.0

    def sample(self, n: int) -> Sequence[float]:
        """Return GPU compute times of n inferences in milliseconds."""
        if time.monotonic() - self._taken_s > MAX_LEFTOVER_AGE_S:
            self._left.clear()
        if len(self._left) < n:
            self._run_series(n)
        return [self._left.popleft() for _ in range(n)]

    def infer(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the outputs by name, with the six digits that trtexec writes; each call starts a process."""
        engine, folder = self._engine, self._engine.plan.parent
        if feeds.keys() != engine.inputs.keys():
            raise MeasureFailed(f"the engine's inputs are {', '.join(engine.inputs)}, but got {', '.join(feeds)}")
        files = []
        for index, (name, dtype) in enumerate(engine.inputs.items()):
            file = folder / f"input{index}.bin"
            file.write_bytes(np.ascontiguousarray(feeds[name], dtype).tobytes())
            files.append(f"'{name}':{file}")
        target = folder / "outputs.json"
        target.unlink(missing_ok=True)
        once = ["--iterations=1", "--duration=0", "--warmUp=0"]
        self._owner.trtexec(engine, [f"--loadInputs={','.join(files)}", f"--exportOutput={target}", *once])
        found = read_outputs(target)
        missing = [name for name in engine.outputs if name not in found]
        if missing:
            raise MeasureFailed(f"trtexec wrote no output {missing[0]!r}, but {', '.join(found)}")
        return {
            name: to_float32(np.asarray(found[name][1]).reshape(found[name][0]).astype(dtype))
            for name, dtype in engine.outputs.items()
        }

    def _run_series(self, n: int) -> None:
        times = self._engine.plan.parent / "times.json"
        times.unlink(missing_ok=True)
        wanted = max(MIN_ITERATIONS, n - len(self._left))
        warm_up_ms = self._owner.warm_up_ms
        flags = [f"--iterations={wanted}", "--duration=0", f"--warmUp={warm_up_ms:g}", f"--exportTimes={times}"]
        self._owner.trtexec(self._engine, flags)
        self._left.extend(read_times(times, warm_up_ms))
        self._taken_s = time.monotonic()
        if len(self._left) < n:
            raise MeasureFailed(f"trtexec gave {len(self._left)} readings where {n} were asked for")
