"""Classification of layers by their runtime's names: computing, left-over quantization, reformat, or other."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal

from harness.api import Layer

__all__ = ["Kind", "classify_layer", "is_low_precision"]

Kind = Literal["compute", "qdq", "reformat", "other"]

COMPUTE_PATTERN = re.compile(
    r"(conv(olution|transpose)?$|qlinearconv|gemm|matmul|matrixmultiply|matrixmultiplication|fullyconnected|"
    r"deconvolution|attention|lstm|gru)",
    re.IGNORECASE,
)
QDQ_PATTERN = re.compile(r"(fakequantize|quantizelinear|^de?quantize|^scale$)", re.IGNORECASE)
REFORMAT_PATTERN = re.compile(r"(reorder|reformat|^convert$|^cast$|^transpose$|nopreformat)", re.IGNORECASE)
LOW_PRECISIONS = frozenset({
    "int8", "uint8", "i8", "u8", "fp8", "f8e4m3", "f8e4m3fn", "f8e5m2", "float8e4m3fn", "float8e5m2", "int4", "uint4",
    "i4", "u4", "fp4",
})  # fmt: skip
"""Precisions that only a Q/DQ pair brings about, in the words of OpenVINO, ONNX Runtime and TensorRT."""


def is_low_precision(precision: str) -> bool:
    """Whether a layer computes on quantized data."""
    return precision.lower() in LOW_PRECISIONS


def classify_layer(layer: Layer, pairs: Collection[str], nodes: Collection[str]) -> Kind:
    """What a layer is.

    A layer that came of Q/DQ nodes alone is what is left of a pair, however the runtime calls it: OpenVINO has it in a
    "Subgraph", TensorRT in a "Scale". One that came of no node of the model was added by the runtime.

    Args:
        layer: Of a built engine.
        pairs: Names of the model's Q/DQ nodes.
        nodes: Names of all its nodes.
    """
    if QDQ_PATTERN.search(layer.kind) or (layer.origin and all(name in pairs for name in layer.origin)):
        return "qdq"
    if COMPUTE_PATTERN.search(layer.kind):
        return "compute"
    return "reformat" if REFORMAT_PATTERN.search(layer.kind) and _is_added_layer(layer, nodes) else "other"


def _is_added_layer(layer: Layer, nodes: Collection[str]) -> bool:
    """Whether the runtime put the layer there; a Transpose or Cast of the model itself is no reformat."""
    return (
        not any(name in nodes for name in layer.origin)
        or "reorder" in layer.kind.lower()
        or "reformat" in layer.kind.lower()
    )
