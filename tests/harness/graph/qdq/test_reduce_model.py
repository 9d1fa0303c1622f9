"""Parts of a model, and models with integers of 7 bits."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_models import net, new_node

from harness.graph.qdq.reduce_model import ModelGraph, find_index_outputs, write_7bit_copy, write_without_pairs


@pytest.fixture
def product(tmp_path):
    """x and t, quantized to UINT8 with a zero point and to INT8, multiplied; then times weights, and the largest."""
    rng = np.random.default_rng(0)
    tensors = {
        "s": np.float32(0.01), "z": np.uint8(130), "ts": np.float32(0.008), "tz": np.int8(0),
        "w": rng.integers(-127, 128, (8, 6)).astype(np.int8), "ws": np.full(6, 0.01, np.float32),
        "wz": np.zeros(6, np.int8),
    }  # fmt: skip
    nodes = [
        new_node("QuantizeLinear", ["x", "s", "z"], "xq"),
        new_node("DequantizeLinear", ["xq", "s", "z"], "xd"),
        new_node("Tanh", ["t"], "u", name="tanh"),
        new_node("QuantizeLinear", ["u", "ts", "tz"], "tq"),
        new_node("DequantizeLinear", ["tq", "ts", "tz"], "td"),
        new_node("MatMul", ["xd", "td"], "m", name="both"),
        new_node("DequantizeLinear", ["w", "ws", "wz"], "wd", axis=1),
        new_node("MatMul", ["m", "wd"], "y", name="weights"),
        helper.make_node("TopK", ["y", "k"], ["values", "places"], name="top"),
        new_node("Cast", ["places"], "as_float", to=TensorProto.FLOAT),
    ]
    tensors["k"] = np.array([2], np.int64)
    path = tmp_path / "product.onnx"
    onnx.save(net(nodes, {"x": [4, 8], "t": [8, 8]}, dict.fromkeys(("y", "values", "as_float")), tensors), path)
    return path


@pytest.fixture
def feeds():
    rng = np.random.default_rng(1)
    return {"x": rng.uniform(-1.2, 1.2, (4, 8)).astype(np.float32), "t": rng.standard_normal((8, 8)).astype(np.float32)}


def run(path, feeds):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    wanted = {value.name for value in session.get_inputs()}
    return dict(zip(names, session.run(names, {n: a for n, a in feeds.items() if n in wanted}), strict=True))


def test_submodel_computes_the_values_of_the_model(product, feeds, tmp_path):
    graph, whole = ModelGraph(product), run(product, feeds)
    assert graph.longest_path("y") == ["t", "u", "td", "m", "y"]
    assert graph.sources("m") == ("xd", "td")
    assert graph.sources("td") == ("u",)
    assert graph.boundary_tensors("y", 1) == ("m",)
    assert graph.boundary_tensors("m", 1) == ("x", "u")
    assert graph.operator("td") == "Tanh 'tanh'"
    graph.write_submodel(tmp_path / "front.onnx", ["m"])
    middle = run(tmp_path / "front.onnx", feeds)
    assert list(middle) == ["m"]
    graph.write_submodel(tmp_path / "back.onnx", ["y"], middle)
    assert [value.name for value in onnx.load(tmp_path / "back.onnx").graph.input] == ["m"]
    np.testing.assert_array_equal(run(tmp_path / "back.onnx", middle)["y"], whole["y"])


def test_index_outputs_are_found(product):
    assert find_index_outputs(product) == (frozenset({"as_float"}), ("y",))


@pytest.mark.parametrize("what", ["weights", "data"])
def test_7bit_copy_is_close_to_the_model(product, feeds, tmp_path, what):
    assert write_7bit_copy(product, tmp_path / "narrow.onnx", what)
    whole, found = run(product, feeds)["y"], run(tmp_path / "narrow.onnx", feeds)["y"]
    assert 0 < np.abs(found - whole).max() < 0.03 * np.abs(whole).max()
    proto = onnx.load(tmp_path / "narrow.onnx")
    weights = next(numpy_helper.to_array(tensor) for tensor in proto.graph.initializer if tensor.name == "w")
    assert (np.abs(weights).max() <= 64) == (what == "weights")


def test_float_model_has_no_7bit_copy(tmp_path):
    onnx.save(net([new_node("Relu", ["x"], "y")], {"x": [2]}, {"y": [2]}), tmp_path / "float.onnx")
    assert not write_7bit_copy(tmp_path / "float.onnx", tmp_path / "narrow.onnx", "weights")
    assert not write_7bit_copy(tmp_path / "float.onnx", tmp_path / "narrow.onnx", "data")


def test_model_without_pairs_computes_in_float(product, feeds, tmp_path):
    proto = onnx.load(product)
    pair = next(node for node in proto.graph.node if list(node.output) == ["xd"])
    pair.input[0] = "xt"  # an operator that moves values, between the nodes of a pair
    proto.graph.node.insert(1, new_node("Transpose", ["xq"], "xr", perm=[0, 1]))
    proto.graph.node.insert(2, new_node("Identity", ["xr"], "xt"))
    proto.graph.output.append(helper.make_tensor_value_info("td", TensorProto.FLOAT, None))
    onnx.save(proto, product)
    assert write_without_pairs(product, tmp_path / "float.onnx")
    weights = next(numpy_helper.to_array(tensor) for tensor in proto.graph.initializer if tensor.name == "w") * 0.01
    found = run(tmp_path / "float.onnx", feeds)
    np.testing.assert_allclose(found["td"], np.tanh(feeds["t"]), atol=1e-6)
    np.testing.assert_allclose(found["y"], feeds["x"] @ np.tanh(feeds["t"]) @ weights, rtol=1e-4, atol=1e-4)
    operators = {node.op_type for node in onnx.load(tmp_path / "float.onnx").graph.node}
    assert not operators & {"QuantizeLinear", "DequantizeLinear"}
    assert not write_without_pairs(tmp_path / "float.onnx", tmp_path / "again.onnx")
    assert not (tmp_path / "again.onnx").exists()
