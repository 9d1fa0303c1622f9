"""Next steps: the model to deploy with its timing options, or remedies if no row of a task qualifies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import pandas as pd

from harness.graph.io.files import digest_file
from harness.report.load.display_names import format_drop, metric_name
from harness.report.load.results import Results, TaskResults
from harness.report.load.task_files import exported
from harness.report.table_spec import Row
from harness.report.tables.main import wrong_result_rows
from harness.report.tables.notes import without_vnni
from harness.results_dir.artifacts import DYNAMIC_AXES_FILE, FLOAT_ROW
from harness.results_dir.io import read_json
from harness.search_loop.search_log import SearchLog
from harness.statistics import Interval
from harness.timing.provenance import format_options

__all__ = ["describe_next_steps", "describe_winners"]

MAX_SUGGESTED_DROP_SHARE = 0.1  # of the float model's metric; a bound with a larger drop is not suggested
SHIPPED_PREFIXES = ("ship", "fast")


def describe_winners(results: Results, main: pd.DataFrame) -> Iterator[str]:
    """Yield the fastest row that may be shipped of each finished task: its file, and the options of its engine.

    Tasks whose exported models are absent are left out.

    Args:
        main: See `harness.report.frames.main_frame.main_frame`.
    """
    best = main[main["best"].eq(True)].to_dict("records")
    for task in results.tasks:
        own = (row for row in best if row["task"] == task.name)
        row = next((row for row in own if str(row["decision"]).startswith(SHIPPED_PREFIXES)), None)
        if row is None or row["row"] not in task.rows:
            continue
        path = exported(task, task.rows[row["row"]])
        if path.exists() and digest_file(path) != task.rows[row["row"]].sha256:
            yield f"{task.name}: {path} is damaged, do not ship it: qdq verify {results.folder} says how to repair it"
        elif path.exists():
            backend = task.facts["backend"]
            floating = backend.get("float_params", {}).get(row["precision"], {})  # a float row has its own precision
            options = format_options({**backend.get("options", {}), **floating})
            timing = f"; timed with {options}, deploy it with the same" if options else ""
            facts = f"{row['method']}, {row['speedup']:.2f}x, {row['decision']}{timing}"
            yield f"{task.name}: take {path} ({facts}){_dynamic_axes_note(task, str(row['row']))}"


def _dynamic_axes_note(task: TaskResults, row: str) -> str:
    path = task.folder / DYNAMIC_AXES_FILE
    note = (read_json(path) if path.exists() else {}).get(row, {}).get("said")
    return f"; {note}" if note else ""


def describe_next_steps(results: Results, main: pd.DataFrame) -> Iterator[str]:
    """Yield for each finished task without a row that may be shipped the reason, and remedies as a list.

    Tasks whose float model scores next to nothing, or whose rows all failed, are left out: their tables show what to
    check.

    Args:
        main: See `harness.report.frames.main_frame.main_frame`.
    """
    planned = {spec.name for spec in results.stored.tasks}
    for task in results.tasks:
        rows = [row for row in main.to_dict("records") if row["task"] == task.name and row["method"] != FLOAT_ROW]
        shipped = any(str(row["decision"]).startswith(SHIPPED_PREFIXES) for row in rows)
        if shipped or task.name not in planned or not task.complete or task.blind:
            continue
        beyond = [row for row in rows if row["verdict"] == "faster" and row["beyond"]]
        slow = [row for row in rows if row["verdict"] in ("tie", "slower")]
        if wrong := wrong_result_rows(task):
            reason = f"the results of {task.facts['backend'].get('name')} contradict the files of {', '.join(wrong)}"
            yield _format_paragraph(task, reason, _wrong_result_steps(task))
        elif beyond:
            steps = [*_search_steps(task), *_accuracy_steps(task, beyond)]
            yield _format_paragraph(task, _accuracy_reason(task, beyond), steps)
        elif slow:
            steps = [*_latency_steps(task, slow, results), *_search_steps(task)]
            yield _format_paragraph(task, "none is faster than the float model", steps)


def _format_paragraph(task: TaskResults, reason: str, steps: Iterable[str]) -> str:
    return "\n".join([f"No row of {task.name} may be shipped: {reason}. Remedies:", *(f"- {step}" for step in steps)])


def _search_steps(task: TaskResults) -> Iterator[str]:
    """Yield remedies in the search; a larger budget does not help one that ended by itself."""
    budget = task.budget
    if not budget:
        return
    ended = [search for search in task.searches if search.end is not None and search.evaluations < budget]
    short = [search for search in task.searches if search.end is None and search.evaluations < budget]
    if short:
        yield f"more budget.minutes: {_names(short)} did not reach {budget} evaluations; existing results are kept"
    if not task.searches or any(search.evaluations >= budget for search in task.searches):
        yield f"a larger budget than {budget} evaluations; existing results are kept"
    elif broken := [search for search in ended if search.end is not None and search.end.failed]:
        yield f"a searcher that does not fail: {_names(broken)} did"
    elif ended:
        yield f"another searcher, or a larger space (sharing: region): {_names(ended)} had nothing more to propose"


def _names(searches: Iterable[SearchLog]) -> str:
    return ", ".join(search.name for search in searches)


def _wrong_result_steps(task: TaskResults) -> Iterator[str]:
    for model in sorted({check.model for check in task.checks.values() if check.model}):
        yield f"a bug report on the runtime: {task.folder / model} reproduces it (description next to it)"
    if any(check.verdict == "saturates" for check in task.checks.values()):
        yield "weights of 7 bits (reduce_range: true), or a processor with VNNI"
    yield "another version of the runtime"


def _accuracy_reason(task: TaskResults, rows: Sequence[Row]) -> str:
    least = _least_lossy_row(rows)
    drop = Interval(value=least["drop"], low=_or_nan(least["drop_low"]), high=_or_nan(least["drop_high"]))
    return (
        f"the faster rows lose more {metric_name(task.metric)} than the bound {task.allowed or 0.0:g} "
        f"(least: {least['method']}, {format_drop(drop, task.metric)})"
    )


def _accuracy_steps(task: TaskResults, rows: Sequence[Row]) -> Iterator[str]:
    least = _least_lossy_row(rows)
    yield _calibration_hint(task)
    if _or_nan(least["drop_low"]) <= (task.allowed or 0.0):
        yield "more images: the interval of that drop includes the bound"
    if least["drop"] <= MAX_SUGGESTED_DROP_SHARE * abs(task.score(FLOAT_ROW) or 0.0):
        bound = math.ceil(least["drop"] * 1e4 - 1e-6) / 1e4
        yield f"a looser bound: at {bound:g} {least['method']} could be shipped, {least['speedup']:.2f}x"


def _latency_steps(task: TaskResults, rows: Sequence[Row], results: Results) -> Iterator[str]:
    if without_vnni(task):
        yield "a processor with VNNI or AMX: this one has neither, and INT8 gains little on it"
    if ties := [row for row in rows if row["verdict"] == "tie" and row["speedup"] > 1 and not row["beyond"]]:
        fastest = _fastest_row(ties)
        shown = f"{fastest['speedup']:.2f} [{fastest['speedup_low']:.2f}, {fastest['speedup_high']:.2f}]"
        more = f"more confirmation.builds than {task.builds}"
        yield f"a quieter machine, or {more}: {fastest['method']} is a tie at {shown}"
    if infeasible := _count_infeasible(task):
        yield _calibration_hint(task)
        yield f"a looser bound than {task.allowed:g}, which {infeasible} evaluations faster than float exceeded"
    placed = [row for row in rows if row["row"] in task.rows and task.rows[row["row"]].choices is not None]
    if placed:
        method = _fastest_row(placed)["method"]
        yield f"qdq explain {results.folder} {task.name}/{method}: cost and gain of its Q/DQ pairs on this runtime"


def _calibration_hint(task: TaskResults) -> str:
    if task.facts["calibrated_on"] == "random data":
        return "calibration data: the ranges are those of random data"
    method = task.facts.get("calibration", {}).get("method", "minmax")
    return f"another calibration.method than {method}, for instance {'entropy' if method == 'mse' else 'mse'}"


def _least_lossy_row(rows: Sequence[Row]) -> Row:
    return min(rows, key=lambda row: row["drop"])


def _fastest_row(rows: Sequence[Row]) -> Row:
    return max(rows, key=lambda row: row["speedup"])


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _count_infeasible(task: TaskResults) -> int:
    """Return the number of evaluations that were faster than the float model and exceeded the bound."""
    base_ms, goal = task.summaries[FLOAT_ROW].latency_ms.value, task.goal
    return sum(
        trial.latency_ms < (search.float_ms or base_ms) and goal.loss_excess(goal.loss(trial.value)) > 0
        for search in task.searches
        for trial in search.scored
    )
