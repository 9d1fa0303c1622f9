"""Reads the placement of somebody else's Q/DQ model back, as edges of the float model that it was made from."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import onnx

from harness.errors import UserError
from harness.graph.io.reader import read_model
from harness.graph.model import Model, Node
from harness.graph.partition.node_matching import match_equivalent_nodes
from harness.graph.qdq.read_edges import read_qdq_edges, unique_node_names
from search.space import Edge

__all__ = ["import_placement", "require_float_model"]

logger = logging.getLogger(__name__)

_QOPERATOR_OPS = frozenset({"ConvInteger", "MatMulInteger", "DynamicQuantizeLinear", "QGemm", "QAttention"})
_QDQ_OPS = frozenset({"QuantizeLinear", "DequantizeLinear"})


def import_placement(source: Path | onnx.ModelProto, model: Model) -> dict[Edge, str]:
    """The quantized edges of a Q/DQ model with their precision, in terms of `model`.

    A quantized input is matched by the name of its node, else by the tensor and the operator that reads it, else by
    what is computed there: names may all have changed. What the other tool fused or added finds no match and is left
    out. Scales are not imported: ours come from calibration.

    Args:
        source: A file or a model, made from the saved `model` by another tool (ModelOpt, ONNX Runtime).
        model: The float model.

    Raises:
        UserError: The file cannot be read, is in QOperator format, or has no Q/DQ pair that fits the model.
    """
    proto, name = (source, "the Q/DQ model") if isinstance(source, onnx.ModelProto) else _read_proto(source)
    _require_no_qoperators(proto, name)
    found = read_qdq_edges(proto)
    matches = _EdgeMatcher(proto, model)
    edges = {}
    for edge, precision in sorted(found.items()):
        ours = matches.match_edge(edge)
        if ours is None:
            logger.debug("%s: %s has no counterpart in %s", name, edge, model.source)
        else:
            edges[ours] = precision
    if not found:
        raise UserError(f"{name}: holds no Q/DQ pair, so there is no placement to read from it")
    if not edges:
        raise UserError(
            f"{name}: none of its {len(found)} quantized edges belongs to {model.source}; "
            "it must be made from this model"
        )
    logger.info("%s: %d of %d quantized edges found in %s", name, len(edges), len(found), model.source)
    return edges


def require_float_model(model: Model) -> None:
    """Let float models pass: a search places Q/DQ pairs itself, and could not tell its own from those that are there.

    Raises:
        UserError: The model has operators of a quantized one; the text says how such a model is of use.
    """
    for node in model.nodes:
        if node.op in _QDQ_OPS or _is_qoperator(node.op):
            raise UserError(
                f"{model.source}: {node.op} {node.name!r} says that this model is quantized already; give the float "
                "model that it was made from. A Q/DQ model can be where a search starts: --qdq_baseline FILE of 'qdq "
                "autotune', or 'initial: [{use: import, params: {path: FILE}, label: mine}]' in an experiment"
            )


def _read_proto(path: Path) -> tuple[onnx.ModelProto, str]:
    return read_model(path, str(path))[0], str(path)


def _is_qoperator(op: str) -> bool:
    return op in _QOPERATOR_OPS or op.startswith("QLinear")


def _require_no_qoperators(proto: onnx.ModelProto, name: str) -> None:
    for node in proto.graph.node:
        if _is_qoperator(node.op_type):
            raise UserError(
                f"{name}: {node.op_type} {node.name!r} is of the QOperator format, which has no Q/DQ pairs and "
                "which TensorRT and OpenVINO do not take; quantize again with quant_format=QuantFormat.QDQ"
            )


class _EdgeMatcher:
    """Finds an edge of the float model for an edge of another model."""

    def __init__(self, theirs: onnx.ModelProto, model: Model) -> None:
        self._theirs = theirs.graph
        self._model = model
        self._by_name = {node.name: node for node in model.nodes}
        self._nodes = dict(zip(unique_node_names(theirs.graph), theirs.graph.node, strict=True))

    def match_edge(self, edge: Edge) -> Edge | None:
        if not edge.consumer:
            return self._match_output_edge(edge)
        op = self._nodes[edge.consumer].op_type
        node = self._by_name.get(edge.consumer)
        if node is not None and node.op == op:
            return self._edge_at_input(node, edge.slot)
        readers = [
            self._model.nodes[index]
            for index, slot in self._model.consumers.get(edge.tensor, ())
            if slot == edge.slot and self._model.nodes[index].op == op
        ]
        if len(readers) == 1:
            return self._edge_at_input(readers[0], edge.slot)
        twin = self._equivalent_tensors.get(next(name for name in self._nodes[edge.consumer].output if name))
        return None if twin is None else self._edge_at_input(self._model.nodes[self._model.producer[twin]], edge.slot)

    @cached_property
    def _equivalent_tensors(self) -> Mapping[str, str]:
        return match_equivalent_nodes(self._theirs, self._model.proto.graph)

    def _match_output_edge(self, edge: Edge) -> Edge | None:
        if edge.tensor in self._model.outputs:
            return edge
        names = [value.name for value in self._theirs.output]
        same = edge.tensor in names and len(names) == len(self._model.outputs)
        return Edge(self._model.outputs[names.index(edge.tensor)], "", 0) if same else None

    def _edge_at_input(self, node: Node, slot: int) -> Edge | None:
        if slot >= len(node.inputs) or not node.inputs[slot]:
            return None
        return Edge(node.inputs[slot], node.name, slot)
