"""Mixed placements of INT8 and FP8 give no product two types, also through operators that move values."""

import dataclasses

import numpy as np
import onnx
from onnx_models import loaded

from harness.graph.builder import GraphBuilder
from harness.graph.model import Model
from harness.graph.qdq.file_checks import find_refused_qdq
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.qdq_graph import QDQGraph
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import OPENVINO, TENSORRT, Dialect
from search.space import Dimension, Edge, Placement, Space


def attention() -> Model:
    """Scores whose operands come through Transpose, Reshape, Concat and a scaling; the second product directly."""
    net = GraphBuilder("attention", seed=2, opset=19)
    x, y = net.input("x", (1, 8, 16)), net.input("y", (1, 4, 16))
    keys = net.op("Transpose", net.op("Concat", net.op("Relu", y), net.op("Sigmoid", y), axis=1), perm=[0, 2, 1])
    queries = net.op("Reshape", net.op("Mul", x, net.const(np.float32(0.25))), net.const([1, 8, 16]))
    scores = net.op("Softmax", net.op("MatMul", queries, keys), axis=-1)
    net.output(net.op("MatMul", scores, net.op("Tanh", x)))
    return loaded(net)


def refused(model: Model, dialect: Dialect, space: Space, placement: Placement) -> list[str]:
    ranges = {edge.tensor: (-1.0, 1.0) for dimension in space.dimensions for edge in dimension.edges}
    proto: onnx.ModelProto = Inserter(model, dialect, ranges).insert(space.resolve(placement))
    return [problem.rule for problem in find_refused_qdq(QDQGraph(proto), (8, 9), dialect)]


def test_no_placement_mixes_the_operands_of_a_product():
    model, rng = attention(), np.random.default_rng(0)
    free = dataclasses.replace(TENSORRT, operands_agree=False)
    space, unbound = (build_space(model, d, precisions=["int8", "fp8"]) for d in (TENSORRT, free))
    placements = [space.random(rng) for _ in range(60)]
    assert any("mixed" in refused(model, TENSORRT, unbound, each) for each in placements)
    assert [rule for each in placements for rule in refused(model, TENSORRT, space, each)] == []


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
