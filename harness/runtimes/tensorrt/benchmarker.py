"""Latency on TensorRT 10.x and 11.x by their Python API, timed by CUDA events on the device."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from harness.base.errors import BuildFailed, MeasureFailed
from harness.measure.sampling import make_fixed_inputs
from harness.plugins.api import Array, Artifact, Candidate, Capabilities, Layer
from harness.runtimes.cuda import GpuMonitor, GpuTimer, flush_bytes, open_device
from harness.runtimes.host_clock import to_float32
from harness.runtimes.tensorrt.library import (
    TensorRTHandle,
    TimingCache,
    build_plan,
    load_engine,
    open_library,
    read_layers,
)
from harness.runtimes.tensorrt.options import Shape, ShapeProfile, TensorRTParameters, format_shape

NUMPY_TYPES: Mapping[str, Any] = {
    "FLOAT": np.float32, "HALF": np.float16, "BF16": ml_dtypes.bfloat16, "INT32": np.int32, "INT64": np.int64,
    "INT8": np.int8, "UINT8": np.uint8, "BOOL": np.bool_, "FP8": ml_dtypes.float8_e4m3fn,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _EngineTensor:
    """Input or output of an engine.

    Attributes:
        shape: Shape in the engine, with -1 for dynamic sizes.
        profile: Profile of an input with a dynamic shape; None for other tensors.
    """

    name: str
    dtype: np.dtype[Any]
    is_input: bool
    shape: Shape
    profile: ShapeProfile | None


class ExecutionSession:
    """Execution context with a stream and buffers, which grow with the shapes; a context manager.

    Attributes:
        context: TensorRT's execution context.
        stream: Handle of the CUDA stream of this session.
    """

    def __init__(self, ready: TensorRTHandle, engine: Any) -> None:
        self._library, self._api, self._engine = ready.library, ready.cuda.api, engine
        self._call = ready.cuda.call
        self._open = ExitStack()
        self._buffers: dict[str, tuple[Any, int]] = {}
        self._ports = tuple(_engine_tensors(ready.library.trt, engine))

    def __enter__(self) -> ExecutionSession:
        library = self._library
        with ExitStack() as opened:
            library.messages.clear()
            self.context = self._engine.create_execution_context()
            if self.context is None:
                raise MeasureFailed(
                    f"TensorRT makes no execution context (out of GPU memory?): {library.drain_messages()}"
                )
            stream = self._call("cudaStreamCreateWithFlags", self._api.cudaStreamNonBlocking)
            opened.callback(self._call, "cudaStreamDestroy", stream)
            self.stream = int(stream)
            opened.callback(lambda: [self._call("cudaFree", pointer) for pointer, _ in self._buffers.values()])
            self._open = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._open:
            self._call("cudaStreamSynchronize", self.stream)

    def load_inputs(self, feeds: Mapping[str, Array]) -> None:
        """Set shapes and values of all inputs by name, and allocate all outputs.

        Raises:
            MeasureFailed: An input is missing, unknown or has a shape that the engine does not accept, or there is not
                enough memory.
        """
        inputs = {port.name: port for port in self._ports if port.is_input}
        if inputs.keys() != feeds.keys():
            raise MeasureFailed(f"the engine's inputs are {', '.join(sorted(inputs))}, but got {', '.join(feeds)}")
        arrays = {name: np.asarray(feeds[name], port.dtype, order="C") for name, port in inputs.items()}
        for name, array in arrays.items():
            port = inputs[name]
            if port.profile is not None and not port.profile.covers(array.shape):
                raise MeasureFailed(f"input {name!r} is {format_shape(array.shape)}, the profile takes {port.profile}")
            if port.profile is None and array.shape != port.shape:
                raise MeasureFailed(
                    f"input {name!r} is {format_shape(array.shape)}, the engine takes {format_shape(port.shape)}"
                )
            if not self.context.set_input_shape(name, array.shape):
                words = self._library.drain_messages()
                raise MeasureFailed(f"input {name!r}: {format_shape(array.shape)} is refused: {words}")
        for port in self._ports:
            self._ensure_buffer(port)
        kind = self._api.cudaMemcpyKind.cudaMemcpyHostToDevice
        for name, array in arrays.items():
            self._call("cudaMemcpy", self._buffers[name][0], array.ctypes.data, array.nbytes, kind)
        self._call("cudaDeviceSynchronize")  # a copy from pageable memory may return before it has arrived

    def load_timing_inputs(self) -> None:
        """Set the inputs for timing; dynamic ones have the shape `opt` of their profile.

        Raises:
            MeasureFailed: There is not enough memory.
        """
        types = {}
        for port in self._ports:
            if port.is_input:
                known = port.dtype if port.dtype.kind in "fiub" else np.dtype(np.float32)
                types[port.name] = (known, port.shape if port.profile is None else port.profile.opt)
        self.load_inputs(make_fixed_inputs(types))

    def enqueue(self, stream: int) -> None:
        """Queue one inference on the stream with a handle, without waiting for it.

        Raises:
            MeasureFailed: TensorRT refuses.
        """
        if not self.context.execute_async_v3(stream):
            raise MeasureFailed(f"TensorRT cannot run the engine: {self._library.drain_messages()}")

    def run(self) -> None:
        """Run one inference on its own stream and wait for it.

        Raises:
            MeasureFailed: TensorRT refuses.
        """
        self.enqueue(self.stream)
        self._call("cudaStreamSynchronize", self.stream)

    def copy_outputs(self) -> dict[str, Array]:
        """Return the values of all outputs of the last inference by name."""
        kind = self._api.cudaMemcpyKind.cudaMemcpyDeviceToHost
        found = {}
        for port in self._ports:
            if not port.is_input:
                array = np.empty(tuple(self.context.get_tensor_shape(port.name)), port.dtype)
                self._call("cudaMemcpy", array.ctypes.data, self._buffers[port.name][0], array.nbytes, kind)
                found[port.name] = array
        return found

    def _ensure_buffer(self, port: _EngineTensor) -> None:
        shape = tuple(int(size) for size in self.context.get_tensor_shape(port.name))
        if any(size < 0 for size in shape):
            raise MeasureFailed(f"output {port.name!r}: its size depends on the data, so it cannot be bound beforehand")
        needed = max(1, int(np.prod(shape, dtype=np.int64)) * port.dtype.itemsize)
        pointer, size = self._buffers.get(port.name, (None, 0))
        if size < needed:
            if pointer is not None:
                del self._buffers[port.name]
                self._call("cudaFree", pointer)
            pointer = self._call("cudaMalloc", needed)
            self._buffers[port.name] = (pointer, needed)
        if not self.context.set_tensor_address(port.name, int(pointer)):
            raise MeasureFailed(f"tensor {port.name!r}: its memory is refused: {self._library.drain_messages()}")


def _engine_tensors(trt: Any, engine: Any) -> list[_EngineTensor]:
    found = []
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        kind = engine.get_tensor_dtype(name).name
        if kind not in NUMPY_TYPES:
            raise MeasureFailed(f"tensor {name!r} is {kind}, which NumPy does not know")
        if engine.get_tensor_location(name) != trt.TensorLocation.DEVICE:
            raise MeasureFailed(
                f"tensor {name!r} holds a shape and not data; fix the shapes of the model, so that it is computed away"
            )
        if engine.get_tensor_format(name) != trt.TensorFormat.LINEAR:
            raise MeasureFailed(
                f"tensor {name!r} has the layout {engine.get_tensor_format_desc(name)}, but only linear ones can be "
                "fed and read: build the engine without --inputIOFormats and --outputIOFormats"
            )
        shape = tuple(int(size) for size in engine.get_tensor_shape(name))
        is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
        profile = None
        if is_input and -1 in shape:  # read from the engine, because another program may have built it
            low, best, high = (tuple(map(int, each)) for each in engine.get_tensor_profile_shape(name, 0))
            profile = ShapeProfile(min=low, opt=best, max=high)
        found.append(_EngineTensor(name, np.dtype(NUMPY_TYPES[kind]), is_input, shape, profile))
    return found


HOST_TIMING_RUNS = 5
"""Number of inferences timed with the host's clock in addition to the GPU's."""


class EngineProbe:
    """Open engine with one session for timing and one for evaluators; a context manager.

    Attributes:
        why_eager: Reason why the engine is not timed as a CUDA graph, or "".
    """

    def __init__(self, ready: TensorRTHandle, engine: Any, *, graph: bool, flush_bytes: int) -> None:
        self._ready, self._engine, self._graph, self._flush_bytes = ready, engine, graph, flush_bytes
        self._clocks = GpuMonitor(ready.device.uuid)
        self._open = ExitStack()
        self._scored: ExecutionSession | None = None
        self._host: dict[str, float] = {}
        self.why_eager = ""

    def __enter__(self) -> EngineProbe:
        with ExitStack() as opened:
            session = opened.enter_context(ExecutionSession(self._ready, self._engine))
            session.load_timing_inputs()
            timer = GpuTimer(self._ready.cuda, session.enqueue, graph=self._graph, flush_bytes=self._flush_bytes)
            self._timer = opened.enter_context(timer)
            self.why_eager = timer.why_eager
            self._open = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def sample(self, n: int) -> Sequence[float]:
        """Return GPU times of n inferences in milliseconds, by CUDA events."""
        readings = self._timer.read(n)
        self._clocks.sample()
        self._host = {"enqueue_ms": statistics.median(readings.enqueue_ms), "host_bound": readings.host_bound}
        return readings.gpu_ms

    def conditions(self) -> Mapping[str, float]:
        """Return the conditions of the GPU during sampling, and the overhead of the host for the last readings.

        The overhead is the host's time to queue an inference (`enqueue_ms`), the share of inferences for which the GPU
        may have waited for the host (`host_bound`), and the time from queuing to completion (`end_to_end_ms`).
        """
        facts = {**self._clocks.take_facts(), **self._host}
        facts["end_to_end_ms"] = statistics.median(self._timer.end_to_end(HOST_TIMING_RUNS))
        facts["cuda_graph"] = float(self._graph and not self.why_eager)
        return facts

    def infer(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the outputs by name, floating-point ones as float32; inputs may have any shape within their profile.

        Raises:
            MeasureFailed: Inputs do not fit the engine, or it does not run.
        """
        if self._scored is None:
            self._scored = self._open.enter_context(ExecutionSession(self._ready, self._engine))
        self._scored.load_inputs(feeds)
        self._scored.run()
        outputs = self._scored.copy_outputs().items()
        # NumPy calls types of other packages, such as bfloat16, void.
        return {
            name: array.astype(np.float32) if array.dtype.kind == "V" else to_float32(array) for name, array in outputs
        }


def profile_layers(ready: TensorRTHandle, engine: Any, runs: int) -> tuple[Layer, ...]:
    """Return the layers of an engine with their mean times over `runs` inferences.

    Raises:
        MeasureFailed: The engine does not run, or cannot be inspected.
    """
    trt = ready.library.trt
    spent_ms: dict[str, float] = defaultdict(float)

    class Profiler(trt.IProfiler):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            spent_ms[layer_name] += ms

    with ExecutionSession(ready, engine) as session:
        session.load_timing_inputs()
        session.run()
        profiler = Profiler()
        session.context.profiler = profiler
        for _ in range(runs):
            session.run()
        inspector: Any = engine.create_engine_inspector()
        inspector.execution_context = session.context  # needed if shapes are dynamic
        text: str = inspector.get_engine_information(trt.LayerInformationFormat.JSON)
    return read_layers(text, {name: total / runs for name, total in spent_ms.items()})


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
