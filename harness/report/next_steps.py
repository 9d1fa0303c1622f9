"""Next steps: the model to deploy with its timing options, or remedies if no row of a task qualifies."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from harness.accuracy.metrics.intervals import unseen_loss
from harness.base.statistics import Interval
from harness.graph.io.digests import digest_file
from harness.measure.provenance import format_options
from harness.report.frames import RowStatus, paired_accuracies
from harness.report.report_table import Row, frame_rows, is_missing
from harness.report.tables.notes import limit_reached, rows_by_label, without_vnni
from harness.results.artifacts import DYNAMIC_MODEL_SUFFIX, FLOAT_ROW, read_dynamic_axes
from harness.results.folder import Results, TaskResults
from harness.results.output_check import wrong_float_remedies, wrong_result_remedies
from harness.results.scores import METRIC_CAPS, UNIT_INTERVAL_METRICS, format_drop, format_score, metric_name
from harness.results.search_log import SearchLog
from harness.results.stored_experiment import StoredExperiment
from harness.results.task_files import exported
from harness.results.termination import SEARCH_SHARE

NEAR_MISS = 1.5  # relative to the bound; a larger loss is not named as a near miss
MAX_SUGGESTED_DROP_SHARE = 0.1  # relative to the float model's metric; a looser bound than this is not suggested


def best_row(task: TaskResults, main: pd.DataFrame) -> Row | None:
    """Return the row of a finished task that may be shipped and keeps most among the fastest and its ties, or None.

    Rows that are not distinguishable from the fastest are compared by dynamic axes, number of Q/DQ pairs and loss.
    """
    rows = frame_rows(main[main["task"].eq(task.name) & (main["best"].eq(True) | main["tied"].eq(True))])
    able = [row for row in rows if row["status"] == RowStatus.SHIPPABLE and row["row"] in task.rows]
    fastest = next((row for row in able if row["best"]), None)
    if fastest is None:
        return None
    axes = read_dynamic_axes(task.folder)

    def given_up(row: Row) -> tuple[bool, bool, float, float]:
        # A tool's file such as `ort_dynamic` has no placement that other commands can change.
        is_float = row["method"] == FLOAT_ROW
        fixed = not is_float and task.rows[row["row"]].choices is None
        loss = 0.0 if is_missing(row["drop"]) else float(row["drop"])
        no_axes = axes.get(row["row"], {}).get("file") is None
        return no_axes, fixed, 0 if is_float else row["pairs"] or math.inf, loss

    chosen = min(able, key=lambda row: (given_up(row), row["row"] != fastest["row"]))
    if chosen["row"] == fastest["row"]:
        return fastest
    reasons = ("dynamic axes", "a placement", "fewer Q/DQ pairs", "a lower loss")
    both = zip(reasons, given_up(chosen), given_up(fastest), strict=True)
    keeps = next(reason for reason, one, other in both if one != other)
    return {**chosen, "decision": f"{chosen['decision']}: tie with {fastest['method']}, but {keeps}"}


def answer_row(task: TaskResults, main: pd.DataFrame) -> Row | None:
    """Return the row to deploy of a finished task: the best row that may be shipped, else the float model, or None.

    There is none if the float model scores nothing, was not confirmed, or is computed wrongly.
    """
    if (best := best_row(task, main)) is not None:
        return best
    if not task.complete or task.blind or FLOAT_ROW not in task.rows or task.wrong(FLOAT_ROW):
        return None
    return next((row for row in _float_rows(task, main) if row["row"] == FLOAT_ROW), None)


def _float_rows(task: TaskResults, main: pd.DataFrame) -> list[Row]:
    """Return the confirmed rows of the float model, one for each float precision."""
    rows = frame_rows(main[main["task"].eq(task.name) & main["method"].eq(FLOAT_ROW)])
    return [row for row in rows if not is_missing(row["speedup"])]


def describe_answers(results: Results, main: pd.DataFrame, base: Path | None = None) -> Iterator[str]:
    """Yield a line for each finished task: the file to take with its speedup and loss, or why to keep the float model.

    The file is the one in the folder `ship`, else the exported one. A float model is named with its precision and the
    reason to keep it. Tasks without exported models, and tasks for which `describe_next_steps` has no reason, are left
    out.

    Args:
        base: Folder from which relative paths of the experiment start; None: the working folder.
    """
    for task in results.tasks:
        row = answer_row(task, main)
        prefix = f"{task.name}: " if len(results.tasks) > 1 else ""
        is_kept = row is None or (row["method"] == FLOAT_ROW and row["status"] != RowStatus.SHIPPABLE)
        reason = _reason_and_steps(task, results, main, base)[0] if is_kept else ""
        if is_kept and not reason:
            continue
        if row is None:
            advice = "deploy no file, not even the float model" if task.wrong(FLOAT_ROW) else "keep the float model"
            yield f"{prefix}{advice}, because {reason}"
            continue
        stored = task.rows[row["row"]]
        path, shipped = exported(task, stored), ship_path(results.folder, task.name)
        if not path.exists() and not is_kept:
            continue
        if path.exists() and digest_file(path) != stored.sha256:
            yield f"{task.name}: {path} is damaged, do not ship it: qdq verify {results.folder} says how to repair it"
            continue
        file = shipped if shipped.exists() and digest_file(shipped) == stored.sha256 else path
        asked = _other_precision(task, row, main) + _near_miss(task, row, main, reason)
        if is_kept:
            where = f" ({file})" if file.exists() else ""
            yield f"{prefix}keep the float model at {format_float(task, row, main)}{where}, because {reason}{asked}"
            continue
        notes = _remaining_doubts(task, str(row["row"]), file)
        again = f"; to confirm again: {_confirm_again(task, results, row, base)}" if row["busy"] else ""
        yield f"{prefix}take {file}: {format_answer(task, row)}{notes}{asked}{again}"


def format_float(task: TaskResults, row: Row, main: pd.DataFrame) -> str:
    """Return the precision of a float row, with its speedup over 32 bits: "bf16 (1.37x over f32)"."""
    name = str(row["precision"])
    for other in _float_rows(task, main):
        if other["precision"] in ("f32", "fp32") and other["row"] != row["row"]:
            return f"{name} ({row['speedup'] / other['speedup']:.2f}x over {other['precision']})"
    return name


def _other_precision(task: TaskResults, answer: Row, main: pd.DataFrame) -> str:
    """Return a float precision that is faster than the answer but excluded by the experiment, as text; or ""."""
    rows = _float_rows(task, main)
    faster = [r for r in rows if r["verdict"] == "faster" and r["speedup"] > answer["speedup"] and task.obeys(r["row"])]
    if not faster or task.facts["backend"].get("float_open", True):
        return ""
    fastest = _fastest_row(faster)
    own = next((row["precision"] for row in rows if row["row"] == FLOAT_ROW), "another")
    within = "" if task.allowed is None else ", within the bound"
    return f"; {str(fastest['precision']).upper()} alone: {_format_speedup(fastest)}{within}; you asked for {own}"


def _near_miss(task: TaskResults, answer: Row, main: pd.DataFrame, reason: str) -> str:
    """Return the fastest row that is faster than the answer and exceeds the bound by little, as text; or "".

    That is a loss of at most `NEAR_MISS` bounds, or one whose interval includes the bound.

    Args:
        reason: Why no file is the answer; a row that it names is left out.
    """
    bound, is_open = task.allowed, task.facts["backend"].get("float_open", True)
    if bound is None:
        return ""
    near = [
        row
        for row in frame_rows(main[main["task"].eq(task.name) & main["status"].eq(RowStatus.INACCURATE)])
        if (is_open or row["method"] != FLOAT_ROW)
        and row["verdict"] == "faster"
        and row["speedup"] > answer["speedup"]
        and (row["drop"] <= NEAR_MISS * bound or _drop_interval(row).low <= bound)
    ]
    if not near or f"least: {(best := _fastest_row(near))['method']}," in reason:
        return ""
    loss = f"{metric_name(task.metric)} {format_drop(_drop_interval(best), task.metric)}"
    speed = _format_speedup(best)
    return f"; near miss: {best['method']}, {speed}, loses {loss}, more than the bound {bound:g}"


def _drop_interval(row: Row) -> Interval:
    low, high = (math.nan if row[key] is None else row[key] for key in ("drop_low", "drop_high"))
    return Interval(value=row["drop"], low=low, high=high)


def _format_speedup(row: Row) -> str:
    return f"{row['speedup']:.2f}x [{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]"


def _fastest_row(rows: Sequence[Row]) -> Row:
    return max(rows, key=lambda row: row["speedup"])


def ship_path(folder: Path, task: str) -> Path:
    """Return the path of the model to deploy in a results folder, which exists once `qdq run` has written it."""
    return folder / "ship" / task / f"{task}.onnx"


def format_answer(task: TaskResults, row: Row) -> str:
    """Return speedup, change of accuracy, method and settings of a row as text.

    For instance "1.77x [1.70, 1.85], loses 0.4 points of top-1 [-0.2, +1.0] (auto, ship: fastest); on this processor,
    threads 1, precision f32". A metric whose reference is the float model itself is given as it is: "SQNR 44.2 dB". A
    metric whose higher values are better "loses" or "gains", in points if it is a share; others are like "perplexity
    +0.5000".
    """
    accuracy, name = "", metric_name(row["metric"])
    if not is_missing(row["drop"]) and row["metric"] in METRIC_CAPS:
        accuracy = f", {format_score(row['score'], row['metric'])}"
    elif not is_missing(row["drop"]):
        scale, unit, digits = (100, " points", 1) if row["metric"] in UNIT_INTERVAL_METRICS else (1, "", 4)
        gains = task.higher_is_better and row["drop"] < 0
        drop = _drop_interval(row)
        # Adding 0 after rounding turns -0.0 into 0.0.
        values = [
            round((-scale if gains else scale) * each, digits) + 0.0 for each in (drop.value, drop.low, drop.high)
        ]
        low, high = sorted(values[1:])
        limits = "" if math.isnan(low) or math.isnan(high) else f" [{low:+.{digits}f}, {high:+.{digits}f}]"
        accuracy = f", {name} {values[0]:+.{digits}f}{unit}{limits}"
        if task.higher_is_better:
            accuracy = f", {'gains' if gains else 'loses'} {values[0]:.{digits}f}{unit} of {name}{limits}"
    options = format_options(row_runtime(task, row).get("options", {}))
    settings = f", {options}" if options else ""
    return f"{_format_speedup(row)}{accuracy} ({row['method']}, {row['decision']}); on this processor{settings}"


def row_runtime(task: TaskResults, row: Row) -> dict[str, Any]:
    """Return the facts of a row's benchmarker; a float row has its own float precision."""
    backend = dict(task.facts["backend"])
    floating = backend.get("float_params", {}).get(row["precision"], {})
    return {**backend, "options": {**backend.get("options", {}), **floating}}


def _confirm_again(task: TaskResults, results: Results, row: Row, base: Path | None) -> str:
    """Return the command that measures a row again; for objects of a program, the call that confirms all rows again."""
    if not results.stored.from_program:
        return _row_command("verify", results, row, base)
    builds = 2 * (task.builds or results.stored.builds or 1)
    return f'the same call of qdq.autotune with confirmation={{"builds": {builds}}}, accept_changes=True'


def _row_command(name: str, results: Results, row: Row, base: Path | None) -> str:
    """Return a command on a row, with --base if relative paths of the experiment do not start from the working folder.

    Args:
        name: "verify" or "explain".
    """
    named = row["row"] if row["method"] == FLOAT_ROW else row["method"]  # each float precision is a row of that method
    start = [] if base is None or base.resolve() == Path.cwd() else ["--base", str(base)]
    return shlex.join(["qdq", name, str(results.folder), f"{row['task']}/{named}", *start])


def _remaining_doubts(task: TaskResults, row: str, file: Path) -> str:
    """Return as text the loss that samples do not exclude, and the result of the check of dynamic axes.

    Args:
        file: Model to take; the model with dynamic axes is named as the file next to it.
    """
    text, pair = "", paired_accuracies(task, row)
    if task.metric is not None and pair is not None and (loss := unseen_loss(*pair)) is not None:
        text = (
            f"; none of {len(pair[1].per_item)} samples lost its answer, which does not exclude a loss of up to "
            f"{100 * loss:.1f} points (rule of three)"
        )
    note = read_dynamic_axes(task.folder).get(row, {}).get("remark") or ""
    written, _, _ = note.partition(": ")
    summary = written if " keeps " in written else note
    return f"{text}{note and '; '}{summary.replace(row + DYNAMIC_MODEL_SUFFIX, file.stem + DYNAMIC_MODEL_SUFFIX)}"


def describe_next_steps(results: Results, main: pd.DataFrame, base: Path | None = None) -> Iterator[str]:
    """Yield for each finished task without a row that may be shipped the reason, and remedies as a list.

    For other finished tasks a time limit that ended a search is named with its remedy. Tasks whose float model has a
    negligible score, or whose rows all failed, are left out: their tables show the cause.

    Args:
        base: See `describe_answers`.
    """
    for task in results.tasks:
        reason, steps = _reason_and_steps(task, results, main, base)
        if reason:
            head = f"No row of {task.name} may be shipped: {reason}. Remedies:"
            yield "\n".join([head, *(f"- {step}" for step in steps)])
        elif task.complete:
            limited = [search for search in _short_searches(task) if limit_reached(search, results.stored)]
            for step in _time_steps(task, results.stored, limited):
                yield f"A time limit ended a search of {task.name}. Remedy: {step}"


def _reason_and_steps(
    task: TaskResults, results: Results, main: pd.DataFrame, base: Path | None
) -> tuple[str, list[str]]:
    """Return the reason why no row of a finished task may be shipped, with remedies; "" without a reason."""
    stored, backend = results.stored, task.facts["backend"]
    rows = [row for row in frame_rows(main) if row["task"] == task.name and row["method"] != FLOAT_ROW]
    shippable = any(row["status"] == RowStatus.SHIPPABLE for row in rows)
    if shippable or task.name not in {spec.name for spec in stored.tasks} or not task.complete:
        return "", []
    if task.wrong(FLOAT_ROW):
        reason = f"{backend.get('name')} computes the float model wrongly ({task.checks[FLOAT_ROW]})"
        return reason, list(wrong_float_remedies(backend))
    if task.blind:
        return "", []
    if wrong := [label for label, row in rows_by_label(task).items() if task.wrong(row)]:
        models = sorted({check.model for check in task.checks.values() if check.model})
        report = "a bug report on the runtime: {} reproduces it (description next to it)"
        steps = [report.format(task.folder / model) for model in models]
        steps += wrong_result_remedies(task.checks.values(), backend.get("name", ""), backend)
        reason = f"the results of {backend.get('name')} contradict the files of {', '.join(wrong)}"
        return reason, [*steps, *_search_steps(task, stored)]
    beyond = [row for row in rows if row["verdict"] == "faster" and row["beyond"]]
    not_faster = [row for row in rows if row["verdict"] in ("tie", "slower")]
    ties = [row for row in not_faster if row["verdict"] == "tie" and row["speedup"] > 1 and task.obeys(row["row"])]
    if beyond and not ties:
        least = min(beyond, key=lambda row: row["drop"])
        reason = (
            f"the faster rows lose more {metric_name(task.metric)} than the bound {task.allowed or 0.0:g} "
            f"(least: {least['method']}, {least['speedup']:.2f}x, {format_drop(_drop_interval(least), task.metric)}, "
            f"{task.goal.loss_excess(least['drop']):.2g} too much)"
        )
        return reason, [*_search_steps(task, stored), *_accuracy_steps(task, beyond)]
    if not not_faster:
        return "", []
    steps = [*_latency_steps(task, not_faster, results, base), *_search_steps(task, stored)]
    if not beyond:
        within = " within the bound" if _infeasible_losses(task) else ""
        return f"none of its rows{within} is faster than the float model", steps
    fastest, floor = _fastest_row(ties), f"noise floor {100 * (task.noise_floor or 0.0):.1f} %"
    tie = f"is a tie with the float model at {_format_speedup(fastest)}, {floor}"
    reason = f"the fastest row within the bound, {fastest['method']}, {tie}"
    return reason, [*steps, *_accuracy_steps(task, beyond)]


def _search_steps(task: TaskResults, stored: StoredExperiment) -> Iterator[str]:
    """Yield changes of the search that may help: time, budget, searcher or space."""
    budget = task.budget
    if not budget:
        return
    yield from _time_steps(task, stored, _short_searches(task))
    ends = {search.name: search.end for search in task.searches if search.evaluations < budget and search.end}
    failed = ", ".join(name for name, end in ends.items() if end.failed)
    if not task.searches or any(search.evaluations >= budget for search in task.searches):
        yield f"a larger budget than {budget} evaluations; existing results are kept"
    elif failed:
        yield f"another searcher: {failed} failed"
    elif ends:
        reasons = "; ".join(f"{name} {end.reason}" for name, end in ends.items())
        yield f"another searcher, or a larger space (sharing: region): {reasons}"


def _short_searches(task: TaskResults) -> list[SearchLog]:
    return [search for search in task.searches if search.end is None and search.evaluations < task.budget]


def _time_steps(task: TaskResults, stored: StoredExperiment, short: Sequence[SearchLog]) -> Iterator[str]:
    """Yield more time for searches that did not spend their budget, with the minutes that they need if known."""
    if not short:
        return
    where = "budget.minutes or budget.task_minutes, --max_minutes of qdq autotune"
    if key := limit_reached(short[0], stored):
        # The minutes that the searches need at their pace, for the limit of a task with its set-up.
        each_s = [
            task.budget * search.elapsed_s[-1] / search.evaluations for search in task.searches if search.elapsed_s
        ]
        needed_s, option, phases = max(each_s, default=0.0), "", list(task.phases_s)
        if key == "task_minutes":
            before = phases[: phases.index("search")] if "search" in phases else []
            set_up_s = sum(task.phases_s[phase] for phase in before)
            needed_s = (sum(each_s) + set_up_s) / SEARCH_SHARE
            option = ", --max_minutes of qdq autotune"
        minutes = max(math.ceil(needed_s / 60), math.floor(stored.minutes[key]) + 1)
        where = f"budget.{key}{option}: about {minutes} instead of {stored.minutes[key]:g}"
    counts = ", ".join(f"{search.name} made {search.evaluations}" for search in short)
    yield f"more time ({where}): {counts} of {task.budget} evaluations; existing results are kept"


def _accuracy_steps(task: TaskResults, rows: Sequence[Row]) -> Iterator[str]:
    least = min(rows, key=lambda row: row["drop"])
    if not task.searches:
        yield "a search, which recovers accuracy too: searchers: [auto], or qdq autotune --start FILE --max_drop POINTS"
    yield _calibration_hint(task)
    if _drop_interval(least).low <= (task.allowed or 0.0):
        yield "more images: the interval of that drop includes the bound"
    if least["drop"] <= MAX_SUGGESTED_DROP_SHARE * abs(task.score(FLOAT_ROW) or 0.0):
        bound = math.ceil(least["drop"] * 1e4 - 1e-6) / 1e4
        looser = replace(task.goal, max_drop=bound)
        best = _fastest_row([row for row in rows if looser.loss_excess(row["drop"]) == 0])
        gain = f"{best['method']} could be shipped, {best['speedup']:.2f}x"
        yield f"a looser bound, in a new results folder: at {bound:g} {gain}"


def _latency_steps(task: TaskResults, rows: Sequence[Row], results: Results, base: Path | None) -> Iterator[str]:
    if without_vnni(task):
        yield "a processor with VNNI or AMX: this one has neither, and INT8 gains little on it"
    if ties := [row for row in rows if row["verdict"] == "tie" and row["speedup"] > 1 and not row["beyond"]]:
        fastest = _fastest_row(ties)
        shown = _format_speedup(fastest).replace("x", "")
        more = f"more confirmation.builds than {task.builds}"
        again = _confirm_again(task, results, fastest, base)
        yield f"a quieter machine, or {more}: {fastest['method']} is a tie at {shown}; to measure it again: {again}"
    if losses := _infeasible_losses(task):
        yield _calibration_hint(task)
        count = f"{len(losses)} evaluation{'s' if len(losses) > 1 else ''}"
        yield f"a looser bound than {task.allowed:g}: {count} faster than float lost {min(losses):.4g} or more"
    placed = [row for row in rows if row["row"] in task.rows and task.rows[row["row"]].choices is not None]
    if placed and not results.stored.from_program:
        command = _row_command("explain", results, _fastest_row(placed), base)
        yield f"{command}: cost and gain of its Q/DQ pairs on this runtime"


def _calibration_hint(task: TaskResults) -> str:
    if task.facts["calibrated_on"] == "random data":
        return "calibration data: the ranges are those of random data"
    method = task.facts.get("calibration", {}).get("method", "minmax")
    return f"another calibration.method than {method}, for instance {'entropy' if method == 'mse' else 'mse'}"


def _infeasible_losses(task: TaskResults) -> list[float]:
    """Return the losses of the evaluations that were faster than the float model and exceeded the bound."""
    base_ms, goal = task.summaries[FLOAT_ROW].latency_ms.value, task.goal
    return [
        goal.loss(trial.value)
        for search in task.searches
        for trial in search.scored
        if trial.latency_ms < (search.float_ms or base_ms) and goal.loss_excess(goal.loss(trial.value)) > 0
    ]
