"""Archive of a searcher: all proposed and observed placements, the scored ones ranked."""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from search.api import Failure, Observation, Placement, Score, Space
from search.pareto import dominates, nsga_ranking

__all__ = ["Archive", "ArchiveEntry", "ArchiveSearcher", "improves"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveEntry:
    """Scored placement.

    Attributes:
        score: Pooled score, see `Archive.tell`; its metrics are the latest ones.
        tells: Number of different scores pooled in `score`.
    """

    placement: Placement
    digest: str
    score: Score
    tells: int = 1


class Archive:
    """All placements that a searcher proposed or observed, by digest.

    Example::

        archive = Archive()
        archive.tell(observation)
        asked = archive.ask(n, lambda: flip(archive.best(1)[0].placement, space, rng), space)
        parents = archive.best(10)
    """

    def __init__(self) -> None:
        self._seen: dict[str, Placement] = {}
        self._scores: dict[str, list[Score]] = {}
        self._entries: dict[str, ArchiveEntry] = {}
        self._failures: dict[str, Observation] = {}
        self._pending: dict[str, Placement] = {}
        self._positions: dict[str, int] = {}  # digest: number of placements that were scored earlier
        self._ranked: list[ArchiveEntry] = []
        self._unranked: list[ArchiveEntry] = []  # not yet in `_ranked`; many searchers never read it
        self._incumbents: tuple[int, float, list[ArchiveEntry]] | None = None  # of the last k and significance
        self._leaders: tuple[int, list[list[Any]]] | None = (
            None  # of the last k of `nsga_order`, see `_leading_entries`
        )
        self._most_objectives = 1

    def __contains__(self, digest: object) -> bool:
        return digest in self._seen

    def __len__(self) -> int:
        """Return the number of scored placements."""
        return len(self._entries)

    def __iter__(self) -> Iterator[ArchiveEntry]:
        """Iterate over the scored placements in the order of their first scores."""
        return iter(self._entries.values())

    def ask(self, n: int, propose: Callable[[], Placement | None], space: Space) -> list[Placement]:
        """Return up to n proposals, fewer if `propose` returns None.

        Each proposal is recorded before the next one is made and counts as seen from then on. `propose` must return
        unseen placements, see `search.moves.first_unseen`.
        """
        asked: list[Placement] = []
        while len(asked) < n and (placement := propose()) is not None:
            digest = space.digest(placement)
            self._pending[digest] = self._seen[digest] = placement
            asked.append(placement)
        return asked

    def tell(self, observation: Observation) -> None:
        """Record one outcome.

        Repeated scores of a placement are averaged. If all have a standard error, they are weighted by its inverse
        square, and the error of the mean is widened by the Birge ratio if they disagree by more than their errors
        explain (Birge 1932, Phys. Rev. 40, 207), as rebuilds of one engine do. If an error is unknown, the error of the
        mean comes from the scatter. An equal score is a repeated report of one measurement and changes nothing. A score
        replaces a failure; a later failure does not replace a score.
        """
        digest = observation.digest
        self._seen.setdefault(digest, observation.placement)
        self._pending.pop(digest, None)
        if isinstance(observation.outcome, Failure):
            if digest not in self._entries:
                self._failures[digest] = observation
            return
        self._failures.pop(digest, None)
        scores = self._scores.setdefault(digest, [])
        if observation.outcome in scores:
            return
        scores.append(observation.outcome)
        known = self._entries.get(digest)
        self._entries[digest] = entry = ArchiveEntry(
            placement=known.placement if known else observation.placement,
            digest=digest,
            score=_pool_scores(scores),
            tells=len(scores),
        )
        self._positions.setdefault(digest, len(self._positions))
        if known or len(entry.score.values) > self._most_objectives:
            self._leaders = None
        self._most_objectives = max(self._most_objectives, len(entry.score.values))
        if self._leaders is not None:
            self._insert_leader(*self._leaders, entry)
        if known:
            ranked = self.ranked
            del ranked[bisect_left(ranked, self._rank(known), key=self._rank)]
            self._incumbents = None
        self._unranked.append(entry)
        if self._incumbents is not None:
            _insert_incumbent(self._incumbents[2], entry, *self._incumbents[:2])

    def _rank(self, entry: ArchiveEntry) -> tuple[tuple[float, bool, float], int]:
        return entry.score.rank, self._positions[entry.digest]

    def get(self, digest: str) -> ArchiveEntry | None:
        """Return the scored placement with this digest, or None."""
        return self._entries.get(digest)

    @property
    def seen(self) -> Mapping[str, Placement]:
        """Return all placements proposed or observed, by digest, in the order of their first appearance."""
        return self._seen

    @property
    def failures(self) -> Mapping[str, Observation]:
        """Return the outcomes of placements that failed and were never scored, by digest, in the order reported."""
        return self._failures

    @property
    def pending(self) -> Mapping[str, Placement]:
        """Return the placements that were proposed and have no outcome yet, by digest, in the order proposed."""
        return self._pending

    @property
    def ranked(self) -> list[ArchiveEntry]:
        """Return all scored placements, best first by `Score.rank`; ties keep the order of their first scores.

        The list is the archive's own: do not change it; a later `tell` may.
        """
        for entry in self._unranked:
            insort(self._ranked, entry, key=self._rank)
        self._unranked.clear()
        return self._ranked

    def best(self, k: int) -> tuple[ArchiveEntry, ...]:
        """Return the k best scored placements, or as many as there are."""
        return tuple(self.ranked[:k])

    @property
    def is_multi_objective(self) -> bool:
        """Return whether some score has more than one objective."""
        return self._most_objectives > 1

    def nsga_order(self, k: int) -> tuple[ArchiveEntry, ...]:
        """Return up to k scored placements by violation, then front by front, least crowded first within a front.

        Among scores of equal violation, those with fewer objectives than others come last.
        """
        found: list[ArchiveEntry] = []
        for _, alike in groupby(sorted(self._leading_entries(k), key=self._standing), key=self._standing):
            group = list(alike)
            values = np.array([entry.score.values for entry in group])
            errors = np.array([entry.score.stderr for entry in group])
            found += [group[index] for index in nsga_ranking(values, errors, k)]
            if len(found) >= k:
                break
        return tuple(found[:k])

    def _standing(self, entry: ArchiveEntry) -> tuple[float, bool, bool]:
        return entry.score.violation, entry.score.assumed, len(entry.score.values) < self._most_objectives

    def _leading_entries(self, k: int) -> list[ArchiveEntry]:
        """Return the entries that fewer than k others precede, in the order of their first scores.

        They contain the first k of `nsga_order` ("k-skyband", Papadias, Tao, Fu, Seeger 2005, "Progressive skyline
        computation in database systems", ACM TODS 30, section 5.4).
        """
        if self._leaders is None or self._leaders[0] < k:
            self._leaders = (k, [])  # `tell` updates it from then on
            for entry in self:
                self._insert_leader(*self._leaders, entry)
        return [entry for entry, _ in self._leaders[1]]

    def _insert_leader(self, k: int, leaders: list[list[Any]], new: ArchiveEntry) -> None:
        above = 0
        for leader in leaders:
            if self._precedes(leader[0], new):
                above += 1
            elif self._precedes(new, leader[0]):
                leader[1] += 1
        leaders[:] = [leader for leader in leaders if leader[1] < k]
        if above < k:
            leaders.append([new, above])

    def _precedes(self, one: ArchiveEntry, other: ArchiveEntry) -> bool:
        first, second = self._standing(one), self._standing(other)
        if first != second:
            return first < second
        noise = math.hypot(one.score.stderr, other.score.stderr)
        return dominates(one.score.values, other.score.values, noise)

    def base_entries(self, k: int) -> tuple[ArchiveEntry, ...]:
        """Return the placements to continue from: the k best, or `nsga_order(k)` with several objectives."""
        return self.nsga_order(k) if self.is_multi_objective else self.best(k)

    def incumbents(self, k: int, significance: float = 1.0) -> tuple[ArchiveEntry, ...]:
        """Return up to k scored placements, best first; differences within the noise are ties.

        In the order of their first scores, each placement is inserted before the first one that it beats by more than
        the noise (`improves`), else appended. So a score that is low by chance does not displace an earlier, equal
        placement.

        Args:
            k: Largest number of placements.
            significance: Number of combined standard errors that count as noise.
        """
        kept = self._incumbents
        if kept is None or kept[1] != significance or kept[0] < k:
            # The first k do not depend on the rest, so a growing k starts over only when it has doubled.
            size = max(k, 2 * kept[0]) if kept is not None and kept[1] == significance else k
            self._incumbents = kept = (size, significance, [])  # `tell` updates it from then on
            for entry in self:
                _insert_incumbent(kept[2], entry, size, significance)
        return tuple(kept[2][:k])


def _insert_incumbent(standing: list[ArchiveEntry], entry: ArchiveEntry, k: int, significance: float) -> None:
    beaten = (n for n, other in enumerate(standing) if improves(entry.score, other.score, significance))
    place = next(beaten, len(standing))
    if place < k:
        standing[place:] = [entry, *standing[place : k - 1]]


class ArchiveSearcher(ABC):
    """Base class of searchers that propose one placement at a time from an archive.

    Args:
        space: Space to search.
        seed: Seed of all draws.
    """

    def __init__(self, space: Space, seed: int) -> None:
        self._space = space
        self._rng = np.random.default_rng(seed)
        self._archive = Archive()

    def ask(self, n: int) -> Sequence[Placement]:
        """Return up to n placements to evaluate next; empty if there is none, or none until an outcome arrives."""
        return self._archive.ask(n, self._propose, self._space)

    def tell(self, observation: Observation) -> None:
        """Record the outcome of one placement."""
        self._archive.tell(observation)

    @abstractmethod
    def _propose(self) -> Placement | None:
        """Return an unseen placement, or None if there is none until an outcome arrives."""


def improves(new: Score, old: Score, significance: float = 1.0) -> bool:
    """Return whether `new` beats `old` by more than the noise; a tie is no improvement.

    Args:
        new: Score of the challenger.
        old: Score of the incumbent.
        significance: Number of combined standard errors that the objective must gain.
    """
    if (new.violation, new.assumed) != (old.violation, old.assumed):
        return (new.violation, new.assumed) < (old.violation, old.assumed)
    return old.objective - new.objective > significance * math.hypot(new.stderr, old.stderr)


def _pool_scores(scores: list[Score]) -> Score:
    checked = [score for score in scores if not score.assumed]
    scores = checked or scores  # one check of the constraint is enough
    if len(scores) == 1:
        return scores[0]
    weights = [1.0] * len(scores)
    errors_known = all(score.stderr > 0 for score in scores)
    stderr = 0.0 if errors_known else _stderr_of_mean(scores)
    if errors_known:
        weights = [score.stderr**-2 for score in scores]
        stderr = sum(weights) ** -0.5
    total = sum(weights)
    objective = sum(w * score.objective for w, score in zip(weights, scores, strict=True)) / total
    if errors_known:
        chi2 = sum(w * (score.objective - objective) ** 2 for w, score in zip(weights, scores, strict=True))
        stderr *= max(1.0, math.sqrt(chi2 / (len(scores) - 1)))
    return Score(
        objective=objective,
        stderr=stderr,
        violation=sum(w * score.violation for w, score in zip(weights, scores, strict=True)) / total,
        assumed=not checked,
        metrics=scores[-1].metrics,
        objectives=_pool_objectives(scores, weights),
    )


def _stderr_of_mean(scores: list[Score]) -> float:
    """Return the standard error of the mean from the larger of scatter and largest known error."""
    scatter = statistics.stdev(score.objective for score in scores)
    return max(scatter, *(score.stderr for score in scores)) / math.sqrt(len(scores))


def _pool_objectives(scores: list[Score], weights: list[float]) -> tuple[float, ...]:
    """Return the weighted mean of each objective, or the latest objectives if their number differs."""
    if len({len(score.objectives) for score in scores}) > 1:
        return scores[-1].objectives
    total = sum(weights)
    columns = zip(*(score.objectives for score in scores), strict=True)
    return tuple(sum(w * v for w, v in zip(weights, values, strict=True)) / total for values in columns)
