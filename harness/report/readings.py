"""The raw readings behind figures, each with the file and the line that hold it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from harness.measure.events import Block, Readings
from harness.measure.stats import block_ci
from harness.records import Measured
from harness.report.naming import METRICS
from harness.report.results import CellResults
from harness.report.samples import counted
from harness.run.journal import read_journal
from harness.run.rows import FLOAT_ROW

__all__ = ["of_row", "trials", "turns"]

HEADER_LINES = 1
SCORES = ("drop", "metric", *(name for name, _, _ in METRICS.values()))
"""How headings of scores begin, see `harness.report.naming.score_head`."""


def of_row(cell: CellResults, line: Mapping[Any, Any], column: str) -> Iterator[str]:
    """Behind one figure of a row, by what the column shows.

    Args:
        cell: The row's.
        line: Raw figures of the row, see `harness.report.frames.main_frame`.
        column: Heading, without the name of a precision before it.
    """
    if line["verdict"] == "missing" or not line["row"]:
        yield f"nothing was measured: {line['reason'] or 'it is still to be run'}"
    elif column.startswith(("latency", "speedup", "verdict", "decision")):
        yield from turns(cell, line["row"], paired=not column.startswith("latency"))
    elif column.startswith("shrinkage"):
        yield from turns(cell, line["row"], paired=True)
        yield from trials(cell, line["method"].partition(" #")[0], int(line["seed"]))
    elif column.startswith(SCORES):
        yield from _scores(cell, line["row"], dropped=column.startswith("drop"))
    elif column.startswith(("builds", "minutes")) and line["seed"] == line["seed"] and line["seed"] is not None:
        yield from trials(cell, line["method"], int(line["seed"]))
    elif column.startswith("builds"):
        yield from turns(cell, line["row"], paired=False)
    else:
        yield from _facts(cell, line)


def turns(cell: CellResults, row: str, *, paired: bool) -> Iterator[str]:
    """Every turn of a row in the confirmation, with the baseline's turn beside it where a ratio is asked for."""
    path = cell.folder / "confirm.jsonl"
    yield f"{path}; samples in ms, one line a turn"
    number = {id(event): place + 1 + HEADER_LINES for place, event in enumerate(cell.events)}
    blocks = counted(cell.events)
    base = {(b.build, b.group, b.round): b for b in blocks if b.row == FLOAT_ROW}
    for block in sorted((b for b in blocks if b.row == row), key=lambda b: (b.build, b.group, b.round)):
        yield _turn(block, number[id(block)])
        other = base.get((block.build, block.group, block.round))
        if paired and other is not None and row != FLOAT_ROW:
            ratio = float(np.median(other.samples_ms)) / float(np.median(block.samples_ms))
            yield f"    baseline: {_turn(other, number[id(other)])}; ratio {ratio:.4f}"
    for event in cell.events:
        if not isinstance(event, Block) and event.row == row:
            yield f"line {number[id(event)]}: build {event.build} failed: {event.failed.stage}: {event.failed.reason}"
    yield from _together(cell, row, ratios=paired and row != FLOAT_ROW)


def _together(cell: CellResults, row: str, *, ratios: bool) -> Iterator[str]:
    """How the readings above come to the figure in the table."""
    bases, owns = Readings(cell.events).paired(row, FLOAT_ROW)
    builds = [np.divide(base, own) if ratios else np.array(own) for base, own in zip(bases, owns, strict=True)]
    if not builds:
        return
    what, unit = ("ratios", "") if ratios else ("turns", " ms")
    of = f"the median {what} of {len(builds)} builds" if len(builds) > 1 else f"the {what} of the one build"
    parts = [float(np.median(build)) for build in builds] if len(builds) > 1 else builds[0]
    listed = ", ".join(f"{part:.6g}" for part in parts)
    yield f"geometric mean of {of} ({listed}): {block_ci(builds).value:.6g}{unit}"


def _turn(block: Block, number: int) -> str:
    samples = " ".join(f"{sample:.6g}" for sample in block.samples_ms)
    middle = float(np.median(block.samples_ms))
    return f"line {number}: build {block.build}, turn {block.round}: median {middle:.6g} of {samples}"


def _scores(cell: CellResults, row: str, *, dropped: bool) -> Iterator[str]:
    path = cell.folder / "accuracy.json"
    for name in dict.fromkeys((row, FLOAT_ROW) if dropped else (row,)):
        score = cell.scores.get(name)
        if score is None:
            yield f"{path}: no score of {name}"
            continue
        items = score.get("per_item") or ()
        yield f"{path}: {cell.rows[name].sha256} {cell.rows[name].benchmarker} ({name})"
        if "failed" in score:
            yield f"    failed: {score['failed']}: {score['reason']}"
        yield from (f"    {metric}: {value}" for metric, value in score.get("metrics", {}).items())
        if items:
            yield f"    by item: {' '.join(f'{item:g}' for item in items)}"


def trials(cell: CellResults, searcher: str, seed: int) -> Iterator[str]:
    """Every trial of a search."""
    for search in cell.searches:
        if (search.searcher, search.seed) != (searcher, seed):
            continue
        yield f"{search.path}; one line a trial"
        for entry in read_journal(search.path):
            if entry.told is None:
                continue
            outcome = entry.told.outcome
            if isinstance(outcome, Measured):
                said = f"median {float(np.median(outcome.samples_ms)):.6g} ms of {len(outcome.samples_ms)} samples"
                said += "".join(f", {name} {value:.6g}" for name, value in outcome.metrics.items())
            else:
                said = f"failed: {outcome.stage}: {outcome.reason}"
            yield f"{entry.asked.number}: {entry.asked.digest} at {entry.told.elapsed_s:.1f} s: {said}"


def _facts(cell: CellResults, line: Mapping[Any, Any]) -> Iterator[str]:
    row = cell.rows.get(line["row"])
    yield f"{cell.folder / 'cell.json'}, {cell.folder / 'env.json'}: model {cell.facts['model']}"
    yield f"backend: {cell.facts['backend']}"
    if row is not None:
        yield f"{cell.folder / 'rows.json'}: row {row.id}, {row.pairs} Q/DQ pairs"
        yield f"{cell.folder / 'models' / row.file}: sha256 {row.sha256}"
