"""Paired comparison: candidates timed in turns with a baseline, with an optional log from which it can continue."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from harness.base.files import archive_existing, json_equal, parse_json
from harness.base.progress import Observer
from harness.config.sections import TurnSchedule
from harness.measure.turn_log import (
    MAX_GROUP_ROWS,
    TWIN,
    RowFailure,
    TurnEvent,
    TurnMatrix,
    disturbance_note,
    encode_turn_event,
)
from harness.results.lines import LineLog, read_lines, restore_lines, stored_path
from harness.results.manifest import recorded, recorded_log
from harness.results.turns import read_comparison
from harness.run.confirm.rounds import EngineFactory, TimedRow, confirm

TURN_ORDER_SEED = 0  # independent of the seeds of searches
_TurnKey = tuple[int, int, str, int]
"""Build, group, row and round of a turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedComparison:
    """Candidates with their baseline, the schedule of their turns, and the log.

    Attributes:
        name: Name in the progress bar and in messages.
        path: Log of the turns; None to keep them in memory only.
        header: Inputs of the comparison as JSON values; a log with another header is archived.
        noise_floor: Known noise floor; the one of the rebuilt baseline is used if it is larger.
        first_build: Number of the first build, above 0 if the log has earlier builds of other rows.
        seconds: Time after which fewer rounds are timed, see `harness.run.confirm.rounds.confirm`; only without a log.
    """

    name: str
    baseline: TimedRow
    rows: tuple[TimedRow, ...]
    schedule: TurnSchedule
    path: Path | None = None
    header: dict[str, Any] = field(default_factory=dict)
    noise_floor: float = 0.0
    first_build: int = 0
    seconds: float = math.inf


def run_comparison(
    comparison: PairedComparison, open_engines: EngineFactory, observer: Observer, retry_failed: bool = False
) -> tuple[TurnEvent, ...]:
    """Time the turns that the log does not have yet, and return all turns.

    A log that was made with another header is archived as `NAME.<n>.jsonl`, and the comparison starts anew.

    Args:
        comparison: Candidates, baseline, schedule and log.
        retry_failed: Whether failed rows are timed again, together with the rows that shared their worker.

    Raises:
        UserError: The baseline fails, or the log cannot be written.
    """
    known = () if comparison.path is None else _continue_log(comparison.path, comparison.header)
    events = [event for event in known if not (retry_failed and isinstance(event, RowFailure))]
    first, schedule = comparison.first_build, comparison.schedule
    left = _remaining_turns(comparison, events)
    failures: dict[str, list[str]] = {}  # rows with each failure, as every build of a row fails
    title = f"{comparison.name}: {len(comparison.rows)} rows" if comparison.rows else comparison.name
    with _open_log(comparison.path, comparison.header) as write, observer.work(title, len(left)) as step:
        for timed in confirm(
            comparison.rows,
            comparison.baseline,
            open_engines=open_engines,
            schedule=schedule,
            rng=np.random.default_rng(TURN_ORDER_SEED + first),
            done=[replace(event, build=event.build - first) for event in events if event.build >= first],
            seconds=comparison.seconds,
        ):
            event = replace(timed, build=timed.build + first)
            write(event)
            events.append(event)
            if isinstance(event, RowFailure):
                failure = f"{event.failed.stage}: {event.failed.reason}"
                same = failures.setdefault(failure, [])
                if event.row not in same:
                    observer.say(f"{comparison.name}: {event.row} failed: {f'as {same[0]}' if same else failure}")
                    same.append(event.row)
            for key in _turn_keys(event, schedule.rounds) & left:
                left.discard(key)
                step.advance(f"build {event.build + 1} of {first + schedule.builds}")
    if left:
        made = schedule.rounds - len({number for *_, number in left})
        observer.say(f"{comparison.name}: {made} of {schedule.rounds} rounds, because of the time limit")
    return tuple(events)


def _continue_log(path: Path, header: Mapping[str, Any]) -> tuple[TurnEvent, ...]:
    """Return the events of an interrupted comparison; archive the log if it has another header."""
    if stored_path(path) is None:
        return ()
    _, first = next(read_lines(path), (0, b""))
    own = dict.fromkeys(("kind", "schema", "log", "id"))  # of the file, not of the comparison
    if first and not json_equal({**parse_json(first), **own}, {**json.loads(json.dumps(header)), **own}):
        with recorded(path):
            restore_lines(path)
            archive_existing(path)
    return read_comparison(path)


@contextmanager
def _open_log(path: Path | None, header: Mapping[str, Any]) -> Iterator[Callable[[TurnEvent], None]]:
    """Yield a function that appends an event to the log, or does nothing without a log."""
    if path is None:
        yield lambda event: None
        return
    with LineLog(path, header) as log, recorded_log(path):
        yield lambda event: log.append(encode_turn_event(event), sync=False)


def warn_if_disturbed(name: str, events: Iterable[TurnEvent], observer: Observer) -> None:
    """Report a comparison in which other processes disturbed more turns than `disturbance_note` allows."""
    if note := disturbance_note(TurnMatrix(events).disturbed_share):
        observer.say(f"{name}: {note}: close other work")


def _remaining_turns(comparison: PairedComparison, done: Iterable[TurnEvent]) -> set[_TurnKey]:
    """Return the turns that are not timed yet; the turns of an unfinished worker are timed again."""
    names, schedule, first = [row.name for row in comparison.rows], comparison.schedule, comparison.first_build
    groups: list[Sequence[str]] = [
        names[start : start + MAX_GROUP_ROWS] for start in range(0, len(names), MAX_GROUP_ROWS)
    ] or [()]
    whole = {
        (build, group, row, number)
        for build in range(first, first + schedule.builds)
        for group, members in enumerate(groups)
        for row in (comparison.baseline.name, TWIN, *members)
        for number in range(schedule.rounds)
    }
    missing = whole.difference(*(_turn_keys(event, schedule.rounds) for event in done))
    again = {key[:2] for key in missing}
    return {key for key in whole if key[:2] in again}


def _turn_keys(event: TurnEvent, rounds: int) -> set[_TurnKey]:
    """Return the turn of an event, or all turns that a row loses with its failure."""
    numbers = range(rounds) if isinstance(event, RowFailure) else (event.round,)
    return {(event.build, event.group, event.row, number) for number in numbers}
