"""Latency on TensorRT 10.x and 11.x by their Python API, timed by CUDA events on the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from harness.base.errors import BuildFailed
from harness.plugins.api import Artifact, Candidate, Capabilities, Layer
from harness.runtimes.cuda import flush_bytes, open_device
from harness.runtimes.tensorrt.library import TensorRTHandle, TimingCache, build_plan, load_engine, open_library
from harness.runtimes.tensorrt.options import TensorRTParameters
from harness.runtimes.tensorrt.session import EngineProbe, profile_layers

ENGINE_SUFFIXES = (".engine", ".plan", ".trt")
PROFILED_RUNS = 50


@dataclass(eq=False, kw_only=True)
class TensorRTBenchmarker(TensorRTParameters):
    """Benchmarker that builds engines by TensorRT's Python interface and times them on an NVIDIA GPU.

    Args:
        cold_l2: Whether the L2 cache is overwritten before each inference; never compare with warm readings. Other
            parameters are those of `harness.runtimes.tensorrt.options.TensorRTParameters`.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(dialect="tensorrt", tensors_only=True, tunes_builds=True)
    code_params: ClassVar[tuple[str, ...]] = ("plugins", "timing_cache_file")
    cold_l2: bool = False

    @cached_property
    def _ready(self) -> TensorRTHandle:
        """Return TensorRT and the GPU, opened at the first use.

        The GPU is opened first, because without one the messages of TensorRT are misleading.
        """
        cuda, device = open_device(self.device)
        library = open_library()
        self.check_runtime(f"TensorRT {library.version}", library.major, device)
        library.load_plugins(self.plugin_paths)
        cache = TimingCache(self.timing_cache, self.timing_cache_path(library.version, device))
        return TensorRTHandle(library=library, cuda=cuda, device=device, cache=cache)

    def build(self, candidate: Candidate, workdir: Path) -> Artifact:
        """Build the candidate's engine, or load it if the candidate's file is an engine (.engine, .plan, .trt).

        Raises:
            BuildFailed: TensorRT refuses the model or is known to refuse it, or the file cannot be cast.
            UserError: TensorRT, the GPU or the timing cache cannot be used.
        """
        path = candidate.source()
        if path.suffix in ENGINE_SUFFIXES:
            return self.load(path)
        content, info = self._build_plan(path, workdir)
        engine = load_engine(self._ready.library, content, path.name)
        return Artifact(engine=engine, info={**info, "layers": int(engine.num_layers)})

    def _build_plan(self, path: Path, workdir: Path) -> tuple[bytes, dict[str, Any]]:
        ready = self._ready
        source = self.source(path, workdir, ready.device)
        try:
            return build_plan(ready.library, source, self, ready.cache)
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
            path.write_bytes(self._build_plan(candidate.source(), Path(workdir))[0])

    def load(self, path: Path) -> Artifact:
        """Load an engine that `save` or trtexec wrote, for this TensorRT and this kind of GPU only.

        Raises:
            BuildFailed: The file is no engine, or one of another TensorRT or GPU.
        """
        try:
            content = path.read_bytes()
        except OSError as error:
            raise BuildFailed(f"{path.name}: cannot be read ({error.strerror or error})") from error
        return Artifact(engine=load_engine(self._ready.library, content, path.name), info={"plan": path.name})

    @contextmanager
    def open(self, artifact: Artifact) -> Iterator[EngineProbe]:
        """Open a probe with inputs in the memory of the GPU.

        Raises:
            MeasureFailed: The engine does not run, or there is not enough GPU memory.
        """
        ready = self._ready
        flushed = flush_bytes(ready.device.l2_bytes, self.cold_l2)
        with EngineProbe(ready, artifact.engine, graph=self.cuda_graph, flush_bytes=flushed) as probe:
            yield probe

    def layers(self, artifact: Artifact) -> tuple[Layer, ...]:
        """Return the layers of the engine in order, with times from runs under a profiler.

        Without `profile` a layer has only name and time, and not its type, precision, kernel and origin.

        Raises:
            MeasureFailed: The engine does not run, or cannot be inspected.
        """
        return profile_layers(self._ready, artifact.engine, PROFILED_RUNS)

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
                **self.describe_options(ready.device),
                "cuda_graph": self.cuda_graph,
                "l2": "cold" if self.cold_l2 else "warm",
                "plugins": [Path(name).name for name in self.plugins],
            },
            **self.describe_float_precision(ready.device),
        }

    def gpu(self) -> str:
        return self._ready.device.uuid
