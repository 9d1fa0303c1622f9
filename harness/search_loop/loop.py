"""Loop of one search: ask, build, sample, score, journal, tell. Resuming replays the journal.

The journal's lines are an input of the loop: where the next proposal is already there with its outcome, the recorded
outcome is reported instead of measured. A searcher whose proposals differ from the recorded ones is refused, so a
resumed run is the run it would have been.

Several proposals may await their outcomes at once. Outcomes are journaled as they come and passed to `tell` in ask
order; after each, as many new proposals are asked for as places are free. The results that a searcher has at an `ask`
therefore depend on the size of this window alone, not on which worker is faster.

If a searcher raises, its search ends: trials in progress are completed and kept, and the search can be run again.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from harness.api import Candidate
from harness.errors import UserError
from harness.records import Failed, Measured, Outcome, Proposal, TrialResult
from harness.results_dir.fingerprint import CHANGED_RUN_ADVICE, FingerprintMismatch
from harness.results_dir.journal import RETRY_ORIGIN, Journal, JournalEntry
from harness.search_loop.objective import (
    Goal,
    ScoredPlacement,
    incumbent_state,
    is_feasible,
    score_outcome,
    scored_placement,
)
from harness.search_loop.searcher_guard import SearcherGuard
from harness.statistics import Interval, median_ci
from harness.timing.workers.trial_pool import Executor
from search.api import Observation, Score, Searcher
from search.gain_forecast import WORTHWHILE_GAIN, GainForecast
from search.space import Placement, Space

MAX_CONSECUTIVE_DUPLICATES = 200
"""Number of consecutive known proposals after which a searcher is considered exhausted."""
COLD_START_EVALUATIONS = 8
"""Number of first evaluations that replace the initial design if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialPlacement:
    """Placement whose outcome every searcher receives before its first proposal."""

    name: str
    placement: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTask:
    """Everything that defines one search; the same task gives the same asks for the same outcomes.

    Attributes:
        searcher: Searcher, or the failure of its constructor.
        candidate: Makes the candidate of a placement (its model is written only when asked for).
        evaluations: Budget: unique placements attempted, failures and seeds included.
        seconds: Wall-clock budget, counted apart; None: no limit.
        least: Number of evaluations that are made even if the time is up.
        window: Proposals that may await their outcomes at once.
        retry_failed: Attempt once more each trial that failed in an earlier part of this run, at no cost to the budget.
        patience: Without an initial design, the search stops if this number of first evaluations all fail.
        stop_at: Probability that no worthwhile gain is left, at which the search stops; None: it does not.
    """

    space: Space
    searcher: Searcher | Failed
    initial_design: tuple[InitialPlacement, ...]
    candidate: Callable[[Placement], Candidate]
    goal: Goal = field(default_factory=Goal)
    evaluations: int
    seconds: float | None = None
    least: int = 0
    window: int = 1
    retry_failed: bool = False
    patience: int = COLD_START_EVALUATIONS
    stop_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialEvent:
    """Progress event of one trial.

    Attributes:
        evaluations: Spent so far, this one included.
        best_ms: Latency of the incumbent; None while there is none.
        best_is_float: The incumbent is the float model.
        resumed: The outcome was known: from the journal, or of an earlier proposal of the same graph.
        expected_gain: Expected further gain of the search, relative; None while there is no forecast.
    """

    asked: Proposal
    outcome: Outcome
    evaluations: int
    best_ms: float | None
    resumed: bool
    best_is_float: bool = False
    expected_gain: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLoopResult:
    """Result of a search loop.

    Attributes:
        evaluations: Number of evaluations spent, those of an earlier part of the search included.
        reason: Reason why the search ended before its budget of evaluations or time was spent; "" if it was spent.
        failure: Exception of its searcher, or None.
    """

    evaluations: int
    reason: str = ""
    failure: Failed | None = None


class ReplayMismatch(FingerprintMismatch):
    """The proposals of a searcher differ from the recorded ones."""


def run_search(
    task: SearchTask, executor: Executor, journal: Journal, watch: Callable[[TrialEvent], None]
) -> SearchLoopResult:
    """Run a search until its budget is spent, or its searcher has nothing left or breaks.

    Raises:
        ReplayMismatch: The journal's next proposal is not the one that the searcher makes now.
        UserError: The journal cannot be written, or none of the seeds could be measured (the first reason is given); or
            as the searcher raised it.
    """
    loop = _SearchLoop(task, executor, journal, watch)
    loop.fill_window()
    while loop.waiting:
        asked, placement = loop.waiting.popleft()
        result, resumed = loop.await_outcome(asked)
        loop.tell(asked, placement, result, resumed)
        loop.fill_window()
    return loop.result()


_Proposal = tuple[Placement, str]


class _SearchLoop:
    """State of a running search: proposals, outcomes, the incumbent, the clock."""

    def __init__(
        self, task: SearchTask, executor: Executor, journal: Journal, watch: Callable[[TrialEvent], None]
    ) -> None:
        self._task = task
        self._searcher = SearcherGuard(task.searcher, task.space)
        self._executor = executor
        self._journal = journal
        self._watch = watch
        self._seeds: deque[_Proposal] = deque((each.placement, f"initial:{each.name}") for each in task.initial_design)
        self._again: deque[_Proposal] | None = None if task.retry_failed else deque()
        self._counted_s = 0.0  # of what the searcher took for itself
        self._asked = 0
        self._numbers: dict[str, int] = {}
        self.waiting: deque[tuple[Proposal, Placement]] = deque()
        self._come: dict[int, TrialResult] = {}
        self._seen: dict[str, TrialResult] = {}
        self._failures: dict[str, tuple[Placement, Failed]] = {}
        self._duplicates_in_a_row = 0
        self._best: Interval | None = None
        self._best_is_float = False
        self._float = task.space.float_placement()
        self._scored: list[ScoredPlacement] = []
        self._forecast = GainForecast(task.evaluations)
        self._stopped_at: float | None = None
        self._started_s = time.monotonic() - journal.elapsed_s

    def result(self) -> SearchLoopResult:
        """Return how the search ended."""
        left = self._journal.entries[self._asked :]  # where a searcher ends sooner than it did before
        known = self._seen | {entry.proposal.digest: entry.result for entry in left if entry.result}
        reason = self._termination_reason(known)
        return SearchLoopResult(evaluations=len(known), reason=reason, failure=self._searcher.failure)

    def _termination_reason(self, known: dict[str, TrialResult]) -> str:
        """See `SearchLoopResult`; `known` are the outcomes by digest."""
        if self._searcher.failure is not None:
            return self._searcher.failure.reason
        if len(known) >= self._task.evaluations or self._is_out_of_time():
            return ""
        if self._stopped_at is not None:
            return f"further gain below {WORTHWHILE_GAIN:.1%} with {self._stopped_at:.0%} probability"
        if self._duplicates_in_a_row >= MAX_CONSECUTIVE_DUPLICATES:
            return f"it proposed only placements that were proposed before, {MAX_CONSECUTIVE_DUPLICATES} in a row"
        last = next(reversed(known.values())).outcome if known else None
        after = f"; the last one failed: {last.stage}: {last.reason}" if isinstance(last, Failed) else ""
        return f"it had nothing more to propose{after}"

    def fill_window(self) -> None:
        """Ask for as many proposals as may be under way."""
        while (free := self._task.window - len(self.waiting)) > 0 and (proposals := self._propose(free)):
            for placement, origin in proposals:
                self._ask(placement, origin)

    def _propose(self, free: int) -> Sequence[_Proposal]:
        """Return the next proposals; empty if the search has ended or waits for an outcome."""
        if self._searcher.failure is not None:
            return []
        recorded = self._journaled_outcome(self._asked)
        if recorded is not None and recorded.proposal.origin == RETRY_ORIGIN:
            return [(Placement(recorded.proposal.choices), RETRY_ORIGIN)] if self._all_results_told() else []
        if recorded is None and (self._again is None or self._again):
            return self._propose_retries(free)
        left = self._task.evaluations - len(self._numbers)
        if (
            left <= 0
            or self._duplicates_in_a_row >= MAX_CONSECUTIVE_DUPLICATES
            or (recorded is None and (self._is_time_up() or self._is_gain_unlikely()))
        ):
            return []
        if self._seeds:
            return [self._seeds.popleft() for _ in range(min(free, left, len(self._seeds)))]
        if self.waiting and self.waiting[-1][0].origin.startswith("initial:"):
            return []  # a searcher's first proposal follows the outcomes of the initial design
        if not any(asked.origin == RETRY_ORIGIN for asked, _ in self.waiting):  # else there may still be one that works
            self._stop_if_initial_design_failed()
        return [(placement, "searcher") for placement in self._searcher.ask(min(free, left))]

    def _propose_retries(self, free: int) -> Sequence[_Proposal]:
        """Return failed candidates once more, after all earlier outcomes; a replay meets them at the same position."""
        if not self._all_results_told():
            return []
        if self._again is None:
            under_way = {asked.digest for asked, _ in self.waiting}  # of a run that was interrupted
            failed = ((digest, placement) for digest, (placement, _) in self._failures.items())
            self._again = deque((placement, RETRY_ORIGIN) for digest, placement in failed if digest not in under_way)
        return [self._again.popleft() for _ in range(min(free, len(self._again)))] or self._propose(free)

    def _all_results_told(self) -> bool:
        """Return whether all outcomes of proposals before the retries were reported to the searcher."""
        return not self.waiting or self.waiting[0][0].origin.startswith(RETRY_ORIGIN)

    def _stop_if_initial_design_failed(self) -> None:
        """Stop if all initial placements fail: then the cause is not the placement."""
        if len(self._failures) < len(self._seen):
            return
        wanted = (
            len({self._task.space.digest(seed.placement) for seed in self._task.initial_design}) or self._task.patience
        )
        if len(self._seen) >= wanted:
            first = next(iter(self._failures.values()))[1]
            what = "no seed" if self._task.initial_design else f"none of the first {wanted} placements"
            raise UserError(
                f"{what} could be measured, so the search stops; {first.stage}: {first.reason}\n{first.log_tail}"
            )

    def _is_time_up(self) -> bool:
        """Return whether the search ends because it is out of time, with at least the required evaluations."""
        return len(self._numbers) >= self._task.least and self._is_out_of_time()

    def _is_out_of_time(self) -> bool:
        return self._task.seconds is not None and self._elapsed_s() >= self._task.seconds

    def _is_gain_unlikely(self) -> bool:
        wanted = self._task.stop_at
        if wanted is not None and not self._seeds and self._forecast.is_spent(wanted):
            self._stopped_at = wanted
        return self._stopped_at is not None

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def _ask(self, placement: Placement, origin: str) -> None:
        digest = self._task.space.digest(placement)
        earlier = None if origin == RETRY_ORIGIN else self._numbers.get(digest)
        asked = Proposal(
            number=self._asked,
            choices=placement.choices,
            digest=digest,
            origin=origin,
            duplicate_of=earlier,
            searcher_s=self._searcher.spent_s - self._counted_s,
        )
        self._counted_s = self._searcher.spent_s
        self._journal_proposal(asked)
        self._asked += 1
        self._numbers.setdefault(digest, asked.number)
        self._duplicates_in_a_row = 0 if earlier is None else self._duplicates_in_a_row + 1
        self.waiting.append((asked, placement))
        recorded = self._journaled_outcome(asked.number)
        if earlier is None and (recorded is None or recorded.result is None):
            self._executor.submit(
                asked.number, self._task.candidate(placement), incumbent_state(self._best, self._scored)
            )

    def _journal_proposal(self, asked: Proposal) -> None:
        recorded = self._journaled_outcome(asked.number)
        if recorded is None:
            self._journal.append(asked)
        elif recorded.proposal != asked:
            raise ReplayMismatch(
                f"resume refused at proposal {asked.number}: the journal has {recorded.proposal.digest} "
                f"({recorded.proposal.origin}), the searcher now proposes {asked.digest} ({asked.origin}); its code or "
                f"a library changed: {CHANGED_RUN_ADVICE}"
            )

    def tell(self, asked: Proposal, placement: Placement, result: TrialResult, resumed: bool) -> None:
        """Tell the searcher the outcome of a proposal."""
        self._seen[asked.digest] = result
        if isinstance(result.outcome, Failed):
            self._failures[asked.digest] = (placement, result.outcome)
        else:
            self._failures.pop(asked.digest, None)
        score = score_outcome(result.outcome, self._task.goal)
        scored = scored_placement(result.outcome, self._task.goal)
        if scored is not None and asked.duplicate_of is None:
            self._scored.append(scored)
        latency_ms = math.inf
        if isinstance(result.outcome, Measured) and isinstance(score, Score) and is_feasible(score):
            own = median_ci(result.outcome.samples_ms)
            latency_ms = own.value
            if self._best is None or own.value < self._best.value:
                self._best, self._best_is_float = own, placement == self._float
        if asked.duplicate_of is None and asked.origin != RETRY_ORIGIN:
            self._forecast.tell(latency_ms)
        self._searcher.tell(Observation(placement=placement, digest=asked.digest, outcome=score))
        self._watch(
            TrialEvent(
                asked=asked,
                outcome=result.outcome,
                evaluations=len(self._seen),
                best_ms=self._best.value if self._best else None,
                resumed=resumed,
                best_is_float=self._best_is_float,
                expected_gain=self._forecast.expected_gain,
            )
        )

    def await_outcome(self, asked: Proposal) -> tuple[TrialResult, bool]:
        """Return the outcome of a proposal, and whether it was known before; wait for it if needed."""
        if asked.duplicate_of is not None:
            return self._seen[asked.digest], True
        recorded = self._journaled_outcome(asked.number)
        if recorded is not None and recorded.result is not None:
            return recorded.result, True
        while asked.number not in self._come:
            number, outcome = self._executor.collect()
            result = TrialResult(number=number, outcome=outcome, elapsed_s=self._elapsed_s())
            self._journal.append(result)
            self._come[number] = result
        return self._come.pop(asked.number), False

    def _journaled_outcome(self, number: int) -> JournalEntry | None:
        return self._journal.entries[number] if number < len(self._journal.entries) else None
