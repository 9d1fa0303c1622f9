"""Evolution of placements by crossover of whole patterns and mutation: an evolution strategy and NSGA-II."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from search.api import Placement, Space, check_range
from search.archive import ArchiveEntry, ArchiveSearcher
from search.moves import assign, crossover_by_group, dimension_blocks, mutate_rate

LEARNING_RATE = 0.22
MAX_ATTEMPTS = 100
FREE_REPEATS = 2000
"""Number of children that a search may draw beyond two per proposal, so that its time stays linear in the proposals."""


class EvolutionarySearcher(ArchiveSearcher):
    """Searcher by a steady-state (mu + lambda) evolution strategy with a mutation rate per placement.

    The parents are the `population` best placements so far, initial ones included, so no good placement is lost and
    asking does not wait for the end of a generation. Each placement carries its own mutation rate, which a child
    inherits and varies, so that rates that produce good children spread: p' = 1 / (1 + (1 - p) / p * exp(-0.22 N(0,
    1))) (Baeck and Schuetz 1996, "Intelligent mutation rate control in canonical genetic algorithms", eq. 5).

    Args:
        space: Space to search.
        seed: Seed of all draws.
        population: Number of parents (mu).
        tournament: Number of candidates drawn for one parent; the best of them is taken.
        crossover: Probability that a child has two parents; it takes each pattern whole from either.
        block: Probability that a mutation also sets a whole role or pattern at once.
        significance: Number of combined standard errors that a child must gain to displace a parent.
    """

    def __init__(
        self,
        space: Space,
        *,
        seed: int,
        population: int = 5,
        tournament: int = 3,
        crossover: float = 0.8,
        block: float = 0.1,
        significance: float = 1.0,
    ) -> None:
        check_range("population", population, 1)
        check_range("tournament", tournament, 1)
        check_range("crossover", crossover, 0, 1)
        check_range("block", block, 0, 1)
        check_range("significance", significance, 0)
        super().__init__(space, seed)
        self._population = population
        self._tournament = tournament
        self._crossover = crossover
        self._block = block
        self._significance = significance
        self._blocks = dimension_blocks(space)
        self._floor = 1 / max(len(space), 2)
        self._rates: dict[str, float] = {}
        self._children = 0

    def _propose(self) -> Placement | None:
        parents = self._archive.incumbents(self._population, self._significance)
        make = partial(self._child, parents) if parents else self._random_placement
        left = FREE_REPEATS + 2 * len(self._archive.seen) - self._children
        attempts = min(MAX_ATTEMPTS, max(left, 1))
        placement = self._first_new(make, attempts)
        if placement is None and attempts < MAX_ATTEMPTS:  # nearly all placements near the parents are known
            placement = self._neighbour(make())
        return placement or self._neighbour(self._random_placement())

    def _child(self, parents: Sequence[ArchiveEntry]) -> Placement:
        self._children += 1
        first = _select_parent(self._rng, parents, self._tournament)
        rate = self._rates.get(first.digest, self._floor)
        odds = (1 - rate) / rate * math.exp(-LEARNING_RATE * self._rng.normal())
        rate = min(max(1 / (1 + odds), self._floor), 0.5)
        child = first.placement
        others = [parent for parent in parents if parent is not first]
        if others and self._rng.random() < self._crossover:
            second = _select_parent(self._rng, others, self._tournament)
            child = crossover_by_group(child, second.placement, self._space, self._rng)
        if self._blocks and self._rng.random() < self._block:
            block = self._blocks[self._rng.integers(len(self._blocks))]
            child = assign(child, block, int(self._rng.integers(max(self._space.sizes))), self._space)
        child = mutate_rate(child, self._space, self._rng, rate)
        self._rates.setdefault(self._space.digest(child), rate)
        return child


class NSGA2Searcher(ArchiveSearcher):
    """Searcher by NSGA-II in its steady-state form: non-dominated sorting and crowding over latency and accuracy.

    In the steady-state form (Durillo et al. 2009, "On the effect of the steady-state selection scheme in
    multi-objective genetic algorithms") the parents of each child are the best of all scored placements, so asking does
    not wait for the end of a generation. `Score.objectives` are minimized; if they are empty, latency alone. Feasible
    scores rank before infeasible ones, and among the latter the smaller violation wins (Deb et al. 2002, definition 1).
    A difference in latency within the noise dominates nothing.

    Args:
        space: Space to search.
        seed: Seed of all draws.
        population: Number of parents.
        crossover: Probability that a child has two parents; it takes each pattern whole from either.
        mutation: Expected number of points that a mutation changes.
    """

    def __init__(
        self, space: Space, *, seed: int, population: int = 12, crossover: float = 0.9, mutation: float = 1.0
    ) -> None:
        check_range("population", population, 2)
        check_range("crossover", crossover, 0, 1)
        check_range("mutation", mutation, 0)
        super().__init__(space, seed)
        self._population = population
        self._crossover = crossover
        self._rate = min(mutation / max(len(space), 1), 1.0)

    def _propose(self) -> Placement | None:
        parents = self._archive.nsga_order(self._population)
        make = partial(self._child, parents) if parents else self._random_placement
        return self._first_new(make, MAX_ATTEMPTS) or self._neighbour(self._random_placement())

    def _child(self, parents: Sequence[ArchiveEntry]) -> Placement:
        child = _select_parent(self._rng, parents, 2).placement
        if self._rng.random() < self._crossover:
            second = _select_parent(self._rng, parents, 2).placement
            child = crossover_by_group(child, second, self._space, self._rng)
        return mutate_rate(child, self._space, self._rng, self._rate)


def _select_parent(rng: np.random.Generator, parents: Sequence[ArchiveEntry], draws: int) -> ArchiveEntry:
    """Return the best of some draws; parents are sorted, so it has the smallest index."""
    return parents[int(rng.integers(len(parents), size=draws).min())]
