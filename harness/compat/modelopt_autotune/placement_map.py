"""Patterns, insertion points and the space of placements over regions with ModelOpt's names.

`RegionIndex` answers for any region of a model; `PlacementMap` has one set of regions with the space over them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from harness.compat.modelopt_autotune.insertion_points import Address, ResolvedInsertionPoint
from harness.compat.modelopt_autotune.region_pattern import InsertionScheme, RegionPattern
from harness.compat.modelopt_autotune.regions import Region, RegionType, to_graph
from harness.compat.modelopt_autotune.settings import AutotunerError
from harness.graph.model import Model, Node, TensorType
from harness.graph.partition.patterns import Pattern, find_patterns
from harness.graph.pattern_cache import parse_point
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import OPENVINO, Dialect
from harness.graph.rules.operator_sets import LINEAR_OPS
from search.space import Edge, Placement, PointKind, Resolved, Space

_DTYPES = {"float32": "float", "float16": "float16", "bfloat16": "bfloat16"}
_KINDS: tuple[PointKind, ...] = ("node_input", "child_input", "output")


class PlacementMap:
    """Set of regions with their patterns and the space of placements.

    Attributes:
        regions: The regions.
        whole: Region of the whole model, which is not among them.
        space: One dimension for each point of each pattern.
    """

    def __init__(self, model: Model, dialect: Dialect, precision: str, regions: Sequence[Region]) -> None:
        self.model, self.precision, self.regions = model, precision, tuple(regions)
        root, converted = to_graph(model, regions)
        self.whole = Region(len(converted), 0, RegionType.ROOT)
        self.whole.nodes = set(root.node_indices())
        self.patterns = find_patterns(model, root)
        self.sizes = {pattern.signature: len(pattern.operators) for pattern in self.patterns}
        self._graph = {**converted, self.whole: root}
        self._place = {id(r): (p, n) for p in self.patterns for n, r in enumerate(p.regions)}
        self.space = build_space(model, dialect, precisions=(precision,), root=root, kinds=_KINDS)

    def __contains__(self, region: object) -> bool:
        return region in self._graph

    def narrow(self, space: Space) -> None:
        """Replace the space by a smaller one: fewer dimensions, or fewer edges of some."""
        self.space = space
        self.__dict__.pop("_dimensions", None)

    def locate_region(self, region: Region) -> tuple[Pattern, int]:
        """Return the pattern of a region and the index of the region in it."""
        return self._place[id(self._graph[region])]

    def pattern(self, region: Region) -> RegionPattern:
        pattern, _ = self.locate_region(region)
        composite = pattern.type is not RegionType.LEAF
        return RegionPattern(pattern.signature, len(pattern.operators), composite=composite)

    def dimensions(self, signature: str) -> Mapping[Address, int]:
        """Return the index of the dimension of each point of a pattern; empty if the space lacks the pattern."""
        return self._dimensions.get(signature, {})

    @cached_property
    def _dimensions(self) -> Mapping[str, Mapping[Address, int]]:
        found: dict[str, dict[Address, int]] = defaultdict(dict)
        for group, indices in self.space.groups.items():
            signature = next(s for s in self.sizes if s.startswith(group))
            for index in indices:
                name = self.space.dimensions[index].name.removeprefix(f"{group}/")
                point = parse_point(f"{name}/{self.precision}")
                found[signature][point.kind, point.place] = index
        return found

    def edges(self, region: Region) -> Mapping[Address, tuple[Edge, ...]]:
        """Return the edges of each point of a region's pattern in this region alone."""
        pattern, number = self.locate_region(region)
        region_nodes = {self.model.nodes[index].name for index in pattern.order[number]}
        edges_by_point: dict[Address, tuple[Edge, ...]] = {}
        for address, index in self.dimensions(pattern.signature).items():
            kind, (place, slot) = address
            readers, tensor = region_nodes, ""
            if kind == "output":
                tensor = self.model.nodes[pattern.order[number][place]].outputs[slot]
                readers = {self.model.nodes[node].name for node, _ in self.model.consumers.get(tensor, ())}
            edges = self.space.dimensions[index].edges
            edges_by_point[address] = tuple(
                e for e in edges if e.consumer in readers or (tensor and e.tensor == tensor)
            )
        return edges_by_point

    def encode(self, signature: str, placement: Placement) -> InsertionScheme:
        """Return the scheme that a placement has for a pattern."""
        dimensions = self.dimensions(signature)
        return InsertionScheme.of(sorted(address for address, index in dimensions.items() if placement.choices[index]))

    def decode(self, signature: str, scheme: InsertionScheme, around: Placement) -> Placement:
        """Return `around` with a pattern's points as in a scheme; points that are not in the space are ignored."""
        choices, addresses = list(around.choices), scheme.addresses
        for address, index in self.dimensions(signature).items():
            choices[index] = int(address in addresses)
        return Placement(tuple(choices))

    def resolved_points(self, resolved: Resolved) -> set[ResolvedInsertionPoint]:
        """Return quantized edges as resolved insertion points."""
        index = {node.name: node.index for node in self.model.nodes}
        return {
            ResolvedInsertionPoint(edge.tensor, index[edge.consumer], edge.slot)
            if edge.consumer
            else ResolvedInsertionPoint(edge.tensor)
            for edge, _ in resolved
        }


class RegionIndex:
    """Model with the properties of its regions.

    Args:
        dialect: Its rules decide which points are legal.
        precision: Quantized precision of the points.
        default_dtype: Type of the inputs of linear operators whose type cannot be inferred.

    Raises:
        AutotunerError: The dialect does not have the precision.
    """

    def __init__(
        self, model: Model, dialect: Dialect = OPENVINO, precision: str = "int8", default_dtype: str = "float32"
    ) -> None:
        if precision not in dialect.precisions:
            offered = ", ".join(sorted(dialect.precisions))
            raise AutotunerError(f"quant_type {precision!r}: dialect {dialect.name!r} has {offered}")
        # One dimension represents the unknown shape, because a tensor without dimensions is not quantized.
        unknown = dict.fromkeys(untyped_linear_inputs(model), TensorType(_DTYPES[default_dtype], (1,)))
        self.model = replace(model, types={**unknown, **model.types}) if unknown else model
        self.dialect = dialect
        self.precision = precision
        self._map: PlacementMap | None = None

    @property
    def nodes(self) -> Sequence[Node]:
        return self.model.nodes

    def placement_map(self, regions: Sequence[Region]) -> PlacementMap:
        """Return the map of these regions; the last map is cached."""
        if self._map is None or self._map.regions != tuple(regions):
            self._map = PlacementMap(self.model, self.dialect, self.precision, regions)
        return self._map

    def _map_of(self, region: Region) -> PlacementMap:
        if self._map is not None and region in self._map:
            return self._map
        while region.parent is not None:
            region = region.parent
        return PlacementMap(self.model, self.dialect, self.precision, [region])

    def pattern(self, region: Region) -> RegionPattern:
        return self._map_of(region).pattern(region)

    def order(self, region: Region) -> list[int]:
        """Return the nodes of a region in its pattern's order."""
        pattern, number = self._map_of(region).locate_region(region)
        return list(pattern.order[number])

    def addresses(self, region: Region) -> list[Address]:
        """Return the addresses of the legal points of a region."""
        return sorted(self._map_of(region).edges(region))

    def resolve(self, region: Region, address: Address | None) -> set[ResolvedInsertionPoint]:
        """Return the inputs that a point quantizes in a region, as far as the rules allow it."""
        placement_map = self._map_of(region)
        edges = () if address is None else placement_map.edges(region).get(address, ())
        return placement_map.resolved_points(tuple((edge, self.precision) for edge in edges))


def untyped_linear_inputs(model: Model) -> list[str]:
    """Return the inputs of linear operators whose type cannot be inferred."""
    names = {name for node in model.nodes if node.op in LINEAR_OPS for name in node.inputs[:2]}
    return sorted(name for name in names if name and name not in model.types)
