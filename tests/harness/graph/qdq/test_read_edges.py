"""Q/DQ edges read back from graphs that other tools write."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from harness.graph.qdq.qdq_graph import diff_edges, read_qdq_edges
from search.space import Edge


def model(nodes: list[onnx.NodeProto], constants: dict[str, np.ndarray]) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(values, name) for name, values in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)])


SCALE = {"s": np.float32(0.1), "z": np.int8(0)}


def q(source: str, target: str, *grid: str) -> onnx.NodeProto:
    return helper.make_node("QuantizeLinear", [source, *(grid or ("s", "z"))], [target], name=target)


def dq(source: str, target: str, *grid: str) -> onnx.NodeProto:
    return helper.make_node("DequantizeLinear", [source, *(grid or ("s", "z"))], [target], name=target)


def matmul(left: str, right: str) -> onnx.NodeProto:
    return helper.make_node("MatMul", [left, right], ["y"], name="mm")


def test_chains_of_pairs_and_casts_lead_to_the_first_tensor() -> None:
    nodes = [q("x", "a"), dq("a", "b"), q("b", "c"), dq("c", "d"), helper.make_node("Cast", ["d"], ["e"], to=1)]
    assert read_qdq_edges(model([*nodes, matmul("e", "w")], SCALE | {"w": np.eye(2, dtype=np.float32)})) == {
        Edge("x", "mm", 0): "int8"
    }


def test_weights_are_found_stored_quantized_and_as_float_behind_a_pair() -> None:
    stored = model([dq("w_quantized", "b"), matmul("x", "b")], SCALE | {"w_quantized": np.eye(2, dtype=np.int8)})
    paired = model([q("w", "a"), dq("a", "b"), matmul("x", "b")], SCALE | {"w": np.eye(2, dtype=np.float32)})
    constant = helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(np.eye(2, dtype=np.int8)))
    node = model([constant, dq("w", "b"), matmul("x", "b")], SCALE)
    assert read_qdq_edges(stored) == read_qdq_edges(paired) == read_qdq_edges(node) == {Edge("w", "mm", 1): "int8"}


def test_a_missing_zero_point_means_uint8_unless_an_attribute_says_otherwise() -> None:
    plain = model([q("x", "a", "s"), dq("a", "b", "s"), matmul("b", "w")], SCALE | {"w": np.eye(2, dtype=np.float32)})
    assert read_qdq_edges(plain) == {Edge("x", "mm", 0): "int8"}
    typed = q("x", "a", "s")
    typed.attribute.append(helper.make_attribute("output_dtype", TensorProto.FLOAT8E4M3FN))
    proto = model([typed, dq("a", "b", "s"), matmul("b", "w")], SCALE | {"w": np.eye(2, dtype=np.float32)})
    assert read_qdq_edges(proto) == {Edge("x", "mm", 0): "fp8"}


def test_int32_biases_and_plain_tensors_are_no_edges() -> None:
    bias = dq("w_quantized", "b", "s", "n")
    assert (
        read_qdq_edges(
            model([bias, matmul("x", "b")], SCALE | {"n": np.int32(0), "w_quantized": np.eye(2, dtype=np.int32)})
        )
        == {}
    )


def test_an_output_behind_a_pair_is_an_edge_without_consumer() -> None:
    mm = helper.make_node("MatMul", ["x", "w"], ["raw"], name="mm")
    proto = model([mm, q("raw", "a"), dq("a", "y")], SCALE | {"w": np.eye(2, dtype=np.float32)})
    assert read_qdq_edges(proto) == {Edge("y", "", 0): "int8"}


def test_nodes_of_one_name_have_their_own_edges() -> None:
    first = helper.make_node("MatMul", ["b", "w"], ["h"], name="mm")
    nodes = [q("x", "a"), dq("a", "b"), first, q("h", "c"), dq("c", "d"), matmul("d", "w")]
    proto = model(nodes, SCALE | {"w": np.eye(2, dtype=np.float32)})
    assert read_qdq_edges(proto) == {Edge("x", "mm", 0): "int8", Edge("h", "mm_1", 0): "int8"}


def test_diff_names_what_is_missing_and_what_is_extra() -> None:
    proto = model([q("x", "a"), dq("a", "b"), matmul("b", "w")], SCALE | {"w": np.eye(2, dtype=np.float32)})
    got, other = (Edge("x", "mm", 0), "int8"), (Edge("w", "mm", 1), "int8")
    assert diff_edges((got,), proto) == ((), ())
    assert diff_edges((other,), proto) == ((other,), (got,))
    assert diff_edges(((got[0], "fp8"),), proto) == (((got[0], "fp8"),), (got,))
