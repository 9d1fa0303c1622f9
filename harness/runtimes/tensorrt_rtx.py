"""Latency on TensorRT for RTX through its plug-in for ONNX Runtime: experimental, and never comparable with TensorRT.

TensorRT-RTX is another library with other kernels, compiled on the user's machine. Its support matrix lists compute
capabilities 7.5, 8.6, 8.9 and 12.x; the documentation on INT8 activations is contradictory.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.base.errors import BuildFailed, MeasureFailed, UserError
from harness.measure.sampling import make_fixed_inputs
from harness.plugins.api import Array, Artifact, Candidate, Capabilities
from harness.runtimes.cuda import CudaRuntime, Device, GpuMonitor, GpuTimer, flush_bytes, open_device
from harness.runtimes.host_clock import (
    parse_dtype,
    require_static_shapes,
    run_session,
    session_errors,
    translate_errors,
)

LICENCE_NOTE = (
    "experimental; figures of TensorRT-RTX are never pooled with TensorRT's, and its licence may restrict publishing "
    "them: read its section on benchmarks first"
)
INSTALL_HINT = (
    "pip install onnxruntime-ep-nv-tensorrt-rtx-cu13 (needs onnxruntime >= 1.24 in an environment of its own without "
    "onnxruntime-gpu, an RTX GPU of generation Ampere or later, and a driver for CUDA 13)"
)
NVIDIA_VENDOR_ID = 0x10DE
"""PCI's number of the vendor: ONNX Runtime finds the plug-in's memory by it (microsoft/onnxruntime#25346).

Own memory cannot be bound from Python: `IOBinding.bind_input` takes no vendor (#26079).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RTXHandle:
    """Resources that need the plug-in and a GPU, created on first use.

    Attributes:
        stream: CUDA stream of all sessions, which the plug-in gets when a session is created.
    """

    ort: Any
    devices: tuple[Any, ...]
    version: str
    errors: tuple[type[Exception], ...]
    cuda: CudaRuntime
    device: Device
    stream: Any


class TensorRTRTXBenchmarker:
    """Benchmarker of TensorRT for RTX, by its execution provider (plug-in) for ONNX Runtime.

    Args:
        device: Number of the GPU.
        cuda_graph: Whether the plug-in captures a CUDA graph.
        cold_l2: Whether the L2 cache is overwritten before each inference; never compare with warm readings.
    """

    capabilities = Capabilities(dialect="tensorrt_rtx", tensors_only=True, tunes_builds=True)

    def __init__(self, *, device: int = 0, cuda_graph: bool = False, cold_l2: bool = False) -> None:
        self._device, self._graph, self._cold_l2 = device, cuda_graph, cold_l2

    @cached_property
    def _ready(self) -> _RTXHandle:
        cuda, device = open_device(self._device)
        ort, plugin = _import_runtime()
        name = plugin.get_ep_name()
        if not any(found.ep_name == name for found in ort.get_ep_devices()):
            ort.register_execution_provider_library(name, plugin.get_library_path())
        offered = [found for found in ort.get_ep_devices() if found.ep_name == name]
        own = tuple(d for d in offered if str(d.ep_options.get("device_id", self._device)) == str(self._device))
        if not own:
            raise UserError(
                f"benchmarker 'tensorrt_rtx': the plug-in does not offer {device.name} "
                f"(compute capability {'.'.join(map(str, device.capability))}); it needs {INSTALL_HINT}"
            )
        return _RTXHandle(
            ort=ort,
            devices=own,
            version=f"{plugin.__version__} on ONNX Runtime {ort.__version__}",
            errors=session_errors(ort),
            cuda=cuda,
            device=device,
            stream=cuda.call("cudaStreamCreateWithFlags", cuda.api.cudaStreamNonBlocking),
        )

    def build(self, candidate: Candidate, workdir: Path) -> Artifact:
        """Create a session from the candidate's file.

        Raises:
            BuildFailed: ONNX Runtime or the plug-in refuses the model, or a part of it would run on the CPU.
            UserError: There is no plug-in or no GPU.
        """
        ready, path = self._ready, candidate.source()
        options = ready.ort.SessionOptions()
        options.log_severity_level = 3
        # Operators that the plug-in does not support would run on the CPU, and the latency would be of two devices.
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        settings = {
            "has_user_compute_stream": "1",
            "user_compute_stream": str(int(ready.stream)),
            "enable_cuda_graph": "1" if self._graph else "0",
        }
        with translate_errors(BuildFailed, f"TensorRT-RTX refuses {path.name}", ready.errors):
            options.add_provider_for_devices(list(ready.devices), settings)
            session = ready.ort.InferenceSession(str(path), options)
        require_static_shapes(path.name, {value.name: value.shape for value in session.get_inputs()})
        return Artifact(engine=session)

    @contextmanager
    def open(self, artifact: Artifact) -> Iterator[_RTXProbe]:
        """Open a probe whose inputs and outputs are on the device.

        Raises:
            MeasureFailed: The session does not run, or there is not enough GPU memory.
        """
        ready = self._ready
        probe = _RTXProbe(ready, artifact.engine)
        try:
            flushed = flush_bytes(ready.device.l2_bytes, self._cold_l2)
            with GpuTimer(ready.cuda, probe.enqueue, graph=False, flush_bytes=flushed, stream=ready.stream) as timer:
                probe.timer = timer
                yield probe
        finally:
            probe.close()

    def describe(self) -> Mapping[str, Any]:
        """Return the facts that results record; tables with these figures show `note`.

        Raises:
            UserError: The plug-in or a GPU is missing on this machine; the message has the remedy.
        """
        ready = self._ready
        return {
            "name": "tensorrt_rtx",
            "version": ready.version,
            "device": ready.device.name,
            "options": {"cuda_graph": self._graph, "l2": "cold" if self._cold_l2 else "warm"},
            "float_precision": "f32",
            "note": LICENCE_NOTE,
        }


class _RTXProbe:
    """Session with its inputs and outputs in the memory of the GPU; `infer` copies them by ONNX Runtime.

    Attributes:
        timer: Timer of `enqueue`, set when the probe is opened.
    """

    timer: GpuTimer

    def __init__(self, ready: _RTXHandle, session: Any) -> None:
        self._ready, self._session = ready, session
        self._clocks = GpuMonitor(ready.device.uuid)
        self._host_bound = 0.0
        self._binding = session.io_binding()
        self._run = ready.ort.RunOptions()
        # Otherwise every run would end with a synchronization, whose time would be part of the readings.
        self._run.add_run_config_entry("disable_synchronize_execution_providers", "1")
        inputs = {value.name: (parse_dtype(value), tuple(value.shape)) for value in session.get_inputs()}
        values, place = ready.ort.OrtValue, ("gpu", ready.device.index, NVIDIA_VENDOR_ID)
        with translate_errors(MeasureFailed, "TensorRT-RTX", ready.errors):
            for name, array in make_fixed_inputs(inputs).items():
                self._binding.bind_ortvalue_input(name, values.ortvalue_from_numpy(array, *place))
            for value in session.get_outputs():
                if not all(isinstance(size, int) for size in value.shape):
                    raise MeasureFailed(
                        f"output {value.name!r}: its size depends on the data, so it cannot be bound beforehand"
                    )
                made = values.ortvalue_from_shape_and_type(tuple(value.shape), parse_dtype(value), *place)
                self._binding.bind_ortvalue_output(value.name, made)
        ready.cuda.call("cudaDeviceSynchronize")

    def enqueue(self, stream: int) -> None:
        """Queue one inference on the session's stream."""
        with translate_errors(MeasureFailed, "TensorRT-RTX", self._ready.errors):
            self._session.run_with_iobinding(self._binding, self._run)

    def close(self) -> None:
        """Free the memory."""
        self._binding.clear_binding_inputs()
        self._binding.clear_binding_outputs()

    def sample(self, n: int) -> Sequence[float]:
        """Return GPU times of n inferences in milliseconds, by CUDA events."""
        readings = self.timer.read(n)
        self._clocks.sample()
        self._host_bound = readings.host_bound
        return readings.gpu_ms

    def conditions(self) -> Mapping[str, float]:
        """Return the GPU's conditions during sampling and the host's overhead, as `EngineProbe.conditions` does."""
        end_to_end_ms = statistics.median(self.timer.end_to_end(5))
        return {**self._clocks.take_facts(), "host_bound": self._host_bound, "end_to_end_ms": end_to_end_ms}

    def infer(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the outputs by name; floating-point ones as float32."""
        with translate_errors(MeasureFailed, "TensorRT-RTX", self._ready.errors):
            return run_session(self._session, feeds)


def _import_runtime() -> tuple[Any, Any]:
    """Import ONNX Runtime without its telemetry, and the plug-in.

    Raises:
        UserError: One of them is not installed, or its libraries are missing.
    """
    try:
        import onnxruntime
        import onnxruntime_ep_nv_tensorrt_rtx
    except (ImportError, OSError) as error:
        raise UserError(f"benchmarker 'tensorrt_rtx': {error}; {INSTALL_HINT}") from error
    onnxruntime.disable_telemetry_events()
    return onnxruntime, onnxruntime_ep_nv_tensorrt_rtx
