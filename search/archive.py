"""Archive of a searcher: every placement asked or told, the scored ones best first."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from search.api import Failure, Observation, Placement, Score, Space
from search.pareto import nsga_ranking

__all__ = ["Archive", "ArchiveEntry", "improves"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveEntry:
    """One scored placement.

    Attributes:
        score: Mean over the tells, see `Archive.tell`; the metrics are those told last.
        tells: How many different scores were told.
    """

    placement: Placement
    digest: str
    score: Score
    tells: int = 1


class Archive:
    """Observations by digest.

    Example::

        archive = Archive()
        archive.tell(observation)
        asked = archive.ask(n, lambda: flip(archive.best(1)[0].placement, space, rng), space)
        parents = archive.best(10)
    """

    def __init__(self) -> None:
        self._told: dict[str, list[Score]] = {}
        self._entries: dict[str, ArchiveEntry] = {}
        self._failures: dict[str, Observation] = {}
        self._pending: dict[str, Placement] = {}
        self._ranked: tuple[ArchiveEntry, ...] | None = None

    def __contains__(self, digest: object) -> bool:
        return digest in self._entries or digest in self._failures or digest in self._pending

    def __len__(self) -> int:
        """Number of scored placements."""
        return len(self._entries)

    def __iter__(self) -> Iterator[ArchiveEntry]:
        """The scored placements in the order of their first tells."""
        return iter(self._entries.values())

    def ask(self, n: int, propose: Callable[[], Placement | None], space: Space) -> list[Placement]:
        """Up to n proposals, fewer where there are no more (None); each is noted before the next one is made.

        A proposal counts as seen from now on, before and after its outcome is told. To propose nothing that is known is
        up to `propose`, see `search.moves.unseen`.
        """
        asked: list[Placement] = []
        while len(asked) < n and (placement := propose()) is not None:
            self._pending[space.digest(placement)] = placement
            asked.append(placement)
        return asked

    def tell(self, observation: Observation) -> None:
        """Learn one outcome.

        A placement told again gets the mean of what was told. Scores that all have a standard error
        are weighted by its inverse square; the error of their mean is then widened by the Birge ratio
        where they disagree by more than their errors explain (Birge 1932, Phys. Rev. 40, 207), as
        rebuilds of one engine do. Where an error is not known, that of the mean comes from their scatter.
        An equal score is the same measurement told twice and changes nothing. A score replaces a failure;
        a later failure leaves a score standing.
        """
        digest = observation.digest
        self._pending.pop(digest, None)
        if isinstance(observation.outcome, Failure):
            if digest not in self._entries:
                self._failures[digest] = observation
            return
        self._failures.pop(digest, None)
        told = self._told.setdefault(digest, [])
        if observation.outcome in told:
            return
        told.append(observation.outcome)
        known = self._entries.get(digest)
        self._entries[digest] = ArchiveEntry(
            placement=known.placement if known else observation.placement,
            digest=digest,
            score=_pool_scores(told),
            tells=len(told),
        )
        self._ranked = None

    def get(self, digest: str) -> ArchiveEntry | None:
        """The scored placement with this digest, or None."""
        return self._entries.get(digest)

    @property
    def failures(self) -> Mapping[str, Observation]:
        """Placements that failed and were never scored, by digest, in the order of the tells."""
        return self._failures

    @property
    def pending(self) -> Mapping[str, Placement]:
        """What was asked and not yet told, by digest, in the order of the asks."""
        return self._pending

    @property
    def ranked(self) -> tuple[ArchiveEntry, ...]:
        """All scored placements, best first by `Score.rank`; equals stay in the order of the tells."""
        if self._ranked is None:
            self._ranked = tuple(sorted(self._entries.values(), key=lambda entry: entry.score.rank))
        return self._ranked

    def best(self, k: int) -> tuple[ArchiveEntry, ...]:
        """The k best scored placements, or as many as there are."""
        return self.ranked[:k]

    @property
    def is_multi_objective(self) -> bool:
        """Whether a front is searched: some score has more than one objective."""
        return any(len(entry.score.values) > 1 for entry in self)

    def nsga_order(self, k: int) -> tuple[ArchiveEntry, ...]:
        """Up to k scored placements: by violation, then front by front, and on each front the lonelier first.

        What has fewer objectives than others have stands behind its like: one of its coordinates is not known.
        """
        most = max((len(entry.score.values) for entry in self), default=1)

        def standing(entry: ArchiveEntry) -> tuple[float, bool, bool]:
            return entry.score.violation, entry.score.assumed, len(entry.score.values) < most

        found: list[ArchiveEntry] = []
        for _, alike in groupby(sorted(self, key=standing), key=standing):
            group = list(alike)
            values = np.array([entry.score.values for entry in group])
            errors = np.array([entry.score.stderr for entry in group])
            found += [group[index] for index in nsga_ranking(values, errors, k)]
            if len(found) >= k:
                break
        return tuple(found[:k])

    def base_entries(self, k: int) -> tuple[ArchiveEntry, ...]:
        """What to go on from: the k best, or where a front is searched those of `spread`."""
        return self.nsga_order(k) if self.is_multi_objective else self.best(k)

    def incumbents(self, k: int, significance: float = 1.0) -> tuple[ArchiveEntry, ...]:
        """Up to k scored placements, best first, where ties are ties.

        In the order of their first tells, each goes before the first that it beats by more than the noise
        (`improves`), else to the end: so no lucky reading displaces an equal that was there before.
        """
        standing: list[ArchiveEntry] = []
        for entry in self:
            beaten = (n for n, other in enumerate(standing) if improves(entry.score, other.score, significance))
            place = next(beaten, len(standing))
            if place < k:
                standing[place:] = [entry, *standing[place : k - 1]]
        return tuple(standing)


def improves(new: Score, old: Score, significance: float = 1.0) -> bool:
    """Whether `new` beats `old` by more than the noise; a tie is no improvement.

    Args:
        new: The challenger.
        old: What it has to beat.
        significance: How many combined standard errors the objective has to gain.
    """
    if (new.violation, new.assumed) != (old.violation, old.assumed):
        return (new.violation, new.assumed) < (old.violation, old.assumed)
    return old.objective - new.objective > significance * math.hypot(new.stderr, old.stderr)


def _pool_scores(told: list[Score]) -> Score:
    looked_at = [score for score in told if not score.assumed]
    told = looked_at or told  # what was looked at once is known
    if len(told) == 1:
        return told[0]
    weights = [1.0] * len(told)
    errors_known = all(score.stderr > 0 for score in told)
    stderr = 0.0 if errors_known else _stderr_of_mean(told)
    if errors_known:
        weights = [score.stderr**-2 for score in told]
        stderr = sum(weights) ** -0.5
    total = sum(weights)
    objective = sum(w * score.objective for w, score in zip(weights, told, strict=True)) / total
    if errors_known:
        chi2 = sum(w * (score.objective - objective) ** 2 for w, score in zip(weights, told, strict=True))
        stderr *= max(1.0, math.sqrt(chi2 / (len(told) - 1)))
    return Score(
        objective=objective,
        stderr=stderr,
        violation=sum(w * score.violation for w, score in zip(weights, told, strict=True)) / total,
        assumed=not looked_at,
        metrics=told[-1].metrics,
        objectives=_pool_objectives(told, weights),
    )


def _stderr_of_mean(told: list[Score]) -> float:
    """From the scatter of what was told, and no less than the errors that are known give."""
    scatter = statistics.stdev(score.objective for score in told)
    return max(scatter, *(score.stderr for score in told)) / math.sqrt(len(told))


def _pool_objectives(told: list[Score], weights: list[float]) -> tuple[float, ...]:
    """Their weighted mean, one by one; the latest where not all scores have as many."""
    if len({len(score.objectives) for score in told}) > 1:
        return told[-1].objectives
    total = sum(weights)
    columns = zip(*(score.objectives for score in told), strict=True)
    return tuple(sum(w * v for w, v in zip(weights, values, strict=True)) / total for values in columns)
