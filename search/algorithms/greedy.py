"""Sensitivity-guided greedy search: measure changes of blocks and points one at a time, then combine the best.

This is the scheme of sensitivity-guided mixed precision (Wu et al. 2020, arXiv 2004.09602, "Partial quantization", for
leaving layers out; HAWQ, arXiv 1905.03696, for the order by sensitivity) on measured latency and in both directions.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from typing import Literal, get_args

from search.api import Placement, Score, Space, check_range
from search.archive import ArchiveEntry, ArchiveSearcher, improves
from search.moves import assign, move_sets

Direction = Literal["both", "in", "out"]
Change = tuple[tuple[int, ...], int]
"""Dimensions and the choice that all of them get."""


class SensitivityGreedySearcher(ArchiveSearcher):
    """Searcher that measures single changes of the incumbent, then combines them, the largest gain first.

    A round has three stages that test changes of one base: blocks across patterns, blocks within patterns, and single
    points, those with a larger share of the model's multiply-accumulates first. After each stage its changes are
    ordered by gain per cost and applied cumulatively: a change that gains on top of all before it is kept, any other is
    reverted. Cost is the number of edges changed, so that small changes with a large gain come first. If the base
    violates the constraint, gain is the reduction of the violation and cost the increase of latency. The next stage
    starts from the combined placement, the next round from the best placement that had no round yet (of ties, the one
    scored first). After the last round, random placements are proposed.

    Args:
        space: Space to search.
        seed: Seed of the draws after the last round.
        direction: "in": quantize points that are float (leave one in); "out": make quantized points float (leave one
            out); "both": both.
        share: Share of a stage's changes that one round tests, the costliest first; the first stage is tested in full.
        significance: Number of combined standard errors that a gain must exceed to count.
    """

    def __init__(
        self,
        space: Space,
        *,
        seed: int,
        direction: Direction = "both",
        share: float = 0.5,
        significance: float = 1.0,
    ) -> None:
        if direction not in get_args(Direction):
            raise ValueError(f"direction is one of {get_args(Direction)}, but got {direction!r}")
        check_range("share", share, 0, 1)
        check_range("significance", significance, 0)
        super().__init__(space, seed)
        self._direction = direction
        self._share = share
        self._significance = significance
        self._stages = move_sets(space)
        self._plan = self._search()

    def _propose(self) -> Placement | None:
        return next(self._plan, None)

    def _search(self) -> Iterator[Placement | None]:
        """Yield all proposals in order; None means that an outcome is needed before the next one."""
        if not len(self._archive):
            yield from self._measure(self._space.float_placement())
        done: set[str] = set()
        while True:
            best = self._archive.incumbents(len(done) + 1, self._significance)
            base = next((entry for entry in best if entry.digest not in done), None)
            if base is not None:
                done.add(base.digest)
                yield from self._round(base)
            else:
                yield self._neighbour(self._space.random(self._rng))

    def _round(self, base: ArchiveEntry) -> Iterator[Placement | None]:
        for number, blocks in enumerate(self._stages):
            changes = [change for block in blocks for change in self._block_changes(base.placement, block)]
            if number:
                changes = changes[: math.ceil(self._share * len(changes))]
            for change in changes:
                placement = assign(base.placement, *change, self._space)
                if self._is_new(placement):
                    yield placement
            base = yield from self._combine(base, changes)

    def _combine(
        self, base: ArchiveEntry, changes: Sequence[Change]
    ) -> Generator[Placement | None, None, ArchiveEntry]:
        """Apply changes that gained on their own, best first, and keep each that gains on top of those before it."""
        gained: list[tuple[float, Change]] = []
        for change in changes:
            alone, own = yield from self._measure_change(base, change)
            if alone is not None and improves(alone.score, own, self._significance):
                # The value per cost: the violation removed per increase of latency if the base violates the
                # constraint, else the latency saved per edge.
                lost = alone.score.objective - own.objective
                rate = -lost / sum(len(self._space.dimensions[index].edges) for index in change[0])
                if own.violation > 0:
                    paid = max(lost, 1e-3 * abs(own.objective), 1e-12)
                    rate = (own.violation - alone.score.violation) / paid
                gained.append((rate, change))
        reached = base
        for _, change in sorted(gained, key=lambda pair: -pair[0]):
            both, own = yield from self._measure_change(reached, change)
            if both is not None and improves(both.score, own, self._significance):
                reached = both
        return reached

    def _measure_change(
        self, base: ArchiveEntry, change: Change
    ) -> Generator[Placement | None, None, tuple[ArchiveEntry | None, Score]]:
        """Measure a change, and return its entry and the pooled score of the base, which may be measured again."""
        entry = yield from self._measure(assign(base.placement, *change, self._space))
        return entry, (self._archive.get(base.digest) or base).score

    def _measure(self, placement: Placement) -> Generator[Placement | None, None, ArchiveEntry | None]:
        """Propose a placement unless it is known, wait for its outcome, and return its entry; None if it failed."""
        digest = self._space.digest(placement)
        if digest not in self._archive:
            yield placement
        while digest in self._archive.pending:
            yield None
        return self._archive.get(digest)

    def _block_changes(self, base: Placement, block: tuple[int, ...]) -> Iterator[Change]:
        for choice in range(max(self._space.sizes[index] for index in block)):
            allowed = self._direction == "both" or (self._direction == "in") == (choice > 0)
            if allowed and assign(base, block, choice, self._space) != base:
                yield block, choice
