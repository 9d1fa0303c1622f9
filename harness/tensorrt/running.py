"""A loaded engine with its buffers: timed on fixed inputs, and run on anybody's; and each layer's time, apart."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import ml_dtypes
import numpy as np

from harness.api import Array
from harness.cuda.clocks import Clocks
from harness.cuda.device import Cuda
from harness.cuda.timing import GpuTimer
from harness.errors import MeasureFailed
from harness.measure.host import plain
from harness.measure.sampling import fixed_inputs
from harness.tensorrt.library import Library
from harness.tensorrt.profiles import Profile, shown

__all__ = ["EngineProbe", "Loaded", "layer_times"]

HOST_READINGS = 5
"""Inferences whose time on the host's clock is put beside the GPU's."""
NUMPY: Mapping[str, Any] = {
    "FLOAT": np.float32, "HALF": np.float16, "BF16": ml_dtypes.bfloat16, "INT32": np.int32, "INT64": np.int64,
    "INT8": np.int8, "UINT8": np.uint8, "BOOL": np.bool_, "FP8": ml_dtypes.float8_e4m3fn,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What running an engine needs.

    Attributes:
        profiles: Of dynamic inputs.
        graph: Time it as a CUDA graph.
        flush_bytes: See `harness.cuda.timing.GpuTimer`.
    """

    library: Library
    engine: Any
    cuda: Cuda
    clocks: Clocks
    profiles: Mapping[str, Profile]
    graph: bool = True
    flush_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Port:
    """An input or output of an engine."""

    name: str
    dtype: np.dtype[Any]
    is_input: bool


class _Session:
    """An execution context and its device buffers, which grow where a shape needs it and are used again."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._call = loaded.cuda.call
        self._buffers: dict[str, tuple[Any, int]] = {}
        library = loaded.library
        library.said.clear()
        self.context = loaded.engine.create_execution_context()
        if self.context is None:
            raise MeasureFailed(f"TensorRT makes no execution context (out of GPU memory?): {library.words()}")
        self.ports = tuple(_ports(library.trt, loaded.engine))

    def close(self) -> None:
        """Free the buffers."""
        while self._buffers:
            self._call("cudaFree", self._buffers.popitem()[1][0])

    def load(self, feeds: Mapping[str, Array]) -> None:
        """Shapes and values of all inputs, and room for all outputs.

        Raises:
            MeasureFailed: An input is missing, unknown or of a shape that the engine does not take; no memory.
        """
        wanted = {port.name for port in self.ports if port.is_input}
        wrong = sorted(wanted ^ feeds.keys())
        if wrong:
            raise MeasureFailed(f"the engine's inputs are {', '.join(sorted(wanted))}, but got {', '.join(feeds)}")
        arrays = {}
        for port in self.ports:
            if port.is_input:
                arrays[port.name] = np.ascontiguousarray(feeds[port.name], port.dtype)
                self._shape(port.name, arrays[port.name].shape)
        for port in self.ports:
            self._room(port)
        kind = self._loaded.cuda.api.cudaMemcpyKind.cudaMemcpyHostToDevice
        for name, array in arrays.items():
            self._call("cudaMemcpy", self._buffers[name][0], array.ctypes.data, array.nbytes, kind)
        self._call("cudaDeviceSynchronize")  # a copy from pageable memory may return before it has arrived

    def results(self) -> dict[str, Array]:
        """Values of all outputs."""
        kind = self._loaded.cuda.api.cudaMemcpyKind.cudaMemcpyDeviceToHost
        found = {}
        for port in self.ports:
            if not port.is_input:
                array = np.empty(tuple(self.context.get_tensor_shape(port.name)), port.dtype)
                self._call("cudaMemcpy", array.ctypes.data, self._buffers[port.name][0], array.nbytes, kind)
                found[port.name] = array
        return found

    def enqueue(self, stream: int) -> None:
        """Queue one inference.

        Raises:
            MeasureFailed: TensorRT refuses.
        """
        if not self.context.execute_async_v3(stream):
            raise MeasureFailed(f"TensorRT cannot run the engine: {self._loaded.library.words()}")

    def _shape(self, name: str, shape: tuple[int, ...]) -> None:
        if name in self._loaded.profiles:
            self._loaded.profiles[name].admit(name, shape)
        elif shape != (fixed := tuple(int(size) for size in self._loaded.engine.get_tensor_shape(name))):
            raise MeasureFailed(f"input {name!r} is {shown(shape)}, the engine takes {shown(fixed)}")
        if not self.context.set_input_shape(name, shape):
            raise MeasureFailed(f"input {name!r}: {shown(shape)} is refused: {self._loaded.library.words()}")

    def _room(self, port: _Port) -> None:
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
            raise MeasureFailed(f"tensor {port.name!r}: its memory is refused: {self._loaded.library.words()}")


class EngineProbe:
    """An opened engine: one session that is timed, one that evaluators use; a context manager.

    Attributes:
        why_eager: See `harness.cuda.timing.GpuTimer`.
    """

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._open = ExitStack()
        self._scored: _Session | None = None
        self._stream: Any = None
        self._enqueue_ms: tuple[float, ...] = ()
        self.why_eager = ""

    def __enter__(self) -> EngineProbe:
        loaded = self._loaded
        with ExitStack() as opening:
            session = _Session(loaded)
            opening.callback(session.close)
            session.load(_fixed(session, loaded))
            timer = GpuTimer(loaded.cuda, session.enqueue, graph=loaded.graph, flush_bytes=loaded.flush_bytes)
            self._timer = opening.enter_context(timer)
            self.why_eager = timer.why_eager
            self._open = opening.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def sample(self, n: int) -> Sequence[float]:
        """GPU time of n inferences, by CUDA events."""
        readings = self._timer.read(n)
        self._enqueue_ms = readings.enqueue_ms
        return readings.gpu_ms

    def conditions(self) -> Mapping[str, float]:
        """The GPU's conditions now, and what the host adds: its time to queue, and from queuing to the end."""
        facts = self._loaded.clocks.read().facts()
        if self._enqueue_ms:
            facts["enqueue_ms"] = statistics.median(self._enqueue_ms)
        facts["end_to_end_ms"] = statistics.median(self._timer.end_to_end(HOST_READINGS))
        facts["cuda_graph"] = float(self._loaded.graph and not self.why_eager)
        return facts

    def infer(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """Outputs by name; floating-point ones as float32. Any shape that the profile takes."""
        call = self._loaded.cuda.call
        if self._scored is None:
            self._scored = _Session(self._loaded)
            self._open.callback(self._scored.close)
            self._stream = call("cudaStreamCreate")
            self._open.callback(call, "cudaStreamDestroy", self._stream)
        self._scored.load(feeds)
        self._scored.enqueue(int(self._stream))
        call("cudaStreamSynchronize", self._stream)
        return {name: _plain(array) for name, array in self._scored.results().items()}


def layer_times(loaded: Loaded, runs: int) -> dict[str, float]:
    """Mean time of each layer by name, in milliseconds, from runs of their own: a profiler slows what it watches.

    Raises:
        MeasureFailed: The engine does not run.
    """
    trt = loaded.library.trt
    spent: dict[str, float] = defaultdict(float)

    class Profiler(trt.IProfiler):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            spent[layer_name] += ms

    session, profiler = _Session(loaded), Profiler()
    call = loaded.cuda.call
    stream = call("cudaStreamCreate")
    try:
        session.load(_fixed(session, loaded))
        session.enqueue(int(stream))
        call("cudaStreamSynchronize", stream)
        session.context.profiler = profiler
        for _ in range(runs):
            session.enqueue(int(stream))
            call("cudaStreamSynchronize", stream)
    finally:
        call("cudaStreamDestroy", stream)
        session.close()
    return {name: total / runs for name, total in spent.items()}


def _fixed(session: _Session, loaded: Loaded) -> dict[str, Array]:
    """The inputs that engines are timed on; a dynamic one at its best shape."""
    types = {}
    for port in session.ports:
        if port.is_input:
            profile = loaded.profiles.get(port.name)
            shape = loaded.engine.get_tensor_shape(port.name) if profile is None else profile.opt
            known = port.dtype if port.dtype.kind in "fiub" else np.dtype(np.float32)
            types[port.name] = (known, tuple(int(size) for size in shape))
    return fixed_inputs(types)


def _ports(trt: Any, engine: Any) -> list[_Port]:
    found = []
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        kind = engine.get_tensor_dtype(name).name
        if kind not in NUMPY:
            raise MeasureFailed(f"tensor {name!r} is {kind}, which NumPy does not know")
        is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
        found.append(_Port(name, np.dtype(NUMPY[kind]), is_input))
    return found


def _plain(array: Array) -> Array:
    return array.astype(np.float32) if array.dtype.kind == "V" else plain(array)
