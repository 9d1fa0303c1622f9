"""Archive of a searcher: all proposed and observed placements, the scored ones ranked."""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

import numpy as np

from search.api import Failure, Observation, Placement, Score, Space
from search.moves import flip, random_with_density
from search.pareto import dominates, nsga_ranking


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

    Attributes:
        seen: All placements proposed or observed, by digest, in the order of their first appearance.
        failures: Outcomes of placements that failed and were never scored, by digest, in the order reported.
        pending: Placements that were proposed and have no outcome yet, by digest, in the order proposed.
    """

    def __init__(self) -> None:
        self.seen: dict[str, Placement] = {}
        self.failures: dict[str, Observation] = {}
        self.pending: dict[str, Placement] = {}
        self._scores: dict[str, list[Score]] = {}
        self._entries: dict[str, ArchiveEntry] = {}
        self._most_objectives = 1
        self._restart_rankings()

    def _restart_rankings(self) -> None:
        """Forget the rankings, which are otherwise extended by the entries that were scored since the last access."""
        self._ranked: list[ArchiveEntry] = []
        self._incumbents: list[ArchiveEntry] = []
        self._incumbents_of = (0, 1.0)  # number of incumbents and significance
        self._leaders: list[tuple[ArchiveEntry, int]] = []  # with the number of entries that precede each
        self._leaders_of = 0
        self._leaders_read = self._incumbents_read = 0

    def __contains__(self, digest: object) -> bool:
        return digest in self.seen

    def __len__(self) -> int:
        """Return the number of scored placements."""
        return len(self._entries)

    def __iter__(self) -> Iterator[ArchiveEntry]:
        """Iterate over the scored placements in the order of their first scores."""
        return iter(self._entries.values())

    def ask(self, n: int, propose: Callable[[], Placement | None], space: Space) -> list[Placement]:
        """Return up to n proposals, fewer if `propose` returns None.

        Each proposal is recorded before the next one is made and counts as seen from then on. `propose` must return
        unseen placements.
        """
        asked: list[Placement] = []
        while len(asked) < n and (placement := propose()) is not None:
            digest = space.digest(placement)
            self.pending[digest] = self.seen[digest] = placement
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
        digest, outcome = observation.digest, observation.outcome
        self.seen.setdefault(digest, observation.placement)
        self.pending.pop(digest, None)
        known = self._entries.get(digest)
        if isinstance(outcome, Failure):
            if known is None:
                self.failures[digest] = observation
            return
        self.failures.pop(digest, None)
        scores = self._scores.setdefault(digest, [])
        if outcome in scores:
            return
        scores.append(outcome)
        placement = known.placement if known else observation.placement
        score = _pool_scores(scores)
        self._entries[digest] = ArchiveEntry(placement=placement, digest=digest, score=score, tells=len(scores))
        if known or len(score.values) > self._most_objectives:
            self._restart_rankings()
        self._most_objectives = max(self._most_objectives, len(score.values))

    def get(self, digest: str) -> ArchiveEntry | None:
        """Return the scored placement with this digest, or None."""
        return self._entries.get(digest)

    @property
    def ranked(self) -> list[ArchiveEntry]:
        """Return all scored placements, best first by `Score.rank`; ties keep the order of their first scores.

        The list is the archive's own: do not change it; a later `tell` may.
        """
        for entry in islice(self, len(self._ranked), None):
            insort(self._ranked, entry, key=lambda known: known.score.rank)
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
            found += [group[index] for index in nsga_ranking(values, errors)]
        return tuple(found[:k])

    def _standing(self, entry: ArchiveEntry) -> tuple[float, bool, bool]:
        return entry.score.violation, entry.score.assumed, len(entry.score.values) < self._most_objectives

    def _leading_entries(self, k: int) -> list[ArchiveEntry]:
        """Return the entries that fewer than k others precede, in the order of their first scores.

        They contain the first k of `nsga_order` ("k-skyband", Papadias, Tao, Fu, Seeger 2005, "Progressive skyline
        computation in database systems", ACM TODS 30, section 5.4).
        """
        if self._leaders_of < k:
            self._leaders_of, self._leaders_read, self._leaders = k, 0, []

        def precedes(one: ArchiveEntry, other: ArchiveEntry) -> bool:
            first, second = self._standing(one), self._standing(other)
            noise = math.hypot(one.score.stderr, other.score.stderr)
            if first == second:
                return dominates(one.score.values, other.score.values, noise)
            return first < second

        for new in islice(self, self._leaders_read, None):
            above = sum(precedes(leader, new) for leader, _ in self._leaders)
            counted = [(leader, count + precedes(new, leader)) for leader, count in self._leaders]
            self._leaders = [pair for pair in [*counted, (new, above)] if pair[1] < self._leaders_of]
        self._leaders_read = len(self)
        return [entry for entry, _ in self._leaders]

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
        size = self._incumbents_of[0] if self._incumbents_of[1] == significance else 0
        if size < k:  # the first k do not depend on the rest, so a growing k starts over only when it has doubled
            size = max(k, 2 * size)
            self._incumbents, self._incumbents_of, self._incumbents_read = [], (size, significance), 0
        kept = self._incumbents
        for entry in islice(self, self._incumbents_read, None):
            beaten = (n for n, other in enumerate(kept) if improves(entry.score, other.score, significance))
            kept.insert(next(beaten, len(kept)), entry)
            del kept[size:]
        self._incumbents_read = len(self)
        return tuple(kept[:k])


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

    def _is_new(self, placement: Placement) -> bool:
        return self._space.digest(placement) not in self._archive

    def _first_new(self, make: Callable[[], Placement], attempts: int) -> Placement | None:
        """Return the first new one of up to `attempts` placements, or None if all are known."""
        made = (make() for _ in range(attempts))
        return next((placement for placement in made if self._is_new(placement)), None)

    def _neighbour(self, placement: Placement) -> Placement | None:
        """Return a new placement a few flips away, or None if 200 attempts find none.

        The number of flips is 1 with probability 1/2, 2 with probability 1/4, and so on.
        """
        return self._first_new(lambda: flip(placement, self._space, self._rng, int(self._rng.geometric(0.5))), 200)

    def _kick(self, placement: Placement, flips: int) -> Placement | None:
        """Return a placement `flips` flips away, a few more if that one is known, or None if no new one is found."""
        found = flip(placement, self._space, self._rng, flips)
        return found if self._is_new(found) else self._neighbour(found)

    def _random_placement(self) -> Placement:
        """Return a placement with a share of quantized points drawn uniformly from 0 to 1."""
        return random_with_density(self._space, self._rng, self._rng.random())


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
    errors_known = all(score.stderr > 0 for score in scores)
    weights = [score.stderr**-2 if errors_known else 1.0 for score in scores]
    total = sum(weights)

    def weighted_sum(values: Iterable[float]) -> float:
        return sum(weight * value for weight, value in zip(weights, values, strict=True))

    objective = weighted_sum(score.objective for score in scores) / total
    if errors_known:
        chi2 = weighted_sum((score.objective - objective) ** 2 for score in scores)
        stderr = total**-0.5 * max(1.0, math.sqrt(chi2 / (len(scores) - 1)))
    else:
        scatter = statistics.stdev(score.objective for score in scores)
        stderr = max(scatter, *(score.stderr for score in scores)) / math.sqrt(len(scores))
    objectives = scores[-1].objectives  # the latest if their number differs
    if len({len(score.objectives) for score in scores}) == 1:
        columns = zip(*(score.objectives for score in scores), strict=True)
        objectives = tuple(weighted_sum(values) / total for values in columns)
    return Score(
        objective=objective,
        stderr=stderr,
        violation=weighted_sum(score.violation for score in scores) / total,
        assumed=not checked,
        metrics=scores[-1].metrics,
        objectives=objectives,
    )
