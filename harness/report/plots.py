"""Curves as PNG, legible in print, colour-blind safe (palette: Okabe and Ito 2008)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

__all__ = ["anytime"]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
LINES = ("-", "--", "-.", ":")
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")


def anytime(
    curves: pd.DataFrame,
    title: str,
    path: Path,
    *,
    over: Literal["evaluations", "minutes"] = "evaluations",
    confirmed: pd.DataFrame | None = None,
) -> None:
    """Speedup of the incumbent over evaluations or minutes: median over seeds as steps, range over seeds as band.

    Args:
        curves: Columns searcher, seed, evaluations, minutes, speedup: the incumbent after every evaluation, by
            the search's own samples.
        title: Shown above the axes as it stands (no markup is read).
        path: PNG to write.
        over: The x axis.
        confirmed: Columns searcher, budget, speedup, low, high: fresh measurements, drawn as marks over evaluations.
    """
    with mpl.rc_context({"text.usetex": False, "text.parse_math": False, "font.size": 9}):
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        axes = figure.subplots()
        for index, (searcher, part) in enumerate(curves.groupby("searcher", sort=False)):
            colour, line = COLOURS[index % len(COLOURS)], LINES[index % len(LINES)]
            table = part.pivot_table(index=over, columns="seed", values="speedup").ffill().dropna()
            middle = table.median(axis=1)
            axes.step(table.index, middle, where="post", label=str(searcher), color=colour, linestyle=line)
            axes.fill_between(table.index, table.min(axis=1), table.max(axis=1), step="post", alpha=0.12, color=colour)
            if confirmed is not None and len(marks := confirmed[confirmed["searcher"] == searcher]):
                shift = 0.012 * curves[over].max() * (index - (curves["searcher"].nunique() - 1) / 2)
                errors = np.abs(marks[["low", "high"]].to_numpy().T - marks["speedup"].to_numpy())
                place = marks["budget"] + shift
                mark = MARKS[index % len(MARKS)]
                axes.errorbar(place, marks["speedup"], yerr=errors, fmt=mark, ms=4.5, capsize=2, color=colour)
        axes.axhline(1.0, color="0.6", linewidth=0.8)
        axes.set_xlabel(f"{over}\n{_legend_of(confirmed)}")
        axes.set_ylabel("speedup over the float baseline")
        axes.set_title(title)
        axes.xaxis.set_major_locator(MaxNLocator(integer=over == "evaluations"))
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=200)


def _legend_of(confirmed: pd.DataFrame | None) -> str:
    lines = "lines and bands: search samples, median and range over seeds"
    return (
        lines
        if confirmed is None or not len(confirmed)
        else f"{lines}\nmarks: confirmed speedup, median and interval over seeds"
    )
