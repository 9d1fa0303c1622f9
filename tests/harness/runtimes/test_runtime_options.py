"""Options that one runtime alone has: execution graphs, activation types, providers."""

from typing import Any

import numpy as np
import pytest

from harness.base.errors import UserError
from harness.graph.builder import GraphBuilder
from harness.graph.load import load
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import ONNXRUNTIME, ONNXRUNTIME_S8
from harness.measure.provenance import count_cores
from harness.plugins import registry
from harness.runtimes.onnxruntime import ONNXRuntimeBenchmarker
from harness.runtimes.openvino import OpenVINOBenchmarker
from harness.runtimes.testing import file_candidate
from search.space import Space


@pytest.fixture
def path(tmp_path):
    builder = GraphBuilder("net", seed=1)
    x = builder.op("Relu", builder.conv(builder.input("x", (1, 8, 32, 32)), 16, 3, pad=1))
    builder.output(builder.op("GlobalAveragePool", builder.conv(x, 16, 3, pad=1)), name="y")
    return builder.save(tmp_path / "net.onnx")


def test_openvino_reports_executed_layers(path, tmp_path):
    made = OpenVINOBenchmarker(precision="f32")
    artifact = made.build(file_candidate(path), tmp_path)
    layers = made.layers(artifact)
    convolutions = [layer for layer in layers if layer.kind == "Convolution"]
    assert [layer.precision for layer in convolutions] == ["f32", "f32"]
    assert {"Conv", "Relu"} <= set(convolutions[0].origin)
    assert convolutions[0].kernel
    assert all(layer.time_ms is None for layer in layers)
    assert sum(artifact.info["layers"].values()) == len(layers)
    assert "profile" not in made.describe()["options"]


@pytest.mark.skipif(count_cores() < 2, reason="each stream needs a thread")
def test_openvino_uses_the_configured_streams(path, tmp_path):
    made = OpenVINOBenchmarker(precision="f32", threads=2, streams=2)
    artifact = made.build(file_candidate(path), tmp_path)
    assert artifact.engine.get_property("NUM_STREAMS") == 2
    name = artifact.engine.inputs[0].any_name
    feeds = {name: np.random.default_rng(1).random((1, 8, 32, 32), np.float32)}
    with made.open(artifact) as probe:
        before = probe.infer(feeds)["y"]
        for count in (1, 2, 7):
            readings = probe.sample(count)
            assert len(readings) == count
            assert all(reading > 0 for reading in readings)
        np.testing.assert_array_equal(probe.infer(feeds)["y"], before)
    assert made.describe()["options"] == {"threads": 2, "precision": "f32", "streams": 2}


def test_openvino_profile_reports_layer_times(path, tmp_path):
    made = OpenVINOBenchmarker(precision="f32", profile=True)
    artifact = made.build(file_candidate(path), tmp_path)
    with made.open(artifact) as probe:
        whole_ms = float(np.median(probe.sample(50)))
    times = {layer.kind: layer.time_ms for layer in made.layers(artifact) if layer.time_ms is not None}
    assert times["Convolution"] > 0
    assert sum(times.values()) < 50 * whole_ms
    assert made.describe()["options"]["profile"] is True


@pytest.mark.skipif(count_cores() < 2, reason="needs two cores")
def test_onnxruntime_stops_spinning_threads_after_a_run(path, tmp_path):
    """Engines that are timed in turns took each other's cores: threads wait for the next run at full load."""
    for threads, told in ((1, False), (2, True)):
        made = ONNXRuntimeBenchmarker(threads=threads)
        options = made.build(file_candidate(path), tmp_path).engine.get_session_options()
        assert ("spinning" in made.describe()["options"]) == told
        if told:
            assert options.get_session_config_entry("session.force_spinning_stop") == "1"
        else:
            with pytest.raises(RuntimeError, match="does not have configuration"):
                options.get_session_config_entry("session.force_spinning_stop")


def test_activation_option_selects_uint8_or_int8(path, tmp_path):
    answers = {}
    feeds = {"x": np.random.default_rng(0).uniform(-1, 1, (1, 8, 32, 32)).astype(np.float32)}
    for activation, dialect in (("uint8", ONNXRUNTIME), ("int8", ONNXRUNTIME_S8)):
        made: Any = registry.create_plugin(
            "benchmarker", "onnxruntime", {"activation": activation, "reduce_range": False}
        )
        assert registry.load_plugin("dialect", made.capabilities.dialect) is dialect
        assert made.describe()["options"]["activation"] == activation
        model = load(path)
        space: Space = build_space(model, dialect)
        ranges = {edge.tensor: (-4.0, 4.0) for d in space.dimensions for edge in d.edges}
        written = Inserter(model, dialect, ranges).write(space.resolve(space.quantize_all()), tmp_path / activation)
        artifact = made.build(file_candidate(written), tmp_path)
        with made.open(artifact) as probe:
            assert min(probe.sample(3)) > 0
            answers[activation] = probe.infer(feeds)["y"]
    plain: Any = registry.create_plugin("benchmarker", "onnxruntime", {})
    with plain.open(plain.build(file_candidate(path), tmp_path)) as probe:
        expected = probe.infer(feeds)["y"]
    for answer in answers.values():
        assert 0 < np.abs(answer - expected).max() < 0.2


@pytest.mark.parametrize("backend", ["openvino", "onnxruntime"])
def test_reduce_range_defaults_to_7_bits_without_vnni(backend, monkeypatch):
    def made(saturates: bool, **params: Any) -> Any:
        monkeypatch.setattr(f"harness.runtimes.{backend}.machine_lacks_vnni", lambda: saturates)
        return registry.create_plugin("benchmarker", backend, params)

    seven, eight = f"{backend}_7bit", backend
    assert [made(True).capabilities.dialect, made(False).capabilities.dialect] == [seven, eight]
    assert [
        made(True, reduce_range=False).capabilities.dialect,
        made(False, reduce_range=True).capabilities.dialect,
    ] == [eight, seven]
    assert made(True).describe()["dialect"] == seven, (
        "so that a cluster's devices decide, and a run cannot continue without"
    )
    assert "dialect" not in made(False).describe(), "as it always was"


def test_gpu_providers_use_8bit_weights(monkeypatch):
    import onnxruntime

    monkeypatch.setattr("harness.runtimes.onnxruntime._import_onnxruntime", lambda: FakeOrt(onnxruntime))
    monkeypatch.setattr("harness.runtimes.onnxruntime.machine_lacks_vnni", lambda: True)
    dialects = [ONNXRuntimeBenchmarker(provider=name).capabilities.dialect for name in ("cpu", "cuda", "tensorrt")]
    assert dialects == ["onnxruntime_7bit", "onnxruntime", "tensorrt"]
    assert ONNXRuntimeBenchmarker(activation="int8").capabilities.dialect == "onnxruntime_s8_7bit"
    unfused = ONNXRuntimeBenchmarker(optimization="disabled")
    assert unfused.capabilities.dialect == unfused.describe()["dialect"] == "onnxruntime_unfused"
    assert ONNXRuntimeBenchmarker(optimization="basic", reduce_range=True).capabilities.dialect == "onnxruntime_7bit"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"provider": "tensorrt", "reduce_range": True},
            "reduce_range: TensorRT computes with weights of 8 bits as they",
        ),
        ({"provider": "rocm"}, "provider: .*'tensorrt', but got 'rocm'"),
        ({"activation": "int4"}, "activation: .*'int8', but got 'int4'"),
        ({"activation": "uint8", "provider": "tensorrt"}, "activation: TensorRT accepts only int8, but got 'uint8'"),
        ({"precision": "f16"}, "precision: auto or f32 with this provider, but got 'f16'"),
    ],
)
def test_invalid_option_combinations_are_refused(params, message):
    with pytest.raises(UserError, match=message):
        registry.create_plugin("benchmarker", "onnxruntime", params)


def has_gpu() -> bool:
    try:
        ONNXRuntimeBenchmarker(provider="cuda")
    except UserError:
        return False
    return True


@pytest.mark.parametrize(
    ("provider", "name"), [("cuda", "CUDAExecutionProvider"), ("tensorrt", "TensorrtExecutionProvider")]
)
def test_provider_that_falls_back_to_the_cpu_is_refused(provider, name, capfd):
    if has_gpu():
        pytest.skip("this machine has a GPU that ONNX Runtime uses")
    capfd.readouterr()
    with pytest.raises(
        UserError, match=rf"{name} does not work here \(.+\); it needs an NVIDIA GPU.*Use provider: cpu"
    ):
        registry.create_plugin("benchmarker", "onnxruntime", {"provider": provider})
    assert "EP Error" not in capfd.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("provider", ["cuda", "tensorrt"])
def test_gpu_providers_compute_the_results_of_the_cpu(provider, path, tmp_path):
    if not has_gpu():
        pytest.skip("ONNX Runtime finds no NVIDIA GPU with its CUDA libraries here")
    feeds = {"x": np.random.default_rng(0).uniform(-1, 1, (1, 8, 32, 32)).astype(np.float32)}
    answers = []
    for chosen in ("cpu", provider):
        made: Any = registry.create_plugin("benchmarker", "onnxruntime", {"provider": chosen})
        with made.open(made.build(file_candidate(path), tmp_path)) as probe:
            assert min(probe.sample(5)) > 0
            answers.append(probe.infer(feeds)["y"])
    np.testing.assert_allclose(*answers, rtol=1e-2, atol=1e-3)


class FakeOrt:
    """What the benchmarker sees of ONNX Runtime on a machine with a GPU."""

    __version__ = "9.9"

    def __init__(self, real: Any) -> None:
        self._real = real
        self.sessions: list[tuple[Any, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def preload_dlls(self) -> None:
        """Everything is there."""

    def InferenceSession(self, model: Any, options: Any, **kwargs: Any) -> Any:
        self.sessions.append((model, kwargs))
        session = self._real.InferenceSession(model, options, providers=["CPUExecutionProvider"])

        class Session:
            def get_providers(self) -> list[str]:
                return [name for name, _ in kwargs["providers"]]

            def __getattr__(self, name: str) -> Any:
                return getattr(session, name)

        return Session()


def test_gpu_provider_order_and_int8_only_for_qdq_models(path, tmp_path, monkeypatch):
    import onnxruntime

    fake = FakeOrt(onnxruntime)
    monkeypatch.setattr("harness.runtimes.onnxruntime._import_onnxruntime", lambda: fake)
    made = ONNXRuntimeBenchmarker(provider="tensorrt", precision="f16")
    facts = made.describe()
    assert made.capabilities.dialect == "tensorrt"
    assert facts["float_precision"] == "f16"
    assert not facts["float_open"]
    assert set(facts["float_params"]) == {"f32", "f16"}
    assert ONNXRuntimeBenchmarker(provider="tensorrt").describe()["float_open"]
    assert ONNXRuntimeBenchmarker(provider="cuda").capabilities.dialect == "onnxruntime"
    fake.sessions.clear()
    quantized = tmp_path / "qdq.onnx"
    builder = GraphBuilder("qdq", opset=19)
    scale, zero = builder.const(np.float32(0.1)), builder.const(np.int8(0))
    stored = builder.op("QuantizeLinear", builder.input("x", (1, 4)), scale, zero)
    builder.output(builder.op("DequantizeLinear", stored, scale, zero), name="y")
    builder.save(quantized)
    for file in (path, quantized):
        made.build(file_candidate(file), tmp_path)
    providers = [kwargs["providers"] for _, kwargs in fake.sessions]
    assert [[name for name, _ in found] for found in providers] == 2 * [
        ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
    ]
    assert [found[0][1]["trt_int8_enable"] for found in providers] == [False, True]
    assert all(found[0][1]["trt_fp16_enable"] for found in providers)
    assert all(kwargs["enable_fallback"] is False for _, kwargs in fake.sessions)
