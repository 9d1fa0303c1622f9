"""Frame of the main table, one row per method, from which other tables select rows."""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

import numpy as np
import pandas as pd

from harness.accuracy.metrics.intervals import decode_accuracy, drop_estimate
from harness.base.statistics import Interval
from harness.config.plan import TaskSpec
from harness.measure.provenance import processor_label
from harness.measure.turn_log import disturbance_note
from harness.report.frames.confirmation import statistical_ties
from harness.report.frames.curves import search_float_ms
from harness.report.report_table import frame_rows
from harness.results.artifacts import FLOAT_ROW, Choice, best_choice
from harness.results.folder import Results, TaskResults
from harness.results.search_log import SearchLog

logger = logging.getLogger(__name__)

MAX_REASON_CHARS = 60
MISSING_VERDICT = "missing"
MAIN_COLUMNS = (
    "task", "model", "backend", "device", "precision", "quantized", "method", "latency_ms", "latency_low_ms",
    "latency_high_ms", "speedup", "speedup_low", "speedup_high", "metric", "score", "drop", "drop_low", "drop_high",
    "pairs", "builds_ok", "builds", "minutes", "verdict", "beyond", "reason", "decision", "seed", "budget",
    "search_ms", "shrinkage", "final_selection", "scored", "agreement", "row", "sha256", "best", "tied", "status",
    "busy",
)  # fmt: skip


class RowStatus(StrEnum):
    """Status of a row of the main table, which its decision states in words."""

    SHIPPABLE = "shippable"  # faster than the float model and, with a bound on accuracy, within it
    NOT_FASTER = "not faster"  # the float model itself, a tie or slower
    INACCURATE = "inaccurate"  # beyond the bound on accuracy
    NOT_SCORED = "not scored"
    WRONG = "wrong"  # the runtime's result contradicts the file, or saturates
    UNDECIDED = "undecided"  # missing, failed or not confirmed, or the float model scores nothing


#: Status of rows that break the bound on accuracy, have no score, or compute a wrong result.
UNUSABLE = (RowStatus.INACCURATE, RowStatus.NOT_SCORED, RowStatus.WRONG)


def main_frame(results: Results) -> pd.DataFrame:
    """Return confirmed latency, speedup, accuracy, cost, verdict and decision of each method of each task.

    A searcher has the row of its best seed at the largest budget (`harness.results.artifacts.best_choice`), with
    confirmed figures. Methods without results have the verdict "missing".

    Returns:
        Columns `MAIN_COLUMNS`. `status` is a `RowStatus`; `busy` marks shippable rows whose confirmation was disturbed;
        `best` marks the fastest confirmed method of a finished task within the bound on
        accuracy, `tied` methods not distinguishable from it, `beyond` a drop above the bound. Intervals are 95 %.
    """
    lines = [line for task in results.tasks for line in _task_rows(task, results)]
    waiting = {spec.name: spec for spec in results.stored.tasks if spec.name in results.waiting}
    for spec in waiting.values():
        lines += [_missing_row(_spec_columns(spec), method) for method in _expected_methods(results)]
    return pd.DataFrame(lines, columns=list(MAIN_COLUMNS))


def precision_frame(main: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of tasks that have scores and of models that were quantized to several precisions."""
    scored = main.groupby("task")["score"].transform("count") > 0
    several = main.groupby(["model", "backend"])["quantized"].transform("nunique") > 1
    return main[scored | several].reset_index(drop=True)


def finalist_frame(results: Results) -> pd.DataFrame:
    """Return a row for each placement that a search sent to the confirmation, of every seed and rank.

    It has the columns of `main_frame` without marks and decision. The second best of a search is called "METHOD #2".
    The main table lacks such rows: a selection among them by confirmed figures would bias the reported ones.
    """
    lines = []
    for task in results.tasks:
        for pick in _final_choices(task):
            line = _choice_row(task, pick)
            lines.append({**line, "method": pick.method if pick.rank == 0 else f"{pick.method} #{pick.rank + 1}"})
    decided = ("best", "tied", "decision", "status", "busy")
    return pd.DataFrame(lines, columns=[c for c in MAIN_COLUMNS if c not in decided])


def rows_by_task(frame: pd.DataFrame) -> dict[str, list[dict[Any, Any]]]:
    """Return the rows of a frame as dictionaries, by task."""
    found: dict[str, list[dict[Any, Any]]] = {}
    for row in frame_rows(frame):
        found.setdefault(row["task"], []).append(row)
    return found


def with_backend_column(main: pd.DataFrame) -> pd.DataFrame:
    """Return the frame, with "BACKEND on DEVICE" in the column `device` if there are several backends."""
    several = len(main) > 0 and main["backend"].nunique() > 1
    return main.assign(device=main["backend"] + " on " + main["device"]) if several else main


def _task_rows(task: TaskResults, results: Results) -> list[dict[str, Any]]:
    searches: dict[str, list[Choice]] = {}
    for pick in _final_choices(task):
        if pick.rank == 0:
            searches.setdefault(pick.method, []).append(pick)
    chosen = [best_choice(p for p in picks if not task.wrong(p.row)) or picks[0] for picks in searches.values()]
    lines = [_choice_row(task, pick) for pick in (*(p for p in task.picks if p.kind != "search"), *chosen)]
    present = {line["method"] for line in lines}
    lines += [
        _missing_row(_task_columns(task), method) for method in _expected_methods(results) if method not in present
    ]
    return _rank_rows(task, lines)


def _rank_rows(task: TaskResults, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mark the fastest row of a finished task and the rows that are not distinguishable from it.

    If the fastest row ties with the float model, the float model is marked; slower rows are never marked.
    """
    confirmed = [line for line in lines if line["speedup"] is not None] if task.complete else []
    if not task.facts["backend"].get("float_open", True):  # the experiment sets the precision: others only compare
        confirmed = [line for line in confirmed if line["method"] != FLOAT_ROW or line["row"] == FLOAT_ROW]
    within = [line for line in confirmed if task.obeys(line["row"]) and line["verdict"] != "slower"]
    top = max((line for line in within if line["verdict"] != "tie"), key=lambda line: line["speedup"], default=None)
    tied = statistical_ties(task, top["row"]) if top is not None else frozenset()
    for line in lines:
        line["best"] = top is not None and line in within and line["row"] == top["row"]
        line["tied"] = line in within and line["row"] in tied
        line["status"], line["decision"] = _decide(task, line)
        line["busy"] = line["status"] == RowStatus.SHIPPABLE and _is_disturbed(task, line["row"])
        if line["busy"]:
            line["decision"] += "; the machine was busy: confirm again"
    return lines


def _final_choices(task: TaskResults) -> Iterator[Choice]:
    """Yield the choices of the searches at the largest budget."""
    return (pick for pick in task.picks if pick.kind == "search" and pick.budget == task.budget)


def _expected_methods(results: Results) -> tuple[str, ...]:
    return (FLOAT_ROW, *results.stored.baselines, *results.stored.searchers)


def _task_columns(task: TaskResults) -> dict[str, Any]:
    precision = task.facts["precision"]
    names = {"task": task.name, "model": task.facts["model"], "backend": backend_label(task)}
    return {
        **names, "device": _device_label(task), "precision": precision, "quantized": precision, "metric": task.metric
    }  # fmt: skip


def _spec_columns(spec: TaskSpec) -> dict[str, Any]:
    names = {"task": spec.name, "model": spec.model.name, "backend": spec.backend.name, "device": MISSING_VERDICT}
    return {**names, "precision": spec.precision, "quantized": spec.precision, "metric": None}


def _missing_row(facts: dict[str, Any], method: str) -> dict[str, Any]:
    counts = {"builds_ok": 0, "builds": 0, "beyond": False, "best": False, "tied": False}
    words = {"method": method, "verdict": MISSING_VERDICT, "decision": MISSING_VERDICT, "reason": "", "row": ""}
    status = {"status": RowStatus.UNDECIDED, "busy": False}
    return {**dict.fromkeys(MAIN_COLUMNS), **facts, **counts, **words, **status}


def _decide(task: TaskResults, line: Mapping[str, Any]) -> tuple[RowStatus, str]:
    """Return status and decision of a row by its verdict and the bound on accuracy, with the reason against it."""
    verdict = line["verdict"]
    if verdict == "baseline":
        return RowStatus.NOT_FASTER, verdict
    if verdict == MISSING_VERDICT:
        return RowStatus.UNDECIDED, verdict
    if verdict not in ("faster", "tie", "slower"):
        return RowStatus.WRONG if task.wrong(line["row"]) else RowStatus.UNDECIDED, f"not shipped: {verdict}"
    if task.blind:
        return RowStatus.UNDECIDED, "not shipped: the float model scores nothing"
    if not task.obeys(line["row"]):
        if line["score"] is not None:
            return RowStatus.INACCURATE, "not shipped: accuracy"
        return RowStatus.NOT_SCORED, f"not shipped: {_unscored_reason(task, line)}"
    if verdict == "faster":
        return RowStatus.SHIPPABLE, _shipping_label(task, line)
    is_tie = verdict == "tie" and line["method"] != FLOAT_ROW
    return RowStatus.NOT_FASTER, "tie: use float" if is_tie else f"not shipped: {verdict}"


def _is_disturbed(task: TaskResults, row: str) -> bool:
    return bool(disturbance_note(task.disturbed)) or task.summaries[row].fully_disturbed


def _shipping_label(task: TaskResults, line: Mapping[str, Any]) -> str:
    if line["score"] is not None and task.allowed is not None:
        return "ship: fastest" if line["best"] else "ship"
    why = "accuracy unknown" if line["score"] is None else "no bound on accuracy"
    return f"{'fastest' if line['best'] else 'faster'}, {why}"


def _unscored_reason(task: TaskResults, line: Mapping[str, Any]) -> str:
    reason = task.scores.get(line["row"], {}).get("reason")  # as a rule, outputs that are not finite
    return "not scored" if reason is None else f"not scored ({_truncate_reason(str(reason))})"


def _truncate_reason(reason: str) -> str:
    return textwrap.shorten(reason, MAX_REASON_CHARS, placeholder=" ...")


def _choice_row(task: TaskResults, pick: Choice) -> dict[str, Any]:
    summary, row = task.summaries.get(pick.row), task.rows.get(pick.row)
    search = next((s for s in task.searches if (s.searcher, s.seed) == (pick.method, pick.seed)), None)
    good, tried = _count_builds(task, pick, search)
    drop = task.drop(pick.row)
    verdict, reason = _speed_verdict(task, pick)
    return {
        **_task_columns(task),
        "precision": _precision_label(task.facts, pick),
        "method": pick.method,
        **interval_columns("latency{}_ms", None if summary is None else summary.latency_ms),
        **interval_columns("speedup{}", None if summary is None else summary.speedup),
        "score": task.score(pick.row),
        **interval_columns("drop{}", _accuracy_drop(task, pick.row)),
        "pairs": None if row is None else row.pairs,
        "builds_ok": good,
        "builds": tried,
        "verdict": verdict,
        "beyond": drop is not None and task.goal.loss_excess(drop) > 0,
        "reason": reason,
        "shrinkage": _shrinkage(task, pick, search),
        "sha256": None if row is None else row.sha256,
        **{key: getattr(pick, key) for key in ("minutes", "seed", "budget", "search_ms", "final_selection", "scored")},
        "agreement": pick.agreement,
        "row": pick.row,
    }


def interval_columns(name: str, interval: Interval | None) -> dict[str, float | None]:
    """Return value and limits of an interval by column, None without one; `name` is a format such as "latency{}_ms"."""
    values = (None,) * 3 if interval is None else (interval.value, interval.low, interval.high)
    shown = (None if value is None or np.isnan(value) else value for value in values)
    return {name.format(part): value for part, value in zip(("", "_low", "_high"), shown, strict=True)}


def _accuracy_drop(task: TaskResults, row: str) -> Interval | None:
    """Return the loss of accuracy with its interval over images; NaN limits without one, None without a score."""
    value = task.drop(row)
    if value is None or task.metric is None:
        return None
    if row != FLOAT_ROW:
        reference, row_accuracy = (decode_accuracy(task.scores[name]) for name in (FLOAT_ROW, row))
        try:
            estimate = drop_estimate(reference, row_accuracy, task.metric, higher_is_better=task.higher_is_better)
        except ValueError as error:
            logger.warning("%s: no interval of the drop of %s: %s", task.folder, row, error)
            estimate = None
        if estimate is not None:
            return estimate.interval
    return Interval(value=value, low=float("nan"), high=float("nan"))


def _shrinkage(task: TaskResults, pick: Choice, search: SearchLog | None) -> float | None:
    """Return the speedup by the search's samples minus the confirmed one; None if either is missing."""
    summary = task.summaries.get(pick.row)
    base_ms = None if search is None else search_float_ms(task, search)
    if summary is None or base_ms is None or pick.search_ms is None:
        return None
    return summary.shrinkage(base_ms / pick.search_ms)


def _count_builds(task: TaskResults, pick: Choice, search: SearchLog | None) -> tuple[int, int]:
    """Return the numbers of successful and of all builds, in the search of a searcher, else in the confirmation."""
    if pick.kind == "search":
        return (0, 0) if search is None else (search.successes, search.evaluations)
    summary = task.summaries.get(pick.row)
    return (0, task.lost.get(pick.row, 0)) if summary is None else (summary.builds_ok, summary.builds)


def _speed_verdict(task: TaskResults, pick: Choice) -> tuple[str, str]:
    """Return the verdict for the table, and the full reason if there is no figure."""
    summary, failed = task.summaries.get(pick.row), task.failed.get(pick.row)
    is_baseline = pick.row == FLOAT_ROW and pick.kind == "float"
    if task.wrong(pick.row) and not is_baseline:
        return task.checks[pick.row].label, str(task.checks[pick.row])
    if pick.reason:
        return _truncate_reason(pick.reason), pick.reason
    if summary is not None:
        return ("baseline" if is_baseline else summary.verdict), ""
    return ("not confirmed", "") if failed is None else (f"failed: {failed.stage}", failed.reason)


def backend_label(task: TaskResults) -> str:
    """Return the label of the backend, the part of the task's name between model and precision."""
    prefix, suffix = f"{task.facts['model']}-", f"-{task.facts['precision']}"
    label = task.name.removeprefix(prefix).removesuffix(suffix)
    return label if f"{prefix}{label}{suffix}" == task.name else str(task.facts["backend"].get("name"))


def _device_label(task: TaskResults) -> str:
    backend = task.facts["backend"]
    device = str(backend.get("device", backend.get("name")))
    if device == task.environment.get("cpu", {}).get("model"):  # older runs recorded the bare name
        device = processor_label(device, task.environment)
    options = backend.get("options", {})
    threads, streams = options.get("threads"), f", {options['streams']} streams" if "streams" in options else ""
    return device if threads is None else f"{device}, {threads} thread{'' if threads == 1 else 's'}{streams}"


def _precision_label(facts: Mapping[str, Any], pick: Choice) -> str:
    fastest = str(facts["backend"].get("float_precision", "float"))
    if pick.kind == "float":
        return pick.row.removeprefix(f"{FLOAT_ROW}-") if pick.row != FLOAT_ROW else fastest
    return f"{facts['precision']}+{fastest}"
