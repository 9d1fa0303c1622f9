"""Race of rebuilt candidates in elimination rounds, logged turn by turn.

`harness.measure.elimination` has the statistical test of the elimination, `harness.run.confirm.paired_timing` the log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from harness.base.progress import Observer
from harness.config.sections import TurnSchedule
from harness.measure.elimination import TURNS_PER_RACING_ROUND, build_variance_slack, surviving
from harness.measure.turn_log import TurnEvent, TurnMatrix, estimate_noise_floor
from harness.results.turns import median_speedups, turn_speedups
from harness.run.confirm.paired_timing import PairedComparison, run_comparison, warn_if_disturbed
from harness.run.confirm.rounds import EngineFactory

SAMPLES_PER_TURN = 3  # smallest number of inferences in a turn
FIRST_SCHEDULE = TurnSchedule(builds=1, rounds=TURNS_PER_RACING_ROUND[0], samples=SAMPLES_PER_TURN)
K = TypeVar("K")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection(Generic[K]):
    """Result of a race.

    Attributes:
        surviving: Rows of each group that were not eliminated, in the order of the group; failed rows are eliminated.
        speedups: Median speedup over the baseline by row, without rows that failed.
    """

    surviving: dict[K, list[str]]
    speedups: dict[str, float]


def select(
    comparison: PairedComparison,
    groups: Mapping[K, Sequence[str]],
    open_engines: EngineFactory,
    observer: Observer,
    *,
    top_k: int = 1,
    retry_failed: bool = False,
    is_time_up: Callable[[], bool] = lambda: False,
) -> Selection[K]:
    """Run elimination rounds with fresh builds until every group has at most `top_k` rows, or no round is left.

    The rows of a round depend only on the turns before it, so a repeated race times nothing again.

    Args:
        comparison: All rows, with a log and the schedule of the first round.
        groups: Names of the rows that compete with each other; a row may be in several groups.
        top_k: Number of rows to select from each group.
        retry_failed: Whether failed rows are timed once more.
        is_time_up: Function that returns whether no further round may start; the first one and logged ones are used.

    Raises:
        UserError: The baseline fails, or the log cannot be written.
    """
    surviving_rows = {key: list(group) for key, group in groups.items()}
    rows, events = comparison.rows, tuple[TurnEvent, ...]()
    for number, turns in enumerate(TURNS_PER_RACING_ROUND):
        if number and is_time_up() and all(event.build < number for event in events):
            observer.say(f"{comparison.name}: ended after elimination round {number}, because of the time limit")
            break
        schedule = comparison.schedule.model_copy(update={"rounds": turns})
        this_round = replace(comparison, rows=rows, schedule=schedule, first_build=number)
        events = run_comparison(this_round, open_engines, observer, retry_failed)
        readings = TurnMatrix(event for event in events if event.build <= number)
        slack = build_variance_slack(
            number + 1, max(comparison.noise_floor, estimate_noise_floor(readings, comparison.baseline.name))
        )
        ratios = turn_speedups(readings, comparison.baseline.name)
        surviving_rows = {key: _surviving(group, ratios, top_k, slack) for key, group in surviving_rows.items()}
        close = {name for group in surviving_rows.values() if len(group) > top_k for name in group}
        rows = tuple(row for row in comparison.rows if row.name in close)
        if not rows:
            break
    warn_if_disturbed(comparison.name, events, observer)
    return Selection(surviving=surviving_rows, speedups=median_speedups(events, comparison.baseline.name))


def select_winner(comparison: PairedComparison, open_engines: EngineFactory, observer: Observer) -> tuple[str, float]:
    """Run a race of all rows for one winner, and return its name and its speedup over the baseline.

    If no row survives, the fastest row with turns in the log wins; without any, the result is ("", 0.0).

    Raises:
        UserError: The baseline fails, or the log cannot be written.
    """
    found = select(comparison, {"all": [row.name for row in comparison.rows]}, open_engines, observer)
    speedups = found.speedups
    won = max(found.surviving["all"] or speedups, key=speedups.__getitem__, default="")
    return won, speedups.get(won, 0.0)


def _surviving(
    group: Sequence[str], ratios: Mapping[str, Mapping[tuple[int, int], float]], top_k: int, slack: float
) -> list[str]:
    """Return the rows of a group that were timed and are not eliminated."""
    timed = [name for name in group if name in ratios]
    turns = sorted({turn for name in timed for turn in ratios[name]})
    if not turns:
        return timed
    log_ms = -np.log([[ratios[name].get(turn, np.nan) for turn in turns] for name in timed])
    return [name for name, stays in zip(timed, surviving(log_ms, top_k, slack), strict=True) if stays]
