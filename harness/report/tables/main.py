"""Tables of the methods: main results, precision and decision, and finalists."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pandas as pd

from harness.accuracy.metrics.closeness import WORST_PREFIX
from harness.base.statistics import Interval
from harness.report.accuracy_notes import accuracy_notes
from harness.report.frames.main_frame import finalist_frame, precision_frame, with_backend_column
from harness.report.report_table import MISSING_CELL, ReportTable, format_interval, frame_rows
from harness.report.table_spec import Column, Row, TableSpec, interval_column, is_missing, number_column, text_column
from harness.report.tables.notes import float_estimate, group_names, noise_floor_note, partial_note
from harness.results.artifacts import ACCURACY_ONLY_VERDICT, FLOAT_ROW, Choice
from harness.results.display_names import (
    BEYOND_BOUND_VERDICT,
    METRIC_CAPS,
    UNSCORED_VERDICT,
    format_drop,
    format_score,
    metric_name,
    row_labels,
    score_column_title,
    verdict_label,
)
from harness.results.folder import Results, TaskResults

DECISION_NOTE = (
    "Decision: a row is shipped if it is faster than the float baseline beyond the noise and its drop (not the "
    'interval of the drop) keeps the bound on accuracy. Without a score or a bound a row is only "faster": check its '
    "accuracy first."
)


def _format_drop(row: Row) -> str:
    if is_missing(row["drop"]) or row["metric"] in METRIC_CAPS:
        return MISSING_CELL
    low, high = (math.nan if is_missing(row[limit]) else row[limit] for limit in ("drop_low", "drop_high"))
    return format_drop(Interval(value=row["drop"], low=low, high=high), row["metric"])


def _format_verdict(row: Row) -> str:
    return "tie: use float" if row["verdict"] == "tie" and row["method"] != FLOAT_ROW else verdict_label(row)


NAMES = tuple(map(text_column, ("model", "device", "precision", "method")))
#: Latency, speedup, score and drop; only the speedups are marked, since latencies are not paired.
FIGURES = (
    interval_column("latency ms [CI]", "latency_ms", "latency_low_ms", "latency_high_ms", 3),
    interval_column("speedup [CI]", "speedup", "speedup_low", "speedup_high", marked=True),
    Column("{score}", lambda row: format_score(row["score"], row["metric"])),
    Column("drop [CI]", _format_drop),
)
UNMARKED_FIGURES = tuple(replace(column, marked=False) for column in FIGURES)
PAIRS = number_column("Q/DQ pairs", "pairs")
VERDICT = Column("verdict", _format_verdict, text=True)

MAIN = TableSpec(
    name="main",
    title="Main results",
    columns=(
        *NAMES,
        *FIGURES,
        PAIRS,
        Column("builds ok", lambda row: f"{row['builds_ok']}/{row['builds']}"),
        number_column("minutes", form="{:.1f}"),
        VERDICT,
    ),
    timed=True,
    states_noise_floor=True,
    assumes_budget=True,
    shows_selection=True,
    source="aligned rows",
)
PRECISION = TableSpec(
    name="precision",
    title="Precision and decision",
    columns=(*NAMES, *FIGURES, text_column("decision")),
    caption=f"{DECISION_NOTE} Figures, intervals and marks are those of the main table.",
    timed=True,
    source="aligned rows",
)
FINALISTS = TableSpec(
    name="finalists",
    title="Finalists",
    columns=(
        text_column("task"),
        text_column("method"),
        *UNMARKED_FIGURES,
        PAIRS,
        VERDICT,
        number_column("shrinkage", form="{:+.2f}"),
        number_column("seed"),
        Column("placement", lambda row: row["row"] or MISSING_CELL, text=True),
    ),
    caption=(
        "Placements that the searches sent to the confirmation at their largest budget. The main table has the best "
        "seed of each searcher by the final selection, or by the search's own samples without one, never by the "
        "confirmation. Shrinkage: speedup by the search's own samples minus the confirmed speedup. Intervals are those "
        "of the main table."
    ),
    timed=True,
    shows_selection=True,
    source="aligned rows",
)
RUNNER_UP_NOTE = (
    "METHOD #2: the second best placement of a search, by the final selection, or by the search's own samples without "
    "one (of a Pareto front: by the area that it dominates)."
)


def main_table(results: Results, main: pd.DataFrame) -> ReportTable:
    """Return the table of all methods."""
    methods = {(task.name, tool): method for task in results.tasks for tool, method in task.tool_methods.items()}
    raw = with_backend_column(main)
    rows = frame_rows(raw)
    for row in rows:
        if method := methods.get((row["task"], row["method"])):
            row["method"] = f"{row['method']} ({method})"
    notes = [main_note(results), *_worst_output_notes(results, main)]
    return MAIN.build(raw, notes, rows=rows, score=score_column_title(main["metric"]))


def precision_table(main: pd.DataFrame) -> ReportTable:
    """Return the table of decisions by precision."""
    raw = with_backend_column(precision_frame(main))
    return PRECISION.build(raw, score=score_column_title(raw["metric"]))


def finalist_table(results: Results) -> ReportTable:
    """Return the table of all confirmed placements of searches."""
    raw = finalist_frame(results)
    second = [RUNNER_UP_NOTE] if raw["method"].str.contains(" #").any() else []
    return FINALISTS.build(raw, second, score=score_column_title(raw["metric"]))


def main_note(results: Results) -> str:
    """Return the note of the main table: definitions, floors, and remarks on tasks."""
    tasks = results.tasks
    bounds = sorted({task.allowed for task in tasks if task.allowed is not None})
    return "\n".join(
        [
            *_definitions(tasks, bounds),
            *_verdict_definitions(tasks, bounds),
            noise_floor_note(tasks),
            *_version_note(tasks),
            *_score_notes(tasks),
            *(line for task in tasks for line in _check_notes(task)),
            *(
                f"All turns were disturbed, {c.name}: {names}. Repeat on a quiet machine."
                for c in tasks
                if (names := _disturbed_rows(c))
            ),
            *(f"Calibration of {c.name}: {text}." for c in tasks for text in c.remarks),
            *(line for task in tasks for line in accuracy_notes(task, _rows_by_label(task))),
            *(f"Initial placements of {c.name}: {text}." for c in tasks for text in c.cache_remarks),
            *(f"Baselines of {c.name}: {text}." for c in tasks if (text := _tool_note(c))),
            *filter(None, [partial_note(results)]),
        ]
    )


def _definitions(tasks: Sequence[TaskResults], bounds: Sequence[float]) -> Iterator[str]:
    counts = " or ".join(map(str, sorted({task.builds for task in tasks if task.builds is not None}))) or "some"
    of_tools = any(pick.kind == "baseline" and pick.minutes is not None for task in tasks for pick in task.picks)
    within = f" with a drop of at most {' or '.join(f'{bound:g}' for bound in bounds)}" if bounds else ""
    yield (
        f"Latency: geometric mean over {counts} fresh builds of the median over turns; the baseline has at least as "
        f"many builds. Speedup: over {_baseline_label(tasks)}, paired by turns, so it may differ slightly from the "
        "ratio of two latencies in the table. Intervals: 95 %, Student's t over builds."
    )
    yield (
        "Tie: the interval contains 1, or the gain is below 1 % or below the noise floor; use the float model then. "
        f"Bold: the fastest row of a finished task{within}. Underlined: not distinguishable from it by the same rule, "
        "paired. The row of a searcher is its best seed by the final selection, or by the search's own samples without "
        "one. Builds ok: of the search, for other methods of the confirmation. Minutes: wall-clock of the search"
        f"{', or of the tool' if of_tools else ''}."
    )
    if any(task.score(FLOAT_ROW) is not None and task.metric not in METRIC_CAPS for task in tasks):
        yield (
            "Drop: loss against the float baseline, positive is worse; its interval: 95 %, bootstrap over images with "
            "the same draws for both, if the records have single images."
        )


def _baseline_label(tasks: Sequence[TaskResults]) -> str:
    """Return the name of the baseline of the speedups, by task if tasks differ."""
    groups = group_names((_float_precision_label(task), task.name) for task in tasks)
    labels = [f"{label} ({names})" for label, names in groups.items()] if len(groups) > 1 else list(groups)
    return " ".join(filter(None, ["the float model", ", ".join(labels)]))


def _float_precision_label(task: TaskResults) -> str:
    backend = task.facts["backend"]
    precision = backend.get("float_precision")
    if task.float_measured:
        return f"at {precision}, the fastest float precision by measurement"
    if precision is None:
        return "as it is"
    return f"at {precision} (pinned)" if len(backend.get("float_params", {})) > 1 else f"at {precision}"


def _verdict_definitions(tasks: Sequence[TaskResults], bounds: Sequence[float]) -> Iterator[str]:
    if bounds:
        yield f'"{BEYOND_BOUND_VERDICT}": the drop exceeds the bound of the experiment, so the row is not shipped.'
    if any("failed" in score for task in tasks for score in task.scores.values()):
        yield f'"{UNSCORED_VERDICT}": the outputs could not be scored (as a rule, not finite), so it is not shipped.'
    if any(pick.reason.startswith(ACCURACY_ONLY_VERDICT) for task in tasks for pick in task.picks):
        yield f'"{ACCURACY_ONLY_VERDICT}": the device only emulates this precision, so the row is scored but not timed.'
    if names := {metric_name(task.metric) for task in tasks if task.metric in METRIC_CAPS}:
        yield f"No drop of {', '.join(sorted(names))}: the reference is the float model, whose own value is a cap."


def _version_note(tasks: Sequence[TaskResults]) -> Iterator[str]:
    commits = ((str(task.environment.get("git_commit", "")), task.name) for task in tasks)
    names_by_commit = group_names((commit[:12] + commit[40:], name) for commit, name in commits if commit)
    if len(names_by_commit) > 1:
        listed = "; ".join(f"{commit} {names}" for commit, names in names_by_commit.items())
        yield f"Started with different versions of this code: {listed}."


def _score_notes(tasks: Sequence[TaskResults]) -> Iterator[str]:
    if halves := [task.name for task in tasks if task.facts.get("halves")]:
        yield f"Searches used one half of the evaluator's data, scores and drops the other half: {', '.join(halves)}."
    scores = []
    for task in tasks:
        if (estimate := float_estimate(task)) is not None:
            interval = estimate.interval
            score = format_interval(interval.value, interval.low, interval.high, 4)
            scores.append(f"{task.name} {metric_name(task.metric)} {score} ({estimate.images} images)")
    if scores:
        yield f"Scores of the float models with 95 % intervals over images: {', '.join(scores)}."
    usages = [f"Full evaluations of {task.name}: {text}." for task in tasks if (text := _metric_usage(task))]
    if usages:
        yield "Full evaluations: those with a measured metric, sum over seeds."
        yield from usages


def _metric_usage(task: TaskResults) -> str:
    """Return the number of scored evaluations of each searcher, and the rank correlation of proxy and metric."""
    picks = [p for p in task.picks if p.rank == 0 and p.budget == task.budget and p.scored is not None]
    seeds: dict[str, list[Choice]] = {}
    for pick in picks:
        seeds.setdefault(pick.method, []).append(pick)
    spent = {search.name: min(search.evaluations, task.budget) for search in task.searches}
    texts = []
    for method, choices in seeds.items():
        total = sum(spent.get(f"{method}-{pick.seed}", task.budget) for pick in choices)
        agreements = " and ".join(f"{pick.agreement:+.2f}" for pick in choices if pick.agreement is not None)
        correlation = f" (rank correlation of proxy and metric {agreements})" if agreements else ""
        texts.append(f"{method} {sum(pick.scored or 0 for pick in choices)} of {total}{correlation}")
    return ", ".join(texts)


def _tool_note(task: TaskResults) -> str:
    methods = ", ".join(f"{name} by {method}" for name, method in task.tool_methods.items())
    requested = task.facts.get("calibration", {}).get("method")
    return f"calibrated {methods}, the nearest method of the tool to {requested}" if methods else ""


def _worst_output_notes(results: Results, main: pd.DataFrame) -> Iterator[str]:
    """Yield a note with the worst output of each row by fidelity, for models with several outputs."""
    for task in results.tasks:
        notes = {row: str(score.get("note")).partition(WORST_PREFIX)[2] for row, score in task.scores.items()}
        if any(notes.values()):
            labels = row_labels(task, frame_rows(main[main["task"] == task.name]))
            worst = [f"{label}: {notes[row]}" for row, label in labels.items() if notes.get(row)]
            if worst:
                yield f"Worst output by fidelity, {task.name}: {'; '.join(worst)}."


def _disturbed_rows(task: TaskResults) -> str:
    rows = task.summaries
    return ", ".join(name for name, row in _rows_by_label(task).items() if row in rows and rows[row].fully_disturbed)


def _check_notes(task: TaskResults) -> Iterator[str]:
    """Yield a line for each row with a wrong result, and for each reason why rows were not compared."""
    for name, row in wrong_result_rows(task).items():
        check = task.checks[row]
        example = f"; {task.name}/{check.model} reproduces it, with a description next to it" if check.model else ""
        yield f"{name} of {task.name}: {check}{example}."
    named = [(task.checks[row], name) for name, row in _rows_by_label(task).items() if row in task.checks]
    for verdict, said in (("not checked", "Not compared"), ("right", "Compared")):
        reasons = group_names(
            (check.reason, name) for check, name in named if check.verdict == verdict and check.reason
        )
        for reason, names in reasons.items():
            yield f"{said} with their files, {task.name}: {names} ({reason})."


def wrong_result_rows(task: TaskResults) -> dict[str, str]:
    """Return the ids of rows with a wrong result, by label."""
    return {name: row for name, row in _rows_by_label(task).items() if task.wrong(row)}


def _rows_by_label(task: TaskResults) -> dict[str, str]:
    """Return row ids by label, such as "all, linear (ROW)" with the methods that chose the row."""
    methods: dict[str, dict[str, None]] = {}
    for pick in task.picks:
        if pick.row:
            methods.setdefault(pick.row, {})[pick.method] = None
    return {f"{', '.join(names)} ({row})": row for row, names in methods.items()}
