"""Which tensors share a scale in a placement.

An operator that only moves values (a MaxPool, a Split) runs on stored integers where the tensors on both sides have one
scale. So its outputs take the scale of its input, but only where that input is quantized: behind a float input they
keep the scale of their own range. The tensors around a Concat share a scale where all of its inputs are quantized.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from harness.graph.model import Model, Node
from harness.graph.quantize.edge_requests import GRAPH_INPUT_INDEX, NodeRequests
from harness.graph.quantize.node_variants import RequestBit, VariantTable
from harness.graph.quantize.scale_links import ScaleLinks, SharedScale, find_root
from harness.graph.rules.dialects import Dialect

__all__ = ["SharedScaleFinder"]


class _ConditionalBit(NamedTuple):
    """One bit to set on a node where another bit is set."""

    node: int
    needed: int
    bit: int


@dataclass(slots=True)
class _TensorCluster:
    """The operators of one group of tensors.

    Attributes:
        nodes: In topological order.
        masks: By node: the bits of its quantized inputs that decide about its link.
        known: By the state of those bits: what to set on the nodes that read, and on those that make the tensors.
    """

    nodes: list[Node] = field(default_factory=list)
    masks: list[int] = field(default_factory=list)
    known: dict[tuple[int, ...], tuple[list[_ConditionalBit], list[_ConditionalBit]]] = field(default_factory=dict)


class SharedScaleFinder:
    """Finds the ties of each placement and marks the places that they concern.

    Args:
        model: The float model.
        dialect: How the runtime wants its Q/DQ.
        links: Of the model in that dialect.
        readers: Forms of what reads, by node; see `EdgeRequests`.
        makers: Forms of what makes the tensors, likewise.
    """

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
            cluster.masks.append(sum(self._required_bits(node, precision) for precision in self._precisions))
        self._clusters = list(clusters.values())

    def mark_shared_scales(self, asked: NodeRequests) -> None:
        """Mark each quantized place of a placement whose scale is not made from its own range."""
        for cluster in self._clusters:
            state = tuple(
                asked.consumer_masks[node.index] & mask for node, mask in zip(cluster.nodes, cluster.masks, strict=True)
            )
            if not any(state):
                continue
            entries = cluster.known.get(state)
            if entries is None:
                entries = cluster.known[state] = self._cluster_entries(cluster, state)
            for row, found in zip((asked.consumer_masks, asked.producer_masks), entries, strict=True):
                for node, needed, bit in found:
                    if row[node] & needed:
                        row[node] |= bit

    def _required_bits(self, node: Node, precision: str) -> int:
        """Return the bits of the inputs that must be quantized for a node's link to hold."""
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
                    bit = self._readers[index].bit
                    read.append(
                        _ConditionalBit(
                            index,
                            bit(RequestBit("quantized", slot, precision)),
                            bit(RequestBit("tied", slot, precision, tie)),
                        )
                    )
                index = self._model.producer.get(tensor, GRAPH_INPUT_INDEX)
                bit = self._makers[index].bit
                made.append(
                    _ConditionalBit(
                        index,
                        bit(RequestBit("quantized", tensor, precision)),
                        bit(RequestBit("tied", tensor, precision, tie)),
                    )
                )
        return read, made

    def _cluster_shared_scales(
        self, cluster: _TensorCluster, state: tuple[int, ...], precision: str
    ) -> Mapping[str, SharedScale]:
        """Return the tie of each tensor of a cluster at one precision, but for tensors with a scale of their own."""
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
