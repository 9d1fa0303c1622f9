"""Insertion points of a pattern, and their resolution in a region, under ModelOpt's names.

The argument `graph` is either the autotuner's graph or an `onnx_graphsurgeon.Graph`. In the former, the dialect decides
which points are legal, and node indices count nodes in the canonical order of `harness.graph.partition.patterns`. In
the latter, the rules depend on operators and types alone, node indices count the nodes directly in a region in their
order in the graph, and region indices the child regions as `Region.get_children(sort=True)`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np

from harness.compat.modelopt_autotune.regions import Region, RegionType
from harness.graph.partition.summary import QUANTIZABLE_OPS
from harness.graph.rules.operator_sets import (
    CONVOLUTION_OPS,
    LINEAR_OPS,
    PARAMETER_SLOTS,
    POINT_OPS,
    SHAPE_SLOTS,
)
from search.space import PointKind

__all__ = [
    "Address", "ChildRegionInputInsertionPoint", "ChildRegionOutputInsertionPoint", "InsertionPoint",
    "NodeInputInsertionPoint", "RegionResolver", "ResolvedInsertionPoint", "get_autotuner_quantizable_ops",
    "get_tensor_consumer_node_indices", "has_quantizable_operations", "make_insertion_point",
    "merge_resolved_insertion_points", "resolve_region_io_insertion_points",
    "skip_invalid_insertion_points",
]  # fmt: skip

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
