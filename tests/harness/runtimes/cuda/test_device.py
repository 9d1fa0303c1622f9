"""What NVML tells of a GPU, through a stand-in; and what is left where it tells nothing."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from harness.runtimes.cuda.device import GpuMonitor


class Nvml(SimpleNamespace):
    """The module pynvml of a machine with one GPU.

    Args:
        reasons: Bits of what holds the clocks back.
        old: Knows NVML's older word for them alone.
    """

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        """An error of NVML."""

    def __init__(self, reasons: int = 0, old: bool = False) -> None:
        name = "Throttle" if old else "Event"
        super().__init__(**{f"nvmlDeviceGetCurrentClocks{name}Reasons": lambda handle: reasons})

    def nvmlInit(self) -> None:
        """Nothing to do."""

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-1":
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return {1: 1980, 2: 2619}[kind]

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return 41

    def nvmlDeviceGetPowerUsage(self, handle: str) -> Any:
        raise self.NVMLError("Not Supported")


@pytest.mark.parametrize("old", [False, True])
def test_gpu_monitor_reads_clocks_heat_and_throttling(old, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(reasons=0x1 | 0x4 | 0x40, old=old))
    assert GpuMonitor("GPU-1").take_facts() == {
        "gpu_mhz": 1980.0,
        "gpu_memory_mhz": 2619.0,
        "gpu_temperature_c": 41.0,
        "gpu_held_back": 2.0,  # idleness is no reason
        "gpu_held_back_power_cap": 1.0,
        "gpu_held_back_heat_hardware": 1.0,
    }


def test_gpu_monitor_reports_the_worst_since_the_last_call(monkeypatch):
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    now_s = [0.0]
    monkeypatch.setattr("harness.runtimes.cuda.device.time.monotonic", lambda: now_s[0])
    clocks = GpuMonitor("GPU-1")

    def look(after_s: float, mhz: int, reasons: int = 0) -> None:
        now_s[0] += after_s
        nvml.nvmlDeviceGetClockInfo = lambda handle, kind: mhz
        nvml.nvmlDeviceGetCurrentClocksEventReasons = lambda handle: reasons
        clocks.sample()

    look(0, 1900)
    look(1, 1500, 0x20)
    look(0.001, 100)  # too soon: looks take time
    look(1, 1980)
    facts = clocks.take_facts()
    assert (facts["gpu_mhz"], facts["gpu_held_back_heat_software"]) == (1500.0, 1.0)
    assert clocks.take_facts() == {
        "gpu_mhz": 1980.0,
        "gpu_memory_mhz": 1980.0,
        "gpu_temperature_c": 41.0,
        "gpu_held_back": 0,
    }


@pytest.mark.parametrize("module", [None, Nvml()])
def test_gpu_monitor_is_empty_without_nvml_or_for_another_gpu(module, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert GpuMonitor("GPU-2").take_facts() == {}


def test_real_pynvml_has_all_used_names():
    pynvml = pytest.importorskip("pynvml")
    names = ("nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetClockInfo", "nvmlDeviceGetTemperature",
             "nvmlDeviceGetPowerUsage", "nvmlDeviceGetCurrentClocksEventReasons", "NVML_CLOCK_SM", "NVML_CLOCK_MEM",
             "NVML_TEMPERATURE_GPU", "NVMLError")  # fmt: skip
    assert [name for name in names if not hasattr(pynvml, name)] == []
    assert GpuMonitor("GPU-none").take_facts() == {}
