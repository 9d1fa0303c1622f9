"""Pairs taken out of the way, node by node."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto, helper

from harness.graph.qdq.qdq_graph import PairRemover


def saved(nodes: list[onnx.NodeProto], shape: list[int], path: Path) -> Path:
    """A model from x to y, with a scale and a zero point."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [
            helper.make_tensor("scale", TensorProto.FLOAT, [], [0.5]),
            helper.make_tensor("zero", TensorProto.INT8, [], [0]),
        ],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)]), path)
    return path


def pair(source: str, target: str) -> list[onnx.NodeProto]:
    return [
        helper.make_node("QuantizeLinear", [source, "scale", "zero"], [f"{target}.q"]),
        helper.make_node("DequantizeLinear", [f"{target}.q", "scale", "zero"], [target]),
    ]


def test_nodes_beside_constants_and_optional_outputs(tmp_path: Path) -> None:
    """Constant nodes have no inputs, and outputs that nobody wants have no name."""
    nodes = [
        helper.make_node("Constant", [], ["shape"], value_ints=[2, 2]),
        *pair("x", "dq"),
        helper.make_node("Reshape", ["dq", "shape"], ["square"], name="reshape"),
        helper.make_node("Dropout", ["square"], ["kept", ""], name="dropout"),
        helper.make_node("Clip", ["kept", "", "scale"], ["y"], name="clip"),
    ]
    bypass = PairRemover(saved(nodes, [2, 2], tmp_path / "model.onnx"))
    assert bypass.quantized_nodes == ("reshape",)
    read = {kept: onnx.load(bypass.write(kept, tmp_path / "v.onnx")) for kept in (frozenset(), frozenset({"reshape"}))}
    assert [model.graph.node[3].input[0] for model in read.values()] == ["x", "dq"]


def test_nodes_of_one_name_keep_their_own_inputs(tmp_path: Path) -> None:
    nodes = [
        *pair("x", "first"),
        helper.make_node("Relu", ["first"], ["h"], name="relu"),
        *pair("h", "second"),
        helper.make_node("Relu", ["second"], ["y"], name="relu"),
    ]
    bypass = PairRemover(saved(nodes, [4], tmp_path / "model.onnx"))
    assert bypass.quantized_nodes == ("relu", "relu_1")
    read = {}
    for kept in bypass.quantized_nodes:
        graph = onnx.load(bypass.write(frozenset({kept}), tmp_path / "v.onnx")).graph
        read[kept] = [node.input[0] for node in graph.node if node.op_type == "Relu"]
    assert read == {"relu": ["first", "h"], "relu_1": ["x", "second"]}
