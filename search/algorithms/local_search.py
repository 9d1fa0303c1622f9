"""Local search: moves from the incumbent, those of larger cost first; the first improvement is accepted."""

from __future__ import annotations

from search.api import Observation, Placement, Space, check_range
from search.archive import ArchiveEntry, ArchiveSearcher, improves
from search.moves import assign, dimension_blocks, random_kick

__all__ = ["LocalSearcher"]

Move = tuple[tuple[int, ...], int]
"""Dimensions and the choice that all of them get."""


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
        self._moves = _list_moves(space, blocks_first)
        self._next = 0
        self._in_vain = 0
        self._base = space.float_placement()

    def tell(self, observation: Observation) -> None:
        base = self._space.digest(self._base)
        new, leader = self._archive.get(observation.digest) is None, self._incumbent()
        led = leader is not None and leader.digest == base
        self._archive.tell(observation)
        if new and self._beats_base(observation.digest, base, leader):
            self._move_to(observation.placement)
        elif base in self._archive.failures or (led and not self._is_incumbent(base)):  # a new score of the base
            self._move_to(self._incumbent_placement())

    def _beats_base(self, digest: str, base: str, leader: ArchiveEntry | None) -> bool:
        """Return whether a placement beats the base, or the previous incumbent while a restart's base is pending."""
        entry, awaited = self._archive.get(digest), base in self._archive.pending
        old = leader if awaited else self._archive.get(base)
        if entry is None or old is None:
            return entry is not None and not awaited
        return improves(entry.score, old.score, self._significance)

    def _incumbent(self) -> ArchiveEntry | None:
        return next(iter(self._archive.incumbents(1, self._significance)), None)

    def _is_incumbent(self, digest: str) -> bool:
        leader = self._incumbent()
        return leader is not None and leader.digest == digest

    def _incumbent_placement(self) -> Placement:
        leader = self._incumbent()
        return leader.placement if leader else self._base

    def _move_to(self, placement: Placement) -> None:
        self._base = placement
        self._in_vain = 0

    def _propose(self) -> Placement | None:
        if self._space.digest(self._base) not in self._archive:
            return self._base
        while self._in_vain < len(self._moves):
            indices, choice = self._moves[self._next]
            self._next = (self._next + 1) % len(self._moves)
            self._in_vain += 1
            placement = assign(self._base, indices, choice, self._space)
            if self._space.digest(placement) not in self._archive:
                return placement
        return self._restart()

    def _restart(self) -> Placement | None:
        base = random_kick(self._incumbent_placement(), self._space, self._rng, self._archive, self._flips)
        if base is not None:
            self._move_to(base)
        return base


def _list_moves(space: Space, blocks_first: bool) -> tuple[Move, ...]:
    points = sorted(((index,) for index in range(len(space))), key=lambda p: -space.dimensions[p[0]].cost)
    targets = (*(dimension_blocks(space) if blocks_first else ()), *points)
    return tuple((indices, choice) for indices in targets for choice in range(max(space.sizes, default=1)))
