"""Reads journals back: who was the incumbent after how many evaluations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from harness.run.engine import Goal, eligible, score_of
from harness.run.journal import Entry
from search.api import Score

__all__ = ["Evaluated", "evaluated", "incumbents", "leaders"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """One evaluation that worked, as the search saw it.

    Attributes:
        evaluations: Number of evaluations spent when it was told, itself and failures included.
    """

    evaluations: int
    elapsed_s: float
    digest: str
    choices: tuple[int, ...]
    origin: str
    score: Score


def evaluated(entries: Iterable[Entry], goal: Goal) -> Iterator[Evaluated]:
    """The evaluations that worked, in order; duplicates are free and left out."""
    spent = 0
    for entry in entries:
        if entry.told is None:
            continue
        spent += 1
        score = score_of(entry.told.outcome, goal)
        if isinstance(score, Score):
            yield Evaluated(
                evaluations=spent,
                elapsed_s=entry.told.elapsed_s,
                digest=entry.asked.digest,
                choices=entry.asked.choices,
                origin=entry.asked.origin,
                score=score,
            )


def incumbents(entries: Iterable[Entry], goal: Goal) -> Iterator[Evaluated]:
    """Each evaluation that became the incumbent, in order."""
    best: Evaluated | None = None
    for trial in evaluated(entries, goal):
        if eligible(trial.score) and (best is None or trial.score.objective < best.score.objective):
            best = trial
            yield trial


def leaders(entries: Iterable[Entry], goal: Goal, evaluations: int, count: int) -> list[Evaluated]:
    """The best `count` distinct placements after so many evaluations, best first."""
    within = [t for t in evaluated(entries, goal) if t.evaluations <= evaluations and eligible(t.score)]
    return sorted(within, key=lambda trial: trial.score.objective)[:count]
