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
        return cuda, _read_device(cuda, index)
    except MeasureFailed as error:
        raise UserError(
            f"GPU {index} cannot be used: {error}; see nvidia-smi (a compute mode of EXCLUSIVE_PROCESS leaves no room "
            "for worker processes: nvidia-smi -c DEFAULT)"
        ) from error


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


def _read_device(cuda: CudaRuntime, index: int) -> Device:
    properties = cuda.call("cudaGetDeviceProperties", index)
    return Device(
        index=index,
        name=properties.name.decode(errors="replace").rstrip("\0"),
        uuid=_format_uuid(bytes(properties.uuid.bytes)),
        capability=(int(properties.major), int(properties.minor)),
        l2_bytes=int(properties.l2CacheSize),
        memory_bytes=int(properties.totalGlobalMem),
        driver=_format_version(cuda.call("cudaDriverGetVersion")),
    )


def _format_uuid(raw: bytes) -> str:
    text = raw.hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def _format_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _format_error(api: Any, status: Any) -> str:
    """Format CUDA's name of an error and its text, for instance "cudaErrorMemoryAllocation (out of memory)"."""
    _, name = api.cudaGetErrorName(status)
    _, text = api.cudaGetErrorString(status)
    return f"{_decode_text(name)} ({_decode_text(text)})"


def _decode_text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuConditions:
    """Conditions of a GPU (clocks in MHz, temperature in °C, power in W); None if it does not report a value.

    Attributes:
        mhz: Clock of the multiprocessors.
        held_back: Reasons why the clock is below its maximum, see `THROTTLE_REASONS`.
    """

    mhz: float | None = None
    memory_mhz: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    held_back: frozenset[str] = frozenset()

    def merge_worst(self, other: GpuConditions) -> GpuConditions:
        """Return the worse of two readings: lower clocks, higher temperature and power, all throttle reasons."""
        return GpuConditions(
            mhz=_choose_known(min, self.mhz, other.mhz),
            memory_mhz=_choose_known(min, self.memory_mhz, other.memory_mhz),
            temperature_c=_choose_known(max, self.temperature_c, other.temperature_c),
            power_w=_choose_known(max, self.power_w, other.power_w),
            held_back=self.held_back | other.held_back,
        )

    def facts(self) -> dict[str, float]:
        """Return the known values by name for the record; each throttle reason is 1 as `gpu_held_back_REASON`."""
        found = {
            "gpu_mhz": self.mhz,
            "gpu_memory_mhz": self.memory_mhz,
            "gpu_temperature_c": self.temperature_c,
            "gpu_power_w": self.power_w,
            "gpu_held_back": float(len(self.held_back)) if self.mhz is not None else None,
            **{f"gpu_held_back_{reason}": 1.0 for reason in sorted(self.held_back)},
        }
        return {name: value for name, value in found.items() if value is not None}


class GpuMonitor:
    """Monitor of the conditions of a GPU; without NVML (nvidia-ml-py, or a driver) all are None.

    Args:
        uuid: UUID of the GPU, "GPU-...", because CUDA and NVML number devices differently.
    """

    def __init__(self, uuid: str) -> None:
        self._seen = GpuConditions()
        self._looked_s = -math.inf
        self._nvml: Any = None
        self._handle: Any = None
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
        self._seen = self._seen.merge_worst(self._read())
        self._looked_s = time.monotonic()

    def take_facts(self) -> dict[str, float]:
        """Return the worst conditions since the last call, as `GpuConditions.facts`; {} without NVML."""
        self._looked_s = -math.inf
        self.sample()
        seen, self._seen = self._seen, GpuConditions()
        return seen.facts()

    def _read(self) -> GpuConditions:
        nvml, handle = self._nvml, self._handle
        power_mw = self._query_or_none(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        return GpuConditions(
            mhz=self._query_or_none(lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))),
            memory_mhz=self._query_or_none(lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM))),
            temperature_c=self._query_or_none(
                lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
            ),
            power_w=None if power_mw is None else power_mw / 1000,
            held_back=self._throttle_reasons(),
        )

    def _throttle_reasons(self) -> frozenset[str]:
        """Return the active throttle reasons; NVML renamed "throttle" to "event" in newer drivers."""
        nvml, handle = self._nvml, self._handle
        bits = self._query_or_none(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        if bits is None:
            bits = self._query_or_none(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        return frozenset(reason for bit, reason in THROTTLE_REASONS.items() if (bits or 0) & bit)

    def _query_or_none(self, probe: Callable[[], Any]) -> Any:
        try:
            return probe()
        except (self._nvml.NVMLError, AttributeError):  # the latter: an older nvidia-ml-py
            return None


def _choose_known(choose: Callable[..., float], one: float | None, other: float | None) -> float | None:
    known = [value for value in (one, other) if value is not None]
    return choose(known) if known else None


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
        with ExitStack() as opened:  # after a failure, releases the resources that were created before
            self._stream = self._given if self._given is not None else self._create_stream(opened)
            self._events = [
                (self._create_event(opened), self._create_event(opened)) for _ in range(QUERIES_IN_FLIGHT + 1)
            ]
            if self._flush_bytes:
                self._scratch = self._create_resource(opened, "cudaMalloc", self._flush_bytes, release="cudaFree")
            self._enqueue(int(self._stream))  # first run: lazy loading and allocation
            self._cuda.call("cudaStreamSynchronize", self._stream)
            if self._wanted:
                self._graph = self._instantiate_graph(opened)
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
        gpu_ms, enqueue_ms, waited = [], [], []
        for number in range(n + LEAD_IN_QUERIES):
            if number >= QUERIES_IN_FLIGHT:
                gpu_ms.append(self._elapsed_ms(number - QUERIES_IN_FLIGHT))
            enqueue_ms.append(self._enqueue_query(number))
            waited.append(self._has_started(number))
        gpu_ms.extend(
            self._elapsed_ms(number)
            for number in range(max(0, n + LEAD_IN_QUERIES - QUERIES_IN_FLIGHT), n + LEAD_IN_QUERIES)
        )
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

    def _enqueue_query(self, number: int) -> float:
        """Queue one query between its events, and return the host's time for it in milliseconds."""
        begin, end = self._events[number % len(self._events)]
        call = self._cuda.call
        if self._scratch is not None:
            call("cudaMemsetAsync", self._scratch, number % 256, self._flush_bytes, self._stream)
        call("cudaEventRecord", begin, self._stream)
        start_ns = time.perf_counter_ns()
        self._launch()
        spent_ns = time.perf_counter_ns() - start_ns
        call("cudaEventRecord", end, self._stream)
        return spent_ns / 1e6

    def _launch(self) -> None:
        if self._graph is None:
            self._enqueue(int(self._stream))
        else:
            self._cuda.call("cudaGraphLaunch", self._graph, self._stream)

    def _elapsed_ms(self, number: int) -> float:
        begin, end = self._events[number % len(self._events)]
        self._cuda.call("cudaEventSynchronize", end)
        return float(self._cuda.call("cudaEventElapsedTime", begin, end))

    def _has_started(self, number: int) -> bool:
        """Return whether the device has reached the first event of a query.

        "Not ready" counts as CUDA's last error, which is cleared, because the next launch may check for one.
        """
        api = self._cuda.api
        (status,) = api.cudaEventQuery(self._events[number % len(self._events)][0])
        api.cudaGetLastError()
        return not int(status)

    def _create_resource(self, opened: ExitStack, function: str, *args: object, release: str) -> object:
        """Create a resource that is released with all others."""
        made: object = self._cuda.call(function, *args)
        opened.callback(self._cuda.call, release, made)
        return made

    def _create_stream(self, opened: ExitStack) -> Any:
        """Create a stream other than the default stream, which would synchronize with others."""
        flags = self._cuda.api.cudaStreamNonBlocking
        return self._create_resource(opened, "cudaStreamCreateWithFlags", flags, release="cudaStreamDestroy")

    def _create_event(self, opened: ExitStack) -> object:
        flags = self._cuda.api.cudaEventDefault
        return self._create_resource(opened, "cudaEventCreateWithFlags", flags, release="cudaEventDestroy")

    def _instantiate_graph(self, opened: ExitStack) -> object | None:
        """Return the enqueue function as an executable graph, or None with the reason in `why_eager`."""
        call = self._cuda.call
        try:
            graph = self._capture_graph()
            try:
                made = self._create_resource(opened, "cudaGraphInstantiate", graph, 0, release="cudaGraphExecDestroy")
            finally:
                call("cudaGraphDestroy", graph)
            call("cudaGraphUpload", made, self._stream)
            call("cudaStreamSynchronize", self._stream)
        except CandidateError as error:
            self._cuda.api.cudaGetLastError()  # clears the error, which the next call would report again
            self.why_eager = str(error)
            _logger.warning("no CUDA graph: %s", error)
            return None
        return made

    def _capture_graph(self) -> object:
        """Return the work that the enqueue function queues, as a graph.

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
        ended: object = call("cudaStreamEndCapture", self._stream)
        return ended


def flush_bytes(l2_bytes: int, cold_l2: bool) -> int:
    """Return the number of bytes to overwrite before each query: twice the L2 cache, or 0 for a warm cache.

    Raises:
        MeasureFailed: `cold_l2` is set, and the device does not report the size of its L2 cache.
    """
    if cold_l2 and not l2_bytes:
        raise MeasureFailed("cold_l2: this device does not report the size of its L2 cache")
    return L2_FLUSH_FACTOR * l2_bytes if cold_l2 else 0
