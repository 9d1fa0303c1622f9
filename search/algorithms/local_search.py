"""Local search: moves from the incumbent, those of larger cost first; the first improvement is accepted."""

from __future__ import annotations

from search.api import Observation, Placement, Space, check_range
from search.archive import ArchiveEntry, ArchiveSearcher, improves
from search.moves import assign, dimension_blocks, singletons


class LocalSearcher(ArchiveSearcher):
    """Local search that accepts the first change that gains more than the noise, and restarts if none does.

    The base is the best placement so far. Its neighbours are proposed one after the other, blocks first (a role, a
    pattern, a role within a pattern), then single points, both in the order of their share of the model's cost. A
    neighbour that gains more than the noise becomes the base; the list of moves continues from its current position, so
    that every move is tried before any repeats. After a full pass without a gain, the search restarts from the
    perturbed incumbent (of placements that tie, the one scored first).

    Args:
        space: Space to search.
        seed: Seed of all draws.
        significance: Number of combined standard errors that a gain must exceed to count.
        perturbation: Share of the points that a restart flips, at least two points.
        blocks_first: Whether moves of whole blocks are tried, before those of single points.
    """

    def __init__(
        self,
        space: Space,
        *,
        seed: int,
        significance: float = 1.0,
        perturbation: float = 0.1,
        blocks_first: bool = True,
    ) -> None:
        check_range("significance", significance, 0)
        check_range("perturbation", perturbation, 0, 1)
        super().__init__(space, seed)
        self._significance = significance
        self._flips = max(2, round(perturbation * len(space)))
        targets = (*(dimension_blocks(space) if blocks_first else ()), *singletons(space))
        choices = range(max(space.sizes, default=1))
        self._moves = [(indices, choice) for indices in targets for choice in choices]
        self._next = 0
        self._in_vain = 0
        self._base = space.float_placement()

    def tell(self, observation: Observation) -> None:
        base, new = self._space.digest(self._base), self._archive.get(observation.digest) is None
        leader = self._leader()
        self._archive.tell(observation)
        entry = self._archive.get(observation.digest)
        awaited = base in self._archive.pending  # a restart's base; the previous incumbent counts meanwhile
        old = leader if awaited else self._archive.get(base)
        if new and entry is not None and (improves(entry.score, old.score, self._significance) if old else not awaited):
            self._move_to(observation.placement)
            return
        led = leader is not None and leader.digest == base
        leader = self._leader()
        if base in self._archive.failures or (led and leader is not None and leader.digest != base):
            self._move_to(leader.placement if leader else self._base)  # the base failed, or has a new score

    def _leader(self) -> ArchiveEntry | None:
        return next(iter(self._archive.incumbents(1, self._significance)), None)

    def _move_to(self, placement: Placement) -> None:
        self._base = placement
        self._in_vain = 0

    def _propose(self) -> Placement | None:
        if self._is_new(self._base):
            return self._base
        while self._in_vain < len(self._moves):
            indices, choice = self._moves[self._next]
            self._next = (self._next + 1) % len(self._moves)
            self._in_vain += 1
            placement = assign(self._base, indices, choice, self._space)
            if self._is_new(placement):
                return placement
        leader = self._leader()
        base = self._kick(leader.placement if leader else self._base, self._flips)
        if base is not None:
            self._move_to(base)
        return base
