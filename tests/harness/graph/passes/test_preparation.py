"""Preparation keeps the results, the inputs and the outputs of a model, or refuses it."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser
from onnx_models import loaded, run_onnxruntime

import harness.graph.passes.pipeline as pipeline
from harness.base.errors import UserError
from harness.graph.builder import GraphBuilder
from harness.graph.passes.pipeline import upgrade_opset, with_batch_size


def model(opset: int = 13) -> onnx.ModelProto:
    return parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": {opset}]> g (float[2,3] x, int64[2] i) => (float[2,3] y, float[2,3] z)
        {{ y = Softmax(x)  z = Gather(y, i) }}"""
    )


def renamed(proto: onnx.ModelProto) -> None:
    proto.graph.output[1].name = proto.graph.node[1].output[0] = "other"


def retyped(proto: onnx.ModelProto) -> None:
    proto.graph.input[1].type.tensor_type.elem_type = onnx.TensorProto.INT32


def reshaped(proto: onnx.ModelProto) -> None:
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 5


def shortened(proto: onnx.ModelProto) -> None:
    del proto.graph.output[1]


def swapped(proto: onnx.ModelProto) -> None:
    outputs = list(proto.graph.output)[::-1]
    del proto.graph.output[:]
    proto.graph.output.extend(outputs)


def transposed(proto: onnx.ModelProto) -> None:
    proto.graph.node[1].op_type = "Transpose"
    del proto.graph.node[1].input[1:]
    proto.graph.output[1].type.tensor_type.ClearField("shape")


@pytest.mark.parametrize("change", [renamed, retyped, reshaped, shortened, swapped, transposed])
def test_a_changed_interface_is_refused(change, monkeypatch):

    def broken(*args: object) -> onnx.ModelProto:
        proto: onnx.ModelProto = upgrade_opset(*args)  # type: ignore[arg-type]
        change(proto)
        return proto

    assert loaded(model(), "m.onnx").outputs == ("y", "z")
    monkeypatch.setattr(pipeline, "upgrade_opset", broken)
    monkeypatch.setattr("harness.graph.load.check_equivalent", lambda *_: None)
    with pytest.raises(UserError, match=r"m\.onnx: preparing the model would change .*newer opset"):
        loaded(model(), "m.onnx")


def test_names_of_data_dependent_dimensions_are_kept():
    proto = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 13]> g (float[2,3] x) => (float[hits] y, int64[2,found] z)
        { z = NonZero(x)  r = Relu(x)  f = Flatten<axis=0>(r)  k = Cast<to=9>(f)  o = Squeeze(k)
        y = Compress(r, o) }"""
    )
    outputs = loaded(proto, "m.onnx").proto.graph.output
    assert [[d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in outputs] == [
        ["hits"],
        [2, "found"],
    ]


def ops_after(builder: GraphBuilder, tolerance: float = 1e-4) -> list[str]:
    """Return the operators after loading, which must not change the outputs."""
    proto = builder.build()
    model = loaded(proto)
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
    model = loaded(proto)
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


def results(proto: onnx.ModelProto, values: np.ndarray) -> list[np.ndarray]:
    return run_onnxruntime(proto, {proto.graph.input[0].name: values})


def check(proto: onnx.ModelProto, samples: int = 3) -> None:
    """Check that a batch gives the results of its samples."""
    (value,) = (v for v in proto.graph.input)
    shape = tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
    values = np.random.default_rng(0).standard_normal((samples, *shape[1:])).astype(np.float32)
    made = with_batch_size(proto, {value.name: (samples, *shape[1:])}, "m.onnx")
    assert proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 1, "the model itself is unchanged"
    each = [results(proto, values[i : i + 1]) for i in range(samples)]
    for index, together in enumerate(results(made, values)):
        np.testing.assert_allclose(together, np.concatenate([one[index] for one in each]), rtol=1e-4, atol=1e-5)


def head() -> GraphBuilder:
    """Return the end of a detector: levels of different size, reshaped, concatenated and transposed."""
    builder = GraphBuilder("head", seed=1)
    x = builder.op("Relu", builder.conv(builder.input("x", (1, 3, 8, 8)), 4, 3, pad=1))
    low = builder.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    up = builder.op("Resize", low, "", "", builder.const(np.array([1, 4, 8, 8])), mode="nearest")
    shuffled = builder.op("Reshape", builder.op("Add", x, up), builder.const(np.array([1, 2, 2, 8, 8])))
    shuffled = builder.op("Transpose", shuffled, perm=[0, 2, 1, 3, 4])
    levels = [builder.op("Reshape", t, builder.const(np.array([1, 4, -1]))) for t in (shuffled, low)]
    whole = builder.op("Concat", *levels, axis=2)
    builder.output(builder.op("Softmax", builder.op("Transpose", whole, perm=[0, 2, 1]), axis=-1), name="y")
    return builder


def test_a_batch_gives_the_results_of_its_samples():
    check(head().build())


def test_dynamic_models_and_other_shapes_are_unchanged():
    proto = head().build()
    assert with_batch_size(proto, {}, "m.onnx") is proto
    assert with_batch_size(proto, {"x": "1x3x8x8"}, "m.onnx") is proto
    assert with_batch_size(proto, {"x": "2x3x9x9"}, "m.onnx") is proto, "reported by another check"
    dynamic = GraphBuilder("dynamic")
    dynamic.output(dynamic.op("Relu", dynamic.input("x", ("N", 4))))
    built = dynamic.build()
    assert with_batch_size(built, {"x": "2x4"}, "m.onnx") is built


def first_row(builder: GraphBuilder, x: str) -> str:
    indices, update = builder.const(np.array([[0, 0, 0]])), builder.const(np.ones((1, 8), np.float32))
    return builder.op("ScatterND", x, indices, update)


def in_a_subgraph(builder: GraphBuilder, x: str) -> str:
    bodies = {}
    for branch, op in (("then_branch", "Tanh"), ("else_branch", "Relu")):
        inner = GraphBuilder(branch)
        inner.output(inner.op(op, x, outputs=[f"{branch}_out"])[0], ("N", 4, 8, 8))
        bodies[branch] = inner.graph()
    return builder.op("If", builder.input("flag", (), "bool"), **bodies)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (lambda b, x: b.op("ReduceMax", x, axes=[0], keepdims=1), "ReduceMax '.*' does not keep samples apart"),
        (lambda b, x: b.op("Reshape", x, b.const(np.array([-1, 16]))), "Reshape '.*' does not keep samples apart"),
        (lambda b, x: b.op("Transpose", x, perm=[1, 0, 2, 3]), "Transpose '.*' does not keep samples apart"),
        (lambda b, x: b.op("Softmax", x, axis=0), "Softmax '.*' works along the samples"),
        (first_row, "ScatterND '.*' works along the samples"),
        (lambda b, x: b.op("Mystery", x, domain="acme"), "Mystery '.*' .* not known"),
        (in_a_subgraph, "If '.*' has a subgraph"),
    ],
)
def test_models_that_mix_samples_are_refused(body, why):
    builder = GraphBuilder("mixing", opset=17)
    builder.output(body(builder, builder.input("x", (1, 4, 8, 8))), (1, 4, 8, 8), name="y")
    with pytest.raises(UserError, match=rf"m\.onnx: shapes: .*'x' to 2.*{why}"):
        with_batch_size(builder.build(), {"x": "2x4x8x8"}, "m.onnx")


def test_different_batch_sizes_of_inputs_are_refused():
    builder = GraphBuilder("two")
    builder.output(builder.op("Add", builder.input("a", (1, 4)), builder.input("b", (1, 4))))
    with pytest.raises(UserError, match=r"one number of samples for all inputs, but got \{'a': 2, 'b': 3\}"):
        with_batch_size(builder.build(), {"a": "2x4", "b": "3x4"}, "m.onnx")


@pytest.mark.assets
@pytest.mark.skipif(not os.environ.get("QDQ_ASSETS"), reason="QDQ_ASSETS is not set")
@pytest.mark.parametrize("name", ["yolox_nano", "nanodet_m_320"])
def test_batch_results_of_real_detectors(name):
    proto: Any = onnx.load(Path(os.environ["QDQ_ASSETS"]) / "models" / f"{name}.onnx")
    constants = {tensor.name for tensor in proto.graph.initializer}
    for value in [value for value in proto.graph.input if value.name in constants]:
        proto.graph.input.remove(value)  # as `load` does
    check(proto, samples=2)
