"""Models of old opsets compute after loading what they computed before, or are refused."""

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper, parser
from onnx_models import loaded, net, new_node, run_onnxruntime

from harness.base.errors import UserError
from harness.graph.load import load

BACKEND = Path(onnx.__file__).parent / "backend/test/data/node"
RNG = np.random.default_rng(0)
X = RNG.standard_normal((1, 3, 8, 8)).astype(np.float32)


def run(proto: onnx.ModelProto, x: np.ndarray = X) -> np.ndarray:
    return run_onnxruntime(proto, {"x": x}, optimize=False)[0]


def resizing(op: str, opset: int, mode: str, scales: Sequence[float], *, constant: bool = True) -> onnx.ModelProto:
    """Return Conv, an old Upsample or Resize called "up", and another Conv."""
    constants = {name: RNG.standard_normal((3, 3, 3, 3)).astype(np.float32) for name in "vw"}
    inputs, attributes = {"x": X.shape}, {"mode": mode} | ({"scales": scales} if opset < 9 else {})
    if opset >= 9 and constant:
        constants["s"] = np.array(scales, np.float32)
    elif opset >= 9:
        inputs["s"] = [4]
    nodes = [
        new_node("Conv", ["x", "v"], "c", pads=[1] * 4),
        helper.make_node(op, ["c", "s"] if opset >= 9 else ["c"], ["u"], name="up", **attributes),
        new_node("Conv", ["u", "w"], "y", pads=[1] * 4),
    ]
    return net(nodes, inputs, {"y": None}, constants, opset=opset)


@pytest.mark.parametrize(
    ("op", "opset", "scale"),
    [(op, n, s) for op, n in (("Upsample", 7), ("Upsample", 9), ("Resize", 10)) for s in (2.0, 1.3, 1.75)]
    + [("Resize", 10, 0.3), ("Resize", 10, 0.75)],
)
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_resize_computes_the_same_after_the_upgrade(op, opset, mode, scale):
    proto = resizing(op, opset, mode, [1, 1, scale, scale])
    model = loaded(proto)
    np.testing.assert_array_equal(run(model.proto), run(proto))
    resize = model.nodes[1]
    assert (resize.op, resize.name, resize.outputs) == ("Resize", "up", ("u",))
    assert resize.attributes["coordinate_transformation_mode"] == "asymmetric"


def test_resizing_by_sizes_that_are_computed_from_a_shape():
    """PyTorch exported F.interpolate so: scales computed from Shape, constant only once shapes are static."""
    proto = parser.parse_model(
        """<ir_version: 4, opset_import: ["": 10]> g (float[1,3,8,8] x) => (float[1,3,4,4] y) <float half = {0.5}> {
        n = Shape(x)  f = Cast<to=1>(n)  ones = Div(f, f)  halves = Mul(ones, half)
        s = Slice(ones, a, b)  t = Slice(halves, b, c)  scales = Concat<axis=0>(s, t)
        y = Resize<mode="nearest">(x, scales) }"""
    )
    for name, value in (("a", 0), ("b", 2), ("c", 4)):
        proto.graph.initializer.append(numpy_helper.from_array(np.array([value]), name))
    model = loaded(proto)
    assert model.nodes[0].attributes["nearest_mode"] == "ceil"
    np.testing.assert_array_equal(run(model.proto), run(proto))


@pytest.mark.parametrize(
    ("proto", "word"),
    [
        (resizing("Resize", 10, "nearest", [1, 1, 2, 0.5]), "enlarges"),
        (resizing("Resize", 10, "nearest", [1, 1, 2, 2], constant=False), "not constant"),
    ],
)
def test_resizing_without_an_equivalent_is_refused(proto, word):
    with pytest.raises(UserError, match=rf"Resize 'up'.*{word}.*|{word}.*Resize 'up'"):
        loaded(proto)


@pytest.mark.parametrize("axis", [0, 1, 2, 3, -1])
@pytest.mark.parametrize("op", ["Hardmax", "Softmax", "LogSoftmax"])
def test_softmax_and_hardmax_over_flattened_axes(op, axis):
    proto = parser.parse_model(
        f"""<ir_version: 6, opset_import: ["": 11]> g (float[1,3,8,8] x) => (float[1,3,8,8] y)
        {{ r = Relu(x)  m = {op}<axis={axis}>(r)  y = Neg(m) }}"""
    )
    np.testing.assert_allclose(run(loaded(proto).proto), run(proto), atol=1e-6)


def test_hardmax_of_unknown_shape_is_upgraded():
    proto = parser.parse_model(
        """<ir_version: 6, opset_import: ["": 11]> g (float[1,3,8,8] x) => (float[1,3,8,8] y) <int64 n = {2}>
        { y = Loop(n, , x) <body = b (int64 i, bool c, float[] u) => (bool d, float[] v)
        { d = Identity(c)  h = Hardmax<axis=-2>(u)  v = Add(h, u) }> }"""
    )
    np.testing.assert_array_equal(run(loaded(proto).proto), run(proto))


def test_scan_of_opset_8_is_refused():
    with pytest.raises(UserError, match=r"Scan.*batch axis"):
        load(BACKEND / "test_scan_sum/model.onnx")


def test_unknown_semantic_change_is_refused_naming_the_node():
    """ONNX Runtime 1.24 averages over other windows from opset 19 on if ceil_mode and count_include_pad are set."""
    proto = parser.parse_model(
        """<ir_version: 6, opset_import: ["": 11]> g (float[1,3,8,8] x) => (float y) { r = Relu(x)
        [pool] p = AveragePool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1], ceil_mode=1, count_include_pad=1>(r)
        y = Neg(p) }"""
    )
    assert len(loaded(proto).nodes) == 3
    newest = onnx.ModelProto()
    newest.CopyFrom(proto)
    newest.opset_import[0].version = 21
    is_changed = not np.allclose(run(proto), run(newest))
    refused = pytest.raises(UserError, match=r"'pool' \(AveragePool, output 'p'\).* dB.*opset 21")
    with refused if is_changed else contextlib.nullcontext():  # versions above 1.24 compute the same for both
        loaded(proto, min_opset=21)


@pytest.mark.parametrize(
    "name",
    ["affine_grid_2d", "batchnorm_epsilon", "clip_default_inbounds", "dropout_default_old", "gru_defaults",
     "hardmax_axis_1", "logsoftmax_axis_0", "loop11", "lstm_with_peepholes", "maxpool_2d_ceil",
     "reduce_sum_keepdims_random", "resize_downsample_scales_nearest", "scan9_sum",
     "split_equal_parts_1d_opset13", "squeeze", "top_k", "upsample_nearest"],
)  # fmt: skip
def test_onnx_backend_models_pass_the_comparison(name, caplog):
    path = BACKEND / f"test_{name}/model.onnx"
    with caplog.at_level(logging.WARNING):
        load(path)
    assert "not compared" not in caplog.text


BRANCHES = """<ir_version: 6, opset_import: ["": {opset}]> g (float[1,3,8,8] x, bool k) => (float[1,3,{size},{size}] y)
<float[4] s = {{1, 1, 1.5, 1.5}}> {{ y = If(k) <then_branch = t () => (float[1,3,{size},{size}] p) {{ p = {then} }},
else_branch = f () => (float[1,3,{size},{size}] q) {{ q = {other} }}> }}"""


@pytest.mark.parametrize(
    ("opset", "body", "size"),
    [(11, "Hardmax<axis=1>(x)", 8), (11, "Softmax<axis=2>(x)", 8), (9, 'Upsample<mode="linear">(x, s)', 12),
     (10, 'Resize<mode="nearest">(x, s)', 12)],
)  # fmt: skip
def test_bodies_are_upgraded_like_the_graph(opset, body, size):
    model = loaded(parser.parse_model(BRANCHES.format(opset=opset, size=size, then=body, other=body)))
    assert model.proto.opset_import[0].version > opset  # and the outputs of both models are compared on the way


@pytest.mark.parametrize("first", [True, False])
def test_both_branches_are_compared(first, monkeypatch):
    monkeypatch.setattr("harness.graph.passes.pipeline._flatten_hardmax", lambda graph: None)
    bodies = ("Hardmax<axis=1>(x)", "Neg(x)")[:: 1 if first else -1]
    proto = parser.parse_model(BRANCHES.format(opset=11, size=8, then=bodies[0], other=bodies[1]))
    with pytest.raises(UserError, match=r"\(If, output 'y'\)"):
        loaded(proto)


def test_wrongly_declared_output_is_accepted():
    proto = parser.parse_model(
        """<ir_version: 6, opset_import: ["": 11]> g (float[1,3,8,8] x, bool k) => (float[7] y)
        { y = If(k) <then_branch = t () => (float p) { p = Softmax<axis=1>(x) },
        else_branch = f () => (float q) { q = Relu(x) }> }"""
    )
    assert len(loaded(proto).nodes) == 1


@pytest.mark.parametrize(
    ("opset", "node", "is_refused"),
    [
        (6, "y = Dropout(x)", True),
        (6, "y = Dropout<is_test=1>(x)", False),
        (6, "y = BatchNormalization(x, s, s, s, s)", True),
        (6, "y = BatchNormalization<is_test=1>(x, s, s, s, s)", False),
        (9, "y, a, b, c, d = BatchNormalization(x, s, s, s, s)", True),
        (9, "y = BatchNormalization(x, s, s, s, s)", False),
        (9, "y = Dropout(x)", False),
    ],
)
def test_training_mode_operators_are_refused(opset, node, is_refused):
    proto = parser.parse_model(
        f"""<ir_version: 4, opset_import: ["": {opset}]> g (float[1,3,8,8] x) => (float[1,3,8,8] y)
        <float[3] s = {{1, 2, 3}}> {{ {node} }}"""
    )
    if is_refused:
        with pytest.raises(UserError, match="training"):
            loaded(proto)
    else:
        assert len(loaded(proto).nodes) == 1


def test_bilinear_upsample_of_opset_1_becomes_linear():
    proto = parser.parse_model(
        """<ir_version: 3, opset_import: ["": 6]> g (float[1,3,8,8] x) => (float[1,3,16,12] y)
        { y = Upsample<height_scale=2.0, width_scale=1.5, mode="bilinear">(x) }"""
    )
    (resize,) = loaded(proto).nodes
    assert resize.attributes == {"mode": "linear", "coordinate_transformation_mode": "asymmetric"}
