"""Logs of timed turns in the folder of a task: noise floor, final selection and confirmation."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from harness.base.errors import UserError
from harness.base.files import DamagedFile, parse_json, read_json
from harness.config.sections import Confirmation
from harness.measure.turn_log import (
    TWIN,
    TurnEvent,
    TurnMatrix,
    decode_turn_event,
    summarize_turns,
)
from harness.results.artifacts import FLOAT_ROW
from harness.results.lines import first_line, read_lines, shown_path, stored_path

CONFIRMATION_LOG_NAME, NOISE_FLOOR_FILE_NAME = "confirmation.jsonl", "noise_floor.json"


def read_noise_floor(folder: Path) -> float:
    """Return the noise floor that was measured before the searches of a task, or 0 without one.

    Raises:
        UserError: The file is damaged, or its floor is not a number of at least 0.
    """
    path = folder / NOISE_FLOOR_FILE_NAME
    floor = read_json(path, {}).get("noise_floor", 0.0)
    if not isinstance(floor, int | float) or not 0 <= floor < math.inf:
        raise UserError(f"{path}: noise_floor: a number of at least 0, but got {floor!r}; remove the file to repeat it")
    return float(floor)


def baseline_latency(folder: Path) -> float:
    """Return the latency in ms of the baseline before the searches of a task.

    Candidates that are timed in turns with the baseline are scaled to it.

    Raises:
        UserError: The noise floor was not measured, or its file is damaged.
    """
    return summarize_turns(noise_floor_events(folder), baseline=FLOAT_ROW).rows[FLOAT_ROW].latency_ms.value


def count_noise_floor_turns(folder: Path) -> int:
    """Return the number of turns of the baseline and its twin before the searches of a task."""
    return len(noise_floor_events(folder))


def noise_floor_events(folder: Path) -> list[TurnEvent]:
    """Return the events of the float model and its twin before the searches of a task."""
    return [decode_turn_event(json.dumps(event)) for event in read_json(folder / NOISE_FLOOR_FILE_NAME)["events"]]


def read_begun_plan(folder: Path) -> Confirmation | None:
    """Return the plan in the log of a confirmation, or None if there is no log.

    Raises:
        UserError: The log of the confirmation is damaged.
    """
    path = folder / CONFIRMATION_LOG_NAME
    if not first_line(path):
        return None
    try:
        return Confirmation(**parse_json(next(read_lines(path))[1])["plan"])
    except (ValueError, KeyError, TypeError) as error:
        remedy = "move the file away to have it timed anew"
        raise DamagedFile(shown_path(path), f"no plan ({error})", where="line 1", remedy=remedy) from error


def read_events(folder: Path) -> tuple[TurnEvent, ...]:
    """Read the events of a task's confirmation.

    Raises:
        UserError: A line is damaged.
    """
    return read_comparison(folder / CONFIRMATION_LOG_NAME)


FINAL_SELECTION_LOG_NAME = "final_selection.jsonl"  # in the folder of a task


def read_comparison(path: Path) -> tuple[TurnEvent, ...]:
    """Return the events of a log without a partial last line, or none if the log does not exist.

    Raises:
        DamagedFile: A line is damaged.
    """
    events = []
    for number, line in read_lines(path) if stored_path(path) is not None else ():
        try:
            events += [decode_turn_event(line)] if number > 1 else []
        except ValueError as error:
            remedy = "move the file away to have it timed anew"
            raise DamagedFile(shown_path(path), str(error), where=f"line {number}", remedy=remedy) from error
    return tuple(events)


def turn_speedups(readings: TurnMatrix, baseline: str) -> dict[str, dict[tuple[int, int], float]]:
    """Return the speedup over the baseline in each turn that both have, by row and then by (build, round).

    The baseline, its twin and rows that failed in any build are left out; empty if the baseline has no turn.
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
    """Return whether a row failed in any build; a build that was tried again may have another group."""
    completed = {build for (build, _), turns in readings.turns[row].items() if turns}
    return any(build not in completed for build, _ in readings.failed.get(row, {}))


def read_speedups(path: Path, baseline: str) -> dict[str, float]:
    """Return the median speedup over the baseline by row, without rows that failed in a build.

    Raises:
        UserError: A line of the log is damaged.
    """
    return median_speedups(read_comparison(path), baseline)


def median_speedups(events: Iterable[TurnEvent], baseline: str) -> dict[str, float]:
    """Return the median over turns of the speedups of `turn_speedups`, by row."""
    found = turn_speedups(TurnMatrix(events), baseline)
    return {name: float(np.median([*ratios.values()])) for name, ratios in found.items()}
