"""Choices of layers that the reference documents name, and what ModelOpt leaves out by default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["DEFAULT_OPERATORS", "FLOAT_BY_DEFAULT", "PRESETS", "LayerPreset", "describe_defaults", "describe_presets"]

DEFAULT_OPERATORS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "int8": (
            "Add", "AveragePool", "BatchNormalization", "Clip", "Conv", "ConvTranspose", "Gemm", "GlobalAveragePool",
            "MatMul", "MaxPool", "Mul",
        ),
        "fp8": ("Conv", "Gemm", "MatMul"),
        "int4": ("Gemm", "MatMul"),
    }
)  # fmt: skip
"""What ModelOpt 0.47 quantizes where nothing is said (`modelopt/onnx/quantization/quantize.py`, its opening text)."""

FLOAT_BY_DEFAULT: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "activations": ("Softmax", "Sigmoid", "Tanh"),
        "structure": ("Concat", "Slice", "Reshape", "Transpose"),
        "arithmetic, unless fused": ("Add", "Sub", "Mul", "Div"),
    }
)
"""What it leaves float to keep the accuracy (how-to on PTQ of YOLO11, section 3.4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPreset:
    """A named choice.

    Attributes:
        text: What it is for.
        skip_names: Wildcards on names of nodes that stay native.
        op_types: Operators to quantize to INT8, whatever the defaults say; none: those of the layers.
        expect: What to be prepared for; "" as a rule.
    """

    text: str
    skip_names: tuple[str, ...] = ()
    op_types: tuple[str, ...] = ()
    expect: str = ""


PRESETS: Mapping[str, LayerPreset] = MappingProxyType(
    {
        # TAO documentation, "ModelOpt ONNX Backend (Static PTQ)", section 9.8.8
        "classifier": LayerPreset(text="classifiers: the last layer stays native", skip_names=("/classifier/*", "/fc")),
        "rtdetr": LayerPreset(
            text="RT-DETR: head, encoder and decoder stay native", skip_names=("/head/*", "/encoder/*", "/decoder/*")
        ),
        # How-to on PTQ of YOLO11, section 3.4
        "extreme_int8": LayerPreset(
            text="every operator that can be forced to INT8: a stress test",
            op_types=(
                "Conv", "MatMul", "MaxPool", "Mul", "Add", "Concat", "Sigmoid", "Softmax", "Split", "Transpose",
                "Reshape", "Slice", "Resize", "Sub", "Div",
            ),
            expect=(
                "extreme INT8 is a stress test, not for deployment: on YOLO11n mAP fell from 0.42 to 0.12 (500 COCO "
                "images), and TensorRT may stop with an internal error when it builds such a model. Compare it with "
                "the defaults (qdq evaluate) before you draw conclusions"
            ),
        ),
    }
)  # fmt: skip


def describe_defaults() -> list[str]:
    """What ModelOpt quantizes and leaves out where nothing is said, as lines."""
    lines = ["Quantized by default:"]
    lines += [f"  {mode}: {', '.join(ops)}" for mode, ops in DEFAULT_OPERATORS.items()]
    lines.append("Left in high precision by default (force them by --op_types_to_quantize, at your own risk):")
    lines += [f"  {kind}: {', '.join(ops)}" for kind, ops in FLOAT_BY_DEFAULT.items()]
    return lines


def describe_presets(names: Sequence[str] = tuple(PRESETS)) -> list[str]:
    """The presets, as lines."""
    lines = ["Presets:"]
    for name in names:
        preset = PRESETS[name]
        what = f"skip {', '.join(preset.skip_names)}" if preset.skip_names else f"quantize {', '.join(preset.op_types)}"
        lines.append(f"  {name}: {preset.text} ({what})")
    return lines
