"""Latency on TensorRT 10.x and 11.x by their Python API, timed by CUDA events on the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from harness.base.errors import BuildFailed
from harness.base.paths import cache_dir
from harness.plugins.api import Artifact, Candidate, Capabilities, Layer
from harness.runtimes.cuda import CudaRuntime, Device, GpuMonitor, flush_bytes, open_device
from harness.runtimes.tensorrt.library import (
    SerializedEngine,
    TensorRTLibrary,
    TimingCache,
    build_plan,
    load_engine,
    open_library,
    timing_cache_path,
)
from harness.runtimes.tensorrt.options import CachePolicy, Precision, Typing, read_options
from harness.runtimes.tensorrt.session import EngineProbe, LoadedEngine, profile_layers

ENGINE_SUFFIXES = (".engine", ".plan", ".trt")
PROFILED_RUNS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class _TensorRTHandle:
    """Resources that need TensorRT and a GPU, created on first use."""

    library: TensorRTLibrary
    cuda: CudaRuntime
    device: Device
    cache: TimingCache


class TensorRTBenchmarker:
    """Benchmarker that builds engines by TensorRT's Python interface and times them on an NVIDIA GPU.

    Args:
        precision: Precision of float operations. "f32": IEEE FP32; "tf32": FP32 with TF32 multiplications, TensorRT's
            default; "f16" and "bf16": the ONNX file is cast first (strong typing), or TensorRT may use them (weak
            typing). "auto": the harness times the precisions of the GPU and uses the fastest one.
        typing: "strong": operators run in the types of the file; "weak", for TensorRT 10 only: lower precisions are
            allowed.
        profiles: Shapes of dynamic inputs, `{NAME: {min: 1x3x224x224, opt: ..., max: ...}}`; timed at `opt`.
        workspace_gb: Scratch memory that kernels may use, in units of 10^9 bytes; None: all memory of the GPU.
        optimization_level: Effort of the builder, 0 to 5; None: TensorRT's default.
        timing_cache: "cold": not used; "shared": read and extended; "frozen": only read, and it must exist.
        timing_cache_file: File of the timing cache; None: one for each TensorRT and kind of GPU in the cache folder.
        cuda_graph: Whether the engine is timed as a CUDA graph, without the host's work between kernels.
        cold_l2: Whether the L2 cache is overwritten before each inference; never compare with warm readings.
        plugins: Libraries with plugins.
        device: Number of the GPU.
        profile: Whether layers are recorded in detail for `layers`; do not compare such engines.

    Raises:
        ValueError: A parameter has an unknown value, or a profile is invalid.
    """

    capabilities = Capabilities(dialect="tensorrt")
    code_params = ("plugins", "timing_cache_file")

    def __init__(
        self,
        *,
        precision: Precision = "auto",
        typing: Typing = "strong",
        profiles: Mapping[str, Any] | None = None,
        workspace_gb: float | None = None,
        optimization_level: int | None = None,
        timing_cache: CachePolicy = "shared",
        timing_cache_file: str | None = None,
        cuda_graph: bool = True,
        cold_l2: bool = False,
        plugins: tuple[str, ...] | list[str] = (),
        device: int = 0,
        profile: bool = False,
    ) -> None:
        self._options = read_options(
            precision, typing, profiles, workspace_gb, optimization_level, timing_cache, profile
        )
        self._cache_file = timing_cache_file
        self._cuda_graph, self._cold_l2 = cuda_graph, cold_l2
        self._plugins, self._device = tuple(plugins), device

    @cached_property
    def _ready(self) -> _TensorRTHandle:
        """Return TensorRT and the GPU, opened at the first use.

        The GPU is opened first, because without one the messages of TensorRT are misleading.
        """
        cuda, device = open_device(self._device)
        library = open_library()
        self._options.check_runtime(f"TensorRT {library.version}", library.major, device)
        library.load_plugins(self._plugins)
        default = timing_cache_path(cache_dir(), library.version, device)
        path = Path(self._cache_file).expanduser() if self._cache_file else default
        cache = TimingCache(self._options.timing_cache, path)
        return _TensorRTHandle(library=library, cuda=cuda, device=device, cache=cache)

    def build(self, candidate: Candidate, workdir: Path) -> Artifact:
        """Build the candidate's engine, or load it if the candidate's file is an engine (.engine, .plan, .trt).

        Raises:
            BuildFailed: TensorRT refuses the model or is known to refuse it, or the file cannot be cast.
            UserError: TensorRT, the GPU or the timing cache cannot be used.
        """
        path = candidate.source()
        if path.suffix in ENGINE_SUFFIXES:
            return self.load(path)
        plan = self._serialized_engine(path, workdir)
        engine = load_engine(self._ready.library, plan.content, path.name)
        return Artifact(engine=engine, info={**plan.info, "layers": int(engine.num_layers)})

    def _serialized_engine(self, path: Path, workdir: Path) -> SerializedEngine:
        ready = self._ready
        source = self._options.source(path, workdir, ready.device)
        try:
            return build_plan(ready.library, source.path, source.options, ready.cache, quantized=source.has_qdq)
        except BuildFailed:
            ready.cuda.call("cudaDeviceSynchronize")  # ends this worker if the GPU is not usable after the build
            raise

    def save(self, candidate: Candidate, path: Path) -> None:
        """Write the candidate's engine to a file for `load`.

        Raises:
            BuildFailed: TensorRT refuses the model, or the file cannot be cast.
            UserError: TensorRT, the GPU or the timing cache cannot be used.
        """
        with TemporaryDirectory(prefix="qdq-engine-") as workdir:
            path.write_bytes(self._serialized_engine(candidate.source(), Path(workdir)).content)

    def load(self, path: Path) -> Artifact:
        """Load an engine that `save` or trtexec wrote, for this TensorRT and this kind of GPU only.

        Raises:
            BuildFailed: The file is no engine, or one of another TensorRT or GPU.
        """
        return Artifact(
            engine=load_engine(self._ready.library, _read_engine_file(path), path.name), info={"plan": path.name}
        )

    def cast(self, path: Path, folder: Path) -> Path:
        return self._options.write_cast_model(path, folder)

    @contextmanager
    def open(self, artifact: Artifact) -> Iterator[EngineProbe]:
        """Open a probe with inputs in the memory of the GPU.

        Raises:
            MeasureFailed: The engine does not run, or there is not enough GPU memory.
        """
        with EngineProbe(self._load_engine(artifact)) as probe:
            yield probe

    def layers(self, artifact: Artifact) -> tuple[Layer, ...]:
        """Return the layers of the engine in order, with times from runs under a profiler.

        Without `profile` a layer has only name and time, and not its type, precision, kernel and origin.

        Raises:
            MeasureFailed: The engine does not run, or cannot be inspected.
        """
        return profile_layers(self._load_engine(artifact), PROFILED_RUNS)

    def describe(self) -> Mapping[str, Any]:
        """Return the facts that results record; see `harness.plugins.api.Benchmarker`.

        Raises:
            UserError: There is no GPU, driver or TensorRT here: one sentence that says which and what to do.
        """
        ready = self._ready
        return {
            "name": "tensorrt",
            "version": ready.library.version,
            "device": ready.device.name,
            "options": {
                **self._options.describe(ready.device),
                "cuda_graph": self._cuda_graph,
                "l2": "cold" if self._cold_l2 else "warm",
                "plugins": [Path(name).name for name in self._plugins],
            },
            **self._options.describe_float_precision(ready.device),
        }

    def gpu(self) -> str:
        return self._ready.device.uuid

    def _load_engine(self, artifact: Artifact) -> LoadedEngine:
        ready = self._ready
        return LoadedEngine(
            library=ready.library,
            engine=artifact.engine,
            cuda=ready.cuda,
            clocks=GpuMonitor(ready.device.uuid),
            graph=self._cuda_graph,
            flush_bytes=flush_bytes(ready.device.l2_bytes, self._cold_l2),
        )


def _read_engine_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BuildFailed(f"{path.name}: cannot be read ({error.strerror or error})") from error
