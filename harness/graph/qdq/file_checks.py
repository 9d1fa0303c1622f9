"""Checks of Q/DQ in a file against what TensorRT takes: each problem with its node and the rule.

Sources: `IQuantizeLayer` in NvInfer.h (symmetric only, positive scales); onnx-tensorrt's importer (UINT8 is read as
INT8 or refused; INT32 is no quantized type); ModelOpt's README (FP8 from compute capability 8.9 on).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from onnx import TensorProto

from harness.graph.protos import attribute_value
from harness.graph.qdq.qdq_graph import DEQUANTIZE, QDQ_OPS, QDQGraph, node_name

__all__ = ["FP8_CAPABILITY", "QDQProblem", "find_qdq_problems"]

FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class QDQProblem:
    """A reason why TensorRT does not take a file.

    Attributes:
        node: Name of the node.
        operator: Its operator.
        rule: Name of the rule.
        text: The reason as the predicate of a sentence about the node.
    """

    node: str
    operator: str
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.operator} {self.node!r} {self.text}"


def find_qdq_problems(graph: QDQGraph, capability: tuple[int, int]) -> Iterator[QDQProblem]:
    """Yield the Q/DQ nodes that TensorRT does not take, in the order of the file.

    Args:
        graph: The file; external data are read where a rule needs values.
        capability: Compute capability of the GPU.
    """
    for node in graph.proto.graph.node:
        if node.op_type in QDQ_OPS and (found := _unsupported_reason(node, graph, capability)):
            rule, text = found
            yield QDQProblem(node=node_name(node), operator=node.op_type, rule=rule, text=text)


def _unsupported_reason(node: Any, graph: QDQGraph, capability: tuple[int, int]) -> tuple[str, str] | None:
    """Return the rule that a Q or DQ node breaks, and the reason; None if it breaks none."""
    named = node.input[2] if len(node.input) > 2 else ""
    zero = graph.constants.get(named)
    kind = zero.data_type if zero is not None else 0 if named else _stored_type(node, graph)
    if kind == TensorProto.UINT8:
        return "uint8", "is UINT8; TensorRT takes INT8 alone: quantize in dialect tensorrt, or symmetric and signed"
    if kind == TensorProto.INT32:
        return "int32", "is INT32, the form of quantized biases; TensorRT wants biases in float"
    if kind == TensorProto.FLOAT8E5M2:
        return "e5m2", "is FP8 of the form E5M2; TensorRT takes E4M3 alone"
    if kind == TensorProto.FLOAT8E4M3FN and capability < FP8_CAPABILITY:
        need, have = (".".join(map(str, pair)) for pair in (FP8_CAPABILITY, capability))
        return "fp8", f"is FP8, which needs compute capability {need} (Ada, Hopper or later); this GPU has {have}"
    if zero is not None and graph.values(named).any():
        text = "has a zero point that is not 0; TensorRT takes symmetric quantization alone: calibrate symmetric"
        return "zero point", text
    if node.input[1] in graph.constants and not (graph.values(node.input[1]) > 0).all():
        return "scale", "has a scale that is not positive"
    return None


def _stored_type(node: Any, graph: QDQGraph) -> int:
    """Return the element type of the quantized side if no zero point gives it."""
    if node.op_type == DEQUANTIZE:
        stored = graph.constants.get(node.input[0])
        return 0 if stored is None else int(stored.data_type)
    return int(attribute_value(node, "output_dtype", 0) or TensorProto.UINT8)
