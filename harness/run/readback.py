"""Reads journals back: who was the incumbent after how many evaluations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from scipy.stats import spearmanr

from harness.measure.stats import median_ci
from harness.records import Measured, Told
from harness.run.goal import PROXY, Goal, eligible, score_of, scored_of
from harness.run.journal import RETRY, Entry
from search.api import Score
from search.pareto import fronts

__all__ = [
    "Evaluated", "Looks", "counted", "evaluated", "improves", "incumbents", "leaders", "looks", "minutes", "within",
]  # fmt: skip


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


def within(entries: Iterable[Entry], evaluations: int) -> list[Entry]:
    """The entries whose outcomes came before more evaluations were spent."""
    return [entry for spent, entry, _ in counted(entries) if spent <= evaluations]


def minutes(entries: Iterable[Entry], evaluations: int) -> float:
    """Wall-clock until the last of so many had come; with several at once that need not be the last proposal's."""
    return max((told.elapsed_s for spent, _, told in counted(entries) if spent <= evaluations), default=0.0) / 60


def evaluated(entries: Iterable[Entry], goal: Goal) -> Iterator[Evaluated]:
    """The evaluations that worked, in order; duplicates are free and left out."""
    elapsed_s = 0.0
    for spent, entry, told in counted(entries):
        elapsed_s = max(elapsed_s, told.elapsed_s)
        score = score_of(told.outcome, goal)
        if isinstance(score, Score) and isinstance(told.outcome, Measured):
            yield Evaluated(
                evaluations=spent,
                elapsed_s=elapsed_s,
                digest=entry.asked.digest,
                choices=entry.asked.choices,
                origin=entry.asked.origin,
                latency_ms=median_ci(told.outcome.samples_ms).value,
                score=score,
            )


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


def leaders(entries: Iterable[Entry], goal: Goal, evaluations: int, count: int) -> list[Evaluated]:
    """The best `count` distinct placements after so many evaluations, best first.

    Of a front that is first the placement that dominates the largest area by itself, below the float model's latency
    and what may be lost at most; the ends of the front come last.
    """
    within = [t for t in evaluated(entries, goal) if t.evaluations <= evaluations and eligible(t.score)]
    if goal.minimize == "pareto":
        return sorted(_front(within), key=lambda trial: -_area(trial, goal))[:count]
    return sorted(within, key=lambda trial: (trial.score.objective, trial.latency_ms))[:count]


def _front(trials: list[Evaluated]) -> list[Evaluated]:
    """Those that no other dominates."""
    values = np.array([trial.score.objectives for trial in trials], np.float64).reshape(len(trials), -1)
    return [trial for trial, number in zip(trials, fronts(values), strict=True) if number == 0]


def _area(trial: Evaluated, goal: Goal) -> float:
    latency_ms, loss = trial.score.objectives
    most = goal.max_drop or abs(goal.reference)
    return max(0.0, (goal.float_ms or 0.0) - latency_ms) * max(0.0, most - loss)


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


def looks(entries: Iterable[Entry], goal: Goal) -> Looks:
    """How much a search looked at accuracy, and how far its proxy can be trusted."""
    outcomes = [entry.told.outcome for entry in entries if entry.told is not None]
    scored = [found for outcome in outcomes if (found := scored_of(outcome, goal)) is not None]
    both = [(found.proxy, -goal.loss(found.value)) for found in scored if found.proxy is not None]
    alike = any(len(set(column)) < 2 for column in zip(*both, strict=True))
    return Looks(
        full=len(scored),
        proxied=sum(isinstance(outcome, Measured) and PROXY in outcome.metrics for outcome in outcomes),
        agreement=None if len(both) < 3 or alike else float(spearmanr(both).statistic),
    )
