"""Weights and scales: right axis, small error, positive and finite scales that cover the range."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx_models import by_name, loaded

from harness.graph.builder import GraphBuilder
from harness.graph.model import Node
from harness.graph.quantize.scales import ActivationScales
from harness.graph.quantize.weights import (
    QUANTIZABLE_DTYPES,
    QuantizedTensor,
    quantize_affine,
    quantize_weight,
    weight_axis,
)
from harness.graph.rules.dialects import BUILTIN_DIALECTS


def node(op: str, **attributes: Any) -> Node:
    return Node(index=0, name="n", op=op, domain="", inputs=("x", "w"), outputs=("y",), attributes=attributes)


def dequantized(tensor: QuantizedTensor) -> np.ndarray:
    """What a runtime computes with (ONNX DequantizeLinear: "y = (x - x_zero_point) * x_scale")."""
    shape = [-1 if axis == tensor.axis else 1 for axis in range(tensor.values.ndim)] if tensor.scale.ndim else []
    centred = tensor.values.astype(np.float32) - tensor.zero_point.astype(np.float32).reshape(shape)
    return centred * tensor.scale.astype(np.float32).reshape(shape)


@pytest.mark.parametrize(
    ("made", "slot", "rank", "transposed", "axis"),
    [
        (node("Conv"), 1, 4, 1, 0),
        (node("ConvTranspose"), 1, 4, 1, 1),
        (node("ConvTranspose"), 1, 4, None, None),
        (node("ConvTranspose", group=2), 1, 4, 1, None),
        (node("Gemm", transB=1), 1, 2, 1, 0),
        (node("Gemm"), 1, 2, 1, 1),
        (node("MatMul"), 1, 2, 1, 1),
        (node("MatMul"), 1, 3, 1, None),
        (node("MatMul"), 1, 1, 1, None),
        (node("MatMul"), 0, 2, 1, None),
        (node("Gemm"), 0, 2, 1, None),
    ],
)
def test_weight_axis_is_the_output_channel_axis(made, slot, rank, transposed, axis):
    assert weight_axis(made, slot, rank, transposed) == axis


@given(
    weight=hnp.arrays(np.float32, (3, 4, 2), elements=st.floats(-100, 100, width=32)),
    axis=st.sampled_from([None, 0, 1, 2]),
)
def test_int8_error_is_at_most_half_a_step(weight, axis):
    quantized = quantize_weight(weight, axis, "int8")
    assert (quantized.scale > 0).all()
    assert not quantized.zero_point.any()
    assert quantized.values.dtype == np.int8
    assert quantized.values.min() >= -127
    assert quantized.scale.shape == (() if axis is None else (weight.shape[axis],))
    step = quantized.scale.reshape([-1 if i == axis else 1 for i in range(3)])
    # Relative slack for float32; channels that are all but zero compared with the others are rounded to them.
    assert (np.abs(dequantized(quantized) - weight) <= 0.5 * step * (1 + 1e-4)).all()


@given(weight=hnp.arrays(np.float32, (4, 8), elements=st.floats(-1000, 1000, width=32)))
def test_fp8_keeps_three_bits_of_mantissa(weight):
    quantized = quantize_weight(weight, 0, "fp8")
    assert np.isfinite(dequantized(quantized)).all()
    # Half a unit in the last place of a 3-bit mantissa, or half the smallest subnormal (2**-9).
    bound = np.maximum(np.abs(weight) * 2.0**-4, quantized.scale[:, None] * 2.0**-10)
    assert (np.abs(dequantized(quantized) - weight) <= bound * (1 + 1e-3)).all()


def test_the_largest_value_is_mapped_to_the_largest_code():
    weight = np.array([[1.0, -3.0], [0.5, 0.25]], np.float32)
    assert quantize_weight(weight, 0, "int8").values.tolist() == [[42, -127], [127, 64]]
    assert quantize_weight(weight, 0, "fp8").values.astype(np.float32).tolist() == [[144, -448], [448, 224]]


def test_zero_channel_gets_a_usable_scale():
    quantized = quantize_weight(np.array([[0, 0], [1.27, 0]], np.float32), 0, "int8")
    np.testing.assert_allclose(quantized.scale, 0.01, rtol=1e-6)
    assert (quantize_weight(np.zeros((2, 2), np.float32), 0, "int8").scale > 0).all()
    assert (quantize_weight(np.zeros((2, 2), np.float16), None, "fp8").scale > 0).all()


def test_scale_floor_widens_scales_and_keeps_values():
    weight = np.array([[0.001], [1.0]], np.float32)
    quantized = quantize_weight(weight, 0, "int8", np.array([0.001, 0.0]))
    np.testing.assert_allclose(quantized.scale, [0.001, 1 / 127], rtol=1e-6)
    np.testing.assert_allclose(dequantized(quantized), weight, rtol=1e-6)


def test_other_constants_are_quantized_like_activations():
    values = np.array([-1.0, 0.0, 3.0], np.float32)
    quantized = quantize_affine(values, np.float32(4 / 255), np.uint8(64))
    assert quantized.values.tolist() == [0, 64, 255]
    np.testing.assert_allclose(dequantized(quantized), values, atol=4 / 255)


MAX_STEPS = {"int8": 127, "uint8": 255, "float8_e4m3fn": 448, "float8_e5m2": 57344}


@pytest.fixture(scope="module", params=["float", "float16"])
def model(request):
    g = GraphBuilder("m", opset=19)
    x = g.op("Relu", g.input("x", (1, 2, 4, 4), request.param), outputs="r")
    g.output(g.op("Conv", x, g.const(np.ones((2, 2, 1, 1), QUANTIZABLE_DTYPES[request.param]))), name="y")
    return loaded(g)


def bounds(kind: type) -> list[tuple[float, float]]:
    """Tiny, subnormal, huge, one-sided, constant and nearly one-sided ranges."""
    largest = float(ml_dtypes.finfo(kind).max)
    sizes = [0.0, 1e-45, 1e-10, 3e-7, 2e-6, 4.3e-5, 1e-3, 1.0, 6.0, 255.0, 6e4, largest]
    return [
        (float(kind(low)), float(kind(high)))
        for size in sizes
        for low, high in [
            (-size, size), (0, size), (-size, 0), (size, size), (-size, size / 3), (-size / 300, size), (-size, 1e-9)
        ]
    ]  # fmt: skip


@by_name("dialect", BUILTIN_DIALECTS.values())
def test_zero_is_exact_and_the_range_is_covered(dialect, model):
    kind = QUANTIZABLE_DTYPES[model.types["x"].dtype]
    largest = float(ml_dtypes.finfo(kind).max)
    for low, high in bounds(kind):
        ranges = dict.fromkeys(("x", "r", "y"), (low, high))
        for tensor in ("x", "r"):
            for precision in sorted(dialect.precisions):
                found, zero = ActivationScales(model, dialect, ranges).scale_and_zero_point(tensor, precision)
                scale, steps = float(found), MAX_STEPS[zero.dtype.name]
                assert found.dtype == kind
                assert 0 < scale < np.inf
                if precision != "int8":
                    assert max(-low, high) * 0.989 <= scale * steps < largest * 1.0002, (low, high)
                    continue
                limits = np.iinfo(zero.dtype)
                lowest, highest = ((limit - int(zero)) * scale for limit in (limits.min, limits.max))
                slack = scale + 0.011 * largest * (max(-low, high) > 0.98 * largest)
                assert lowest <= min(low, 0) + slack, (low, high)
                assert highest >= max(high, 0) - slack, (low, high)
                stored = [np.clip(np.rint(each / scale) + int(zero), limits.min, limits.max) for each in (low, high)]
                assert np.isfinite([kind((each - int(zero)) * scale) for each in stored]).all(), (low, high)


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_weights_of_any_size_are_restored(kind, precision):
    for size in (3e-7, 2e-6, 4.3e-5, 1.0, 6e4, float(ml_dtypes.finfo(kind).max)):
        values = (np.linspace(-1, 1, 9) * size).astype(kind).reshape(1, 9)
        made = quantize_weight(values, 0, precision)
        restored = (made.values.astype(np.float32) * made.scale.astype(np.float32)).astype(kind).astype(np.float64)
        assert np.abs(restored - values.astype(np.float64)).max() <= max(float(made.scale[0]), 0.07 * size), size
