"""Tables of the methods: main results, precision, finalists, overview, and the summary that `qdq run` prints."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import pandas as pd

from harness.base.statistics import Interval
from harness.base.text import pluralize
from harness.report.frames import UNUSABLE, finalist_frame, with_backend_column
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
from harness.report.tables.notes import main_notes
from harness.results.artifacts import FLOAT_ROW
from harness.results.folder import Results
from harness.results.scores import (
    BEYOND_BOUND_VERDICT,
    METRIC_CAPS,
    format_drop,
    format_score,
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


NAMES = tuple(map(text_column, ("model", "device", "precision", "method")))
#: Latency, speedup, score and drop; only the speedups are marked, since latencies are not paired.
FIGURES = (
    interval_column("latency ms [CI]", "latency_ms", "latency_low_ms", "latency_high_ms", 3, of="latency"),
    interval_column("speedup [CI]", "speedup", "speedup_low", "speedup_high", marked=True, of="speedup"),
    Column("{score}", lambda row: format_score(row["score"], row["metric"]), of="score"),
    Column("drop [CI]", _format_drop, of="drop"),
)
UNMARKED_FIGURES = tuple(replace(column, marked=False) for column in FIGURES)
PAIRS = number_column("Q/DQ pairs", "pairs")
VERDICT = Column(
    "verdict",
    lambda row: "tie: use float" if row["verdict"] == "tie" and row["method"] != FLOAT_ROW else verdict_label(row),
    text=True,
    of="speedup",
)

MAIN = TableSpec(
    name="main",
    title="Main results",
    columns=(
        *NAMES,
        *FIGURES,
        PAIRS,
        Column("builds ok", lambda row: f"{row['builds_ok']}/{row['builds']}", of="builds"),
        number_column("minutes", form="{:.1f}", of="minutes"),
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
    columns=(*NAMES, *FIGURES, text_column("decision", of="speedup")),
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
        number_column("shrinkage", form="{:+.2f}", of="shrinkage"),
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
    return MAIN.build(raw, main_notes(results, main), rows=rows, score=score_column_title(main["metric"]))


def build_rows(spec: TableSpec, frame: pd.DataFrame, notes: Iterable[str] = ()) -> ReportTable:
    """Return a table of rows with the columns of `main_frame`, and backends in the column `device`."""
    return spec.build(with_backend_column(frame), notes, score=score_column_title(frame.get("metric", ())))


def finalist_table(results: Results) -> ReportTable:
    """Return the table of all confirmed placements of searches."""
    raw = finalist_frame(results)
    second = [RUNNER_UP_NOTE] if raw["method"].str.contains(" #").any() else []
    return FINALISTS.build(raw, second, score=score_column_title(raw["metric"]))


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
    spread=(Column("{column}", _format_speedup, marked=True, of="speedup"),),
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
    lines = _aggregate_seeds(lines.assign(column=columns), main, budgets)
    means = []
    for _, part in lines.groupby(["device", "quantized"], sort=False):
        tasks = part["task"].nunique()
        for _, own in part.groupby("column", sort=False):
            figures = own[["speedup", "speedup_low", "speedup_high"]].astype(float)
            if tasks < 2 or len(own) != tasks or figures["speedup"].isna().any():
                continue  # no figure for all of several tasks
            rows = figures.itertuples(index=False)
            mean = geometric_mean([Interval(value=v, low=low, high=high) for v, low, high in rows])
            means.append(
                {
                    **dict.fromkeys(OVERVIEW_COLUMNS),
                    **{key: own[key].iloc[0] for key in ("backend", "device", "quantized", "column", "method")},
                    "model": MEAN_LABEL, "speedup": mean.value, "speedup_low": mean.low, "speedup_high": mean.high,
                    "beyond": bool(own["beyond"].any()), "best": False, "tied": False,
                }
            )  # fmt: skip
    frames = [lines, pd.DataFrame(means)] if means else [lines]
    return pd.concat(frames, ignore_index=True)[list(OVERVIEW_COLUMNS)]


def _aggregate_seeds(lines: pd.DataFrame, main: pd.DataFrame, budgets: pd.DataFrame) -> pd.DataFrame:
    last = budgets[budgets["budget"] == budgets.groupby(["task", "searcher"])["budget"].transform("max")]
    medians = last.set_index(["task", "searcher"])[["speedup", "low", "high", "seeds"]]
    lines = lines.join(medians.rename(columns={"speedup": "median"}), on=["task", "method"]).reset_index(drop=True)
    if not (lines["seeds"] > 1).any():
        return lines
    has_median = lines["seeds"].notna() & lines["speedup"].notna()
    for name, median in (("speedup", "median"), ("speedup_low", "low"), ("speedup_high", "high")):
        lines = lines.assign(**{name: lines[name].astype(float).where(~has_median, lines[median])})
    finished = main.loc[main["best"].astype(bool), "task"]  # finished tasks have a best row
    eligible = lines["task"].isin(finished) & ~lines["status"].isin(UNUSABLE) & (lines["speedup_high"] >= 1.0)
    within = lines["speedup"].where(eligible)
    faster = within.where(lines["speedup_low"] > 1.0)  # a tie with the float model is not the fastest
    best = faster == faster.groupby(lines["task"]).transform("max")
    lowest = lines["speedup_low"].where(best).groupby(lines["task"]).transform("max").fillna(1.0)
    return lines.assign(best=best, tied=within.notna() & (lines["speedup_high"] >= lowest))


MAX_SUMMARY_ROWS = 8
LATENCY, SPEEDUP, _, DROP = FIGURES


def _format_method(row: Row) -> str:
    other_precision = row["method"] == FLOAT_ROW and row["verdict"] != "baseline"
    return f"{row['method']} {row['precision']}" if other_precision else str(row["method"])


def _format_bare_score(row: Row) -> str:
    """Return the score without its name, which is in the heading."""
    return format_score(row["score"], row["metric"]).removeprefix(f"{score_column_title([row['metric']])} ")


def _format_short_verdict(row: Row) -> str:
    """Return the verdict in few words, so that the table fits a terminal."""
    label = verdict_label(row)
    if label.startswith("wrong result"):
        return "wrong result"
    return "beyond the bound" if label == BEYOND_BOUND_VERDICT else label


METHOD = Column("method", _format_method, text=True)
SHORT_VERDICT = Column("verdict", _format_short_verdict, text=True)
SUMMARY = TableSpec(
    name="summary",
    title="Summary",
    columns=(METHOD, SPEEDUP, Column("{score}", _format_bare_score), DROP, SHORT_VERDICT),
    caption="Intervals: 95 %. Bold: the fastest row within the bound; underlined: not distinguishable from it, paired.",
    timed=True,
    states_noise_floor=True,
    source="aligned rows",
)


def summary_table(results: Results, main: pd.DataFrame) -> ReportTable:
    """Return a table of the most important rows of the main table, in its order.

    With one task these are the float baseline, the rows of all searchers, the fastest rows within the bound, then the
    fastest others; with several tasks the fastest row of each.
    """

    def rank(row: Row) -> tuple[int, float]:
        usable = row["status"] not in UNUSABLE and not row["beyond"]
        first = row["method"] == FLOAT_ROW and row["verdict"] == "baseline"
        return 0 if first else 1 if usable else 2, 0.0 if is_missing(row["speedup"]) else -float(row["speedup"])

    several, ranked = len(results.tasks) > 1, sorted(frame_rows(main), key=rank)
    if several:
        fastest = {row["task"]: row for row in reversed(ranked) if row["method"] != FLOAT_ROW or row["best"]}
        selected = [fastest[task.name] for task in results.tasks if task.name in fastest][:MAX_SUMMARY_ROWS]
    else:
        searched = [row for row in ranked if row["method"] in results.stored.searchers]
        others = [row for row in ranked if row["method"] not in results.stored.searchers]
        selected = [*searched, *others[: max(1, MAX_SUMMARY_ROWS - len(searched))]]
    keys = ["task", "method", "precision"]
    names = {tuple(row[key] for key in keys) for row in selected}
    raw = main[[key in names for key in main[keys].itertuples(index=False, name=None)]].reset_index(drop=True)
    spec = SUMMARY
    if raw["score"].isna().all():
        spec = replace(spec, columns=(METHOD, LATENCY, SPEEDUP, PAIRS, SHORT_VERDICT))
    if several:
        spec = replace(spec, columns=(text_column("task"), *spec.columns))
    rest = len(main) - len(raw)
    more = f"{pluralize(rest, 'more row')}, all" if rest else "All"
    note = f"{more} columns, tables and notes: qdq report {results.folder}"
    return spec.build(raw, [note], score=score_column_title(raw["metric"]))
