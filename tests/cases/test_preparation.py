"""Preparation computes constants ahead only where their type comes back, and drops nodes that move nothing."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, parser
from onnx.reference import ReferenceEvaluator
from onnx_models import loaded, net, run_onnxruntime

X = np.zeros(4, np.float32)


def ready(proto: onnx.ModelProto) -> list[str]:
    """Check that the loaded model computes what the model computes, and return its operators."""
    model = loaded(proto, "m.onnx")
    feeds = {"x": X, "i": np.arange(4)}
    feeds = {value.name: feeds[value.name] for value in proto.graph.input}
    for want, got in zip(*(ReferenceEvaluator(p).run(None, feeds) for p in (proto, model.proto)), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    return [node.op for node in model.nodes]


@pytest.mark.parametrize(
    ("kind", "is_folded"),
    [("FLOAT16", True), ("INT8", True), ("BOOL", True), ("DOUBLE", True), ("BFLOAT16", False), ("FLOAT8E4M3FN", False),
     ("FLOAT8E4M3FNUZ", False), ("FLOAT8E5M2", False), ("FLOAT8E5M2FNUZ", False), ("INT4", False), ("UINT4", False),
     ("FLOAT4E2M1", False)],
)  # fmt: skip
def test_constant_cast_is_folded_to_supported_types_only(kind, is_folded):
    nodes = [
        helper.make_node("Cast", ["w"], ["cast"], to=getattr(TensorProto, kind)),
        helper.make_node("Gather", ["cast", "i"], ["taken"]),
        helper.make_node("Cast", ["taken"], ["back"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["x", "back"], ["y"]),
    ]
    proto = net(
        nodes, {"x": [4], "i": [4]}, {"y": [4]}, {"w": np.array([1.1, 2.6, 3.0, 0.0], np.float32)},
        kinds={"i": TensorProto.INT64}, opset=23,
    )  # fmt: skip
    assert ready(proto) == ["Cast"] * (not is_folded) + ["Gather", "Cast", "Add"]


@pytest.mark.parametrize(
    ("body", "operators"),
    [
        ("q = SequenceConstruct(a, a)  t = SequenceAt(q, i)  y = Add(x, t)",
         ["SequenceConstruct", "SequenceAt", "Add"]),
        ("e = SequenceEmpty<dtype=1>()  q = SequenceInsert(e, a)  t = SequenceAt(q, z)  y = Add(x, t)",
         ["SequenceEmpty", "SequenceInsert", "SequenceAt", "Add"]),
        ("s = SplitToSequence(a)  q = Identity(s)  t = ConcatFromSequence<axis=0>(q)  y = Add(x, t)",
         ["SplitToSequence", "Identity", "ConcatFromSequence", "Add"]),
        ("b = Add(a, a)  o = Optional(b)  t = OptionalGetElement(o)  y = Add(x, t)",
         ["Optional", "OptionalGetElement", "Add"]),
        ("b = Add(a, a)  c = Cast<to=17>(b)  d = Cast<to=1>(c)  e = Mul(a, a)  f = Add(d, e)  y = Add(x, f)",
         ["Cast", "Cast", "Add", "Add"]),
    ],
)  # fmt: skip
def test_constant_sequences_and_optionals_are_not_folded(body, operators):
    inputs = "float[4] x, int64 i" if "(q, i)" in body else "float[4] x"
    proto = parser.parse_model(
        f"""<ir_version: 9, opset_import: ["": 19]> g ({inputs}) => (float[4] y)
        <float[4] a = {{1, 2, 3, 4}}, int64 z = {{0}}> {{ {body} }}"""
    )
    model = loaded(proto, "m.onnx")  # which compares both in ONNX Runtime
    assert [node.op for node in model.nodes] == operators


def test_constant_sequence_output_is_kept():
    proto = parser.parse_model(
        """<ir_version: 9, opset_import: ["": 19]> g (float[4] x) => (float[4] y, seq(float[4]) q)
        <float[4] a = {1, 2, 3, 4}> { y = Neg(x)  b = Neg(a)  q = SequenceConstruct(a, b) }"""
    )
    assert sorted(ready(proto)) == ["Neg", "SequenceConstruct"]


CONSTANTS = """int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] four = {4}, int64[1] minus = {-1},
int64[1] low = {-5}, int64[4] shape = {1, 4, 2, 2}, int64[4] ones = {1, 1, 1, 1},
int64[8] none = {0, 0, 0, 0, 0, 0, 0, 0}, int64[8] shift = {0, 1, 0, 0, 0, -1, 0, 0},
int64[4] all = {0, 1, 2, 3}, int64[4] back = {3, 2, 1, 0},
int64[1] big = {9223372036854775807}"""


def operators(body: str, opset: int = 17) -> list[str]:
    """Check that loading keeps outputs and their names, and return the operators of the loaded model."""
    proto = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": {opset}]> g (float[1,4,2,2] x) => (float[1,4,2,2] y)
        <{CONSTANTS}> {{ {body} }}"""
    )
    model = loaded(proto, "m.onnx")
    x = np.random.default_rng(0).standard_normal((1, 4, 2, 2)).astype(np.float32)
    want, got = (run_onnxruntime(each, {"x": x})[0] for each in (proto, model.proto))
    np.testing.assert_array_equal(got, want)
    assert model.outputs == ("y",)
    assert set(model.types) == {*model.inputs, *model.constants, *(name for n in model.nodes for name in n.outputs)}
    onnx.checker.check_model(model.proto)
    return [node.op for node in model.nodes]


@pytest.mark.parametrize(
    "noop",
    ["Slice(r, zero, four, one)", "Slice(r, zero, big, one, one)", "Slice(r, low, four, one)", "Pad(r, none)",
     "Transpose<perm=[0,1,2,3]>(r)", "Reshape(r, shape)", "Expand(r, ones)", "Tile(r, ones)", "Concat<axis=1>(r)",
     "Gather<axis=1>(r, all)", "Split<axis=1>(r)", "DepthToSpace<blocksize=1>(r)"],
)  # fmt: skip
def test_no_op_is_removed(noop):
    assert operators(f"r = Relu(x)  n = {noop}  y = Neg(n)") == ["Relu", "Neg"]


def test_no_op_slice_and_pad_of_old_opsets_are_removed():
    body = "r = Relu(x)  s = Slice<axes=[1], starts=[0], ends=[4]>(r)  p = Pad<pads=[0,0,0,0,0,0,0,0]>(s)  y = Neg(p)"
    assert operators(body, opset=9) == ["Relu", "Neg"]


@pytest.mark.parametrize(
    "mover",
    ["Slice(r, minus, low, one, minus)", "Pad(r, shift)", "Transpose<perm=[0,1,3,2]>(r)", "Concat<axis=1>(h, h)",
     "Gather<axis=1>(r, back)"],
)  # fmt: skip
def test_effective_movement_operator_is_kept(mover):
    body = f"r = Relu(x)  h = Slice(r, zero, two, one)  n = {mover}  k = Add(h, h)  y = Neg(n)"
    assert mover.partition("<")[0].partition("(")[0] in operators(body)


def test_consecutive_no_ops_are_removed_and_batch_norm_folded():
    proto = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[1,2,2,2] x) => (float[1,2,2,2] y, float[1,2,2,2] z)
        <float[2,2,1,1] w = {1, 2, 3, 4}, float[2] s = {1, 2}, float[2] b = {3, 4}, int64[1] o = {0}, int64[1] e = {2},
        int64[1] a = {1}> { c = Conv(x, w)  d = Slice(c, o, e, a)  f = Transpose<perm=[0,1,2,3]>(d)
        y = BatchNormalization(f, s, b, b, s)  z = Slice(y, o, e, a) }"""
    )
    model = loaded(proto, "m.onnx")
    assert [node.op for node in model.nodes] == ["Conv", "Slice"], "the last one makes an output"
    assert model.outputs == ("y", "z")


def test_no_op_read_by_a_subgraph_is_kept():
    proto = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[4] x, bool k) => (float[4] y)
        <int64[1] o = {0}, int64[1] e = {4}> { n = Slice(x, o, e)
        y = If(k) <then_branch = t () => (float[4] p) { p = Neg(n) },
        else_branch = f () => (float[4] q) { q = Abs(n) }> }"""
    )
    model = loaded(proto, "m.onnx")
    assert [node.op for node in model.nodes] == ["Slice", "If"]
