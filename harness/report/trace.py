"""Trace of a table cell to the raw readings behind it, with file and line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from harness.errors import UserError, suggest_names
from harness.report import provenance_lines
from harness.report.frames.main_frame import main_frame
from harness.report.frames.speedup_overview import MEAN_LABEL
from harness.report.load.results import CellResults, Results
from harness.report.provenance_lines import ValueSource
from harness.report.report_table import ReportTable
from harness.report.tables.table_layouts import build_tables
from harness.selection.paired_timing import SELECTION_LOG_NAME

__all__ = ["CellSource", "find_main_row", "trace_cell"]

MAIN_ALIGNED_TABLES = ("main", "precision", "finalists")
"""Tables whose lines are rows, one by one those of the raw frame."""
MAIN_ROW_TABLES = (*MAIN_ALIGNED_TABLES, "overview", "decision", "transfer", "transfer_models")
"""Tables whose figures are of rows of the main table."""
CONFIRMED_TABLES = ("budget", "fixed", "pairs", "ablation")
"""Tables of what searches chose, by its confirmation. The others are of the searches' own samples, `targets` of both.
"""
ROW_LABEL_COLUMNS = (
    "cell", "searcher", "first", "second", "reference", "budget", "variant", "model", "row", "found on", "found in",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSource:
    """A cell of a table with its source.

    Attributes:
        row: Its row, in words.
        column: Heading of its column.
        shown: What the table says.
        sources: The readings behind it, each with its place.
    """

    row: str
    column: str
    shown: str
    sources: tuple[ValueSource, ...]

    @property
    def lines(self) -> tuple[str, ...]:
        """Every single reading."""
        return tuple(line for source in self.sources for line in source.lines())

    @property
    def measured(self) -> bool:
        """There are readings, and not only facts."""
        return any(next(iter(source.readings()), None) is not None for source in self.sources)


def trace_cell(results: Results, address: str, name: str = "main") -> CellSource:
    """The readings behind one cell of a table.

    Args:
        results: The results folder.
        address: ROW:COLUMN. ROW is a row's number (the first is 1); where the table's lines are rows also a method, an
            id, or CELL/METHOD, else what the line begins with. COLUMN begins like the heading: "12:speedup",
            "tpe:drop", "net-openvino-int8/linear:latency".
        name: Of the table's files.

    Raises:
        UserError: No such table, row or column, or several rows are meant.
    """
    where, colon, column = address.rpartition(":")
    if not colon:
        raise UserError(f"{address!r}: ROW:COLUMN, for instance '1:speedup' or 'linear:latency'")
    table = _find_table(results, name)
    shown = table.cells.to_dict("records")
    lines = table.raw.to_dict("records") if name in MAIN_ALIGNED_TABLES else shown
    number = _row_number(lines, where, name)
    head = _column_title(table, column)
    return CellSource(
        row=f"row {number + 1}: {', '.join(_row_label_values(lines[number]))}",
        column=head,
        shown=str(shown[number][head]),
        sources=tuple(_cell_sources(results, table, number, head)),
    )


def _find_table(results: Results, name: str) -> ReportTable:
    others = []
    for table in build_tables(results):
        if table.name == name:
            return table
        others.append(table.name)
    raise UserError(f"{results.folder}: no table {name!r}; {suggest_names(name, others)}")


def find_main_row(results: Results, where: str) -> dict[Any, Any]:
    """The raw figures of a row of the main table.

    Args:
        results: The results folder.
        where: See `trace`.

    Raises:
        UserError: No such row, or several rows are meant.
    """
    lines = main_frame(results).to_dict("records")
    return lines[_row_number(lines, where, "main")]


def _column_title(table: ReportTable, column: str) -> str:
    """The heading that is so, or the only one that begins so."""
    wanted = column.strip().lower()
    heads = {str(head).lower(): str(head) for head in table.cells.columns}
    found = [heads[wanted]] if wanted in heads else [head for low, head in heads.items() if low.startswith(wanted)]
    if len(found) != 1:
        raise UserError(
            f"no single column of the {table.name} table begins with {column!r}: {', '.join(table.cells.columns)}"
        )
    return found[0]


def _row_number(lines: Sequence[Mapping[Any, Any]], where: str, name: str) -> int:
    if where.isdecimal() and 1 <= int(where) <= len(lines):
        return int(where) - 1
    called = [number for number, line in enumerate(lines) if where in _row_names(line)]
    found = called or [number for number, line in enumerate(lines) if where in _row_files(line)]
    if len(found) == 1:
        return found[0]
    if not found:
        known = {name for line in lines for name in _row_label_values(line)[-1:]}
        raise UserError(f"no row {where!r} in the {name} table of {len(lines)} rows; {suggest_names(where, known)}")
    choices = ", ".join(f"{n + 1} ({_format_row_label(lines[n])})" for n in found)
    raise UserError(f"{where!r} is several rows of the {name} table; take a row's number: {choices}")


def _format_row_label(line: Mapping[Any, Any]) -> str:
    return f"{line['cell']}, {line['precision']}" if "method" in line else ", ".join(_row_label_values(line))


def _row_label_values(line: Mapping[Any, Any]) -> list[str]:
    """What people call a line."""
    if "method" in line:
        return [str(line["cell"]), str(line["method"])]
    return [str(line[label]) for label in ROW_LABEL_COLUMNS if label in line]


def _row_names(line: Mapping[Any, Any]) -> set[str]:
    """What a line is called."""
    labels = _row_label_values(line)
    return {labels[-1], "/".join(labels)} if labels else set()


def _row_files(line: Mapping[Any, Any]) -> set[str]:
    """What the file of a line is called: two methods may have chosen one, a search that of a tool's line."""
    return {str(line["row"]), f"{line['cell']}/{line['row']}"} if "method" in line and line["row"] else set()


def _cell_sources(results: Results, table: ReportTable, number: int, head: str) -> Iterator[ValueSource]:
    """By the kind of table."""
    line, cells = table.cells.to_dict("records")[number], {cell.name: cell for cell in results.cells}
    if table.name in MAIN_ROW_TABLES:
        for raw in _raw_rows(table, number, head):
            if table.name == "overview" and raw is not None and raw["seeds"] > 1:  # a median over them
                yield from _choice_sources(cells[raw["cell"]], {raw["method"]}, f"{raw['budget']:.0f}")
            else:
                yield from _row_sources(cells, raw, head)
        return
    for cell in [cells[line["cell"]]] if line.get("cell") in cells else results.pooled:
        if table.name == "variance":
            for row in cell.summaries:
                yield provenance_lines.turn_source(cell, row, paired=False)
        elif table.name in CONFIRMED_TABLES:
            yield from _choice_sources(cell, _searchers_named(line), line.get("budget", head))
            yield from _fixed_row_sources(cell, table)
        else:
            yield from _trial_sources(cell, _searchers_named(line), confirmed=table.name == "targets")


def _trial_sources(cell: CellResults, searchers: set[str], *, confirmed: bool) -> Iterator[ValueSource]:
    """Every evaluation of these searchers, or of all; and of their incumbents the confirmation, or else the runoff."""
    for search in cell.searches:
        if not searchers or search.searcher in searchers:
            yield from provenance_lines.trial_sources(cell, search.searcher, search.seed)
            rows = dict.fromkeys(step.digest for step in search.steps if confirmed and step.digest in cell.summaries)
            yield from (provenance_lines.turn_source(cell, row, paired=True) for row in rows)
            met = dict.fromkeys(step.digest for step in search.steps if confirmed and step.digest in cell.runoff)
            yield from (_selection_source(cell, digest) for digest in met if digest not in rows)


def _selection_source(cell: CellResults, digest: str) -> ValueSource:
    """What the runoff says of a placement that was not confirmed."""
    path, speedup = cell.folder / SELECTION_LOG_NAME, cell.runoff[digest]
    return ValueSource(head=(f"{path}: {digest} ran {speedup:.4f} times as fast as float, the median over its turns",))


def _row_sources(cells: Mapping[str, CellResults], raw: Mapping[Any, Any] | None, head: str) -> Iterator[ValueSource]:
    if raw is None:
        yield ValueSource(head=("nothing was run there",))
    elif raw["cell"] not in cells:
        yield ValueSource(head=("the cell has not begun",))
    else:
        column = head.removeprefix(f"{raw.get('quantized')} ")
        whole = column.startswith("run ") or column == raw.get("column")
        yield from provenance_lines.row_sources(cells[raw["cell"]], raw, "speedup" if whole else column)


def _raw_rows(table: ReportTable, number: int, head: str) -> Sequence[Mapping[Any, Any] | None]:
    """The raw line that a figure is of, or lines of which it is the mean; None for one that is not there."""
    raw, line = table.raw.to_dict("records"), table.cells.to_dict("records")[number]
    if table.name in MAIN_ALIGNED_TABLES:
        return [raw[number]]
    if table.name == "overview":
        keys = (line["device"], line["quantized"], head)
        alike = [r for r in raw if (r["device"], r["quantized"], r["column"]) == keys and not pd.isna(r["cell"])]
        return [r for r in alike if line["model"] in (r["model"], MEAN_LABEL)] or [None]
    if table.name == "decision":
        same = [r for r in raw if (r["model"], r["device"], r["role"]) == (line["model"], line["device"], line["row"])]
        return [next((r for r in same if head.startswith(f"{r['quantized']} ")), same[0])]
    within, word = ("model", "on") if table.name == "transfer" else ("backend", "in")
    wanted = (line[within], line["precision"], line[f"found {word}"], head.removeprefix(f"run {word} "))
    return [next((r for r in raw if (r["within"], r["precision"], r["source"], r["target"]) == wanted), None)]


def _searchers_named(line: Mapping[Any, Any]) -> set[str]:
    """The searchers that a line is about; none where it is about all."""
    return {line[key] for key in ("searcher", "first", "second", "reference", "variant") if key in line}


def _choice_sources(cell: CellResults, searchers: set[str], head: str) -> Iterator[ValueSource]:
    """What each search of these searchers had chosen at a budget, the largest where the heading names none.

    The readings of what several chose are told once, after the last of them.
    """
    asked = re.match(r"\d+", head)
    budget = int(asked[0]) if asked else cell.budget
    choices: dict[str, list[str]] = {}
    for pick in cell.picks:
        if pick.method in searchers and pick.rank == 0 and pick.budget == budget:
            where = f"{cell.name}, {pick.method}, seed {pick.seed} at {pick.budget} evaluations"
            choices.setdefault(pick.row, []).append(f"{where}: {pick.row or pick.reason}")
    for row, told in choices.items():
        yield ValueSource(head=tuple(told))
        if row:
            yield provenance_lines.turn_source(cell, row, paired=True)


def _fixed_row_sources(cell: CellResults, table: ReportTable) -> Iterator[ValueSource]:
    """The fixed row that choices are compared with; nothing where it is not with one."""
    lines = table.raw.to_dict("records") if table.name == "fixed" else []
    for row in dict.fromkeys(line["row"] for line in lines if line["cell"] == cell.name and line["row"]):
        yield ValueSource(head=(f"{cell.name}, the best fixed row: {row}",))
        yield provenance_lines.turn_source(cell, row, paired=True)
