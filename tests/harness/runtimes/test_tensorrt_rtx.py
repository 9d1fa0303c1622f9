"""The plug-in of TensorRT-RTX: as far as ONNX Runtime's own CPU and a simulated device go, and for real on a GPU."""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
from fake_cuda import FakeCuda

from harness.base.errors import BuildFailed, UserError
from harness.graph.builder import GraphBuilder
from harness.runtimes.tensorrt_rtx import TensorRTRTXBenchmarker
from harness.runtimes.testing import file_candidate

KERNEL_MS = 0.5


class Machine:
    """ONNX Runtime with the plug-in, and its device."""

    def __init__(self, offered: bool = True) -> None:
        self.cuda = FakeCuda()
        self.settings: dict[str, str] = {}
        self.bound: list[tuple[Any, ...]] = []
        self.registered: list[str] = []
        self.offered = offered
        self.plugin = SimpleNamespace(
            __version__="0.5.0", get_ep_name=lambda: "nv_tensorrt_rtx", get_library_path=lambda: "lib.so"
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(onnxruntime, name)

    class OrtValue:
        """Where values are placed."""

        @staticmethod
        def ortvalue_from_numpy(array: np.ndarray, device: str, index: int, vendor: int) -> tuple[Any, ...]:
            return device, index, vendor, array.shape

        @staticmethod
        def ortvalue_from_shape_and_type(
            shape: tuple[int, ...], dtype: Any, device: str, index: int, vendor: int
        ) -> tuple[Any, ...]:
            assert np.dtype(dtype) == np.float32
            return device, index, vendor, shape

    def get_ep_devices(self) -> list[Any]:
        device = SimpleNamespace(ep_name="nv_tensorrt_rtx", ep_options={"device_id": "0"})
        return [device] if self.registered and self.offered else []

    def register_execution_provider_library(self, name: str, path: str) -> None:
        self.registered.append(name)

    def SessionOptions(self) -> Any:
        options, machine = onnxruntime.SessionOptions(), self

        class Options:
            def add_provider_for_devices(self, devices: Any, settings: dict[str, str]) -> None:
                machine.settings = settings

            def add_session_config_entry(self, key: str, value: str) -> None:
                assert (key, value) == ("session.disable_cpu_ep_fallback", "1")

            real = options

        return Options()

    def InferenceSession(self, path: str, options: Any) -> Any:
        session, machine = onnxruntime.InferenceSession(path, options.real), self

        class Session:
            def __getattr__(self, name: str) -> Any:
                return getattr(session, name)

            def io_binding(self) -> Any:
                return SimpleNamespace(
                    bind_ortvalue_input=lambda name, value: machine.bound.append((name, *value)),
                    bind_ortvalue_output=lambda name, value: machine.bound.append((name, *value)),
                    clear_binding_inputs=machine.bound.clear,
                    clear_binding_outputs=machine.bound.clear,
                )

            def run_with_iobinding(self, binding: Any, options: Any) -> None:
                key = "disable_synchronize_execution_providers"
                assert options.get_run_config_entry(key) == "1" if hasattr(options, "get_run_config_entry") else True
                machine.cuda.launch(int(machine.settings["user_compute_stream"]), KERNEL_MS)

        return Session()


@pytest.fixture
def machine(monkeypatch):
    made = Machine()
    monkeypatch.setattr("harness.runtimes.cuda.import_runtime", lambda: made.cuda)
    monkeypatch.setattr("harness.runtimes.tensorrt_rtx._import_runtime", lambda: (made, made.plugin))
    return made


def model(path: Path, batch: int | str = 1) -> Path:
    builder = GraphBuilder("net")
    builder.output(builder.op("Relu", builder.input("x", (batch, 4))), name="y")
    return builder.save(path)


def test_readings_use_the_stream_of_the_session(machine, tmp_path):
    made = TensorRTRTXBenchmarker(cold_l2=True)
    artifact = made.build(file_candidate(model(tmp_path / "m.onnx")), tmp_path)
    with made.open(artifact) as probe:
        assert probe.sample(4) == pytest.approx([KERNEL_MS] * 4)
        answer = probe.infer({"x": np.array([[-1, 2, -3, 4]], np.float32)})["y"]
        assert probe.conditions()["end_to_end_ms"] > 0
        assert machine.bound == [("x", "gpu", 0, 0x10DE, (1, 4)), ("y", "gpu", 0, 0x10DE, (1, 4))]
    np.testing.assert_array_equal(answer, [[0, 2, 0, 4]])
    assert machine.settings["has_user_compute_stream"] == "1"
    assert not machine.bound
    assert not machine.cuda.memory
    assert len(machine.cuda.streams) == 1  # the one that sessions are bound to


def test_description_carries_the_note_for_tables(machine):
    facts = TensorRTRTXBenchmarker().describe()
    assert facts["name"] == "tensorrt_rtx"
    assert "experimental" in facts["note"]
    assert "licence" in facts["note"]
    assert "never pooled" in facts["note"]


def test_unsupported_gpu_is_refused(machine):
    machine.offered = False
    with pytest.raises(UserError, match=r"does not offer Fake GPU \(compute capability 8.9\); it needs pip install"):
        TensorRTRTXBenchmarker().describe()


def test_dynamic_shapes_and_broken_models_are_refused(machine, tmp_path):
    with pytest.raises(BuildFailed, match=r"input 'x' has the dynamic shape"):
        TensorRTRTXBenchmarker().build(file_candidate(model(tmp_path / "m.onnx", "batch")), tmp_path)
    (tmp_path / "broken.onnx").write_bytes(b"nonsense")
    with pytest.raises(BuildFailed, match=r"TensorRT-RTX refuses broken\.onnx"):
        TensorRTRTXBenchmarker().build(file_candidate(tmp_path / "broken.onnx"), tmp_path)


def test_missing_plugin_is_named(monkeypatch):
    monkeypatch.setattr("harness.runtimes.cuda.import_runtime", FakeCuda)
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime_ep_nv_tensorrt_rtx", None)
    with pytest.raises(UserError, match=r"'tensorrt_rtx': .*pip install onnxruntime-ep-nv-tensorrt-rtx-cu13"):
        TensorRTRTXBenchmarker().describe()


def test_real_onnxruntime_accepts_vendor_ids():
    for function in (onnxruntime.OrtValue.ortvalue_from_numpy, onnxruntime.OrtValue.ortvalue_from_shape_and_type):
        parameters = list(inspect.signature(function).parameters)
        start = parameters.index("device_type")
        assert parameters[start : start + 3] == ["device_type", "device_id", "vendor_id"]
    for name in ("bind_ortvalue_input", "bind_ortvalue_output", "clear_binding_inputs", "clear_binding_outputs"):
        assert hasattr(onnxruntime.IOBinding, name)
