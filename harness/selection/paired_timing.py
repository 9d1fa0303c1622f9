"""Paired comparison: rows timed in turns against the baseline, logged turn by turn, and resumable."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from harness.config.sections import TurnSchedule
from harness.errors import UserError
from harness.progress import Observer
from harness.results_dir.io import add_checksum, append_line, archive_existing, truncate_partial_line
from harness.results_dir.lines import read_lines, restore_lines, stored_path
from harness.timing.confirmation import MAX_GROUP_ROWS, Contender, EngineFactory, confirm
from harness.timing.turn_log import (
    TWIN,
    RowFailure,
    TurnEvent,
    TurnMatrix,
    decode_turn_event,
    disturbance_note,
    encode_turn_event,
)

__all__ = [
    "SELECTION_LOG_NAME", "TURN_ORDER_SEED", "PairedComparison", "read_comparison", "read_speedups",
    "run_comparison", "turn_speedups", "warn_if_disturbed",
]  # fmt: skip

SELECTION_LOG_NAME = "runoff.jsonl"
"""Name in a cell's folder of the contest between the best of each search."""
TURN_ORDER_SEED = 0
"""Of the order of turns; it has nothing to do with the seeds of searches."""
_TurnKey = tuple[int, int, str, int]
"""A turn: build, group, row, round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedComparison:
    """What is timed against what, and where it is written down.

    Attributes:
        name: What the user reads beside the bar, and before what fails.
        header: What it depends on, as JSON has it; a record with another header is put aside.
        floor: Known A/A noise floor; what twins show counts where it is larger.
        first_build: Number of the first build, where this goes on with a record whose builds before were of other rows.
    """

    name: str
    path: Path
    header: dict[str, Any]
    baseline: Contender
    rows: tuple[Contender, ...]
    schedule: TurnSchedule
    floor: float = 0.0
    first_build: int = 0


def run_comparison(
    contest: PairedComparison, open_engines: EngineFactory, observer: Observer, retry_failed: bool = False
) -> None:
    """Time what is not yet timed.

    A record that was made with another header is kept as `NAME.<n>.jsonl`, and the contest starts anew.

    Args:
        retry_failed: What failed counts as not yet timed; the rows that shared its worker are timed again with it.

    Raises:
        UserError: The baseline fails, or the record cannot be written.
    """
    path, plan = contest.path, contest.schedule
    text = add_checksum(json.dumps({"kind": "header", **contest.header}, sort_keys=True))
    _archive_other_header(path, text)
    done = tuple(event for event in read_comparison(path) if not (retry_failed and isinstance(event, RowFailure)))
    own = (
        replace(event, build=event.build - contest.first_build) for event in done if event.build >= contest.first_build
    )
    left = _remaining_turns(contest, done)
    title = f"{contest.name}: {len(contest.rows)} rows"
    with path.open("ab", buffering=0) as file, observer.work(title, len(left)) as step:
        if file.tell() == 0:
            append_line(file, text, path)
        events = confirm(
            contest.rows,
            contest.baseline,
            open_engines=open_engines,
            schedule=plan,
            rng=np.random.default_rng(TURN_ORDER_SEED + contest.first_build),
            done=own,
        )
        for event in (replace(event, build=event.build + contest.first_build) for event in events):
            append_line(file, add_checksum(encode_turn_event(event)), path, sync=False)
            if isinstance(event, RowFailure):
                observer.say(f"{contest.name}: {event.row} failed: {event.failed.stage}: {event.failed.reason}")
            for key in _turn_keys(event, plan.rounds) & left:
                left.discard(key)
                step.advance(f"build {event.build + 1} of {contest.first_build + plan.builds}")


def warn_if_disturbed(contest: PairedComparison, observer: Observer) -> None:
    """Say where something else was at work in too many of its turns.

    Raises:
        UserError: A damaged line.
    """
    if note := disturbance_note(TurnMatrix(read_comparison(contest.path)).disturbed_share):
        observer.say(f"{contest.name}: {note}: close other work and repeat")


def read_comparison(path: Path) -> tuple[TurnEvent, ...]:
    """Events of a contest; a torn last line is left out.

    Raises:
        UserError: A damaged line.
    """
    if stored_path(path) is None:
        return ()
    number = 1
    try:
        return tuple(decode_turn_event(line) for number, line in read_lines(path) if number > 1)
    except ValueError as error:
        raise UserError(f"{path}, line {number}: {error}; move the file away to have it timed anew") from error


def turn_speedups(readings: TurnMatrix, baseline: str) -> dict[str, dict[tuple[int, int], float]]:
    """Of each row of a contest that came through, its speedup over the baseline in each turn, by build and round.

    A row that failed in any build did not come through.
    """
    turns = readings.turns
    found = {
        name: {
            (key[0], number): turns[baseline][key][number] / own_ms
            for key, numbers in workers.items()
            for number, own_ms in numbers.items()
            if number in turns[baseline].get(key, {})
        }
        for name, workers in turns.items()
        if name not in {baseline, TWIN} and not _has_failed(readings, name)
    }
    return {name: ratios for name, ratios in found.items() if ratios}


def _has_failed(readings: TurnMatrix, row: str) -> bool:
    """Whether a row failed in any build; where that was tried again it may have had other neighbours."""
    came_through = {build for (build, _), turns in readings.turns[row].items() if turns}
    return any(build not in came_through for build, _ in readings.failed.get(row, {}))


def read_speedups(path: Path, baseline: str) -> dict[str, float]:
    """Of each row of a contest that came through, its speedup over the baseline: the median over its turns.

    Raises:
        UserError: A damaged line.
    """
    found = turn_speedups(TurnMatrix(read_comparison(path)), baseline)
    return {name: float(np.median([*ratios.values()])) for name, ratios in found.items()}


def _archive_other_header(path: Path, header: str) -> None:
    """Cut a torn last line off an earlier record; keep it under another name where it has another header."""
    restore_lines(path)
    if not path.exists():
        return
    truncate_partial_line(path)
    there = path.read_text(encoding="utf-8").partition("\n")[0]
    if there and there != header:
        archive_existing(path)


def _remaining_turns(contest: PairedComparison, done: Iterable[TurnEvent]) -> set[_TurnKey]:
    """The turns still to come; a worker that did not come to its end starts again."""
    names, plan = [row.name for row in contest.rows], contest.schedule
    groups: list[Sequence[str]] = [
        names[start : start + MAX_GROUP_ROWS] for start in range(0, len(names), MAX_GROUP_ROWS)
    ] or [()]
    whole = {
        (build, group, row, number)
        for build in range(contest.first_build, contest.first_build + plan.builds)
        for group, members in enumerate(groups)
        for row in (contest.baseline.name, TWIN, *members)
        for number in range(plan.rounds)
    }
    missing = whole.difference(*(_turn_keys(event, plan.rounds) for event in done))
    again = {key[:2] for key in missing}
    return {key for key in whole if key[:2] in again}


def _turn_keys(event: TurnEvent, rounds: int) -> set[_TurnKey]:
    """The turns that an event stands for: one, or all that a row loses with its failure."""
    numbers = range(rounds) if isinstance(event, RowFailure) else (event.round,)
    return {(event.build, event.group, event.row, number) for number in numbers}
