"""CUDA by cuda-python: errors as exceptions, and a message that explains why no GPU can be used.

The module can be imported without a driver.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from harness.base.errors import CandidateError, MeasureFailed, UserError, WorkerUnusable, install_hint

INSTALL_HINT = f"{install_hint('tensorrt')} brings cuda-python"
STICKY_ERROR_CODES = frozenset((214, 700, 702, 710, 714, 715, 716, 717, 718, 719))
"""Memory error, illegal address, time-out, assert, stack, instruction, alignment, address space, program counter,
launch failure: driver_types.h says that "the process must be terminated and relaunched"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """GPU and its properties.

    Attributes:
        index: Number of the GPU in CUDA.
        uuid: Identifier in the form of nvidia-smi, "GPU-...".
        capability: Compute capability, for instance (8, 9).
        driver: Newest version of CUDA that the driver supports, for instance "12.8".
        l2_bytes: Size of the L2 cache; 0 if the device does not report it.
    """

    index: int
    name: str
    uuid: str
    capability: tuple[int, int]
    l2_bytes: int
    memory_bytes: int
    driver: str


class CudaRuntime:
    """CUDA's runtime API on one device.

    Args:
        api: Module `cuda.bindings.runtime`.
        device: Number of the GPU, which becomes the current device of this thread.
    """

    def __init__(self, api: Any, device: int = 0) -> None:
        self.api = api
        self.call("cudaSetDevice", device)

    def call(self, function: str, *args: Any) -> Any:
        """Call a function by its name, check its status and return its results without the status.

        Returns:
            None, the only result, or a list of several.

        Raises:
            MeasureFailed: The function failed; the message has its name, and name and text of CUDA's error.
            WorkerUnusable: After the error this process can no longer use the GPU.
        """
        status, *results = getattr(self.api, function)(*args)
        if int(status):
            self.api.cudaGetLastError()  # clears the error, which a later launch (by TensorRT) would report as its own
            text = f"{function}: {_format_error(self.api, status)}"
            if int(status) in STICKY_ERROR_CODES:
                raise WorkerUnusable(f"CUDA: {text}; this process cannot use the GPU any more")
            raise MeasureFailed(f"CUDA: {text}")
        return None if not results else results[0] if len(results) == 1 else results


def import_runtime() -> Any:
    """Return cuda-python's bindings of the CUDA runtime, for versions 12.6 to 13.

    Raises:
        UserError: cuda-python is not installed, or too old.
    """
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise UserError(
            f"cuda-python >= 12.6 is missing ({error}); on a machine with an NVIDIA GPU {INSTALL_HINT}"
        ) from error
    return runtime


def open_device(index: int = 0) -> tuple[CudaRuntime, Device]:
    """Open the GPU with a number in CUDA, and return the runtime's API on it and its properties.

    Raises:
        UserError: There is no driver, the driver is too old, or there is no such device.
    """
    api = import_runtime()
    status, count = api.cudaGetDeviceCount()
    if int(status) or not count:
        raise UserError(_explain_no_device(api, status))
    if not 0 <= index < count:
        raise UserError(f"device: 0 to {count - 1} (the GPUs that CUDA lists here), but got {index}")
    try:
        cuda = CudaRuntime(api, index)
        properties = cuda.call("cudaGetDeviceProperties", index)
        driver = _format_version(cuda.call("cudaDriverGetVersion"))
    except MeasureFailed as error:
        raise UserError(
            f"GPU {index} cannot be used: {error}; see nvidia-smi (a compute mode of EXCLUSIVE_PROCESS leaves no room "
            "for worker processes: nvidia-smi -c DEFAULT)"
        ) from error
    return cuda, Device(
        index=index,
        name=properties.name.decode(errors="replace").rstrip("\0"),
        uuid=f"GPU-{UUID(bytes=bytes(properties.uuid.bytes))}",
        capability=(int(properties.major), int(properties.minor)),
        l2_bytes=int(properties.l2CacheSize),
        memory_bytes=int(properties.totalGlobalMem),
        driver=driver,
    )


def _explain_no_device(api: Any, status: Any) -> str:
    """Explain why no device can be used; CUDA reports "insufficient driver" for an old and for a missing driver."""
    failed, driver = api.cudaDriverGetVersion()
    _, built_for = api.cudaRuntimeGetVersion()
    if int(failed) or not driver:
        return "no NVIDIA driver is loaded on this machine; install one, then check it by nvidia-smi"
    code = api.cudaError_t
    if status == code.cudaErrorInsufficientDriver:
        return (
            f"the NVIDIA driver is too old: it knows CUDA {_format_version(driver)}, cuda-python here needs "
            f"{_format_version(built_for)}; update the driver, or pip install 'cuda-python<{built_for // 1000}'"
        )
    if status == code.cudaErrorNoDevice or not int(status):
        return "no NVIDIA GPU is visible; check nvidia-smi and the variable CUDA_VISIBLE_DEVICES"
    return f"CUDA finds no usable GPU: {_format_error(api, status)}"


def _format_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _format_error(api: Any, status: Any) -> str:
    """Format CUDA's name of an error and its text, for instance "cudaErrorMemoryAllocation (out of memory)"."""
    texts = (api.cudaGetErrorName(status)[1], api.cudaGetErrorString(status)[1])
    name, text = (each.decode(errors="replace") if isinstance(each, bytes) else str(each) for each in texts)
    return f"{name} ({text})"


THROTTLE_REASONS: Mapping[int, str] = {
    0x4: "power_cap",
    0x8: "hardware",
    0x20: "heat_software",
    0x40: "heat_hardware",
    0x80: "power_brake",
}
"""Bits of NVML's clock event reasons that make readings worse (nvml.h); idleness and wanted clocks are none."""
MIN_SAMPLE_INTERVAL_S = 0.02
"""A look takes up to a millisecond: there are no more than this allows."""


_WORSE_CONDITIONS: Mapping[str, Callable[[float, float], float]] = {
    "gpu_mhz": min,
    "gpu_memory_mhz": min,
    "gpu_temperature_c": max,
    "gpu_power_w": max,
}
"""Function that returns the worse of two values of a condition, by its name in records."""


class GpuMonitor:
    """Monitor of the conditions of a GPU; without NVML (nvidia-ml-py, or a driver) there are none.

    Args:
        uuid: UUID of the GPU, "GPU-...", because CUDA and NVML number devices differently.
    """

    def __init__(self, uuid: str) -> None:
        self._worst: dict[str, float] = {}
        self._looked_s = -math.inf
        self._nvml: Any = None
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except pynvml.NVMLError:
            return
        self._nvml = pynvml

    def sample(self) -> None:
        """Read the current conditions between readings, at most every 20 ms; `take_facts` returns the worst ones."""
        if self._nvml is None or time.monotonic() - self._looked_s < MIN_SAMPLE_INTERVAL_S:
            return
        nvml, handle = self._nvml, self._handle
        values = {
            "gpu_mhz": self._query(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            "gpu_memory_mhz": self._query(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
            "gpu_temperature_c": self._query(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            "gpu_power_w": self._query(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
        }
        for name, value in values.items():
            if value is not None:
                self._worst[name] = _WORSE_CONDITIONS[name](self._worst.get(name, value), float(value))
        bits = self._query(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        if bits is None:  # the name in older drivers
            bits = self._query(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        self._worst |= {f"gpu_held_back_{reason}": 1.0 for bit, reason in THROTTLE_REASONS.items() if (bits or 0) & bit}
        self._looked_s = time.monotonic()

    def take_facts(self) -> dict[str, float]:
        """Return the worst conditions since the last call by name; {} without NVML.

        Clocks are in MHz, the temperature in °C, the power in W. Each throttle reason is 1 as `gpu_held_back_REASON`,
        and `gpu_held_back` is their number.
        """
        self._looked_s = -math.inf
        self.sample()
        worst, self._worst = self._worst, {}
        if "gpu_mhz" in worst:
            worst["gpu_held_back"] = float(sum(name.startswith("gpu_held_back_") for name in worst))
        return worst

    def _query(self, probe: Callable[[], Any]) -> Any:
        try:
            return probe()
        except (self._nvml.NVMLError, AttributeError):  # the latter: an older nvidia-ml-py
            return None


Enqueue = Callable[[int], None]
"""Queues one inference on the stream with this handle and returns; raises where it is refused."""

QUERIES_IN_FLIGHT = 2
"""Queries in flight."""
LEAD_IN_QUERIES = 2
"""Queries ahead of the first that counts: it must not be the one that finds the stream empty."""
L2_FLUSH_FACTOR = 2
"""Times the L2 cache that is overwritten to make it cold."""
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTimings:
    """Times of consecutive queries (inferences) in milliseconds.

    Attributes:
        gpu_ms: Time of each query on the device, by events.
        enqueue_ms: Time of the host to queue each query.
        device_waited: Whether the device reached a query before all of it was queued. Then it may have waited for the
            host, so that `gpu_ms` contains time of the host.
    """

    gpu_ms: tuple[float, ...]
    enqueue_ms: tuple[float, ...]
    device_waited: tuple[bool, ...]

    @property
    def host_bound(self) -> float:
        """Return the share (0 to 1) of the queries during which the device may have waited for the host."""
        return sum(self.device_waited) / len(self.device_waited)


class GpuTimer:
    """Timer of a function that queues one query (inference) on a stream; a context manager.

    Args:
        enqueue: Function that is timed, given the handle of a stream; addresses and shapes must not change while the
            timer is open.
        graph: Whether the query is captured as a CUDA graph, which is then timed; if that fails, the function is timed
            and `why_eager` has the reason.
        flush_bytes: Number of bytes that are overwritten before each query, outside of its events, so that the L2 cache
            is cold; 0: none. Such readings are not comparable with warm ones.
        stream: Stream that the function uses; None: a new one.

    Attributes:
        why_eager: Reason why there is no CUDA graph; "" if there is one, or none was requested.
    """

    def __init__(
        self, cuda: CudaRuntime, enqueue: Enqueue, *, graph: bool = True, flush_bytes: int = 0, stream: Any = None
    ) -> None:
        self._cuda = cuda
        self._enqueue = enqueue
        self._wanted = graph
        self._flush_bytes = flush_bytes
        self._given = stream
        self._open = ExitStack()
        self._events: list[tuple[object, object]] = []
        self._graph: object | None = None
        self._scratch: object | None = None
        self.why_eager = ""

    def __enter__(self) -> GpuTimer:
        api, events = self._cuda.api, QUERIES_IN_FLIGHT + 1
        with ExitStack() as opened:  # after a failure, releases the resources that were created before

            def create(function: str, *args: object, release: str) -> object:
                made: object = self._cuda.call(function, *args)
                opened.callback(self._cuda.call, release, made)
                return made

            def event() -> object:
                return create("cudaEventCreateWithFlags", api.cudaEventDefault, release="cudaEventDestroy")

            self._stream = self._given
            if self._given is None:  # the default stream would synchronize with others
                flags = api.cudaStreamNonBlocking
                self._stream = create("cudaStreamCreateWithFlags", flags, release="cudaStreamDestroy")
            self._events = [(event(), event()) for _ in range(events)]
            if self._flush_bytes:
                self._scratch = create("cudaMalloc", self._flush_bytes, release="cudaFree")
            self._enqueue(int(self._stream))  # first run: lazy loading and allocation
            self._cuda.call("cudaStreamSynchronize", self._stream)
            if self._wanted:
                try:
                    self._graph = self._instantiate_graph(opened)
                except CandidateError as error:
                    api.cudaGetLastError()  # clears the error, which the next call would report again
                    self.why_eager = str(error)
                    _logger.warning("no CUDA graph: %s", error)
            self._open = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._open:
            self._cuda.call("cudaStreamSynchronize", self._stream)

    def read(self, n: int) -> GpuTimings:
        """Time n queries.

        Raises:
            MeasureFailed: A call of CUDA or the timed function fails.
        """
        call, api, queries = self._cuda.call, self._cuda.api, n + LEAD_IN_QUERIES
        gpu_ms, enqueue_ms, waited = [], [], []
        for number in range(queries + QUERIES_IN_FLIGHT):
            if number >= QUERIES_IN_FLIGHT:
                begin, end = self._events[(number - QUERIES_IN_FLIGHT) % len(self._events)]
                call("cudaEventSynchronize", end)
                gpu_ms.append(float(call("cudaEventElapsedTime", begin, end)))
            if number >= queries:
                continue
            begin, end = self._events[number % len(self._events)]
            if self._scratch is not None:
                call("cudaMemsetAsync", self._scratch, number % 256, self._flush_bytes, self._stream)
            call("cudaEventRecord", begin, self._stream)
            start_ns = time.perf_counter_ns()
            self._launch()
            spent_ns = time.perf_counter_ns() - start_ns
            call("cudaEventRecord", end, self._stream)
            enqueue_ms.append(spent_ns / 1e6)
            (status,) = api.cudaEventQuery(begin)
            # "Not ready" counts as CUDA's last error, which is cleared, because the next launch may check for one.
            api.cudaGetLastError()
            waited.append(not int(status))
        return GpuTimings(
            gpu_ms=tuple(gpu_ms[LEAD_IN_QUERIES:]),
            enqueue_ms=tuple(enqueue_ms[LEAD_IN_QUERIES:]),
            device_waited=tuple(waited[LEAD_IN_QUERIES:]),
        )

    def end_to_end(self, n: int) -> tuple[float, ...]:
        """Return host times of n queries in milliseconds, each from queuing to completion, one at a time."""
        readings = []
        for _ in range(n):
            start_ns = time.perf_counter_ns()
            self._launch()
            self._cuda.call("cudaStreamSynchronize", self._stream)
            readings.append((time.perf_counter_ns() - start_ns) / 1e6)
        return tuple(readings)

    def warm_up(self, ms: float) -> int:
        """Run for `ms` milliseconds without timing; return the number of queries."""
        count, end_ns = 0, time.perf_counter_ns() + ms * 1e6
        while time.perf_counter_ns() < end_ns:
            self._launch()
            count += 1
            if count % QUERIES_IN_FLIGHT == 0:
                self._cuda.call("cudaStreamSynchronize", self._stream)
        self._cuda.call("cudaStreamSynchronize", self._stream)
        return count

    def _launch(self) -> None:
        if self._graph is None:
            self._enqueue(int(self._stream))
        else:
            self._cuda.call("cudaGraphLaunch", self._graph, self._stream)

    def _instantiate_graph(self, opened: ExitStack) -> object:
        """Return the work that the enqueue function queues, as an executable graph.

        The capture is ended even if the captured function failed, or the stream would be unusable. The first error is
        raised.
        """
        call, api = self._cuda.call, self._cuda.api
        call("cudaStreamBeginCapture", self._stream, api.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal)
        try:
            self._enqueue(int(self._stream))
        except BaseException:
            status, graph = api.cudaStreamEndCapture(self._stream)
            if not int(status):
                api.cudaGraphDestroy(graph)
            raise
        graph = call("cudaStreamEndCapture", self._stream)
        try:
            made: object = call("cudaGraphInstantiate", graph, 0)
            opened.callback(call, "cudaGraphExecDestroy", made)
        finally:
            call("cudaGraphDestroy", graph)
        call("cudaGraphUpload", made, self._stream)
        call("cudaStreamSynchronize", self._stream)
        return made


def flush_bytes(l2_bytes: int, cold_l2: bool) -> int:
    """Return the number of bytes to overwrite before each query: twice the L2 cache, or 0 for a warm cache.

    Raises:
        MeasureFailed: `cold_l2` is set, and the device does not report the size of its L2 cache.
    """
    if cold_l2 and not l2_bytes:
        raise MeasureFailed("cold_l2: this device does not report the size of its L2 cache")
    return L2_FLUSH_FACTOR * l2_bytes if cold_l2 else 0
