"""Reads journals back: who was the incumbent after how many evaluations. Entries pass by once, and few are kept."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from harness.statistics import rebuilt_ci
from harness.records import Failed, Measured, TrialResult
from harness.search_loop.objective import PROXY, Goal, eligible, score_at
from harness.results_dir.journal import RETRY_ORIGIN, JournalEntry
from search.api import Score

__all__ = ["Evaluation", "MetricUsage", "BudgetState", "iter_counted", "iter_evaluations", "evaluations_until_result", "is_new_incumbent", "iter_incumbents", "state_at_budgets"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One evaluation that worked, as the search saw it.

    Attributes:
        evaluations: Number of evaluations spent when it was told, itself and failures included.
        elapsed_s: Wall-clock of the search until it and all that were asked before it were done.
        latency_ms: By the search's own samples, whatever the objective is.
    """

    evaluations: int
    elapsed_s: float
    digest: str
    choices: tuple[int, ...]
    origin: str
    latency_ms: float
    score: Score


def iter_counted(entries: Iterable[JournalEntry]) -> Iterator[tuple[int, JournalEntry, TrialResult]]:
    """The entries that have an outcome, with the evaluations spent until then: duplicates and retries cost none."""
    spent = 0
    for entry in entries:
        if entry.result is not None:
            spent += entry.proposal.origin != RETRY_ORIGIN
            yield spent, entry, entry.result


def iter_evaluations(entries: Iterable[JournalEntry], goal: Goal) -> Iterator[Evaluation]:
    """The evaluations that worked, in order; duplicates are free and left out."""
    elapsed_s = 0.0
    for spent, entry, told in iter_counted(entries):
        elapsed_s = max(elapsed_s, told.elapsed_s)
        if isinstance(told.outcome, Measured):
            yield _to_evaluation(entry, told.outcome, goal, spent, elapsed_s)


def _to_evaluation(entry: JournalEntry, outcome: Measured, goal: Goal, spent: int, elapsed_s: float) -> Evaluation:
    latency = rebuilt_ci(outcome.samples_ms, outcome.retaken_ms)
    return Evaluation(
        evaluations=spent,
        elapsed_s=elapsed_s,
        digest=entry.proposal.digest,
        choices=entry.proposal.choices,
        origin=entry.proposal.origin,
        latency_ms=latency.value,
        score=score_at(latency, outcome.metrics, goal),
    )


def evaluations_until_result(entries: Iterable[JournalEntry], digests: Collection[str]) -> dict[str, int]:
    """How many evaluations were spent when each of these placements had first been told, failures included."""
    found: dict[str, int] = {}
    for spent, entry, _ in iter_counted(entries):
        if entry.proposal.digest in digests:
            found.setdefault(entry.proposal.digest, spent)
            if len(found) == len(digests):
                break
    return found


def iter_incumbents(entries: Iterable[JournalEntry], goal: Goal) -> Iterator[Evaluation]:
    """Each evaluation that became the incumbent, in order."""
    best: Evaluation | None = None
    for trial in iter_evaluations(entries, goal):
        if is_new_incumbent(trial, best):
            best = trial
            yield trial


def is_new_incumbent(trial: Evaluation, best: Evaluation | None) -> bool:
    """Whether an evaluation becomes the incumbent in place of `best`."""
    return eligible(trial.score) and (best is None or trial.score.objective < best.score.objective)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricUsage:
    """How much a search looked at accuracy.

    Attributes:
        full: Evaluations whose metric was measured.
        proxied: Evaluations that were compared with the float model by the proxy.
        agreement: Rank correlation of proxy and metric over those that have both (Spearman 1904), 1 where the proxy
            puts them in the metric's order; None where fewer than three have both, or all are alike.
    """

    measured: int
    proxied: int
    agreement: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetState:
    """How far a search had come when a budget was spent.

    Attributes:
        leaders: The best distinct placements, best first. Of a front that is first the placement that dominates the
            largest area by itself, below the float model's latency and what may be lost at most; the ends of the front
            come last.
        looks: How much it had looked at accuracy.
        minutes: Wall-clock until the last outcome had come; with several at once that need not be the last proposal's.
        failed: The last failure; None where nothing failed.
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
    """How far a search had come after so many evaluations, for each of several budgets.

    Args:
        entries: Of its journal.
        count: Leaders at most.
        without: Digests of placements that are no leaders.
    """
    found, left = dict[int, BudgetState](), deque(sorted(budgets))
    progress = _SearchTally(goal, count, excluded)
    for spent, entry, told in iter_counted(entries):
        while left and spent > left[0]:
            found[left.popleft()] = progress.state()
        if not left:
            break
        progress.add(spent, entry, told)
    return found | {budget: progress.state() for budget in left}


class _SearchTally:
    """What is kept of the entries that have passed by."""

    def __init__(self, goal: Goal, count: int, without: Collection[str]) -> None:
        self._goal = goal
        self._count = count
        self._excluded = without
        self._best: list[Evaluation] = []
        self._measured, self._proxied = 0, 0
        self._proxy_metric_pairs: list[tuple[float, float]] = []
        self._elapsed_s = 0.0
        self._failed: Failed | None = None

    def add(self, spent: int, entry: JournalEntry, told: TrialResult) -> None:
        """Take in an entry with its outcome."""
        self._elapsed_s = max(self._elapsed_s, told.elapsed_s)
        if isinstance(told.outcome, Failed):
            self._failed = told.outcome
            return
        trial = _to_evaluation(entry, told.outcome, self._goal, spent, self._elapsed_s)
        self._count_metric_use(trial)
        if not eligible(trial.score) or trial.digest in self._excluded:
            return
        if self._goal.minimize == "pareto":
            _insert_nondominated(self._best, trial)
        else:
            insort(self._best, trial, key=lambda known: (known.score.objective, known.latency_ms))
            del self._best[self._count :]

    def state(self) -> BudgetState:
        """All of it."""
        best = self._best
        if self._goal.minimize == "pareto":
            best = sorted(best, key=lambda trial: -_dominated_area(trial, self._goal))[: self._count]
        return BudgetState(
            best=tuple(best),
            metric_usage=MetricUsage(measured=self._measured, proxied=self._proxied, agreement=_rank_correlation(self._proxy_metric_pairs)),
            minutes=self._elapsed_s / 60,
            last_failure=self._failed,
        )

    def _count_metric_use(self, trial: Evaluation) -> None:
        proxy = trial.score.metrics.get(PROXY)
        value = trial.score.metrics.get(self._goal.metric or "")
        self._proxied += proxy is not None
        self._measured += value is not None
        if proxy is not None and value is not None:
            self._proxy_metric_pairs.append((proxy, -self._goal.loss(value)))


def _rank_correlation(both: Sequence[tuple[float, float]]) -> float | None:
    """Rank correlation of proxy and metric, see `Looks`."""
    if len(both) < 3 or any(len(set(column)) < 2 for column in zip(*both, strict=True)):
        return None
    from scipy.stats import spearmanr  # slow to import, and most commands never come here

    return float(spearmanr(both).statistic)


def _insert_nondominated(front: list[Evaluation], trial: Evaluation) -> None:
    """Let a trial into a front, unless it is dominated; those that it dominates leave."""
    if not any(_dominates(known, trial) for known in front):
        front[:] = [*(known for known in front if not _dominates(trial, known)), trial]


def _dominates(one: Evaluation, other: Evaluation) -> bool:
    """Nowhere larger and somewhere smaller; see `search.pareto.fronts`."""
    pairs = list(zip(one.score.objectives, other.score.objectives, strict=True))
    return all(own <= theirs for own, theirs in pairs) and any(own < theirs for own, theirs in pairs)


def _dominated_area(trial: Evaluation, goal: Goal) -> float:
    latency_ms, loss = trial.score.objectives
    most = goal.max_drop or abs(goal.reference)
    return max(0.0, (goal.float_ms or 0.0) - latency_ms) * max(0.0, most - loss)
