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

from harness.base.errors import UserError
from harness.base.progress import Observer
from harness.config.sections import Confirmation, PluginSpec
from harness.graph.io.digests import digest_file
from harness.measure.turn_log import MAX_GROUP_ROWS, TWIN, Turn, TurnEvent, encode_turn_event, summarize_turns
from harness.plugins import registry
from harness.plugins.api import Candidate, capabilities_of
from harness.results.artifacts import FLOAT_ROW, FinalistSet
from harness.results.journal import read_matching_record
from harness.results.manifest import write_record
from harness.results.turns import (
    CONFIRMATION_LOG_NAME,
    NOISE_FLOOR_FILE_NAME,
    baseline_latency,
    noise_floor_events,
)
from harness.run.confirm.paired_timing import PairedComparison, run_comparison, warn_if_disturbed
from harness.run.confirm.rounds import TimedRow
from harness.workers.engines import WorkerSpec
from harness.workers.trial_pool import SpecEngineFactory
from search.space import edges_digest

NOISE_FLOOR_SCHEDULE = Confirmation(builds=3, rounds=8, samples=3)
NOISY_TURN_SD = 0.02  # standard deviation of log latencies above which candidates are timed in turns with the baseline


def measure_noise_floor(
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
    `harness.base.statistics.noise_floor_from_ratios`.

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


def reference_latency_if_noisy(
    folder: Path, backend: PluginSpec, interleave: Literal["auto", "always", "never"]
) -> float | None:
    """Return the baseline's latency in milliseconds if candidates are to be timed in turns with it, or None.

    Args:
        folder: Folder of the task.
        backend: Backend; None is returned if it cannot take turns (`interleaved` of
            `harness.plugins.api.Capabilities`).
        interleave: Setting of the experiment. "auto" means in turns if the logarithms of the baseline's turns before
            the searches have a standard deviation above `NOISY_TURN_SD`. The noise floor is no criterion, because it
            comes from paired turns, which are steady even on a machine whose speed changes.
    """
    if not capabilities_of(registry.load_plugin("benchmarker", backend.use)).interleaved:
        return None
    turns_ms = [float(np.median(event.samples_ms)) for event in noise_floor_events(folder) if isinstance(event, Turn)]
    if interleave == "never" or (interleave == "auto" and float(np.std(np.log(turns_ms), ddof=1)) <= NOISY_TURN_SD):
        return None
    return baseline_latency(folder)


def confirm_rows(
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
