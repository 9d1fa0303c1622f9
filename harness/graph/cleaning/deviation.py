"""Compare two results, with a limit that suits the float types of a model."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto

from harness.graph.model import graphs

__all__ = ["deviation_db", "is_informative", "normalization_db", "threshold_db"]

THRESHOLD_DB = 80.0
"""Least signal-to-noise ratio in FP32. Folded BatchNormalization is above 110 dB, a changed operator below 60 dB."""
_COARSER_DB = {TensorProto.FLOAT16: 40.0, TensorProto.BFLOAT16: 25.0}
"""The same for models with 11 or 8 significant bits: one rounding of a result is 70 or 52 dB, and they add up."""
_ROUNDING_DB = {THRESHOLD_DB: 144.0, 40.0: 66.0, 25.0: 48.0}
"""Ratio of a value to half its last digit, by threshold."""
_MARGIN_DB = 20.0
_SENTINEL = 1e30
"""Equal values beyond this size, such as the -3.4e38 of attention masks, are no part of the signal."""


def threshold_db(proto: onnx.ModelProto) -> float:
    """Return the least ratio that a valid preparation of a model keeps, by the coarsest of its float types."""
    found = {value.type.tensor_type.elem_type for value in (*proto.graph.input, *proto.graph.output)}
    nodes = [node for function in proto.functions for node in function.node]
    for graph in graphs(proto.graph):
        found.update(tensor.data_type for tensor in graph.initializer)
        nodes.extend(graph.node)
    for attribute in (attribute for node in nodes for attribute in node.attribute):
        if attribute.name in ("to", "dtype"):
            found.add(attribute.i)
        elif attribute.HasField("t"):
            found.add(attribute.t.data_type)
    return min(_COARSER_DB.get(kind, THRESHOLD_DB) for kind in (*found, TensorProto.FLOAT))


def normalization_db(before: npt.NDArray[Any], after: npt.NDArray[Any], limit_db: float) -> float:
    """Return the least ratio for a folded BatchNormalization.

    Where a mean is far larger than the spread around it, rounding of its input alone takes digits from the result.

    Args:
        before: Its input, channels along axis 1.
        after: Its result.
        limit_db: `threshold_db` of the model, which the result never exceeds.
    """
    axes = tuple(axis for axis in range(before.ndim) if axis != 1)
    x, y = before.astype(np.float64), after.astype(np.float64)
    spread = x.var(axis=axes)
    gain = np.divide(y.var(axis=axes), spread, out=np.zeros_like(spread), where=spread > 0)
    amplified, signal = float(((x**2).mean(axis=axes) * gain).sum()), float((y**2).mean(axis=axes).sum())
    if not (amplified > 0 and signal > 0):
        return limit_db
    return min(limit_db, _ROUNDING_DB[limit_db] - _MARGIN_DB - 10 * math.log10(amplified / signal))


def deviation_db(before: Any, after: Any) -> float:
    """Return the signal-to-noise ratio of two results in dB: inf if equal, -inf if they cannot be compared.

    NaN, infinities and integers must be equal, place by place.
    """
    if isinstance(before, np.ndarray) and isinstance(after, np.ndarray):
        if before.dtype != after.dtype or before.shape != after.shape:
            return -math.inf
        return _array_db(before, after) if before.dtype.kind == "f" else _equal_db(bool((before == after).all()))
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return min((deviation_db(*pair) for pair in zip(before, after, strict=True)), default=math.inf)
    if isinstance(before, dict) and isinstance(after, dict) and list(before) == list(after):
        return deviation_db([np.asarray(v) for v in before.values()], [np.asarray(v) for v in after.values()])
    comparable = type(before) is type(after) and not isinstance(before, np.ndarray | list)
    return _equal_db(comparable and before == after)


def _equal_db(equal: bool) -> float:
    return math.inf if equal else -math.inf


def _array_db(before: npt.NDArray[Any], after: npt.NDArray[Any]) -> float:
    if np.array_equal(before, after, equal_nan=True):
        return math.inf
    x, y = before.astype(np.float64), after.astype(np.float64)
    finite = np.isfinite(x)
    if not np.array_equal(x[~finite], y[~finite], equal_nan=True) or not np.isfinite(y[finite]).all():
        return -math.inf
    x, y = x[finite], y[finite]
    signal = x[~((np.abs(x) > _SENTINEL) & (x == y))]
    scale = float(np.abs(signal).max(initial=0.0))
    if not scale:
        return -math.inf
    noise = float(np.sum(((x - y) / scale) ** 2))
    return 10 * math.log10(float(np.sum((signal / scale) ** 2)) / noise) if noise else math.inf


def is_informative(value: Any) -> bool:
    """Whether equal results of this kind show that what is upstream is equal."""
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
        return False
    finite = value[np.isfinite(value)]
    return bool(finite.size > 1 and finite.min() < finite.max())
