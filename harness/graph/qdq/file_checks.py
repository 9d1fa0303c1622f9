"""Checks of the Q/DQ pairs of a file by the rules of TensorRT.

Sources: `IQuantizeLayer` in NvInfer.h (symmetric only, positive scales); onnx-tensorrt's importer (UINT8 is read as
INT8 or refused; INT32 is no quantized type); ModelOpt's README (FP8 from compute capability 8.9 on); and verdicts of
the compiler of TensorRT-RTX 1.7 on small models (`tests/recorded/compiler_verdicts.csv`). Refusals of that compiler
apply to both dialects, pairs without effect only to TensorRT-RTX.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from onnx import TensorProto

from harness.graph.protos import attribute_value
from harness.graph.qdq.qdq_graph import DEQUANTIZE, QDQ_OPS, QDQGraph, node_name
from harness.graph.rules.agreements import PASSING_OPS, SCALING_OPS
from harness.graph.rules.dialects import TENSORRT, TENSORRT_RTX, Dialect
from harness.graph.rules.operator_sets import LINEAR_OPS

CHECKED_DIALECTS = {dialect.name: dialect for dialect in (TENSORRT, TENSORRT_RTX)}
"""Dialects whose rules know files, not only placements of our own."""
FP8_CAPABILITY = (8, 9)
_UNKNOWN_TYPES = frozenset({TensorProto.INT16, TensorProto.UINT16})
_PRECISION_NAMES = {TensorProto.INT8: "int8", TensorProto.FLOAT8E4M3FN: "fp8"}
_UINT8_TEXT = "is UINT8; TensorRT accepts only INT8: quantize in dialect tensorrt, or symmetrically to signed integers"
_UINT8_WARNING = "is UINT8 and read as INT8: values above 127 steps are cut off"
Level = Literal["refused", "warning", "no effect"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QDQProblem:
    """Reason why TensorRT refuses a file, computes other values, or ignores pairs.

    Attributes:
        node: Name of the node.
        operator: Operator type of the node.
        rule: Name of the rule.
        text: Reason as a predicate of the node, for instance "has a scale that is not positive".
        level: "refused"; "warning" (other values are computed); "no effect" (the node runs in float, so that its pairs
            only take time).
    """

    node: str
    operator: str
    rule: str
    text: str
    level: Level = "refused"

    def __str__(self) -> str:
        return f"{self.operator} {self.node!r} {self.text}"


def find_refused_qdq(graph: QDQGraph, capability: tuple[int, int], dialect: Dialect = TENSORRT) -> Iterator[QDQProblem]:
    """Yield the problems with level "refused"; see `find_qdq_problems`."""
    return (found for found in find_qdq_problems(graph, capability, dialect) if found.level == "refused")


def find_qdq_problems(
    graph: QDQGraph, capability: tuple[int, int], dialect: Dialect = TENSORRT
) -> Iterator[QDQProblem]:
    """Yield the problems of a file in the order of its nodes, at most one for each node.

    Args:
        graph: Graph of the file; external data are read only if a rule needs values.
        capability: Compute capability of the GPU as (major, minor).
        dialect: One of `CHECKED_DIALECTS`.
    """
    for node in graph.proto.graph.node:
        if node.op_type in QDQ_OPS:
            found = _pair_problem(node, graph, capability, dialect)
        elif node.op_type in LINEAR_OPS and len(node.input) > 1:
            found = _product_problem(node, graph, dialect)
        else:
            found = _float_kernel_problem(node, graph, dialect)
        if found is not None:
            rule, level, text = found
            yield QDQProblem(node=node_name(node), operator=node.op_type, rule=rule, level=level, text=text)


_Problem = tuple[str, Level, str]


def _pair_problem(node: Any, graph: QDQGraph, capability: tuple[int, int], dialect: Dialect) -> _Problem | None:
    """Return name, level and reason of the rule that a Q or DQ node violates, or None."""
    named = node.input[2] if len(node.input) > 2 else ""
    zero, kind = graph.constants.get(named), graph.stored_type(node)
    shifted = zero is not None and bool(graph.values(named).any())
    if kind == TensorProto.UINT8 and (dialect is TENSORRT or shifted):
        return "uint8", "refused", _UINT8_TEXT
    if kind == TensorProto.INT32:
        return "int32", "refused", "is INT32, the type of quantized biases; TensorRT needs biases in float"
    if kind in _UNKNOWN_TYPES:
        return "int16", "refused", "has 16 bits; TensorRT accepts INT8 and FP8"
    if kind == TensorProto.FLOAT8E5M2:
        return "e5m2", "refused", "is FP8 of the form E5M2; TensorRT accepts only E4M3"
    if kind == TensorProto.FLOAT8E4M3FN and capability < FP8_CAPABILITY:
        need, have = (".".join(map(str, pair)) for pair in (FP8_CAPABILITY, capability))
        text = f"is FP8, which needs compute capability {need} (Ada, Hopper or later); this GPU has {have}"
        return "fp8", "refused", text
    if shifted:
        text = "has a zero point that is not 0; TensorRT accepts only symmetric quantization: calibrate symmetric"
        return "zero point", "refused", text
    if node.input[1] in graph.constants and not (graph.values(node.input[1]) > 0).all():
        return "scale", "refused", "has a scale that is not positive"
    return ("uint8", "warning", _UINT8_WARNING) if kind == TensorProto.UINT8 else None


def _product_problem(node: Any, graph: QDQGraph, dialect: Dialect) -> _Problem | None:
    """Return the problem of the pairs on data and weight of a linear operator, or None."""
    pairs = [_operand_pair(graph, name) for name in node.input[:2]]
    types = [None if pair is None else graph.stored_type(pair) for pair in pairs]
    kinds = [TensorProto.INT8 if kind == TensorProto.UINT8 else kind for kind in types]  # as TensorRT reads them
    if None not in kinds and kinds[0] != kinds[1] and node.op_type != "ConvTranspose":
        names = " and ".join(TensorProto.DataType.Name(kind) for kind in kinds)
        return "mixed", "refused", f"multiplies {names}; both operands need one type, also through operators between"
    if dialect is TENSORRT or kinds == [None, None]:
        return None
    if None in kinds:
        return "one operand", "no effect", "has one quantized operand, so it is computed in float"
    weight = graph.constants.get(graph.before_pairs(node.input[1]))
    shape = () if weight is None else tuple(weight.dims)
    scales = [graph.constants.get(pair.input[1]) for pair in pairs]
    data_scale, weight_scale = (() if scale is None else tuple(scale.dims) for scale in scales)
    data_axis, weight_axis = (int(attribute_value(pair, "axis", 1)) for pair in pairs)
    is_unusable, channels = False, tuple[int, ...]()  # channels: axes of a weight along which scales may differ
    if node.op_type == "Conv":
        is_unusable, channels = bool(data_scale), (0, 1) if shape[1:2] == (1,) else (0,)
    elif node.op_type == "Gemm":
        summed = 0 if attribute_value(node, "transA", 0) else 1
        is_unusable = math.prod(data_scale) > 1 and data_axis == summed
        channels = (0,) if attribute_value(node, "transB", 0) else (1,)
    elif node.op_type == "MatMul":
        channels = (len(shape) - 1, -1)
    if is_unusable:
        return "data scale", "no effect", "has data with a scale that no kernel takes, so it is computed in float"
    filter_size = math.prod(shape[2:]) if node.op_type == "Conv" else 0
    if kinds[0] == TensorProto.FLOAT8E4M3FN and filter_size > dialect.max_fp8_filter > 0:
        return "fp8 filter", "no effect", f"has a filter of {filter_size} elements, so FP8 is computed in float"
    if math.prod(weight_scale) > 1 and shape and channels and weight_axis not in channels:
        return (
            "weight axis",
            "no effect",
            f"has weights with scales along axis {weight_axis}, so it is computed in float",
        )
    return _float_kernel_problem(node, graph, dialect)


def _float_kernel_problem(node: Any, graph: QDQGraph, dialect: Dialect) -> _Problem | None:
    """Return the problem of a quantized operator that has only float kernels, or None."""
    pair = _operand_pair(graph, node.input[0]) if node.input and node.input[0] else None
    precision = _PRECISION_NAMES.get(0 if pair is None else graph.stored_type(pair), "")
    if (precision, node.op_type) not in dialect.float_kernels:
        return None
    return "float kernel", "no effect", f"has no kernel for {precision}, so it is computed in float"


def _operand_pair(graph: QDQGraph, tensor: str) -> Any:
    """Return the DequantizeLinear before an operand, also before nodes that only move or scale values, or None."""
    pooled = False
    for _ in graph.proto.graph.node:  # limited, because a damaged file may have a cycle
        if (node := graph.producer.get(tensor)) is None:
            return None
        if node.op_type == DEQUANTIZE:
            return None if pooled and graph.stored_type(node) == TensorProto.FLOAT8E4M3FN else node
        pooled |= node.op_type == "MaxPool"
        scalars = [name in graph.constants and math.prod(graph.constants[name].dims) == 1 for name in node.input]
        if node.op_type == "Pad" and attribute_value(node, "mode", "constant") == "constant":
            return None
        if node.op_type in PASSING_OPS:
            tensor = node.input[0]
        elif node.op_type in SCALING_OPS and sum(scalars) == 1 and (node.op_type == "Mul" or scalars[1]):
            tensor = node.input[scalars.index(False)]
        else:
            return None
    return None
