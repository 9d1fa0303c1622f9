"""Tables of the methods: main results, precision and decision, and finalists."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from harness.accuracy.metrics.closeness import WORST_PREFIX
from harness.base.statistics import Interval
from harness.base.text import pluralize
from harness.report.frames import UNUSABLE, finalist_frame, precision_frame, with_backend_column
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
from harness.report.tables.notes import accuracy_notes, float_estimate, group_names, noise_floor_note, partial_note
from harness.results.artifacts import ACCURACY_ONLY_VERDICT, FLOAT_ROW, Choice
from harness.results.folder import Results, TaskResults, row_labels
from harness.results.scores import (
    BEYOND_BOUND_VERDICT,
    METRIC_CAPS,
    UNSCORED_VERDICT,
    format_drop,
    format_score,
    metric_name,
    score_column_title,
    verdict_label,
)

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


MEAN_LABEL = "geometric mean"
OVERVIEW_COLUMNS = (
    "task", "model", "backend", "device", "quantized", "column", "method", "precision", "speedup", "speedup_low",
    "speedup_high", "verdict", "beyond", "best", "tied", "row", "seeds", "budget",
)  # fmt: skip
FIGURE = "Confirmed speedup over the float baseline by method"
ONE_SEARCH_NOTE = (
    "{figure}; searchers: the choice of their one search after {budget} evaluations [95 % interval over fresh builds "
    "of that choice, not over searches]. Bold: the fastest of a model; underlined: not distinguishable from it, paired."
)
SEVERAL_SEEDS_NOTE = (
    "{figure}; searchers: the median over {seeds} seeds after {budget} evaluations [intervals of searchers as in the "
    "budget table, of others 95 %]. Bold: the fastest of a model; underlined: its interval overlaps that of the "
    "fastest. The main table has the best seed of each searcher, selected before the confirmation; rows are beyond the "
    "bound by that seed."
)
WITHOUT_SEARCH_NOTE = "{figure} [95 % interval]. Bold: the fastest of a model; underlined: not distinguishable from it."
MEAN_NOTE = (
    " Geometric mean: of methods with a figure for every model of the device; its interval applies to these models, "
    "not to others."
)
BEYOND_NOTE = " Beyond: the drop of accuracy exceeds the bound of the experiment; for a mean, that of any model in it."


def _format_speedup(row: Row) -> str:
    if is_missing(row["speedup"]):
        return str(row["verdict"])
    text = format_interval(row["speedup"], row["speedup_low"], row["speedup_high"])
    return f"{text} beyond" if row["beyond"] else text


OVERVIEW = TableSpec(
    name="overview",
    title="Speedups at a glance",
    columns=tuple(map(text_column, ("model", "device", "quantized"))),
    group_by=("device", "quantized", "model", "task"),
    spread_by="column",
    spread=(Column("{column}", _format_speedup, marked=True),),
    timed=True,
    assumes_budget=True,
    source="rows",
)


def overview_table(overview: pd.DataFrame) -> ReportTable:
    """Return the table with a line per model and device, and a column per method."""
    searched = overview[overview["seeds"].notna()]
    words = {"figure": FIGURE}
    note = WITHOUT_SEARCH_NOTE
    if len(searched):
        fewest, most = int(searched["seeds"].min()), int(searched["seeds"].max())
        words["seeds"] = str(most) if fewest == most else f"{fewest} to {most}"
        words["budget"] = str(int(searched["budget"].max()))
        note = SEVERAL_SEEDS_NOTE if most > 1 else ONE_SEARCH_NOTE
    beyond = BEYOND_NOTE if overview["beyond"].any() else ""
    return OVERVIEW.build(overview, [f"{note.format(**words)}{MEAN_NOTE}{beyond}"])


def overview_frame(main: pd.DataFrame, budgets: pd.DataFrame) -> pd.DataFrame:
    """Return the speedups of `main_frame`, a row per task and `column`; empty below two tasks.

    A column is a method, or a float precision other than the baseline. A searcher with several seeds has the median at
    its largest budget, as in `budget_frame`, since the best of several seeds would have an advantage over the only row
    of other methods; `best` and `tied` then compare values and limits. `verdict`, `beyond` and `row` are those of its
    best seed.

    Means (`MEAN_LABEL` as model, no task) go over the tasks of one device and backend; see
    `harness.report.statistics.geometric_mean`.
    """
    lines = with_backend_column(main)
    lines = lines[lines["verdict"] != "baseline"]
    if lines["task"].nunique() < 2:
        return pd.DataFrame(columns=list(OVERVIEW_COLUMNS))
    floats = lines["method"] == FLOAT_ROW
    columns = lines["method"].where(~floats, FLOAT_ROW + " " + lines["precision"].astype(str))
    finished = set(main.loc[main["best"].astype(bool), "task"])  # finished tasks have a best row
    lines = _aggregate_seeds(lines.assign(column=columns), budgets, finished)
    means = [mean for _, part in lines.groupby(["device", "quantized"], sort=False) for mean in _mean_rows(part)]
    frames = [lines, pd.DataFrame(means)] if means else [lines]
    return pd.concat(frames, ignore_index=True)[list(OVERVIEW_COLUMNS)]


def _aggregate_seeds(lines: pd.DataFrame, budgets: pd.DataFrame, finished: Collection[str]) -> pd.DataFrame:
    last = budgets[budgets["budget"] == budgets.groupby(["task", "searcher"])["budget"].transform("max")]
    medians = last.set_index(["task", "searcher"])[["speedup", "low", "high", "seeds"]]
    lines = lines.join(medians.rename(columns={"speedup": "median"}), on=["task", "method"]).reset_index(drop=True)
    if not (lines["seeds"] > 1).any():
        return lines
    has_median = lines["seeds"].notna() & lines["speedup"].notna()
    for name, median in (("speedup", "median"), ("speedup_low", "low"), ("speedup_high", "high")):
        lines = lines.assign(**{name: lines[name].astype(float).where(~has_median, lines[median])})
    task, unusable = lines["task"], lines["status"].isin(UNUSABLE)
    within = lines["speedup"].where(task.isin(finished) & ~unusable & (lines["speedup_high"] >= 1.0))
    faster = within.where(lines["speedup_low"] > 1.0)  # a tie with the float model is not the fastest
    best = faster == faster.groupby(task).transform("max")
    lowest = lines["speedup_low"].where(best).groupby(task).transform("max").fillna(1.0)
    return lines.assign(best=best, tied=within.notna() & (lines["speedup_high"] >= lowest))


def _mean_rows(part: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield the mean of each column that has a figure for all of several tasks."""
    tasks = part["task"].nunique()
    for _, lines in part.groupby("column", sort=False):
        values = lines["speedup"].astype(float)
        if tasks < 2 or len(lines) != tasks or values.isna().any():
            continue
        figures = lines[["speedup", "speedup_low", "speedup_high"]].astype(float).itertuples(index=False)
        mean = geometric_mean([Interval(value=value, low=low, high=high) for value, low, high in figures])
        first = lines.iloc[0]
        yield {
            **dict.fromkeys(OVERVIEW_COLUMNS),
            **{key: first[key] for key in ("backend", "device", "quantized", "column", "method")},
            "model": MEAN_LABEL, "speedup": mean.value, "speedup_low": mean.low, "speedup_high": mean.high,
            "beyond": bool(lines["beyond"].any()), "best": False, "tied": False,
        }  # fmt: skip


MAX_SUMMARY_ROWS = 8
LATENCY, SPEEDUP, SCORE, DROP = FIGURES


def _format_method(row: Row) -> str:
    other_precision = row["method"] == FLOAT_ROW and row["verdict"] != "baseline"
    return f"{row['method']} {row['precision']}" if other_precision else str(row["method"])


def _format_bare_score(row: Row) -> str:
    """Return the score without its name, which is in the heading."""
    name = score_column_title([row["metric"]])
    return format_score(row["score"], row["metric"]).removeprefix(f"{name} ")


def _format_short_verdict(row: Row) -> str:
    """Return the verdict in few words, so that the table fits a terminal."""
    label = verdict_label(row)
    if label.startswith("wrong result"):
        return "wrong result"
    return "beyond the bound" if label == BEYOND_BOUND_VERDICT else label


METHOD = Column("method", _format_method, text=True)
BARE_SCORE = Column("{score}", _format_bare_score)
SHORT_VERDICT = Column("verdict", _format_short_verdict, text=True)
SUMMARY = TableSpec(
    name="summary",
    title="Summary",
    columns=(METHOD, SPEEDUP, BARE_SCORE, DROP, SHORT_VERDICT),
    caption="Intervals: 95 %. Bold: the fastest row within the bound; underlined: not distinguishable from it, paired.",
    timed=True,
    states_noise_floor=True,
    source="aligned rows",
)
WITHOUT_SCORES = replace(SUMMARY, columns=(METHOD, LATENCY, SPEEDUP, PAIRS, SHORT_VERDICT))


def summary_table(results: Results, main: pd.DataFrame) -> ReportTable:
    """Return a table of the most important rows of the main table, in its order.

    With one task these are the float baseline, the rows of all searchers, the fastest rows within the bound, then the
    fastest others; with several tasks the fastest row of each.
    """
    several = len(results.tasks) > 1
    ranked = sorted(frame_rows(main), key=_rank)
    if several:
        fastest = {row["task"]: row for row in reversed(ranked) if row["method"] != FLOAT_ROW or row["best"]}
        selected = [fastest[task.name] for task in results.tasks if task.name in fastest][:MAX_SUMMARY_ROWS]
    else:
        searched = [row for row in ranked if row["method"] in results.stored.searchers]
        others = [row for row in ranked if row["method"] not in results.stored.searchers]
        selected = [*searched, *others[: max(1, MAX_SUMMARY_ROWS - len(searched))]]
    names = {(row["task"], row["method"], row["precision"]) for row in selected}
    is_selected = [tuple(key) in names for key in main[["task", "method", "precision"]].itertuples(index=False)]
    raw = main[is_selected].reset_index(drop=True)
    spec = WITHOUT_SCORES if raw["score"].isna().all() else SUMMARY
    if several:
        spec = replace(spec, columns=(text_column("task"), *spec.columns))
    return spec.build(raw, list(_left_out(len(main) - len(raw), results)), score=score_column_title(raw["metric"]))


def _rank(row: Row) -> tuple[int, float]:
    """Return the sort key of a row; the most important row has the smallest."""
    usable = row["status"] not in UNUSABLE and not row["beyond"]
    first = row["method"] == FLOAT_ROW and bool(row["verdict"] == "baseline")
    speedup = 0.0 if is_missing(row["speedup"]) else float(row["speedup"])
    return (0 if first else 1 if usable else 2, -speedup)


def _left_out(rows: int, results: Results) -> Iterator[str]:
    more = f"{pluralize(rows, 'more row')}, all" if rows else "All"
    yield f"{more} columns, tables and notes: qdq report {results.folder}"
