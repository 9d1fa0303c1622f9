"""Encoding of a placement's edges as bits of consumer and producer nodes, and shared scales of tensors.

An operator that only moves values (MaxPool, Split) runs on stored integers if its inputs and outputs have one scale. So
its outputs get the scale of its input if that input is quantized; after a float input they have the scale of their own
range. The inputs and the output of a Concat share a scale if all inputs are quantized.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import and_
from typing import Any, NamedTuple

from harness.base.errors import UserError
from harness.graph.model import Model, Node
from harness.graph.protos import opset_versions
from harness.graph.quantize.node_variants import RequestBit, VariantTable
from harness.graph.quantize.scales import ActivationScales, ScaleLinks, SharedScale, find_root
from harness.graph.quantize.weights import QUANTIZABLE_DTYPES
from harness.graph.rules.dialects import Dialect
from harness.graph.rules.precision_sensitive import find_unquantizable_constants
from search.space import Edge, Resolved

GRAPH_INPUT_INDEX = -1
"""Row, after those of the nodes, of the producer of the model's inputs and the consumer of its outputs."""

_RequestTarget = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class NodeRequests:
    """Requests of a placement by node index, as bits of `VariantTable`; `GRAPH_INPUT_INDEX` is the last index.

    Attributes:
        consumer_masks: Bits of the inputs of each node.
        producer_masks: Bits of the outputs of each node.
    """

    consumer_masks: list[int]
    producer_masks: list[int]


class EdgeRequests:
    """Converter of the edges of placements to request bits, which checks each edge once.

    Args:
        readers: Variant tables of consumers by node index, with that of `GRAPH_INPUT_INDEX`; they allocate the bits.
        makers: Variant tables of producers by node index, with that of `GRAPH_INPUT_INDEX`.
    """

    def __init__(
        self,
        model: Model,
        dialect: Dialect,
        scales: ActivationScales,
        readers: Sequence[VariantTable[Any]],
        makers: Sequence[VariantTable[Any]],
    ) -> None:
        self._model = model
        self._dialect = dialect
        self._scales = scales
        self._readers = readers
        self._makers = makers
        self._index = {node.name: node.index for node in model.nodes}
        self._output_slots = {name: slot for slot, name in reversed(list(enumerate(model.outputs)))}
        self._opset = opset_versions(model.proto).get("", 0)
        self._supported_precisions = {p for p in dialect.precisions if dialect.opset([p]) <= self._opset}
        self._known: dict[tuple[str, str, int, str], _RequestTarget] = {}

    def group_by_node(self, resolved: Resolved) -> NodeRequests:
        """Return the request bits of a placement by node.

        Raises:
            UserError: An edge does not exist in the model, cannot be quantized at its precision, or is a duplicate.
        """
        known, read, made = self._known, [0] * len(self._readers), [0] * len(self._makers)
        for edge, precision in resolved:
            key = (edge.tensor, edge.consumer, edge.slot, precision)
            try:
                reader, slot, maker, tensor = known[key]
            except KeyError:
                reader, slot, maker, tensor = known[key] = self._request_target(edge, precision)
            read[reader] |= slot
            made[maker] |= tensor
        if sum(map(int.bit_count, read)) < len(resolved):
            raise UserError(f"{self._model.source}: the placement contains one edge twice")
        return NodeRequests(read, made)

    def _request_target(self, edge: Edge, precision: str) -> _RequestTarget:
        """Return consumer, its bit, producer and its bit for an edge; the bit of a constant's producer is 0."""
        if edge.consumer:
            reader, slot = self._consumer_node(edge, precision).index, edge.slot
        else:
            reader, slot = GRAPH_INPUT_INDEX, self._output_slots[self._output_tensor(edge, precision)]
        read = self._readers[reader].bit(RequestBit("quantized", slot, precision))
        if edge.tensor in self._model.constants:
            return reader, read, GRAPH_INPUT_INDEX, 0
        maker = self._model.producer.get(edge.tensor, GRAPH_INPUT_INDEX)
        node = self._model.nodes[reader] if edge.consumer else None
        by_channel = node is not None and self._scales.has_channel_scales(node, edge.slot, precision)
        request = RequestBit("channels" if by_channel else "quantized", edge.tensor, precision)
        return reader, read, maker, self._makers[maker].bit(request)

    def _consumer_node(self, edge: Edge, precision: str) -> Node:
        index = self._index.get(edge.consumer)
        node = None if index is None else self._model.nodes[index]
        if node is None or not 0 <= edge.slot < len(node.inputs) or node.inputs[edge.slot] != edge.tensor:
            raise UserError(
                f"{self._model.source}: {_describe_edge(edge)} is not in this model; "
                "the placement was made for another model, or for other static shapes"
            )
        if node.opaque or (edge.slot > 1 and node.op in self._dialect.linear_ops):
            what = "has a subgraph, is random or is unknown to ONNX" if node.opaque else "takes its bias there"
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
        if edge.tensor not in self._model.output_names or edge.tensor not in self._model.producer:
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
                f"{self._dialect.name} takes at opset {self._opset}: "
                f"{', '.join(sorted(self._supported_precisions)) or 'none'}"
            )


def _describe_edge(edge: Edge) -> str:
    place = f"edge {edge.tensor!r} -> input {edge.slot} of {edge.consumer!r}"
    return place if edge.consumer else f"output {edge.tensor!r}"


class _ConditionalBit(NamedTuple):
    node: int
    needed: int
    bit: int


@dataclass(slots=True)
class _TensorCluster:
    """Operators whose tensors may share scales.

    Attributes:
        nodes: Operators in topological order.
        indexes: Index of each operator in the model.
        masks: Bits of the inputs of each operator that decide whether its tensors share a scale.
        known: Bits to set for consumers and for producers, by the state of those bits.
    """

    nodes: list[Node] = field(default_factory=list)
    indexes: list[int] = field(default_factory=list)
    masks: list[int] = field(default_factory=list)
    known: dict[tuple[int, ...], tuple[list[_ConditionalBit], list[_ConditionalBit]]] = field(default_factory=dict)


class SharedScaleFinder:
    """Finder of the scales that tensors of a placement share; see `EdgeRequests` for `readers` and `makers`."""

    def __init__(
        self,
        model: Model,
        dialect: Dialect,
        links: ScaleLinks,
        readers: Sequence[VariantTable[Any]],
        makers: Sequence[VariantTable[Any]],
    ) -> None:
        self._model = model
        self._links = links
        self._readers = readers
        self._makers = makers
        self._precisions = sorted(dialect.precisions)
        clusters: dict[str, _TensorCluster] = defaultdict(_TensorCluster)
        for node in links.joins:
            cluster = clusters[links.group_name(node.inputs[0])]
            cluster.nodes.append(node)
            cluster.indexes.append(node.index)
            cluster.masks.append(sum(self._required_bits(node, precision) for precision in self._precisions))
        self._clusters = list(clusters.values())

    def mark_shared_scales(self, asked: NodeRequests) -> None:
        """Set the bits of quantized inputs and outputs with a scale that depends on other tensors, in place."""
        masks = asked.consumer_masks
        for cluster in self._clusters:
            state = tuple(map(and_, map(masks.__getitem__, cluster.indexes), cluster.masks))
            if not any(state):
                continue
            entries = cluster.known.get(state)
            if entries is None:
                entries = cluster.known[state] = self._cluster_entries(cluster, state)
            for row, found in zip((masks, asked.producer_masks), entries, strict=True):
                for node, needed, bit in found:
                    if row[node] & needed:
                        row[node] |= bit

    def _required_bits(self, node: Node, precision: str) -> int:
        """Return the bits of the inputs that must be quantized so that the tensors of a node share a scale."""
        if node.index in self._links.fixed:
            return 0
        slots = range(len(node.inputs)) if node.op == "Concat" else (0,)
        bit = self._readers[node.index].bit
        activations = (slot for slot in slots if node.op != "Concat" or node.inputs[slot] not in self._model.constants)
        return sum(bit(RequestBit("quantized", slot, precision)) for slot in activations)

    def _cluster_entries(
        self, cluster: _TensorCluster, state: tuple[int, ...]
    ) -> tuple[list[_ConditionalBit], list[_ConditionalBit]]:
        read: list[_ConditionalBit] = []
        made: list[_ConditionalBit] = []
        for precision in self._precisions:
            for tensor, tie in self._cluster_shared_scales(cluster, state, precision).items():
                for index, slot in self._model.consumers.get(tensor, ()):
                    read.append(_conditional_bit(self._readers, index, slot, precision, tie))
                index = self._model.producer.get(tensor, GRAPH_INPUT_INDEX)
                made.append(_conditional_bit(self._makers, index, tensor, precision, tie))
        return read, made

    def _cluster_shared_scales(
        self, cluster: _TensorCluster, state: tuple[int, ...], precision: str
    ) -> Mapping[str, SharedScale]:
        """Return the shared scale of each tensor of a cluster at one precision, without tensors that have their own."""
        parents: dict[str, str] = {}
        origin: dict[str, str] = {}
        concats: list[str] = []
        for node, bits in zip(cluster.nodes, state, strict=True):
            needed = self._required_bits(node, precision)
            if bits & needed != needed or not (needed or node.index in self._links.fixed):
                continue
            first = node.inputs[0]
            if node.op == "Concat":
                concats.append(first)
            for name in filter(None, (*node.outputs, *(node.inputs if node.op == "Concat" else ()))):
                parents[find_root(parents, name)] = find_root(parents, first)
                if node.op != "Concat":
                    origin[name] = origin.get(first, first)
        members: dict[str, list[str]] = defaultdict(list)
        for name in list(parents):
            members[find_root(parents, name)].append(name)
        shared = {find_root(parents, name) for name in concats}
        found: dict[str, SharedScale] = {}
        for root, names in members.items():
            together = tuple(sorted(names)) if root in shared else ()
            found |= {n: SharedScale(origin.get(n, n), together) for n in names if together or n in origin}
        return found


def _conditional_bit(
    tables: Sequence[VariantTable[Any]], index: int, place: int | str, precision: str, tie: SharedScale
) -> _ConditionalBit:
    bit = tables[index].bit
    needed = bit(RequestBit("quantized", place, precision))
    return _ConditionalBit(index, needed, bit(RequestBit("tied", place, precision, tie)))
