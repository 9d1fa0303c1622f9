"""Tables by model and device: decisions (float precisions, PTQ tools, fixed placements, best placement), and shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from harness.config.initial import TOOL_NAMES
from harness.measure.turn_statistics import summarize_parts
from harness.report.frames.main_frame import UNUSABLE, RowStatus, interval_columns, rows_by_task, with_backend_column
from harness.report.report_table import ReportTable, frame_rows
from harness.report.table_spec import Column, Row, TableSpec, interval_column, is_missing, number_column, text_column
from harness.report.tables.main import DECISION_NOTE, FIGURES, PAIRS, VERDICT
from harness.results.artifacts import FLOAT_ROW
from harness.results.display_names import score_column_title
from harness.results.folder import Results, TaskResults
from harness.results.stored_experiment import StoredExperiment
from harness.results.task_files import sizes_of

BEST_FOUND = "best found"
FIXED_PLACEMENT_LABELS = {
    "linear": "linear operators",
    "linear-fp8": "linear operators, fp8",
    "all": "all operators",
    "all-fp8": "all operators, fp8",
}
PRECISION_LABELS = {"f32": "FP32", "fp32": "FP32", "f16": "FP16", "fp16": "FP16", "bf16": "BF16"}
Losses = Mapping[tuple[str, int | None], float]


def _format_decision(row: Row) -> str:
    return f"{row['decision']} ({row['method']})" if row["role"] == BEST_FOUND else str(row["decision"])


DECISION = TableSpec(
    name="decision",
    title="Decision",
    columns=(text_column("model"), text_column("device"), number_column("batch"), text_column("row", "role")),
    caption=DECISION_NOTE,
    group_by=("model", "backend", "role"),
    spread_by="quantized",
    spread=(
        text_column("precision"),
        *FIGURES,
        PAIRS,
        number_column("file MB", "megabytes", "{:.1f}"),
        Column("decision", _format_decision, text=True),
    ),
    drop_empty=True,
    timed=True,
    shows_selection=True,
    source="rows",
)


def decision_table(results: Results, main: pd.DataFrame) -> ReportTable:
    """Return the table with a line per model, backend and role, and columns per precision."""
    raw = with_backend_column(decision_frame(results, main))
    several = len(raw) > 0 and raw["quantized"].nunique() > 1
    prefixed = tuple(replace(column, heading=f"{{quantized}} {column.heading}") for column in DECISION.spread)
    spec = replace(DECISION, caption="", spread=prefixed if several else DECISION.spread)
    return spec.build(raw, [_note(raw)], score=score_column_title(raw.get("metric", ())))


def _note(decisions: pd.DataFrame) -> str:
    rows = frame_rows(decisions)
    best = [row for row in rows if row["role"] == BEST_FOUND]
    unusable = (row for row in best if not is_missing(row["speedup"]) and row["status"] in UNUSABLE)
    broken = ", ".join(str(row["task"]) for row in unusable)
    sentences = [
        DECISION.caption,
        "Figures, intervals and marks are those of the main table. File MB: size of the ONNX file in 10^6 bytes.",
    ]
    if best:
        sentences.append(
            "Best found: among the searchers whose choice keeps the bound on accuracy, if any does, the fastest one in "
            "the final selection, or by the searches' own samples if not all of them took part; its figures are "
            "confirmed ones."
        )
    if broken:
        sentences.append(
            f"If no searcher's choice keeps the bound ({broken}), the fastest of all is shown; it is not shipped."
        )
    if any(row["status"] == RowStatus.NOT_SCORED for row in rows):
        sentences.append("Models with outputs that are not finite are not shipped; the decision states this reason.")
    return " ".join(sentences)


def decision_frame(results: Results, main: pd.DataFrame) -> pd.DataFrame:
    """Return a row per task and role, with the columns of `main` (`main_frame(results)`), `batch` and `megabytes`.

    Roles are the float precisions, "default PTQ" with each tool, the other baselines, and "best found": among the
    searchers whose choice obeys the bound on accuracy, the one with the smallest loss if the loss was minimised, else
    with the highest speedup in the final selection, else by its own samples. None of these criteria uses the
    confirmation, whose figures are shown. `batch` is the first dimension of the inputs, `megabytes` the size of the
    exported file in units of 10^6 bytes; both are None if unknown.
    """
    tasks = {task.name: task for task in results.tasks}
    lines = []
    for name, rows in rows_by_task(main).items():
        task = tasks.get(name)
        sizes = {} if task is None else sizes_of(task)
        for role, line in _iter_roles(rows, results.stored, _search_losses(task)):
            size = sizes.get(line["row"])
            facts = {"role": role, "batch": _batch_size(task), "megabytes": None if size is None else size / 1e6}
            lines.append({**line, **facts})
    return pd.DataFrame(lines)


def _search_losses(task: TaskResults | None) -> Losses:
    """Return the loss of the choice of each search, by searcher and seed, if the searches minimised it."""
    if task is None:
        return {}
    final = (pick for pick in task.picks if pick.rank == 0 and pick.budget == task.budget)
    return {(pick.method, pick.seed): pick.loss for pick in final if pick.loss is not None}


def _iter_roles(
    rows: Sequence[dict[Any, Any]], stored: StoredExperiment, losses: Losses
) -> Iterator[tuple[str, dict[Any, Any]]]:
    named = [(PRECISION_LABELS.get(row["precision"], FLOAT_ROW), row) for row in rows if row["method"] == FLOAT_ROW]
    yield from sorted(named, key=lambda pair: pair[0] != "FP32")
    yield from ((f"default PTQ, {row['method']}", row) for row in rows if row["method"] in TOOL_NAMES)
    fixed = (row for row in rows if row["method"] in stored.baselines and row["method"] not in TOOL_NAMES)
    yield from ((FIXED_PLACEMENT_LABELS.get(row["method"], row["method"]), row) for row in fixed)
    if searched := [row for row in rows if row["method"] in stored.searchers]:
        yield BEST_FOUND, _best_row(searched, losses)


def _best_row(searched: Sequence[dict[Any, Any]], losses: Losses) -> dict[Any, Any]:
    """Return the row of the best searcher before the confirmation, among those that obey the bound if any does."""
    confirmed = [row for row in searched if not is_missing(row["speedup"])]
    obeying = [row for row in confirmed if row["status"] not in UNUSABLE]
    rows = obeying or confirmed or searched
    by_search = {(row["method"], row["seed"]): row for row in rows}
    if by_search.keys() <= losses.keys():
        return by_search[min(by_search, key=lambda key: (losses[key], -_search_speedup(by_search[key])))]
    selected = all(not is_missing(row["final_selection"]) for row in rows)
    return max(rows, key=lambda row: row["final_selection"] if selected else _search_speedup(row))


def _search_speedup(row: Row) -> float:
    """Return the speedup by the search's own samples."""
    if is_missing(row["speedup"]):
        return -math.inf
    return float(row["speedup"]) + (0.0 if is_missing(row["shrinkage"]) else float(row["shrinkage"]))


def _batch_size(task: TaskResults | None) -> int | None:
    shapes = {} if task is None else task.facts.get("inputs", {})
    sizes = {shape[0] for shape in shapes.values() if shape}
    return sizes.pop() if len(sizes) == 1 else None


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
    rows = frame_rows(main)
    for task in results.tasks:
        for shape, summary in summarize_parts(task.events, FLOAT_ROW).items():
            for row in rows:
                if row["task"] == task.name and (figures_at_shape := summary.rows.get(row["row"])) is not None:
                    figures = interval_columns("shape_ms{}", figures_at_shape.latency_ms)
                    figures |= interval_columns("shape_speedup{}", figures_at_shape.speedup)
                    lines.append({**row, "shape": shape, **figures})
    return pd.DataFrame(lines, columns=[*main.columns, "shape", *_COLUMNS])


_COLUMNS = [f"{name}{end}" for name in ("shape_ms", "shape_speedup") for end in ("", "_low", "_high")]
