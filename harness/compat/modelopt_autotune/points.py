"""Insertion points in pattern coordinates, as ModelOpt's users write them, and what they become in a region.

Node indices count a pattern's nodes in canonical order (`harness.graph.partition.patterns`), so they fit every region
with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Self

from harness.compat.modelopt_autotune.regions import Region
from search.space import PointKind

__all__ = [
    "Address", "ChildRegionInputInsertionPoint", "ChildRegionOutputInsertionPoint", "InsertionPoint",
    "NodeInputInsertionPoint", "Places", "ResolvedInsertionPoint", "make_insertion_point",
]  # fmt: skip

Address = tuple[PointKind, tuple[int, int]]
"""Kind and place of a point in its pattern, as a dimension's name has them."""


@dataclass(frozen=True)
class ResolvedInsertionPoint:
    """An input of a node of the model that carries a Q/DQ pair; without a node, an output of the model."""

    tensor_name: str
    node_index: int | None = None
    input_index: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """From plain values."""
        return cls(**data)


class Places(Protocol):
    """What points ask of the graph that they are in; `region_index.RegionIndex` is one."""

    def addresses(self, region: Region) -> list[Address]:
        """Places of the legal points of a region."""
        ...

    def resolve(self, region: Region, points: Iterable[InsertionPoint]) -> set[ResolvedInsertionPoint]:
        """What points act on in a region."""
        ...


class InsertionPoint(ABC):
    """A place in a pattern where Q/DQ pairs may stand."""

    @property
    @abstractmethod
    def address(self) -> Address | None:
        """Its kind and place as the space of placements names them; None: a place that no dimension has."""

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)  # type: ignore[call-overload,no-any-return]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """From plain values."""
        return cls(**data)

    def resolve(self, region: Region, graph: Places) -> set[ResolvedInsertionPoint]:
        """What it stands for in one region; nothing where that may not be quantized."""
        return graph.resolve(region, [self])

    @classmethod
    def collect_from_region(cls, region: Region, graph: Places) -> list[Self]:
        """All legal points of this kind in a region."""
        places = graph.addresses(region)
        return [point for kind, place in places if isinstance(point := make_insertion_point(kind, place), cls)]


@dataclass(frozen=True)
class NodeInputInsertionPoint(InsertionPoint):
    """An input of a node; a linear operator has one point, at input 0, which takes its weight along."""

    node_index: int
    input_index: int

    @property
    def address(self) -> Address:
        return "node_input", (self.node_index, self.input_index)


@dataclass(frozen=True)
class ChildRegionInputInsertionPoint(InsertionPoint):
    """An input of a child region, into all its readers inside."""

    region_index: int
    input_index: int

    @property
    def address(self) -> Address:
        return "child_input", (self.region_index, self.input_index)


@dataclass(frozen=True)
class ChildRegionOutputInsertionPoint(InsertionPoint):
    """An output of a node (`region_index` None) that leaves its region, or of a child region, into all its readers.

    The engine offers the former alone: an output of a child region is one of a node in some LEAF.
    """

    region_index: int | None
    node_index: int | None
    output_index: int

    @property
    def address(self) -> Address | None:
        return None if self.node_index is None else ("output", (self.node_index, self.output_index))


def make_insertion_point(kind: PointKind, place: tuple[int, int]) -> InsertionPoint:
    """The point of a kind at a place."""
    if kind == "output":
        return ChildRegionOutputInsertionPoint(region_index=None, node_index=place[0], output_index=place[1])
    made = NodeInputInsertionPoint if kind == "node_input" else ChildRegionInputInsertionPoint
    return made(*place)
