"""Where a cell of the main table comes from: the raw readings behind it, and the file and line that hold them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.errors import UserError, nearest
from harness.measure.events import Block
from harness.records import Measured
from harness.report.frames import main_frame
from harness.report.results import CellResults, Results
from harness.report.samples import counted
from harness.report.shown import tables_of
from harness.run.journal import read_journal
from harness.run.rows import FLOAT_ROW

__all__ = ["Traced", "row_of", "trace"]

HEADER_LINES = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A cell of the main table with its source.

    Attributes:
        row: Its row, in words.
        column: Heading of its column.
        shown: What the table says.
        lines: The readings behind it, each with its place.
    """

    row: str
    column: str
    shown: str
    lines: tuple[str, ...]


def trace(results: Results, address: str) -> Traced:
    """The readings behind one cell of the main table.

    Args:
        results: The results folder.
        address: ROW:COLUMN. ROW is a row's number (the first is 1), method, id, or CELL/METHOD; COLUMN begins like the
            heading: "12:speedup", "tpe:drop", "net-openvino-int8/linear:latency".

    Raises:
        UserError: No such row or column, or several rows are meant.
    """
    where, colon, column = address.rpartition(":")
    if not colon:
        raise UserError(f"{address!r}: ROW:COLUMN, for instance '1:speedup' or 'linear:latency'")
    table = next(table for table in tables_of(results) if table.name == "main")
    number = _row(table.raw.to_dict("records"), where)
    heads = [head for head in table.cells.columns if head.lower().startswith(column.strip().lower())]
    if len(heads) != 1 or not column.strip():
        raise UserError(f"no single column of the main table begins with {column!r}: {', '.join(table.cells.columns)}")
    line = table.raw.to_dict("records")[number]
    cells = {cell.name: cell for cell in results.cells}
    sources = _sources(cells[line["cell"]], line, heads[0]) if line["cell"] in cells else ["the cell has not begun"]
    return Traced(
        row=f"row {number + 1}: {line['cell']}, {line['method']}",
        column=heads[0],
        shown=str(table.cells.iloc[number][heads[0]]),
        lines=tuple(sources),
    )


def row_of(results: Results, where: str) -> dict[Any, Any]:
    """The raw figures of a row of the main table.

    Args:
        results: The results folder.
        where: See `trace`.

    Raises:
        UserError: No such row, or several rows are meant.
    """
    lines = main_frame(results).to_dict("records")
    return lines[_row(lines, where)]


def _row(lines: list[dict[Any, Any]], where: str) -> int:
    if where.isdecimal() and 1 <= int(where) <= len(lines):
        return int(where) - 1
    names = [
        {line["method"], line["row"] or None, f"{line['cell']}/{line['method']}", f"{line['cell']}/{line['row']}"}
        for line in lines
    ]
    found = [number for number, known in enumerate(names) if where in known]
    if len(found) == 1:
        return found[0]
    if not found:
        known = {str(line["method"]) for line in lines}
        raise UserError(f"no row {where!r} in the main table of {len(lines)} rows; {nearest(where, known)}")
    choices = ", ".join(f"{n + 1} ({lines[n]['cell']}, {lines[n]['precision']})" for n in found)
    raise UserError(f"{where!r} is several rows of the main table; take a row's number: {choices}")


def _sources(cell: CellResults, line: dict[Any, Any], column: str) -> Iterator[str]:
    """By what the column shows."""
    if line["verdict"] == "missing" or not line["row"]:
        yield f"nothing was measured: {line['reason'] or 'it is still to be run'}"
    elif column.startswith(("latency", "speedup", "verdict")):
        yield from _turns(cell, line["row"], paired=not column.startswith("latency"))
    elif column.startswith(("mAP", "drop")):
        yield from _scores(cell, line["row"], dropped=column.startswith("drop"))
    elif column.startswith(("builds", "minutes")) and line["seed"] == line["seed"] and line["seed"] is not None:
        yield from _trials(cell, line["method"], int(line["seed"]))
    elif column.startswith("builds"):
        yield from _turns(cell, line["row"], paired=False)
    else:
        yield from _facts(cell, line)


def _turns(cell: CellResults, row: str, *, paired: bool) -> Iterator[str]:
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
        yield from (f"    {metric}: {value}" for metric, value in score["metrics"].items())
        if items:
            yield f"    by item: {' '.join(f'{item:g}' for item in items)}"


def _trials(cell: CellResults, searcher: str, seed: int) -> Iterator[str]:
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
            else:
                said = f"failed: {outcome.stage}: {outcome.reason}"
            yield f"{entry.asked.number}: {entry.asked.digest} at {entry.told.elapsed_s:.1f} s: {said}"


def _facts(cell: CellResults, line: dict[Any, Any]) -> Iterator[str]:
    row = cell.rows.get(line["row"])
    yield f"{cell.folder / 'cell.json'}, {cell.folder / 'env.json'}: model {cell.facts['model']}"
    yield f"backend: {cell.facts['backend']}"
    if row is not None:
        yield f"{cell.folder / 'rows.json'}: row {row.id}, {row.pairs} Q/DQ pairs"
        yield f"{cell.folder / 'models' / row.file}: sha256 {row.sha256}"
