"""Which inputs may be quantized, by the name of the rule that says no; what a point is worth; and the dialects."""

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from onnx import helper, numpy_helper

from harness.graph.builder import GraphBuilder
from harness.graph.load import load_proto
from harness.graph.model import Model, Node
from harness.graph.qdq.file_checks import find_refused_qdq
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.qdq_graph import QDQGraph
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import (
    BUILTIN_DIALECTS,
    ONNXRUNTIME,
    ONNXRUNTIME_S8,
    OPENVINO,
    TENSORRT,
    TENSORRT_RTX,
    Dialect,
)
from harness.graph.rules.placement_rules import PLACEMENT_RULES, find_inner_tensors, first_violated_rule
from harness.graph.rules.points import QuantizationPoint, explain_no_points, find_points, float_inputs_with_rule
from harness.plugins.registry import load_plugin
from search.space import Dimension, Edge, Placement, Space

DIALECTS = [TENSORRT, OPENVINO, ONNXRUNTIME]


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def start(shape: tuple[int, ...] = (1, 8, 4, 4), dtype: str = "float") -> tuple[GraphBuilder, str]:
    g = GraphBuilder("m")
    return g, g.input("x", shape, dtype)


def finish(g: GraphBuilder, *outputs: str) -> Model:
    for output in outputs:
        g.output(output)
    return load_proto(g.build(), source="m", sha256="0")


def of(make: Callable[[GraphBuilder, str], str], shape: tuple[int, ...] = (1, 8, 4, 4), dtype: str = "float") -> Model:
    g, x = start(shape, dtype)
    return finish(g, make(g, x))


def only(model: Model, op: str, number: int = 0) -> Node:
    return [node for node in model.nodes if node.op == op][number]


def rule(model: Model, dialect: Dialect, op: str, slot: int = 0, *, number: int = 0, precision: str = "int8") -> str:
    broken = first_violated_rule(model, dialect, only(model, op, number), slot, precision)
    return broken.name if broken else "legal"


def rules(model: Model, dialect: Dialect, op: str, slots: int = 2) -> list[str]:
    return [rule(model, dialect, op, slot, number=-1) for slot in range(slots)]


def found(model: Model, dialect: Dialect, op: str, number: int = 0) -> tuple[QuantizationPoint, ...]:
    return find_points(model, dialect, sorted(dialect.precisions, reverse=True))[only(model, op, number).index]


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda d: d.name)
def test_conv_point_has_data_and_weight_without_bias(dialect):
    model = of(lambda g, x: g.conv(x, 4, 3))
    (point,) = found(model, dialect, "Conv")
    node = only(model, "Conv")
    assert point.edges == (Edge("x", node.name, 0), Edge(node.inputs[1], node.name, 1))
    assert (point.slot, point.role, point.macs) == (0, "linear", 4 * 4 * 4 * 8 * 9)
    assert rules(model, dialect, "Conv", 3)[1:] == ["together", "bias"]


@pytest.mark.parametrize(
    ("op", "shape", "make", "macs"),
    [
        ("MatMul", (2, 3, 5), lambda g, x: g.op("MatMul", x, g.op("Transpose", x, perm=[0, 2, 1])), 2 * 3 * 3 * 5),
        ("Gemm", (4, 6), lambda g, x: g.op("Gemm", x, g.const(ones(6, 7))), 4 * 6 * 7),
        ("Gemm", (6, 4), lambda g, x: g.op("Gemm", x, g.const(ones(6, 7)), transA=1), 4 * 6 * 7),
        (
            "ConvTranspose",
            (1, 8, 4, 4),
            lambda g, x: g.op("ConvTranspose", x, g.const(ones(8, 5, 2, 2)), strides=[2, 2]),
            8 * 4 * 4 * 5 * 2 * 2,
        ),
    ],
)
def test_products_have_one_point_with_both_operands_and_macs(op, shape, make, macs):
    (point,) = found(of(make, shape), OPENVINO, op)
    assert ([edge.slot for edge in point.edges], point.macs) == ([0, 1], macs)


def test_a_convolution_with_a_computed_weight_stays_float():
    model = of(lambda g, x: g.op("Conv", x, g.op("Relu", g.input("w", (4, 8, 1, 1)))))
    assert rule(model, OPENVINO, "Conv") == "operands"
    assert found(model, OPENVINO, "Conv") == ()


def test_integers_booleans_and_scalars_have_no_points():
    g, x = start((4, 4))
    indices = g.op("ReduceSum", g.op("Cast", x, to=7), g.const([1]), keepdims=0)
    picked = g.op("Gather", x, indices)
    chosen = g.op("Where", g.op("Less", x, x), x, picked)
    total = g.op("Mul", g.op("ReduceMean", chosen, keepdims=0), g.op("ReduceMax", chosen, keepdims=0))
    model = finish(g, total)
    assert rules(model, OPENVINO, "Gather") == ["legal", "type"]
    assert rules(model, OPENVINO, "Where", 3) == ["type", "legal", "legal"]
    assert [rule(model, OPENVINO, op) for op in ("ReduceSum", "Mul", "Less")] == ["type", "scalar", "operator"]


def test_float16_has_points_and_double_has_none():
    for dtype, verdict in (("float16", "legal"), ("double", "type")):
        assert rule(of(lambda g, x: g.op("Relu", x), (4, 4), dtype), OPENVINO, "Relu") == verdict


@pytest.mark.parametrize("dialect", [ONNXRUNTIME, ONNXRUNTIME_S8], ids=lambda d: d.name)
def test_float16_has_no_points_on_onnx_runtime(dialect, caplog):
    g, x = start((4, 8), "float16")
    weight = g.const(np.ones((8, 4), np.float16))
    model = finish(g, g.op("Gemm", g.op("Relu", x), weight, g.const(np.ones(4, np.float16))))
    assert rule(model, dialect, "Gemm") == "float16"
    assert {broken.name for _, broken in float_inputs_with_rule(model, dialect)} == {"float16", "together", "bias"}
    assert not len(build_space(model, dialect))
    assert f"m: its tensors in float16 stay as they are in dialect {dialect.name}; to quantize" in caplog.text
    assert rule(model, OPENVINO, "Gemm") == "legal"


@pytest.mark.parametrize(("dtype", "dialect"), [("float16", ONNXRUNTIME), ("double", OPENVINO), ("bfloat16", TENSORRT)])
def test_explain_no_points_names_the_type_and_remedy(dtype, dialect):
    g, x = start((4, 8), dtype)
    weight = np.ones((8, 4), {"double": np.float64, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[dtype])
    text = explain_no_points(finish(g, g.op("MatMul", x, g.const(weight))), dialect)
    assert text.startswith(f"m: no insertion point that dialect '{dialect.name}' allows at int8: 1 of 1 convolutions")
    assert dtype in text
    assert "export the model in float32" in text


def branches(g: GraphBuilder, x: str, condition: str, name: str) -> str:
    """An If with a product of weights in each branch, and one in an If inside of a branch."""
    inner = []
    for side in ("then", "else"):
        b = GraphBuilder(f"{name}.{side}")
        y = b.op("MatMul", x, b.const(ones(4, 4), f"{name}.{side}.w"), outputs=[f"{name}.{side}.p"])[0]
        if side == "else" and not name.endswith("inner"):
            y = branches(b, y, condition, f"{name}.inner")
        b.output(b.op("Tanh", y, outputs=[f"{name}.{side}.y"])[0], (1, 4))
        inner.append(b.graph())
    then, other = inner
    return g.op("If", condition, then_branch=then, else_branch=other, outputs=[f"{name}.y"], name=name)[0]


def test_explain_no_points_names_the_input_that_decides_a_branch():
    """The silero-vad model: all weights are in branches by the sampling rate."""
    g, x = start((1, 4))
    is_16k = g.op("Equal", g.op("Add", g.input("sr", (), "int64"), g.const(0)), g.const(16000))
    text = explain_no_points(finish(g, branches(g, x, is_16k, "rate"), branches(g, x, is_16k, "again")), OPENVINO)
    assert "8 of 8 convolutions and products are in subgraphs of If 'rate', 'again'" in text
    assert "input 'sr'" in text
    assert "'x'" not in text
    assert "export one branch" in text


def test_explain_no_points_has_a_sentence_for_each_cause():
    g, x = start((1, 4))
    y = branches(g, x, g.input("first", (), "bool"), "choice")
    wide = g.op("MatMul", g.op("Cast", x, to=11), g.const(np.ones((4, 4))))
    moved = g.op("Conv", g.input("image", (1, 4, 2, 2)), g.input("filter", (4, 4, 1, 1)))
    g.output(g.op("FusedMatMul", x, g.const(ones(4, 4)), domain="com.microsoft"), (1, 4))
    recurrent = g.op(
        "LSTM", g.input("steps", (2, 1, 4)), g.const(ones(1, 16, 4)),
        g.const(ones(1, 16, 4)), hidden_size=4,
    )  # fmt: skip
    text = explain_no_points(finish(g, y, wide, g.op("Neg", moved), g.op("Neg", recurrent)), OPENVINO)
    for words in (
        "4 of 7 convolutions and products are in subgraphs of If 'choice'", "input 'first'",
        "1 of 7 convolutions and products are in double", "export the model in float32",
        "1 of 7 convolutions and products have a weight that is no constant ('filter')", "weights in the file",
        "1 of 7 convolutions and products are an operator of domain com.microsoft (FusedMatMul)", "operators of ONNX",
        "the weights of LSTM stay float", "quantize_dynamic",
    ):  # fmt: skip
        assert words in text
    assert "subgraphs of Loop" not in text


def test_explain_no_points_of_a_loop_and_of_a_newer_operator():
    g, x = start((1, 4))
    body = GraphBuilder("body")
    body.input("i", (), "int64")
    go, state = body.input("go", (), "bool"), body.input("state", (1, 4))
    body.output(body.op("Identity", go, outputs=["go_on"])[0], ())
    body.output(body.op("MatMul", state, body.const(ones(4, 4), "w"), outputs=["next"])[0], (1, 4))
    g.output(g.op("Loop", g.input("n", (), "int64"), "", x, body=body.graph(), name="steps"), (1, 4))
    proto = finish(g, g.op("Neg", g.input("q", (1, 2, 4, 8)))).proto
    proto.graph.node[-1].op_type = "Attention"
    text = explain_no_points(load_proto(proto, source="m", sha256="0"), OPENVINO)
    assert "1 of 2 convolutions and products are in subgraphs of Loop 'steps'" in text
    assert "unrolled" in text
    assert "1 of 2 convolutions and products are an operator that its opset does not define (Attention)" in text


def test_weights_in_local_functions_are_found():
    g, x = start((1, 2, 8))
    proto = finish(g, g.op("Relu", x)).proto
    constant = helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(ones(8, 8)))
    nodes = [constant, helper.make_node("MatMul", ["a", "w"], ["b"])]
    proto.functions.append(helper.make_function("my", "Block", ["a"], ["b"], nodes, [helper.make_opsetid("", 17)]))
    proto.opset_import.append(helper.make_opsetid("my", 1))
    proto.graph.node[0].CopyFrom(helper.make_node("Block", ["x"], list(proto.graph.node[0].output), domain="my"))
    model = load_proto(proto, source="m", sha256="0")
    assert [point.role for point in found(model, OPENVINO, "MatMul")] == ["linear"]


def test_explain_no_points_names_the_command_for_rules():
    g, x = start((4, 4), "int64")
    text = explain_no_points(finish(g, g.op("Neg", x)), OPENVINO)
    assert "rule 'operator' keeps them float (The dialect offers no point at this operator)" in text
    assert text.endswith("; rules of all inputs: 'qdq inspect regions m --dialect openvino --verbose'")
    g, x = start((4, 4))
    empty = replace(finish(g, g.op("Relu", x)), nodes=())
    assert explain_no_points(empty, OPENVINO).endswith("at int8: it has no operator that reads a tensor")


def test_unknown_types_stay_float():
    assert rule(replace(of(lambda g, x: g.op("Relu", x)), types={}), OPENVINO, "Relu") == "type"
    assert rule(replace(of(lambda g, x: g.conv(x, 4, 3)), types={}), OPENVINO, "Conv") == "operands"


def test_constants_other_than_weights_stay_float():
    model = of(lambda g, x: g.op("Add", x, g.const(ones(4, 4))), (4, 4))
    assert rule(model, OPENVINO, "Add", 1) == "constant"
    (point,) = found(model, OPENVINO, "Add")
    assert (point.slot, point.role) == (0, "other")


def test_onnx_runtime_points_include_constant_operands():
    g, x = start((4, 4))
    model = finish(g, g.op("Mul", g.const(np.float32(0.5)), g.op("Add", x, g.const(ones(4, 4)))))
    (add,), (mul,) = found(model, ONNXRUNTIME, "Add"), found(model, ONNXRUNTIME, "Mul")
    assert (add.slot, [edge.slot for edge in add.edges]) == (0, [0, 1])
    assert (mul.slot, [edge.slot for edge in mul.edges]) == (1, [0, 1])  # the point stands at the activation
    assert rule(model, ONNXRUNTIME, "Add", 1) == rule(model, ONNXRUNTIME, "Mul", 0) == "together"
    for dialect in (OPENVINO, TENSORRT):
        assert [edge.slot for edge in found(model, dialect, "Add")[0].edges] == [0]


def test_onnx_runtime_points_of_concat_where_and_embeddings():
    g, x = start((4, 4))
    table, constant = g.const(ones(9, 4)), g.const(ones(4, 4))
    rows = g.op("Gather", table, g.input("ids", (4,), "int64"))
    chosen = g.op("Where", g.input("mask", (4, 4), "bool"), constant, g.op("Add", x, rows))
    model = finish(g, g.op("Concat", constant, x, chosen, axis=0))
    slots = {
        op: [[e.slot for e in p.edges] for p in found(model, ONNXRUNTIME, op)] for op in ("Gather", "Where", "Concat")
    }
    assert slots == {"Gather": [[0]], "Where": [[1, 2]], "Concat": [[0, 1, 2]]}
    assert found(model, OPENVINO, "Gather") == ()
    assert [edge.slot for edge in found(model, OPENVINO, "Concat")[0].edges] == [1, 2]


def test_string_table_has_no_points():
    words = np.array(["cat", "dog"])
    model = of(lambda g, x: g.op("Gather", g.const(words, "words"), g.input("ids", (3,), "int64")))
    assert {rule(model, dialect, "Gather") for dialect in DIALECTS} == {"constant"}


def test_openvino_treats_two_operand_einsum_as_linear():
    g, x = start((2, 4, 8))
    weight = g.const(ones(8, 2, 3))
    y = g.op("Einsum", x, weight, equation="bti,ihd->bthd")
    flat = g.op("Einsum", g.op("Flatten", x), g.const(ones(32, 5)), equation="bi,ij->bj")
    model = finish(g, g.op("Einsum", y, equation="bthd->dhtb"), flat)
    (point,) = found(model, OPENVINO, "Einsum")
    assert ([edge.slot for edge in point.edges], point.role, point.macs) == ([0, 1], "linear", 2 * 4 * 8 * 2 * 3)
    verdicts = sorted(rule(model, OPENVINO, "Einsum", number=n) for n in range(3))
    assert verdicts == ["legal", "legal", "operands"]
    assert {rule(model, dialect, "Einsum") for dialect in (TENSORRT, ONNXRUNTIME)} == {"operator"}


def sequence(bias: int | None):
    """Return a graph of two small products, the first with a bias of this length or without one, and its result."""
    g, x = start((4, 8))
    weight, biases = g.const(ones(8, 8)), [] if bias is None else [g.const(np.ones(bias, np.float32))]
    return g, g.op("Gemm", g.op("Gemm", x, weight, *biases), weight, g.const(ones(8)))


def test_openvino_products_with_vectors_and_in_a_sequence_without_bias_stay_float():
    g, x = start((4, 8))
    weight = g.const(ones(8, 8))
    bias, row = g.const(ones(8)), g.const(ones(1, 8))
    y = g.op("Gemm", g.op("MatMul", g.op("MatMul", x, weight), g.op("Transpose", x)), x, bias)
    y = g.op("Gemm", g.op("Gemm", y, weight, bias), weight, row)
    model = finish(g, g.op("MatMul", g.op("ReduceMean", y, axes=[0], keepdims=0), weight))
    found = [rule(model, OPENVINO, "MatMul", number=n) for n in range(3)]
    assert found == ["legal", "legal", "vector"]
    bare = finish(*sequence(bias=None))
    assert [rule(bare, OPENVINO, "Gemm", number=n) for n in range(2)] == ["product sequence"] * 2
    assert [rule(finish(*sequence(bias=8)), OPENVINO, "Gemm", number=n) for n in range(2)] == ["legal"] * 2
    assert rule(model, OPENVINO, "MatMul", precision="fp8") == rule(model, TENSORRT, "MatMul") == "legal"


@pytest.mark.parametrize("none", [-np.inf, np.finfo(np.float32).min])
def test_attention_mask_stays_float_on_onnx_runtime(none):
    mask = np.triu(np.full((4, 4), none, np.float32), 1)
    model = of(lambda g, x: g.op("Add", x, g.const(mask)), (4, 4))
    assert [rule(model, dialect, "Add") for dialect in (ONNXRUNTIME, OPENVINO)] == ["finite", "legal"]
    joined = of(lambda g, x: g.op("Concat", x, g.const(np.full((4, 4), none, np.float32)), axis=0), (4, 4))
    assert {rule(joined, dialect, "Concat") for dialect in DIALECTS} == {"finite"}


def test_each_operand_of_an_elementwise_operator_is_a_point():
    points = found(of(lambda g, x: g.op("Mul", g.op("Tanh", x), x)), OPENVINO, "Mul")
    assert [(point.slot, point.role, len(point.edges)) for point in points] == [(0, "mul", 1), (1, "mul", 1)]


def test_the_inputs_of_a_concat_share_one_point():
    first = ones(4, 4)
    model = of(lambda g, x: g.op("Concat", g.const(first), g.op("Relu", x), g.op("Tanh", x), axis=0), (4, 4))
    (point,) = found(model, OPENVINO, "Concat")
    assert ([edge.slot for edge in point.edges], point.role) == ([1, 2], "concat")
    assert rule(model, OPENVINO, "Concat", 2) == "one scale"


def test_opaque_nodes_stay_float():
    g, x = start((1, 4))
    inner, other = GraphBuilder("inner"), GraphBuilder("other")
    inner.output(inner.op("Tanh", x, outputs=["p"])[0], (1, 4))
    other.output(other.op("Relu", x, outputs=["q"])[0], (1, 4))
    g.op("If", g.input("flag", (), "bool"), then_branch=inner.graph(), else_branch=other.graph(), outputs=["y"])
    model = finish(g, g.op("Relu", "y"))
    assert rule(model, OPENVINO, "If") == "opaque"
    assert found(model, OPENVINO, "If") == ()


@pytest.mark.parametrize(("dialect", "verdict"), [(TENSORRT, "fusion"), (OPENVINO, "legal"), (ONNXRUNTIME, "legal")])
@pytest.mark.parametrize("activation", ["Relu", "Sigmoid", "LeakyRelu"])
def test_no_point_between_conv_and_activation(activation, dialect, verdict):
    model = of(lambda g, x: g.op(activation, g.conv(x, 4, 3)))
    absorbed = activation in dialect.absorbed
    assert rule(model, dialect, activation) == ("absorbed" if absorbed else verdict)


def test_activation_is_absorbed_only_as_the_sole_reader():
    g, x = start()
    y = g.conv(x, 8, 3)
    assert rule(finish(g, g.op("Add", g.op("Relu", y), y)), ONNXRUNTIME, "Relu") == "legal"
    g, x = start()
    y = g.conv(x, 8, 3)
    assert rule(finish(g, g.op("Relu", y), y), ONNXRUNTIME, "Relu") == "legal"  # y leaves the model


def silu(g, x):
    return g.op("Mul", x, g.op("Sigmoid", x))


def residual(g, x):
    y = g.op("Relu", x)
    return g.op("Relu", g.op("Add", g.conv(y, 8, 3), y))


def biased(g, x):
    return g.op("Add", x, g.op("Add", g.conv(x, 8, 3, bias=False), g.const(ones(1, 8, 1, 1))))


def read_twice(g, x):
    y = g.conv(x, 8, 3)
    g.output(g.op("Tanh", y))
    return g.op("Add", y, x)


@pytest.mark.parametrize(
    ("make", "op", "expected"),
    [
        (lambda g, x: silu(g, g.conv(x, 8, 3)), "Mul", ["fusion", "fusion"]),
        (silu, "Mul", ["legal", "legal"]),
        (residual, "Add", ["residual", "legal"]),
        (residual, "Relu", ["fusion"]),
        (lambda g, x: g.op("Add", g.conv(x, 8, 3), g.conv(x, 8, 1)), "Add", ["residual", "legal"]),
        (biased, "Add", ["legal", "residual"]),
        (lambda g, x: g.op("Add", x, g.linear(x, 4)), "Add", ["legal", "legal"]),
        (read_twice, "Add", ["legal", "legal"]),
    ],
)
def test_operators_fused_with_a_convolution_on_tensorrt(make, op, expected):
    model = of(make)
    assert rules(model, TENSORRT, op, len(expected)) == expected
    assert set(rules(model, OPENVINO, op, len(expected))) == {"legal"}


def test_grouped_convolutions_have_no_fp8():
    model = of(lambda g, x: g.conv(x, 8, 3, groups=-1))
    assert rule(model, TENSORRT, "Conv", precision="fp8") == "grouped fp8"
    assert found(model, TENSORRT, "Conv")[0].precisions == ("int8",)
    assert found(model, OPENVINO, "Conv")[0].precisions == ("int8", "fp8e5m2", "fp8")
    assert rule(model, ONNXRUNTIME, "Conv", precision="fp8") == "precision"


@pytest.mark.parametrize(("size", "found_rule"), [(5, "legal"), (7, "fp8 filter")])
def test_large_filters_have_no_fp8_on_tensorrt(size, found_rule):
    model = of(lambda g, x: g.conv(x, 8, size, pad=size // 2))
    assert rule(model, TENSORRT, "Conv", precision="fp8") == found_rule
    assert rule(model, TENSORRT, "Conv") == rule(model, OPENVINO, "Conv", precision="fp8") == "legal"


def test_float_kernels_of_rtx_have_no_points():
    g, x = start()
    model = finish(g, *(g.op(op, x, kernel_shape=[2, 2]) for op in ("AveragePool", "MaxPool")))
    for precision, expected in (("int8", "legal"), ("fp8", "float kernel")):
        assert rule(model, TENSORRT_RTX, "AveragePool", precision=precision) == "float kernel"
        assert rule(model, TENSORRT_RTX, "MaxPool", precision=precision) == expected
        assert rule(model, TENSORRT, "AveragePool", precision=precision) == "legal"


def moved(g, x):
    y = g.op("Sigmoid", g.conv(x, 16, 3, pad=1))
    return g.op("Transpose", g.op("Mul", y, g.const(np.float32(0.5))), perm=[0, 1, 3, 2])


@pytest.mark.parametrize(
    ("behind", "expected"),
    [
        (lambda g, y: g.conv(y, 16, 1), ["Conv", "Conv"]),
        (lambda g, y: g.op("MaxPool", y, kernel_shape=[2, 2]), ["Conv"]),
        (lambda g, y: g.op("Tanh", y), ["Conv", "Sigmoid", "Mul", "Transpose", "Tanh"]),
        (lambda g, y: g.op("Add", g.conv(y, 16, 1), g.op("Tanh", y)), ["Conv", "Conv", "Tanh", "Add"]),
        (lambda g, y: y, ["Conv", "Sigmoid", "Mul", "Transpose"]),
    ],
    ids=["conv", "pool", "tanh", "both", "output"],
)
def test_inputs_of_products_and_pools_are_not_inner_tensors(behind, expected):
    model = of(lambda g, x: behind(g, moved(g, x)))
    inner = find_inner_tensors(model)
    assert [node.op for node in model.nodes if node.outputs[0] in inner] == expected


def test_one_kernel_rule_applies_to_rtx_only_and_not_behind_products_of_activations():
    model = of(lambda g, x: g.op("Tanh", g.op("Softmax", x)))
    assert [rule(model, dialect, "Tanh") for dialect in (TENSORRT_RTX, TENSORRT)] == ["one kernel", "legal"]
    model = of(lambda g, x: g.op("Softmax", g.op("Div", g.op("MatMul", x, x), g.const(np.float32(8)))))
    made = {only(model, op).outputs[0] for op in ("MatMul", "Div")}
    assert not made & find_inner_tensors(model)


def test_reduce_mean_over_an_image_has_role_pool():
    for shape, axes, role in (((1, 8, 4, 4), [2, 3], "pool"), ((1, 4, 8), [2], "other")):
        model = of(lambda g, x, axes=axes: g.op("ReduceMean", x, axes=axes), shape)
        assert found(model, OPENVINO, "ReduceMean")[0].role == role


@pytest.mark.parametrize(
    ("role", "ops"),
    [
        ("pool", ["MaxPool"]),
        ("activation", ["Relu", "Celu", "Softsign", "ThresholdedRelu", "Softmax"]),
        ("movement", ["Reshape"]),
        ("other", ["Sqrt"]),
    ],
)
def test_roles_of_operators(role, ops):
    for op in ops:
        g, x = start()
        extra = {"kernel_shape": [2, 2]} if op == "MaxPool" else {}
        inputs = [x, g.const([1, -1])] if op == "Reshape" else [x]
        assert found(finish(g, g.op(op, *inputs, **extra)), OPENVINO, op)[0].role == role


def test_rules_have_unique_names_texts_and_docs():
    assert len({r.name for r in PLACEMENT_RULES}) == len(PLACEMENT_RULES)
    assert all(r.text.endswith(".") for r in PLACEMENT_RULES)
    page = (Path(__file__).resolve().parents[4] / "docs/reference/regions.md").read_text(encoding="utf-8")
    assert [r.name for r in PLACEMENT_RULES if f"\n| `{r.name}` |" not in page] == []


@pytest.mark.parametrize("dialect", BUILTIN_DIALECTS.values(), ids=lambda d: d.name)
def test_dialects_are_found_by_name_and_never_change(dialect):
    assert load_plugin("dialect", dialect.name) is dialect
    assert not dialect.linear_ops & dialect.points
    with pytest.raises(dataclasses.FrozenInstanceError):
        dialect.name = "other"  # type: ignore[misc]
    if dialect.name.endswith("7bit"):
        assert 2 * 255 * dialect.weight_limit <= 2**15 - 1, "sums of two products fit into 16 bits"
        assert dialect.facts["weight_limit"] == 64
    else:
        assert "weight_limit" not in dialect.facts, "a default changes no digest"


def test_opsets_types_and_rtx_rules_of_dialects():
    assert [OPENVINO.opset(precisions) for precisions in (["int8"], ["int8", "fp8"])] == [13, 19]
    assert [(d.activation, d.symmetric_activation, d.bias) for d in (TENSORRT, OPENVINO, ONNXRUNTIME)] == [
        ("int8", True, "float"),
        ("int8", True, "float"),
        ("uint8", False, "int32"),
    ]
    assert not TENSORRT.unsigned_positive  # its parser refuses UINT8 and any zero point but 0
    assert not TENSORRT.affine_ops
    assert TENSORRT.operands_agree
    assert TENSORRT_RTX.operands_agree
    assert not TENSORRT.float_kernels
    assert TENSORRT.facts == {**TENSORRT_RTX.facts, "name": "tensorrt", "grouped_fp8": False}


def attention() -> Model:
    """Scores whose operands come through Transpose, Reshape, Concat and a scaling; the second product directly."""
    net = GraphBuilder("attention", seed=2, opset=19)
    x, y = net.input("x", (1, 8, 16)), net.input("y", (1, 4, 16))
    keys = net.op("Transpose", net.op("Concat", net.op("Relu", y), net.op("Sigmoid", y), axis=1), perm=[0, 2, 1])
    queries = net.op("Reshape", net.op("Mul", x, net.const(np.float32(0.25))), net.const([1, 8, 16]))
    scores = net.op("Softmax", net.op("MatMul", queries, keys), axis=-1)
    net.output(net.op("MatMul", scores, net.op("Tanh", x)))
    return load_proto(net.build(), source="m", sha256="0")


def refused_rules(model: Model, dialect: Dialect, space: Space, placement: Placement) -> list[str]:
    ranges = {edge.tensor: (-1.0, 1.0) for dimension in space.dimensions for edge in dimension.edges}
    proto = Inserter(model, dialect, ranges).insert(space.resolve(placement))
    return [problem.rule for problem in find_refused_qdq(QDQGraph(proto), (8, 9), dialect)]


def test_no_placement_mixes_the_operands_of_a_product():
    model, rng = attention(), np.random.default_rng(0)
    free = replace(TENSORRT, operands_agree=False)
    space, unbound = (build_space(model, d, precisions=["int8", "fp8"]) for d in (TENSORRT, free))
    placements = [space.random(rng) for _ in range(60)]
    assert any("mixed" in refused_rules(model, TENSORRT, unbound, each) for each in placements)
    assert [rule for each in placements for rule in refused_rules(model, TENSORRT, space, each)] == []


def test_agreements_exist_only_for_mixed_tensorrt_spaces():
    model = attention()
    assert build_space(model, TENSORRT, precisions=["int8"]).agreements == ()
    assert build_space(model, OPENVINO, precisions=["int8", "fp8"]).agreements == ()


def test_second_operand_is_changed_until_both_agree():
    own, near, far = Edge("a", "MatMul", 0), Edge("b", "Transpose", 0), Edge("c", "Concat", 0)
    second, left = Edge("d", "Concat", 1), Edge("q", "Reshape", 0)
    dimensions = tuple(
        Dimension(name=name, group=name, kind="node_input", choices=("float", "int8", "fp8"), edges=edges)
        for name, edges in (("own", (own,)), ("near", (near,)), ("far", (far, second)), ("left", (left,)))
    )
    space = Space(dimensions, (((own, left), (near, far)),))
    resolved = {
        choices: dict(space.resolve(Placement(choices))) for choices in ((0, 2, 2, 1), (0, 2, 1, 1), (2, 2, 1, 1))
    }
    assert resolved[0, 2, 2, 1] == {left: "int8"}
    assert resolved[0, 2, 1, 1] == {far: "int8", second: "int8", left: "int8"}
    assert resolved[2, 2, 1, 1] == {own: "fp8", near: "fp8", far: "int8", second: "int8", left: "int8"}
    assert space.with_dimensions(dimensions[:2]).agreements == space.agreements
