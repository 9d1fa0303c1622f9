"""Tables by model and device: decisions (float precisions, PTQ tools, fixed placements, best placement), and shapes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from harness.accuracy.metrics.intervals import SURELY_WITHIN, probability_within
from harness.base.statistics import Interval
from harness.config.experiment import TOOL_NAMES
from harness.measure.turn_log import summarize_parts
from harness.report.frames import (
    UNUSABLE,
    RowStatus,
    interval_columns,
    paired_accuracies,
    rows_by_task,
    with_backend_column,
)
from harness.report.report_table import (
    MISSING_CELL,
    Column,
    ReportTable,
    Row,
    TableSpec,
    format_interval,
    frame_rows,
    interval_column,
    is_missing,
    number_column,
    text_column,
)
from harness.report.statistics import geometric_mean
from harness.report.tables.main import DECISION_NOTE, FIGURES, PAIRS, VERDICT, build_rows
from harness.results.artifacts import FLOAT_ROW
from harness.results.folder import Results, TaskResults
from harness.results.scores import format_score
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
        Column(
            "decision",
            lambda row: f"{row['decision']} ({row['method']})" if row["role"] == BEST_FOUND else str(row["decision"]),
            text=True,
            of="speedup",
        ),
    ),
    drop_empty=True,
    timed=True,
    shows_selection=True,
    source="rows",
)


def decision_table(results: Results, main: pd.DataFrame) -> ReportTable:
    """Return the table with a line per model, backend and role, and columns per precision."""
    raw = decision_frame(results, main)
    several = len(raw) > 0 and raw["quantized"].nunique() > 1
    prefixed = tuple(replace(column, heading=f"{{quantized}} {column.heading}") for column in DECISION.spread)
    spec = replace(DECISION, caption="", spread=prefixed if several else DECISION.spread)
    rows = frame_rows(raw)
    best = [row for row in rows if row["role"] == BEST_FOUND]
    broken = [str(row["task"]) for row in best if not is_missing(row["speedup"]) and row["status"] in UNUSABLE]
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
            f"If no searcher's choice keeps the bound ({', '.join(broken)}), the fastest of all is shown; it is not "
            "shipped."
        )
    if any(row["status"] == RowStatus.NOT_SCORED for row in rows):
        sentences.append("Models with outputs that are not finite are not shipped; the decision states this reason.")
    return build_rows(spec, raw, [" ".join(sentences)])


def decision_frame(results: Results, main: pd.DataFrame) -> pd.DataFrame:
    """Return a row per task and role, with the columns of `main` (`main_frame(results)`), `batch` and `megabytes`.

    Roles are the float precisions, "default PTQ" with each tool, the other baselines, and "best found": among the
    searchers whose choice obeys the bound on accuracy, the one with the smallest loss if the loss was minimised, else
    with the highest speedup in the final selection, else by its own samples. None of these criteria uses the
    confirmation, whose figures are shown. `batch` is the first dimension of the inputs, `megabytes` the size of the
    exported file in units of 10^6 bytes; both are None if unknown.
    """
    tasks, lines = {task.name: task for task in results.tasks}, []
    for name, rows in rows_by_task(main).items():
        task = tasks.get(name)
        sizes = {} if task is None else sizes_of(task)
        shapes = {} if task is None else task.facts.get("inputs", {})
        batches = {shape[0] for shape in shapes.values() if shape}
        batch = batches.pop() if len(batches) == 1 else None
        for role, line in _iter_roles(task, rows, results.stored):
            size = sizes.get(line["row"])
            lines.append({**line, "role": role, "batch": batch, "megabytes": None if size is None else size / 1e6})
    return pd.DataFrame(lines)


def _iter_roles(
    task: TaskResults | None, rows: Sequence[dict[Any, Any]], stored: StoredExperiment
) -> Iterator[tuple[str, dict[Any, Any]]]:
    named = [(PRECISION_LABELS.get(row["precision"], FLOAT_ROW), row) for row in rows if row["method"] == FLOAT_ROW]
    yield from sorted(named, key=lambda pair: pair[0] != "FP32")
    yield from ((f"default PTQ, {row['method']}", row) for row in rows if row["method"] in TOOL_NAMES)
    fixed = (row for row in rows if row["method"] in stored.baselines and row["method"] not in TOOL_NAMES)
    yield from ((FIXED_PLACEMENT_LABELS.get(row["method"], row["method"]), row) for row in fixed)
    searched = [row for row in rows if row["method"] in stored.searchers]
    confirmed = [row for row in searched if not is_missing(row["speedup"])]
    candidates = [row for row in confirmed if row["status"] not in UNUSABLE] or confirmed or searched
    if not candidates:
        return
    picks = [] if task is None else [p for p in task.picks if p.rank == 0 and p.budget == task.budget]
    losses = {(pick.method, pick.seed): pick.loss for pick in picks if pick.loss is not None}
    by_search = {(row["method"], row["seed"]): row for row in candidates}
    if by_search.keys() <= losses.keys():  # the loss was minimised
        yield BEST_FOUND, by_search[min(by_search, key=lambda key: (losses[key], -_search_speedup(by_search[key])))]
    else:
        selected = all(not is_missing(row["final_selection"]) for row in candidates)
        yield BEST_FOUND, max(candidates, key=lambda r: r["final_selection"] if selected else _search_speedup(r))


def _search_speedup(row: Row) -> float:
    """Return the speedup by the search's own samples."""
    if is_missing(row["speedup"]):
        return -math.inf
    return float(row["speedup"]) + (0.0 if is_missing(row["shrinkage"]) else float(row["shrinkage"]))


SHAPES = TableSpec(
    name="shapes",
    title="Shapes",
    columns=(
        *map(text_column, ("model", "device", "precision", "method")),
        interval_column("speedup", "speedup", "speedup_low", "speedup_high", of="speedup"),
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


def shape_frame(results: Results, main: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each confirmed row of the main table and each shape.

    Returns:
        The columns of `main_frame`, shape, shape_ms and shape_speedup, each of the two with limits.
    """
    lines: list[dict[Any, Any]] = []
    for task in results.tasks:
        rows = frame_rows(main[main["task"] == task.name])
        for shape, summary in summarize_parts(task.events, FLOAT_ROW).items():
            for row in (row for row in rows if row["row"] in summary.rows):
                at_shape = summary.rows[row["row"]]
                figures = interval_columns("shape_ms{}", at_shape.latency_ms)
                figures |= interval_columns("shape_speedup{}", at_shape.speedup)
                lines.append({**row, "shape": shape, **figures})
    columns = [f"{name}{end}" for name in ("shape_ms", "shape_speedup") for end in ("", "_low", "_high")]
    return pd.DataFrame(lines, columns=[*main.columns, "shape", *columns])


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


def _interval(row: Row, field: str) -> Interval:
    return Interval(value=row[field], low=row[f"{field}_low"], high=row[f"{field}_high"])


def _format_fastest(row: Row) -> str:
    if row["is_float"]:
        return "1.00 (float)"
    return format_interval(row["speedup"], row["speedup_low"], row["speedup_high"])


def _format_mean(field: str) -> Callable[[Sequence[Row]], str]:
    """Return a formatter of the geometric mean of a field over all models, empty if one of them is missing."""

    def shown(rows: Sequence[Row]) -> str:
        if len(rows) < rows[0]["models"] or any(is_missing(row[field]) for row in rows):
            return MISSING_CELL
        mean = geometric_mean([_interval(row, field) for row in rows])
        return format_interval(mean.value, mean.low, mean.high)

    return shown


FASTEST = TableSpec(
    name="fastest",
    title="Fastest file within the bound",
    columns=(text_column("device"), number_column("bound", form="{:.3f}"), text_column("method")),
    group_by=("device", "bound", "method"),
    spread_by="model",
    spread=(Column("{model}", _format_fastest, of="speedup"),),
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
    rows: list[dict[Any, Any]] = []
    for row in frame_rows(with_backend_column(lines)):
        task = tasks[row["task"]]
        drop, allowed = task.drop(row["row"]), task.allowed or 0.0
        is_right = (
            row["verdict"] == "faster" and row["status"] != RowStatus.WRONG and not is_missing(row["speedup_low"])
        )
        for bound in (allowed, ONE_POINT) if allowed == HALF_POINT else (allowed,):
            keeps = is_right and drop is not None and drop <= bound
            figures = {name: row[name] if keeps else 1.0 for name in ("speedup", "speedup_low", "speedup_high")}
            labels = {name: row[name] for name in ("device", "method", "task", "model", "row")}
            rows.append({**labels, "bound": bound, **figures, "is_float": not keeps})
    rows.sort(key=lambda row: row["bound"])
    search_rows = {(row["task"], row["bound"]): row for row in rows if row["method"] == results.stored.searchers[0]}
    counts = Counter((row["device"], row["bound"]) for row in search_rows.values())
    filled = [
        {
            **row, "models": counts[row["device"], row["bound"]],
            **_ratio(search_rows.get((row["task"], row["bound"])), row),
        }
        for row in rows
    ]  # fmt: skip
    return pd.DataFrame(filled, columns=list(FASTEST_COLUMNS))


def _ratio(search_row: Row | None, row: Row) -> dict[str, float]:
    """Return the ratio of two speedups with its limits, as of independent figures; NaN without a search."""
    if search_row is None:
        return {"ratio": math.nan, "ratio_low": math.nan, "ratio_high": math.nan}
    own, other = _interval(search_row, "speedup"), _interval(row, "speedup")
    ratio, below, above = own.value / other.value, 0.0, 0.0
    if search_row["row"] != row["row"]:  # not the same file
        below = math.hypot(math.log(own.value / own.low), math.log(other.high / other.value))
        above = math.hypot(math.log(own.high / own.value), math.log(other.value / other.low))
    return {"ratio": ratio, "ratio_low": ratio * math.exp(-below), "ratio_high": ratio * math.exp(above)}


def tool_frame(results: Results, main: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of tasks with a file score, with the columns of `main_frame` and three more.

    `file_score`: metric of the file run as it describes itself; `within`: probability that the drop is within the
    bound; `seconds`: time that the tool or the search took.
    """
    lines = []
    for task in (each for each in results.tasks if each.file_scores):
        recovery_s = sum(facts.get("seconds", 0.0) for facts in task.recovery.values())
        for row in frame_rows(main[main["task"] == task.name]):
            seconds = within = None
            if not is_missing(row["minutes"]):
                seconds = 60 * float(row["minutes"]) + (0.0 if is_missing(row["budget"]) else recovery_s)
            pair, metric = paired_accuracies(task, row["row"]), task.metric or ""
            if task.allowed is not None and pair is not None:
                within = probability_within(*pair, metric, task.allowed, higher_is_better=task.higher_is_better)
            file_score = task.file_scores.get(row["row"], {}).get("metrics", {}).get(metric)
            lines.append({**row, "file_score": file_score, "within": within, "seconds": seconds})
    return pd.DataFrame(lines, columns=[*main.columns, "file_score", "within", "seconds"])
