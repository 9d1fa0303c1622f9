"""Trace of a table cell to the raw readings behind it, with file and line."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from harness.accuracy.metrics.intervals import RESAMPLES
from harness.base.errors import UserError, suggest_names
from harness.base.statistics import block_ci
from harness.measure.records import Measured, TrialResult
from harness.measure.turn_log import Turn, TurnMatrix
from harness.report.frames import main_frame, valid_turns
from harness.report.report_table import ReportTable, Row, frame_rows, is_missing
from harness.report.tables.catalog import build_tables, table_specs
from harness.report.tables.main import MEAN_LABEL
from harness.results.artifacts import FLOAT_ROW
from harness.results.folder import Results, TaskResults, load
from harness.results.journal import read_journal
from harness.results.lines import shown_path
from harness.results.scores import METRIC_CAPS, METRIC_FORMATS
from harness.results.turns import CONFIRMATION_LOG_NAME, FINAL_SELECTION_LOG_NAME

FIRST_EVENT_LINE = 2  # after the header
SCORE_HEADINGS = ("drop", "metric", *(name for name, _, _ in METRIC_FORMATS.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenanceLine:
    """Text for one turn or trial, or for the values of single images.

    Attributes:
        short: Summary in one line.
        whole: Lines with every reading; empty if `short` contains all.
    """

    short: str
    whole: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSource:
    """Source of a figure, or of a part of it.

    Attributes:
        head: Lines with the path of the file and facts about it.
        readings: Function that returns the readings in order of measurement.
        result: Line with the computation of the figure from the readings, or "".
    """

    head: tuple[str, ...]
    readings: Callable[[], Iterable[ProvenanceLine]] = tuple
    result: str = ""

    def lines(self) -> Iterator[str]:
        """Yield the lines of `head`, the lines with every reading (`ProvenanceLine.whole`), and `result`."""
        yield from self.head
        for reading in self.readings():
            yield from reading.whole or (reading.short,)
        yield from filter(None, [self.result])

    def brief(self, last: int) -> Iterator[str]:
        """Yield the lines of `head`, the last readings in a line each, and the computation of the figure.

        Args:
            last: Number of readings; if others precede them, one more line states how many.
        """
        yield from self.head
        shown = deque(enumerate(self.readings()), maxlen=last)
        if shown and shown[0][0]:
            yield f"... {shown[0][0]} before these:"
        yield from (reading.short for _, reading in shown)
        yield from filter(None, [self.result])


def row_sources(task: TaskResults, row: Row, column: str) -> Iterator[ValueSource]:
    """Yield the sources of one figure of a row of `main_frame`.

    Args:
        column: Heading, without a prefix for the precision.
    """
    searched = not is_missing(row.get("seed"))
    if row["verdict"] == "missing" or not row["row"]:
        yield ValueSource(head=(f"nothing was measured: {row['reason'] or 'it has not run yet'}",))
    elif column.startswith(("latency", "speedup", "verdict", "decision")):
        yield turn_source(task, row["row"], paired=not column.startswith("latency"))
    elif column.startswith("shrinkage"):
        yield turn_source(task, row["row"], paired=True)
        yield from trial_sources(task, row["method"].partition(" #")[0], int(row["seed"]))
    elif column.startswith(SCORE_HEADINGS):
        yield from _score_sources(task, row["row"], with_float=column.startswith("drop"))
        if column.startswith("drop"):
            yield from _drop_sources(task, row)
    elif column.startswith(("builds", "minutes")) and searched:
        yield from trial_sources(task, row["method"], int(row["seed"]))
    elif column.startswith("builds"):
        yield turn_source(task, row["row"], paired=False)
    else:
        yield ValueSource(head=tuple(_row_facts(task, row)))


def turn_source(task: TaskResults, row: str, *, paired: bool) -> ValueSource:
    """Return the turns of a row in the confirmation, with those of the baseline if `paired`."""
    numbers = {id(event): place for place, event in enumerate(task.events, FIRST_EVENT_LINE)}
    turns = sorted(valid_turns(task.events), key=lambda turn: (turn.build, turn.group, turn.round))
    base = {(t.build, t.group, t.round): t for t in turns if paired and t.row == FLOAT_ROW != row}
    lines = [_turn_line(t, base.get((t.build, t.group, t.round)), numbers) for t in turns if t.row == row]
    for event in task.events:
        if not isinstance(event, Turn) and event.row == row:
            failed = event.failed
            where = f"line {numbers[id(event)]}: build {event.build}"
            lines.append(ProvenanceLine(short=f"{where} failed: {failed.stage}: {failed.reason}"))
    return ValueSource(
        head=(f"{shown_path(task.folder / CONFIRMATION_LOG_NAME)}; samples in ms, one line a turn",),
        readings=lambda: lines,
        result=_summarize_turns(task, row, ratios=paired and row != FLOAT_ROW),
    )


def _summarize_turns(task: TaskResults, row: str, *, ratios: bool) -> str:
    baseline_builds, row_builds = TurnMatrix(task.events).paired_samples(row, FLOAT_ROW)
    builds = [
        np.divide(baseline_ms, row_ms) if ratios else np.array(row_ms)
        for baseline_ms, row_ms in zip(baseline_builds, row_builds, strict=True)
    ]
    if not builds:
        return ""
    what, unit = ("ratios", "") if ratios else ("turns", " ms")
    of = f"the median {what} of {len(builds)} builds" if len(builds) > 1 else f"the {what} of the one build"
    parts = [float(np.median(build)) for build in builds] if len(builds) > 1 else builds[0]
    listed = ", ".join(f"{part:.6g}" for part in parts)
    return f"geometric mean of {of} ({listed}): {block_ci(builds).value:.6g}{unit}"


def _turn_line(turn: Turn, base: Turn | None, numbers: Mapping[int, int]) -> ProvenanceLine:
    where, middle, samples = _turn_facts(turn, numbers)
    short = f"{where}: median {middle:.6g} of {len(turn.samples_ms)} samples"
    with_samples = f"{where}: median {middle:.6g} of {samples}"
    if base is None:
        return ProvenanceLine(short=short, whole=(with_samples,))
    where, other, samples = _turn_facts(base, numbers)
    ratio = f"ratio {other / middle:.4f}"
    return ProvenanceLine(
        short=f"{short}; baseline {other:.6g}, line {numbers[id(base)]}; {ratio}",
        whole=(with_samples, f"    baseline: {where}: median {other:.6g} of {samples}; {ratio}"),
    )


def _turn_facts(turn: Turn, numbers: Mapping[int, int]) -> tuple[str, float, str]:
    where = f"line {numbers[id(turn)]}: build {turn.build}, turn {turn.round}"
    return where, float(np.median(turn.samples_ms)), _format_samples(turn.samples_ms)


def _format_samples(samples_ms: tuple[float, ...]) -> str:
    return " ".join(f"{sample:.6g}" for sample in samples_ms)


def _score_sources(task: TaskResults, row: str, *, with_float: bool) -> Iterator[ValueSource]:
    path = task.folder / "accuracy.json"
    for name in dict.fromkeys((row, FLOAT_ROW) if with_float else (row,)):
        score = task.scores.get(name)
        if score is None:
            yield ValueSource(head=(f"{path}: no score of {name}",))
            continue
        head = [f"{path}: {task.rows[name].sha256} {task.rows[name].benchmarker} ({name})"]
        if "failed" in score:
            head.append(f"    failed: {score['failed']}: {score['reason']}")
        head += [f"    {metric}: {value}" for metric, value in score.get("metrics", {}).items()]
        yield ValueSource(head=tuple(head), readings=partial(_item_lines, score.get("per_item") or ()))


def _drop_sources(task: TaskResults, row: Row) -> Iterator[ValueSource]:
    own, reference = task.score(row["row"]), task.score(FLOAT_ROW)
    if own is None or reference is None or row["row"] == FLOAT_ROW:
        return
    if row["metric"] in METRIC_CAPS:
        yield ValueSource(head=("no drop: the reference is the float model, whose own value is a cap",))
        return
    larger, smaller = (reference, own) if task.higher_is_better else (own, reference)
    order = "float minus this row" if task.higher_is_better else "this row minus float, since lower is better"
    yield ValueSource(head=(f"drop: {larger:.6f} - {smaller:.6f} = {row['drop']:+.6f} ({order})",))
    if not is_missing(row["drop_low"]):
        limits = f"[{row['drop_low']:+.6f}, {row['drop_high']:+.6f}]"
        yield ValueSource(head=(f"95 % of {RESAMPLES} draws of the images, subtracted draw by draw: {limits}",))


def _item_lines(items: tuple[float, ...]) -> Iterator[ProvenanceLine]:
    if items:
        listed = " ".join(f"{item:g}" for item in items)
        yield ProvenanceLine(short=f"    by item: {len(items)} values", whole=(f"    by item: {listed}",))


def trial_sources(task: TaskResults, searcher: str, seed: int) -> Iterator[ValueSource]:
    """Yield the trials of a search; nothing if the task has no such search."""
    for search in task.searches:
        if (search.searcher, search.seed) == (searcher, seed):
            yield ValueSource(
                head=(f"{shown_path(search.path)}; one line a trial",), readings=partial(_trial_lines, search.path)
            )


def _trial_lines(path: Path) -> Iterator[ProvenanceLine]:
    for entry in read_journal(path):
        if entry.result is not None:
            yield _trial_line(entry.proposal.number, entry.proposal.digest, entry.result)


def _trial_line(number: int, digest: str, result: TrialResult) -> ProvenanceLine:
    where, outcome = f"{number}: {digest} at {result.elapsed_s:.1f} s", result.outcome
    if not isinstance(outcome, Measured):
        return ProvenanceLine(short=f"{where}: failed: {outcome.stage}: {outcome.reason}")
    text = f"{where}: median {float(np.median(outcome.samples_ms)):.6g} ms of {len(outcome.samples_ms)} samples"
    text += "".join(f", {name} {value:.6g}" for name, value in outcome.metrics.items())
    rebuilt = (f"    of another build: {_format_samples(samples_ms)}" for samples_ms in outcome.rebuilt_ms)
    whole = (text, f"    samples in ms: {_format_samples(outcome.samples_ms)}", *rebuilt)
    return ProvenanceLine(short=text, whole=whole)


def _row_facts(task: TaskResults, line: Row) -> Iterator[str]:
    row = task.rows.get(line["row"])
    yield f"{task.folder / 'task.json'}, {task.folder / 'env.json'}: model {task.facts['model']}"
    yield f"backend: {task.facts['backend']}"
    if row is not None:
        yield f"{task.folder / 'rows.json'}: row {row.id}, {row.pairs} Q/DQ pairs"
        yield f"{task.folder / 'models' / row.file}: sha256 {row.sha256}"


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
            yield from (turn_source(task, row, paired=False) for row in task.summaries)
        elif source == "choices":
            yield from _choice_sources(task, _searchers_named(line), line.get("budget", head))
            yield from _fixed_row_sources(task, table)
        else:
            yield from _trial_sources(task, _searchers_named(line), confirmed=table.name == "targets")


def _trial_sources(task: TaskResults, searchers: set[str], *, confirmed: bool) -> Iterator[ValueSource]:
    """Yield the trials of some searchers, or of all; if `confirmed`, also the confirmation of their incumbents."""
    for search in task.searches:
        if not searchers or search.searcher in searchers:
            yield from trial_sources(task, search.searcher, search.seed)
            for digest in dict.fromkeys(step.digest for step in search.incumbents if confirmed):
                if digest in task.summaries:
                    yield turn_source(task, digest, paired=True)
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
        yield from row_sources(tasks[raw["task"]], raw, "speedup" if is_speedup else column)


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
            yield turn_source(task, row, paired=True)


def _fixed_row_sources(task: TaskResults, table: ReportTable) -> Iterator[ValueSource]:
    rows = frame_rows(table.raw) if table.name == "fixed" else []
    for row in dict.fromkeys(row["row"] for row in rows if row["task"] == task.name and row["row"]):
        yield ValueSource(head=(f"{task.name}, the best fixed row: {row}",))
        yield turn_source(task, row, paired=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedRow:
    """Row of a results folder with its file, which several rows may share.

    Attributes:
        row: Row id.
    """

    task: str
    row: str
    file: Path


def find_exported_row(folder: Path, where: str | None) -> ExportedRow:
    """Return the exported model of a row.

    Args:
        where: Name of the row, see `harness.report.trace.find_main_row`; None raises the error with the list.

    Raises:
        UserError: No row is named, or the row or its model does not exist; the message lists those that exist.
    """
    results = load(folder)
    if where is not None:
        line = find_main_row(results, where)
        found = _exported_row(results.task(str(line["task"])), str(line["row"]))
        if found is not None:
            return found
    files = [line for task in results.tasks for line in _exported_lines(task)]
    problem = "name a row, or its file" if where is None else f"row {where!r} has no exported model"
    listing = "\n".join(["; there are:", *dict.fromkeys(files)]) if files else "; nothing is exported there"
    raise UserError(f"{folder}: {problem}{listing}")


def _exported_lines(task: TaskResults) -> list[str]:
    """Return a line for each exported file with the methods that chose it, or with its row if none did."""
    labels = [
        (pick.row, f"{pick.method}{'' if pick.budget is None else f' after {pick.budget}'}") for pick in task.picks
    ]
    labels += [(row, row) for row in task.rows if row not in {pick.row for pick in task.picks}]
    found = [(label, _exported_row(task, row)) for row, label in labels]
    return [f"  {label}: {exported.file}" for label, exported in found if exported is not None]


def _exported_row(task: TaskResults, row: str) -> ExportedRow | None:
    if row not in task.rows or not (file := task.folder / "models" / task.rows[row].file).is_file():
        return None
    return ExportedRow(task=task.name, row=row, file=file)
