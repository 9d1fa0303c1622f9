"""Logs of timed turns in the folder of a task: noise floor, final selection and confirmation."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from harness.base.errors import UserError
from harness.base.files import DamagedFile, read_json
from harness.config.sections import Confirmation
from harness.measure.turn_log import (
    TWIN,
    TurnEvent,
    TurnMatrix,
    decode_turn_event,
    summarize_turns,
)
from harness.results.artifacts import FLOAT_ROW
from harness.results.lines import first_line, log_header, read_lines, shown_path, stored_path

CONFIRMATION_LOG_NAME, NOISE_FLOOR_FILE_NAME = "confirmation.jsonl", "noise_floor.json"


def read_noise_floor(folder: Path) -> float:
    """Return the noise floor that was measured before the searches of a task, or 0 without one."""
    path = folder / NOISE_FLOOR_FILE_NAME
    floor = read_json(path, {}).get("noise_floor", 0.0)
    if not isinstance(floor, int | float) or not 0 <= floor < math.inf:
        raise UserError(f"{path}: noise_floor: a number of at least 0, but got {floor!r}; remove the file to repeat it")
    return float(floor)


def baseline_latency(folder: Path) -> float:
    """Return the latency in ms of the baseline before the searches of a task.

    Candidates that are timed in turns with the baseline are scaled to it.
    """
    return summarize_turns(noise_floor_events(folder), baseline=FLOAT_ROW).rows[FLOAT_ROW].latency_ms.value


def noise_floor_events(folder: Path) -> list[TurnEvent]:
    """Return the events of the float model and its twin before the searches of a task."""
    return [decode_turn_event(json.dumps(event)) for event in read_json(folder / NOISE_FLOOR_FILE_NAME)["events"]]


def read_begun_plan(folder: Path) -> Confirmation | None:
    """Return the plan in the log of a confirmation, or None if there is no log."""
    path = folder / CONFIRMATION_LOG_NAME
    try:
        return Confirmation(**log_header(path)["plan"]) if first_line(path) else None
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedFile(shown_path(path), f"no plan ({error})", where="line 1") from error


FINAL_SELECTION_LOG_NAME = "final_selection.jsonl"  # in the folder of a task


def read_comparison(path: Path) -> tuple[TurnEvent, ...]:
    """Return the events of a log without a partial last line, or none if the log does not exist."""
    events = []
    for number, line in read_lines(path) if stored_path(path) is not None else ():
        try:
            events += [decode_turn_event(line)] if number > 1 else []
        except ValueError as error:
            raise DamagedFile(shown_path(path), str(error), where=f"line {number}") from error
    return tuple(events)


def turn_speedups(readings: TurnMatrix, baseline: str) -> dict[str, dict[tuple[int, int], float]]:
    """Return the speedup over the baseline in each turn that both have, by row and then by (build, round).

    The baseline, its twin and rows that failed in any build are left out; empty if the baseline has no turn.
    """
    turns, ratios = readings.turns, dict[str, dict[tuple[int, int], float]]()
    for name, workers in turns.items():
        completed = {build for (build, _), own in workers.items() if own}  # a build that is repeated has another group
        if name in {baseline, TWIN} or any(build not in completed for build, _ in readings.failed.get(name, {})):
            continue
        own_ratios = {
            (key[0], number): turns[baseline][key][number] / own_ms
            for key, numbers in workers.items()
            for number, own_ms in numbers.items()
            if number in turns[baseline].get(key, {})
        }
        if own_ratios:
            ratios[name] = own_ratios
    return ratios


def median_speedups(events: Iterable[TurnEvent], baseline: str) -> dict[str, float]:
    """Return the median over turns of the speedups of `turn_speedups`, by row."""
    found = turn_speedups(TurnMatrix(events), baseline)
    return {name: float(np.median([*ratios.values()])) for name, ratios in found.items()}
