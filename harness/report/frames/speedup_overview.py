"""Speedups at a glance: a row a model, a column a method, and the geometric mean over the models below."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import pandas as pd

from harness.report.frames.main_frame import UNUSABLE_VERDICTS, with_backend_column
from harness.report.report_table import MISSING_CELL, ReportTable, format_interval
from harness.report.statistics import geometric_mean
from harness.results_dir.artifacts import FLOAT_ROW
from harness.statistics import Interval

__all__ = ["MEAN_LABEL", "overview_frame", "overview_table"]

MEAN_LABEL = "geometric mean"
OVERVIEW_COLUMNS = (
    "cell", "model", "backend", "device", "quantized", "column", "method", "precision", "speedup", "speedup_low",
    "speedup_high", "verdict", "beyond", "best", "tied", "row", "seeds", "budget",
)  # fmt: skip
OVERVIEW_TITLE = "Confirmed speedup over the float baseline by method"
SINGLE_TASK_NOTE = (
    "of searchers what their one search had chosen after {budget} evaluations [95 % interval over fresh builds of that "
    "choice: it says nothing of another search]. Bold: the fastest of a model; underlined: not to be told from it, "
    "paired."
)
SEVERAL_TASKS_NOTE = (
    "of searchers after {budget} evaluations the median over {seeds} seeds [brackets of searchers as in the table of "
    "budgets, of others 95 %]. Bold: the fastest of a model; underlined: its interval meets that of the fastest. The "
    "main table has the best seed of each searcher, chosen before the confirmation; what breaks a bound does so by "
    "that seed."
)
MEAN_NOTE = (
    " The mean stands where a method has a figure for every model of the device; its interval is of these models, not "
    "of others."
)
BEYOND_NOTE = " Beyond: the drop of accuracy breaks the bound of the experiment, of a mean that of any model in it."


def overview_frame(main: pd.DataFrame, budgets: pd.DataFrame) -> pd.DataFrame:
    """Speedups of `main_frame`, one line a cell and `column`; nothing where there are fewer than two cells.

    Where a searcher has several seeds it stands with their median at its largest budget, as in `budget_frame`, and
    `best` and `tied` go by values and limits, as there: a best of some seeds beside others' only one would be favoured.
    Its `verdict`, `beyond` and `row` stay those of its best seed.

    A column is a method, or a float precision that is not the baseline. Means have `MEAN_LABEL` for a model and no
    cell: see `harness.report.statistics.geometric_mean`, over the cells of a device. Devices are those of
    `harness.report.frames.main_frame.with_backend_column`, so that no mean goes over two backends.
    """
    apart = with_backend_column(main)
    lines = apart[apart["verdict"] != "baseline"]
    if lines["cell"].nunique() < 2:
        return pd.DataFrame(columns=list(OVERVIEW_COLUMNS))
    floats = lines["method"] == FLOAT_ROW
    columns = lines["method"].where(~floats, FLOAT_ROW + " " + lines["precision"].astype(str))
    lines = _aggregate_seeds(lines.assign(column=columns), budgets, set(main.loc[main["best"].astype(bool), "cell"]))
    means = [mean for _, part in lines.groupby(["device", "quantized"], sort=False) for mean in _mean_rows(part)]
    return (
        pd.concat([lines, pd.DataFrame(means)], ignore_index=True)[list(OVERVIEW_COLUMNS)]
        if means
        else lines[list(OVERVIEW_COLUMNS)]
    )


def _aggregate_seeds(lines: pd.DataFrame, budgets: pd.DataFrame, finished: Collection[str]) -> pd.DataFrame:
    """The lines with the medians of searchers in the place of their best seed; cells that are finished have a best."""
    last = budgets[budgets["budget"] == budgets.groupby(["cell", "searcher"])["budget"].transform("max")]
    medians = last.set_index(["cell", "searcher"])[["speedup", "low", "high", "seeds"]]
    lines = lines.join(medians.rename(columns={"speedup": "median"}), on=["cell", "method"]).reset_index(drop=True)
    if not (lines["seeds"] > 1).any():
        return lines
    there = lines["seeds"].notna() & lines["speedup"].notna()
    own = {"speedup": "median", "speedup_low": "low", "speedup_high": "high"}
    lines = lines.assign(
        **{name: lines[name].astype(float).where(~there, lines[median]) for name, median in own.items()}
    )
    cell, broken = lines["cell"], lines["decision"].astype(str).str.startswith(UNUSABLE_VERDICTS)
    within = lines["speedup"].where(cell.isin(finished) & ~broken & (lines["speedup_high"] >= 1.0))
    faster = within.where(lines["speedup_low"] > 1.0)  # a tie with the float model is not the fastest
    best = faster == faster.groupby(cell).transform("max")
    lowest = lines["speedup_low"].where(best).groupby(cell).transform("max").fillna(1.0)
    return lines.assign(best=best, tied=within.notna() & (lines["speedup_high"] >= lowest))


def _mean_rows(part: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Of each column that has a figure for all cells of a device, where these are several."""
    cells = part["cell"].nunique()
    for _, lines in part.groupby("column", sort=False):
        values = lines["speedup"].astype(float)
        if cells < 2 or len(lines) != cells or values.isna().any():
            continue
        figures = lines[["speedup", "speedup_low", "speedup_high"]].astype(float).itertuples(index=False)
        mean = geometric_mean([Interval(value=value, low=low, high=high) for value, low, high in figures])
        first = lines.iloc[0]
        yield {
            **dict.fromkeys(OVERVIEW_COLUMNS),
            **{key: first[key] for key in ("backend", "device", "quantized", "column", "method")},
            "model": MEAN_LABEL,
            "speedup": mean.value,
            "speedup_low": mean.low,
            "speedup_high": mean.high,
            "beyond": bool(lines["beyond"].any()),
            "best": False,
            "tied": False,
        }


def overview_table(overview: pd.DataFrame) -> ReportTable:
    """One row a model and device, as a paper has it."""
    heads = list(dict.fromkeys(overview["column"]))
    lines: list[dict[str, str]] = []
    marks: dict[str, set[tuple[int, str]]] = {"best": set(), "tied": set()}
    keys = ["device", "quantized", "model", "cell"]
    for (device, quantized, model, _), rows in overview.groupby(keys, sort=False, dropna=False):
        line = {
            "model": str(model),
            "device": str(device),
            "quantized": str(quantized),
            **dict.fromkeys(heads, MISSING_CELL),
        }
        for row in rows.to_dict("records"):
            line[row["column"]] = _format_speedup(row)
            for key, places in marks.items():
                places |= {(len(lines), row["column"])} if row[key] else set()
        lines.append(line)
    best, tied = (frozenset(places) for places in marks.values())
    note = _overview_note(overview) + (BEYOND_NOTE if overview["beyond"].any() else "")
    return ReportTable(
        name="overview", title="Speedups at a glance", cells=pd.DataFrame(lines), raw=overview, note=note, bold=best,
        underlined=tied,
    )  # fmt: skip


def _overview_note(overview: pd.DataFrame) -> str:
    """What the figures are, with the number of seeds and evaluations behind those of searchers."""
    found = overview[overview["seeds"].notna()]
    if found.empty:
        return (
            f"{OVERVIEW_TITLE} [95 % interval]. Bold: the fastest of a model; underlined: not to be told from it."
            + MEAN_NOTE
        )
    fewest, most = int(found["seeds"].min()), int(found["seeds"].max())
    seeds = str(most) if fewest == most else f"{fewest} to {most}"
    form = SEVERAL_TASKS_NOTE if most > 1 else SINGLE_TASK_NOTE
    return f"{OVERVIEW_TITLE}; {form.format(budget=int(found['budget'].max()), seeds=seeds)}{MEAN_NOTE}"


def _format_speedup(row: Mapping[Any, Any]) -> str:
    if pd.isna(row["speedup"]):
        return str(row["verdict"])
    shown = format_interval(row["speedup"], row["speedup_low"], row["speedup_high"])
    return f"{shown} beyond" if row["beyond"] else shown
