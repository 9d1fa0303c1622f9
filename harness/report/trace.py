"""Trace of a table cell to the raw readings behind it, with file and line; the exported model of a row."""

from __future__ import annotations

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
from harness.measure.records import Measured
from harness.measure.turn_log import Turn, TurnMatrix
from harness.report.frames import main_frame, valid_turns
from harness.report.report_table import ReportTable, Row, frame_rows, is_missing
from harness.report.tables.catalog import build_tables, table_specs
from harness.results.artifacts import FLOAT_ROW
from harness.results.folder import Results, TaskResults, load
from harness.results.journal import read_journal
from harness.results.lines import shown_path
from harness.results.scores import METRIC_CAPS
from harness.results.turns import CONFIRMATION_LOG_NAME, FINAL_SELECTION_LOG_NAME

FIRST_EVENT_LINE = 2  # after the header
ROW_LABEL_COLUMNS = (
    "task", "searcher", "first", "second", "reference", "budget", "variant", "model", "row", "found on", "found in",
)  # fmt: skip
SEARCHER_FIELDS = ("searcher", "first", "second", "reference", "variant")
#: Summary of a turn, a trial or the values of images in one line; lines with every reading, if the summary lacks some.
Reading = tuple[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSource:
    """Source of a figure, or of a part of it.

    Attributes:
        head: Lines with the path of the file and facts about it.
        readings: Function that returns the readings in order of measurement.
        result: Line with the computation of the figure from the readings, or "".
    """

    head: tuple[str, ...]
    readings: Callable[[], Iterable[Reading]] = tuple
    result: str = ""

    def lines(self, last: int | None = None) -> Iterator[str]:
        """Yield the lines of `head`, of the readings, and `result`.

        Args:
            last: Number of readings that are summarized in a line each; if others precede them, one more line states
                how many. None: all readings with every value.
        """
        yield from self.head
        if last is None:
            for summary, whole in self.readings():
                yield from whole or (summary,)
        else:
            shown = deque(enumerate(self.readings()), maxlen=last)
            if shown and shown[0][0]:
                yield f"... {shown[0][0]} before these:"
            yield from (summary for _, (summary, _) in shown)
        yield from filter(None, [self.result])


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


def trace_cell(results: Results, address: str, name: str = "main") -> CellSource:
    """Return the readings behind one cell of a table.

    Args:
        address: ROW:COLUMN, for instance "12:speedup", "tpe:drop", "net-openvino-int8/linear:latency". ROW is the
            number of a row from 1, its last label or all labels joined by "/"; in a table of rows also a row id. COLUMN
            is the beginning of a heading.
        name: Name of the table's files.
    """
    where, colon, column = address.rpartition(":")
    if not colon:
        raise UserError(f"{address!r}: expected ROW:COLUMN, for instance '1:speedup' or 'linear:latency'")
    tables = {table.name: table for table in build_tables(results)}
    if name not in tables:
        raise UserError(f"{results.folder}: no table {name!r}; {suggest_names(name, tables)}")
    table, prefix = tables[name], column.strip().lower()
    cells, heads = frame_rows(table.cells), [str(head) for head in table.cells.columns]
    rows = frame_rows(table.raw) if table_specs()[name].source == "aligned rows" else cells
    number = _row_number(rows, where, name)
    exact = [head for head in heads if head.lower() == prefix]
    matches = exact or [head for head in heads if head.lower().startswith(prefix)]
    if len(matches) != 1:
        raise UserError(f"no single column of the {name} table begins with {column!r}: {', '.join(heads)}")
    return CellSource(
        row=f"row {number + 1}: {', '.join(_row_labels(rows[number]))}",
        column=matches[0],
        shown=str(cells[number][matches[0]]),
        sources=tuple(_cell_sources(results, table, number, matches[0])),
    )


def find_main_row(results: Results, where: str) -> dict[Any, Any]:
    """Return the unrounded figures of a row of the main table, by column of `main_frame`.

    Args:
        where: ROW of `trace_cell`.
    """
    rows = frame_rows(main_frame(results))
    return rows[_row_number(rows, where, "main")]


def _row_number(rows: Sequence[Row], where: str, name: str) -> int:
    if where.isdecimal() and 1 <= int(where) <= len(rows):
        return int(where) - 1
    labels = [_row_labels(row) for row in rows]
    ids = [(str(row["row"]), f"{row['task']}/{row['row']}") if {"method", "row"} <= row.keys() else () for row in rows]
    labelled = [number for number, each in enumerate(labels) if where in (*each[-1:], "/".join(each))]
    matches = labelled or [number for number, each in enumerate(ids) if where and where in each]
    if len(matches) == 1:
        return matches[0]
    if not matches:
        suggestion = suggest_names(where, {label for each in labels for label in each[-1:]})
        raise UserError(f"no row {where!r} in the {name} table of {len(rows)} rows; {suggestion}")
    described = {n: [str(rows[n]["task"]), str(rows[n]["precision"])] if ids[n] else labels[n] for n in matches}
    choices = ", ".join(f"{number + 1} ({', '.join(words)})" for number, words in described.items())
    raise UserError(f"{where!r} matches several rows of the {name} table; give the number of a row: {choices}")


def _row_labels(row: Row) -> list[str]:
    keys = ("task", "method") if "method" in row else ROW_LABEL_COLUMNS
    return [str(row[key]) for key in keys if key in row]


def _cell_sources(results: Results, table: ReportTable, number: int, head: str) -> Iterator[ValueSource]:
    """Yield the sources of the rows behind a cell, each search and each choice once."""
    source = table_specs()[table.name].source
    of, rows = table.origins[number].get(head, ("", ()))
    tasks, raw = {task.name: task for task in results.tasks}, frame_rows(table.raw)
    if not rows:
        yield ValueSource(head=("nothing was measured here",))
    if source in ("rows", "aligned rows") and rows and is_missing(rows[0]["task"]):  # a mean
        keys = ("device", "quantized", "column")
        rows = [r for r in raw if not is_missing(r["task"]) and all(r[key] == rows[0][key] for key in keys)]
    done: set[object] = set()
    for row in rows:
        own = [] if is_missing(row.get("task")) else [row["task"]]
        if source in ("rows", "aligned rows"):
            if own[0] not in tasks:
                yield ValueSource(head=("the task has not started",))
            elif row.get("seeds", 0) > 1:  # a median over seeds
                yield from _choice_sources(tasks[own[0]], {row["method"]}, int(row["budget"]))
            else:
                yield from row_sources(tasks[own[0]], row, of)
            continue
        searchers = {row[key] for key in SEARCHER_FIELDS if key in row}
        for task in [tasks[name] for name in own] or results.pooled:
            key = (task.name, *sorted(searchers), row.get("seed"), row.get("budget"))
            if key in done:
                continue
            done.add(key)
            if source == "confirmed rows":
                yield from (turn_source(task, row, paired=False) for row in task.summaries)
            elif source == "choices":
                yield from _choice_sources(task, searchers, row.get("budget", task.budget))
                for fixed in dict.fromkeys(r["row"] for r in raw if r.get("fixed") and r["task"] == task.name):
                    yield ValueSource(head=(f"{task.name}, the best fixed row: {fixed}",))
                    yield turn_source(task, fixed, paired=True)
            else:
                yield from _trial_sources(task, searchers, row.get("seed"), confirmed=source == "confirmed trials")


def row_sources(task: TaskResults, row: Row, of: str) -> Iterator[ValueSource]:
    """Yield the sources of one figure of a row of `main_frame`.

    Args:
        of: "latency", "speedup", "shrinkage", "score", "drop", "builds" or "minutes"; "" yields facts of the row.
    """
    search = None if is_missing(row.get("seed")) else int(row["seed"])
    if row.get("verdict") == "missing" or not row["row"]:
        chosen = (pick.reason for pick in task.picks if pick.method == row["method"] and not pick.row)
        reason = next(filter(None, (row.get("reason"), *chosen)), "it has not run yet")
        yield ValueSource(head=(f"nothing was measured: {reason}",))
    elif of in ("builds", "minutes") and search is not None:
        yield from _trial_sources(task, {row["method"]}, search)
    elif of in ("latency", "speedup", "shrinkage", "builds"):
        yield turn_source(task, row["row"], paired=of in ("speedup", "shrinkage"))
        if of == "shrinkage" and search is not None:
            yield from _trial_sources(task, {row["method"].partition(" #")[0]}, search)
    elif of in ("score", "drop"):
        yield from _score_sources(task, row, with_drop=of == "drop")
    else:
        facts = [
            f"{task.folder / 'task.json'}, {task.folder / 'env.json'}: model {task.facts['model']}",
            f"backend: {task.facts['backend']}",
        ]
        if (model := task.rows.get(row["row"])) is not None:
            facts.append(f"{task.folder / 'rows.json'}: row {model.id}, {model.pairs} Q/DQ pairs")
            facts.append(f"{task.folder / 'models' / model.file}: sha256 {model.sha256}")
        yield ValueSource(head=tuple(facts))


def turn_source(task: TaskResults, row: str, *, paired: bool) -> ValueSource:
    """Return the turns of a row in the confirmation, with those of the baseline if `paired`."""
    numbers = {id(event): place for place, event in enumerate(task.events, FIRST_EVENT_LINE)}
    turns = sorted(valid_turns(task.events), key=lambda turn: (turn.build, turn.group, turn.round))
    base = {(t.build, t.group, t.round): t for t in turns if paired and t.row == FLOAT_ROW != row}
    readings: list[Reading] = []
    for turn in turns:
        if turn.row != row:
            continue
        where, middle, whole = _describe_turn(turn, numbers)
        summary = f"{where}: median {middle:.6g} of {len(turn.samples_ms)} samples"
        if (float_turn := base.get((turn.build, turn.group, turn.round))) is None:
            readings.append((summary, (whole,)))
        else:
            _, other, float_whole = _describe_turn(float_turn, numbers)
            ratio = f"ratio {other / middle:.4f}"
            summary = f"{summary}; baseline {other:.6g}, line {numbers[id(float_turn)]}; {ratio}"
            readings.append((summary, (whole, f"    baseline: {float_whole}; {ratio}")))
    for event in task.events:
        if not isinstance(event, Turn) and event.row == row:
            where = f"line {numbers[id(event)]}: build {event.build}"
            readings.append((f"{where} failed: {event.failed.stage}: {event.failed.reason}", ()))
    is_ratio, result = paired and row != FLOAT_ROW, ""
    samples = zip(*TurnMatrix(task.events).paired_samples(row, FLOAT_ROW), strict=True)
    if builds := [np.divide(base_ms, row_ms) if is_ratio else np.array(row_ms) for base_ms, row_ms in samples]:
        what, unit = ("ratios", "") if is_ratio else ("turns", " ms")
        of = f"the median {what} of {len(builds)} builds" if len(builds) > 1 else f"the {what} of the one build"
        parts = [float(np.median(build)) for build in builds] if len(builds) > 1 else builds[0]
        listed = ", ".join(f"{part:.6g}" for part in parts)
        result = f"geometric mean of {of} ({listed}): {block_ci(builds).value:.6g}{unit}"
    head = f"{shown_path(task.folder / CONFIRMATION_LOG_NAME)}; samples in ms, one line a turn"
    return ValueSource(head=(head,), readings=lambda: readings, result=result)


def _describe_turn(turn: Turn, numbers: Mapping[int, int]) -> tuple[str, float, str]:
    """Return the place of a turn, its median in ms, and a line with every sample."""
    where, middle = (
        f"line {numbers[id(turn)]}: build {turn.build}, turn {turn.round}",
        float(np.median(turn.samples_ms)),
    )
    return where, middle, f"{where}: median {middle:.6g} of {_format_samples(turn.samples_ms)}"


def _format_samples(samples_ms: tuple[float, ...]) -> str:
    return " ".join(f"{sample:.6g}" for sample in samples_ms)


def _score_sources(task: TaskResults, row: Row, *, with_drop: bool) -> Iterator[ValueSource]:
    path, own = task.folder / "accuracy.json", row["row"]
    for name in dict.fromkeys((own, FLOAT_ROW) if with_drop else (own,)):
        score = task.scores.get(name)
        if score is None:
            yield ValueSource(head=(f"{path}: no score of {name}",))
            continue
        head = [f"{path}: {task.rows[name].sha256} {task.rows[name].benchmarker} ({name})"]
        if "failed" in score:
            head.append(f"    failed: {score['failed']}: {score['reason']}")
        head += [f"    {metric}: {value}" for metric, value in score.get("metrics", {}).items()]
        items = score.get("per_item") or ()
        listed = " ".join(f"{item:g}" for item in items)
        reading = (f"    by item: {len(items)} values", (f"    by item: {listed}",))
        yield ValueSource(head=tuple(head), readings=partial(tuple, [reading] if items else []))
    value, reference = task.score(own), task.score(FLOAT_ROW)
    if not with_drop or value is None or reference is None or own == FLOAT_ROW:
        return
    if row["metric"] in METRIC_CAPS:
        yield ValueSource(head=("no drop: the reference is the float model, whose own value is a cap",))
        return
    larger, smaller = (reference, value) if task.higher_is_better else (value, reference)
    order = "float minus this row" if task.higher_is_better else "this row minus float, since lower is better"
    yield ValueSource(head=(f"drop: {larger:.6f} - {smaller:.6f} = {row['drop']:+.6f} ({order})",))
    if not is_missing(row["drop_low"]):
        limits = f"[{row['drop_low']:+.6f}, {row['drop_high']:+.6f}]"
        yield ValueSource(head=(f"95 % of {RESAMPLES} draws of the images, subtracted draw by draw: {limits}",))


def _choice_sources(task: TaskResults, searchers: set[str], budget: int) -> Iterator[ValueSource]:
    """Yield the sources of the searches' choices at a budget, each row once."""
    choices: dict[str, list[str]] = {}
    for pick in task.picks:
        if pick.method in searchers and pick.rank == 0 and pick.budget == budget:
            where = f"{task.name}, {pick.method}, seed {pick.seed} at {pick.budget} evaluations"
            choices.setdefault(pick.row, []).append(f"{where}: {pick.row or pick.reason}")
    for row, lines in choices.items():
        yield ValueSource(head=tuple(lines))
        if row:
            yield turn_source(task, row, paired=True)


def _trial_sources(
    task: TaskResults, searchers: set[str], seed: int | None, *, confirmed: bool = False
) -> Iterator[ValueSource]:
    """Yield the trials of some searchers, or of all.

    Args:
        seed: Seed of the search; None for all.
        confirmed: Also yield the confirmation of the incumbents.
    """
    for search in task.searches:
        if (searchers and search.searcher not in searchers) or seed not in (None, search.seed):
            continue
        head = f"{shown_path(search.path)}; one line a trial"
        yield ValueSource(head=(head,), readings=partial(_iter_trials, search.path))
        for digest in dict.fromkeys(step.digest for step in search.incumbents if confirmed):
            if digest in task.summaries:
                yield turn_source(task, digest, paired=True)
            elif (speedup := task.selection_speedups.get(digest)) is not None:
                path = shown_path(task.folder / FINAL_SELECTION_LOG_NAME)
                said = f"{path}: {digest} has a speedup of {speedup:.4f} over float, median over its turns"
                yield ValueSource(head=(said,))


def _iter_trials(path: Path) -> Iterator[Reading]:
    for entry in read_journal(path):
        if entry.result is None:
            continue
        where = f"{entry.proposal.number}: {entry.proposal.digest} at {entry.result.elapsed_s:.1f} s"
        outcome = entry.result.outcome
        if isinstance(outcome, Measured):
            text = f"{where}: median {float(np.median(outcome.samples_ms)):.6g} ms of {len(outcome.samples_ms)} samples"
            text += "".join(f", {name} {value:.6g}" for name, value in outcome.metrics.items())
            rebuilt = (f"    of another build: {_format_samples(samples_ms)}" for samples_ms in outcome.rebuilt_ms)
            yield text, (text, f"    samples in ms: {_format_samples(outcome.samples_ms)}", *rebuilt)
        else:
            yield f"{where}: failed: {outcome.stage}: {outcome.reason}", ()


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
        where: Name of the row, see `find_main_row`; None raises the error with the list of all exported models.
    """
    results = load(folder)
    if where is not None:
        line = find_main_row(results, where)
        found = _exported_row(results.task(str(line["task"])), str(line["row"]))
        if found is not None:
            return found
    files: dict[str, None] = {}
    for task in results.tasks:
        labels = [(p.row, p.method if p.budget is None else f"{p.method} after {p.budget}") for p in task.picks]
        chosen = {row for row, _ in labels}
        for row, label in (*labels, *((row, row) for row in task.rows if row not in chosen)):
            if (exported := _exported_row(task, row)) is not None:
                files[f"  {label}: {exported.file}"] = None
    problem = "name a row, or its file" if where is None else f"row {where!r} has no exported model"
    listing = "\n".join(["; there are:", *files]) if files else "; nothing is exported there"
    raise UserError(f"{folder}: {problem}{listing}")


def _exported_row(task: TaskResults, row: str) -> ExportedRow | None:
    if row not in task.rows or not (file := task.folder / "models" / task.rows[row].file).is_file():
        return None
    return ExportedRow(task=task.name, row=row, file=file)
