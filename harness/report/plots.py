"""Curves as PNG, legible in print, colour-blind safe (palette: Okabe and Ito 2008)."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

__all__ = ["anytime"]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
LINES = ("-", "--", "-.", ":")


def anytime(curves: pd.DataFrame, confirmed: pd.DataFrame, title: str, path: Path) -> None:
    """Speedup of the incumbent over evaluations: median over seeds as steps, range over seeds as band.

    Args:
        curves: Columns searcher, seed, evaluations, speedup: the incumbent after every evaluation, by the
            search's own samples.
        confirmed: Columns searcher, budget, speedup, low, high: fresh measurements, drawn as marks.
        title: Shown above the axes as it stands (no markup is read).
        path: PNG to write.
    """
    with mpl.rc_context({"text.usetex": False, "text.parse_math": False, "font.size": 9}):
        figure = Figure(figsize=(6.4, 3.8), layout="constrained")
        axes = figure.subplots()
        for index, (searcher, part) in enumerate(curves.groupby("searcher", sort=True)):
            colour, line = COLOURS[index % len(COLOURS)], LINES[index % len(LINES)]
            table = part.pivot_table(index="evaluations", columns="seed", values="speedup").ffill()
            axes.step(
                table.index, table.median(axis=1), where="post", label=str(searcher), color=colour, linestyle=line
            )
            axes.fill_between(table.index, table.min(axis=1), table.max(axis=1), step="post", alpha=0.12, color=colour)
            marks = confirmed[confirmed["searcher"] == searcher]
            if len(marks):
                shift = 0.12 * (index - (curves["searcher"].nunique() - 1) / 2)
                errors = np.abs(marks[["low", "high"]].to_numpy().T - marks["speedup"].to_numpy())
                axes.errorbar(
                    marks["budget"] + shift,
                    marks["speedup"],
                    yerr=errors,
                    fmt="o",
                    ms=4,
                    capsize=2,
                    color=colour,
                )
        axes.axhline(1.0, color="0.6", linewidth=0.8)
        axes.set_xlabel(
            "evaluations (lines: search samples, median and range over seeds; marks: confirmed, 95 % interval)"
        )
        axes.set_ylabel("speedup over the float baseline")
        axes.set_title(title)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
