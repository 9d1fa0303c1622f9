"""Names of float precisions: f32, tf32, f16 and bf16, with their usual spellings."""

from __future__ import annotations

from typing import Any

FLOAT_PRECISION_NAMES = {
    "f32": "f32", "fp32": "f32", "float32": "f32", "float": "f32", "single": "f32",
    "tf32": "tf32", "tensorfloat32": "tf32",
    "f16": "f16", "fp16": "f16", "float16": "f16", "half": "f16",
    "bf16": "bf16", "bfloat16": "bf16",
}  # fmt: skip


def normalize_float_precision(value: Any) -> Any:
    """Return the name of a float precision in any usual spelling ("FP16", "half"); other values unchanged."""
    return FLOAT_PRECISION_NAMES.get(value.lower(), value) if isinstance(value, str) else value
