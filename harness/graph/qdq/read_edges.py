"""Which edges of an ONNX model carry Q/DQ pairs, read back from the graph, and how that differs from what was asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx
from onnx import TensorProto

from harness.graph.quantize.protobuf_wire import NAME_PREFIX
from search.space import Edge, Resolved

__all__ = ["count_pairs", "diff_edges", "node_name", "read_precisions", "read_qdq_edges", "unique_node_names"]

_PRECISION_BY_STORAGE = {
    TensorProto.INT8: "int8", TensorProto.UINT8: "int8", TensorProto.FLOAT8E4M3FN: "fp8",
    TensorProto.INT16: "int16", TensorProto.UINT16: "int16", TensorProto.INT4: "int4", TensorProto.UINT4: "int4",
    TensorProto.FLOAT8E5M2: "fp8e5m2", TensorProto.FLOAT4E2M1: "fp4",
}  # fmt: skip
_TRANSPARENT_OPS = frozenset({"Cast", "Identity"})
_NON_CONSUMER_OPS = _TRANSPARENT_OPS | {"QuantizeLinear", "DequantizeLinear"}
_EXTERNAL_TOOL_SUFFIXES = ("_quantized", "_QuantizeLinear_Input")  # of ONNX Runtime's quantization tools


def read_qdq_edges(proto: onnx.ModelProto) -> dict[Edge, str]:
    """The quantized edges of the main graph with their precision.

    An edge is quantized where its tensor comes out of a DequantizeLinear fed by a QuantizeLinear or by a constant. It
    is named by the tensor in front of the (first) QuantizeLinear; a constant stored quantized by the name of the float
    constant as far as its own name tells. Casts in between are seen through. INT32, the form of biases, is no
    precision of an edge. UINT8 counts as "int8".
    """
    return _EdgeReader(proto).edges()


def diff_edges(asked: Resolved, source: Path | onnx.ModelProto) -> tuple[Resolved, Resolved]:
    """Edges that were asked but are not in the model, and edges in the model that nobody asked; both sorted."""
    proto = onnx.load(source, load_external_data=False) if isinstance(source, Path) else source
    wanted, found = set(asked), set(read_qdq_edges(proto).items())
    return tuple(sorted(wanted - found)), tuple(sorted(found - wanted))


def count_pairs(path: Path) -> int:
    """How many Q/DQ pairs a Q/DQ model has, whoever made it: quantized tensors, however many consumers each has."""
    proto = onnx.load(path, load_external_data=False)
    return len({(edge.tensor, precision) for edge, precision in read_qdq_edges(proto).items()})


def read_precisions(path: Path) -> frozenset[str]:
    """At which precisions a Q/DQ model has quantized edges, whoever made it; none of the float model."""
    return frozenset(read_qdq_edges(onnx.load(path, load_external_data=False)).values())


def node_name(node: onnx.NodeProto) -> str:
    """What edges call a node: its name, or its first output where it has none."""
    return node.name or next(filter(None, node.output), "")


def unique_node_names(graph: onnx.GraphProto) -> list[str]:
    """What edges call each node: its `label`; of nodes with one name all but the first get a number, as in `load`."""
    taken = {node.name for node in graph.node}
    found: dict[str, None] = {}
    for node in graph.node:
        name, number = node_name(node), 0
        while name in found or (name in taken and name != node.name):
            number += 1
            name = f"{node_name(node)}_{number}"
        found[name] = None
    return list(found)


class _EdgeReader:
    """Follows tensors of one graph upstream."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        self._graph = proto.graph
        self._producer = {name: node for node in proto.graph.node for name in node.output}
        self._constants = {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
        self._constants.update(
            (node.output[0], attribute.t.data_type)
            for node in proto.graph.node
            if node.op_type == "Constant"
            for attribute in node.attribute
            if attribute.name == "value"
        )
        self._outputs = frozenset(value.name for value in proto.graph.output)

    def edges(self) -> dict[Edge, str]:
        found = {}
        for consumer, slot, name in self._iter_uses():
            reading = self._resolve_dequantized(name)
            if reading is not None:
                found[Edge(reading[0], consumer, slot)] = reading[1]
        return found

    def _iter_uses(self) -> Iterator[tuple[str, int, str]]:
        """Every place where a tensor is put to use, by consumer, slot and tensor."""
        for node, consumer in zip(self._graph.node, unique_node_names(self._graph), strict=True):
            if node.op_type in _NON_CONSUMER_OPS:
                continue
            for slot, name in enumerate(node.input):
                yield consumer, slot, name
        for value in self._graph.output:
            yield "", 0, value.name

    def _resolve_dequantized(self, name: str) -> tuple[str, str] | None:
        """Original name and precision of a dequantized tensor; None: it is not one."""
        dequantize = self._follow_upstream(name)
        if dequantize is None or dequantize.op_type != "DequantizeLinear":
            return None
        quantize = self._follow_upstream(dequantize.input[0])
        if quantize is None or quantize.op_type != "QuantizeLinear":
            precision = _PRECISION_BY_STORAGE.get(self._constants.get(dequantize.input[0], TensorProto.UNDEFINED))
            return None if precision is None else (_original_tensor_name(dequantize.input[0]), precision)
        precision = _PRECISION_BY_STORAGE.get(self._stored_type(quantize))
        if precision is None:
            return None
        earlier = self._resolve_dequantized(quantize.input[0])
        if earlier is not None:
            return earlier
        output = next((o for o in dequantize.output if o in self._outputs), None)
        return output or _original_tensor_name(quantize.input[0], own=NAME_PREFIX in quantize.output[0]), precision

    def _follow_upstream(self, name: str) -> onnx.NodeProto | None:
        node = self._producer.get(name)
        while node is not None and node.op_type in _TRANSPARENT_OPS:
            node = self._producer.get(node.input[0])
        return node

    def _stored_type(self, quantize: onnx.NodeProto) -> int:
        """Element type that a QuantizeLinear writes: that of its zero point, else of `output_dtype`, else UINT8."""
        if len(quantize.input) > 2 and quantize.input[2]:
            return int(self._constants.get(quantize.input[2], TensorProto.UNDEFINED))
        return next((int(a.i) for a in quantize.attribute if a.name == "output_dtype"), TensorProto.UINT8)


def _original_tensor_name(name: str, *, own: bool = False) -> str:
    """Return the name of the float tensor; tensors of the model itself (`own`) may end like those of other tools."""
    stem = name.rpartition(NAME_PREFIX)[0]
    if stem or own:
        return stem or name
    for suffix in _EXTERNAL_TOOL_SUFFIXES:
        name = name.removesuffix(suffix)
    return name
