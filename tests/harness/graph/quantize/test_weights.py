"""Weights: right axis, small error, positive scales."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from harness.graph.model import Node
from harness.graph.quantize.weights import QuantizedTensor, quantize_affine, quantize_weight, weight_axis


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
