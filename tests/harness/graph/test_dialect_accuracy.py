"""What the dialects keep away from: with all points quantized, each runtime computes nearly the same as float."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from fidelity_of import run_openvino, write_quantized
from machine import CPU_FLAGS, SATURATES, exact_int8
from onnx_models import by_name, loaded, run_onnxruntime

from harness.base.random_inputs import random_feeds
from harness.graph.builder import GraphBuilder
from harness.graph.load import save_to_folder
from harness.graph.model import Model
from harness.graph.rules.dialects import ONNXRUNTIME, ONNXRUNTIME_S8, OPENVINO, OPENVINO_7BIT, Dialect


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


def outputs(model: Model, dialect: Dialect, folder: Path) -> tuple[Any, Any]:
    """The output of a model, and that of the model with every point quantized."""
    feeds = list(random_feeds({"x": ("float", model.types["x"].shape)}, 4))
    run = run_openvino if dialect is OPENVINO else run_onnxruntime
    quantized = write_quantized(model, dialect, feeds, folder)
    return run(save_to_folder(model, folder), feeds[0])[0], run(quantized, feeds[0])[0]


@pytest.mark.parametrize(("make", "dialect"), CASES, ids=lambda value: getattr(value, "name", None) or value.__name__)
def test_fully_quantized_model_is_close_to_float(make, dialect, tmp_path):
    exact, found = outputs(loaded(made(make)), dialect, tmp_path)
    assert found.shape == exact.shape
    assert np.abs(found - exact).max() < 0.1 * np.abs(exact).max()


def test_openvino_reads_models_with_several_opsets(tmp_path):
    proto = made(stack)
    proto.ClearField("producer_name")
    proto.opset_import.append(onnx.helper.make_opsetid("com.example", 1))
    model = loaded(proto)
    assert len(model.proto.opset_import) == 2
    assert outputs(model, OPENVINO, tmp_path)[1].shape == (2, 3, 5)


# Why the OpenVINO dialect gives convolutions UINT8 data: relative error of OpenVINO 2026.4 against ONNX Runtime without
# graph optimizations, on the same Q/DQ file and on AVX512-VNNI, is 0.22 for INT8 data behind a Concat, and below 1e-5
# for UINT8 data and for INT8 data without the Concat. With AMX all of them are exact.
SYMMETRIC = dataclasses.replace(OPENVINO, affine_ops=frozenset(), unsigned_positive=False)
FEEDS = list(random_feeds({"x": ("float", (1, 8, 16, 16))}, 4))


def model(*, concat: bool) -> Model:
    g = GraphBuilder("convolutions")
    x = g.input("x", (1, 8, 16, 16))
    first, second = g.conv(x, 16, 3), g.conv(x, 16, 3)
    g.output(g.conv(g.op("Concat" if concat else "Add", first, second, **({"axis": 1} if concat else {})), 16, 3))
    return loaded(g)


def error(made: Model, dialect: Dialect, folder: Path) -> float:
    """Relative error of OpenVINO on the data and weights of all convolutions quantized."""
    path = write_quantized(made, dialect, FEEDS, folder, {"linear"})
    (exact,), (found,) = run_onnxruntime(path, FEEDS[0], optimize=False), run_openvino(path, FEEDS[0])
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def seven_bits(dialect: Dialect) -> Dialect:
    return dataclasses.replace(dialect, weight_limit=OPENVINO_7BIT.weight_limit)


@by_name("dialect", [pytest.param(OPENVINO, marks=exact_int8), OPENVINO_7BIT])
def test_unsigned_data_behind_a_concat_are_exact(dialect, tmp_path):
    assert error(model(concat=True), dialect, tmp_path) < 1e-4


@pytest.mark.parametrize("dialect", [pytest.param(SYMMETRIC, marks=exact_int8), seven_bits(SYMMETRIC)], ids=["8", "7"])
def test_symmetric_data_without_a_concat_are_exact(dialect, tmp_path):
    assert error(model(concat=False), dialect, tmp_path) < 1e-4


def test_weights_of_8_bits_are_wrong_where_products_saturate(tmp_path):
    """What weights of 7 bits are for; where this fails, they may go."""
    assert (error(model(concat=False), OPENVINO, tmp_path) > 1e-2) == SATURATES


@pytest.mark.skipif(
    "avx512_vnni" not in CPU_FLAGS or "amx_int8" in CPU_FLAGS, reason="seen on CPUs with AVX512-VNNI and without AMX"
)
@pytest.mark.xfail(strict=True, reason="OpenVINO 2026.4 is a fifth off; once it is not, the dialect may be simplified")
def test_symmetric_data_behind_a_concat_are_exact(tmp_path):
    assert error(model(concat=True), SYMMETRIC, tmp_path) < 1e-4
