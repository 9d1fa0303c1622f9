"""Preparation runs branches, loops and sizes that static shapes make constant, and writes no shape that is wrong.

It computes constants ahead only where their type comes back, and drops nodes that move nothing.
"""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, parser
from onnx.reference import ReferenceEvaluator
from onnx_models import loaded, net, new_node, normal, run_onnxruntime

from harness.base.errors import UserError
from harness.graph.model import Model

CONSTANTS = """int64 zero = {0}, int64 one = {1}, int64 three = {3}, int64[1] first = {0}, int64[1] second = {1},
bool yes = {1}, bool no = {0}, float half = {0.5}, int64[4] all = {0, 1, 2, 3}"""
X = normal(1, 4, 2, 3)


def branch(condition: str, then: str, otherwise: str, output: str = "b", declared: str = "[1,4,2,3]") -> str:
    """Return an If whose branches compute `t` and `e`, declared with some shape."""
    return (
        f"{output} = If({condition}) <then_branch = g1 () => (float{declared} t) {{ {then} }}, "
        f"else_branch = g2 () => (float{declared} e) {{ {otherwise} }}>"
    )


def model(body: str, outputs: str = "float[N,4,H,W] y", *, inputs: str = "", opset: int = 17) -> onnx.ModelProto:
    return parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": {opset}]> g (float[N,4,H,W] x{inputs}) => ({outputs})
        <{CONSTANTS}> {{ r = Relu(x) {body} }}"""
    )


def prepared(proto: onnx.ModelProto, **feeds: np.ndarray) -> Model:
    """Prepare a model at the shape of X, and check results and shapes of all tensors in ONNX Runtime.

    The runtime optimizes both models, as it does for a user.
    """
    given = {"x": X, **feeds}
    ready = loaded(proto, "m.onnx", dims={"N": 1, "H": 2, "W": 3})
    for want, got in zip(run_onnxruntime(proto, given), run_onnxruntime(ready.proto, given), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    inner = onnx.ModelProto.FromString(ready.proto.SerializeToString())
    names = [name for node in ready.nodes for name in node.outputs]
    del inner.graph.output[:], inner.graph.value_info[:]
    inner.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    shapes = {name: np.shape(value) for name, value in zip(names, run_onnxruntime(inner, given), strict=True)}
    assert {name: shapes[name] for name in names if name in ready.types} == {
        name: ready.types[name].shape for name in names if name in ready.types
    }
    return ready


def operators(proto: onnx.ModelProto, **feeds: np.ndarray) -> list[str]:
    return [node.op for node in prepared(proto, **feeds).nodes]


SIZE = "s = Shape(r)  n = Gather(s, zero)  k = Equal(n, one)"


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (branch("yes", "t = Neg(r)", "e = Abs(r)") + " y = Exp(b)", ["Relu", "Neg", "Exp"]),
        (branch("no", "t = Neg(r)", "e = Abs(r)") + " y = Exp(b)", ["Relu", "Abs", "Exp"]),
        (SIZE + branch("k", "t = Neg(r)", "e = Abs(r)") + " y = Exp(b)", ["Relu", "Neg", "Exp"]),
        # PyTorch's squeeze of an axis: the branches differ in rank.
        (SIZE + branch("k", "t = Squeeze(r, first)", "e = Identity(r)", declared="") + " y = Unsqueeze(b, first)",
         ["Relu", "Squeeze", "Unsqueeze"]),
        (SIZE + branch("k", branch("no", "t = Neg(r)", "e = Ceil(r)", "t0") + " t = Sqrt(t0)", "e = Abs(r)") +
         " y = Exp(b)", ["Relu", "Ceil", "Sqrt", "Exp"]),
        (branch("yes", "z = Neg(r) t = Abs(z)", "e = Abs(r)") + branch("yes", "z = Exp(b) t = Add(z, b)", "e = Abs(r)",
         "y"), ["Relu", "Neg", "Abs", "Exp", "Add"]),
        (branch("yes", "t = Identity(r)", "e = Abs(r)", "y"), ["Relu", "Identity"]),
        (branch("yes", "w = Constant<value_floats=[2.0]>() t = Mul(r, w)", "e = Abs(r)", "y"), ["Relu", "Mul"]),
        # A subgraph inside the branch reads a tensor of the branch.
        (branch("yes", "z = Neg(r) t = If(q) <then_branch = g3 () => (float[1,4,2,3] u) { u = Abs(z) }, "
         "else_branch = g4 () => (float[1,4,2,3] v) { v = Exp(z) }>", "e = Abs(r)", "y"), ["Relu", "Neg", "If"]),
        ("v = Loop(three, yes, half) <body = g3 (int64 i, bool c, float a) => (bool d, float o) "
         "{ d = Identity(c) o = Add(a, a) }> y = Mul(r, v)", ["Relu", "Mul"]),
    ],
)  # fmt: skip
def test_constant_control_flow_is_inlined_or_computed(body, found):
    asks = "(q)" in body
    proto = model(body, inputs=", bool q" if asks else "")
    assert operators(proto, **({"q": np.array(True)} if asks else {})) == found


def test_condition_that_is_an_input_stays():
    proto = model(branch("q", "t = Neg(r)", "e = Abs(r)", "y"), inputs=", bool q")
    assert operators(proto, q=np.array(False)) == ["Relu", "If"]


@pytest.mark.parametrize(
    ("condition", "declared"), [("yes", ""), ("yes", "[7]"), ("yes", "[1,4,2,9]"), ("q", ""), ("q", "[]"), ("q", "[7]")]
)
def test_wrongly_declared_results_of_branches_are_dropped(condition, declared):
    body = branch(condition, "t = Neg(r)", "e = Abs(r)", declared=declared) + " y = GlobalAveragePool(b)"
    ready = prepared(model(body, "float[N,4,1,1] y", inputs=", bool q"), q=np.array(True))
    assert ready.types["b"].shape == X.shape


def test_wrongly_declared_elements_of_an_optional_are_dropped():
    body = "q = Optional(r)  b = OptionalGetElement(q)  y = GlobalAveragePool(b)"
    ready = loaded(model(body, "float[N,4,1,1] y, optional(float) q"), dims={"H": 2, "W": 3})
    assert ready.types["b"].shape == X.shape
    assert len(run_onnxruntime(ready.proto, {"x": X})) == 2


def test_operator_that_contradicts_its_input_leaves_results_untyped(caplog):
    proto = model("b = Concat<axis=7>(r, r)  c = Neg(b)  y = Shape(c)", "int64[4] y, float[N,4,H,W] r")
    ready = loaded(proto, "m.onnx", dims={"H": 2, "W": 3})
    assert ready.types.keys() & {"r", "b", "c"} == {"r"}
    assert "some shapes cannot be inferred" in caplog.text


def test_shapes_that_a_loop_needs_stay_declared():
    """ONNX Runtime 1.24.4 runs no Loop whose iteration number has no declared shape."""
    body = """b, z = Loop(three, yes, r) <body = g1 (int64 i, bool c, float a) => (bool d, float[] o, float[] u)
    { d = Identity(c)  o = Exp(a)  u = ReduceMax<axes=[1]>(a) }>  y = Neg(b)"""
    ready = loaded(model(body, "float[N,4,H,W] y, float[3,N,1,H,W] z"), dims={"H": 2, "W": 3})
    assert [value.shape for value in run_onnxruntime(ready.proto, {"x": X})] == [X.shape, (3, 1, 1, 2, 3)]


def test_size_that_is_an_output_is_constant_for_others():
    proto = model("s = Shape(r)  z = ConstantOfShape(s)  y = Add(r, z)", "float[N,4,H,W] y, int64[4] s")
    assert operators(proto) == ["Relu", "Shape", "Add"]


@pytest.mark.parametrize(
    ("pool", "opset"),
    [
        ("AveragePool<auto_pad=\"SAME_UPPER\", ceil_mode=1, kernel_shape=[1,1], strides=[2,2]>(r)", 10),
        ("AveragePool<auto_pad=\"SAME_UPPER\", ceil_mode=1, kernel_shape=[1,1], strides=[2,2]>(r)", 19),
        ("MaxPool<auto_pad=\"SAME_LOWER\", ceil_mode=1, kernel_shape=[1,1], strides=[3,3]>(r)", 17),
    ],
)  # fmt: skip
def test_sizes_that_onnx_rounds_otherwise_than_onnx_runtime_are_not_used(pool, opset):
    """onnx 1.21 rounds up where ONNX Runtime 1.24.4 does not, so a size folded from its inference would be wrong."""
    proto = model(f"p = {pool}  n = Neg(p)  s = Shape(p)  y = Reshape(n, s)", "float[N,4,A,B] y", opset=opset)
    try:
        run_onnxruntime(proto, {"x": X}, optimize=False)
    except onnxruntime.capi.onnxruntime_pybind11_state.RuntimeException:
        pytest.skip("ONNX Runtime 1.32 refuses a kernel below the stride here")
    prepared(proto)


def test_batch_normalization_in_training_mode_is_named(caplog):
    ends = """int64[1] one = {1}, float[4] m = {0, 0, 0, 0}, float[4] v = {1, 1, 1, 1}"""
    text = """<ir_version: 8, opset_import: ["": 15]> g (float[2,4,2,3] x) => (float[2,4,2,3] y) <%s>
    { [norm] y%s = BatchNormalization<training_mode=1>(x, v, m, m, v) }"""
    with pytest.raises(UserError, match=r"'norm' is in training mode.*model\.eval\(\)"):
        loaded(parser.parse_model(text % (ends, "")))
    loaded(parser.parse_model(text % (ends, ", a, b")))
    assert "'norm' is in training mode" in caplog.text


def ready(proto: onnx.ModelProto) -> list[str]:
    """Check that the loaded model computes what the model computes, and return its operators."""
    model = loaded(proto, "m.onnx")
    feeds = {"x": np.zeros(4, np.float32), "i": np.arange(4)}
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
        new_node("Gather", ["cast", "i"], "taken"),
        new_node("Cast", ["taken"], "back", to=TensorProto.FLOAT),
        new_node("Add", ["x", "back"], "y"),
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


MOVEMENT_CONSTANTS = """int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] four = {4},
int64[1] minus = {-1},
int64[1] low = {-5}, int64[4] shape = {1, 4, 2, 2}, int64[4] ones = {1, 1, 1, 1},
int64[8] none = {0, 0, 0, 0, 0, 0, 0, 0}, int64[8] shift = {0, 1, 0, 0, 0, -1, 0, 0},
int64[4] all = {0, 1, 2, 3}, int64[4] back = {3, 2, 1, 0},
int64[1] big = {9223372036854775807}"""


def operators_of(body: str, opset: int = 17) -> list[str]:
    """Check that loading keeps outputs and their names, and return the operators of the loaded model."""
    proto = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": {opset}]> g (float[1,4,2,2] x) => (float[1,4,2,2] y)
        <{MOVEMENT_CONSTANTS}> {{ {body} }}"""
    )
    model = loaded(proto, "m.onnx")
    x = normal(1, 4, 2, 2)
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
    assert operators_of(f"r = Relu(x)  n = {noop}  y = Neg(n)") == ["Relu", "Neg"]


def test_no_op_slice_and_pad_of_old_opsets_are_removed():
    body = "r = Relu(x)  s = Slice<axes=[1], starts=[0], ends=[4]>(r)  p = Pad<pads=[0,0,0,0,0,0,0,0]>(s)  y = Neg(p)"
    assert operators_of(body, opset=9) == ["Relu", "Neg"]


@pytest.mark.parametrize(
    "mover",
    ["Slice(r, minus, low, one, minus)", "Pad(r, shift)", "Transpose<perm=[0,1,3,2]>(r)", "Concat<axis=1>(h, h)",
     "Gather<axis=1>(r, back)"],
)  # fmt: skip
def test_effective_movement_operator_is_kept(mover):
    body = f"r = Relu(x)  h = Slice(r, zero, two, one)  n = {mover}  k = Add(h, h)  y = Neg(n)"
    assert mover.partition("<")[0].partition("(")[0] in operators_of(body)


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
