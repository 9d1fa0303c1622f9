"""Constants are computed ahead only where the result comes back as a tensor of its type."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser
from onnx.reference import ReferenceEvaluator

from harness.graph.load import load_proto

X = np.zeros(4, np.float32)


def ready(proto: onnx.ModelProto) -> list[str]:
    """Check that the loaded model computes what the model computes, and return its operators."""
    model = load_proto(proto, source="m.onnx", sha256="0")
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
def test_a_cast_of_constants(kind: str, is_folded: bool) -> None:
    nodes = [
        helper.make_node("Cast", ["w"], ["cast"], to=getattr(TensorProto, kind)),
        helper.make_node("Gather", ["cast", "i"], ["taken"]),
        helper.make_node("Cast", ["taken"], ["back"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["x", "back"], ["y"]),
    ]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [4]),
        helper.make_tensor_value_info("i", TensorProto.INT64, [4]),
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])]
    weights = [numpy_helper.from_array(np.array([1.1, 2.6, 3.0, 0.0], np.float32), "w")]
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
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
def test_sequences_and_optionals_of_constants(body: str, operators: list[str]) -> None:
    inputs = "float[4] x, int64 i" if "(q, i)" in body else "float[4] x"
    proto = parser.parse_model(
        f"""<ir_version: 9, opset_import: ["": 19]> g ({inputs}) => (float[4] y)
        <float[4] a = {{1, 2, 3, 4}}, int64 z = {{0}}> {{ {body} }}"""
    )
    model = load_proto(proto, source="m.onnx", sha256="0")  # which compares both in ONNX Runtime
    assert [node.op for node in model.nodes] == operators


def test_a_sequence_of_constants_as_an_output() -> None:
    proto = parser.parse_model(
        """<ir_version: 9, opset_import: ["": 19]> g (float[4] x) => (float[4] y, seq(float[4]) q)
        <float[4] a = {1, 2, 3, 4}> { y = Neg(x)  b = Neg(a)  q = SequenceConstruct(a, b) }"""
    )
    assert sorted(ready(proto)) == ["Neg", "SequenceConstruct"]
