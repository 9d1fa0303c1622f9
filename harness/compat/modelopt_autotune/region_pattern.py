"""Schemes and patterns of regions under ModelOpt's names."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from harness.compat.modelopt_autotune.insertion_points import (
    Address,
    ChildRegionInputInsertionPoint,
    ChildRegionOutputInsertionPoint,
    InsertionPoint,
    NodeInputInsertionPoint,
    Region,
    RegionResolver,
    RegionType,
    ResolvedInsertionPoint,
    make_insertion_point,
    to_graph,
)
from harness.compat.modelopt_autotune.settings import AutotunerError, InvalidSchemeError
from harness.graph.model import Model, TensorType
from harness.graph.partition.patterns import Pattern, find_patterns
from harness.graph.pattern_cache import parse_point
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import OPENVINO, Dialect
from harness.graph.rules.operator_sets import LINEAR_OPS
from search.space import Edge, Placement, PointKind, Resolved

UNMEASURED_MS = float("inf")  # ModelOpt's value for a missing latency
_COMMUTATIVE_OPS = frozenset({"Add", "And", "Max", "Mean", "Min", "Mul", "Or", "Sum", "Xor"})


@dataclass
class InsertionScheme:
    """Points of one pattern that have Q/DQ pairs, and the measured result of a model with them.

    Attributes:
        latency_ms: Latency of that model in ms; infinite if it was not measured or failed.
        error: Whether the measurement failed.
        profile_timestamp: Time of the measurement, in ISO 8601.
    """

    node_inputs: list[NodeInputInsertionPoint] = field(default_factory=list)
    child_region_inputs: list[ChildRegionInputInsertionPoint] = field(default_factory=list)
    region_outputs: list[ChildRegionOutputInsertionPoint] = field(default_factory=list)
    latency_ms: float = UNMEASURED_MS
    error: bool = False
    profile_timestamp: str | None = None

    @classmethod
    def of(cls, addresses: Iterable[Address]) -> InsertionScheme:
        """Return the scheme with the points at these addresses."""
        scheme = cls()
        lists: dict[str, list[Any]] = {
            "node_input": scheme.node_inputs,
            "child_input": scheme.child_region_inputs,
            "output": scheme.region_outputs,
        }
        for kind, place in addresses:
            lists[kind].append(make_insertion_point(kind, place))
        return scheme

    @property
    def points(self) -> Iterator[InsertionPoint]:
        """Insertion points of the scheme: node inputs, then inputs of child regions, then outputs."""
        yield from self.node_inputs
        yield from self.child_region_inputs
        yield from self.region_outputs

    @property
    def addresses(self) -> frozenset[Address]:
        """Addresses of the points, without those that the space of placements lacks."""
        return frozenset(point.address for point in self.points if point.address is not None)

    @property
    def hash(self) -> str:
        """Digest of the points, without the result."""
        return hashlib.sha256("\n".join(sorted(map(repr, self.points))).encode()).hexdigest()[:32]

    @property
    def is_empty(self) -> bool:
        return not any(True for _ in self.points)

    @property
    def is_profiled(self) -> bool:
        """Return whether the scheme was measured, with or without success."""
        return self.error or math.isfinite(self.latency_ms)

    def distance(self, other: InsertionScheme) -> int:
        """Return the number of points that only one of two schemes has."""
        return len(set(self.points) ^ set(other.points))

    def to_dict(self) -> dict[str, Any]:
        return {
            "latency_ms": self.latency_ms if math.isfinite(self.latency_ms) else None,
            "error": self.error,
            "profile_timestamp": self.profile_timestamp,
            "nodes_insertion_points": [point.to_dict() for point in self.node_inputs],
            "child_region_inputs": [point.to_dict() for point in self.child_region_inputs],
            "region_outputs": [point.to_dict() for point in self.region_outputs],
            "hash": self.hash,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> InsertionScheme:
        """Return the scheme that `to_dict` wrote.

        Raises:
            InvalidSchemeError: The values do not describe a scheme.
        """
        try:
            latency_ms = data.get("latency_ms")
            return cls(
                node_inputs=[NodeInputInsertionPoint(**each) for each in data.get("nodes_insertion_points", [])],
                child_region_inputs=[
                    ChildRegionInputInsertionPoint(**each) for each in data.get("child_region_inputs", [])
                ],
                region_outputs=[ChildRegionOutputInsertionPoint(**each) for each in data.get("region_outputs", [])],
                latency_ms=UNMEASURED_MS if latency_ms is None else float(latency_ms),
                error=bool(data.get("error", False)),
                profile_timestamp=data.get("profile_timestamp"),
            )
        except (AttributeError, TypeError, ValueError) as error:
            raise InvalidSchemeError(f"no insertion scheme: {error}") from error


class RegionPattern:
    """Structure that isomorphic regions share; two patterns are equal if their signatures are.

    Attributes:
        signature: Signature of `harness.graph.partition.patterns.Pattern`, the same in every model; of a region of an
            `onnx_graphsurgeon.Graph`, the operators with their attributes and sources as text.
        size: Number of nodes of a region.
    """

    def __init__(self, signature: str, size: int, *, composite: bool = False) -> None:
        self.signature = signature
        self.size = size
        self.is_composite = composite
        self.is_empty = size == 0
        self.is_leaf = not composite and size > 0

    def get_hash(self) -> str:
        return hashlib.sha256(self.signature.encode()).hexdigest()[:32]

    def get_short_signature(self, max_length: int = 80) -> str:
        return self.signature if len(self.signature) <= max_length else f"{self.signature[: max_length - 3]}..."

    @classmethod
    def from_region(cls, region: Region, graph: Any) -> RegionPattern:
        """Return the pattern of a region.

        Args:
            graph: The autotuner's graph, or an `onnx_graphsurgeon.Graph`.
        """
        if isinstance(graph, RegionResolver):
            found: RegionPattern = graph.pattern(region)
            return found
        size = len(region.get_region_nodes_and_descendants())
        return cls(_describe_region(region, graph), size, composite=bool(region.children))

    def matches(self, other: RegionPattern | Region, graph: Any = None, scheme: InsertionScheme | None = None) -> Any:
        """Compare with another pattern, or match a region.

        Args:
            graph: Graph that has the region: the autotuner's, or an `onnx_graphsurgeon.Graph`.

        Returns:
            For a pattern, whether both are equal. For a region, its nodes in the pattern's order, or None if it has
            another pattern. With a scheme, the inputs that the scheme quantizes in the region.

        Raises:
            ValueError: A region is given without its graph.
        """
        if isinstance(other, RegionPattern):
            return self == other
        if graph is None:
            raise ValueError("a region matches within a graph: give it as the second argument")
        fits = self.from_region(other, graph) == self
        if scheme is None:
            return _node_order(other, graph) if fits else None
        return {resolved for point in scheme.points for resolved in point.resolve(other, graph)} if fits else set()

    def get_full_insertion_scheme(self, region: Region, graph: Any) -> InsertionScheme:
        """Return the scheme with all legal points of a region, with the `graph` as for `matches`.

        Raises:
            ValueError: The region has another pattern.
        """
        if self.from_region(region, graph) != self:
            raise ValueError(f"region {region.id} has another pattern than {self.get_short_signature(12)}")
        return InsertionScheme(
            NodeInputInsertionPoint.collect_from_region(region, graph),
            ChildRegionInputInsertionPoint.collect_from_region(region, graph),
            ChildRegionOutputInsertionPoint.collect_from_region(region, graph),
        )

    def format_tree(self, region: Region, graph: Any, indent: int = 0) -> str:
        """Return one line for a region and each region below it, with the `graph` as for `matches`."""
        line = f"{'  ' * indent}Region {region.id}: {self.signature} (size={self.size})\n"
        return line + "".join(self.from_region(c, graph).format_tree(c, graph, indent + 1) for c in region.children)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RegionPattern) and self.signature == other.signature

    def __hash__(self) -> int:
        return hash(self.signature)

    def __str__(self) -> str:
        return self.signature

    def __repr__(self) -> str:
        return f"RegionPattern({self.signature!r}, size={self.size})"


def _node_order(region: Region, graph: Any) -> list[int]:
    if isinstance(graph, RegionResolver):
        return graph.order(region)
    below = [index for child in region.get_children(sort=True) for index in _node_order(child, graph)]
    return [*region.get_nodes(sort=True), *below]


def _describe_region(region: Region, graph: Any) -> str:
    """Return a text that equal regions of a graph of graphsurgeon share."""
    order = region.get_nodes(sort=True)
    if order and order[-1] >= len(graph.nodes):
        raise ValueError(f"region {region.id}: the graph has {len(graph.nodes)} nodes, but got {order[-1]}")
    place = {id(graph.nodes[index]): str(position) for position, index in enumerate(order)}
    texts = []
    for node in (graph.nodes[index] for index in order):
        sources = []
        for tensor in node.inputs:
            producers = getattr(tensor, "inputs", None)
            sources.append(place.get(id(producers[0]), "outside") if producers else "outside")
        if node.op in _COMMUTATIVE_OPS:
            sources.sort()
        attributes = [f"{name}={value}" for name, value in sorted(node.attrs.items())]
        texts.append(f"{node.op}({', '.join([*sources, *attributes])})")
    nodes = " ".join(texts)
    children = [_describe_region(child, graph) for child in region.get_children(sort=True)]
    if children:
        return f"COMPOSITE({'; '.join([nodes] * bool(nodes) + children)})"
    return nodes or "EMPTY"


@dataclass
class PatternSchemes:
    """Schemes of one pattern in the order of their proposal."""

    pattern: RegionPattern | None = None
    schemes: list[InsertionScheme] = field(default_factory=list)

    @property
    def pattern_signature(self) -> str:
        return self.pattern.signature if self.pattern else ""

    @property
    def pattern_size(self) -> int:
        return self.pattern.size if self.pattern else 0

    @property
    def num_schemes(self) -> int:
        return len(self.schemes)

    @property
    def best_scheme(self) -> InsertionScheme | None:
        """Fastest measured scheme; None if none was measured."""
        measured = [s for s in self.schemes if s.is_profiled and not s.error]
        return min(measured, key=lambda scheme: scheme.latency_ms, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return the pattern and its schemes in the form of ModelOpt's state file; see `from_dict`."""
        return {
            "pattern_signature": self.pattern_signature,
            "pattern_size": self.pattern_size,
            "schemes": [scheme.to_dict() for scheme in self.schemes],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any], pattern: RegionPattern | None = None) -> PatternSchemes:
        """Return the schemes that `to_dict` wrote; `pattern` None: create it from the stored signature and size.

        Raises:
            InvalidSchemeError: The values do not describe schemes of a pattern.
        """
        try:
            known = pattern or RegionPattern(str(data["pattern_signature"]), int(data["pattern_size"]))
            return cls(pattern=known, schemes=[InsertionScheme.from_dict(each) for each in data["schemes"]])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidSchemeError(f"no schemes of a pattern: {error!r}") from error


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

    def locate_region(self, region: Region) -> tuple[Pattern, int]:
        """Return the pattern of a region and the index of the region in it."""
        return self._place[id(self._graph[region])]

    def pattern(self, region: Region) -> RegionPattern:
        pattern, _ = self.locate_region(region)
        composite = pattern.type is not RegionType.LEAF
        return RegionPattern(pattern.signature, len(pattern.operators), composite=composite)

    def dimensions(self, signature: str) -> Mapping[Address, int]:
        """Return the index of the dimension of each point of a pattern; empty if the space lacks the pattern."""
        found: dict[Address, int] = {}
        for group, indices in self.space.groups.items():
            for index in indices if signature.startswith(group) else ():
                name = self.space.dimensions[index].name.removeprefix(f"{group}/")
                point = parse_point(f"{name}/{self.precision}")
                found[point.kind, point.place] = index
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
        self.nodes = self.model.nodes
        self.dialect = dialect
        self.precision = precision
        self._map: PlacementMap | None = None

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
