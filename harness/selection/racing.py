"""Race of rebuilt models in elimination rounds, logged turn by turn.

See `harness.timing.racing_test` for who is out of it when, and `harness.selection.paired_timing` for the record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from harness.config.sections import TurnSchedule
from harness.progress import Observer
from harness.selection.paired_timing import (
    PairedComparison,
    read_comparison,
    read_speedups,
    run_comparison,
    turn_speedups,
    warn_if_disturbed,
)
from harness.timing.confirmation import EngineFactory, noise_floor
from harness.timing.racing_test import TURNS_PER_RACING_ROUND, build_variance_slack, surviving
from harness.timing.turn_log import TurnMatrix

__all__ = ["FIRST_SCHEDULE", "SAMPLES_PER_TURN", "run_race", "select_winner"]

SAMPLES_PER_TURN = 3
"""Inferences of a turn, at least."""
FIRST_SCHEDULE = TurnSchedule(builds=1, rounds=TURNS_PER_RACING_ROUND[0], samples=SAMPLES_PER_TURN)
K = TypeVar("K")


def run_race(
    contest: PairedComparison,
    lots: Mapping[K, Sequence[str]],
    wanted: int,
    open_engines: EngineFactory,
    observer: Observer,
    retry_failed: bool = False,
) -> dict[K, list[str]]:
    """Hold the heats, each with fresh builds; a row goes on as long as it may be among the wanted of any lot.

    Who goes on after a heat follows from the turns up to it, so that a race which is held again times nothing again.

    Args:
        contest: Of all rows, with the plan of the first heat.
        lots: Rows that are rivals, by name; one may be in several lots.
        wanted: How many of each lot.

    Returns:
        Of each lot those that came through unbeaten, in its order. Whoever fails in any heat is out.

    Raises:
        UserError: As `run_comparison`.
    """
    left = {key: list(lot) for key, lot in lots.items()}
    rows = contest.rows
    for number, turns in enumerate(TURNS_PER_RACING_ROUND):
        schedule = contest.schedule.model_copy(update={"rounds": turns})
        heat = replace(contest, rows=rows, schedule=schedule, first_build=number)
        run_comparison(heat, open_engines, observer, retry_failed)
        readings = TurnMatrix(event for event in read_comparison(contest.path) if event.build <= number)
        slack = build_variance_slack(number + 1, max(contest.floor, noise_floor(readings, contest.baseline.name)))
        ratios = turn_speedups(readings, contest.baseline.name)
        left = {key: _surviving(lot, ratios, wanted, slack) for key, lot in left.items()}
        close = {name for lot in left.values() if len(lot) > wanted for name in lot}
        rows = tuple(row for row in contest.rows if row.name in close)
        if not rows:
            break
    warn_if_disturbed(contest, observer)
    return left


def select_winner(contest: PairedComparison, open_engines: EngineFactory, observer: Observer) -> tuple[str, float]:
    """Run a race of all rows for one winner, and return its name and its speedup over the baseline.

    If no row survives, the fastest row with turns in the record wins; without any, the result is ("", 0.0).

    Raises:
        UserError: As `run_race`.
    """
    (left,) = run_race(contest, {"all": [row.name for row in contest.rows]}, 1, open_engines, observer).values()
    speedups = read_speedups(contest.path, contest.baseline.name)
    won = max(left or speedups, key=speedups.__getitem__, default="")
    return won, speedups.get(won, 0.0)


def _surviving(
    lot: Sequence[str], ratios: Mapping[str, Mapping[tuple[int, int], float]], wanted: int, slack: float
) -> list[str]:
    """Those of a lot that came through and are not beaten."""
    timed = [name for name in lot if name in ratios]
    turns = sorted({turn for name in timed for turn in ratios[name]})
    if not turns:
        return timed
    log_ms = -np.log([[ratios[name].get(turn, np.nan) for turn in turns] for name in timed])
    return [name for name, stays in zip(timed, surviving(log_ms, wanted, slack), strict=True) if stays]
