"""Patterns and schemes with the handles that ModelOpt's users know."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, overload

from harness.compat.modelopt_autotune.common import InvalidSchemeError
from harness.compat.modelopt_autotune.points import (
    ChildRegionInputInsertionPoint,
    ChildRegionOutputInsertionPoint,
    InsertionPoint,
    NodeInputInsertionPoint,
    Places,
    ResolvedInsertionPoint,
)
from harness.compat.modelopt_autotune.regions import Region

__all__ = ["InsertionScheme", "PatternSchemes", "Patterns", "RegionPattern"]

UNMEASURED_MS = float("inf")
"""What ModelOpt's classes say where there is no latency; inside the engine there is none instead."""


@dataclass
class InsertionScheme:
    """The points of one pattern that carry Q/DQ pairs, and what came of them.

    Attributes:
        latency_ms: Of the model that had it; infinite where it was not measured or could not be.
        error: It could not be measured.
        profile_timestamp: When it was measured, in ISO 8601.
    """

    node_inputs: list[NodeInputInsertionPoint] = field(default_factory=list)
    child_region_inputs: list[ChildRegionInputInsertionPoint] = field(default_factory=list)
    region_outputs: list[ChildRegionOutputInsertionPoint] = field(default_factory=list)
    latency_ms: float = UNMEASURED_MS
    error: bool = False
    profile_timestamp: str | None = None

    @classmethod
    def of(cls, points: Iterable[InsertionPoint]) -> InsertionScheme:
        """The scheme of these points."""
        found = cls()
        for point in points:
            if isinstance(point, NodeInputInsertionPoint):
                found.node_inputs.append(point)
            elif isinstance(point, ChildRegionInputInsertionPoint):
                found.child_region_inputs.append(point)
            elif isinstance(point, ChildRegionOutputInsertionPoint):
                found.region_outputs.append(point)
        return found

    @property
    def points(self) -> Iterator[InsertionPoint]:
        """All its points."""
        yield from self.node_inputs
        yield from self.child_region_inputs
        yield from self.region_outputs

    @property
    def hash(self) -> str:
        """Identity of its points; what came of them does not count."""
        return hashlib.sha256("\n".join(sorted(map(repr, self.points))).encode()).hexdigest()[:32]

    @property
    def is_empty(self) -> bool:
        """Whether it has no Q/DQ pair."""
        return not any(True for _ in self.points)

    @property
    def is_profiled(self) -> bool:
        """Whether it was measured, or could not be."""
        return self.error or math.isfinite(self.latency_ms)

    def distance(self, other: InsertionScheme) -> int:
        """Points to add or remove, to turn one scheme into the other."""
        return len(set(self.points) ^ set(other.points))

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
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
        """From plain values.

        Raises:
            InvalidSchemeError: They are none of a scheme.
        """
        try:
            latency_ms = data.get("latency_ms")
            return cls(
                node_inputs=[NodeInputInsertionPoint.from_dict(p) for p in data.get("nodes_insertion_points", [])],
                child_region_inputs=[
                    ChildRegionInputInsertionPoint.from_dict(p) for p in data.get("child_region_inputs", [])
                ],
                region_outputs=[ChildRegionOutputInsertionPoint.from_dict(p) for p in data.get("region_outputs", [])],
                latency_ms=UNMEASURED_MS if latency_ms is None else float(latency_ms),
                error=bool(data.get("error", False)),
                profile_timestamp=data.get("profile_timestamp"),
            )
        except (AttributeError, TypeError, ValueError) as error:
            raise InvalidSchemeError(f"no insertion scheme: {error}") from error


class Patterns(Places, Protocol):
    """What patterns ask of the graph that they are in; `region_index.RegionIndex` is one."""

    def pattern(self, region: Region) -> RegionPattern:
        """The pattern of a region."""
        ...

    def order(self, region: Region) -> list[int]:
        """Nodes of a region in its pattern's order."""
        ...

    def full_scheme(self, region: Region) -> InsertionScheme:
        """All legal points of a region."""
        ...


class RegionPattern:
    """What isomorphic regions have in common; equal exactly where the signatures are.

    Attributes:
        signature: That of `harness.graph.partition.patterns.Pattern`, the same in every model.
        size: Number of nodes.
    """

    def __init__(self, signature: str, size: int, *, composite: bool = False) -> None:
        self.signature = signature
        self.size = size
        self.is_composite = composite

    @property
    def is_empty(self) -> bool:
        """Whether there is no node in it."""
        return self.size == 0

    @property
    def is_leaf(self) -> bool:
        """Whether it has nodes and no child regions."""
        return not self.is_composite and not self.is_empty

    def get_hash(self) -> str:
        """A short identity."""
        return hashlib.sha256(self.signature.encode()).hexdigest()[:32]

    def get_short_signature(self, max_length: int = 80) -> str:
        """The signature, cut where it is longer."""
        return self.signature if len(self.signature) <= max_length else f"{self.signature[: max_length - 3]}..."

    @classmethod
    def from_region(cls, region: Region, graph: Patterns) -> RegionPattern:
        """The pattern of a region."""
        return graph.pattern(region)

    @overload
    def matches(self, other: RegionPattern) -> bool: ...
    @overload
    def matches(self, other: Region, graph: Patterns, scheme: None = None) -> list[int] | None: ...
    @overload
    def matches(self, other: Region, graph: Patterns, scheme: InsertionScheme) -> set[ResolvedInsertionPoint]: ...

    def matches(
        self, other: RegionPattern | Region, graph: Patterns | None = None, scheme: InsertionScheme | None = None
    ) -> bool | list[int] | set[ResolvedInsertionPoint] | None:
        """Whether another pattern is this one; a region's nodes in the pattern's order, or None; what a scheme becomes.

        Raises:
            ValueError: A region without the graph that it is in.
        """
        if isinstance(other, RegionPattern):
            return self == other
        if graph is None:
            raise ValueError("a region matches within a graph: give it as the second argument")
        fits = graph.pattern(other) == self
        if scheme is None:
            return graph.order(other) if fits else None
        return graph.resolve(other, scheme.points) if fits else set()

    def get_full_insertion_scheme(self, region: Region, graph: Patterns) -> InsertionScheme:
        """All legal points.

        Raises:
            ValueError: The region has another pattern.
        """
        if graph.pattern(region) != self:
            raise ValueError(f"region {region.id} has another pattern than {self.get_short_signature(12)}")
        return graph.full_scheme(region)

    def format_tree(self, region: Region, graph: Patterns, indent: int = 0) -> str:
        """A region and those below it, a line for each."""
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
    """The schemes of one pattern, in the order in which they came up."""

    pattern: RegionPattern | None = None
    schemes: list[InsertionScheme] = field(default_factory=list)

    @property
    def pattern_signature(self) -> str:
        """Signature of the pattern; "" without one."""
        return self.pattern.signature if self.pattern else ""

    @property
    def pattern_size(self) -> int:
        """Number of nodes of the pattern."""
        return self.pattern.size if self.pattern else 0

    @property
    def num_schemes(self) -> int:
        """Number of schemes."""
        return len(self.schemes)

    @property
    def best_scheme(self) -> InsertionScheme | None:
        """The fastest of those that were measured; None where none was."""
        measured = [s for s in self.schemes if s.is_profiled and not s.error]
        return min(measured, key=lambda scheme: scheme.latency_ms, default=None)

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "pattern_signature": self.pattern_signature,
            "pattern_size": self.pattern_size,
            "schemes": [scheme.to_dict() for scheme in self.schemes],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any], pattern: RegionPattern | None = None) -> PatternSchemes:
        """From plain values; without a pattern, one is made of its signature and size.

        Raises:
            InvalidSchemeError: They are none of schemes.
        """
        try:
            known = pattern or RegionPattern(str(data["pattern_signature"]), int(data["pattern_size"]))
            return cls(pattern=known, schemes=[InsertionScheme.from_dict(each) for each in data["schemes"]])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidSchemeError(f"no schemes of a pattern: {error!r}") from error
