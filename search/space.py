"""Space of Q/DQ placements: named dimensions and the edges that they quantize.

A `Dimension` is one insertion point of one pattern. It covers the edges of every region that has this pattern, so one
choice quantizes the same place in all of them. Several dimensions may cover the same edge (a child region's input and
the node input behind it). Placements are therefore identified by their *resolved* edges, not by their choices.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

FLOAT = "float"
PointKind = Literal["node_input", "child_input", "output"]


@dataclass(frozen=True, slots=True, order=True)
class Edge:
    """Position of a Q/DQ pair: input number `slot` of node `consumer`, fed by `tensor`.

    For a pair on an output of the model, the consumer is "" and the slot 0.
    """

    tensor: str
    consumer: str
    slot: int


_Path = list[list[int]]
"""Operand's edges as positions in the sorted edges: each edge, followed by all input edges of its consumer."""

Resolved = tuple[tuple[Edge, str], ...]
"""The quantized edges of a placement with their precision, sorted; float edges are absent."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Choice for each dimension of a space: indices into `Dimension.choices`."""

    choices: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """Insertion point of one pattern.

    Attributes:
        name: Unique and stable, for instance "a1b2c3/node_input/4.0".
        group: Name of the point's pattern, or of one region of it; crossover and per-pattern search use it.
        kind: Kind of insertion point.
        choices: Allowed precisions, first "float", then for instance "int8", "fp8".
        edges: All edges that the dimension covers, in every region that has the pattern.
        role: Kind of consumer of the tensor: "linear", "add", "mul", "pool", "concat", "activation", "normalization",
            "movement" or "other"; fixed placements use it.
        cost: Share of the model's multiply-accumulates behind this point, 0 to 1.
    """

    name: str
    group: str
    kind: PointKind
    choices: tuple[str, ...]
    edges: tuple[Edge, ...]
    role: str = "other"
    cost: float = 0.0

    def __post_init__(self) -> None:
        if len(self.choices) < 2 or self.choices[0] != FLOAT:
            raise ValueError(f"{self.name}: choices start with 'float' and have an alternative, but got {self.choices}")
        if not self.edges:
            raise ValueError(f"{self.name}: a dimension acts on at least one edge")


Agreement = tuple[tuple[Edge, ...], tuple[Edge, ...]]
"""Two operands of an operator whose precisions must agree if both are quantized, as their edges from the operator
backwards. The precision of an operand is that of its first quantized edge; if they differ, the second becomes float."""


@dataclass(frozen=True)
class Space:
    """All placements that a search may propose.

    Attributes:
        dimensions: The insertion points, in graph order of their first region.
        agreements: Operands whose precisions must agree.
        whole_has_output_points: Whether the space that this one is a part of has points at outputs.
    """

    dimensions: tuple[Dimension, ...]
    agreements: tuple[Agreement, ...] = ()
    whole_has_output_points: bool = False
    _digests: dict[Placement, str] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = [dimension.name for dimension in self.dimensions]
        if len(set(names)) != len(names):
            raise ValueError("two dimensions of a space share one name")

    def __len__(self) -> int:
        return len(self.dimensions)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Return the number of choices of each dimension."""
        return tuple(len(dimension.choices) for dimension in self.dimensions)

    @cached_property
    def groups(self) -> Mapping[str, tuple[int, ...]]:
        """Return the indices of the dimensions of each group (pattern), in order of first appearance."""
        members: dict[str, list[int]] = defaultdict(list)
        for index, dimension in enumerate(self.dimensions):
            members[dimension.group].append(index)
        return {group: tuple(indices) for group, indices in members.items()}

    @cached_property
    def has_output_points(self) -> bool:
        """Return whether the space, or the space that it is a part of, has points at outputs."""
        return self.whole_has_output_points or any(dimension.kind == "output" for dimension in self.dimensions)

    def validate(self, placement: Placement) -> Placement:
        """Return the placement unchanged.

        Raises:
            ValueError: The number of choices or a choice's index does not fit this space.
        """
        if len(placement.choices) != len(self.dimensions):
            raise ValueError(f"a placement here has {len(self.dimensions)} choices, but got {len(placement.choices)}")
        for choice, dimension in zip(placement.choices, self.dimensions, strict=True):
            if not 0 <= choice < len(dimension.choices):
                raise ValueError(f"{dimension.name}: choice 0 to {len(dimension.choices) - 1}, but got {choice}")
        return placement

    def resolve(self, placement: Placement) -> Resolved:
        """Return the quantized edges of a placement, sorted.

        If two dimensions quantize one edge differently, the earlier dimension decides. If precisions must agree and do
        not, the edge of the second operand and all other input edges of its consumer become float.
        """
        edges, members = self._edge_table
        found = [""] * len(edges)
        for choice, dimension, places in zip(placement.choices, self.dimensions, members, strict=True):
            if choice:
                for place in places:
                    found[place] = found[place] or dimension.choices[choice]
        for pair in self._agreement_table:
            while True:
                ours, theirs = (next((places for places in path if found[places[0]]), ()) for path in pair)
                if not ours or not theirs or found[ours[0]] == found[theirs[0]]:
                    break
                for place in theirs:
                    found[place] = ""
        return tuple((edge, precision) for edge, precision in zip(edges, found, strict=True) if precision)

    @cached_property
    def _edge_table(self) -> tuple[tuple[Edge, ...], tuple[tuple[int, ...], ...]]:
        """Return all edges in order, and the positions of each dimension's edges in that order."""
        edges = tuple(sorted({edge for dimension in self.dimensions for edge in dimension.edges}))
        place = {edge: number for number, edge in enumerate(edges)}
        return edges, tuple(tuple(place[edge] for edge in dimension.edges) for dimension in self.dimensions)

    @cached_property
    def _agreement_table(self) -> list[list[_Path]]:
        """Return the two paths of each agreement, without edges that no dimension covers."""
        own = {edge: place for place, edge in enumerate(self._edge_table[0])}
        readers: dict[str, list[int]] = defaultdict(list)
        for edge, place in own.items():
            readers[edge.consumer].append(place)
        table = []
        for agreement in self.agreements:
            paths = [[(own[edge], readers[edge.consumer]) for edge in path if edge in own] for path in agreement]
            if all(paths):
                table.append([[[place, *others] for place, others in path] for path in paths])
        return table

    def with_dimensions(self, dimensions: tuple[Dimension, ...]) -> Space:
        """Return a space with other dimensions that cover edges of this one, and with the same agreements."""
        return Space(dimensions, self.agreements, self.has_output_points)

    def subspace(self, indices: Iterable[int]) -> Space:
        """Return the space of the dimensions at `indices`, in that order.

        It has no agreements, which may refer to edges of other dimensions.
        """
        chosen = tuple(self.dimensions[index] for index in indices)
        return Space(chosen, whole_has_output_points=self.has_output_points)

    def digest(self, placement: Placement) -> str:
        """Return the identity of a placement's model (`edges_digest`): equal if and only if the resolved edges are."""
        known = self._digests.get(placement)
        if known is None:
            known = self._digests[placement] = edges_digest(self.resolve(placement))
        return known

    def float_placement(self) -> Placement:
        """Return the placement without any Q/DQ pair."""
        return Placement((0,) * len(self))

    def quantize_all(self, precision: str | None = None) -> Placement:
        """Return the placement with `precision` at all points that offer it; None: with each point's first one."""
        return self.quantize_dimensions(range(len(self)), precision)

    def quantize_roles(self, roles: Iterable[str], precision: str | None = None) -> Placement:
        """Return the placement with only the points of these roles quantized, in the way of `quantize_all`."""
        wanted = frozenset(roles)
        indices = (index for index, dimension in enumerate(self.dimensions) if dimension.role in wanted)
        return self.quantize_dimensions(indices, precision)

    def quantize_dimensions(self, indices: Iterable[int], precision: str | None = None) -> Placement:
        """Return the placement with only the points of these indices quantized, in the way of `quantize_all`."""
        choices = [0] * len(self)
        for index in indices:
            offered = self.dimensions[index].choices
            wanted = offered[1] if precision is None else precision
            choices[index] = offered.index(wanted) if wanted in offered else 0
        return Placement(tuple(choices))

    def nearest(self, edges: Mapping[Edge, str]) -> Placement:
        """Return the placement that agrees with most of the given quantized edges, for instance of an external model.

        If a placement of this space has exactly these edges, the result resolves to them. Otherwise a dimension is
        quantized if more than half of its edges are, and has the precision that most of them have.
        """
        exact, majority = [], []
        for dimension in self.dimensions:
            votes = [edges.get(edge, FLOAT) for edge in dimension.edges]
            allowed = [vote if vote in dimension.choices else FLOAT for vote in votes]
            exact.append(dimension.choices.index(allowed[0]) if len(set(votes)) == 1 else 0)
            best = max(dimension.choices[1:], key=allowed.count)
            is_quantized = 2 * allowed.count(FLOAT) < len(allowed)
            majority.append(dimension.choices.index(best) if is_quantized else 0)
        found = Placement(tuple(exact))
        return found if self.resolve(found) == tuple(sorted(edges.items())) else Placement(tuple(majority))

    def random(self, rng: np.random.Generator) -> Placement:
        """Return a placement drawn uniformly, each dimension on its own."""
        return Placement(tuple(int(rng.integers(size)) for size in self.sizes))


def edges_digest(resolved: Resolved) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of resolved edges."""
    text = "\n".join(f"{e.tensor}\t{e.consumer}\t{e.slot}\t{precision}" for e, precision in resolved)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
