"""Searches as the report holds them: a few figures of each evaluation; raw samples stay in the journal."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from harness.records import Measured, Outcome
from harness.results_dir.journal import RETRY_ORIGIN, JournalEntry, has_header, read_journal
from harness.results_dir.termination import Termination, read_termination
from harness.search_loop.journal_reader import Evaluation, is_new_incumbent, iter_counted, iter_evaluations
from harness.search_loop.objective import Goal

__all__ = ["ScoredEvaluation", "SearchLog", "median_latencies_ms", "read_search", "read_searches"]

JOURNAL_NAME_PATTERN = re.compile(r"(?P<searcher>.+)-(?P<seed>\d+)\.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredEvaluation:
    """An evaluation whose metric was measured.

    Attributes:
        evaluations: See `harness.search_loop.journal_reader.Evaluation`, as for `elapsed_s`, `digest` and `latency_ms`.
        value: Of the metric.
    """

    evaluations: int
    elapsed_s: float
    digest: str
    latency_ms: float
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLog:
    """One search as far as it came; duplicates and retries are no evaluations.

    Attributes:
        path: Its journal.
        elapsed_s: Wall-clock after each evaluation, which never goes back; a retry's belongs to the last before it.
        good: Evaluations that worked.
        failures: How many others failed, by stage.
        initial: Evaluations that went to initial placements.
        steps: Each evaluation that became the incumbent, the fastest one that obeys the bounds.
        looked: Those whose metric was measured, in order.
        readings_ms: Latency of each placement that was measured, by digest.
        float_ms: Latency of the float model by this search's own samples; None where it was not measured here.
        float_value: The float model's metric, in the same way.
        cost: Seconds spent and readings taken, retries included; see `harness.report.frames.budget_frames.cost_frame`.
        end: How it ended before its budget was spent; None where it did not.
    """

    searcher: str
    seed: int
    path: Path
    elapsed_s: tuple[float, ...]
    good: int
    failures: Mapping[str, int]
    initial: int
    steps: tuple[Evaluation, ...]
    looked: tuple[ScoredEvaluation, ...]
    readings_ms: Mapping[str, float]
    float_ms: float | None
    float_value: float | None
    cost: Mapping[str, float]
    end: Termination | None = None

    @property
    def evaluations(self) -> int:
        """How many were spent."""
        return len(self.elapsed_s)


def read_search(path: Path, searcher: str, seed: int, goal: Goal, metric: str | None) -> SearchLog:
    """Read a search's journal once, line by line.

    Args:
        goal: Says which evaluation is the incumbent.
        metric: The evaluator's figure; None where nothing was scored.

    Raises:
        UserError: The journal is damaged, or of another schema.
    """
    tally, name = _CostCounter(), metric or ""
    steps, looked, floats = list[Evaluation](), list[ScoredEvaluation](), list[Evaluation]()
    readings_ms: dict[str, float] = {}
    for trial in iter_evaluations(tally.count(read_journal(path)), goal):
        readings_ms[trial.digest] = trial.latency_ms
        if is_new_incumbent(trial, steps[-1] if steps else None):
            steps.append(trial)
        if name in trial.score.metrics:
            looked.append(_scored_evaluation(trial, name))
        if not any(trial.choices):
            floats.append(trial)
    return SearchLog(
        searcher=searcher,
        seed=seed,
        path=path,
        elapsed_s=tuple(tally.elapsed_s),
        good=tally.good,
        failures=dict(tally.failures),
        initial=tally.initial,
        steps=tuple(steps),
        looked=tuple(looked),
        readings_ms=readings_ms,
        float_ms=next((trial.latency_ms for trial in floats), None),
        float_value=next((trial.score.metrics[name] for trial in floats if name in trial.score.metrics), None),
        cost=dict(tally.cost),
        end=read_termination(path),
    )


def read_searches(runs: Path, goal: Goal, metric: str | None, searchers: Sequence[str]) -> tuple[SearchLog, ...]:
    """The searches of a cell that have begun, in the order of their searchers.

    Args:
        runs: Folder of their journals.
        searchers: Names in order; others come behind them.
    """
    order = {name: place for place, name in enumerate(searchers)}
    named = [(path, match) for path in runs.glob("*.jsonl") if (match := JOURNAL_NAME_PATTERN.fullmatch(path.name))]
    found = [
        read_search(path, match["searcher"], int(match["seed"]), goal, metric)
        for path, match in named
        if has_header(path)
    ]
    return tuple(sorted(found, key=lambda s: (order.get(s.searcher, len(order)), s.searcher, s.seed)))


def median_latencies_ms(searches: Iterable[SearchLog]) -> dict[str, float]:
    """Of each placement the median of what the searches read of it, by digest."""
    readings: defaultdict[str, list[float]] = defaultdict(list)
    for search in searches:
        for digest, latency_ms in search.readings_ms.items():
            readings[digest].append(latency_ms)
    return {digest: median(found) for digest, found in readings.items()}


def _scored_evaluation(trial: Evaluation, metric: str) -> ScoredEvaluation:
    return ScoredEvaluation(
        evaluations=trial.evaluations,
        elapsed_s=trial.elapsed_s,
        digest=trial.digest,
        latency_ms=trial.latency_ms,
        value=trial.score.metrics[metric],
    )


class _CostCounter:
    """Adds up what passes by."""

    def __init__(self) -> None:
        self.elapsed_s: list[float] = []
        self.good = 0
        self.failures: Counter[str] = Counter()
        self.initial = 0
        self.cost: Counter[str] = Counter()

    def count(self, entries: Iterable[JournalEntry]) -> Iterator[JournalEntry]:
        """The same entries; each is counted before it is passed on."""
        latest_s = 0.0
        for spent, entry, told in iter_counted(map(self._count_proposal, entries)):
            latest_s = max(latest_s, told.elapsed_s)
            if entry.proposal.origin == RETRY_ORIGIN:
                self.elapsed_s[spent - 1 :] = [latest_s]
            else:
                self.elapsed_s.append(latest_s)
                if isinstance(told.outcome, Measured):
                    self.good += 1
                else:
                    self.failures[told.outcome.stage] += 1
                self.initial += entry.proposal.origin.startswith("seed:")
            self.cost.update(_outcome_cost(told.outcome))
            yield entry

    def _count_proposal(self, entry: JournalEntry) -> JournalEntry:
        """Duplicates are no evaluations, but the searcher took its time over them."""
        own_s = entry.proposal.searcher_s
        self.cost.update({"searcher_s": math.nan if own_s is None else own_s})
        return entry


def _outcome_cost(outcome: Outcome) -> dict[str, float]:
    if not isinstance(outcome, Measured):
        return {"failures_s": outcome.wall_s}
    return {
        "build_s": outcome.build_s + outcome.release_s,
        "sampling_s": outcome.measure_s,
        "evaluation_s": outcome.evaluate_s,
        "readings": len(outcome.samples_ms) + sum(len(more) for more in outcome.retaken_ms),
        "saved": outcome.saved,
        "surprises": bool(outcome.retaken_ms),
        "disturbed": bool(outcome.trouble),
        "unsteady": not outcome.stable,
    }
