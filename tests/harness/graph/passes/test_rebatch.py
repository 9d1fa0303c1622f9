"""Batch size of models that were exported for one sample: the same results sample by sample, or a refusal."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx_models import run_onnxruntime

from harness.base.errors import UserError
from harness.graph.builder import GraphBuilder
from harness.graph.passes.pipeline import with_batch_size


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
