"""Summaries of search journals: counts, cost, incumbents and scores of each search, without the raw samples."""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from harness.measure.records import Failed, Measured, Outcome
from harness.results.goal import Goal
from harness.results.journal import RETRY_ORIGIN, JournalEntry, read_journal
from harness.results.journal_reader import Evaluation, is_new_incumbent, iter_counted, iter_evaluations
from harness.results.lines import COMPRESSED_SUFFIX, first_line
from harness.results.termination import Termination, read_termination

JOURNAL_NAME = re.compile(r"(?P<searcher>.+)-(?P<seed>\d+)\.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedEvaluation:
    """Evaluation without choices and score, to save memory.

    Attributes:
        is_float: Whether the placement has no Q/DQ pair.
    """

    evaluations: int
    elapsed_s: float
    digest: str
    latency_ms: float
    is_float: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredEvaluation(LoggedEvaluation):
    """Evaluation with a measured metric."""

    value: float


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
        cost: Seconds and readings spent, including retries, by the columns of `harness.report.tables.cost.cost_frame`.
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
    scored: tuple[ScoredEvaluation, ...]
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

    Raises:
        UserError: A journal is damaged or has another schema.
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

    Raises:
        UserError: The journal is damaged or has another schema.
    """
    tally, name = _CostTally(), metric or ""
    incumbents, scored, floats = list[LoggedEvaluation](), list[ScoredEvaluation](), list[Evaluation]()
    best: Evaluation | None = None
    latencies_ms: dict[str, float] = {}  # the last one of a placement that was measured several times
    for trial in iter_evaluations(tally.count(read_journal(path)), goal):
        latencies_ms[trial.digest] = trial.latency_ms
        is_float = not any(trial.choices)
        facts = {key: getattr(trial, key) for key in ("evaluations", "elapsed_s", "digest", "latency_ms")}
        facts["is_float"] = is_float and bool(trial.choices)
        if is_new_incumbent(trial, best):
            best = trial
            incumbents.append(LoggedEvaluation(**facts))
        if name in trial.score.metrics:
            scored.append(ScoredEvaluation(**facts, value=trial.score.metrics[name]))
        if is_float:
            floats.append(trial)
    for digest, latency_ms in latencies_ms.items():
        readings[digest].append(latency_ms)
    return SearchLog(
        searcher=searcher,
        seed=seed,
        path=path,
        elapsed_s=array("d", tally.elapsed_s),
        successes=tally.successes,
        failures=dict(tally.failures),
        initial=tally.initial,
        incumbents=tuple(incumbents),
        scored=tuple(scored),
        float_ms=next((trial.latency_ms for trial in floats), None),
        float_value=next((trial.score.metrics[name] for trial in floats if name in trial.score.metrics), None),
        cost=dict(tally.cost),
        end=read_termination(path),
    )


class _CostTally:
    """Counts and times of the entries that pass through `count`."""

    def __init__(self) -> None:
        self.elapsed_s: list[float] = []
        self.successes = self.initial = 0
        self.failures: Counter[str] = Counter()
        self.cost: defaultdict[str, float] = defaultdict(int)

    def count(self, entries: Iterable[JournalEntry]) -> Iterator[JournalEntry]:
        latest_s = 0.0
        for spent, entry, result in iter_counted(map(self._count_searcher_time, entries)):
            latest_s, outcome = max(latest_s, result.elapsed_s), result.outcome
            if entry.proposal.origin == RETRY_ORIGIN:
                self.elapsed_s[spent - 1 :] = [latest_s]
            else:
                self.elapsed_s.append(latest_s)
                self.initial += entry.proposal.origin.startswith("initial:")
                self.successes += isinstance(outcome, Measured)
                if isinstance(outcome, Failed):
                    self.failures[outcome.stage] += 1
            self._add_cost(outcome)
            yield entry

    def _count_searcher_time(self, entry: JournalEntry) -> JournalEntry:  # of duplicates too
        spent_s = entry.proposal.searcher_s
        self.cost["searcher_s"] += math.nan if spent_s is None else spent_s
        return entry

    def _add_cost(self, outcome: Outcome) -> None:
        cost = self.cost
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
