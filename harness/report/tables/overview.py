"""Overview of speedups by model and method with geometric means, and the summary that `qdq run` prints."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import pandas as pd

from harness.base.statistics import Interval
from harness.base.text import pluralize
from harness.report.frames.main_frame import UNUSABLE, with_backend_column
from harness.report.report_table import ReportTable, format_interval, frame_rows
from harness.report.statistics import geometric_mean
from harness.report.table_spec import Column, Row, TableSpec, is_missing, text_column
from harness.report.tables.main import FIGURES, PAIRS
from harness.results.artifacts import FLOAT_ROW
from harness.results.display_names import BEYOND_BOUND_VERDICT, format_score, score_column_title, verdict_label
from harness.results.folder import Results

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


def _format_score(row: Row) -> str:
    """Return the score without its name, which is in the heading."""
    name = score_column_title([row["metric"]])
    return format_score(row["score"], row["metric"]).removeprefix(f"{name} ")


def _format_verdict(row: Row) -> str:
    """Return the verdict in few words, so that the table fits a terminal."""
    label = verdict_label(row)
    if label.startswith("wrong result"):
        return "wrong result"
    return "beyond the bound" if label == BEYOND_BOUND_VERDICT else label


METHOD = Column("method", _format_method, text=True)
BARE_SCORE = Column("{score}", _format_score)
VERDICT = Column("verdict", _format_verdict, text=True)
SUMMARY = TableSpec(
    name="summary",
    title="Summary",
    columns=(METHOD, SPEEDUP, BARE_SCORE, DROP, VERDICT),
    caption="Intervals: 95 %. Bold: the fastest row within the bound; underlined: not distinguishable from it, paired.",
    timed=True,
    states_noise_floor=True,
    source="aligned rows",
)
WITHOUT_SCORES = replace(SUMMARY, columns=(METHOD, LATENCY, SPEEDUP, PAIRS, VERDICT))


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
