"""Q/DQ edges read back from graphs that other tools write, and pairs removed node by node."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_models import net, new_node

from harness.graph.qdq.qdq_graph import QDQGraph, diff_edges
from harness.graph.qdq.reduce_model import PairRemover
from search.space import Edge


def model(nodes: list[onnx.NodeProto], constants: dict[str, np.ndarray], shape=(2, 2)) -> onnx.ModelProto:
    return net(nodes, {"x": shape}, {"y": None}, constants, opset=19)


SCALE = {"s": np.float32(0.1), "z": np.int8(0)}
WITH_WEIGHT = SCALE | {"w": np.eye(2, dtype=np.float32)}


def q(source, target, *grid):
    return new_node("QuantizeLinear", [source, *(grid or ("s", "z"))], target)


def dq(source, target, *grid):
    return new_node("DequantizeLinear", [source, *(grid or ("s", "z"))], target)


def matmul(left, right, output="y"):
    return new_node("MatMul", [left, right], output, name="mm")


def test_chains_of_pairs_and_casts_lead_to_the_first_tensor():
    nodes = [q("x", "a"), dq("a", "b"), q("b", "c"), dq("c", "d"), new_node("Cast", ["d"], "e", to=1)]
    assert QDQGraph(model([*nodes, matmul("e", "w")], WITH_WEIGHT)).edges == {Edge("x", "mm", 0): "int8"}


def test_quantized_and_float_weights_are_read():
    stored = model([dq("w_quantized", "b"), matmul("x", "b")], SCALE | {"w_quantized": np.eye(2, dtype=np.int8)})
    paired = model([q("w", "a"), dq("a", "b"), matmul("x", "b")], WITH_WEIGHT)
    constant = new_node("Constant", [], "w", value=numpy_helper.from_array(np.eye(2, dtype=np.int8)))
    made = model([constant, dq("w", "b"), matmul("x", "b")], SCALE)
    assert QDQGraph(stored).edges == QDQGraph(paired).edges == QDQGraph(made).edges == {Edge("w", "mm", 1): "int8"}


def test_missing_zero_point_means_8_bits_unless_output_dtype():
    plain = model([q("x", "a", "s"), dq("a", "b", "s"), matmul("b", "w")], WITH_WEIGHT)
    assert QDQGraph(plain).edges == {Edge("x", "mm", 0): "int8"}
    typed = q("x", "a", "s")
    typed.attribute.append(helper.make_attribute("output_dtype", TensorProto.FLOAT8E4M3FN))
    proto = model([typed, dq("a", "b", "s"), matmul("b", "w")], WITH_WEIGHT)
    assert QDQGraph(proto).edges == {Edge("x", "mm", 0): "fp8"}


def test_int32_biases_and_plain_tensors_are_no_edges():
    constants = SCALE | {"n": np.int32(0), "w_quantized": np.eye(2, dtype=np.int32)}
    assert QDQGraph(model([dq("w_quantized", "b", "s", "n"), matmul("x", "b")], constants)).edges == {}


def test_an_output_behind_a_pair_is_an_edge_without_consumer():
    proto = model([matmul("x", "w", "raw"), q("raw", "a"), dq("a", "y")], WITH_WEIGHT)
    assert QDQGraph(proto).edges == {Edge("y", "", 0): "int8"}


def test_nodes_with_equal_names_have_separate_edges():
    nodes = [q("x", "a"), dq("a", "b"), matmul("b", "w", "h"), q("h", "c"), dq("c", "d"), matmul("d", "w")]
    proto = model(nodes, WITH_WEIGHT)
    assert QDQGraph(proto).edges == {Edge("x", "mm", 0): "int8", Edge("h", "mm_1", 0): "int8"}


def test_diff_edges_returns_missing_and_extra_edges():
    proto = model([q("x", "a"), dq("a", "b"), matmul("b", "w")], WITH_WEIGHT)
    got, other = (Edge("x", "mm", 0), "int8"), (Edge("w", "mm", 1), "int8")
    assert diff_edges((got,), proto) == ((), ())
    assert diff_edges((other,), proto) == ((other,), (got,))
    assert diff_edges(((got[0], "fp8"),), proto) == (((got[0], "fp8"),), (got,))


def pair(source: str, target: str) -> list[onnx.NodeProto]:
    return [q(source, f"{target}.q"), dq(f"{target}.q", target)]


def inputs_of(remover: PairRemover, kept: set[str], op: str, folder: Path) -> list[str]:
    graph = onnx.load(remover.write(frozenset(kept), folder / "v.onnx")).graph
    return [node.input[0] for node in graph.node if node.op_type == op]


def test_pairs_are_removed_around_constants_and_omitted_outputs(tmp_path):
    nodes = [
        new_node("Constant", [], "shape", value_ints=[2, 2]),
        *pair("x", "dq"),
        new_node("Reshape", ["dq", "shape"], "square", name="reshape"),
        helper.make_node("Dropout", ["square"], ["kept", ""], name="dropout"),
        new_node("Clip", ["kept", "", "s"], "y", name="clip"),
    ]
    onnx.save(model(nodes, SCALE, (4,)), tmp_path / "model.onnx")
    remover = PairRemover(tmp_path / "model.onnx")
    assert remover.quantized_nodes == ("reshape",)
    assert [inputs_of(remover, kept, "Reshape", tmp_path) for kept in (set(), {"reshape"})] == [["x"], ["dq"]]


def test_pair_remover_separates_nodes_with_equal_names(tmp_path):
    relus = [helper.make_node("Relu", [x], [y], name="relu") for x, y in (("first", "h"), ("second", "y"))]
    onnx.save(model([*pair("x", "first"), relus[0], *pair("h", "second"), relus[1]], SCALE), tmp_path / "model.onnx")
    remover = PairRemover(tmp_path / "model.onnx")
    assert remover.quantized_nodes == ("relu", "relu_1")
    read = {kept: inputs_of(remover, {kept}, "Relu", tmp_path) for kept in remover.quantized_nodes}
    assert read == {"relu": ["first", "h"], "relu_1": ["x", "second"]}


def test_expanded_constants_are_computed_and_looked_up_without_being_computed():
    nodes = [
        new_node("Expand", ["column", "sizes"], "expanded"),
        new_node("ConstantOfShape", ["large"], "filled"),
        new_node("Add", ["x", "expanded"], "y"),
    ]
    constants = {"column": np.ones((2048, 1), np.float32), "sizes": [2048, 1024], "large": [2**20, 2**20]}
    graph = QDQGraph(model(nodes, constants, (2048, 1024)))
    assert "filled" in graph.constants, "a lookup computes nothing"
    with pytest.raises(ValueError, match="filled"):
        graph.values("filled")
    assert graph.values("expanded").shape == (2048, 1024)
