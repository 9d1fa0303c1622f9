"""Speedups at a glance: a row a model, a column a method, and the geometric mean over the models below."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from harness.measure.stats import Interval
from harness.report.statistics import geometric_mean
from harness.report.tables import MISSING, Table, interval
from harness.run.rows import FLOAT_ROW

__all__ = ["MEAN", "overview_frame", "overview_table"]

MEAN = "geometric mean"
KEPT = (
    "cell", "model", "backend", "device", "quantized", "column", "method", "precision", "speedup", "speedup_low",
    "speedup_high", "verdict", "beyond", "best", "tied", "row",
)  # fmt: skip
NOTE = (
    "Confirmed speedup over the float baseline [95 % interval] by method; searchers at their largest budget with the "
    "best of their seeds, chosen before the confirmation. Bold: the fastest of a model; underlined: not to be told "
    "from it. The mean stands where a method has a figure for every model of the device; its interval is of these "
    "models, not of others."
)
BEYOND_NOTE = " Beyond: the drop of accuracy breaks the bound of the experiment, of a mean that of any model in it."


def overview_frame(main: pd.DataFrame) -> pd.DataFrame:
    """Speedups of `main_frame`, one line a cell and `column`; nothing where there are fewer than two cells.

    A column is a method, or a float precision that is not the baseline. Means have `MEAN` for a model and no cell:
    see `harness.report.statistics.geometric_mean`, over the cells of a device.
    """
    lines = main[main["verdict"] != "baseline"]
    if lines["cell"].nunique() < 2:
        return pd.DataFrame(columns=list(KEPT))
    floats = lines["method"] == FLOAT_ROW
    columns = lines["method"].where(~floats, FLOAT_ROW + " " + lines["precision"].astype(str))
    lines = lines.assign(column=columns)
    means = [mean for _, part in lines.groupby(["device", "quantized"], sort=False) for mean in _means(part)]
    return pd.concat([lines, pd.DataFrame(means)], ignore_index=True)[list(KEPT)] if means else lines[list(KEPT)]


def _means(part: pd.DataFrame) -> Iterator[dict[str, Any]]:
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
            **dict.fromkeys(KEPT),
            **{key: first[key] for key in ("backend", "device", "quantized", "column", "method")},
            "model": MEAN,
            "speedup": mean.value,
            "speedup_low": mean.low,
            "speedup_high": mean.high,
            "beyond": bool(lines["beyond"].any()),
            "best": False,
            "tied": False,
        }


def overview_table(overview: pd.DataFrame) -> Table:
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
            **dict.fromkeys(heads, MISSING),
        }
        for row in rows.to_dict("records"):
            line[row["column"]] = _speedup(row)
            for key, places in marks.items():
                places |= {(len(lines), row["column"])} if row[key] else set()
        lines.append(line)
    best, tied = (frozenset(places) for places in marks.values())
    note = NOTE + (BEYOND_NOTE if overview["beyond"].any() else "")
    return Table(
        name="overview", title="Speedups at a glance", cells=pd.DataFrame(lines), raw=overview, note=note, bold=best,
        underlined=tied,
    )  # fmt: skip


def _speedup(row: Mapping[Any, Any]) -> str:
    if pd.isna(row["speedup"]):
        return str(row["verdict"])
    shown = interval(row["speedup"], row["speedup_low"], row["speedup_high"])
    return f"{shown} beyond" if row["beyond"] else shown
