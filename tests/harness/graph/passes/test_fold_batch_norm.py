"""Folding of BatchNormalization: the same results with one node fewer."""

import numpy as np
import pytest
from onnx import numpy_helper
from onnx_models import run_onnxruntime

from harness.graph.builder import GraphBuilder
from harness.graph.load import load_proto


def ops_after(builder: GraphBuilder, tolerance: float = 1e-4) -> list[str]:
    """Return the operators after loading, which must not change the outputs."""
    proto = builder.build()
    model = load_proto(proto, source="m", sha256="0")
    kind = model.types["x"]
    x = np.random.default_rng(1).normal(size=kind.shape)
    x = x.astype(np.float16 if kind.dtype == "float16" else np.float32)
    results = (run_onnxruntime(each, {"x": x}, optimize=False) for each in (proto, model.proto))
    for before, after in zip(*results, strict=True):
        np.testing.assert_allclose(after, before, rtol=0, atol=tolerance)
    assert model.outputs == tuple(value.name for value in proto.graph.output)
    return [node.op for node in model.nodes]


def normal(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", [1, 2, -1])
def test_fold_into_conv(groups, bias):
    builder = GraphBuilder("conv", seed=3)
    x = builder.conv(builder.input("x", (2, 4, 6, 6)), 8, 3, groups=groups, bias=bias)
    builder.output(builder.op("Relu", builder.batch_norm(x, epsilon=1e-2)))
    assert ops_after(builder) == ["Conv", "Relu"]


@pytest.mark.parametrize("groups", [1, 2])
def test_fold_into_conv_transpose(groups):
    builder = GraphBuilder("up")
    weight = builder.const(normal(4, 6 // groups, 2, 2))
    x = builder.op("ConvTranspose", builder.input("x", (1, 4, 3, 3)), weight, group=groups, strides=[2, 2])
    builder.output(builder.batch_norm(x))
    assert ops_after(builder) == ["ConvTranspose"]


@pytest.mark.parametrize("trans", [0, 1])
@pytest.mark.parametrize("bias_shape", [None, (), (1,), (5,), (1, 5)])
def test_fold_into_gemm(trans, bias_shape):
    builder = GraphBuilder("gemm")
    inputs = [builder.const(normal(*((5, 7) if trans else (7, 5))))]
    if bias_shape is not None:
        inputs.append(builder.const(normal(*bias_shape)))
    x = builder.op("Gemm", builder.input("x", (3, 7)), *inputs, transB=trans, alpha=0.5, beta=2.0)
    builder.output(builder.batch_norm(x))
    assert ops_after(builder) == ["Gemm"]


def pointwise() -> tuple[GraphBuilder, str]:
    builder = GraphBuilder("pointwise")
    return builder, builder.conv(builder.input("x", (1, 3, 6, 6)), 4, 1)


def test_consecutive_batch_norms_are_folded_and_other_readers_prevent_it():
    builder, x = pointwise()
    builder.output(builder.batch_norm(builder.batch_norm(x)))
    assert ops_after(builder) == ["Conv"]
    builder, x = pointwise()
    builder.output(builder.op("Add", builder.batch_norm(x), x))
    assert ops_after(builder) == ["Conv", "BatchNormalization", "Add"]
    builder, x = pointwise()
    builder.output(x)
    builder.output(builder.batch_norm(x))
    assert ops_after(builder) == ["Conv", "BatchNormalization"]
    builder = GraphBuilder("alone")
    builder.output(builder.batch_norm(builder.op("Relu", builder.input("x", (1, 3, 6, 6)))))
    assert ops_after(builder) == ["Relu", "BatchNormalization"]


def test_shared_weights_are_scaled_for_one_reader_only():
    builder = GraphBuilder("shared")
    x = builder.input("x", (1, 4, 6, 6))
    weight = builder.const(normal(4, 4, 1, 1))
    bias = builder.const(np.ones(4, np.float32))
    for _ in range(2):
        builder.output(builder.batch_norm(builder.op("Conv", x, weight, bias)))
    builder.output(builder.op("Conv", x, weight, bias))
    assert ops_after(builder) == ["Conv", "Conv", "Conv"]


def test_reader_in_a_subgraph_prevents_folding():
    then, other = GraphBuilder("then"), GraphBuilder("else")
    builder, x = pointwise()
    then.output(then.op("Neg", x, outputs=("then_out",))[0])
    other.output(other.op("Abs", x, outputs=("else_out",))[0])
    builder.output(builder.batch_norm(x))
    condition = builder.op("Greater", builder.op("ReduceMax", "x", keepdims=0), builder.const(0.0))
    builder.output(builder.op("If", condition, then_branch=then.graph(), else_branch=other.graph()), (1, 4, 6, 6))
    assert "BatchNormalization" in ops_after(builder)


def test_half_precision_stays_half_precision():
    builder = GraphBuilder("half")
    weight = builder.const(normal(4, 3, 1, 1, dtype=np.float16))
    statistics = [builder.const(np.full(4, value, np.float16)) for value in (0.5, 0.7, 1.1, 1.5)]
    x = builder.op("Conv", builder.input("x", (1, 3, 4, 4), "float16"), weight)
    builder.output(builder.op("BatchNormalization", x, *statistics))
    proto = builder.build()
    model = load_proto(proto, source="m", sha256="0")
    assert [node.op for node in model.nodes] == ["Conv"]
    assert {numpy_helper.to_array(t).dtype for t in model.constants.values()} == {np.dtype(np.float16)}


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_float16_overflow_prevents_folding():
    builder = GraphBuilder("loud")
    x = builder.input("x", (2, 1), "float16")
    weight, scale, zero, variance = (builder.const(np.full(1, v, np.float16)) for v in (3, 4e4, 0, 2))
    x = builder.op("Gemm", x, builder.op("Reshape", weight, builder.const(np.array([1, 1]))), beta=2.0)
    builder.output(builder.op("BatchNormalization", x, scale, zero, zero, variance))
    assert ops_after(builder) == ["Gemm", "BatchNormalization"]
