"""What the dialects keep away from: with all points quantized, each runtime computes nearly the same as float."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import openvino
import pytest

from harness.accuracy.calibration.ranges import calibrate
from harness.graph.builder import GraphBuilder
from harness.graph.load import load_proto, save_to_folder
from harness.graph.model import Model
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import ONNXRUNTIME, ONNXRUNTIME_S8, OPENVINO, Dialect
from harness.random_inputs import random_feeds


def weights(g: GraphBuilder, *shape: int) -> str:
    return g.const(
        np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32) / np.float32(shape[-2] ** 0.5)
    )


def products(g: GraphBuilder) -> str:
    """A network of layers on one matrix; OpenVINO 2026.4 computes garbage where all of it is INT8."""
    x = g.op("Relu", g.op("Add", g.op("MatMul", g.input("x", (4, 32)), weights(g, 32, 32)), weights(g, 1, 32)))
    return g.op("Relu", g.op("MatMul", g.op("MatMul", x, weights(g, 32, 32)), weights(g, 32, 32)))


def stack(g: GraphBuilder) -> str:
    """A stack of weights; ONNX Runtime has no kernel for a scale per channel of one."""
    return g.op("Relu", g.op("MatMul", g.input("x", (2, 3, 8)), weights(g, 2, 8, 5)))


def vector(g: GraphBuilder) -> str:
    """OpenVINO 2026.4 gives the INT8 product of a vector another rank."""
    return g.op("MatMul", g.op("ReduceMean", g.input("x", (4, 8)), axes=[0], keepdims=0), weights(g, 8, 3))


def softmax(g: GraphBuilder) -> str:
    """Probabilities all below a half; ONNX Runtime's QLinearSoftmax overflows with the scale of so small a range."""
    return g.op("Softmax", g.op("Relu", g.input("x", (4, 16))), axis=1)


def einsum(g: GraphBuilder) -> str:
    """A layer with heads, and one that brings them together again."""
    x = g.op("Einsum", g.input("x", (2, 4, 8)), weights(g, 8, 2, 4), equation="bti,ihd->bthd")
    return g.op("Einsum", x, weights(g, 2, 4, 8), equation="bthd,hdk->btk")


CASES = [
    (einsum, OPENVINO), (products, OPENVINO), (stack, OPENVINO), (vector, OPENVINO), (stack, ONNXRUNTIME),
    (softmax, ONNXRUNTIME), (softmax, ONNXRUNTIME_S8),
]  # fmt: skip


def made(make: Callable[[GraphBuilder], str]) -> onnx.ModelProto:
    g = GraphBuilder(make.__name__)
    g.output(make(g))
    return g.build()


def quantized(model: Model, dialect: Dialect, folder: Path) -> tuple[Path, Path, dict[str, Any]]:
    """The float file, the file with every point quantized, and an input."""
    space = build_space(model, dialect)
    tensors = {edge.tensor for d in space.dimensions for edge in d.edges} - model.constants.keys()
    feeds = list(random_feeds({"x": ("float", model.types["x"].shape)}, 4))
    path = save_to_folder(model, folder)
    inserter = Inserter(model, dialect, calibrate(path, tensors, feeds))
    return path, inserter.write(space.resolve(space.quantize_all()), folder), feeds[0]


def computed(path: Path, feed: dict[str, Any], dialect: Dialect) -> Any:
    if dialect is OPENVINO:
        hints = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
        return openvino.Core().compile_model(str(path), "CPU", hints)(feed)[0]
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, feed)[0]


@pytest.mark.parametrize(("make", "dialect"), CASES, ids=lambda value: getattr(value, "name", None) or value.__name__)
def test_all_that_is_legal_is_nearly_right(
    make: Callable[[GraphBuilder], str], dialect: Dialect, tmp_path: Path
) -> None:
    model = load_proto(made(make), source=make.__name__, sha256="0")
    path, candidate, feed = quantized(model, dialect, tmp_path)
    exact, found = computed(path, feed, dialect), computed(candidate, feed, dialect)
    assert found.shape == exact.shape
    assert np.abs(found - exact).max() < 0.1 * np.abs(exact).max()


def test_openvino_reads_candidates_of_a_model_with_several_operator_sets_and_no_producer(tmp_path: Path) -> None:
    proto = made(stack)
    proto.ClearField("producer_name")
    proto.opset_import.append(onnx.helper.make_opsetid("com.example", 1))
    model = load_proto(proto, source="bare", sha256="0")
    assert len(model.proto.opset_import) == 2
    _, candidate, feed = quantized(model, OPENVINO, tmp_path)
    assert computed(candidate, feed, OPENVINO).shape == (2, 3, 5)
