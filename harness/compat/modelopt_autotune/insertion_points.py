"""Insertion points of a pattern, and their resolution in a region, under ModelOpt's names.

The argument `graph` is either the autotuner's graph or an `onnx_graphsurgeon.Graph`. In the former, the dialect decides
which points are legal, and node indices count nodes in the canonical order of `harness.graph.partition.patterns`. In
the latter, the rules depend on operators and types alone, node indices count the nodes directly in a region in their
order in the graph, and region indices the child regions as `Region.get_children(sort=True)`.
"""

from __future__ import annotations

import itertools
import logging
import math
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np

from harness.compat.modelopt_autotune.settings import AutotunerError
from harness.graph.model import Model
from harness.graph.partition.regions import Region as GraphRegion
from harness.graph.partition.regions import RegionType as RegionType
from harness.graph.partition.regions import find_boundary, find_readers
from harness.graph.rules.operator_sets import (
    CONVOLUTION_OPS,
    LINEAR_OPS,
    PARAMETER_SLOTS,
    POINT_OPS,
    QUANTIZABLE_OPS,
    SHAPE_SLOTS,
)
from search.space import PointKind

logger = logging.getLogger(__name__)


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
            logger.warning("region %s cannot be a child of region %s, which is in it", child.id, self.id)
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


Address = tuple[PointKind, tuple[int, int]]
"""Kind of a point and its position in the pattern, as in the name of a dimension."""
MIN_ELEMENTS = 8  # ModelOpt's limit: smaller tensors gain nothing


@runtime_checkable
class RegionResolver(Protocol):
    """Graph with rules of its own, such as `placement_map.RegionIndex`.

    For a region `pattern` and `order` return the pattern and the nodes in its order; `addresses` returns those of its
    legal points, and `resolve` the node inputs that one quantizes.
    """

    def pattern(self, region: Region) -> Any: ...
    def order(self, region: Region) -> list[int]: ...
    def addresses(self, region: Region) -> list[Address]: ...
    def resolve(self, region: Region, address: Address | None) -> set[ResolvedInsertionPoint]: ...


class _PlainValues:
    """Conversion of a dataclass to and from plain values."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload,no-any-return]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        return cls(**data)


@dataclass(frozen=True)
class ResolvedInsertionPoint(_PlainValues):
    """Input number `input_index` of a node, by its index in the graph, with a Q/DQ pair; None: all readers."""

    tensor_name: str
    node_index: int | None = None
    input_index: int | None = None


class InsertionPoint(_PlainValues, ABC):
    """Place in a pattern where Q/DQ pairs may be inserted."""

    @property
    @abstractmethod
    def address(self) -> Address | None:
        """Kind and place in the space of placements; None if no dimension has this place."""

    def resolve(self, region: Region, graph: Any) -> set[ResolvedInsertionPoint]:
        """Return the inputs that the point quantizes in one region; empty if the rules forbid it.

        Args:
            graph: Graph that has the region: the autotuner's, or an `onnx_graphsurgeon.Graph`.

        Raises:
            IndexError: The region has no such node, input, output or child region.
        """
        own_rules = isinstance(graph, RegionResolver)
        return graph.resolve(region, self.address) if own_rules else self._resolve_in(region, graph)

    @classmethod
    def collect_from_region(cls, region: Region, graph: Any) -> list[Self]:
        """Return all legal points of this class in a region.

        Args:
            graph: Graph that has the region: the autotuner's, or an `onnx_graphsurgeon.Graph`.
        """
        if not isinstance(graph, RegionResolver):
            return list(cls._find_in(region, graph))
        points = (make_insertion_point(*address) for address in graph.addresses(region))
        return [point for point in points if isinstance(point, cls)]

    @abstractmethod
    def _resolve_in(self, region: Region, graph: Any) -> set[ResolvedInsertionPoint]: ...

    @classmethod
    @abstractmethod
    def _find_in(cls, region: Region, graph: Any) -> Iterator[Self]: ...


@dataclass(frozen=True)
class NodeInputInsertionPoint(InsertionPoint):
    """Input of a node; a linear operator has one point, at input 0, which includes its weight."""

    node_index: int
    input_index: int

    @property
    def address(self) -> Address:
        return "node_input", (self.node_index, self.input_index)

    def _resolve_in(self, region: Region, graph: Any) -> set[ResolvedInsertionPoint]:
        index = region.get_nodes(sort=True)[self.node_index]
        node = graph.nodes[index]
        slots = [self.input_index]
        if node.op in LINEAR_OPS:
            slots = [] if self.input_index else [0, 1]
        return {ResolvedInsertionPoint(name, index, slot) for slot in slots if (name := _name(node.inputs[slot]))}

    @classmethod
    def _find_in(cls, region: Region, graph: Any) -> Iterator[Self]:
        for place, index in enumerate(region.get_nodes(sort=True)):
            node = graph.nodes[index]
            for slot, tensor in enumerate(node.inputs):
                if _name(tensor) and _accepts(node, slot):
                    yield cls(place, slot)


@dataclass(frozen=True)
class ChildRegionInputInsertionPoint(InsertionPoint):
    """Input of a child region, for all nodes inside that read it."""

    region_index: int
    input_index: int

    @property
    def address(self) -> Address:
        return "child_input", (self.region_index, self.input_index)

    def _resolve_in(self, region: Region, graph: Any) -> set[ResolvedInsertionPoint]:
        if region.type is RegionType.LEAF:
            return set()
        child = region.get_children(sort=True)[self.region_index]
        return resolve_region_io_insertion_points(child, graph, child.inputs[self.input_index])

    @classmethod
    def _find_in(cls, region: Region, graph: Any) -> Iterator[Self]:
        for place, child in enumerate(region.get_children(sort=True)):
            for slot, name in enumerate(child.inputs):
                if not skip_invalid_insertion_points(graph, name, child):
                    yield cls(place, slot)


@dataclass(frozen=True)
class ChildRegionOutputInsertionPoint(InsertionPoint):
    """Output of a node (`region_index` None) or of a child region that leaves its region, for all its readers.

    In the autotuner's graph an output of a child region resolves to nothing, as it is the output of a node in a LEAF.
    """

    region_index: int | None
    node_index: int | None
    output_index: int

    @property
    def address(self) -> Address | None:
        """Node that computes the output, in the order of the pattern, and the number of the output; None if unknown."""
        return None if self.node_index is None else ("output", (self.node_index, self.output_index))

    def _resolve_in(self, region: Region, graph: Any) -> set[ResolvedInsertionPoint]:
        if self.region_index is not None:
            child = region.get_children(sort=True)[self.region_index]
            return resolve_region_io_insertion_points(child, graph, child.outputs[self.output_index])
        if self.node_index is None:
            return set()
        node = graph.nodes[region.get_nodes(sort=True)[self.node_index]]
        return resolve_region_io_insertion_points(None, graph, _name(node.outputs[self.output_index]))

    @classmethod
    def _find_in(cls, region: Region, graph: Any) -> Iterator[Self]:
        for place, child in enumerate(region.get_children(sort=True)):
            for slot, name in enumerate(child.outputs):
                if name in region.outputs and resolve_region_io_insertion_points(child, graph, name):
                    yield cls(place, None, slot)
        for place, index in enumerate(region.get_nodes(sort=True)):
            for slot, tensor in enumerate(graph.nodes[index].outputs):
                name = _name(tensor)
                if name in region.outputs and resolve_region_io_insertion_points(None, graph, name):
                    yield cls(None, place, slot)


def make_insertion_point(kind: PointKind, place: tuple[int, int]) -> InsertionPoint:
    """Return the point at an `Address`, whose second part is `place`."""
    if kind == "output":
        return ChildRegionOutputInsertionPoint(region_index=None, node_index=place[0], output_index=place[1])
    return (NodeInputInsertionPoint if kind == "node_input" else ChildRegionInputInsertionPoint)(*place)


def get_tensor_consumer_node_indices(graph: Any) -> dict[str, list[int]]:
    """Return the indices of the nodes of an `onnx_graphsurgeon.Graph` that read a tensor, by its name."""
    found: dict[str, list[int]] = defaultdict(list)
    for index, node in enumerate(graph.nodes):
        for name in dict.fromkeys(map(_name, node.inputs)):
            found[name].append(index)
    return dict(found)


def has_quantizable_operations(region: Region, graph: Any) -> bool:
    """Return whether a region has an operator that gains from Q/DQ; always True for COMPOSITE and ROOT regions.

    Args:
        graph: Graph whose nodes the region has by index.
    """
    return region.type is not RegionType.LEAF or any(graph.nodes[n].op in QUANTIZABLE_OPS for n in region.get_nodes())


def skip_invalid_insertion_points(graph: Any, tensor_name: str, region_or_node: Any) -> bool:
    """Return whether a tensor must stay float at an input of a node, or of any node of a region, that reads it.

    Args:
        graph: An `onnx_graphsurgeon.Graph`.
        region_or_node: A `Region`, or a node of `graph`.
    """
    nodes = [region_or_node]
    if isinstance(region_or_node, Region):
        count = len(graph.nodes)
        nodes = [graph.nodes[n] for n in region_or_node.get_region_nodes_and_descendants() if n < count]
    slots = ((node, slot) for node in nodes for slot, tensor in enumerate(node.inputs) if _name(tensor) == tensor_name)
    return not all(_accepts(node, slot) for node, slot in slots)


def resolve_region_io_insertion_points(
    region: Region | None, graph: Any, tensor_name: str
) -> set[ResolvedInsertionPoint]:
    """Return the inputs at which a tensor of a region's boundary may be quantized, of all nodes that read it.

    Args:
        region: Region whose nodes are searched too; None: only the readers in the graph.
        graph: An `onnx_graphsurgeon.Graph`.
    """
    readers = set(get_tensor_consumer_node_indices(graph).get(tensor_name, ()))
    if region is not None:
        readers |= region.get_region_nodes_and_descendants()
    return {
        ResolvedInsertionPoint(tensor_name, index, slot)
        for index in readers
        for slot, tensor in enumerate(graph.nodes[index].inputs)
        if _name(tensor) == tensor_name and not skip_invalid_insertion_points(graph, tensor_name, graph.nodes[index])
    }


def merge_resolved_insertion_points(
    graph: Any, resolved_insertion_points: set[ResolvedInsertionPoint]
) -> set[ResolvedInsertionPoint]:
    """Replace the points of a tensor by one without a node where all its readers have one.

    Args:
        graph: The `onnx_graphsurgeon.Graph` of the points.
    """
    readers = get_tensor_consumer_node_indices(graph)
    at: dict[str, set[ResolvedInsertionPoint]] = defaultdict(set)
    for point in resolved_insertion_points:
        at[point.tensor_name].add(point)
    merged: set[ResolvedInsertionPoint] = set()
    for name, points in at.items():
        quantized = {point.node_index for point in points}
        merged |= {ResolvedInsertionPoint(name)} if quantized == set(readers.get(name, ())) else points
    return merged


def get_autotuner_quantizable_ops() -> set[str]:
    """Return the operators whose inputs may be quantized."""
    return {*LINEAR_OPS, *POINT_OPS}


def _name(tensor: Any) -> str:
    """Return the name of a tensor; "" for an omitted input."""
    return getattr(tensor, "name", None) or ""


def _accepts(node: Any, slot: int) -> bool:
    """Return whether an input of a node of graphsurgeon may be quantized."""
    tensor = node.inputs[slot]
    if node.op in LINEAR_OPS:
        legal = slot == 0
    else:
        excluded = PARAMETER_SLOTS.get(node.op, frozenset()) | SHAPE_SLOTS.get(node.op, frozenset())
        legal = node.op in POINT_OPS and slot not in excluded and not _is_fused(node)
    dtype, shape = getattr(tensor, "dtype", None), getattr(tensor, "shape", None)
    sizes = shape if shape is not None and all(isinstance(size, int) for size in shape) else [MIN_ELEMENTS]
    return legal and (dtype is None or np.issubdtype(dtype, np.floating)) and math.prod(sizes) >= MIN_ELEMENTS


def _is_fused(node: Any) -> bool:
    """Return whether a runtime computes a node within the convolution before it."""
    if node.op not in ("BatchNormalization", "Relu", "Softmax") or len(node.inputs[0].inputs) != 1:
        return False
    before = node.inputs[0].inputs[0]
    return before.op in CONVOLUTION_OPS or (
        before.op == "BatchNormalization" and node.op != "BatchNormalization" and _is_fused(before)
    )
