"""Confirmation of the rows of a task, and the A/A noise floor before its searches; raw turns are stored.

`confirm.jsonl` grows turn by turn, so the confirmation goes on where it stopped; `floor.json` is written once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from harness import registry
from harness.api import Candidate, capabilities_of
from harness.config.sections import Confirmation, PluginSpec
from harness.graph.io.files import digest_file
from harness.progress import Observer
from harness.results_dir.artifacts import FLOAT_ROW, ExportedModel, FinalistSet
from harness.results_dir.fingerprint import require_same_fingerprint
from harness.results_dir.io import read_json, write_json
from harness.selection.paired_timing import (
    TURN_ORDER_SEED,
    PairedComparison,
    read_comparison,
    run_comparison,
    warn_if_disturbed,
)
from harness.timing.confirmation import MAX_GROUP_ROWS, Contender, confirm, summarize_turns
from harness.timing.turn_log import Turn, TurnEvent, decode_turn_event, disturbance_note, encode_turn_event
from harness.timing.workers.engines import WorkerSpec
from harness.timing.workers.execution_target import SpecEngineFactory
from search.space import edges_digest

__all__ = [
    "baseline_latency", "confirm_rows", "measure_noise_floor", "read_events", "read_noise_floor",
    "reference_latency_if_noisy",
]  # fmt: skip

CONFIRMATION_LOG_NAME = "confirm.jsonl"
NOISE_FLOOR_SCHEDULE = Confirmation(builds=3, rounds=12, samples=3)
"""Of the floor before the searches; the confirmation's own twin adds to it."""
NOISY_TURN_SD = 0.02
"""Turns of one engine that scatter by more than this make up for the price of timing every candidate beside it."""


def measure_noise_floor(
    open_engines: SpecEngineFactory,
    worker: WorkerSpec,
    model_file: Path,
    backend: Mapping[str, Any],
    folder: Path,
    observer: Observer,
) -> float:
    """The gain that the baseline has over itself, rebuilt, before any search; see
    `harness.statistics.noise_floor_from_ratios`.

    Args:
        open_engines: Opens engines where the cell runs.
        model_file: The float model.
        backend: The benchmarker's own facts.
        folder: The cell's.

    Raises:
        UserError: The baseline fails, or the floor was measured with another model, runtime or device.
    """
    path = folder / "floor.json"
    basis = {"model_sha256": digest_file(model_file), "backend": dict(backend)}
    if path.exists():
        record = read_json(path)
        require_same_fingerprint(path, {key: record.get(key) for key in basis}, basis)
        return float(record["floor"])
    baseline = Contender(
        name=FLOAT_ROW, candidate=Candidate(digest=edges_digest(()), edges=(), source=lambda: model_file)
    )
    with observer.work("A/A check", NOISE_FLOOR_SCHEDULE.builds * NOISE_FLOOR_SCHEDULE.rounds * 2) as step:
        events = []
        for event in confirm(
            [],
            baseline,
            open_engines=lambda: open_engines(worker),
            schedule=NOISE_FLOOR_SCHEDULE,
            rng=np.random.default_rng(TURN_ORDER_SEED),
        ):
            events.append(event)
            step.advance()
    found = summarize_turns(events, baseline=FLOAT_ROW)
    floor, note = found.floor, disturbance_note(found.disturbed)
    observer.say(
        f"A/A check before the searches: the float model, rebuilt, differs from itself by up to {floor:.1%} (the A/A "
        "floor of the tables also covers the confirmation)"
    )
    if note:
        observer.say(f"A/A check: {note}: close other work and repeat")
    write_json(path, {"floor": floor, **basis, "events": [json.loads(encode_turn_event(event)) for event in events]})
    return floor


def read_noise_floor(folder: Path) -> float:
    """The floor that was measured before a cell's searches; 0 where none was."""
    path = folder / "floor.json"
    return float(read_json(path).get("floor", 0.0)) if path.exists() else 0.0


def reference_latency_if_noisy(
    folder: Path, backend: PluginSpec, beside: Literal["auto", "always", "never"]
) -> float | None:
    """The baseline's latency in milliseconds where candidates are to be timed beside it; None: each alone.

    Args:
        backend: One that cannot take turns (`interleaved` of `harness.api.Capabilities`) has each timed alone.
        beside: What the experiment wants; "auto": where the baseline's turns before the searches scatter by more than
            `NOISY_TURN_SD` (standard deviation on the log scale). Not where the floor is above it: turns of the floor
            are paired, so it stays low on a machine whose pace changes, and readings one by one do not.
    """
    if not capabilities_of(registry.load_plugin("benchmarker", backend.use)).interleaved:
        return None
    events = [decode_turn_event(json.dumps(event)) for event in read_json(folder / "floor.json")["events"]]
    turns_ms = [float(np.median(event.samples_ms)) for event in events if isinstance(event, Turn)]
    if beside == "never" or (beside == "auto" and float(np.std(np.log(turns_ms), ddof=1)) <= NOISY_TURN_SD):
        return None
    return baseline_latency(folder)


def baseline_latency(folder: Path) -> float:
    """The baseline's latency in milliseconds before a cell's searches: the one scale of readings, bounds and notes."""
    events = [decode_turn_event(json.dumps(event)) for event in read_json(folder / "floor.json")["events"]]
    return summarize_turns(events, baseline=FLOAT_ROW).rows[FLOAT_ROW].latency_ms.value


def confirm_rows(  # noqa: PLR0913 - what, where, and how
    plan: Confirmation,
    open_engines: SpecEngineFactory,
    worker: WorkerSpec,
    table: FinalistSet,
    backend: Mapping[str, Any],
    observer: Observer,
    retry_failed: bool = False,
) -> None:
    """Confirm what is not yet confirmed.

    Where the rows (their files' hashes tell), the plan, how many rows share a worker, or the runtime changed, it starts
    anew, and the old record is kept as `confirm.<n>.jsonl`.

    Args:
        plan: How.
        open_engines: Opens engines where the cell runs.
        backend: The benchmarker's own facts.
        retry_failed: Try once more what failed.

    Raises:
        UserError: The baseline fails, or the record cannot be written.
    """
    path = table.folder / CONFIRMATION_LOG_NAME
    header = {
        "rows": {row.id: row.sha256 for row in table.rows},
        "plan": plan.model_dump(mode="json", exclude={"contenders"}),  # the rows tell who won the runoff
        "group": MAX_GROUP_ROWS,
        "backend": dict(backend),
    }
    turns = {row.id: _make_contender(row, table) for row in table.rows}
    baseline = turns.pop(FLOAT_ROW)
    rows = tuple(turns.values())
    contest = PairedComparison(
        name="confirmation", path=path, header=header, baseline=baseline, rows=rows, schedule=plan
    )
    run_comparison(contest, lambda: open_engines(worker), observer, retry_failed)
    warn_if_disturbed(contest, observer)


def read_events(folder: Path) -> tuple[TurnEvent, ...]:
    """Events of a cell's confirmation.

    Raises:
        UserError: A damaged line.
    """
    return read_comparison(folder / CONFIRMATION_LOG_NAME)


def _make_contender(row: ExportedModel, table: FinalistSet) -> Contender:
    return Contender(name=row.id, candidate=table.candidate(row), benchmarker=row.benchmarker)
