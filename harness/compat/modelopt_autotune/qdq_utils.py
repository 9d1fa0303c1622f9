"""Reads Q/DQ models of any tool, as far as `import_insertion_points` needs it."""

from __future__ import annotations

from typing import Any

from harness.graph.conversions import find_quantized_tensors, to_proto

__all__ = ["get_quantized_tensors"]


def get_quantized_tensors(onnx_model: Any) -> set[str]:
    """Names of the tensors with a Q/DQ pair, as the float model calls them.

    ModelOpt's function of this name gives the names of the quantized tensors instead, which no float model has;
    `import_insertion_points` takes both.
    """
    return find_quantized_tensors(to_proto(onnx_model))
