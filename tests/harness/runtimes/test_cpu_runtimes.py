"""What OpenVINO and both builds of ONNX Runtime have in common as benchmarkers, on small models and a real one."""

import functools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from harness import zoo
from harness.base.errors import BuildFailed, MeasureFailed, UserError
from harness.graph.load import load
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import OPENVINO
from harness.measure.provenance import count_cores
from harness.plugins import registry
from harness.plugins.api import Benchmarker, InfersConcurrently
from harness.runtimes.host_clock import parse_dtype, read_profile
from harness.runtimes.testing import file_candidate
from harness.workers.inference import ConcurrentInfer, infer_all

NAMES = ("openvino", "onnxruntime", "onnxruntime_web")


def write(path: Path, shape: list[int | str], *, op: str = "Relu", domain: str = "", external: bool = False) -> Path:
    """y = OP(x W), flag = ids + 1; W is 64 x 8."""
    weights = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["xw"]),
            helper.make_node(op, ["xw"], ["y:0"], domain=domain),
            helper.make_node("Add", ["ids", "one"], ["flag"]),
        ],
        "small",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, shape),
            helper.make_tensor_value_info("ids", TensorProto.INT64, [2]),
        ],
        [
            helper.make_tensor_value_info("y:0", TensorProto.FLOAT, [shape[0], 8]),
            helper.make_tensor_value_info("flag", TensorProto.INT64, [2]),
        ],
        [numpy_helper.from_array(weights, "w"), numpy_helper.from_array(np.array([1], np.int64), "one")],
    )
    opsets = [helper.make_opsetid("", 17), *([helper.make_opsetid(domain, 1)] if domain else [])]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    onnx.save(model, path, save_as_external_data=external, location=f"{path.name}.data", size_threshold=64)
    return path


@pytest.fixture(params=NAMES)
def benchmarker(request):
    if request.param == "onnxruntime_web" and (reason := web_problem()):
        pytest.skip(reason)
    params = {"precision": "f32"} if request.param == "openvino" else {}
    made: Benchmarker = registry.create_plugin("benchmarker", request.param, params)
    return made


@functools.cache
def web_problem() -> str:
    """Return why npm's package cannot run here, or ""."""
    try:
        registry.create_plugin("benchmarker", "onnxruntime_web", {}).describe()
    except UserError as error:
        return str(error)
    return ""


def test_engine_is_timed_and_keeps_tensor_names(benchmarker, tmp_path):
    path = write(tmp_path / "m.onnx", [1, 64], external=True)
    artifact = benchmarker.build(file_candidate(path), tmp_path)
    os.truncate(tmp_path / "m.onnx.data", 0)  # the engine does not depend on its files
    path.unlink()
    feeds = {"x": np.random.default_rng(1).standard_normal((1, 64)).astype(np.float32), "ids": np.array([3, 4])}
    weights = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
    with benchmarker.open(artifact) as probe:
        readings = probe.sample(5)
        results = probe.infer(feeds)
        again = probe.sample(2)
    assert len(readings) == 5
    assert all(0 < reading < 1000 for reading in (*readings, *again))
    assert set(results) == {"y:0", "flag"}
    assert results["y:0"].dtype == np.float32
    np.testing.assert_allclose(results["y:0"], np.maximum(feeds["x"] @ weights, 0), rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(results["flag"], [4, 5])


def test_merged_outputs_keep_their_names(benchmarker, tmp_path):
    nodes = [
        helper.make_node("Relu", ["x"], ["before"]),
        helper.make_node("Cast", ["before"], ["y"], to=TensorProto.FLOAT),
        helper.make_node("Identity", ["y"], ["z"]),
    ]
    values = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in "xyz"}
    graph = helper.make_graph(nodes, "merged", [values["x"]], [values["y"], values["z"]])
    path = tmp_path / "merged.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    with benchmarker.open(benchmarker.build(file_candidate(path), tmp_path)) as probe:
        assert set(probe.infer({"x": np.ones((1, 4), np.float32)})) == {"y", "z"}


def test_build_failure_quotes_the_runtime(benchmarker, tmp_path):
    (tmp_path / "broken.onnx").write_bytes(b"nonsense")
    with pytest.raises(BuildFailed, match=r"broken\.onnx: .*(Unable to read|Protobuf parsing failed|not an ONNX file)"):
        benchmarker.build(file_candidate(tmp_path / "broken.onnx"), tmp_path)
    with pytest.raises(BuildFailed, match=r"gone\.onnx: .*(Could not open|doesn't exist|no such file)"):
        benchmarker.build(file_candidate(tmp_path / "gone.onnx"), tmp_path)
    unknown = write(tmp_path / "unknown.onnx", [1, 64], op="Frobnicate", domain="my.domain")
    with pytest.raises(BuildFailed, match=r"refuses unknown\.onnx: .*Frobnicate"):
        benchmarker.build(file_candidate(unknown), tmp_path)
    lost = write(tmp_path / "lost.onnx", [1, 64], external=True)
    (tmp_path / "lost.onnx.data").unlink()
    with pytest.raises(BuildFailed, match=r"lost\.onnx: .*lost\.onnx\.data"):
        benchmarker.build(file_candidate(lost), tmp_path)


def test_dynamic_shapes_are_refused(benchmarker, tmp_path):
    with pytest.raises(BuildFailed, match=r"m\.onnx: input 'x' has the dynamic shape .*; make it static"):
        benchmarker.build(file_candidate(write(tmp_path / "m.onnx", ["batch", 64])), tmp_path)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("openvino", {"threads": count_cores() + 1}, rf"threads: 1 to {count_cores()} .* but got {count_cores() + 1}"),
        ("onnxruntime", {"threads": 0}, rf"threads: 1 to {count_cores()} .* but got 0"),
        ("openvino", {"precision": "f16"}, "precision: 'auto', .*, but got 'f16'"),
        ("onnxruntime", {"optimization": "some"}, "optimization: 'disabled', .*, but got 'some'"),
        ("openvino", {"streams": 2}, r"streams: 1 to 1 .* but got 2"),
        ("openvino", {"thread": 1}, "has no parameter 'thread'; did you mean 'threads'"),
    ],
)
def test_invalid_options_are_refused(name, params, message):
    with pytest.raises(UserError, match=message):
        registry.create_plugin("benchmarker", name, params)


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        ("[", "profile cannot be read"),
        ("[]", "recorded no inference"),
        ('[{"cat": "Session"}]', "recorded no inference"),
    ],
)
def test_profiles_without_a_node_fail_the_measurement(trace, message):
    with pytest.raises(MeasureFailed, match=message):
        read_profile(trace)


def test_inputs_of_a_type_that_numpy_lacks_are_named():
    with pytest.raises(MeasureFailed, match=r"'x': no fixed values can be made for type seq\(tensor"):
        parse_dtype(SimpleNamespace(name="x", type="seq(tensor(float))"))


@pytest.mark.parametrize(("name", "module"), [("openvino", "openvino"), ("onnxruntime", "onnxruntime")])
def test_a_runtime_that_is_not_installed_is_named(name, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=f"benchmarker '{name}': .*pip install"):
        registry.create_plugin("benchmarker", name, {})


def has_bf16() -> bool:
    return "bf16" in registry.create_plugin("benchmarker", "openvino", {}).describe()["float_params"]


def test_float_precisions_of_the_cpu_run(tmp_path):
    facts = registry.create_plugin("benchmarker", "openvino", {}).describe()
    assert facts["float_open"]
    if not has_bf16():
        assert list(facts["float_params"]) == ["f32"]
        with pytest.raises(UserError, match=r"this CPU offers .* but got 'bf16'; use 'f32' or 'auto'"):
            registry.create_plugin("benchmarker", "openvino", {"precision": "bf16"})
        return
    plain, half = (registry.create_plugin("benchmarker", "openvino", facts["float_params"][p]) for p in ("f32", "bf16"))
    assert plain.describe()["float_precision"] == "f32"
    assert not plain.describe()["float_open"]
    artifact = half.build(file_candidate(write(tmp_path / "m.onnx", [16, 64])), tmp_path)
    assert artifact.info["layers"].get("bf16", 0) > 0
    assert "bf16" not in plain.build(file_candidate(tmp_path / "m.onnx"), tmp_path).info["layers"]


def test_openvino_sends_no_telemetry(tmp_path):
    code = (
        "import sys; from harness.runtimes.openvino import OpenVINOBenchmarker; OpenVINOBenchmarker(); "
        "print([name for name in sys.modules if name.startswith('openvino_telemetry.')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "HOME": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stderr
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def quantized_detector(tmp_path_factory):
    """The zoo's detector with a pair at every point, whose kernels are those of integers."""
    folder = tmp_path_factory.mktemp("quantized")
    model = load(zoo.write_model("shapes_detector", folder / "float.onnx"))
    space = build_space(model, OPENVINO)
    ranges = {edge.tensor: (-3.0, 3.0) for dimension in space.dimensions for edge in dimension.edges}
    return Inserter(model, OPENVINO, ranges).export(space.resolve(space.quantize_all()), folder / "all.onnx")


@pytest.mark.parametrize("name", ["openvino", "onnxruntime"])
def test_concurrent_inferences_equal_single_ones(name, quantized_detector, tmp_path, monkeypatch):
    monkeypatch.setattr(f"harness.runtimes.{name}.count_cores", lambda: 2)
    made = registry.create_plugin("benchmarker", name, {"precision": "f32"} if name == "openvino" else {})
    rng = np.random.default_rng(0)
    images = [{"images": rng.normal(size=(1, 3, 128, 128)).astype(np.float32)} for _ in range(12)]
    with made.open(made.build(file_candidate(quantized_detector), tmp_path)) as probe:
        single = [probe.infer(feeds) for feeds in images]
        assert isinstance(probe, InfersConcurrently)
        assert probe.concurrency == 2
        with probe.concurrently(2) as infer:
            several = list(infer_all(ConcurrentInfer(probe.infer, infer, 2), images))
    assert [outputs.keys() for outputs in several] == [outputs.keys() for outputs in single]
    for one, other in zip(single, several, strict=True):
        for output in one:
            np.testing.assert_array_equal(one[output], other[output])
    assert not np.array_equal(*(next(iter(outputs.values())) for outputs in several[:2]))
