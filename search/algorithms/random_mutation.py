"""Random mutation of the best placements, the algorithm of ModelOpt's ONNX autotune.

It follows the user guide ("Autotune (ONNX)") and the source of ModelOpt 0.47; no code was copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

from search.api import Observation, Placement, Space, check_range
from search.archive import ArchiveEntry, ArchiveSearcher
from search.moves import mutate_per_kind

Scope = Literal["joint", "per_pattern"]


class RandomMutationSearcher(ArchiveSearcher):
    """Searcher that mutates one of the best placements, as ModelOpt does: add and remove 1 to 3 points of each kind.

    Scope "joint" mutates the whole model. Scope "per_pattern" is ModelOpt's procedure: one pattern after the other in
    graph order, those of COMPOSITE regions last. Each pattern has `schemes_per_pattern` turns on top of the committed
    schemes of earlier patterns, the first without any Q/DQ pair of its own; then its best scheme is committed
    permanently. Later patterns are float until then. Initial placements have the role of ModelOpt's pattern cache:
    their scheme for a pattern is tried first. Unlike in ModelOpt, a known scheme takes no turn, as it is not measured
    again.

    Args:
        space: Space to search.
        seed: Seed of all draws.
        scope: "joint" or "per_pattern".
        schemes_per_pattern: Number of turns of one pattern (ModelOpt: 30, or 200 in its mode "extensive"); no effect
            in scope "joint".
        top_share: Share of the measured placements, best first, that parents are drawn from.
        minimum_parents: Smallest number of placements that parents are drawn from, if there are as many.
        maximum_mutations: Largest number of additions, and of removals, for one kind of point.
        maximum_generation_attempts: Number of mutations tried for an unseen placement; if none is unseen, the pattern
            (in scope "joint" the search) ends.
    """

    def __init__(
        self,
        space: Space,
        *,
        seed: int,
        scope: Scope = "joint",
        schemes_per_pattern: int = 30,
        top_share: float = 0.1,
        minimum_parents: int = 10,
        maximum_mutations: int = 3,
        maximum_generation_attempts: int = 100,
    ) -> None:
        if scope not in get_args(Scope):
            raise ValueError(f"scope is one of {get_args(Scope)}, but got {scope!r}")
        check_range("schemes_per_pattern", schemes_per_pattern, 1)
        check_range("top_share", top_share, 0, 1)
        check_range("minimum_parents", minimum_parents, 1)
        check_range("maximum_mutations", maximum_mutations, 1)
        check_range("maximum_generation_attempts", maximum_generation_attempts, 1)
        super().__init__(space, seed)
        self._top_share = top_share
        self._minimum_parents = minimum_parents
        self._maximum_mutations = maximum_mutations
        self._attempts = maximum_generation_attempts
        self._foreign: set[str] = set()
        self._foreign_ranked: list[Placement] | None = None
        self._committed = space.float_placement()
        self._turns = [tuple(range(len(space)))]
        if scope == "per_pattern":  # in graph order, COMPOSITE patterns (with inputs of child regions) last
            kinds = [dimension.kind for dimension in space.dimensions]
            self._turns = sorted(
                space.groups.values(), key=lambda group: any(kinds[index] == "child_input" for index in group)
            )
        self._schemes = math.inf if scope == "joint" else schemes_per_pattern
        self._had = {space.digest(self._committed)}
        self._alike: set[str] = set()  # digests that equal the committed placement outside the current pattern

    def tell(self, observation: Observation) -> None:
        if observation.digest not in self._archive:
            self._foreign.add(observation.digest)
        if observation.digest in self._foreign:
            self._foreign_ranked = None
        self._archive.tell(observation)
        entry = self._archive.get(observation.digest)
        if entry is not None and self._matches_committed(entry):
            self._alike.add(entry.digest)

    def _propose(self) -> Placement | None:
        """Return a scheme of the current pattern, or of the next one that has any; None while outcomes are pending."""
        while self._turns:
            pool = self._parent_pool()
            if (placement := self._propose_in_pattern(pool)) is not None:
                self._had.add(self._space.digest(placement))
                return placement
            if self._archive.pending:
                return None
            self._committed = pool[0].placement if pool else self._committed
            self._had = {self._space.digest(self._committed)}
            del self._turns[0]
            if self._turns:
                self._alike = {entry.digest for entry in self._archive if self._matches_committed(entry)}
        return None

    def _propose_in_pattern(self, pool: Sequence[ArchiveEntry]) -> Placement | None:
        if not pool and self._is_new(self._committed):
            return self._committed
        if len(self._had) >= self._schemes:
            return None
        if self._foreign_ranked is None:  # placements from other sources, whose schemes are tried first
            ranked = self._archive.ranked
            self._foreign_ranked = [entry.placement for entry in ranked if entry.digest in self._foreign]
        foreign = filter(self._is_new, map(self._embed, self._foreign_ranked))
        if (placement := next(foreign, None)) is not None:
            return placement
        most = max(int(len(pool) * self._top_share), self._minimum_parents)
        parents = [entry.placement for entry in pool[:most]] or [self._committed]

        def mutate() -> Placement:
            parent = parents[int(self._rng.integers(len(parents)))]
            return mutate_per_kind(parent, self._space, self._rng, self._maximum_mutations, self._turns[0])

        return self._first_new(mutate, self._attempts)

    def _parent_pool(self) -> Sequence[ArchiveEntry]:
        """Return the measured placements that equal the committed one outside the current pattern, best first."""
        ranked = self._archive.ranked
        return ranked if len(self._alike) == len(ranked) else [entry for entry in ranked if entry.digest in self._alike]

    def _matches_committed(self, entry: ArchiveEntry) -> bool:
        return bool(self._turns) and self._embed(entry.placement) == entry.placement

    def _embed(self, placement: Placement) -> Placement:
        choices = list(self._committed.choices)
        for index in self._turns[0]:
            choices[index] = placement.choices[index]
        return Placement(tuple(choices))
