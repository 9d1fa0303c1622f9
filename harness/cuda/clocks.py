"""What a GPU did while it was timed, by NVML: clocks, heat, power, and what held the clocks back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Clocks", "GpuConditions"]

HELD_BACK: Mapping[int, str] = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "power brake",
}
"""Bits of NVML's clock event reasons that make readings worse (nvml.h); idleness and wanted clocks are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuConditions:
    """One look at a GPU; None where it does not tell.

    Attributes:
        mhz: Clock of its multiprocessors.
        memory_mhz: Clock of its memory.
        held_back: What keeps the clock below what it could be, see `HELD_BACK`.
    """

    mhz: float | None = None
    memory_mhz: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    held_back: tuple[str, ...] = ()

    def facts(self) -> dict[str, float]:
        """What is worth recording beside the readings; the number of reasons that held the clock back among it."""
        found = {
            "gpu_mhz": self.mhz,
            "gpu_memory_mhz": self.memory_mhz,
            "gpu_temperature_c": self.temperature_c,
            "gpu_power_w": self.power_w,
            "gpu_held_back": float(len(self.held_back)) if self.mhz is not None else None,
        }
        return {name: value for name, value in found.items() if value is not None}


class Clocks:
    """Reads one GPU's conditions; without NVML (nvidia-ml-py, or a driver) it tells nothing.

    Args:
        uuid: Of the GPU, "GPU-..."; CUDA and NVML number devices differently.
    """

    def __init__(self, uuid: str) -> None:
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

    def read(self) -> GpuConditions:
        """The conditions now."""
        nvml, handle = self._nvml, self._handle
        if nvml is None:
            return GpuConditions()
        power_mw = self._soft(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        return GpuConditions(
            mhz=self._soft(lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))),
            memory_mhz=self._soft(lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM))),
            temperature_c=self._soft(lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))),
            power_w=None if power_mw is None else power_mw / 1000,
            held_back=self._held_back(),
        )

    def _held_back(self) -> tuple[str, ...]:
        """NVML renamed "throttle" to "event"; older drivers know the old name alone."""
        nvml, handle = self._nvml, self._handle
        bits = self._soft(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        if bits is None:
            bits = self._soft(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        return tuple(text for bit, text in HELD_BACK.items() if (bits or 0) & bit)

    def _soft(self, probe: Callable[[], Any]) -> Any:
        try:
            return probe()
        except (self._nvml.NVMLError, AttributeError):  # the latter: an older nvidia-ml-py
            return None
