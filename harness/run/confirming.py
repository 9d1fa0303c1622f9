"""Confirmation of a cell's rows; every turn is kept raw in `confirm.jsonl`, so it goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from harness.errors import UserError
from harness.measure.confirm import TWIN, Dropped, Event, confirm, decode_event, encode_event
from harness.measure.confirm import Row as Turn
from harness.measure.engines import WorkerSpec
from harness.measure.sandbox import open_engines
from harness.run.config import Experiment
from harness.run.journal import append_line, cut_torn_line
from harness.run.observe import Observer
from harness.run.rows import FLOAT_ROW, Row, candidate_of

__all__ = ["confirm_rows", "read_events"]

SEED = 0
"""Of the order of turns; it has nothing to do with the seeds of searches."""


def confirm_rows(
    experiment: Experiment, worker: WorkerSpec, rows: Sequence[Row], folder: Path, observer: Observer
) -> None:
    """Confirm what is not yet confirmed; rows that changed (their files' hashes tell) start anew.

    Raises:
        UserError: The baseline fails, or the record cannot be written.
    """
    path = folder / "confirm.jsonl"
    header = json.dumps({"kind": "header", "rows": {row.id: row.sha256 for row in rows}}, sort_keys=True)
    if path.exists():
        cut_torn_line(path)
        if path.read_text(encoding="utf-8").partition("\n")[0] != header:
            path.unlink()
    turns = {row.id: _turn(row, folder) for row in rows}
    baseline = turns.pop(FLOAT_ROW)
    plan = experiment.confirmation
    total = plan.builds * (len(turns) + 1) * plan.rounds
    done = read_events(folder)
    with path.open("ab") as file, observer.work(f"confirm {len(turns)} rows", total) as step:
        if file.tell() == 0:
            append_line(file, header, path)
        events = confirm(
            list(turns.values()),
            baseline,
            open_engines=lambda: open_engines(worker, experiment.limits),
            plan=plan,
            rng=np.random.default_rng(SEED),
            done=done,
        )
        for event in events:
            append_line(file, encode_event(event), path, sync=False)
            if isinstance(event, Dropped):
                observer.say(f"confirmation: {event.row} failed: {event.failed.stage}: {event.failed.reason}")
            elif event.row != TWIN:
                step.advance(f"build {event.build + 1} of {plan.builds}")


def read_events(folder: Path) -> tuple[Event, ...]:
    """Events of a cell's confirmation; a torn last line is left out.

    Raises:
        UserError: A damaged line.
    """
    path = folder / "confirm.jsonl"
    if not path.exists():
        return ()
    lines = path.read_bytes().splitlines(keepends=True)[1:]
    try:
        return tuple(decode_event(line.decode()) for line in lines if line.endswith(b"\n"))
    except ValueError as error:
        raise UserError(f"{path}: {error}; move the file away to confirm anew") from error


def _turn(row: Row, folder: Path) -> Turn:
    return Turn(
        name=row.id,
        candidate=candidate_of(row, folder),
        benchmarker=row.benchmarker,
    )
