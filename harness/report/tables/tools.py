"""Tables of other tools: scores of each file by runtime and by file, and the fastest file within a bound."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from harness.accuracy.metrics.intervals import SURELY_WITHIN, decode_accuracy, probability_within
from harness.base.statistics import Interval
from harness.report.frames.main_frame import RowStatus, with_backend_column
from harness.report.report_table import MISSING_CELL, ReportTable, format_interval, frame_rows
from harness.report.statistics import geometric_mean
from harness.report.table_spec import Column, Row, TableSpec, is_missing, number_column, text_column
from harness.report.tables.main import FIGURES, VERDICT
from harness.results.artifacts import FLOAT_ROW
from harness.results.display_names import format_score, score_column_title
from harness.results.folder import Results, TaskResults


def _format_within(row: Row) -> str:
    probability = row["within"]
    if is_missing(probability):
        return MISSING_CELL
    label = "surely within" if probability >= SURELY_WITHIN else "within" if probability >= 0.5 else "beyond"
    return f"{label} ({100 * probability:.0f} %)"


TOOLS = TableSpec(
    name="tools",
    title="Other tools",
    columns=(
        *map(text_column, ("model", "device", "method")),
        *FIGURES,
        Column("by the file", lambda row: format_score(row["file_score"], row["metric"])),
        Column("within the bound", _format_within, text=True),
        number_column("seconds", form="{:.0f}"),
        VERDICT,
    ),
    caption=(
        "By the file: the metric of the same file in ONNX Runtime without graph optimizations, of an OpenVINO IR in "
        "OpenVINO without integer kernels. If the two figures differ by more than chance, the runtime computes "
        "something other than the file describes, and the row is never chosen. Within the bound: the share of draws "
        "of images in which the drop keeps it. Seconds: of the tool, or of the search with its scoring and recovery."
    ),
    drop_empty=True,
    timed=True,
    source="aligned rows",
)

FASTEST_COLUMNS = (
    "device", "bound", "method", "task", "model", "models", "row", "speedup", "speedup_low", "speedup_high", "is_float",
    "ratio", "ratio_low", "ratio_high",
)  # fmt: skip
HALF_POINT, ONE_POINT = 0.005, 0.01


def _format_fastest(row: Row) -> str:
    return "1.00 (float)" if row["is_float"] else format_interval(*_interval(row, "speedup"))


def _format_mean(field: str) -> Callable[[Sequence[Row]], str]:
    """Return a formatter of the geometric mean of a field over all models, empty if one of them is missing."""

    def shown(rows: Sequence[Row]) -> str:
        parts = [_interval(row, field) for row in rows]
        if len(rows) < rows[0]["models"] or any(is_missing(value) for value, *_ in parts):
            return MISSING_CELL
        mean = geometric_mean([Interval(value=value, low=low, high=high) for value, low, high in parts])
        return format_interval(mean.value, mean.low, mean.high)

    return shown


FASTEST = TableSpec(
    name="fastest",
    title="Fastest file within the bound",
    columns=(text_column("device"), number_column("bound", form="{:.3f}"), text_column("method")),
    group_by=("device", "bound", "method"),
    spread_by="model",
    spread=(Column("{model}", _format_fastest),),
    last=(("geometric mean", _format_mean("speedup")), ("the search against it", _format_mean("ratio"))),
    caption=(
        "Speedup of the file of each method over the float model if it is within the bound, computed right and faster. "
        "If not, the float model counts, as 1.00. The search against it: geometric mean of the ratio of its speedup to "
        "that of the method, with limits combined as of independent figures, which is wider than a paired interval. "
        "Means are over finished tasks, and apply to these models."
    ),
    timed=True,
    source="rows",
)


def fastest_frame(results: Results, main: pd.DataFrame) -> pd.DataFrame:
    """Return the speedup of each method of each finished task with a bound, 1 if the float model is to be kept.

    Tasks with a bound of half a point also have rows for a bound of one point. Empty below two tasks.

    Returns:
        Columns `FASTEST_COLUMNS`. `ratio`: speedup of the first search of the experiment over that of the method.
    """
    tasks = {task.name: task for task in results.tasks if task.complete and task.allowed is not None and not task.blind}
    lines = main[main["task"].isin(list(tasks)) & (main["method"] != FLOAT_ROW) & (main["row"] != "")]
    if lines["task"].nunique() < 2 or not results.stored.searchers:
        return pd.DataFrame(columns=list(FASTEST_COLUMNS))
    searcher = results.stored.searchers[0]
    rows = [
        _fastest_row(tasks[row["task"]], row, bound)
        for row in frame_rows(with_backend_column(lines))
        for bound in _shown_bounds(tasks[row["task"]])
    ]
    rows.sort(key=lambda row: row["bound"])
    search_rows = {(row["task"], row["bound"]): row for row in rows if row["method"] == searcher}
    counts = Counter((row["device"], row["bound"]) for row in search_rows.values())
    ratios = [_ratio(search_rows.get((row["task"], row["bound"])), row) for row in rows]
    filled = [
        {**row, "models": counts[row["device"], row["bound"]], **ratio} for row, ratio in zip(rows, ratios, strict=True)
    ]
    return pd.DataFrame(filled, columns=list(FASTEST_COLUMNS))


def _shown_bounds(task: TaskResults) -> tuple[float, ...]:
    if task.allowed is None:
        return ()
    return (task.allowed, ONE_POINT) if task.allowed == HALF_POINT else (task.allowed,)


def _fastest_row(task: TaskResults, row: Mapping[Any, Any], bound: float) -> dict[str, Any]:
    drop, low = task.drop(row["row"]), row["speedup_low"]
    is_faster = row["verdict"] == "faster" and row["status"] != RowStatus.WRONG
    keeps = is_faster and drop is not None and drop <= bound and not is_missing(low)
    figures = {name: row[name] if keeps else 1.0 for name in ("speedup", "speedup_low", "speedup_high")}
    labels = {name: row[name] for name in ("device", "method", "task", "model", "row")}
    return {**labels, "bound": bound, **figures, "is_float": not keeps}


def _ratio(search_row: Mapping[str, Any] | None, row: Mapping[str, Any]) -> dict[str, float]:
    """Return the ratio of two speedups with its limits, as of independent figures; NaN without a search."""
    if search_row is None:
        return {"ratio": math.nan, "ratio_low": math.nan, "ratio_high": math.nan}
    (numerator, own_low, own_high), (value, low, high) = (_interval(each, "speedup") for each in (search_row, row))
    below = math.hypot(math.log(numerator / own_low), math.log(high / value))
    above = math.hypot(math.log(own_high / numerator), math.log(value / low))
    ratio = numerator / value
    if search_row["row"] == row["row"]:  # the same file
        below = above = 0.0
    return {"ratio": ratio, "ratio_low": ratio * math.exp(-below), "ratio_high": ratio * math.exp(above)}


def _interval(row: Mapping[str, Any], field: str) -> tuple[float, float, float]:
    return row[field], row[f"{field}_low"], row[f"{field}_high"]


def tool_table(results: Results, main: pd.DataFrame) -> ReportTable:
    """Return the table of `tool_frame`."""
    raw = with_backend_column(tool_frame(results, main))
    return TOOLS.build(raw, score=score_column_title(raw.get("metric", ())))


def tool_frame(results: Results, main: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of tasks with a file score, with the columns of `main_frame` and three more.

    `file_score`: metric of the file run as it describes itself; `within`: probability that the drop is within the
    bound; `seconds`: time that the tool or the search took.
    """
    tasks = {task.name: task for task in results.tasks if task.file_scores}
    rows = [row for row in frame_rows(main) if row["task"] in tasks]
    return pd.DataFrame([{**row, **_figures(tasks[row["task"]], row)} for row in rows], columns=[*main.columns, *_NEW])


_NEW = ("file_score", "within", "seconds")


def _figures(task: TaskResults, row: Mapping[Any, Any]) -> dict[str, float | None]:
    name, metric = row["row"], task.metric or ""
    seconds = None if is_missing(row["minutes"]) else 60 * float(row["minutes"])
    if seconds is not None and not is_missing(row["budget"]):  # of a search
        seconds += sum(facts.get("seconds", 0.0) for facts in task.recovery.values())
    records = [task.scores.get(each, {}) for each in (FLOAT_ROW, name)]
    within = None
    if task.allowed is not None and name != FLOAT_ROW and all("metrics" in record for record in records):
        reference, row_accuracy = map(decode_accuracy, records)
        within = probability_within(
            reference, row_accuracy, metric, task.allowed, higher_is_better=task.higher_is_better
        )
    return {
        "file_score": task.file_scores.get(name, {}).get("metrics", {}).get(metric),
        "within": within,
        "seconds": seconds,
    }
