"""Default searcher: expert placements, then moves of blocks and their combinations, chosen by a model of latency."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from operator import ne

import numpy as np

from search.acquisition import SurrogateModel
from search.api import Placement, Space, check_range
from search.archive import ArchiveSearcher
from search.fixed_placements import expert_placements
from search.moves import assign, crossover_by_group, flip, move_sets, singletons

Move = tuple[tuple[int, ...], int]
"""Dimensions and the choice that all of them get."""

MAX_BASES = 4
"""Largest number of placements that candidates are made from."""
MAX_PAIRED_MOVES = 9
"""Number of best moves that are combined in pairs."""
MAX_CUMULATIVE_MOVES = 12
"""Largest number of moves that are applied one on top of the other."""


class AutoSearcher(ArchiveSearcher):
    """Searcher that starts from expert placements and continues with a surrogate model of latency; the default.

    The search begins with the expert placements that are new (`search.fixed_placements`). Every later proposal is the
    candidate with the largest expected improvement (`search.acquisition`), from two rounds of candidates:

    1. Moves from several good placements that differ from each other: blocks across patterns (a role, the readers of
       its results), blocks within a pattern, and single points; also crossovers of patterns, flips of two to four
       points, and random sets of blocks and of points.
    2. The most promising moves combined: in pairs, and cumulatively in the order of their expected gain. With a
       constraint, also moves to float from the fastest violating placement, cumulatively in the order of violation
       removed per increase of latency, and moves to a quantized precision from the best placement in the order of
       latency saved per increase of the violation.

    With several objectives, the best placements are those of `search.archive.Archive.nsga_order`.

    Args:
        space: Space to search.
        seed: Seed of all draws.
        rules: Number of expert placements tried before the model decides.
        surrogate: Whether a model chooses among the candidates. If not, moves from the best placements are proposed in
            a fixed order, coarse ones first.
        blocks: Whether blocks are moved; if not, only single points.
        candidates: Number of candidates compared in the first round.
    """

    def __init__(
        self,
        space: Space,
        *,
        seed: int,
        rules: int = 4,
        surrogate: bool = True,
        blocks: bool = True,
        candidates: int = 240,
    ) -> None:
        check_range("rules", rules, 0)
        check_range("candidates", candidates, 20)
        super().__init__(space, seed)
        self._candidates = candidates
        self._advisor = SurrogateModel(space) if surrogate else None
        sets = move_sets(space) if blocks else ((), (), singletons(space))
        self._wide, self._narrow, self._points = (
            [(indices, choice) for indices in own for choice in range(max(space.sizes[i] for i in indices))]
            for own in sets
        )
        self._expert = list(expert_placements(space))[:rules]

    def _propose(self) -> Placement | None:
        while self._expert:
            placement = self._expert.pop(0)
            if self._is_new(placement) and not self._is_dominated_by_violation(placement):
                return placement
        if not len(self._archive):
            return self._neighbour(self._space.quantize_roles({"linear"}))
        found = self._first_new_move() if self._advisor is None else self._propose_by_acquisition(self._advisor)
        return found or self._neighbour(self._archive.best(1)[0].placement)

    def _is_dominated_by_violation(self, placement: Placement) -> bool:
        """Return whether a placement quantizes everything that a violating placement quantizes.

        False unless the float model is known to be feasible: otherwise the constraint may be one that more Q/DQ pairs
        help to satisfy, such as a bound on latency.
        """
        unquantized = self._archive.get(self._space.digest(self._space.float_placement()))
        if unquantized is None or unquantized.score.violation > 0:
            return False
        broken = [entry.placement.choices for entry in self._archive if entry.score.violation > 0]
        return any(all(a == b for a, b in zip(known, placement.choices, strict=True) if a) for known in broken)

    def _first_new_move(self) -> Placement | None:
        for entry in self._archive.base_entries(MAX_BASES):
            for move in (*self._wide, *self._narrow, *self._points):
                placement = self._apply(entry.placement, move)
                if self._is_new(placement):
                    return placement
        return None

    def _propose_by_acquisition(self, advisor: SurrogateModel) -> Placement | None:
        advisor.fit(self._archive)
        # With several objectives, the base is drawn from the least crowded placements of the front.
        leaders = self._archive.base_entries(MAX_BASES)
        place = int(self._rng.integers(len(leaders))) if self._archive.is_multi_objective else 0
        base = leaders[place].placement
        moves = self._sample_moves(self._candidates // 2)
        near = {move: self._apply(base, move) for move in moves}
        first = list(dict.fromkeys([*near.values(), *self._random_candidates()]))
        advice = advisor.score(first)
        gains = dict(zip(first, advice.acquisition, strict=True))
        best_moves = sorted(moves, key=lambda move: -gains[near[move]])
        second = list(dict.fromkeys(self._combination_candidates(base, best_moves[:MAX_PAIRED_MOVES], advisor)))
        pool = [(first, advice), (second, advisor.score(second))] if second else [(first, advice)]
        fresh: list[tuple[float, Placement]] = []
        for candidates, advice in pool:
            if (index := advice.best_new_index(advisor.known)) is not None:
                fresh.append((round(float(advice.acquisition[index]), 12), candidates[index]))
        return max(fresh, key=lambda pair: pair[0])[1] if fresh else None

    def _sample_moves(self, count: int) -> list[Move]:
        """Return the moves across patterns and a random sample of the others: `count` moves, or up to half more."""
        others = (*self._narrow, *self._points)
        kept = self._rng.permutation(len(others))[: max(count - len(self._wide), count // 2)]
        return [*self._wide[:count], *(others[index] for index in sorted(kept))]

    def _random_candidates(self) -> Iterator[Placement]:
        """Yield candidates other than single moves from the best placement.

        They are moves from other good placements, crossovers with these, random sets of blocks, flips of several points
        and random placements. If an operator gains only when several of its points change together, no sequence of
        improving single moves finds that.
        """
        bases: list[Placement] = []  # they differ from each other by more than a tenth of the points
        for entry in self._archive.base_entries(6 * MAX_BASES):
            apart = (sum(map(ne, entry.placement.choices, other.choices)) for other in bases)
            if all(distance > 0.1 * len(self._space) for distance in apart):
                bases.append(entry.placement)
        del bases[MAX_BASES:]
        room = self._candidates // 2
        for base in bases[1:]:
            for move in self._sample_moves(room // (2 * MAX_BASES)):
                yield self._apply(base, move)
            for _ in range(room // (8 * MAX_BASES)):
                yield crossover_by_group(bases[0], base, self._space, self._rng)
        for _ in range(room // 4 if self._wide else 0):
            placement = self._space.float_placement()
            for index in self._rng.permutation(len(self._wide))[: int(self._rng.integers(1, 6))]:
                placement = self._apply(placement, self._wide[index])
            yield placement
        for _ in range(room // 4):
            parent = bases[int(self._rng.integers(len(bases)))]
            yield flip(parent, self._space, self._rng, int(self._rng.integers(2, 5)))
            yield self._random_placement()

    def _apply(self, base: Placement, move: Move) -> Placement:
        return assign(base, *move, space=self._space)

    def _combination_candidates(
        self, base: Placement, moves: Sequence[Move], advisor: SurrogateModel
    ) -> Iterator[Placement]:
        for first, second in combinations(moves, 2):
            yield self._apply(self._apply(base, first), second)
        yield from self._cumulative_moves(base, moves)
        broken = [entry for entry in self._archive if entry.score.violation > 0] if advisor.constrained else []
        if broken:
            fastest = min(broken, key=lambda entry: entry.score.objective).placement
            yield from self._cumulative_moves(fastest, self._order_by_exchange_rate(fastest, advisor, back=True))
            yield from self._cumulative_moves(base, self._order_by_exchange_rate(base, advisor, back=False))

    def _order_by_exchange_rate(self, base: Placement, advisor: SurrogateModel, *, back: bool) -> list[Move]:
        """Return moves with their best exchange of latency for violation first.

        Args:
            base: Placement that the moves start from.
            advisor: Fitted models.
            back: True: moves to float, by violation removed per increase of latency. False: moves to a quantized
                precision, by latency saved per increase of the violation.
        """
        moves = [move for move in self._sample_moves(self._candidates // 4) if (move[1] == 0) == back]
        advice = advisor.score([base, *(self._apply(base, move) for move in moves)])
        slower = advice.objective[1:] - advice.objective[0]
        worse = advice.violation[1:] - advice.violation[0]
        spent, bought = (slower, -worse) if back else (worse, -slower)
        scale = max(float(np.abs(spent).max(initial=0.0)), 1e-12)
        rates = np.round(bought / np.maximum(spent, 1e-2 * scale), 9)
        return [moves[index] for index in np.argsort(-rates, kind="stable") if bought[index] > 0]

    def _cumulative_moves(self, base: Placement, moves: Sequence[Move]) -> Iterator[Placement]:
        """Yield placements that apply the moves cumulatively, without moves of points that an earlier move changed."""
        touched: set[int] = set()
        rungs = 0
        for indices, choice in moves:
            if touched.isdisjoint(indices) and rungs < MAX_CUMULATIVE_MOVES:
                touched.update(indices)
                rungs += 1
                base = self._apply(base, (indices, choice))
                yield base
