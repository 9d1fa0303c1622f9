"""Table of other tools: their files next to ours, by the runtime and as the files describe them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from harness.accuracy.metrics.intervals import decode_accuracy, probability_within
from harness.report.frames.main_frame import with_backend_column
from harness.report.load.display_names import format_score, score_column_title
from harness.report.load.results import Results, TaskResults
from harness.report.report_table import MISSING_CELL, ReportTable
from harness.report.table_spec import Column, Row, TableSpec, is_missing, number_column, text_column
from harness.report.tables.main import FIGURES, VERDICT
from harness.results_dir.artifacts import FLOAT_ROW

__all__ = ["TOOLS", "tool_frame", "tool_table"]

SURELY_WITHIN = 0.95
"""Probability from which a row is surely within the bound; it is within from one half."""


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


def tool_table(results: Results, main: pd.DataFrame) -> ReportTable:
    """Return the table of `tool_frame`."""
    raw = with_backend_column(tool_frame(results, main))
    return TOOLS.build(raw, score=score_column_title(raw.get("metric", ())))


def tool_frame(results: Results, main: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of tasks that have a file scored by itself, with the columns of `main_frame` and three more.

    `file_score`: metric of the file; `within`: probability that the drop is within the bound; `seconds`: of the tool or
    the search.
    """
    tasks = {task.name: task for task in results.tasks if task.file_scores}
    rows = [row for row in main.to_dict("records") if row["task"] in tasks]
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
        reference, own = map(decode_accuracy, records)
        within = probability_within(
            reference, own, metric, task.allowed, higher_is_better=task.higher_is_better
        )  # fmt: skip
    return {
        "file_score": task.file_scores.get(name, {}).get("metrics", {}).get(metric),
        "within": within,
        "seconds": seconds,
    }
