"""What a placement asks of a model: checked, and told to the nodes that read and make the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from harness.errors import UserError
from harness.graph.model import Model, Node
from harness.graph.quantize.node_variants import RequestBit, VariantTable
from harness.graph.quantize.weights import QUANTIZABLE_DTYPES
from harness.graph.rules.dialects import Dialect
from harness.graph.rules.precision_sensitive import find_unquantizable_constants
from search.space import Edge, Resolved

__all__ = ["GRAPH_INPUT_INDEX", "EdgeRequests", "NodeRequests"]

GRAPH_INPUT_INDEX = -1
"""What makes the inputs of the model, and reads its outputs: the row behind those of the nodes."""

_RequestTarget = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class NodeRequests:
    """A placement as the marks (see `VariantTable`) of each node, by its index, and of `GRAPH_INPUT_INDEX`.

    Attributes:
        consumer_masks: On what it reads.
        producer_masks: On what it makes.
    """

    consumer_masks: list[int]
    producer_masks: list[int]


class EdgeRequests:
    """Checks each edge once; many placements ask for it again.

    Args:
        model: The float model.
        dialect: Whose precisions are offered.
        readers: Forms of what reads, by node, and of `GRAPH_INPUT_INDEX`; here they only tell the bits of marks.
        makers: Likewise of what makes.
    """

    def __init__(
        self, model: Model, dialect: Dialect, readers: Sequence[VariantTable[Any]], makers: Sequence[VariantTable[Any]]
    ) -> None:
        self._model = model
        self._dialect = dialect
        self._readers = readers
        self._makers = makers
        self._index = {node.name: node.index for node in model.nodes}
        self._known: dict[tuple[str, str, int, str], _RequestTarget] = {}

    def group_by_node(self, resolved: Resolved) -> NodeRequests:
        """Sort the edges of a placement.

        Raises:
            UserError: An edge is not one of this model's, cannot be quantized, or is asked for twice.
        """
        known, read, made = self._known, [0] * len(self._readers), [0] * len(self._makers)
        for edge, precision in resolved:
            key = (edge.tensor, edge.consumer, edge.slot, precision)
            place = known.get(key)
            if place is None:
                place = known[key] = self._request_target(edge, precision)
            reader, slot, maker, tensor = place
            read[reader] |= slot
            made[maker] |= tensor
        if sum(map(int.bit_count, read)) < len(resolved):
            raise UserError(f"{self._model.source}: the placement asks for one edge twice")
        return NodeRequests(read, made)

    def _request_target(self, edge: Edge, precision: str) -> _RequestTarget:
        """Who reads an edge and who makes its tensor, each with the bit to set; constants need no pair there."""
        if edge.consumer:
            reader, slot = self._consumer_node(edge, precision).index, edge.slot
        else:
            reader, slot = GRAPH_INPUT_INDEX, self._model.outputs.index(self._output_tensor(edge, precision))
        read = self._readers[reader].bit(RequestBit("quantized", slot, precision))
        if edge.tensor in self._model.constants:
            return reader, read, GRAPH_INPUT_INDEX, 0
        maker = self._model.producer.get(edge.tensor, GRAPH_INPUT_INDEX)
        return reader, read, maker, self._makers[maker].bit(RequestBit("quantized", edge.tensor, precision))

    def _consumer_node(self, edge: Edge, precision: str) -> Node:
        """The node that an edge leads into."""
        index = self._index.get(edge.consumer)
        node = None if index is None else self._model.nodes[index]
        if node is None or not 0 <= edge.slot < len(node.inputs) or node.inputs[edge.slot] != edge.tensor:
            raise UserError(
                f"{self._model.source}: {_describe_edge(edge)} is not in this model; "
                "the placement was made for another model, or for other static shapes"
            )
        if node.opaque or (edge.slot > 1 and node.op in self._dialect.linear_ops):
            what = "has a subgraph or is unknown to ONNX" if node.opaque else "takes its bias there"
            raise UserError(f"{self._model.source}: {_describe_edge(edge)} stays float: {node.op} {what}")
        if node.op in self._dialect.linear_ops and edge.tensor in self._model.cached_analysis(
            find_unquantizable_constants
        ):
            raise UserError(
                f"{self._model.source}: {_describe_edge(edge)} stays float: it has NaN, infinite or huge values"
            )
        self._check_edge(edge, precision)
        return node

    def _output_tensor(self, edge: Edge, precision: str) -> str:
        """The tensor of an edge that leads out of the model."""
        if edge.tensor not in self._model.outputs or edge.tensor not in self._model.producer:
            raise UserError(
                f"{self._model.source}: {_describe_edge(edge)}: no node of this model makes an output of that name"
            )
        self._check_edge(edge, precision)
        return edge.tensor

    def _check_edge(self, edge: Edge, precision: str) -> None:
        kind = self._model.types.get(edge.tensor)
        if kind is not None and kind.dtype not in QUANTIZABLE_DTYPES:
            raise UserError(
                f"{self._model.source}: {_describe_edge(edge)} cannot be quantized: its type is {kind.dtype}"
            )
        if precision not in self._supported_precisions:
            raise UserError(
                f"{self._model.source}: {_describe_edge(edge)}: precision {precision!r} is not among those that "
                f"{self._dialect.name} takes at opset {self._check_opset}: "
                f"{', '.join(sorted(self._supported_precisions)) or 'none'}"
            )

    @cached_property
    def _check_opset(self) -> int:
        return max((int(o.version) for o in self._model.proto.opset_import if o.domain == ""), default=0)

    @cached_property
    def _supported_precisions(self) -> frozenset[str]:
        return frozenset(p for p in self._dialect.precisions if self._dialect.opset([p]) <= self._check_opset)


def _describe_edge(edge: Edge) -> str:
    return (
        f"edge {edge.tensor!r} -> input {edge.slot} of {edge.consumer!r}"
        if edge.consumer
        else f"output {edge.tensor!r}"
    )
