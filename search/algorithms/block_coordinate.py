"""Block coordinate descent: any searcher, applied to one pattern at a time in repeated rounds."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, get_args

from search.api import Observation, Placement, Space, check_range
from search.archive import Archive, ArchiveSearcher
from search.subspace import SubspaceSearcher, known_outcome, load_searcher

BlockOrder = Literal["graph", "cost"]
MAX_EMBEDDED_PLACEMENTS = 3
RESTART_FLIP_SHARE = 0.1
MAX_ATTEMPTS = 50


class PerPatternSearcher(ArchiveSearcher):
    """Block coordinate descent, which searches one pattern at a time; the others keep the incumbent's schemes.

    For each pattern, the schemes that the best other placements have for it are tried first, then the proposals of the
    inner searcher. After the last pattern a new round begins, so that earlier patterns are revised. A round without a
    new proposal ends the descent; the next one starts from the incumbent with a tenth of its points flipped. Of
    placements that tie, the incumbent is the one scored first. (`random_mutation` with scope "per_pattern" is
    ModelOpt's procedure: one round, and each pattern is committed permanently.)

    Args:
        space: Space to search.
        seed: Seed of all draws.
        searcher: Name of the searcher of each pattern.
        params: Parameters of that searcher.
        evaluations: Number of proposals per pattern and round.
        order: "graph": patterns in the order of the model; "cost": patterns with more multiply-accumulates first.

    Raises:
        ValueError: The searcher is unknown (`search.subspace.load_searcher`), or a parameter has an invalid value.
        TypeError: The searcher has no such parameter.
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
        super().__init__(space, seed)
        self._make = load_searcher(searcher)
        self._params = dict(params or {})
        self._make(space, seed=seed, **self._params)  # raises early on a wrong parameter
        self._evaluations = evaluations
        self._flips = max(2, round(RESTART_FLIP_SHARE * len(space)))
        self._before: frozenset[str] = frozenset()
        self._descent = Archive()
        self._turns = list(space.groups.values())
        if order == "cost":
            self._turns.sort(key=lambda indices: -sum(space.dimensions[index].cost for index in indices))
        self._in_vain = 0
        self._part: SubspaceSearcher | None = None

    def tell(self, observation: Observation) -> None:
        self._archive.tell(observation)
        if observation.digest not in self._before:  # a re-measured incumbent of an earlier descent does not count
            self._descent.tell(observation)
        if self._part is not None:
            self._part.tell(observation)

    def _propose(self) -> Placement | None:
        """Return a proposal of the first pattern that has one, or None while pending outcomes may change the base."""
        part = self._part or self._start_block(self._base_placement(self._descent))
        while self._in_vain < len(self._turns):
            if self._left and (placement := self._propose_in_pattern(part)) is not None:
                self._left -= 1
                return placement
            if self._archive.pending:
                return None
            self._in_vain = self._in_vain + 1 if self._left == self._evaluations else 0
            self._turns.append(self._turns.pop(0))
            part = self._start_block(self._base_placement(self._descent))
        start = self._kick(self._base_placement(self._archive), self._flips)
        if start is not None:
            self._before = frozenset([*(entry.digest for entry in self._archive), *self._archive.failures])
            self._descent = Archive()
            self._in_vain = 0
            self._start_block(start)
        return start

    def _base_placement(self, archive: Archive) -> Placement:
        """Return the best placement of an archive, or of all descents if none of it could be measured."""
        best = archive.incumbents(1) or self._archive.incumbents(1)
        return best[0].placement if best else self._space.float_placement()

    def _start_block(self, base: Placement) -> SubspaceSearcher:
        """Start the search of the current pattern and tell its searcher all known outcomes that differ only there."""
        self._left = self._evaluations
        indices = self._turns[0] if self._turns else ()
        make = partial(self._make, seed=int(self._rng.integers(2**31)), **self._params)
        self._part = part = SubspaceSearcher(self._space, indices, base, make)
        for known in [*self._archive, *self._archive.failures.values()]:
            self._tell_known(part, known.placement)
        return part

    def _propose_in_pattern(self, part: SubspaceSearcher) -> Placement | None:
        for entry in self._archive.incumbents(MAX_EMBEDDED_PLACEMENTS):
            graft = part.embed(entry.placement)
            if self._is_new(graft):
                return graft
        for _ in range(MAX_ATTEMPTS):
            asked = part.ask(1)
            if not asked or self._is_new(asked[0]):
                return asked[0] if asked else None
            self._tell_known(part, asked[0])
        return None

    def _tell_known(self, part: SubspaceSearcher, placement: Placement) -> None:
        """Tell a pattern's searcher the outcome of a placement if it is known."""
        if (known := known_outcome(self._archive, placement, self._space.digest(placement))) is not None:
            part.tell(known)
