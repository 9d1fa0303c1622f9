"""Regions under ModelOpt's names, and their conversion from and to those of `harness.graph.partition.regions`."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from harness.compat.modelopt_autotune.settings import AutotunerError
from harness.graph.model import Model
from harness.graph.partition.regions import Region as GraphRegion
from harness.graph.partition.regions import RegionType, find_boundary, find_readers

__all__ = ["Region", "RegionType", "from_graph", "to_graph"]

_logger = logging.getLogger(__name__)


class Region:
    """Subgraph, found by the region search or built by hand.

    Attributes:
        level: Depth below the whole model, from 0.
        type: LEAF, COMPOSITE or ROOT.
        nodes: Indices of the nodes directly in the region, in `Model.nodes` of the autotuner's graph.
        inputs: Tensors from outside; computed again wherever the region is used.
        outputs: Tensors that are used outside; computed again, too.
        metadata: Free for the caller.
    """

    def __init__(self, region_id: int, level: int, region_type: RegionType) -> None:
        self.id = region_id
        self.level = level
        self.type = region_type
        self.parent: Region | None = None
        self.children: list[Region] = []
        self.nodes: set[int] = set()
        self.inputs: list[str] = []
        self.outputs: list[str] = []
        self.metadata: dict[str, str] = {}

    def walk(self) -> Iterator[Region]:
        """Yield this region and all below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def get_children(self, *, sort: bool = False) -> list[Region]:
        """Return the child regions; if sorted, by descending level, then by size."""
        if not sort:
            return self.children
        return sorted(self.children, key=lambda r: (-r.level, r.get_size_of_region_and_descendants()))

    def add_child(self, child: Region) -> None:
        """Move a region below this one; log a warning and do nothing if this one is below it."""
        if child is self or self.is_descendant_of(child):
            _logger.warning("region %s cannot be a child of region %s, which is in it", child.id, self.id)
            return
        if child.parent is not None:
            child.parent.remove_child(child)
        self.children.append(child)
        child.parent = self

    def remove_child(self, child: Region) -> bool:
        """Remove a child and return whether there was one."""
        if child not in self.children:
            return False
        self.children.remove(child)
        child.parent = None
        return True

    def is_descendant_of(self, potential_ancestor: Region) -> bool:
        above = self.parent
        while above is not None and above is not potential_ancestor:
            above = above.parent
        return above is not None

    def get_nodes(self, *, sort: bool = False) -> list[int]:
        return sorted(self.nodes) if sort else list(self.nodes)

    def get_region_nodes_and_descendants(self) -> set[int]:
        return {node for region in self.walk() for node in region.nodes}

    def contains_node(self, node_index: int) -> bool:
        return node_index in self.nodes

    def contains_node_within_region_and_descendants(self, node_index: int) -> bool:
        return node_index in self.get_region_nodes_and_descendants()

    def get_size_of_region_and_descendants(self) -> int:
        return sum(len(region.nodes) for region in self.walk())

    def merge(self, other: Region) -> None:
        """Move the nodes and children of another region into this one."""
        self.nodes |= other.nodes
        for child in list(other.children):
            self.add_child(child)

    def __repr__(self) -> str:
        return (
            f"Region[id={self.id}, level={self.level}, type={self.type.value}, nodes={len(self.nodes)}, "
            f"children={len(self.children)}, inputs={len(self.inputs)}, outputs={len(self.outputs)}]"
        )


def from_graph(region: GraphRegion) -> Region:
    """Convert a region of the graph package, with all below it."""
    converted = Region(region.id, region.level, region.type)
    converted.nodes = set(region.nodes)
    converted.inputs, converted.outputs = list(region.inputs), list(region.outputs)
    for child in region.children:
        converted.add_child(from_graph(child))
    return converted


def to_graph(model: Model, regions: Sequence[Region]) -> tuple[GraphRegion, Mapping[Region, GraphRegion]]:
    """Convert regions to a tree of the graph package; return its ROOT and the converted region of each.

    Args:
        regions: Regions; those without a parent among them become the children of the ROOT. They need not cover the
            model.

    Raises:
        AutotunerError: A node is in two regions or not in the model.
    """
    region_set = set(regions)
    tops = [region for region in regions if region.parent not in region_set]
    members = Counter(node for top in tops for region in top.walk() for node in region.nodes)
    for node, count in members.items():
        if not 0 <= node < len(model.nodes):
            raise AutotunerError(f"regions: {model.source} has nodes 0 to {len(model.nodes) - 1}, but got {node}")
        if count > 1:
            name = model.nodes[node].name
            raise AutotunerError(f"regions: node {name!r} is in {count} regions; each node belongs to one LEAF")
    readers, numbers, found = find_readers(model), itertools.count(), dict[Region, GraphRegion]()

    def make(number: int, level: int, nodes: tuple[int, ...], children: Sequence[GraphRegion]) -> GraphRegion:
        kind = RegionType.ROOT if number < 0 else RegionType.COMPOSITE if children else RegionType.LEAF
        ordered = tuple(sorted(children, key=lambda child: child.node_indices()[:1]))
        bare = GraphRegion(id=number, type=kind, level=level, nodes=nodes, children=ordered, inputs=(), outputs=())
        inputs, outputs = find_boundary(model, readers, bare.node_indices())
        return replace(bare, inputs=inputs, outputs=outputs)

    def convert(region: Region, level: int) -> GraphRegion:
        number = next(numbers)
        children = [convert(child, level + 1) for child in region.children]
        nodes = tuple(sorted(region.nodes))
        if children and nodes:  # a COMPOSITE has no nodes of its own, so they become a LEAF
            children.append(make(next(numbers), level + 1, nodes, ()))
        found[region] = make(number, level, () if children else nodes, children)
        return found[region]

    return make(-1, -1, (), [convert(region, 0) for region in tops]), found
