"""Insertion points, schemes and patterns under the names that ModelOpt's users know.

Node indices count a pattern's nodes in canonical order (`harness.graph.partition.patterns`), so they fit every region
that has the pattern.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, Self, overload

from harness.compat.modelopt_autotune.regions import Region
from harness.compat.modelopt_autotune.settings import InvalidSchemeError
from search.space import PointKind

__all__ = [
    "Address",
    "ChildRegionInputInsertionPoint",
    "ChildRegionOutputInsertionPoint",
    "InsertionPoint",
    "InsertionScheme",
    "NodeInputInsertionPoint",
    "PatternSchemes",
    "RegionPattern",
    "RegionResolver",
    "ResolvedInsertionPoint",
    "make_insertion_point",
]  # fmt: skip

Address = tuple[PointKind, tuple[int, int]]
"""Kind of a point and its place in the pattern, as in the name of a dimension."""
UNMEASURED_MS = float("inf")  # ModelOpt's value for a missing latency


class RegionResolver(Protocol):
    """Graph in which regions are resolved; `region_index.RegionIndex` implements it."""

    def addresses(self, region: Region) -> list[Address]: ...
    def resolve(self, region: Region, points: Iterable[InsertionPoint]) -> set[ResolvedInsertionPoint]: ...
    def pattern(self, region: Region) -> RegionPattern: ...
    def order(self, region: Region) -> list[int]: ...
    def full_scheme(self, region: Region) -> InsertionScheme: ...


class _PlainValues:
    """Conversion of a dataclass to and from plain values."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload,no-any-return]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        return cls(**data)


@dataclass(frozen=True)
class ResolvedInsertionPoint(_PlainValues):
    """Input of a node of the model that has a Q/DQ pair; without a node, an output of the model."""

    tensor_name: str
    node_index: int | None = None
    input_index: int | None = None


class InsertionPoint(_PlainValues, ABC):
    """Place in a pattern where Q/DQ pairs may be inserted."""

    @property
    @abstractmethod
    def address(self) -> Address | None:
        """Kind and place in the space of placements; None if no dimension has this place."""

    def resolve(self, region: Region, graph: RegionResolver) -> set[ResolvedInsertionPoint]:
        """Return the inputs that the point quantizes in one region; empty if the rules forbid it."""
        return graph.resolve(region, [self])

    @classmethod
    def collect_from_region(cls, region: Region, graph: RegionResolver) -> list[Self]:
        """Return all legal points of this class in a region."""
        points = (make_insertion_point(*address) for address in graph.addresses(region))
        return [point for point in points if isinstance(point, cls)]


@dataclass(frozen=True)
class NodeInputInsertionPoint(InsertionPoint):
    """Input of a node; a linear operator has one point, at input 0, which includes its weight."""

    node_index: int
    input_index: int

    @property
    def address(self) -> Address:
        return "node_input", (self.node_index, self.input_index)


@dataclass(frozen=True)
class ChildRegionInputInsertionPoint(InsertionPoint):
    """Input of a child region, for all nodes inside that read it."""

    region_index: int
    input_index: int

    @property
    def address(self) -> Address:
        return "child_input", (self.region_index, self.input_index)


@dataclass(frozen=True)
class ChildRegionOutputInsertionPoint(InsertionPoint):
    """Output of a node (`region_index` None) or of a child region that leaves its region, for all its readers.

    The output of a child region resolves to nothing: it is the output of a node in some LEAF.
    """

    region_index: int | None
    node_index: int | None
    output_index: int

    @property
    def address(self) -> Address | None:
        return None if self.node_index is None else ("output", (self.node_index, self.output_index))


def make_insertion_point(kind: PointKind, place: tuple[int, int]) -> InsertionPoint:
    """Return the point at an address."""
    if kind == "output":
        return ChildRegionOutputInsertionPoint(region_index=None, node_index=place[0], output_index=place[1])
    return (NodeInputInsertionPoint if kind == "node_input" else ChildRegionInputInsertionPoint)(*place)


@dataclass
class InsertionScheme:
    """Points of one pattern that have Q/DQ pairs, and the result of the model that was measured with them.

    Attributes:
        latency_ms: Latency of that model; infinite if it was not measured or failed.
        error: The measurement failed.
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
        found = cls()
        lists: dict[str, list[Any]] = {
            "node_input": found.node_inputs,
            "child_input": found.child_region_inputs,
            "output": found.region_outputs,
        }
        for kind, place in addresses:
            lists[kind].append(make_insertion_point(kind, place))
        return found

    @property
    def points(self) -> Iterator[InsertionPoint]:
        yield from self.node_inputs
        yield from self.child_region_inputs
        yield from self.region_outputs

    @property
    def addresses(self) -> frozenset[Address]:
        """Addresses of the points that the space of placements has."""
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
        signature: Signature of `harness.graph.partition.patterns.Pattern`, the same in every model.
        size: Number of nodes.
    """

    def __init__(self, signature: str, size: int, *, composite: bool = False) -> None:
        self.signature = signature
        self.size = size
        self.is_composite = composite

    @property
    def is_empty(self) -> bool:
        return self.size == 0

    @property
    def is_leaf(self) -> bool:
        """Return whether the pattern has nodes and no child regions."""
        return not self.is_composite and not self.is_empty

    def get_hash(self) -> str:
        return hashlib.sha256(self.signature.encode()).hexdigest()[:32]

    def get_short_signature(self, max_length: int = 80) -> str:
        return self.signature if len(self.signature) <= max_length else f"{self.signature[: max_length - 3]}..."

    @classmethod
    def from_region(cls, region: Region, graph: RegionResolver) -> RegionPattern:
        return graph.pattern(region)

    @overload
    def matches(self, other: RegionPattern) -> bool: ...
    @overload
    def matches(self, other: Region, graph: RegionResolver, scheme: None = None) -> list[int] | None: ...
    @overload
    def matches(self, other: Region, graph: RegionResolver, scheme: InsertionScheme) -> set[ResolvedInsertionPoint]: ...

    def matches(
        self, other: RegionPattern | Region, graph: RegionResolver | None = None, scheme: InsertionScheme | None = None
    ) -> bool | list[int] | set[ResolvedInsertionPoint] | None:
        """Compare with another pattern, or match a region.

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
        fits = graph.pattern(other) == self
        if scheme is None:
            return graph.order(other) if fits else None
        return graph.resolve(other, scheme.points) if fits else set()

    def get_full_insertion_scheme(self, region: Region, graph: RegionResolver) -> InsertionScheme:
        """Return the scheme with all legal points.

        Raises:
            ValueError: The region has another pattern.
        """
        if graph.pattern(region) != self:
            raise ValueError(f"region {region.id} has another pattern than {self.get_short_signature(12)}")
        return graph.full_scheme(region)

    def format_tree(self, region: Region, graph: RegionResolver, indent: int = 0) -> str:
        """Return one line for a region and each region below it."""
        line = f"{'  ' * indent}Region {region.id}: {self.signature} (size={self.size})\n"
        return line + "".join(graph.pattern(c).format_tree(c, graph, indent + 1) for c in region.children)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RegionPattern) and self.signature == other.signature

    def __hash__(self) -> int:
        return hash(self.signature)

    def __repr__(self) -> str:
        return f"RegionPattern({self.signature!r}, size={self.size})"


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
        return {
            "pattern_signature": self.pattern_signature,
            "pattern_size": self.pattern_size,
            "schemes": [scheme.to_dict() for scheme in self.schemes],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any], pattern: RegionPattern | None = None) -> PatternSchemes:
        """Return the schemes that `to_dict` wrote; without a pattern, make one of signature and size.

        Raises:
            InvalidSchemeError: The values do not describe schemes of a pattern.
        """
        try:
            known = pattern or RegionPattern(str(data["pattern_signature"]), int(data["pattern_size"]))
            return cls(pattern=known, schemes=[InsertionScheme.from_dict(each) for each in data["schemes"]])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidSchemeError(f"no schemes of a pattern: {error!r}") from error
