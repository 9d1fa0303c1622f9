"""The loop of one search: ask, build, sample, score, journal, tell. Resuming is running it again.

The journal's lines are an input of the loop: where the next proposal is already there with its
outcome, the outcome is told instead of measured. A searcher that proposes something else than it
did before is refused, so a resumed run is the run it would have been.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from harness.api import Candidate
from harness.errors import UserError
from harness.measure.stats import Interval, median_ci, stderr_of_median
from harness.records import Asked, Failed, Measured, Outcome, Told
from harness.run.journal import Entry, Journal
from search.api import Failure, Observation, Score, Searcher
from search.space import Placement, Space

__all__ = ["Attempt", "Goal", "SearchTask", "Seed", "Trial", "eligible", "run_search", "score_of"]

DUPLICATES_IN_A_ROW = 200
"""A searcher that proposes known placements so often in a row has nothing left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seed:
    """A placement that every searcher is told before its first proposal."""

    name: str
    placement: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What counts as better: latency alone, or latency among those that keep the accuracy.

    Attributes:
        metric: Name of the bounded metric; None: latency alone.
        reference: The float model's value of it.
        higher_is_better: Direction of the metric.
        max_drop: Largest allowed loss, in the metric's unit.
    """

    metric: str | None = None
    reference: float = 0.0
    higher_is_better: bool = True
    max_drop: float = 0.0

    def violation(self, metrics: Mapping[str, float]) -> float:
        """By how much the loss exceeds the bound; 0 where it holds or was not looked at."""
        if self.metric is None or self.metric not in metrics:
            return 0.0
        drop = self.reference - metrics[self.metric]
        return max(0.0, (drop if self.higher_is_better else -drop) - self.max_drop)


Attempt = Callable[[Candidate, Interval | None], Outcome]
"""Builds, samples and scores a candidate, as far as it can beat the incumbent's latency in ms (None: nobody's)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTask:
    """Everything that defines one search; the same task gives the same asks for the same outcomes.

    Attributes:
        candidate: Makes the candidate of a placement (its model is written only when asked for).
        evaluations: Budget: unique placements attempted, failures and seeds included.
        seconds: Wall-clock budget, counted apart; None: no limit.
    """

    space: Space
    searcher: Searcher
    seeds: tuple[Seed, ...]
    candidate: Callable[[Placement], Candidate]
    goal: Goal = field(default_factory=Goal)
    evaluations: int
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One line for whoever watches.

    Attributes:
        evaluations: Spent so far, this one included.
        best_ms: Latency of the incumbent; None while there is none.
        resumed: The outcome was known: from the journal, or of an earlier proposal of the same graph.
    """

    asked: Asked
    outcome: Outcome
    evaluations: int
    best_ms: float | None
    resumed: bool


def score_of(outcome: Outcome, goal: Goal) -> Score | Failure:
    """The outcome as searchers see it."""
    if isinstance(outcome, Failed):
        return Failure(stage=outcome.stage, reason=outcome.reason)
    return Score(
        objective=median_ci(outcome.samples_ms).value,
        stderr=stderr_of_median(outcome.samples_ms),
        violation=goal.violation(outcome.metrics),
        assumed=goal.metric is not None and goal.metric not in outcome.metrics,
        metrics=dict(outcome.metrics),
    )


def eligible(score: Score) -> bool:
    """Whether a score may be the incumbent's: where accuracy is bounded, it was looked at and holds."""
    return score.violation == 0.0 and not score.assumed


def run_search(task: SearchTask, attempt: Attempt, journal: Journal, watch: Callable[[Trial], None]) -> None:
    """Run a search until its budget is spent or its searcher has nothing left.

    Raises:
        UserError: The journal's next proposal is not the one that the searcher makes now, the journal
            cannot be written, or none of the seeds could be measured (the first reason is given).
    """
    _Search(task, attempt, journal, watch).run()


class _Search:
    """State of a running search: what was seen, the incumbent, the clock."""

    def __init__(self, task: SearchTask, attempt: Attempt, journal: Journal, watch: Callable[[Trial], None]) -> None:
        self._task = task
        self._attempt = attempt
        self._journal = journal
        self._watch = watch
        self._seen: dict[str, Told] = {}
        self._best: Interval | None = None
        before = [entry.told.elapsed_s for entry in journal.entries if entry.told is not None]
        self._spent_s = max(before, default=0.0)
        self._started_s = time.monotonic()

    def run(self) -> None:
        duplicates_in_a_row = 0
        for number, (placement, origin) in enumerate(self._proposals()):
            if self._over() or duplicates_in_a_row >= DUPLICATES_IN_A_ROW:
                return
            asked = self._ask(number, placement, origin)
            duplicates_in_a_row = 0 if asked.duplicate_of is None else duplicates_in_a_row + 1
            self._tell(asked, placement)

    def _proposals(self) -> Iterator[tuple[Placement, str]]:
        for seed in self._task.seeds:
            yield seed.placement, f"seed:{seed.name}"
        self._check_start()
        while proposal := self._task.searcher.ask(1):
            yield self._task.space.validate(proposal[0]), "searcher"

    def _check_start(self) -> None:
        failures = [told.outcome for told in self._seen.values() if isinstance(told.outcome, Failed)]
        if failures and len(failures) == len(self._seen):
            first = failures[0]
            raise UserError(
                f"no seed could be measured, so the search stops; {first.stage}: {first.reason}\n{first.log_tail}"
            )

    def _over(self) -> bool:
        seconds = self._task.seconds
        return len(self._seen) >= self._task.evaluations or (seconds is not None and self._elapsed_s() >= seconds)

    def _elapsed_s(self) -> float:
        return self._spent_s + time.monotonic() - self._started_s

    def _ask(self, number: int, placement: Placement, origin: str) -> Asked:
        digest = self._task.space.digest(placement)
        earlier = self._seen.get(digest)
        asked = Asked(
            number=number,
            choices=placement.choices,
            digest=digest,
            origin=origin,
            duplicate_of=None if earlier is None else earlier.number,
        )
        recorded = self._recorded(number)
        if recorded is None:
            self._journal.append(asked)
        elif recorded.asked != asked:
            raise UserError(
                f"resume refused at proposal {number}: the journal has {recorded.asked.digest} "
                f"({recorded.asked.origin}), the searcher now proposes {digest} ({origin}); its code or a library "
                "changed: use another --out"
            )
        return asked

    def _tell(self, asked: Asked, placement: Placement) -> None:
        recorded = self._recorded(asked.number)
        told = self._seen.get(asked.digest) or (recorded.told if recorded else None)
        resumed = told is not None
        if told is None:
            outcome = self._attempt(self._task.candidate(placement), self._best)
            told = Told(number=asked.number, outcome=outcome, elapsed_s=self._elapsed_s())
            self._journal.append(told)
        self._seen[asked.digest] = told
        score = score_of(told.outcome, self._task.goal)
        if isinstance(told.outcome, Measured) and isinstance(score, Score) and eligible(score):
            own = median_ci(told.outcome.samples_ms)
            self._best = min(self._best or own, own, key=lambda latency: latency.value)
        self._task.searcher.tell(Observation(placement=placement, digest=asked.digest, outcome=score))
        best_ms = self._best.value if self._best else None
        self._watch(
            Trial(asked=asked, outcome=told.outcome, evaluations=len(self._seen), best_ms=best_ms, resumed=resumed)
        )

    def _recorded(self, number: int) -> Entry | None:
        return self._journal.entries[number] if number < len(self._journal.entries) else None
