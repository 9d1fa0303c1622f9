"""Evolution of placements: tournament, crossover of whole patterns, self-adaptive mutation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from search.api import Placement, Space, check_range
from search.archive import ArchiveEntry, ArchiveSearcher
from search.moves import (
    assign,
    crossover_by_group,
    dimension_blocks,
    first_unseen,
    mutate_rate,
    random_neighbour,
    random_with_density,
)

__all__ = ["EvolutionarySearcher"]

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
        make: Callable[[], Placement] = (lambda: self._child(parents)) if parents else self._random_placement
        left = FREE_REPEATS + 2 * len(self._archive.seen) - self._children
        attempts = min(MAX_ATTEMPTS, max(left, 1))
        placement = first_unseen(make, self._space, self._archive, attempts)
        if placement is None and attempts < MAX_ATTEMPTS:  # nearly all placements near the parents are known
            placement = random_neighbour(make(), self._space, self._rng, self._archive)
        return placement or random_neighbour(self._random_placement(), self._space, self._rng, self._archive)

    def _child(self, parents: Sequence[ArchiveEntry]) -> Placement:
        self._children += 1
        first = self._select_parent(parents)
        rate = self._adapt_rate(self._rates.get(first.digest, self._floor))
        child = first.placement
        others = [parent for parent in parents if parent is not first]
        if others and self._rng.random() < self._crossover:
            child = crossover_by_group(child, self._select_parent(others).placement, self._space, self._rng)
        if self._blocks and self._rng.random() < self._block:
            block = self._blocks[self._rng.integers(len(self._blocks))]
            child = assign(child, block, int(self._rng.integers(max(self._space.sizes))), self._space)
        child = mutate_rate(child, self._space, self._rng, rate)
        self._rates.setdefault(self._space.digest(child), rate)
        return child

    def _select_parent(self, parents: Sequence[ArchiveEntry]) -> ArchiveEntry:
        """Return the best of `tournament` draws; parents are sorted, so it has the smallest index."""
        return parents[int(self._rng.integers(len(parents), size=self._tournament).min())]

    def _adapt_rate(self, rate: float) -> float:
        odds = (1 - rate) / rate * math.exp(-LEARNING_RATE * self._rng.normal())
        return min(max(1 / (1 + odds), self._floor), 0.5)

    def _random_placement(self) -> Placement:
        return random_with_density(self._space, self._rng, self._rng.random())
