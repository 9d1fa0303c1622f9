"""The builder: what zoo and tests lean on."""

import numpy as np
import onnx
import pytest
from onnx_models import run_onnxruntime

from harness.graph.builder import MAX_IR_VERSION, GraphBuilder


def classifier(seed: int = 0) -> GraphBuilder:
    builder = GraphBuilder("classifier", seed=seed)
    x = builder.input("image", (1, 3, 16, 16))
    x = builder.op("Relu", builder.batch_norm(builder.conv(x, 8, 3, stride=2)))
    x = builder.op("Relu", builder.conv(x, 8, (3, 1), groups=-1, bias=False))
    x = builder.op("Flatten", builder.op("GlobalAveragePool", x))
    builder.output(builder.layer_norm(builder.linear(builder.gemm(x, 6), 5)), name="logits")
    return builder


def test_saved_model_runs(tmp_path):
    path = classifier().save(tmp_path / "folder" / "m.onnx")
    (found,) = run_onnxruntime(path, {"image": np.ones((1, 3, 16, 16), np.float32)}, ["logits"])
    assert found.shape == (1, 5)
    assert onnx.load(path).ir_version <= MAX_IR_VERSION


def test_every_tensor_is_typed_and_every_name_unique():
    graph = classifier().build().graph
    typed = {value.name for value in (*graph.value_info, *graph.output)}
    assert {name for node in graph.node for name in node.output} == typed
    names = [node.name for node in graph.node]
    assert len(set(names)) == len(names)


def test_same_seed_same_bytes():
    assert classifier(1).build().SerializeToString() == classifier(1).build().SerializeToString()
    assert classifier(1).build().SerializeToString() != classifier(2).build().SerializeToString()


def test_shapes_follow_from_the_operators():
    builder = GraphBuilder("shapes")
    x = builder.input("x", (2, 6, 8, 8))
    assert builder.shape(builder.conv(x, 4, 5, stride=2, groups=2)) == (2, 4, 4, 4)
    assert builder.shape(builder.conv(x, 4, 3, pad=0)) == (2, 4, 6, 6)
    parts = builder.op("Split", x, builder.const([2, 4]), outputs=2, axis=1)
    assert [builder.shape(part) for part in parts] == [(2, 2, 8, 8), (2, 4, 8, 8)]
    assert builder.shape(builder.op("Reshape", x, builder.const([2, -1]))) == (2, 384)
    assert builder.shape(builder.op("Resize", x, "", builder.const([1.0, 1.0, 2.0, 2.0]), mode="nearest"))[2:] == (
        16,
        16,
    )
    assert builder.shape(builder.input("dynamic", ("N", None, 3))) == (-1, -1, 3)


def test_constants_keep_the_type_of_arrays():
    builder = GraphBuilder("constants")
    made = {
        builder.const(1.5): onnx.TensorProto.FLOAT,
        builder.const([1, 2]): onnx.TensorProto.INT64,
        builder.const(np.float64(2)): onnx.TensorProto.DOUBLE,
        builder.const(np.int8(2), "zero"): onnx.TensorProto.INT8,
        builder.const(np.int8(3), "zero"): onnx.TensorProto.INT8,
    }
    tensors = {tensor.name: tensor.data_type for tensor in builder.graph().initializer}
    assert tensors == made
    assert "zero_1" in tensors


def test_invalid_calls_are_refused():
    builder = GraphBuilder("wrong")
    x = builder.input("x", (2, 3))
    with pytest.raises(ValueError, match=r"wrong: MatMul 'MatMul': .*Incompatible dimensions"):
        builder.op("MatMul", x, x)
    with pytest.raises(ValueError, match="the shape of tensor 'nowhere' is not known"):
        builder.linear("nowhere", 3)
    with pytest.raises(ValueError, match="'x' is not the output of a node"):
        builder.output(x, name="y")
    with pytest.raises(ValueError, match="the name 'x' is taken"):
        builder.output(builder.op("Relu", x), name="x")
