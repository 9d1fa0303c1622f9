"""CUDA by cuda-python: errors as exceptions, and a message that explains why no GPU can be used.

The module can be imported without a driver.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from harness.base.errors import MeasureFailed, UserError, WorkerUnusable, install_hint

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
