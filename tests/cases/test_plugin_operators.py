"""Models with plug-in operators: what comes before one is calibrated, cast and quantized; the rest is named."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto as Type
from onnx import helper, numpy_helper
from onnx_models import run_onnxruntime
from typer.testing import CliRunner

from harness.accuracy.calibration.range_estimators import finite_ranges, range_warnings
from harness.accuracy.calibration.ranges import calibrate
from harness.accuracy.tools.ptq import quantize
from harness.base.errors import BuildFailed, UserError
from harness.cli.main import app
from harness.compat.modelopt_autotune import Config, QDQAutotuner
from harness.graph.builder import GraphBuilder
from harness.graph.load import load, save_to_folder
from harness.runtimes.tensorrt.options import cast_model

SHAPE = (1, 3, 16, 16)
FEEDS = [{"images": np.random.default_rng(seed).random(SHAPE, np.float32)} for seed in range(2)]


def detector(folder: Path, *, domain: str = "", typed: bool = True, place: str = "end") -> Path:
    """Three convolutions and a plug-in, at the "end", in the "middle" or at the "start"."""
    g, rng = GraphBuilder("net"), np.random.default_rng
    shapes = {"w0": (16, 3, 3, 3), "w1": (16, 16, 3, 3), "w2": (4, 16, 3, 3), "anchors": (5, 4)}
    for name, shape in shapes.items():
        g.const((rng(1).standard_normal(shape) * 0.2).astype(np.float32), name)

    def conv(x, output, weight):
        return g.op("Conv", x, weight, pads=[1] * 4, name=output, outputs=output)

    def plugin(x, output):
        return g.op("EfficientNMS_TRT", x, "anchors", domain=domain, score=0.25, name="nms", outputs=output)

    x = g.input("images", SHAPE)
    x = g.op("Relu", conv(plugin(x, "p") if place == "start" else x, "c0", "w0"), name="relu", outputs="r0")
    x = conv(x, "c1", "w1")
    x = plugin(x, "p") if place == "middle" else x
    y = plugin(conv(x, "b", "w2"), "y") if place == "end" else conv(x, "y", "w2")
    g.output(y, (1, 4, 16, 16))
    opsets = [helper.make_opsetid("", 17), *([helper.make_opsetid(domain, 1)] if domain else [])]
    proto = helper.make_model(g.graph(), opset_imports=opsets, ir_version=8)
    if typed and place != "end":
        entered = SHAPE if place == "start" else (1, 16, 16, 16)
        proto.graph.value_info.append(helper.make_tensor_value_info("p", Type.FLOAT, entered))
    onnx.save(proto, folder / "net.onnx")
    return folder / "net.onnx"


@pytest.mark.parametrize("domain", ["", "trt.plugins"])
@pytest.mark.parametrize("place", ["end", "middle"])
def test_tensors_before_a_plugin_are_calibrated(place, domain, tmp_path):
    file = save_to_folder(load(detector(tmp_path, place=place, domain=domain)), tmp_path / "float")
    behind = {"y"} if place == "end" else {"p", "y"}
    found = calibrate(file, {"images", "r0", "c1", *behind}, FEEDS)
    proto = onnx.load(file)
    del proto.graph.node[3:]
    proto.graph.output[0].CopyFrom(helper.make_tensor_value_info("c1", Type.FLOAT, None))
    values = np.stack([run_onnxruntime(proto, feeds, ["c1"])[0] for feeds in FEEDS])
    assert found["c1"] == pytest.approx((values.min(), values.max()), rel=1e-5)
    assert set(finite_ranges(found)) == {"images", "r0", "c1"}
    (remark,) = range_warnings(found)
    assert "plug-in" in remark
    assert all(repr(name) in remark for name in behind)


def test_plugin_at_the_input_prevents_calibration(tmp_path):
    file = save_to_folder(load(detector(tmp_path, place="start")), tmp_path / "float")
    with pytest.raises(UserError, match="behind plug-in operator EfficientNMS_TRT"):
        calibrate(file, {"p", "r0"}, FEEDS)


@pytest.mark.parametrize("precision", ["f16", "bf16"])
@pytest.mark.parametrize("place", ["end", "middle", "start"])
def test_plugins_keep_their_types_in_a_cast_model(place, precision, tmp_path):
    cast = load(cast_model(detector(tmp_path, place=place), precision, tmp_path / "cast"))
    kind = {"f16": "float16", "bf16": "bfloat16"}[precision]
    (plugin,) = (node for node in cast.nodes if node.op == "EfficientNMS_TRT")
    assert plugin.attributes == {"score": 0.25}
    assert cast.types[plugin.inputs[0]].dtype == "float"
    assert cast.constants[plugin.inputs[1]].data_type == Type.FLOAT
    convolutions = [node for node in cast.nodes if node.op == "Conv"]
    assert len(convolutions) == 3
    assert {cast.types[node.inputs[0]].dtype for node in convolutions} == {kind}
    assert [value.type.tensor_type.elem_type for value in cast.proto.graph.output] == [Type.FLOAT]


def test_plugin_of_unknown_types_prevents_casting(tmp_path):
    with pytest.raises(BuildFailed, match=r"tensor 'p'.*precision: f32"):
        cast_model(detector(tmp_path, place="middle", typed=False), "f16", tmp_path)


def test_ort_static_quantizes_operators_before_a_plugin(tmp_path):
    file = save_to_folder(load(detector(tmp_path, place="middle")), tmp_path / "float")
    quantize("ort_static", file, tmp_path / "q.onnx", FEEDS, dialect_name="tensorrt")
    made = load(tmp_path / "q.onnx")
    by_name = {node.name: node for node in made.nodes}
    dequantized = {name for node in made.nodes if node.op == "DequantizeLinear" for name in node.outputs}
    assert {by_name["c0"].inputs[0], by_name["c1"].inputs[0]} <= dequantized
    assert by_name["y"].inputs == ("p", "w2")
    assert by_name["nms"].inputs[1] == "anchors"


def test_scales_before_a_plugin_are_computed_without_data(tmp_path):
    autotuner = QDQAutotuner(onnx.load(detector(tmp_path)))
    autotuner.initialize(Config(default_q_scale=0.1))
    space = autotuner.session.space
    proto = autotuner.session.proto(space.resolve(space.quantize_all()))
    scales = [t for t in proto.graph.initializer if t.name.endswith("scale") and not t.dims]
    assert len(scales) > 2
    assert not [t for t in scales if float(numpy_helper.to_array(t)) == pytest.approx(0.1)]


def test_experiment_names_operators_that_stay_float(tmp_path, monkeypatch):
    detector(tmp_path, place="middle")
    np.savez(tmp_path / "data.npz", images=np.concatenate([feeds["images"] for feeds in FEEDS]))
    data = {"data": {"use": "npz", "path": "data.npz"}, "samples": 2}
    experiment = {
        "experiment": "plugin",
        "models": [{"use": "net.onnx", "label": "net", "calibration": data}],
        "backends": ["simulated"],
        "searchers": ["random"],
        "initial": "none",
        "budget": {"evaluations": [3]},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(experiment))
    done = CliRunner().invoke(app, ["run", str(tmp_path / "run.yaml"), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "stay float: 'p'" in done.output
    files = [*(tmp_path / "out").glob("net-*/models/*.onnx")]
    assert files
    for file in files:
        nodes = {node.name: node for node in onnx.load(file).graph.node}
        assert nodes["nms"].op_type == "EfficientNMS_TRT"
        assert nodes["y"].input[0] == "p"
