"""Table of tasks with several shapes: latency and speedup of each row at each shape, of the same turns."""

from __future__ import annotations

from typing import Any

import pandas as pd

from harness.report.frames.main_frame import with_backend_column
from harness.report.load.results import Results
from harness.report.report_table import ReportTable
from harness.report.table_spec import TableSpec, interval_column, text_column
from harness.report.tables.main import VERDICT
from harness.results_dir.artifacts import FLOAT_ROW
from harness.statistics import Interval
from harness.timing.confirmation import summarize_parts

SHAPES = TableSpec(
    name="shapes",
    title="Shapes",
    columns=(
        *map(text_column, ("model", "device", "precision", "method")),
        interval_column("speedup", "speedup", "speedup_low", "speedup_high"),
        VERDICT,
    ),
    caption=(
        "Speedup and verdict: of the objective over all shapes, as in the main table. At a shape: median latency, and "
        "speedup over the float model at the same shape, both of the turns of the confirmation [95 %, Student's t over "
        "builds]. Accuracy is measured at the model's own shape alone."
    ),
    group_by=("task", "method"),
    spread_by="shape",
    spread=(
        interval_column("{shape}, ms", "shape_ms", "shape_ms_low", "shape_ms_high", 3),
        interval_column("{shape}, speedup", "shape_speedup", "shape_speedup_low", "shape_speedup_high"),
    ),
    timed=True,
    source="rows",
)


def shape_table(results: Results, main: pd.DataFrame) -> ReportTable:
    """Return the table of `shape_frame`."""
    return SHAPES.build(with_backend_column(shape_frame(results, main)))


def shape_frame(results: Results, main: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each confirmed row of the main table and each shape.

    Returns:
        The columns of `main_frame`, shape, shape_ms and shape_speedup, each of the two with limits.
    """
    lines: list[dict[Any, Any]] = []
    rows = main.to_dict("records")
    for task in results.tasks:
        for shape, summary in summarize_parts(task.events, FLOAT_ROW).items():
            for row in rows:
                if row["task"] == task.name and (own := summary.rows.get(row["row"])) is not None:
                    figures = {**_limits("shape_ms", own.latency_ms), **_limits("shape_speedup", own.speedup)}
                    lines.append({**row, "shape": shape, **figures})
    return pd.DataFrame(lines, columns=[*main.columns, "shape", *_COLUMNS])


_COLUMNS = [f"{name}{end}" for name in ("shape_ms", "shape_speedup") for end in ("", "_low", "_high")]


def _limits(name: str, interval: Interval) -> dict[str, float]:
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}
