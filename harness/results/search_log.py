"""Goal of a search, and summaries of its journal: evaluations, incumbents, cost, and its state at each budget.

Journals are read entry by entry, because their samples may not fit into memory.
"""

from __future__ import annotations

import math
import re
from array import array
from bisect import insort
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from harness.base.statistics import Interval, rebuilt_ci, stderr_from_interval
from harness.config.sections import Minimize
from harness.measure.records import Failed, Measured, Outcome, TrialResult
from harness.results.journal import RETRY_ORIGIN, JournalEntry, read_journal
from harness.results.lines import COMPRESSED_SUFFIX, first_line
from harness.results.termination import Termination, read_termination
from search.api import Failure, Score
from search.pareto import hypervolume, insert_nondominated

PROXY = "proxy_sqnr_db"
"""Name of the proxy among an outcome's metrics: fidelity on a few samples, larger is closer to the float model."""
PREDICTED_METRIC = "believed"
"""Name of the best metric value that the proxy allows, in outcomes without a measured metric."""
LOSS_ROUND_OFF = 1e-9
"""One image of a hundred is 0.01, though 0.76 less 0.75 is a little more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Objective of a search: latency, the loss of a metric, or both, with bounds.

    Attributes:
        metric: Name of the metric that is bounded or minimised; None: latency alone.
        reference: Value of the metric for the float model, on the data that the search scores with.
        higher_is_better: Direction of the metric.
        max_drop: Largest allowed loss in the unit of the metric; None: no bound.
        minimize: "latency", "accuracy" or "pareto"; see `harness.config.sections.Objective`.
        max_latency_ms: Largest allowed latency in ms; None: no bound.
        float_ms: Latency of the float model in ms; None if the objective is latency alone.
    """

    metric: str | None = None
    reference: float = 0.0
    higher_is_better: bool = True
    max_drop: float | None = 0.0
    minimize: Minimize = "latency"
    max_latency_ms: float | None = None
    float_ms: float | None = None

    def loss(self, value: float) -> float:
        """Return the loss of a metric value relative to the float model; negative if the value is better."""
        return self.reference - value if self.higher_is_better else value - self.reference

    def loss_excess(self, loss: float) -> float:
        """Return the amount by which a loss exceeds the bound; 0 without one or within it, up to round-off."""
        over = 0.0 if self.metric is None or self.max_drop is None else loss - self.max_drop
        return over if over > LOSS_ROUND_OFF else 0.0

    def violation(self, metrics: Mapping[str, float]) -> float:
        """Return the amount by which the loss exceeds the bound; 0 within the bound, or if the metric is unknown."""
        value = metrics.get(self.metric or "", metrics.get(PREDICTED_METRIC))
        return 0.0 if self.metric is None or value is None else self.loss_excess(self.loss(value))

    def latency_excess_ms(self, latency_ms: float) -> float:
        """Return the milliseconds by which a latency exceeds the bound; 0 within the bound or without one."""
        return 0.0 if self.max_latency_ms is None else max(0.0, latency_ms - self.max_latency_ms)


def encode_goal(goal: Goal) -> dict[str, Any]:
    """Return a goal as JSON values, without fields that older versions lack and that have their defaults."""
    usual = {field.name: field.default for field in fields(Goal)}
    facts = asdict(goal)
    return {name: facts[name] for name in facts if name in _ALWAYS_ENCODED_FIELDS or facts[name] != usual[name]}


_ALWAYS_ENCODED_FIELDS = ("metric", "reference", "higher_is_better", "max_drop")


def score_outcome(outcome: Outcome, goal: Goal) -> Score | Failure:
    """Return the score of an outcome for the searcher, see `score_values`; its standard error includes rebuilds."""
    if isinstance(outcome, Failed):
        return Failure(stage=outcome.stage, reason=outcome.reason)
    return score_values(rebuilt_ci(outcome.samples_ms, outcome.rebuilt_ms), outcome.metrics, goal)


def score_values(latency: Interval, metrics: Mapping[str, float], goal: Goal) -> Score:
    """Return the score of a latency and metrics.

    For a Pareto front, a placement without the metric has no `objectives` and ranks last. If accuracy is minimized, the
    objective is the loss, its prediction if it was not measured, or else the loss of the whole metric.

    Args:
        latency: Median of the samples in milliseconds, see `harness.base.statistics.rebuilt_ci`.
        metrics: Metrics of the outcome by name.
    """
    latency_ms, value = latency.value, metrics.get(goal.metric or "")
    violation = goal.violation(metrics) + goal.latency_excess_ms(latency_ms)
    objective, stderr = latency_ms, stderr_from_interval(latency)
    objectives: tuple[float, ...] = ()
    if goal.minimize == "pareto" and value is not None:
        objectives = (latency_ms, goal.loss(value))
    if goal.minimize == "accuracy":
        known = metrics.get(PREDICTED_METRIC) if value is None else value
        objective, stderr = abs(goal.reference) if known is None else goal.loss(known), 0.0
    return Score(
        objective=objective,
        stderr=stderr,
        violation=violation,
        assumed=goal.metric is not None and value is None and not violation,
        metrics=dict(metrics),
        objectives=objectives,
    )


def is_feasible(score: Score) -> bool:
    """Return whether a score violates no bound; False if the goal needs an accuracy that was not measured."""
    return score.violation == 0.0 and not score.assumed


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
class BudgetState:
    """State of a search after a number of evaluations.

    Attributes:
        best: The best distinct placements, best first. A Pareto front is in order of the hypervolume of each placement
            alone, with the float latency and the largest loss as reference point, so the ends of the front come last.
        scored: Number of candidates whose metric was measured so far.
        agreement: Spearman's rank correlation of proxy and metric, 1 for the same order; None if fewer than three
            candidates have both, or all values are equal.
        minutes: Wall-clock minutes until the last result.
        last_failure: The last failure, or None.
    """

    best: tuple[Evaluation, ...]
    scored: int
    agreement: float | None
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
    best: list[Evaluation] = []
    pairs: list[tuple[float, float]] = []  # of proxy and metric
    scored, elapsed_s, failed = 0, 0.0, None

    def state() -> BudgetState:
        shown = best
        if goal.minimize == "pareto":
            corner = (goal.float_ms or 0.0, goal.max_drop or abs(goal.reference))
            shown = sorted(best, key=lambda trial: -hypervolume([trial.score.objectives], corner))[:count]
        agreement, minutes = _rank_correlation(pairs), elapsed_s / 60
        return BudgetState(best=tuple(shown), scored=scored, agreement=agreement, minutes=minutes, last_failure=failed)

    for spent, entry, result in iter_counted(entries):
        while left and spent > left[0]:
            found[left.popleft()] = state()
        if not left:
            break
        elapsed_s = max(elapsed_s, result.elapsed_s)
        if isinstance(result.outcome, Failed):
            failed = result.outcome
            continue
        trial = _to_evaluation(entry, result.outcome, goal, spent, elapsed_s)
        proxy, value = trial.score.metrics.get(PROXY), trial.score.metrics.get(goal.metric or "")
        scored += value is not None
        if proxy is not None and value is not None:
            pairs.append((proxy, -goal.loss(value)))
        if not is_feasible(trial.score) or trial.digest in excluded:
            continue
        if goal.minimize == "pareto":
            insert_nondominated(best, trial, lambda known: known.score.objectives)
        else:
            insort(best, trial, key=lambda known: (known.score.objective, known.latency_ms))
            del best[count:]
    return found | {budget: state() for budget in left}


def _rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    if len(pairs) < 3 or any(len(set(column)) < 2 for column in zip(*pairs, strict=True)):
        return None
    from scipy.stats import spearmanr  # slow to import, and rarely needed

    return float(spearmanr(pairs).statistic)


JOURNAL_NAME = re.compile(r"(?P<searcher>.+)-(?P<seed>\d+)\.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedEvaluation:
    """Evaluation without choices and score, to save memory.

    Attributes:
        is_float: Whether the placement has no Q/DQ pair.
        value: Measured metric; NaN without one.
    """

    evaluations: int
    elapsed_s: float
    digest: str
    latency_ms: float
    is_float: bool
    value: float = math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLog:
    """Summary of one search, finished or not; duplicates and retries are not evaluations.

    Attributes:
        elapsed_s: Wall-clock seconds at the end of each evaluation; the time of a retry is added to the last one.
        failures: Number of failed evaluations by stage.
        initial: Number of evaluations of the initial design.
        incumbents: Evaluations that became the incumbent, which is the best one within the bounds.
        scored: Evaluations with a measured metric, in order.
        float_ms: Latency of the float model in the search's own samples; None if the search did not measure it.
        float_value: Metric of the float model in the search; None if the search did not measure it.
        cost: Seconds and readings spent, including retries, by the columns of `cost_frame` of the report.
        end: Reason why the search ended before its budget was spent, or None.
    """

    searcher: str
    seed: int
    path: Path
    elapsed_s: Sequence[float]
    successes: int
    failures: Mapping[str, int]
    initial: int
    incumbents: tuple[LoggedEvaluation, ...]
    scored: tuple[LoggedEvaluation, ...]
    float_ms: float | None
    float_value: float | None
    cost: Mapping[str, float]
    end: Termination | None = None

    @property
    def name(self) -> str:
        """Name of the journal without suffix: searcher and seed."""
        return f"{self.searcher}-{self.seed}"

    @property
    def evaluations(self) -> int:
        """Number of evaluations."""
        return len(self.elapsed_s)


def read_searches(
    runs: Path, goal: Goal, metric: str | None, searchers: Sequence[str]
) -> tuple[tuple[SearchLog, ...], dict[str, float]]:
    """Return the searches with a journal in the folder `runs`, in the order of `searchers`, others last.

    Returns:
        The searches, and by digest the latency in ms of each of their incumbents and scored placements: the median over
        all searches that measured it.
    """
    order = {name: place for place, name in enumerate(searchers)}
    paths = sorted({path.with_name(path.name.removesuffix(COMPRESSED_SUFFIX)) for path in runs.glob("*.jsonl*")})
    named = [(path, match) for path in paths if (match := JOURNAL_NAME.fullmatch(path.name))]
    readings: defaultdict[str, list[float]] = defaultdict(list)
    logs = [
        read_search(path, match["searcher"], int(match["seed"]), goal, metric, readings)
        for path, match in named
        if first_line(path)
    ]
    shown = {step.digest for log in logs for step in log.incumbents} | {
        trial.digest for log in logs for trial in log.scored
    }
    logs.sort(key=lambda log: (order.get(log.searcher, len(order)), log.searcher, log.seed))
    return tuple(logs), {digest: median(readings[digest]) for digest in shown}


def read_search(
    path: Path, searcher: str, seed: int, goal: Goal, metric: str | None, readings: defaultdict[str, list[float]]
) -> SearchLog:
    """Read the journal of a search once, line by line.

    Args:
        goal: Objective and bounds that define the incumbent.
        metric: Name of the evaluator's metric; None without an evaluator.
        readings: Mapping to which the latency of each measured placement is added, by digest.
    """
    name, best, initial, successes = metric or "", None, 0, 0
    incumbents, scored, floats = list[LoggedEvaluation](), list[LoggedEvaluation](), list[Evaluation]()
    failures: Counter[str] = Counter()
    cost: defaultdict[str, float] = defaultdict(int)
    ends_s, latest_s = array("d"), 0.0  # ends of the evaluations, and the last one
    latencies_ms: dict[str, float] = {}  # the last one of a placement that was measured several times

    def count_searcher_time(entry: JournalEntry) -> JournalEntry:  # of duplicates too
        spent_s = entry.proposal.searcher_s
        cost["searcher_s"] += math.nan if spent_s is None else spent_s
        return entry

    for spent, entry, result in iter_counted(map(count_searcher_time, read_journal(path))):
        latest_s, outcome = max(latest_s, result.elapsed_s), result.outcome
        _add_cost(cost, outcome)
        if entry.proposal.origin == RETRY_ORIGIN:
            ends_s[spent - 1 :] = array("d", [latest_s])
        else:
            ends_s.append(latest_s)
            initial += entry.proposal.origin.startswith("initial:")
            successes += isinstance(outcome, Measured)
            failures.update([outcome.stage] if isinstance(outcome, Failed) else [])
        if isinstance(outcome, Failed):
            continue
        trial = _to_evaluation(entry, outcome, goal, spent, latest_s)
        latencies_ms[trial.digest] = trial.latency_ms
        logged = _without_choices(trial, name)
        if is_new_incumbent(trial, best):
            best = trial
            incumbents.append(logged)
        scored += [logged] if name in trial.score.metrics else []
        floats += [] if any(trial.choices) else [trial]
    for digest, latency_ms in latencies_ms.items():
        readings[digest].append(latency_ms)
    return SearchLog(
        searcher=searcher,
        seed=seed,
        path=path,
        elapsed_s=ends_s,
        successes=successes,
        failures=dict(failures),
        initial=initial,
        incumbents=tuple(incumbents),
        scored=tuple(scored),
        float_ms=next((trial.latency_ms for trial in floats), None),
        float_value=next((trial.score.metrics[name] for trial in floats if name in trial.score.metrics), None),
        cost=dict(cost),
        end=read_termination(path),
    )


def _without_choices(trial: Evaluation, metric: str) -> LoggedEvaluation:
    return LoggedEvaluation(
        evaluations=trial.evaluations,
        elapsed_s=trial.elapsed_s,
        digest=trial.digest,
        latency_ms=trial.latency_ms,
        is_float=bool(trial.choices) and not any(trial.choices),
        value=trial.score.metrics.get(metric, math.nan),
    )


def _add_cost(cost: defaultdict[str, float], outcome: Outcome) -> None:
    if not isinstance(outcome, Measured):
        cost["failures_s"] += outcome.wall_s
        return
    cost["build_s"] += outcome.build_s + outcome.release_s
    cost["sampling_s"] += outcome.measure_s
    cost["evaluation_s"] += outcome.evaluate_s
    cost["readings"] += len(outcome.samples_ms) + sum(map(len, outcome.rebuilt_ms))
    cost["saved"] += outcome.saved
    cost["rebuilt"] += bool(outcome.rebuilt_ms)
    cost["disturbed"] += bool(outcome.disturbance)
    cost["unstable"] += not outcome.stable
