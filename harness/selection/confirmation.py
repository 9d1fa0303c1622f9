"""Confirmation of the rows of a task, and the noise floor before its searches.

Raw turns are stored: `confirmation.jsonl` grows turn by turn, so an interrupted confirmation continues;
`noise_floor.json` is written once.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from harness import registry
from harness.api import Candidate, capabilities_of
from harness.config.sections import Confirmation, PluginSpec
from harness.errors import UserError
from harness.graph.io.digests import digest_file
from harness.progress import Observer
from harness.results_dir.artifacts import FLOAT_ROW, FinalistSet
from harness.results_dir.fingerprint import read_matching_record
from harness.results_dir.io import DamagedFile, read_json
from harness.results_dir.lines import first_line, read_lines, shown_path
from harness.results_dir.manifest import write_record
from harness.selection.paired_timing import PairedComparison, read_comparison, run_comparison, warn_if_disturbed
from harness.timing.confirmation import MAX_GROUP_ROWS, TimedRow, summarize_turns
from harness.timing.turn_log import TWIN, Turn, TurnEvent, decode_turn_event, encode_turn_event
from harness.timing.workers.engines import WorkerSpec
from harness.timing.workers.execution_target import SpecEngineFactory
from harness.untrusted import parse_json
from search.space import edges_digest

CONFIRMATION_LOG_NAME, NOISE_FLOOR_FILE_NAME = "confirmation.jsonl", "noise_floor.json"
NOISE_FLOOR_SCHEDULE = Confirmation(builds=3, rounds=8, samples=3)
NOISY_TURN_SD = 0.02  # standard deviation of log latencies above which candidates are timed in turns with the baseline


def measure_noise_floor(  # noqa: PLR0913 - what, where, and how
    open_engines: SpecEngineFactory,
    worker: WorkerSpec,
    model_file: Path,
    backend: Mapping[str, Any],
    folder: Path,
    observer: Observer,
    rows: Sequence[TimedRow] = (),
    seconds: float = math.inf,
) -> tuple[float, tuple[TurnEvent, ...]]:
    """Measure the noise floor of a task, or read it if it was measured before.

    It is the gain of the rebuilt baseline over itself as a share, so 0.02 is a speedup of 1.02; see
    `harness.statistics.noise_floor_from_ratios`.

    Args:
        open_engines: Function that opens engines on the machine of the task.
        worker: Specification of the worker.
        model_file: The float model.
        backend: Facts of the benchmarker.
        folder: Folder of the task.
        observer: Receiver of the progress.
        rows: Candidates that are timed in the same builds and rounds.
        seconds: Time after which fewer rounds are timed.

    Returns:
        The noise floor, and the turns of the baseline and the candidates; no turns if the floor was read.

    Raises:
        UserError: The baseline fails, or the floor was measured with another model, runtime or device.
    """
    path = folder / NOISE_FLOOR_FILE_NAME
    basis = {"model_sha256": digest_file(model_file), "backend": dict(backend)}
    if (record := read_matching_record(path, basis)) is not None:
        return float(record["noise_floor"]), ()
    float_model = Candidate(digest=edges_digest(()), edges=(), source=lambda: model_file)
    comparison = PairedComparison(
        name="A/A check and initial placements" if rows else "A/A check",
        baseline=TimedRow(name=FLOAT_ROW, candidate=float_model),
        rows=tuple(rows),
        schedule=NOISE_FLOOR_SCHEDULE,
        seconds=seconds,
    )
    started_s = time.monotonic()
    try:
        events = run_comparison(comparison, lambda: open_engines(worker), observer)
    except UserError as error:
        if not rows:
            raise
        left_s = max(0.0, seconds - (time.monotonic() - started_s))
        # For instance, the memory may not suffice for all rows.
        observer.say(f"{comparison.name}: {error}; the A/A check is repeated without initial placements")
        return measure_noise_floor(open_engines, worker, model_file, backend, folder, observer, (), left_s)
    noise_floor = summarize_turns(events, baseline=FLOAT_ROW).noise_floor
    observer.say(
        f"A/A check before the searches: the float model, rebuilt, differs from itself by up to {noise_floor:.1%} (the "
        "noise floor of the tables also covers the confirmation)"
    )
    warn_if_disturbed(comparison.name, events, observer)
    own = {FLOAT_ROW, TWIN}
    write_record(
        path,
        {
            "noise_floor": noise_floor,
            **basis,
            "events": [json.loads(encode_turn_event(e)) for e in events if e.row in own],
        },
    )
    return noise_floor, events


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


def reference_latency_if_noisy(
    folder: Path, backend: PluginSpec, interleave: Literal["auto", "always", "never"]
) -> float | None:
    """Return the baseline's latency in milliseconds if candidates are to be timed in turns with it, or None.

    Args:
        folder: Folder of the task.
        backend: Backend; None is returned if it cannot take turns (`interleaved` of `harness.api.Capabilities`).
        interleave: Setting of the experiment. "auto" means in turns if the logarithms of the baseline's turns before
            the searches have a standard deviation above `NOISY_TURN_SD`. The noise floor is no criterion, because it
            comes from paired turns, which are steady even on a machine whose speed changes.
    """
    if not capabilities_of(registry.load_plugin("benchmarker", backend.use)).interleaved:
        return None
    turns_ms = [float(np.median(event.samples_ms)) for event in _noise_floor_events(folder) if isinstance(event, Turn)]
    if interleave == "never" or (interleave == "auto" and float(np.std(np.log(turns_ms), ddof=1)) <= NOISY_TURN_SD):
        return None
    return baseline_latency(folder)


def baseline_latency(folder: Path) -> float:
    """Return the latency in ms of the baseline before the searches of a task.

    Candidates that are timed in turns with the baseline are scaled to it.

    Raises:
        UserError: The noise floor was not measured, or its file is damaged.
    """
    return summarize_turns(_noise_floor_events(folder), baseline=FLOAT_ROW).rows[FLOAT_ROW].latency_ms.value


def count_noise_floor_turns(folder: Path) -> int:
    """Return the number of turns of the baseline and its twin before the searches of a task."""
    return len(_noise_floor_events(folder))


def _noise_floor_events(folder: Path) -> list[TurnEvent]:
    return [decode_turn_event(json.dumps(event)) for event in read_json(folder / NOISE_FLOOR_FILE_NAME)["events"]]


def confirm_rows(  # noqa: PLR0913 - what, where, and how
    plan: Confirmation,
    open_engines: SpecEngineFactory,
    worker: WorkerSpec,
    table: FinalistSet,
    backend: Mapping[str, Any],
    observer: Observer,
    retry_failed: bool = False,
) -> None:
    """Time the missing turns of the confirmation, and append them to its log.

    If the rows (by the digests of their files), the plan, the number of rows in a worker or the runtime changed, the
    confirmation starts anew, and the old log is archived as `confirmation.<n>.jsonl`.

    Args:
        plan: Numbers of builds, rounds and samples.
        open_engines: Function that opens engines on the machine of the task.
        worker: Specification of the worker.
        table: Exported rows.
        backend: Facts of the benchmarker.
        observer: Receiver of the progress.
        retry_failed: Whether failed rows are timed once more.

    Raises:
        UserError: The baseline fails, or the log cannot be written.
    """
    header = {
        "rows": {row.id: row.sha256 for row in table.rows},
        "plan": plan.model_dump(mode="json", exclude={"candidates"}),  # used only by the final selection
        "group": MAX_GROUP_ROWS,
        "backend": dict(backend),
    }
    timed_rows = {
        row.id: TimedRow(name=row.id, candidate=table.candidate(row), benchmarker=row.benchmarker) for row in table.rows
    }
    comparison = PairedComparison(
        name="confirmation",
        path=table.folder / CONFIRMATION_LOG_NAME,
        header=header,
        baseline=timed_rows.pop(FLOAT_ROW),
        rows=tuple(timed_rows.values()),
        schedule=plan,
    )
    events = run_comparison(comparison, lambda: open_engines(worker), observer, retry_failed)
    warn_if_disturbed(comparison.name, events, observer)


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
