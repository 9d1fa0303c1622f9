"""State of a GPU during a timing, by NVML: clocks, temperature, power, and throttling reasons."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["GpuConditions", "GpuMonitor"]

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
    """Conditions of a GPU; None if it does not report a value.

    Attributes:
        mhz: Clock of its multiprocessors.
        memory_mhz: Clock of its memory.
        held_back: What keeps the clock below what it could be, see `THROTTLE_REASONS`.
    """

    mhz: float | None = None
    memory_mhz: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    held_back: frozenset[str] = frozenset()

    def merge_worst(self, other: GpuConditions) -> GpuConditions:
        """Return the worse of two readings: the lower clocks, the higher temperature and power, and all throttle
        reasons.
        """
        return GpuConditions(
            mhz=_choose_known(min, self.mhz, other.mhz),
            memory_mhz=_choose_known(min, self.memory_mhz, other.memory_mhz),
            temperature_c=_choose_known(max, self.temperature_c, other.temperature_c),
            power_w=_choose_known(max, self.power_w, other.power_w),
            held_back=self.held_back | other.held_back,
        )

    def facts(self) -> dict[str, float]:
        """Return the values to record with the readings; each throttle reason is 1 under its name."""
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
    """Watches one GPU's conditions; without NVML (nvidia-ml-py, or a driver) it tells nothing.

    Args:
        uuid: Of the GPU, "GPU-..."; CUDA and NVML number devices differently.
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
        """See how the GPU does right now, for instance between readings; `facts` tells."""
        if self._nvml is None or time.monotonic() - self._looked_s < MIN_SAMPLE_INTERVAL_S:
            return
        self._seen = self._seen.merge_worst(self._read())
        self._looked_s = time.monotonic()

    def take_facts(self) -> dict[str, float]:
        """Return the worst conditions since the last call, the current ones included; see `GpuConditions.facts`."""
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
