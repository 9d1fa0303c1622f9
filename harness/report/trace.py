"""Trace of a table cell to the raw readings behind it, with file and line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.base.errors import UserError, suggest_names
from harness.report import provenance_lines
from harness.report.frames.main_frame import main_frame
from harness.report.provenance_lines import ValueSource
from harness.report.report_table import ReportTable, frame_rows
from harness.report.table_spec import Row, is_missing
from harness.report.tables.catalog import build_tables, table_specs
from harness.report.tables.overview import MEAN_LABEL
from harness.results.folder import Results, TaskResults
from harness.results.lines import shown_path
from harness.results.turns import FINAL_SELECTION_LOG_NAME

ROW_LABEL_COLUMNS = (
    "task", "searcher", "first", "second", "reference", "budget", "variant", "model", "row", "found on", "found in",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSource:
    """Cell of a table with the readings behind it.

    Attributes:
        shown: Text of the cell.
        sources: Readings, with file and line.
    """

    row: str
    column: str
    shown: str
    sources: tuple[ValueSource, ...]

    @property
    def lines(self) -> tuple[str, ...]:
        """All lines of the sources, with every reading."""
        return tuple(line for source in self.sources for line in source.lines())

    @property
    def measured(self) -> bool:
        """Return whether there are readings, not only facts."""
        return any(next(iter(source.readings()), None) is not None for source in self.sources)


def trace_cell(results: Results, address: str, name: str = "main") -> CellSource:
    """Return the readings behind one cell of a table.

    Args:
        address: ROW:COLUMN, for instance "12:speedup", "tpe:drop", "net-openvino-int8/linear:latency". ROW is the
            number of a row from 1, its last label or all labels joined by "/"; in a table of rows also a row id. COLUMN
            is the beginning of a heading.
        name: Name of the table's files.

    Raises:
        UserError: There is no such table, row or column, or several rows match.
    """
    where, colon, column = address.rpartition(":")
    if not colon:
        raise UserError(f"{address!r}: expected ROW:COLUMN, for instance '1:speedup' or 'linear:latency'")
    table = _find_table(results, name)
    cells = frame_rows(table.cells)
    rows = frame_rows(table.raw) if table_specs()[name].source == "aligned rows" else cells
    number = _row_number(rows, where, name)
    head = _find_heading(table, column)
    return CellSource(
        row=f"row {number + 1}: {', '.join(_row_labels(rows[number]))}",
        column=head,
        shown=str(cells[number][head]),
        sources=tuple(_cell_sources(results, table, number, head)),
    )


def find_main_row(results: Results, where: str) -> dict[Any, Any]:
    """Return the unrounded figures of a row of the main table, by column of `main_frame`.

    Args:
        where: ROW of `trace_cell`.

    Raises:
        UserError: There is no such row, or several match.
    """
    rows = frame_rows(main_frame(results))
    return rows[_row_number(rows, where, "main")]


def _find_table(results: Results, name: str) -> ReportTable:
    names = []
    for table in build_tables(results):
        if table.name == name:
            return table
        names.append(table.name)
    raise UserError(f"{results.folder}: no table {name!r}; {suggest_names(name, names)}")


def _find_heading(table: ReportTable, column: str) -> str:
    prefix = column.strip().lower()
    heads = {str(head).lower(): str(head) for head in table.cells.columns}
    matches = [heads[prefix]] if prefix in heads else [head for low, head in heads.items() if low.startswith(prefix)]
    if len(matches) != 1:
        raise UserError(
            f"no single column of the {table.name} table begins with {column!r}: {', '.join(table.cells.columns)}"
        )
    return matches[0]


def _row_number(rows: Sequence[Row], where: str, name: str) -> int:
    if where.isdecimal() and 1 <= int(where) <= len(rows):
        return int(where) - 1
    labelled = [number for number, row in enumerate(rows) if where in _row_names(row)]
    matches = labelled or [number for number, row in enumerate(rows) if where in _row_ids(row)]
    if len(matches) == 1:
        return matches[0]
    if not matches:
        labels = {label for row in rows for label in _row_labels(row)[-1:]}
        raise UserError(f"no row {where!r} in the {name} table of {len(rows)} rows; {suggest_names(where, labels)}")
    choices = ", ".join(f"{number + 1} ({_describe_row(rows[number])})" for number in matches)
    raise UserError(f"{where!r} matches several rows of the {name} table; give the number of a row: {choices}")


def _describe_row(row: Row) -> str:
    return f"{row['task']}, {row['precision']}" if "method" in row else ", ".join(_row_labels(row))


def _row_labels(row: Row) -> list[str]:
    if "method" in row:
        return [str(row["task"]), str(row["method"])]
    return [str(row[label]) for label in ROW_LABEL_COLUMNS if label in row]


def _row_names(row: Row) -> set[str]:
    labels = _row_labels(row)
    return {labels[-1], "/".join(labels)} if labels else set()


def _row_ids(row: Row) -> set[str]:
    return {str(row["row"]), f"{row['task']}/{row['row']}"} if "method" in row and row["row"] else set()


def _cell_sources(results: Results, table: ReportTable, number: int, head: str) -> Iterator[ValueSource]:
    line, tasks = frame_rows(table.cells)[number], {task.name: task for task in results.tasks}
    source = table_specs()[table.name].source
    if source in ("aligned rows", "rows"):
        for raw in _raw_rows(table, number, head):
            if table.name == "overview" and raw is not None and raw["seeds"] > 1:  # a median over seeds
                yield from _choice_sources(tasks[raw["task"]], {raw["method"]}, f"{raw['budget']:.0f}")
            else:
                yield from _row_sources(tasks, raw, head)
        return
    for task in [tasks[line["task"]]] if line.get("task") in tasks else results.pooled:
        if source == "confirmed rows":
            yield from (provenance_lines.turn_source(task, row, paired=False) for row in task.summaries)
        elif source == "choices":
            yield from _choice_sources(task, _searchers_named(line), line.get("budget", head))
            yield from _fixed_row_sources(task, table)
        else:
            yield from _trial_sources(task, _searchers_named(line), confirmed=table.name == "targets")


def _trial_sources(task: TaskResults, searchers: set[str], *, confirmed: bool) -> Iterator[ValueSource]:
    """Yield the trials of some searchers, or of all; if `confirmed`, also the confirmation of their incumbents."""
    for search in task.searches:
        if not searchers or search.searcher in searchers:
            yield from provenance_lines.trial_sources(task, search.searcher, search.seed)
            for digest in dict.fromkeys(step.digest for step in search.incumbents if confirmed):
                if digest in task.summaries:
                    yield provenance_lines.turn_source(task, digest, paired=True)
                elif digest in task.selection_speedups:
                    yield _selection_source(task, digest)


def _selection_source(task: TaskResults, digest: str) -> ValueSource:
    path, speedup = shown_path(task.folder / FINAL_SELECTION_LOG_NAME), task.selection_speedups[digest]
    return ValueSource(head=(f"{path}: {digest} has a speedup of {speedup:.4f} over float, median over its turns",))


def _row_sources(tasks: Mapping[str, TaskResults], raw: Row | None, head: str) -> Iterator[ValueSource]:
    if raw is None:
        yield ValueSource(head=("nothing was measured here",))
    elif raw["task"] not in tasks:
        yield ValueSource(head=("the task has not started",))
    else:
        column = head.removeprefix(f"{raw.get('quantized')} ")
        is_speedup = column.startswith("run ") or column == raw.get("column")
        yield from provenance_lines.row_sources(tasks[raw["task"]], raw, "speedup" if is_speedup else column)


def _raw_rows(table: ReportTable, number: int, head: str) -> Sequence[Row | None]:
    """Return the raw row of a figure, or the rows of a mean; an entry is None if its row is missing."""
    raw, line = frame_rows(table.raw), frame_rows(table.cells)[number]
    if table_specs()[table.name].source == "aligned rows":
        return [raw[number]]
    if table.name == "overview":
        keys = (line["device"], line["quantized"], head)
        alike = [r for r in raw if (r["device"], r["quantized"], r["column"]) == keys and not is_missing(r["task"])]
        return [r for r in alike if line["model"] in (r["model"], MEAN_LABEL)] or [None]
    if table.name == "decision":
        same = [r for r in raw if (r["model"], r["device"], r["role"]) == (line["model"], line["device"], line["row"])]
        return [next((r for r in same if head.startswith(f"{r['quantized']} ")), same[0])]
    within, word = ("model", "on") if table.name == "transfer" else ("backend", "in")
    key = (line[within], line["precision"], line[f"found {word}"], head.removeprefix(f"run {word} "))
    return [next((r for r in raw if (r["within"], r["precision"], r["source"], r["target"]) == key), None)]


def _searchers_named(line: Row) -> set[str]:
    return {line[key] for key in ("searcher", "first", "second", "reference", "variant") if key in line}


def _choice_sources(task: TaskResults, searchers: set[str], head: str) -> Iterator[ValueSource]:
    """Yield the sources of the searches' choices at the budget of a heading (default: the largest), each row once."""
    number = re.match(r"\d+", head)
    budget = int(number[0]) if number else task.budget
    choices: dict[str, list[str]] = {}
    for pick in task.picks:
        if pick.method in searchers and pick.rank == 0 and pick.budget == budget:
            where = f"{task.name}, {pick.method}, seed {pick.seed} at {pick.budget} evaluations"
            choices.setdefault(pick.row, []).append(f"{where}: {pick.row or pick.reason}")
    for row, lines in choices.items():
        yield ValueSource(head=tuple(lines))
        if row:
            yield provenance_lines.turn_source(task, row, paired=True)


def _fixed_row_sources(task: TaskResults, table: ReportTable) -> Iterator[ValueSource]:
    rows = frame_rows(table.raw) if table.name == "fixed" else []
    for row in dict.fromkeys(row["row"] for row in rows if row["task"] == task.name and row["row"]):
        yield ValueSource(head=(f"{task.name}, the best fixed row: {row}",))
        yield provenance_lines.turn_source(task, row, paired=True)
