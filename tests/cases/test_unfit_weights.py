"""Weights and biases with NaN, infinite or huge values stay float, and a warning and a rule name them."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import pytest

from harness.errors import UserError
from harness.graph.builder import GraphBuilder
from harness.graph.load import load_proto
from harness.graph.model import Model
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import ONNXRUNTIME, OPENVINO, TENSORRT, Dialect
from harness.graph.rules.points import float_inputs_with_rule

DIALECTS = [TENSORRT, OPENVINO, ONNXRUNTIME]
RANGES = {name: (-1.0, 1.0) for name in ("x", "y", "z")}


def two_products(first: npt.NDArray[np.float32], bias: npt.NDArray[np.float32]) -> Model:
    """Two layers, the first of which has the weight and bias given."""
    g = GraphBuilder("m")
    x = g.input("x", (4, 8))
    (y,) = g.op("Gemm", x, g.const(first, "first"), g.const(bias, "bias"), outputs=["y"])
    g.output(
        g.op("Gemm", y, g.const(np.eye(8, dtype=np.float32), "second"), g.const(np.ones(8, np.float32)), outputs=["z"])[
            0
        ]
    )
    return load_proto(g.build(), source="m", sha256="0")


def weight(value: float, shape: tuple[int, ...] = (8, 8)) -> npt.NDArray[np.float32]:
    values = np.ones(shape, np.float32)
    values[0] = value
    return values


def quantized(model: Model, dialect: Dialect) -> set[str]:
    return {edge.tensor for dimension in build_space(model, dialect).dimensions for edge in dimension.edges}


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda d: d.name)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_weight_that_no_scale_holds_keeps_its_operator_float(
    value: float, dialect: Dialect, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    model = two_products(weight(value), np.ones(8, np.float32))
    assert quantized(model, dialect) - {"z"} == {"y", "second"}
    assert "first" in caplog.text
    assert "second" not in caplog.text
    assert {(edge.tensor, rule.name) for edge, rule in float_inputs_with_rule(model, dialect)} >= {
        ("x", "finite"),
        ("first", "finite"),
    }
    space = build_space(model, dialect)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = Inserter(model, dialect, RANGES).write(space.resolve(space.quantize_all()), tmp_path)
    onnx.checker.check_model(path)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_bias_that_no_scale_holds_matters_where_it_is_stored_as_int32(value: float) -> None:
    model = two_products(weight(1.0), weight(value, (8,)))
    assert "first" not in quantized(model, ONNXRUNTIME)
    assert quantized(model, OPENVINO) == {"x", "first", "y", "second"}


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda d: d.name)
def test_a_convolution_and_a_product_with_the_weight_on_the_left(value: float, dialect: Dialect) -> None:
    g = GraphBuilder("m")
    x = g.input("x", (1, 8, 8, 8))
    y = g.op("Conv", x, g.const(weight(value, (8, 8, 1, 1)), "filter"))
    g.output(g.op("MatMul", g.const(weight(value), "left"), g.op("Tanh", y)))
    model = load_proto(g.build(), source="m", sha256="0")
    assert quantized(model, dialect).isdisjoint({"x", "filter", "left"})


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_weight_in_float16(value: float) -> None:
    g = GraphBuilder("m")
    damaged = weight(value).astype(np.float16)
    g.output(g.op("MatMul", g.input("x", (2, 4, 8), "float16"), g.const(damaged)))
    assert quantized(load_proto(g.build(), source="m", sha256="0"), OPENVINO) == set()


def test_a_request_for_such_a_weight_is_refused() -> None:
    space = build_space(two_products(weight(1.0), np.ones(8, np.float32)), OPENVINO)
    model = two_products(weight(np.nan), np.ones(8, np.float32))
    with pytest.raises(UserError, match="first"):
        Inserter(model, OPENVINO, RANGES).count_pairs(space.resolve(space.quantize_all()))
