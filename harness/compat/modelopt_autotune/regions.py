"""Regions with the handles that ModelOpt's users know; what they hold is found by `harness.graph.partition.regions`."""

from __future__ import annotations

import itertools
import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from harness.compat.modelopt_autotune.common import AutotunerError
from harness.graph.model import Model
from harness.graph.partition.regions import Region as GraphRegion
from harness.graph.partition.regions import RegionType

__all__ = ["Region", "RegionType", "from_graph", "to_graph"]

_logger = logging.getLogger(__name__)


class Region:
    """A subgraph that may be built by hand.

    Attributes:
        id: Number of the region.
        level: Depth below the whole model, from 0.
        type: LEAF, COMPOSITE or ROOT.
        parent: The region that it is a child of.
        children: Its child regions.
        nodes: Indices of the nodes directly in it, by `Model.nodes` of the autotuner's graph.
        inputs: Tensors that come from outside; found anew where the region is used.
        outputs: Tensors that are used outside; likewise.
        metadata: Whatever its maker wants to keep.
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
        """This region and all below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def get_children(self, *, sort: bool = False) -> list[Region]:
        """The child regions; sorted, those of the deepest level and among them the smallest come first."""
        if not sort:
            return self.children
        return sorted(self.children, key=lambda r: (-r.level, r.get_size_of_region_and_descendants()))

    def add_child(self, child: Region) -> None:
        """Make a region a child of this one, taking it from the parent that it had; never of itself or of its own."""
        if child is self or self.is_descendant_of(child):
            _logger.warning("region %s cannot be a child of region %s, which is in it", child.id, self.id)
            return
        if child.parent is not None:
            child.parent.remove_child(child)
        self.children.append(child)
        child.parent = self

    def remove_child(self, child: Region) -> bool:
        """Let go of a child; whether there was one."""
        if child not in self.children:
            return False
        self.children.remove(child)
        child.parent = None
        return True

    def is_descendant_of(self, potential_ancestor: Region) -> bool:
        """Whether this region is somewhere below another one."""
        above = self.parent
        while above is not None and above is not potential_ancestor:
            above = above.parent
        return above is not None

    def get_nodes(self, *, sort: bool = False) -> list[int]:
        """Nodes directly in it."""
        return sorted(self.nodes) if sort else list(self.nodes)

    def get_region_nodes_and_descendants(self) -> set[int]:
        """Nodes in it or in a region below it."""
        return {node for region in self.walk() for node in region.nodes}

    def contains_node(self, node_index: int) -> bool:
        """Whether a node is directly in it."""
        return node_index in self.nodes

    def contains_node_within_region_and_descendants(self, node_index: int) -> bool:
        """Whether a node is in it or in a region below it."""
        return node_index in self.get_region_nodes_and_descendants()

    def get_size_of_region_and_descendants(self) -> int:
        """Number of nodes in it and in the regions below it."""
        return sum(len(region.nodes) for region in self.walk())

    def merge(self, other: Region) -> None:
        """Take over the nodes and the children of another region."""
        self.nodes |= other.nodes
        for child in list(other.children):
            self.add_child(child)

    def __repr__(self) -> str:
        return (
            f"Region[id={self.id}, level={self.level}, type={self.type.value}, nodes={len(self.nodes)}, "
            f"children={len(self.children)}, inputs={len(self.inputs)}, outputs={len(self.outputs)}]"
        )


def from_graph(region: GraphRegion) -> Region:
    """A region of the engine, and all below it, as regions of the door."""
    made = Region(region.id, region.level, region.type)
    made.nodes = set(region.nodes)
    made.inputs, made.outputs = list(region.inputs), list(region.outputs)
    for child in region.children:
        made.add_child(from_graph(child))
    return made


def to_graph(model: Model, regions: Sequence[Region]) -> tuple[GraphRegion, Mapping[Region, GraphRegion]]:
    """Regions of the door as a tree of the engine, and which is which.

    Args:
        regions: Those without a parent among them are the children of the ROOT. They need not cover the model.

    Raises:
        AutotunerError: A node is in two of them, or is none of the model's.
    """
    given = set(regions)
    tops = [region for region in regions if region.parent not in given]
    members = Counter(node for top in tops for region in top.walk() for node in region.nodes)
    for node, count in members.items():
        if not 0 <= node < len(model.nodes):
            raise AutotunerError(f"regions: {model.source} has nodes 0 to {len(model.nodes) - 1}, but got {node}")
        if count > 1:
            name = model.nodes[node].name
            raise AutotunerError(f"regions: node {name!r} is in {count} of them; each node belongs to one LEAF")
    converter = _RegionConverter(model)
    children = _sort_regions([converter.convert(region, 0) for region in tops])
    return converter.make(-1, RegionType.ROOT, -1, (), children), converter.found


class _RegionConverter:
    """Turns regions of the door into those of the engine, and finds their boundaries."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._numbers = itertools.count()
        self._ends = frozenset(model.outputs)
        self._readers: dict[str, set[int]] = defaultdict(set)
        for node in model.nodes:
            for name in (*node.inputs, *node.captures):
                self._readers[name].add(node.index)
        self.found: dict[Region, GraphRegion] = {}

    def convert(self, region: Region, level: int) -> GraphRegion:
        """A region and all below it."""
        number = next(self._numbers)
        children = [self.convert(child, level + 1) for child in region.children]
        nodes = tuple(sorted(region.nodes))
        if children and nodes:  # nodes beside children get a LEAF of their own
            children.append(self.make(next(self._numbers), RegionType.LEAF, level + 1, nodes, ()))
        kind = RegionType.COMPOSITE if children else RegionType.LEAF
        self.found[region] = self.make(number, kind, level, () if children else nodes, _sort_regions(children))
        return self.found[region]

    def make(
        self, number: int, kind: RegionType, level: int, nodes: tuple[int, ...], children: tuple[GraphRegion, ...]
    ) -> GraphRegion:
        """A region with its boundary."""
        bare = GraphRegion(id=number, type=kind, level=level, nodes=nodes, children=children, inputs=(), outputs=())
        inside = set(bare.node_indices())
        inputs: dict[str, None] = {}
        outputs = []
        for node in map(self._model.nodes.__getitem__, bare.node_indices()):
            for name in (*node.inputs, *node.captures):
                if name and name not in self._model.constants and self._model.producer.get(name, -1) not in inside:
                    inputs[name] = None
            outputs += [name for name in node.outputs if name in self._ends or not self._readers[name] <= inside]
        return replace(bare, inputs=tuple(inputs), outputs=tuple(outputs))


def _sort_regions(regions: Sequence[GraphRegion]) -> tuple[GraphRegion, ...]:
    return tuple(sorted(regions, key=lambda region: region.node_indices()[:1]))
