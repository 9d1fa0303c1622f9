"""Pairs taken out of the way, node by node."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto, helper

from harness.graph.bypass import Bypass


def test_nodes_beside_constants_and_optional_outputs(tmp_path: Path) -> None:
    """Constant nodes have no inputs, and outputs that nobody wants have no name."""
    nodes = [
        helper.make_node("Constant", [], ["shape"], value_ints=[2, 2]),
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["dq"]),
        helper.make_node("Reshape", ["dq", "shape"], ["square"], name="reshape"),
        helper.make_node("Dropout", ["square"], ["kept", ""], name="dropout"),
        helper.make_node("Clip", ["kept", "", "scale"], ["y"], name="clip"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 2])],
        [
            helper.make_tensor("scale", TensorProto.FLOAT, [], [0.5]),
            helper.make_tensor("zero", TensorProto.INT8, [], [0]),
        ],
    )
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)]), path)
    bypass = Bypass(path)
    assert bypass.nodes == ("reshape",)
    read = {kept: onnx.load(bypass.write(kept, tmp_path / "v.onnx")) for kept in (frozenset(), frozenset({"reshape"}))}
    assert [model.graph.node[3].input[0] for model in read.values()] == ["x", "dq"]
