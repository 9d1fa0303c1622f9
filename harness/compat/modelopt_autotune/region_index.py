"""What a model's regions, patterns and points are, and the way between the door's words and the engine's.

`RegionIndex` answers questions about any region of a model. `PlacementMap` holds one set of regions with the space
of placements over them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from harness.compat.modelopt_autotune.common import AutotunerError
from harness.compat.modelopt_autotune.points import (
    Address,
    InsertionPoint,
    ResolvedInsertionPoint,
    make_insertion_point,
)
from harness.compat.modelopt_autotune.regions import Region, RegionType, from_graph, to_graph
from harness.compat.modelopt_autotune.schemes import InsertionScheme, RegionPattern
from harness.graph.model import Model, Node, TensorType
from harness.graph.partition.patterns import Pattern, find_patterns
from harness.graph.partition.regions import discover_regions
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import OPENVINO, Dialect
from harness.graph.rules.operator_sets import LINEAR_OPS
from search.space import Edge, Placement, PointKind, Resolved, Space

__all__ = ["PlacementMap", "RegionIndex"]

_DTYPES = {"float32": "float", "float16": "float16", "bfloat16": "bfloat16"}


class PlacementMap:
    """A set of regions, their patterns, and the space of placements over them.

    Attributes:
        whole: The region of the whole model; it is none of `regions`.
        space: One dimension for each point of each pattern, all three kinds.
    """

    def __init__(self, model: Model, dialect: Dialect, precision: str, regions: Sequence[Region]) -> None:
        self.model = model
        self.precision = precision
        root, found = to_graph(model, regions)
        self.whole = Region(len(found), 0, RegionType.ROOT)
        self.whole.nodes = set(root.node_indices())
        self.patterns = find_patterns(model, root)
        self._graph = {**found, self.whole: root}
        self._place = {id(r): (p, n) for p in self.patterns for n, r in enumerate(p.regions)}
        kinds: tuple[PointKind, ...] = ("node_input", "child_input", "output")
        self.space = build_space(model, dialect, precisions=(precision,), root=root, kinds=kinds)

    def __contains__(self, region: object) -> bool:
        return region in self._graph

    def narrow(self, space: Space) -> None:
        """Take a smaller space: fewer dimensions, or fewer edges of some."""
        self.space = space
        for derived in ("_dimensions", "sites"):
            self.__dict__.pop(derived, None)

    def locate_region(self, region: Region) -> tuple[Pattern, int]:
        """Pattern of a region, and which of the pattern's regions it is."""
        return self._place[id(self._graph[region])]

    def dimensions(self, signature: str) -> Mapping[Address, int]:
        """Points of a pattern, and the dimension of each."""
        return self._dimensions.get(signature, {})

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Number of nodes by signature."""
        return {pattern.signature: len(pattern.operators) for pattern in self.patterns}

    @cached_property
    def _dimensions(self) -> Mapping[str, Mapping[Address, int]]:
        found: dict[str, dict[Address, int]] = {}
        for group, indices in self.space.groups.items():
            signature = next(s for s in self.sizes if s.startswith(group))
            found[signature] = {_parse_address(self.space.dimensions[i].name, group): i for i in indices}
        return found

    def edges(self, region: Region) -> Mapping[Address, tuple[Edge, ...]]:
        """What each point of a region's pattern acts on in this region alone."""
        pattern, number = self.locate_region(region)
        if pattern.type is RegionType.ROOT:
            return self.model_points
        own = {self.model.nodes[index].name for index in pattern.order[number]}
        found: dict[Address, tuple[Edge, ...]] = {}
        for address, index in self.dimensions(pattern.signature).items():
            kind, (place, slot) = address
            readers, tensor = own, ""
            if kind == "output":
                tensor = self.model.nodes[pattern.order[number][place]].outputs[slot]
                readers = {self.model.nodes[node].name for node, _ in self.model.consumers.get(tensor, ())}
            edges = self.space.dimensions[index].edges
            found[address] = tuple(e for e in edges if e.consumer in readers or (tensor and e.tensor == tensor))
        return found

    @cached_property
    def model_points(self) -> Mapping[Address, tuple[Edge, ...]]:
        """Points of the pattern of the whole model: what stands at each node's input, and the model's outputs."""
        pattern, number = self.locate_region(self.whole)
        position = {self.model.nodes[node].name: place for place, node in enumerate(pattern.order[number])}
        found: dict[Address, set[Edge]] = defaultdict(set)
        for dimension in self.space.dimensions:
            at: dict[str, list[Edge]] = defaultdict(list)
            for edge in dimension.edges:
                at[edge.consumer].append(edge)
            for consumer, edges in at.items():
                if not consumer:
                    found.update({_output(self.model, position, edge.tensor): {edge} for edge in edges})
                elif dimension.kind == "node_input":
                    found["node_input", (position[consumer], min(edge.slot for edge in edges))].update(edges)
        return {address: tuple(sorted(edges)) for address, edges in found.items()}

    def encode(self, region: Region, placement: Placement) -> InsertionScheme:
        """What a placement says of a region's pattern."""
        pattern, _ = self.locate_region(region)
        if pattern.type is RegionType.ROOT:
            quantized = {edge for edge, _ in self.space.resolve(placement)}
            chosen = [address for address, edges in self.model_points.items() if quantized.issuperset(edges)]
        else:
            dimensions = self.dimensions(pattern.signature)
            chosen = [address for address, index in dimensions.items() if placement.choices[index]]
        return InsertionScheme.of(make_insertion_point(*address) for address in sorted(chosen))

    def decode(self, signature: str, scheme: InsertionScheme, around: Placement) -> Placement:
        """The placement that has a scheme for its pattern and is `around` elsewhere; unknown points are left out."""
        addresses = {point.address for point in scheme.points}
        if signature == self.locate_region(self.whole)[0].signature:
            edges = (edge for address, edges in self.model_points.items() if address in addresses for edge in edges)
            return self.space.nearest(dict.fromkeys(edges, self.precision))
        choices = list(around.choices)
        for address, index in self.dimensions(signature).items():
            choices[index] = int(address in addresses)
        return Placement(tuple(choices))

    def resolved_points(self, resolved: Resolved) -> set[ResolvedInsertionPoint]:
        """Quantized edges as the door calls them."""
        index = {node.name: node.index for node in self.model.nodes}
        return {
            ResolvedInsertionPoint(edge.tensor, index[edge.consumer], edge.slot)
            if edge.consumer
            else ResolvedInsertionPoint(edge.tensor)
            for edge, _ in resolved
        }


class RegionIndex:
    """A model, and what its regions are.

    Args:
        model: As the engine loads it.
        dialect: Whose rules say where a point is legal.
        precision: What points are quantized to.
        default_dtype: Type of what feeds linear operators, where no type can be inferred.
    """

    def __init__(
        self, model: Model, dialect: Dialect = OPENVINO, precision: str = "int8", default_dtype: str = "float32"
    ) -> None:
        if precision not in dialect.precisions:
            offered = ", ".join(sorted(dialect.precisions))
            raise AutotunerError(f"quant_type {precision!r}: dialect {dialect.name!r} has {offered}")
        self.model = _add_missing_types(model, _DTYPES[default_dtype])
        self.dialect = dialect
        self.precision = precision
        self._chart: PlacementMap | None = None
        self._charted: tuple[Region, ...] = ()

    @property
    def nodes(self) -> Sequence[Node]:
        """The nodes that regions have by their index."""
        return self.model.nodes

    def discover(self, maximum_sequence_region_size: int = 10, minimum_topdown_search_size: int = 10) -> list[Region]:
        """The regions right below the whole model."""
        root = discover_regions(
            self.model,
            maximum_sequence_region_size=maximum_sequence_region_size,
            minimum_topdown_search_size=minimum_topdown_search_size,
        )
        return [from_graph(child) for child in root.children]

    def chart(self, regions: Sequence[Region]) -> PlacementMap:
        """The chart of these regions; the last one is kept."""
        if self._chart is None or self._charted != tuple(regions):
            self._chart = PlacementMap(self.model, self.dialect, self.precision, regions)
            self._charted = tuple(regions)
        return self._chart

    def _build_map(self, region: Region) -> PlacementMap:
        if self._chart is not None and region in self._chart:
            return self._chart
        while region.parent is not None:
            region = region.parent
        return PlacementMap(self.model, self.dialect, self.precision, [region])

    def pattern(self, region: Region) -> RegionPattern:
        """The pattern of a region."""
        pattern, _ = self._build_map(region).locate_region(region)
        composite = pattern.type is not RegionType.LEAF
        return RegionPattern(pattern.signature, len(pattern.operators), composite=composite)

    def order(self, region: Region) -> list[int]:
        """Nodes of a region in its pattern's order."""
        pattern, number = self._build_map(region).locate_region(region)
        return list(pattern.order[number])

    def addresses(self, region: Region) -> list[Address]:
        """Places of the legal points of a region."""
        return sorted(self._build_map(region).edges(region))

    def full_scheme(self, region: Region) -> InsertionScheme:
        """All legal points of a region."""
        return InsertionScheme.of(make_insertion_point(*address) for address in self.addresses(region))

    def resolve(self, region: Region, points: Iterable[InsertionPoint]) -> set[ResolvedInsertionPoint]:
        """What points act on in a region; nothing where they may not be quantized."""
        chart = self._build_map(region)
        edges = chart.edges(region)
        wanted = {edge for point in points if point.address for edge in edges.get(point.address, ())}
        return chart.resolved_points(tuple((edge, self.precision) for edge in wanted))


def _parse_address(name: str, group: str) -> Address:
    """Kind and place out of the name of a dimension."""
    kind, _, place = name.removeprefix(f"{group}/").partition("/")
    first, _, second = place.partition(".")
    return kind, (int(first), int(second))  # type: ignore[return-value]


def _output(model: Model, position: Mapping[str, int], tensor: str) -> Address:
    node = model.nodes[model.producer[tensor]]
    return "output", (position[node.name], node.outputs.index(tensor))


def untyped_linear_inputs(model: Model) -> list[str]:
    """Return the tensors that feed linear operators and whose type cannot be inferred."""
    names = {name for node in model.nodes if node.op in LINEAR_OPS for name in node.inputs[:2]}
    return sorted(name for name in names if name and name not in model.types)


def _add_missing_types(model: Model, dtype: str) -> Model:
    """The model with a type for what feeds linear operators and has none, as behind operators of a plug-in.

    Its shape stays unknown; one dimension stands for it, because a tensor without any is never quantized.
    """
    unknown = {name: TensorType(dtype, (1,)) for name in untyped_linear_inputs(model)}
    return replace(model, types={**unknown, **model.types}) if unknown else model
