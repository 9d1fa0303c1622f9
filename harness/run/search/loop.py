"""Loop of one search: ask, build, sample, score, journal, tell. Resuming replays the journal.

To resume a search, the loop runs it from the start. If the journal has the outcome of a proposal, the searcher receives
this outcome and nothing is measured. A searcher whose proposals differ from the recorded ones is refused, so a resumed
search has the same results as an uninterrupted one.

Several proposals may be evaluated at the same time (the window). Outcomes are written to the journal as they arrive,
but passed to `tell` in the order of the proposals; after each, the free places of the window are filled. So the
outcomes that a searcher knows at an `ask` depend only on the size of the window, not on the speed of the workers.

Searchers get one thread for linear algebra. Their matrices are small, so more threads mostly wait for each other: with
two threads `auto` takes up to four times as much processor time.

If a searcher raises, its search ends: trials in progress are completed and recorded, and the search can be run again.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import NamedTuple, TypeVar

from threadpoolctl import ThreadpoolController

from harness.base.errors import UserError
from harness.base.statistics import Interval, median_ci
from harness.measure.records import Failed, Measured, Outcome, Proposal, TrialResult
from harness.plugins.api import Candidate
from harness.results.journal import CHANGED_RUN_ADVICE, RETRY_ORIGIN, FingerprintMismatch, Journal, JournalEntry
from harness.results.search_log import Goal, is_feasible, score_outcome
from harness.run.search.trial import ScoredPlacement, incumbent_state, scored_placement
from harness.workers.engines import as_outcome
from harness.workers.trial_pool import Executor
from search.api import Observation, Score, Searcher
from search.gain_forecast import WORTHWHILE_GAIN, GainForecast
from search.space import Placement, Space

MAX_CONSECUTIVE_DUPLICATES = 200
"""Number of consecutive known proposals after which a searcher is considered exhausted."""
COLD_START_EVALUATIONS = 8
"""Number of first evaluations that replace the initial design if there is none."""
T = TypeVar("T")


class SearcherGuard:
    """Wrapper of a searcher that records its first exception; then it proposes nothing and ignores observations.

    A `UserError` and Ctrl-C are raised, because neither is a fault of the searcher.

    Args:
        searcher: Searcher, or the failure of its constructor.

    Attributes:
        failure: Exception of the searcher with the end of the traceback, or None.
        spent_s: Wall-clock seconds of `ask` and `tell` so far.
    """

    def __init__(self, searcher: Searcher | Failed, space: Space) -> None:
        self.failure = searcher if isinstance(searcher, Failed) else None
        self.spent_s = 0.0
        self._searcher = searcher
        self._space = space
        self._libraries = ThreadpoolController()

    def ask(self, n: int) -> Sequence[Placement]:
        """Return the searcher's proposals; too many, or invalid ones, count as its failure."""

        def propose(searcher: Searcher) -> list[Placement]:
            # Python integers as choices, because NumPy integers cannot be written as JSON
            proposed = [Placement(tuple(map(index, placement.choices))) for placement in searcher.ask(n)]
            if len(proposed) > n:
                raise ValueError(f"ask({n}) gave {len(proposed)} placements: more than were requested")
            return [self._space.validate(placement) for placement in proposed]

        return self._call(propose) or []

    def tell(self, observation: Observation) -> None:
        self._call(lambda searcher: searcher.tell(observation))

    def _call(self, action: Callable[[Searcher], T]) -> T | None:
        searcher = self._searcher
        if self.failure is not None or isinstance(searcher, Failed):
            return None
        started_s = time.perf_counter()
        with self._libraries.limit(limits=1, user_api="blas"):
            outcome = as_outcome("search", lambda: action(searcher))
        self.spent_s += time.perf_counter() - started_s
        if isinstance(outcome, Failed):
            self.failure = outcome
            return None
        return outcome


class InitialPlacement(NamedTuple):
    """Placement whose outcome every searcher receives before its first proposal."""

    name: str
    placement: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTask:
    """Definition of one search; the same task makes the same proposals if it receives the same outcomes.

    Attributes:
        searcher: Searcher, or the failure of its constructor.
        candidate: Function that returns the candidate of a placement; its file is written when it is built.
        evaluations: Budget of different placements, including failures and the initial design.
        seconds: Budget of wall-clock seconds; None: no limit.
        least: Number of evaluations that are made even if the time is up.
        window: Number of proposals that may be evaluated at the same time.
        retry_failed: Whether trials that failed in an earlier part of the search are repeated once, outside the budget.
        patience: Number of first evaluations after which a search without an initial design stops if all failed.
        stop_at: Probability that no worthwhile gain is left at which the search stops early; None: never.
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
        evaluations: Number of evaluations spent so far, including this one.
        best_ms: Latency of the incumbent in ms; None without an incumbent.
        best_is_float: Whether the incumbent is the float model.
        resumed: Whether the outcome was known, from the journal or from an earlier proposal of the same placement.
        expected_gain: Expected further gain of the search as a share (0.02: 2 %); None without a forecast.
    """

    proposal: Proposal
    outcome: Outcome
    evaluations: int
    best_ms: float | None
    resumed: bool
    best_is_float: bool = False
    expected_gain: float | None = None


class SearchLoopResult(NamedTuple):
    """Result of a search loop.

    Attributes:
        evaluations: Number of evaluations spent, including those before a resumption.
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
    """Run or resume a search until its budget is spent, or its searcher raises or has nothing more to propose.

    `watch` is called after each outcome, also after those that the journal had.

    Raises:
        ReplayMismatch: The searcher does not make the proposals of the journal again.
        UserError: The journal cannot be written, all first evaluations failed (the message has the first reason), or
            the searcher raised it.
    """
    loop = _SearchLoop(task, executor, journal, watch)
    loop.fill_window()
    while loop.waiting:
        loop.tell(*loop.await_outcome())
        loop.fill_window()
    return loop.result()


_Proposal = tuple[Placement, str]


class _SearchLoop:
    """State of a running search: proposals, outcomes, the incumbent, the clock."""

    def __init__(
        self, task: SearchTask, executor: Executor, journal: Journal, watch: Callable[[TrialEvent], None]
    ) -> None:
        self._task, self._executor, self._journal, self._watch = task, executor, journal, watch
        self._searcher = SearcherGuard(task.searcher, task.space)
        self._initial = deque((each.placement, f"initial:{each.name}") for each in task.initial_design)
        self._retries: deque[_Proposal] | None = None if task.retry_failed else deque()
        self._counted_s = 0.0  # seconds of the searcher that proposals in the journal contain
        self._proposed = 0
        self._numbers: dict[str, int] = {}
        self.waiting: deque[tuple[Proposal, Placement]] = deque()
        self._results: dict[int, TrialResult] = {}
        self._results_by_digest: dict[str, TrialResult] = {}
        self._failures: dict[str, tuple[Placement, Failed]] = {}
        self._duplicates_in_a_row = 0
        self._best: Interval | None = None
        self._best_is_float = False
        self._scored: list[ScoredPlacement] = []
        self._forecast = GainForecast(task.evaluations)
        self._is_gain_unlikely = False
        self._started_s = time.monotonic() - journal.elapsed_s

    def result(self) -> SearchLoopResult:
        """Return the number of evaluations and the reason of the end."""
        left = self._journal.entries[self._proposed :]  # results of a searcher that now ends sooner than before
        known = self._results_by_digest | {entry.proposal.digest: entry.result for entry in left if entry.result}
        failure = self._searcher.failure
        if failure is not None:
            reason = failure.reason
        elif len(known) >= self._task.evaluations or self._is_out_of_time():
            reason = ""
        elif self._is_gain_unlikely:
            reason = f"further gain below {WORTHWHILE_GAIN:.1%} with {self._task.stop_at:.0%} probability"
        elif self._duplicates_in_a_row >= MAX_CONSECUTIVE_DUPLICATES:
            reason = f"it proposed only placements that were proposed before, {MAX_CONSECUTIVE_DUPLICATES} in a row"
        else:
            last = next(reversed(known.values())).outcome if known else None
            after = f"; the last one failed: {last.stage}: {last.reason}" if isinstance(last, Failed) else ""
            reason = f"it had nothing more to propose{after}"
        return SearchLoopResult(evaluations=len(known), reason=reason, failure=failure)

    def fill_window(self) -> None:
        """Ask for proposals until the window is full or no proposal is left, write them down, and start their trials.

        Raises:
            ReplayMismatch: A proposal is not that of the journal.
        """
        while (free := self._task.window - len(self.waiting)) > 0 and (proposals := self._propose(free)):
            for placement, origin in proposals:
                digest = self._task.space.digest(placement)
                earlier = None if origin == RETRY_ORIGIN else self._numbers.get(digest)
                proposal = Proposal(
                    number=self._proposed,
                    choices=placement.choices,
                    digest=digest,
                    origin=origin,
                    duplicate_of=earlier,
                    searcher_s=self._searcher.spent_s - self._counted_s,
                )
                self._counted_s = self._searcher.spent_s
                recorded = self._recorded(proposal.number)
                if recorded is None:
                    self._journal.append(proposal)
                elif recorded.proposal != proposal:
                    raise ReplayMismatch(
                        f"resume refused at proposal {proposal.number}: the journal has {recorded.proposal.digest} "
                        f"({recorded.proposal.origin}), the searcher now proposes {digest} ({origin}); its code or a "
                        f"library changed: {CHANGED_RUN_ADVICE}"
                    )
                self._proposed += 1
                self._numbers.setdefault(digest, proposal.number)
                self._duplicates_in_a_row = 0 if earlier is None else self._duplicates_in_a_row + 1
                self.waiting.append((proposal, placement))
                if earlier is None and (recorded is None or recorded.result is None):
                    incumbent = incumbent_state(self._best, self._scored)
                    self._executor.submit(proposal.number, self._task.candidate(placement), incumbent)

    def _propose(self, free: int) -> Sequence[_Proposal]:
        """Return the next proposals; empty if the search has ended or waits for an outcome.

        Raises:
            UserError: All first evaluations failed, or the searcher raised it.
        """
        task, recorded = self._task, self._recorded(self._proposed)
        if self._searcher.failure is not None:
            return []
        # Retries start after all earlier outcomes, so that a resumed search repeats them at the same position.
        may_retry = not self.waiting or self.waiting[0][0].origin.startswith(RETRY_ORIGIN)
        if recorded is not None and recorded.proposal.origin == RETRY_ORIGIN:
            return [(Placement(recorded.proposal.choices), RETRY_ORIGIN)] if may_retry else []
        if recorded is None and (self._retries is None or self._retries):
            if not may_retry:
                return []
            if self._retries is None:
                under_way = {proposal.digest for proposal, _ in self.waiting}  # retries of an interrupted run
                failed = [each for digest, (each, _) in self._failures.items() if digest not in under_way]
                self._retries = deque((placement, RETRY_ORIGIN) for placement in failed)
            if self._retries:
                return [self._retries.popleft() for _ in range(min(free, len(self._retries)))]
        left = task.evaluations - len(self._numbers)
        if left <= 0 or self._duplicates_in_a_row >= MAX_CONSECUTIVE_DUPLICATES:
            return []
        if recorded is None:
            if len(self._numbers) >= task.least and self._is_out_of_time():
                return []
            if task.stop_at is not None and not self._initial:
                self._is_gain_unlikely |= self._forecast.is_spent(task.stop_at)
            if self._is_gain_unlikely:
                return []
        if self._initial:
            return [self._initial.popleft() for _ in range(min(free, left, len(self._initial)))]
        if self.waiting and self.waiting[-1][0].origin.startswith("initial:"):
            return []  # the searcher proposes only after the outcomes of the initial design
        if not any(proposal.origin == RETRY_ORIGIN for proposal, _ in self.waiting):  # a retry may still succeed
            digests = {task.space.digest(each.placement) for each in task.initial_design}
            limit = len(digests) or task.patience
            if len(self._failures) == len(self._results_by_digest) >= limit:  # then the cause is not the placement
                first = next(iter(self._failures.values()))[1]
                what = "no initial placement" if digests else f"none of the first {limit} placements"
                raise UserError(
                    f"{what} could be measured, so the search stops; {first.stage}: {first.reason}\n{first.log_tail}"
                )
        return [(placement, "searcher") for placement in self._searcher.ask(min(free, left))]

    def _is_out_of_time(self) -> bool:
        return self._task.seconds is not None and time.monotonic() - self._started_s >= self._task.seconds

    def _recorded(self, number: int) -> JournalEntry | None:
        return self._journal.entries[number] if number < len(self._journal.entries) else None

    def tell(self, proposal: Proposal, placement: Placement, result: TrialResult, resumed: bool) -> None:
        """Pass the outcome of a proposal to the searcher, and update the incumbent and the forecast."""
        outcome, is_new = result.outcome, proposal.duplicate_of is None
        self._results_by_digest[proposal.digest] = result
        if isinstance(outcome, Failed):
            self._failures[proposal.digest] = (placement, outcome)
        else:
            self._failures.pop(proposal.digest, None)
        score, scored = score_outcome(outcome, self._task.goal), scored_placement(outcome, self._task.goal)
        if scored is not None and is_new:
            self._scored.append(scored)
        latency_ms = math.inf
        if isinstance(outcome, Measured) and isinstance(score, Score) and is_feasible(score):
            own = median_ci(outcome.samples_ms)
            latency_ms = own.value
            if self._best is None or own.value < self._best.value:
                self._best, self._best_is_float = own, placement == self._task.space.float_placement()
        if is_new and proposal.origin != RETRY_ORIGIN:
            self._forecast.tell(latency_ms)
        self._searcher.tell(Observation(placement=placement, digest=proposal.digest, outcome=score))
        self._watch(
            TrialEvent(
                proposal=proposal,
                outcome=outcome,
                evaluations=len(self._results_by_digest),
                best_ms=self._best.value if self._best else None,
                resumed=resumed,
                best_is_float=self._best_is_float,
                expected_gain=self._forecast.expected_gain,
            )
        )

    def await_outcome(self) -> tuple[Proposal, Placement, TrialResult, bool]:
        """Wait for the outcome of the next proposal, and return both, and whether the outcome was known before."""
        proposal, placement = self.waiting.popleft()
        if proposal.duplicate_of is not None:
            return proposal, placement, self._results_by_digest[proposal.digest], True
        recorded = self._recorded(proposal.number)
        if recorded is not None and recorded.result is not None:
            return proposal, placement, recorded.result, True
        while proposal.number not in self._results:
            number, outcome = self._executor.collect()
            result = TrialResult(number=number, outcome=outcome, elapsed_s=time.monotonic() - self._started_s)
            self._journal.append(result)
            self._results[number] = result
        return proposal, placement, self._results.pop(proposal.number), False
