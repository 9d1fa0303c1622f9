"""Analysis of journals: evaluations, incumbents, and the state of a search at each budget.

Functions read a journal entry by entry, because its samples may not fit into memory.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from harness.base.statistics import rebuilt_ci
from harness.measure.records import Failed, Measured, TrialResult
from harness.results.goal import PROXY, Goal, is_feasible, score_values
from harness.results.journal import RETRY_ORIGIN, JournalEntry
from search.api import Score
from search.pareto import hypervolume, insert_nondominated


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Successful evaluation of a placement, with the latency and the score that the search used.

    Attributes:
        evaluations: Number of evaluations spent up to its result, including itself and failures.
        elapsed_s: Wall-clock seconds of the search until all proposals up to this one had a result.
        latency_ms: Median of the search's own samples, whatever the objective.
    """

    evaluations: int
    elapsed_s: float
    digest: str
    choices: tuple[int, ...]
    origin: str
    latency_ms: float
    score: Score


def iter_counted(entries: Iterable[JournalEntry]) -> Iterator[tuple[int, JournalEntry, TrialResult]]:
    """Yield (evaluations spent so far, entry, result) for entries with a result; retries do not count."""
    spent = 0
    for entry in entries:
        if entry.result is not None:
            spent += entry.proposal.origin != RETRY_ORIGIN
            yield spent, entry, entry.result


def iter_evaluations(entries: Iterable[JournalEntry], goal: Goal) -> Iterator[Evaluation]:
    """Yield the successful evaluations in order, without duplicates."""
    elapsed_s = 0.0
    for spent, entry, result in iter_counted(entries):
        elapsed_s = max(elapsed_s, result.elapsed_s)
        if isinstance(result.outcome, Measured):
            yield _to_evaluation(entry, result.outcome, goal, spent, elapsed_s)


def _to_evaluation(entry: JournalEntry, outcome: Measured, goal: Goal, spent: int, elapsed_s: float) -> Evaluation:
    latency = rebuilt_ci(outcome.samples_ms, outcome.rebuilt_ms)
    return Evaluation(
        evaluations=spent,
        elapsed_s=elapsed_s,
        digest=entry.proposal.digest,
        choices=entry.proposal.choices,
        origin=entry.proposal.origin,
        latency_ms=latency.value,
        score=score_values(latency, outcome.metrics, goal),
    )


def evaluations_until_result(entries: Iterable[JournalEntry], digests: Collection[str]) -> dict[str, int]:
    """Return the number of evaluations spent up to the first result of each placement, by digest.

    A failure is a result; placements without a result are left out.
    """
    found: dict[str, int] = {}
    for spent, entry, _ in iter_counted(entries):
        if entry.proposal.digest in digests:
            found.setdefault(entry.proposal.digest, spent)
            if len(found) == len(digests):
                break
    return found


def is_new_incumbent(trial: Evaluation, best: Evaluation | None) -> bool:
    """Return whether an evaluation keeps the bounds and has a lower objective than the incumbent, or is the first."""
    return is_feasible(trial.score) and (best is None or trial.score.objective < best.score.objective)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricUsage:
    """Use of accuracy by a search.

    Attributes:
        measured: Number of candidates whose metric was measured.
        agreement: Spearman's rank correlation of proxy and metric, 1 for the same order; None if fewer than three
            candidates have both, or all values are equal.
    """

    measured: int
    agreement: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetState:
    """State of a search after a number of evaluations.

    Attributes:
        best: The best distinct placements, best first. A Pareto front is in order of the hypervolume of each placement
            alone, with the float latency and the largest loss as reference point, so the ends of the front come last.
        metric_usage: Use of accuracy so far.
        minutes: Wall-clock minutes until the last result.
        last_failure: The last failure, or None.
    """

    best: tuple[Evaluation, ...]
    metric_usage: MetricUsage
    minutes: float
    last_failure: Failed | None


def state_at_budgets(
    entries: Iterable[JournalEntry],
    goal: Goal,
    budgets: Iterable[int],
    count: int = 1,
    excluded: Collection[str] = (),
) -> dict[int, BudgetState]:
    """Return the state of a search at each of several budgets, by budget.

    Args:
        entries: Entries of its journal, in order.
        goal: Objective and bounds by which placements are ranked.
        budgets: Numbers of evaluations; at those that the search has not reached, its last state is returned.
        count: Maximum number of best placements.
        excluded: Digests of placements that do not count as best.
    """
    found, left = dict[int, BudgetState](), deque(sorted(budgets))
    tally = _SearchTally(goal, count, excluded)
    for spent, entry, result in iter_counted(entries):
        while left and spent > left[0]:
            found[left.popleft()] = tally.state()
        if not left:
            break
        tally.add(spent, entry, result)
    return found | {budget: tally.state() for budget in left}


class _SearchTally:
    """Accumulator of a search's entries, from which the state at any moment is computed."""

    def __init__(self, goal: Goal, count: int, excluded: Collection[str]) -> None:
        self._goal = goal
        self._count = count
        self._excluded = excluded
        self._best: list[Evaluation] = []
        self._measured = 0
        self._proxy_metric_pairs: list[tuple[float, float]] = []
        self._elapsed_s = 0.0
        self._failed: Failed | None = None

    def add(self, spent: int, entry: JournalEntry, result: TrialResult) -> None:
        self._elapsed_s = max(self._elapsed_s, result.elapsed_s)
        if isinstance(result.outcome, Failed):
            self._failed = result.outcome
            return
        trial = _to_evaluation(entry, result.outcome, self._goal, spent, self._elapsed_s)
        self._count_metric_use(trial)
        if not is_feasible(trial.score) or trial.digest in self._excluded:
            return
        if self._goal.minimize == "pareto":
            insert_nondominated(self._best, trial, lambda known: known.score.objectives)
        else:
            insort(self._best, trial, key=lambda known: (known.score.objective, known.latency_ms))
            del self._best[self._count :]

    def state(self) -> BudgetState:
        best = self._best
        if self._goal.minimize == "pareto":
            corner = (self._goal.float_ms or 0.0, self._goal.max_drop or abs(self._goal.reference))
            best = sorted(best, key=lambda trial: -hypervolume([trial.score.objectives], corner))[: self._count]
        agreement = _rank_correlation(self._proxy_metric_pairs)
        return BudgetState(
            best=tuple(best),
            metric_usage=MetricUsage(measured=self._measured, agreement=agreement),
            minutes=self._elapsed_s / 60,
            last_failure=self._failed,
        )

    def _count_metric_use(self, trial: Evaluation) -> None:
        proxy = trial.score.metrics.get(PROXY)
        value = trial.score.metrics.get(self._goal.metric or "")
        self._measured += value is not None
        if proxy is not None and value is not None:
            self._proxy_metric_pairs.append((proxy, -self._goal.loss(value)))


def _rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    if len(pairs) < 3 or any(len(set(column)) < 2 for column in zip(*pairs, strict=True)):
        return None
    from scipy.stats import spearmanr  # slow to import, and rarely needed

    return float(spearmanr(pairs).statistic)
