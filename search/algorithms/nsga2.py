"""NSGA-II over placements: searches the whole Pareto front of several objectives (Deb et al. 2002)."""

from __future__ import annotations

from collections.abc import Sequence

from search.api import Placement, Space, check_range
from search.archive import ArchiveSearcher
from search.moves import crossover_by_group, first_unseen, mutate_rate, random_neighbour, random_with_density

__all__ = ["NSGA2Searcher"]

MAX_ATTEMPTS = 100


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
        parents = [entry.placement for entry in self._archive.nsga_order(self._population)]
        placement = first_unseen(lambda: self._child(parents), self._space, self._archive, MAX_ATTEMPTS)
        return placement or random_neighbour(self._random_placement(), self._space, self._rng, self._archive)

    def _child(self, parents: Sequence[Placement]) -> Placement:
        if not parents:
            return self._random_placement()
        child = self._select_parent(parents)
        if self._rng.random() < self._crossover:
            child = crossover_by_group(child, self._select_parent(parents), self._space, self._rng)
        return mutate_rate(child, self._space, self._rng, self._rate)

    def _select_parent(self, parents: Sequence[Placement]) -> Placement:
        """Return the better of two draws; parents are sorted, so it has the smaller index."""
        return parents[int(self._rng.integers(len(parents), size=2).min())]

    def _random_placement(self) -> Placement:
        return random_with_density(self._space, self._rng, self._rng.random())
