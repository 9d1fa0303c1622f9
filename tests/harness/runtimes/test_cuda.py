"""What NVML tells of a GPU, through a stand-in; and what is left where it tells nothing."""

import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_cuda import FakeCuda, Status

from harness.base.errors import MeasureFailed, UserError
from harness.runtimes import cuda
from harness.runtimes.cuda import CudaRuntime, GpuMonitor, GpuTimer, flush_bytes, import_runtime, open_device
from harness.runtimes.tensorrt import benchmarker


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
    monkeypatch.setattr("harness.runtimes.cuda.time.monotonic", lambda: now_s[0])
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


KERNEL_MS = 0.1
DRIVERLESS = frozenset(
    {"cudaGetDeviceCount", "cudaDriverGetVersion", "cudaRuntimeGetVersion", "cudaGetErrorName", "cudaGetErrorString"}
)
"""Functions that answer without a driver; `open_device` is tested on them."""


def model(api: FakeCuda, kernels: int = 3) -> Callable[[int], None]:
    """An inference of several kernels, each of which the host has to launch."""

    def enqueue(stream: int) -> None:
        for _ in range(kernels):
            api.launch(stream, KERNEL_MS / kernels)

    return enqueue


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("n", [1, 2, 7])
def test_readings_exclude_host_gaps(graph, n):
    api = FakeCuda(host_us=8)
    with GpuTimer(CudaRuntime(api), model(api), graph=graph) as timer:
        readings = timer.read(n)
    assert readings.gpu_ms == pytest.approx([KERNEL_MS] * n)
    assert len(readings.enqueue_ms) == n
    assert "cudaGraphLaunch" in api.calls if graph else "cudaGraphLaunch" not in api.calls


def test_cuda_graph_hides_a_slow_host():
    readings = {}
    for graph in (True, False):
        api = FakeCuda(host_us=10)
        with GpuTimer(CudaRuntime(api), model(api, kernels=40), graph=graph) as timer:
            readings[graph] = timer.read(5)
    assert max(readings[True].gpu_ms) == pytest.approx(KERNEL_MS)
    assert min(readings[False].gpu_ms) > 3 * KERNEL_MS
    assert (readings[True].host_bound, readings[False].host_bound) == (0.0, 1.0)


def test_l2_flush_is_outside_the_readings():
    api = FakeCuda()
    with GpuTimer(CudaRuntime(api), model(api), flush_bytes=flush_bytes(2**20, True)) as timer:
        assert timer.read(4).gpu_ms == pytest.approx([KERNEL_MS] * 4)
    assert api.calls.count("cudaMemsetAsync") >= 4
    assert flush_bytes(2**20, False) == 0
    with pytest.raises(MeasureFailed, match=r"does not report the size of its L2 cache"):
        flush_bytes(0, True)


def test_uncapturable_work_is_timed_eagerly_with_a_reason(caplog):
    api = FakeCuda()
    plain = model(api)

    def enqueue(stream: int) -> None:
        if stream in api.captured:
            raise MeasureFailed("operation not permitted when stream is capturing")
        plain(stream)

    with GpuTimer(CudaRuntime(api), enqueue) as timer:
        assert timer.why_eager == "operation not permitted when stream is capturing", "its words, not those of the end"
        assert timer.read(3).gpu_ms == pytest.approx([KERNEL_MS] * 3)
    assert "no CUDA graph" in caplog.text
    assert not api.graphs
    assert not api.captured


@pytest.mark.parametrize(
    "function", ["cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaGraphInstantiate", "cudaGraphUpload"]
)
def test_a_graph_that_cuda_refuses_leaves_nothing_behind(function):
    api = FakeCuda()
    api.failing[function] = Status.cudaErrorStreamCaptureUnsupported
    with GpuTimer(CudaRuntime(api), model(api)) as timer:
        assert f"{function}: cudaErrorStreamCaptureUnsupported" in timer.why_eager
        api.captured.clear()  # the end of a capture that failed ends it all the same
        assert timer.read(2).gpu_ms == pytest.approx([KERNEL_MS] * 2)
    assert (api.memory, api.streams, api.events, api.graphs) == ({}, {}, {}, {})
    assert not api.last


def test_error_during_readings_leaves_no_resources():
    api = FakeCuda()
    plain, left = model(api), [4]

    def enqueue(stream: int) -> None:
        left[0] -= 1
        if not left[0]:
            raise MeasureFailed("refused")
        plain(stream)

    def measure() -> None:
        with GpuTimer(CudaRuntime(api), enqueue, graph=False, flush_bytes=4096) as timer:
            timer.read(5)

    with pytest.raises(MeasureFailed, match="refused"):
        measure()
    assert (api.memory, api.streams, api.events, api.graphs) == ({}, {}, {}, {})


@pytest.mark.parametrize("function", ["cudaStreamSynchronize", "cudaFree", "cudaEventDestroy"])
def test_failed_release_does_not_prevent_other_releases(function):
    api = FakeCuda()
    with pytest.raises(MeasureFailed, match=function):
        fail_at_the_end(api, function)
    kept = {"cudaFree": "memory", "cudaEventDestroy": "events"}.get(function)
    for name in ("memory", "streams", "events", "graphs"):
        assert bool(getattr(api, name)) == (name == kept), name


def fail_at_the_end(api: FakeCuda, function: str) -> None:
    with GpuTimer(CudaRuntime(api), model(api), flush_bytes=4096):
        api.failing[function] = Status.cudaErrorMemoryAllocation


def test_errors_quote_cuda_release_resources_and_are_cleared():
    """Or TensorRT's next launch would find them, and fail."""
    api = FakeCuda(memory_bytes=10)
    with pytest.raises(MeasureFailed, match=r"cudaMalloc: cudaErrorMemoryAllocation \(out of memory\)"):
        GpuTimer(CudaRuntime(api), model(api), flush_bytes=4096).__enter__()
    assert not api.streams
    with GpuTimer(CudaRuntime(api), model(api)) as timer:
        assert timer.warm_up(50.0) > 1
        timer.read(3)
        timer.end_to_end(2)
        assert "cudaEventQuery" in api.calls
        assert not api.last
    assert (api.memory, api.streams, api.events, api.graphs, api.captured) == ({}, {}, {}, {}, {})


def test_sticky_cuda_error_ends_the_process():
    api = FakeCuda()
    api.failing["cudaStreamSynchronize"] = Status.cudaErrorIllegalAddress
    with pytest.raises(SystemExit, match=r"this process cannot use the GPU any more"):
        CudaRuntime(api).call("cudaStreamSynchronize", 0)


@pytest.mark.parametrize(
    ("api", "message"),
    [
        (FakeCuda(driver=0), "no NVIDIA driver is loaded"),
        (FakeCuda(driver=11040), r"too old: it knows CUDA 11.4, cuda-python here needs 12.9; update the driver"),
        (FakeCuda(devices=0), r"no NVIDIA GPU is visible; check nvidia-smi and .* CUDA_VISIBLE_DEVICES"),
    ],
)
def test_missing_device_is_a_user_error(api, message, monkeypatch):
    monkeypatch.setattr("harness.runtimes.cuda.import_runtime", lambda: api)
    with pytest.raises(UserError, match=message):
        open_device()


def test_open_device_describes_the_device(monkeypatch):
    monkeypatch.setattr("harness.runtimes.cuda.import_runtime", FakeCuda)
    _, found = open_device()
    assert (found.name, found.capability, found.driver) == ("Fake GPU", (8, 9), "12.8")
    assert found.uuid == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
    with pytest.raises(UserError, match=r"device: 0 to 0 .* but got 3"):
        open_device(3)


def test_cuda_python_accepts_the_used_argument_types():
    """Without a driver every call only says so: kinds of arguments and numbers of results are checked all the same."""
    try:
        api = import_runtime()
    except UserError as error:
        pytest.skip(str(error))
    if api.cudaGetDeviceCount()[0] != api.cudaError_t.cudaErrorInsufficientDriver:
        pytest.skip("this machine has a driver, which would look at the handles")
    stream, event, memory = api.cudaStream_t(5), api.cudaEvent_t(6), 4096
    graph, made = api.cudaGraph_t(7), api.cudaGraphExec_t(8)
    mode = api.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
    calls: dict[str, tuple[tuple[object, ...], int]] = {
        "cudaStreamCreateWithFlags": ((api.cudaStreamNonBlocking,), 2), "cudaStreamSynchronize": ((int(stream),), 1),
        "cudaStreamDestroy": ((stream,), 1), "cudaStreamBeginCapture": ((stream, mode), 1),
        "cudaStreamEndCapture": ((stream,), 2), "cudaEventCreateWithFlags": ((api.cudaEventDefault,), 2),
        "cudaEventRecord": ((event, stream), 1), "cudaEventSynchronize": ((event,), 1), "cudaEventQuery": ((event,), 1),
        "cudaEventElapsedTime": ((event, event), 2), "cudaEventDestroy": ((event,), 1), "cudaMalloc": ((10,), 2),
        "cudaFree": ((memory,), 1), "cudaMemsetAsync": ((memory, 1, 10, stream), 1),
        "cudaMemcpy": ((memory, memory, 4, api.cudaMemcpyKind.cudaMemcpyHostToDevice), 1),
        "cudaGraphInstantiate": ((graph, 0), 2), "cudaGraphUpload": ((made, stream), 1),
        "cudaGraphLaunch": ((made, stream), 1), "cudaGraphExecDestroy": ((made,), 1),
        "cudaGraphDestroy": ((graph,), 1), "cudaSetDevice": ((0,), 1), "cudaDeviceSynchronize": ((), 1),
        "cudaGetDeviceProperties": ((0,), 2), "cudaGetLastError": ((), 1),
    }  # fmt: skip
    for name, (args, results) in calls.items():
        assert len(getattr(api, name)(*args)) == results, name
    source = "".join(Path(module.__file__).read_text() for module in (cuda, benchmarker))
    used = {a or b for a, b in re.findall(r'"(cuda[A-Z]\w+)"|api\.(cuda\w+)\(', source)}
    assert used <= {*calls, *DRIVERLESS}


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("target_ms", [0.1, 5.0])
def test_readings_agree_with_triton(target_ms, graph):
    """One kernel whose time goes by the memory it moves: heat holds back no clock, and the host launches it once."""
    try:
        cuda, gpu = open_device()
    except UserError as error:
        pytest.skip(str(error))
    testing = pytest.importorskip("triton.testing")
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")

    def adding(size: int) -> Callable[[], object]:
        x = torch.ones(size, device="cuda", dtype=torch.float64)
        y = torch.empty_like(x)
        return lambda: torch.add(x, 1.0, out=y)

    probed = 2**25
    size = round(probed * target_ms / testing.do_bench(adding(probed), return_mode="median"))
    if 2 * 8 * size > 0.8 * gpu.memory_bytes:
        pytest.skip(f"{gpu.name} has too little memory for a kernel of {target_ms} ms")
    work = adding(size)
    torch.cuda.synchronize()  # the timer's stream does not wait for torch's

    def enqueue(stream: int) -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            work()

    cold = flush_bytes(gpu.l2_bytes, True)  # as do_bench does
    with GpuTimer(cuda, enqueue, graph=graph, flush_bytes=cold) as timer:
        assert not timer.why_eager
        timer.warm_up(200)
        readings = timer.read(round(50 / target_ms) + 50)
    theirs = testing.do_bench(work, warmup=200, rep=1000, return_mode="median")
    assert target_ms / 2 < theirs < 2 * target_ms
    assert statistics.median(readings.gpu_ms) == pytest.approx(theirs, rel=0.02)
    assert readings.host_bound < 0.5
