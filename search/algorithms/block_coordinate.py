"""Any searcher, one pattern at a time: the scope "per pattern" with revision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from search.api import Observation, Placement, Space, check_range
from search.archive import Archive
from search.moves import random_kick
from search.subspace import SubspaceSearcher, known_outcome, load_searcher

__all__ = ["PerPatternSearcher"]

BlockOrder = Literal["graph", "cost"]
MAX_EMBEDDED_PLACEMENTS = 3
RESTART_FLIP_SHARE = 0.1
MAX_ATTEMPTS = 50


class PerPatternSearcher:
    """Block coordinate descent: search one pattern at a time, the others as in the best placement so far.

    First the schemes that the best other placements have for the pattern are tried, then those that its searcher
    proposes. After the last pattern a new round begins, so that later patterns revise earlier ones. A round that finds
    nothing new to propose ends the descent; the next one starts from a perturbed best, a tenth of its points flipped.
    Of placements that tie, the best is the one told first. (`random_mutation` with scope "per_pattern" is ModelOpt's
    walk: one round, and each pattern is committed for good.)

    Args:
        space: What to search.
        seed: Fixes all draws.
        searcher: Name of the searcher of each pattern.
        params: Its parameters.
        evaluations: Proposals of one turn.
        order: "graph": patterns as they come in the model; "cost": those behind which there is more work first.
    """

    def __init__(
        self,
        space: Space,
        *,
        seed: int,
        searcher: str = "evolutionary",
        params: Mapping[str, Any] | None = None,
        evaluations: int = 5,
        order: BlockOrder = "graph",
    ) -> None:
        check_range("evaluations", evaluations, 1)
        if order not in get_args(BlockOrder):
            raise ValueError(f"order is one of {get_args(BlockOrder)}, but got {order!r}")
        self._space = space
        self._rng = np.random.default_rng(seed)
        self._make = load_searcher(searcher)
        self._params = dict(params or {})
        self._make(space, seed=seed, **self._params)  # a wrong parameter is told at once
        self._evaluations = evaluations
        self._flips = max(2, round(RESTART_FLIP_SHARE * len(space)))
        self._archive = Archive()
        self._before: frozenset[str] = frozenset()
        self._descent = Archive()
        self._turns = list(space.groups.values())
        if order == "cost":
            self._turns.sort(key=lambda indices: -sum(space.dimensions[index].cost for index in indices))
        self._in_vain = 0
        self._part: SubspaceSearcher | None = None

    def ask(self, n: int) -> Sequence[Placement]:
        return self._archive.ask(n, self._next, self._space)

    def tell(self, observation: Observation) -> None:
        self._archive.tell(observation)
        if observation.digest not in self._before:  # a best told again is no step of a descent that left it
            self._descent.tell(observation)
        if self._part is not None:
            self._part.tell(observation)

    def _next(self) -> Placement | None:
        """A proposal of the first turn that has one; None while outcomes that decide where one starts from are due."""
        part = self._part or self._start_block(self._base_placement())
        while self._in_vain < len(self._turns):
            if self._left and (placement := self._propose(part)) is not None:
                self._left -= 1
                return placement
            if self._archive.pending:
                return None
            self._in_vain = self._in_vain + 1 if self._left == self._evaluations else 0
            self._turns.append(self._turns.pop(0))
            part = self._start_block(self._base_placement())
        return self._restart()

    def _base_placement(self) -> Placement:
        """The best of this descent; of all where nothing of it could be measured."""
        best = self._descent.incumbents(1) or self._archive.incumbents(1)
        return best[0].placement if best else self._space.float_placement()

    def _restart(self) -> Placement | None:
        """Where the next descent starts; None where nothing new is near."""
        best = self._archive.incumbents(1)
        around = best[0].placement if best else self._space.float_placement()
        start = random_kick(around, self._space, self._rng, self._archive, self._flips)
        if start is not None:
            self._before = frozenset([*(entry.digest for entry in self._archive), *self._archive.failures])
            self._descent = Archive()
            self._in_vain = 0
            self._start_block(start)
        return start

    def _start_block(self, base: Placement) -> SubspaceSearcher:
        """The turn of the pattern that is first now; its searcher learns what is known on this base."""
        self._left = self._evaluations
        indices = self._turns[0] if self._turns else ()
        seed = int(self._rng.integers(2**31))
        part = SubspaceSearcher(
            self._space, indices, base, make=lambda inside: self._make(inside, seed=seed, **self._params)
        )
        for known in [*self._archive, *self._archive.failures.values()]:
            self._tell_known(part, known.placement)
        self._part = part
        return part

    def _propose(self, part: SubspaceSearcher) -> Placement | None:
        for entry in self._archive.incumbents(MAX_EMBEDDED_PLACEMENTS):
            graft = part.embed(entry.placement)
            if self._space.digest(graft) not in self._archive:
                return graft
        for _ in range(MAX_ATTEMPTS):
            asked = part.ask(1)
            if not asked or self._space.digest(asked[0]) not in self._archive:
                return asked[0] if asked else None
            self._tell_known(part, asked[0])
        return None

    def _tell_known(self, part: SubspaceSearcher, placement: Placement) -> None:
        """What is new to a pattern's searcher may be known as a graph."""
        if (known := known_outcome(self._archive, placement, self._space.digest(placement))) is not None:
            part.tell(known)
