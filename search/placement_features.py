"""Features of a placement for a model of latency: its resolved edges, aggregated at several scales.

Edges that the same dimensions cover always have the same precision, so they form one *atom*. The state of an atom is
the precision of its edges. Two placements give the same graph exactly if all atoms have the same states.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations

import numpy as np
import numpy.typing as npt

from search.moves import next_inputs
from search.space import Edge, Placement, Space

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
        return FeatureRows(*(getattr(self, part.name)[rows] for part in fields(self)))

    def __len__(self) -> int:
        return len(self.states)

    def keys(self) -> list[bytes]:
        """Return the identity of each row: equal if and only if the resolved edges are equal."""
        return [row.tobytes() for row in self.states]


class FeatureExtractor:
    """Function that returns the features of placements of one space, `FeatureRows` with a row each; it has no state.

    An atom is a set of edges that the same dimensions cover. Atoms are adjacent if a difference in precision needs a
    conversion: two inputs of one node, two readers of one tensor, and two points that follow each other in graph order.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        self.precisions = tuple(dict.fromkeys(name for d in space.dimensions for name in d.choices[1:]))
        states = np.zeros((len(space) + 1, max(space.sizes, default=1)), dtype=np.int8)
        for index, dimension in enumerate(space.dimensions):
            for choice, name in enumerate(dimension.choices[1:], start=1):
                states[index, choice] = 1 + self.precisions.index(name)
        self._states = states
        covers: dict[Edge, list[int]] = defaultdict(list)
        for index, dimension in enumerate(space.dimensions):
            for edge in dict.fromkeys(dimension.edges):
                covers[edge].append(index)
        atoms = {cover: number for number, cover in enumerate(dict.fromkeys(map(tuple, covers.values())))}
        members = {edge: atoms[tuple(cover)] for edge, cover in covers.items()}  # atom of each edge
        depth = max(map(len, atoms), default=1)
        padded = [[*cover, *[-1] * (depth - len(cover))] for cover in atoms]
        self._cover = np.array(padded, dtype=np.int64).reshape(len(atoms), depth)  # dimensions of each atom, ascending
        sizes = Counter(members.values())
        count = np.array([float(sizes[number]) for number in range(len(atoms))])  # edges of each atom
        points = [[space.dimensions[index] for index in cover] for cover in atoms]
        cost = np.array([max(d.cost / len(d.edges) for d in point) for point in points]) * count
        # The role and the pattern of an atom are those of a dimension of kind "node_input" if there is one.
        places = [next((i for i, d in enumerate(point) if d.kind == "node_input"), 0) for point in points]
        owner = [cover[place] for cover, place in zip(atoms, places, strict=True)]
        owners = [space.dimensions[index] for index in owner]
        worth = 0.5 * _normalize(count) + 0.5 * _normalize(cost)
        self._roles = np.column_stack([_share_matrix([d.role for d in owners], count), cost[:, None]])
        scopes = [f"{d.group} {d.role}" for d in owners]
        totals: dict[str, float] = defaultdict(float)
        for scope, value in zip(scopes, worth.tolist(), strict=True):
            totals[scope] += value
        self._scopes = _share_matrix(scopes, count) * np.sqrt([*totals.values()])
        self._points = np.sqrt(worth)
        pairs = _count_adjacent(space, members, owner, count)
        self._first, self._second = np.array([*pairs], dtype=np.int64).reshape(len(pairs), 2).T
        instances = np.array([float(number) for number in pairs.values()])
        self._pairs = np.sqrt(_normalize(instances))
        self._borders = _share_matrix(["-".join(sorted((owners[a].role, owners[b].role))) for a, b in pairs], instances)

    def __call__(self, placements: Sequence[Placement]) -> FeatureRows:
        """Return the features of the placements, in their order."""
        encoded = b"".join(bytes(placement.choices) for placement in placements)  # much faster than from tuples
        choices = np.frombuffer(encoded, dtype=np.uint8).reshape(len(placements), len(self._space))
        coded = np.zeros((len(placements), len(self._space) + 1), dtype=np.int8)  # last column: padding of `cover`
        coded[:, :-1] = self._states[np.arange(len(self._space)), choices]
        states = np.zeros((len(placements), len(self._cover)), dtype=np.int8)
        for column in self._cover.T:  # the earlier dimension decides
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


def _count_adjacent(
    space: Space, members: Mapping[Edge, int], owner: Sequence[int], count: Matrix
) -> dict[tuple[int, int], int]:
    """Return how often each pair of adjacent atoms occurs, the most frequent pairs only."""
    together: dict[tuple[str, str], set[int]] = defaultdict(set)
    found: Counter[tuple[int, int]] = Counter()
    for edge, atom in members.items():
        together["tensor", edge.tensor].add(atom)
        together["node", edge.consumer].add(atom)
    together.pop(("node", ""), None)
    for near in together.values():
        found.update(combinations(sorted(near)[:8], 2))
    own = {dimension: atom for atom, dimension in reversed([*enumerate(owner)])}
    for index, after in next_inputs(space).items():
        if index in own and after in own and own[index] != own[after]:
            low, high = sorted((own[index], own[after]))
            found[low, high] += int(min(count[low], count[high]))
    frequent = sorted(found, key=lambda pair: (-found[pair], pair))[:MAX_ADJACENT_PAIRS]
    return {pair: found[pair] for pair in frequent}


def _share_matrix(names: Sequence[str], weights: Matrix) -> Matrix:
    """Return the matrix that maps indicators to weighted shares per name: one column per name, each with sum 1."""
    columns = {name: number for number, name in enumerate(dict.fromkeys(names))}
    sums = np.zeros((len(names), len(columns)))
    for row, name in enumerate(names):
        sums[row, columns[name]] = weights[row]
    shares: Matrix = sums / np.maximum(sums.sum(axis=0), 1e-12)
    return shares


def _normalize(weights: Matrix) -> Matrix:
    return weights / max(float(weights.sum()), 1e-12)


def _concatenate(parts: Sequence[Matrix], rows: int) -> Matrix:
    return np.concatenate(parts, axis=1) if parts else np.zeros((rows, 0))
