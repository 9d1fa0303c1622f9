"""Reads journals back: who was the incumbent after how many evaluations. Entries pass by once, and few are kept."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from harness.statistics import rebuilt_ci
from harness.records import Failed, Measured, Told
from harness.search_loop.objective import PROXY, Goal, eligible, score_at
from harness.results_dir.journal import RETRY, Entry
from search.api import Score

__all__ = ["Evaluated", "Looks", "Reached", "counted", "evaluated", "first_told", "improves", "incumbents", "reached"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
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


def counted(entries: Iterable[Entry]) -> Iterator[tuple[int, Entry, Told]]:
    """The entries that have an outcome, with the evaluations spent until then: duplicates and retries cost none."""
    spent = 0
    for entry in entries:
        if entry.told is not None:
            spent += entry.asked.origin != RETRY
            yield spent, entry, entry.told


def evaluated(entries: Iterable[Entry], goal: Goal) -> Iterator[Evaluated]:
    """The evaluations that worked, in order; duplicates are free and left out."""
    elapsed_s = 0.0
    for spent, entry, told in counted(entries):
        elapsed_s = max(elapsed_s, told.elapsed_s)
        if isinstance(told.outcome, Measured):
            yield _evaluated(entry, told.outcome, goal, spent, elapsed_s)


def _evaluated(entry: Entry, outcome: Measured, goal: Goal, spent: int, elapsed_s: float) -> Evaluated:
    latency = rebuilt_ci(outcome.samples_ms, outcome.retaken_ms)
    return Evaluated(
        evaluations=spent,
        elapsed_s=elapsed_s,
        digest=entry.asked.digest,
        choices=entry.asked.choices,
        origin=entry.asked.origin,
        latency_ms=latency.value,
        score=score_at(latency, outcome.metrics, goal),
    )


def first_told(entries: Iterable[Entry], digests: Collection[str]) -> dict[str, int]:
    """How many evaluations were spent when each of these placements had first been told, failures included."""
    found: dict[str, int] = {}
    for spent, entry, _ in counted(entries):
        if entry.asked.digest in digests:
            found.setdefault(entry.asked.digest, spent)
            if len(found) == len(digests):
                break
    return found


def incumbents(entries: Iterable[Entry], goal: Goal) -> Iterator[Evaluated]:
    """Each evaluation that became the incumbent, in order."""
    best: Evaluated | None = None
    for trial in evaluated(entries, goal):
        if improves(trial, best):
            best = trial
            yield trial


def improves(trial: Evaluated, best: Evaluated | None) -> bool:
    """Whether an evaluation becomes the incumbent in place of `best`."""
    return eligible(trial.score) and (best is None or trial.score.objective < best.score.objective)


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """How much a search looked at accuracy.

    Attributes:
        full: Evaluations whose metric was measured.
        proxied: Evaluations that were compared with the float model by the proxy.
        agreement: Rank correlation of proxy and metric over those that have both (Spearman 1904), 1 where the proxy
            puts them in the metric's order; None where fewer than three have both, or all are alike.
    """

    full: int
    proxied: int
    agreement: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """How far a search had come when a budget was spent.

    Attributes:
        leaders: The best distinct placements, best first. Of a front that is first the placement that dominates the
            largest area by itself, below the float model's latency and what may be lost at most; the ends of the front
            come last.
        looks: How much it had looked at accuracy.
        minutes: Wall-clock until the last outcome had come; with several at once that need not be the last proposal's.
        failed: The last failure; None where nothing failed.
    """

    leaders: tuple[Evaluated, ...]
    looks: Looks
    minutes: float
    failed: Failed | None


def reached(
    entries: Iterable[Entry],
    goal: Goal,
    budgets: Iterable[int],
    count: int = 1,
    without: Collection[str] = (),
) -> dict[int, Reached]:
    """How far a search had come after so many evaluations, for each of several budgets.

    Args:
        entries: Of its journal.
        count: Leaders at most.
        without: Digests of placements that are no leaders.
    """
    found, left = dict[int, Reached](), deque(sorted(budgets))
    progress = _Progress(goal, count, without)
    for spent, entry, told in counted(entries):
        while left and spent > left[0]:
            found[left.popleft()] = progress.reached()
        if not left:
            break
        progress.add(spent, entry, told)
    return found | {budget: progress.reached() for budget in left}


class _Progress:
    """What is kept of the entries that have passed by."""

    def __init__(self, goal: Goal, count: int, without: Collection[str]) -> None:
        self._goal = goal
        self._count = count
        self._without = without
        self._ahead: list[Evaluated] = []
        self._full, self._proxied = 0, 0
        self._both: list[tuple[float, float]] = []
        self._elapsed_s = 0.0
        self._failed: Failed | None = None

    def add(self, spent: int, entry: Entry, told: Told) -> None:
        """Take in an entry with its outcome."""
        self._elapsed_s = max(self._elapsed_s, told.elapsed_s)
        if isinstance(told.outcome, Failed):
            self._failed = told.outcome
            return
        trial = _evaluated(entry, told.outcome, self._goal, spent, self._elapsed_s)
        self._look(trial)
        if not eligible(trial.score) or trial.digest in self._without:
            return
        if self._goal.minimize == "pareto":
            _enter(self._ahead, trial)
        else:
            insort(self._ahead, trial, key=lambda known: (known.score.objective, known.latency_ms))
            del self._ahead[self._count :]

    def reached(self) -> Reached:
        """All of it."""
        best = self._ahead
        if self._goal.minimize == "pareto":
            best = sorted(best, key=lambda trial: -_area(trial, self._goal))[: self._count]
        return Reached(
            leaders=tuple(best),
            looks=Looks(full=self._full, proxied=self._proxied, agreement=_agreement(self._both)),
            minutes=self._elapsed_s / 60,
            failed=self._failed,
        )

    def _look(self, trial: Evaluated) -> None:
        proxy = trial.score.metrics.get(PROXY)
        value = trial.score.metrics.get(self._goal.metric or "")
        self._proxied += proxy is not None
        self._full += value is not None
        if proxy is not None and value is not None:
            self._both.append((proxy, -self._goal.loss(value)))


def _agreement(both: Sequence[tuple[float, float]]) -> float | None:
    """Rank correlation of proxy and metric, see `Looks`."""
    if len(both) < 3 or any(len(set(column)) < 2 for column in zip(*both, strict=True)):
        return None
    from scipy.stats import spearmanr  # slow to import, and most commands never come here

    return float(spearmanr(both).statistic)


def _enter(front: list[Evaluated], trial: Evaluated) -> None:
    """Let a trial into a front, unless it is dominated; those that it dominates leave."""
    if not any(_dominates(known, trial) for known in front):
        front[:] = [*(known for known in front if not _dominates(trial, known)), trial]


def _dominates(one: Evaluated, other: Evaluated) -> bool:
    """Nowhere larger and somewhere smaller; see `search.pareto.fronts`."""
    pairs = list(zip(one.score.objectives, other.score.objectives, strict=True))
    return all(own <= theirs for own, theirs in pairs) and any(own < theirs for own, theirs in pairs)


def _area(trial: Evaluated, goal: Goal) -> float:
    latency_ms, loss = trial.score.objectives
    most = goal.max_drop or abs(goal.reference)
    return max(0.0, (goal.float_ms or 0.0) - latency_ms) * max(0.0, most - loss)
