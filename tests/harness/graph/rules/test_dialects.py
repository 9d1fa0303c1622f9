"""Dialects are data that plug-ins can extend and that hold together."""

import dataclasses

import pytest

from harness.graph.rules.dialects import (
    ONNXRUNTIME,
    ONNXRUNTIME_7BIT,
    ONNXRUNTIME_S8,
    ONNXRUNTIME_S8_7BIT,
    OPENVINO,
    OPENVINO_7BIT,
    TENSORRT,
    TENSORRT_RTX,
)  # fmt: skip
from harness.plugins.registry import load_plugin

SEVEN = [ONNXRUNTIME_7BIT, ONNXRUNTIME_S8_7BIT, OPENVINO_7BIT]


@pytest.mark.parametrize(
    "dialect", [ONNXRUNTIME, ONNXRUNTIME_S8, OPENVINO, TENSORRT, TENSORRT_RTX, *SEVEN], ids=lambda d: d.name
)
def test_dialects_are_found_by_name_and_never_change(dialect):
    assert load_plugin("dialect", dialect.name) is dialect
    assert not dialect.linear_ops & dialect.points
    with pytest.raises(dataclasses.FrozenInstanceError):
        dialect.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize("dialect", SEVEN, ids=lambda d: d.name)
def test_7bit_products_fit_into_int16_sums(dialect):
    assert 2 * 255 * dialect.weight_limit <= 2**15 - 1
    assert dialect.facts["weight_limit"] == 64
    assert "weight_limit" not in OPENVINO.facts, "what is as it always was changes no digest"


def test_fp8_needs_opset_19():
    assert OPENVINO.opset(["int8"]) == 13
    assert OPENVINO.opset(["int8", "fp8"]) == 19


def test_activation_and_bias_types_of_each_dialect():
    assert [(d.activation, d.symmetric_activation, d.bias) for d in (TENSORRT, OPENVINO, ONNXRUNTIME)] == [
        ("int8", True, "float"),
        ("int8", True, "float"),
        ("uint8", False, "int32"),
    ]
    assert not TENSORRT.unsigned_positive  # its parser refuses UINT8 and any zero point but 0
    assert not TENSORRT.affine_ops


def test_tensorrt_and_rtx_dialects_differ_only_in_rtx_rules():
    assert TENSORRT_RTX.operands_agree
    assert TENSORRT.operands_agree
    assert TENSORRT_RTX.grouped_fp8
    assert not TENSORRT.grouped_fp8
    assert not TENSORRT.float_kernels
    assert TENSORRT.facts == {**TENSORRT_RTX.facts, "name": "tensorrt", "grouped_fp8": False}
