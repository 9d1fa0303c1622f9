"""A CUDA runtime without a GPU: memory of the host, one timeline a stream, and no function that cuda-python lacks.

Time is simulated: a call costs the host something, work runs on its stream when host and stream are ready for it, an
event is the moment when its stream gets there. So a timer that lets the host's gaps into its readings is found out.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np

# cuda-python 12.9 and 13.3, the functions and values that are in both.
NAMES = frozenset(
    """
    cudaEventCreate cudaEventCreateWithFlags cudaEventRecord cudaEventSynchronize cudaEventQuery
    cudaEventElapsedTime cudaEventDestroy cudaEventDefault cudaEventBlockingSync cudaEventDisableTiming
    cudaStreamCreate cudaStreamCreateWithFlags cudaStreamNonBlocking cudaStreamSynchronize cudaStreamDestroy
    cudaStreamBeginCapture cudaStreamCaptureMode cudaStreamCaptureModeThreadLocal cudaStreamEndCapture
    cudaGraphInstantiate cudaGraphInstantiateWithFlags cudaGraphUpload cudaGraphLaunch cudaGraphExecDestroy
    cudaGraphDestroy cudaMalloc cudaMallocAsync cudaFree cudaMallocHost cudaHostAlloc cudaFreeHost cudaMemcpy
    cudaMemcpyAsync cudaMemcpyKind cudaMemcpyHostToDevice cudaMemcpyDeviceToHost cudaMemsetAsync cudaMemGetInfo
    cudaSetDevice cudaGetDeviceCount cudaGetDeviceProperties cudaDeviceGetAttribute cudaDeviceAttr
    cudaDeviceSynchronize cudaDriverGetVersion cudaRuntimeGetVersion cudaGetErrorName cudaGetErrorString
    cudaGetLastError cudaError_t cudaSuccess cudaErrorMemoryAllocation cudaErrorInsufficientDriver cudaErrorNoDevice
    cudaErrorNotReady cudaErrorIllegalAddress cudaErrorStreamCaptureInvalidated cudaErrorStreamCaptureUnsupported
    """.split()  # noqa: SIM905
)


class Status(IntEnum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorInsufficientDriver = 35
    cudaErrorNoDevice = 100
    cudaErrorNotReady = 600
    cudaErrorIllegalAddress = 700
    cudaErrorStreamCaptureUnsupported = 900
    cudaErrorStreamCaptureInvalidated = 901


class FakeCuda:
    """Stands for the module cuda.bindings.runtime.

    Args:
        devices: How many there are.
        driver: Newest CUDA of the driver, 0: no driver.
        memory_bytes: Of the device.
        host_us: What a call costs the host.
        capability: Of the device.

    Attributes:
        last: The error that cudaGetLastError would take away.
        failing: What functions answer instead of doing their work.
    """

    cudaError_t = Status
    cudaStreamNonBlocking = 1
    cudaEventDefault = 0
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)

    def __init__(
        self,
        *,
        devices: int = 1,
        driver: int = 12080,
        memory_bytes: int = 2**30,
        host_us: float = 5.0,
        capability: tuple[int, int] = (8, 9),
    ) -> None:
        self.devices, self.driver, self.capability = devices, driver, capability
        self.memory_bytes, self.host_us = memory_bytes, host_us
        self.host_ms = 0.0
        self.calls: list[str] = []
        self.failing: dict[str, Status] = {}
        self.memory: dict[int, Any] = {}
        self.streams: dict[int, float] = {}
        self.events: dict[int, float] = {}
        self.graphs: dict[int, list[tuple[float, Callable[[], None]]]] = {}
        self.captured: dict[int, list[tuple[float, Callable[[], None]]]] = {}
        self.last = Status.cudaSuccess
        self._next = 1000

    def __getattr__(self, name: str) -> Any:
        if name in NAMES:
            raise NotImplementedError(f"the fake lacks {name}")
        raise AttributeError(f"cuda.bindings.runtime has no {name}")

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if not name.startswith("cuda") or not callable(found) or isinstance(found, type):
            return found
        assert name in NAMES, f"cuda-python has no {name}"

        def called(*args: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            self.host_ms += self.host_us / 1000
            status = self.failing.get(name, Status.cudaSuccess)
            if status:
                answer: tuple[Any, ...] = (status, None)
            else:
                answer = (Status.cudaSuccess, *found(*args)) if name not in DIRECT else found(*args)
            self.last = Status.cudaSuccess if name == "cudaGetLastError" else answer[0] or self.last
            return answer

        return called

    # What a runtime does to the device.

    def launch(self, stream: int, ms: float, work: Callable[[], None] = lambda: None) -> None:
        """Queue work of this duration; its results appear at once."""
        self.host_ms += self.host_us / 1000
        if stream in self.captured:
            self.captured[stream].append((ms, work))
            return
        self.streams[stream] = max(self.streams[stream], self.host_ms) + ms
        work()

    # The functions.

    def cudaGetDeviceCount(self) -> tuple[Any, ...]:
        if not self.driver:
            return Status.cudaErrorInsufficientDriver, 0
        if self.driver < 12000:
            return Status.cudaErrorInsufficientDriver, 0
        return (Status.cudaSuccess, self.devices) if self.devices else (Status.cudaErrorNoDevice, 0)

    def cudaDriverGetVersion(self) -> tuple[Any, ...]:
        return Status.cudaSuccess, self.driver

    def cudaRuntimeGetVersion(self) -> tuple[Any, ...]:
        return Status.cudaSuccess, 12090

    def cudaGetErrorName(self, status: int) -> tuple[Any, ...]:
        return Status.cudaSuccess, Status(status).name.encode()

    def cudaGetErrorString(self, status: int) -> tuple[Any, ...]:
        return Status.cudaSuccess, b"out of memory" if status == 2 else b"in the words of CUDA"

    def cudaGetLastError(self) -> tuple[Any, ...]:
        return (Status.cudaSuccess,)

    def cudaSetDevice(self, index: int) -> tuple[Any, ...]:
        assert 0 <= index < self.devices
        return ()

    def cudaGetDeviceProperties(self, index: int) -> tuple[Any, ...]:
        major, minor = self.capability
        return (
            SimpleNamespace(
                name=b"Fake GPU", uuid=SimpleNamespace(bytes=bytes(range(16))), major=major, minor=minor,
                l2CacheSize=2**20, totalGlobalMem=self.memory_bytes,
            ),
        )  # fmt: skip

    def cudaDeviceSynchronize(self) -> tuple[Any, ...]:
        self.host_ms = max([self.host_ms, *self.streams.values()])
        return ()

    def cudaMalloc(self, size: int) -> tuple[Any, ...]:
        if size + sum(block.nbytes for block in self.memory.values()) > self.memory_bytes:
            return Status.cudaErrorMemoryAllocation, None
        block = np.zeros(size, np.uint8)
        self.memory[block.ctypes.data] = block
        return Status.cudaSuccess, block.ctypes.data

    def cudaFree(self, pointer: int) -> tuple[Any, ...]:
        del self.memory[pointer]
        return ()

    def cudaMemcpy(self, to: int, source: int, size: int, kind: int) -> tuple[Any, ...]:
        device = to if kind == 1 else source
        assert size <= self.memory[device].nbytes, "a copy beyond the buffer"
        ctypes.memmove(to, source, size)
        return ()

    def cudaMemsetAsync(self, pointer: int, value: int, size: int, stream: int) -> tuple[Any, ...]:
        assert size <= self.memory[pointer].nbytes
        self.launch(stream, 0.5)
        return ()

    def cudaStreamCreate(self) -> tuple[Any, ...]:
        self._next += 1
        self.streams[self._next] = 0.0
        return (self._next,)

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Any, ...]:
        assert flags == 1
        return self.cudaStreamCreate()[-1:]

    def cudaStreamSynchronize(self, stream: int) -> tuple[Any, ...]:
        self.host_ms = max(self.host_ms, self.streams[stream])
        return ()

    def cudaStreamDestroy(self, stream: int) -> tuple[Any, ...]:
        del self.streams[stream]
        return ()

    def cudaEventCreateWithFlags(self, flags: int) -> tuple[Any, ...]:
        assert flags == 0, "an event that cannot be timed"
        self._next += 1
        self.events[self._next] = -1.0
        return (self._next,)

    def cudaEventRecord(self, event: int, stream: int) -> tuple[Any, ...]:
        self.events[event] = max(self.streams[stream], self.host_ms)
        return ()

    def cudaEventSynchronize(self, event: int) -> tuple[Any, ...]:
        self.host_ms = max(self.host_ms, self.events[event])
        return ()

    def cudaEventQuery(self, event: int) -> tuple[Any, ...]:
        return (Status.cudaSuccess if self.events[event] <= self.host_ms else Status.cudaErrorNotReady,)

    def cudaEventElapsedTime(self, start: int, end: int) -> tuple[Any, ...]:
        assert self.events[end] <= self.host_ms, "read before the event has happened"
        return (self.events[end] - self.events[start],)

    def cudaEventDestroy(self, event: int) -> tuple[Any, ...]:
        del self.events[event]
        return ()

    def cudaStreamBeginCapture(self, stream: int, mode: int) -> tuple[Any, ...]:
        assert mode == 1
        self.captured[stream] = []
        return ()

    def cudaStreamEndCapture(self, stream: int) -> tuple[Any, ...]:
        work = self.captured.pop(stream)
        self._next += 1
        self.graphs[self._next] = work
        return (self._next,)

    def cudaGraphInstantiate(self, graph: int, flags: int) -> tuple[Any, ...]:
        self._next += 1
        self.graphs[self._next] = self.graphs[graph]
        return (self._next,)

    def cudaGraphUpload(self, graph: int, stream: int) -> tuple[Any, ...]:
        assert graph in self.graphs
        return ()

    def cudaGraphLaunch(self, graph: int, stream: int) -> tuple[Any, ...]:
        for ms, work in self.graphs[graph]:
            self.streams[stream] = max(self.streams[stream], self.host_ms) + ms
            work()
        return ()

    def cudaGraphExecDestroy(self, graph: int) -> tuple[Any, ...]:
        del self.graphs[graph]
        return ()

    def cudaGraphDestroy(self, graph: int) -> tuple[Any, ...]:
        del self.graphs[graph]
        return ()


DIRECT = frozenset(
    """
    cudaGetDeviceCount cudaDriverGetVersion cudaRuntimeGetVersion cudaGetErrorName cudaGetErrorString
    cudaGetLastError cudaMalloc cudaEventQuery
    """.split()  # noqa: SIM905
)
"""Functions of the fake that give their status themselves."""
