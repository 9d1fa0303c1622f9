"""Features of a placement for a model of latency: its resolved edges, aggregated at several scales.

Edges that the same dimensions cover always have the same precision, so they form one *atom*. The state of an atom is
the precision of its edges. Two placements give the same graph exactly if all atoms have the same states.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from search.moves import next_inputs
from search.space import Edge, Placement, Space

__all__ = ["FeatureExtractor", "FeatureRows"]

Matrix = npt.NDArray[np.float64]
MAX_ADJACENT_PAIRS = 600
"""Largest number of pairs of adjacent atoms that become features; the most frequent pairs are kept."""


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """Features of n placements, a row each. An atom is a set of edges that the same dimensions cover.

    The prior variances of each block sum to about one.

    Attributes:
        states: State of each atom, shape (n, atoms): 0 is float, k the k-th precision of the space.
        roles: For each precision, the share of each role's edges that have it, and the share of the model's
            multiply-accumulates behind such edges; shape (n, precisions x (roles + 1)).
        scopes: For each precision, the weighted share of the edges of each role within each pattern.
        points: One-hot states of the atoms, weighted.
        pairs: For each pair of adjacent atoms, a weight if their states differ, else 0.
        borders: For each pair of roles, the share of its pairs of adjacent atoms whose states differ.
    """

    states: npt.NDArray[np.int8]
    roles: Matrix
    scopes: Matrix
    points: Matrix
    pairs: Matrix
    borders: Matrix

    def __getitem__(self, rows: slice | list[int] | npt.NDArray[np.int64]) -> FeatureRows:
        """Return some of the rows; a slice makes no copy."""
        return FeatureRows(
            states=self.states[rows],
            roles=self.roles[rows],
            scopes=self.scopes[rows],
            points=self.points[rows],
            pairs=self.pairs[rows],
            borders=self.borders[rows],
        )

    def __len__(self) -> int:
        return len(self.states)

    def keys(self) -> list[bytes]:
        """Return the identity of each row: equal if and only if the resolved edges are equal."""
        return [row.tobytes() for row in self.states]


@dataclass(frozen=True, slots=True)
class _EdgeIndicators:
    """Atoms of a space.

    Attributes:
        cover: Indices of the dimensions that cover each atom, ascending, padded with -1, shape (atoms, depth).
        count: Number of edges of each atom.
        cost: Share of the model's multiply-accumulates behind each atom.
        owner: Index of the dimension whose role and pattern each atom has: of kind "node_input" if there is one.
        members: Index of the atom of each edge.
    """

    cover: npt.NDArray[np.int64]
    count: Matrix
    cost: Matrix
    owner: tuple[int, ...]
    members: Mapping[Edge, int]


class FeatureExtractor:
    """Function that returns the features of placements of one space, `FeatureRows` with a row each; it has no state.

    An atom is a set of edges that the same dimensions cover. Atoms are adjacent if a difference in precision needs a
    conversion: two inputs of one node, two readers of one tensor, and two points that follow each other in graph order.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        self.precisions = tuple(dict.fromkeys(name for d in space.dimensions for name in d.choices[1:]))
        self._atoms = atoms = _edge_indicators(space)
        states = np.zeros((len(space) + 1, max(space.sizes, default=1)), dtype=np.int8)
        for index, dimension in enumerate(space.dimensions):
            for choice, name in enumerate(dimension.choices[1:], start=1):
                states[index, choice] = 1 + self.precisions.index(name)
        self._states = states
        owners = [space.dimensions[index] for index in atoms.owner]
        worth = 0.5 * _normalize(atoms.count) + 0.5 * _normalize(atoms.cost)
        self._roles = np.column_stack([_share_matrix([d.role for d in owners], atoms.count), atoms.cost[:, None]])
        scopes = [f"{d.group} {d.role}" for d in owners]
        self._scopes = _share_matrix(scopes, atoms.count) * np.sqrt(_sum_by_name(scopes, worth))
        self._points = np.sqrt(worth)
        self._first, self._second, instances = _adjacent_indicators(space, atoms)
        self._pairs = np.sqrt(_normalize(instances))
        kinds = [
            "-".join(sorted((owners[a].role, owners[b].role))) for a, b in zip(self._first, self._second, strict=True)
        ]
        self._borders = _share_matrix(kinds, instances)

    def __call__(self, placements: Sequence[Placement]) -> FeatureRows:
        """Return the features of the placements, in their order."""
        encoded = b"".join(bytes(placement.choices) for placement in placements)  # much faster than from tuples
        choices = np.frombuffer(encoded, dtype=np.uint8).reshape(len(placements), len(self._space))
        coded = np.zeros((len(placements), len(self._space) + 1), dtype=np.int8)  # last column: padding of `cover`
        coded[:, :-1] = self._states[np.arange(len(self._space)), choices]
        states = np.zeros((len(placements), len(self._atoms.count)), dtype=np.int8)
        for column in self._atoms.cover.T:  # the earlier dimension decides
            states = np.where(states == 0, coded[:, column], states)
        at = [(states == 1 + k).astype(float) for k in range(len(self.precisions))]
        apart = (states[:, self._first] != states[:, self._second]).astype(float)
        return FeatureRows(
            states=states,
            roles=_concatenate([on @ self._roles for on in at], len(placements)),
            scopes=_concatenate([on @ self._scopes for on in at], len(placements)),
            points=_concatenate([on * self._points for on in at], len(placements)),
            pairs=apart * self._pairs,
            borders=apart @ self._borders,
        )


def _edge_indicators(space: Space) -> _EdgeIndicators:
    covers: dict[Edge, list[int]] = defaultdict(list)
    for index, dimension in enumerate(space.dimensions):
        for edge in dict.fromkeys(dimension.edges):
            covers[edge].append(index)
    kinds = {cover: number for number, cover in enumerate(dict.fromkeys(tuple(cover) for cover in covers.values()))}
    members = {edge: kinds[tuple(cover)] for edge, cover in covers.items()}
    depth = max((len(cover) for cover in kinds), default=1)
    padded = [[*cover, *[-1] * (depth - len(cover))] for cover in kinds]
    count = Counter(members.values())
    dimensions = space.dimensions
    return _EdgeIndicators(
        cover=np.array(padded, dtype=np.int64).reshape(len(kinds), depth),
        count=np.array([float(count[number]) for number in range(len(kinds))]),
        cost=np.array(
            [max(dimensions[i].cost / len(dimensions[i].edges) for i in c) * count[n] for c, n in kinds.items()]
        ),
        owner=tuple(next((i for i in cover if dimensions[i].kind == "node_input"), cover[0]) for cover in kinds),
        members=members,
    )


def _adjacent_indicators(
    space: Space, atoms: _EdgeIndicators
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Matrix]:
    """Return both atoms of each adjacent pair and how often the pair occurs, the most frequent pairs only."""
    together: dict[tuple[str, str], set[int]] = defaultdict(set)
    found: Counter[tuple[int, int]] = Counter()
    for edge, atom in atoms.members.items():
        for place in (("node", edge.consumer), ("tensor", edge.tensor)):
            if place != ("node", ""):
                together[place].add(atom)
    for near in together.values():
        found.update(combinations(sorted(near)[:8], 2))
    own = {dimension: atom for atom, dimension in reversed(list(enumerate(atoms.owner)))}
    for index, after in next_inputs(space).items():
        if index in own and after in own and own[index] != own[after]:
            low, high = sorted((own[index], own[after]))
            found[low, high] += int(min(atoms.count[low], atoms.count[high]))
    pairs = sorted(found, key=lambda pair: (-found[pair], pair))[:MAX_ADJACENT_PAIRS]
    indices = np.array(pairs, dtype=np.int64).reshape(len(pairs), 2)
    return indices[:, 0], indices[:, 1], np.array([float(found[pair]) for pair in pairs])


def _share_matrix(names: Sequence[str], weights: Matrix) -> Matrix:
    """Return the matrix that maps indicators to weighted shares per name: one column per name, each with sum 1."""
    columns = {name: number for number, name in enumerate(dict.fromkeys(names))}
    sums = np.zeros((len(names), len(columns)))
    for row, name in enumerate(names):
        sums[row, columns[name]] = weights[row]
    shares: Matrix = sums / np.maximum(sums.sum(axis=0), 1e-12)
    return shares


def _sum_by_name(names: Sequence[str], weights: Matrix) -> Matrix:
    totals: dict[str, float] = dict.fromkeys(names, 0.0)
    for name, weight in zip(names, weights, strict=True):
        totals[name] += float(weight)
    return np.array(list(totals.values()))


def _normalize(weights: Matrix) -> Matrix:
    return weights / max(float(weights.sum()), 1e-12)


def _concatenate(parts: Sequence[Matrix], rows: int) -> Matrix:
    return np.concatenate(parts, axis=1) if parts else np.zeros((rows, 0))
