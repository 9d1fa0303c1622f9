"""Pictures that compare methods and runtimes: speedups, critical differences, transfer, growth of the front."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from harness.report.plots.result_plots import (
    CURVE_READING_NOTE,
    SERIES_COLOURS,
    add_legend,
    figure_file,
    median_band,
    series_style,
    wrap_name,
)
from harness.report.report_table import pluralize
from harness.report.statistics import FriedmanRanks

__all__ = ["draw_critical_difference", "draw_hypervolumes", "draw_speedups", "draw_transfer_map"]

SPEEDUP_TICKS = (1, 1.5, 2, 3, 4, 6, 8)
"""Of a logarithmic axis of speedups, in each decade."""


def draw_speedups(overview: pd.DataFrame, title: str, path: Path) -> None:
    """Confirmed speedups with their intervals: a band a cell, in it a line a method, the geometric means at the end.

    Args:
        overview: Of one device: cell, model, column, speedup, speedup_low, speedup_high, beyond; see
            `harness.report.frames.speedup_overview.overview_frame`.
        title: Shown above the axes.
        path: Where to write, without suffix.
    """
    overview = overview.assign(cell=overview["cell"].fillna(""))  # means have none
    columns = list(dict.fromkeys(overview["column"]))
    bands = list(dict.fromkeys(zip(overview["cell"], overview["model"], strict=True)))
    models = [model for _, model in bands]
    step = 0.84 / len(columns)
    with figure_file(path, height=1.9 + len(bands) * max(0.34, 0.085 * len(columns))) as axes:
        for band in range(0, len(bands), 2):
            axes.axhspan(band - 0.5, band + 0.5, color="0.955", zorder=0)
        axes.axvline(1.0, color="0.4", linewidth=0.9)
        for index, (column, part) in enumerate(overview.groupby("column", sort=False)):
            colour, _, mark = series_style(index)
            axes.plot([], [], mark, ms=4.5, color=colour, label=wrap_name(str(column), 24))
            for row in part[part["speedup"].notna()].to_dict("records"):
                place = bands.index((row["cell"], row["model"])) + (index - (len(columns) - 1) / 2) * step
                low, high = float(row["speedup_low"] or 0), float(row["speedup_high"] or 0)
                known = low > 0 and np.isfinite(high)  # one build has no interval
                axes.errorbar(
                    [row["speedup"]], [place], fmt=mark, ms=4.5, color=colour, elinewidth=0.9,
                    xerr=[[row["speedup"] - low], [high - row["speedup"]]] if known else None,
                    mfc="white" if row["beyond"] else colour,
                )  # fmt: skip
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(
            LogLocator(subs=SPEEDUP_TICKS) if _exceeds_factor_two(overview) else MaxNLocator(6)
        )
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
        names = [model if models.count(model) == 1 else cell for cell, model in bands]
        axes.set_yticks(range(len(bands)), [wrap_name(str(name), 20) for name in names])
        axes.set_ylim(len(bands) - 0.5, -0.5)
        hollow = "; hollow: breaks the bound on accuracy" if overview["beyond"].any() else ""
        axes.set_xlabel(f"confirmed speedup over the float baseline, log scale{hollow}\nlimits as in the table")
        axes.set_title(wrap_name(title, 70))
        add_legend(axes)


def _exceeds_factor_two(overview: pd.DataFrame) -> bool:
    """Whether some speedups are more than twice others, so that a tick at each of `SPEEDUP_TICKS` is enough."""
    return bool(overview["speedup"].max() > 2 * overview["speedup"].min())


def draw_critical_difference(found: FriedmanRanks, title: str, path: Path) -> None:
    """Mean ranks on a line; thick bars join what Nemenyi's test cannot tell apart (Demšar 2006, figure 1).

    Args:
        found: Ranks of the searchers.
        title: Shown above the axes.
        path: Where to write, without suffix.
    """
    names, count = list(found.mean), len(found.mean)
    rows = (count + 1) // 2
    with figure_file(path, height=1.3 + 0.3 * rows + 0.16 * len(found.cliques), grid=False) as axes:
        low, high = 1.0, float(max(2, count))
        bars = 0.35 * len(found.cliques)
        for place, name in enumerate(names):
            rank = found.mean[name]
            left = place < rows
            depth = -bars - 0.6 - (place if left else count - 1 - place)
            end = low - 0.15 if left else high + 0.15
            axes.plot([rank, rank, end], [0, depth, depth], color="0.2", linewidth=0.9)
            axes.text(end, depth, f" {name}  {rank:.2f} ", ha="right" if left else "left", va="center")
        for level, clique in enumerate(found.cliques):
            ends = [found.mean[clique[0]] - 0.03, found.mean[clique[-1]] + 0.03]
            axes.plot(ends, [-0.3 - 0.35 * level] * 2, color=SERIES_COLOURS[0], linewidth=4, solid_capstyle="butt")
        _draw_rank_axis(axes, found, (low, high))
        axes.set_xlim(low - 0.6 * (high - low), high + 0.6 * (high - low))
        axes.set_ylim(-bars - 0.6 - rows, 2.2)
        axes.set_title(wrap_name(title, 70))
        axes.set_axis_off()


def _draw_rank_axis(axes: Axes, found: FriedmanRanks, ends: tuple[float, float]) -> None:
    """The line of ranks above, and how far apart is apart."""
    axes.plot(ends, [0, 0], color="black", linewidth=1.2)
    for rank in range(int(ends[0]), int(ends[1]) + 1):
        axes.plot([rank, rank], [0, 0.18], color="black", linewidth=1.2)
        axes.text(rank, 0.28, str(rank), ha="center", va="bottom")
    if found.critical_difference is not None:
        stop = min(ends[0] + found.critical_difference, ends[1] * 1.4)
        axes.plot([ends[0], stop], [1.35, 1.35], color="black", linewidth=1.2, marker="|")
        said = f"critical difference {found.critical_difference:.2f} at 5 %, {pluralize(found.blocks, found.unit)}"
    else:
        said = f"mean ranks over {pluralize(found.blocks, found.unit)}, 1 is the best"
    axes.text(ends[0], 1.5, said, ha="left", va="bottom")


def draw_transfer_map(transfer: pd.DataFrame, title: str, path: Path) -> None:
    """Heat map of the share of the target's own best gain, with the speedup written in each field.

    Args:
        transfer: Of one family: source, target, speedup, share; see `harness.report.frames.transfer`.
        title: Shown above the axes.
        path: Where to write, without suffix.
    """
    names = list(dict.fromkeys([*transfer["source"], *transfer["target"]]))
    shares = np.full((len(names), len(names)), np.nan)
    texts = np.full(shares.shape, "not run", dtype=object)
    for row in transfer.to_dict("records"):
        place = names.index(row["source"]), names.index(row["target"])
        shares[place] = np.nan if row["share"] is None else row["share"]
        texts[place] = f"{row['speedup']:.2f}x"
    with figure_file(path, height=1.6 + 0.55 * len(names), grid=False) as axes:
        image = axes.imshow(np.clip(shares, 0, 1), cmap="cividis", vmin=0, vmax=1, aspect="auto")
        for (source, target), text in np.ndenumerate(texts):
            dark = not np.isnan(shares[source, target]) and shares[source, target] < 0.6
            axes.text(target, source, text, ha="center", va="center", color="white" if dark else "black")
        axes.set_xticks(range(len(names)), [wrap_name(name, 18) for name in names])
        axes.set_yticks(range(len(names)), [wrap_name(name, 18) for name in names])
        axes.set_xlabel("run on")
        axes.set_ylabel("found on")
        axes.set_title(title)
        axes.figure.colorbar(image, ax=axes, label="share of its own best gain")
        axes.tick_params(length=0)


def draw_hypervolumes(
    curves: pd.DataFrame, title: str, path: Path, over: Literal["evaluations", "minutes"] = "evaluations"
) -> None:
    """Hypervolume of latency and accuracy over what a search spent: median over seeds as steps, its interval as band.

    Args:
        curves: Columns searcher, seed, evaluations, minutes, volume; see `harness.report.frames.hypervolume`.
        title: Shown above the axes.
        path: Where to write, without suffix.
        over: The x axis.
    """
    with figure_file(path) as axes:
        for index, (searcher, part) in enumerate(curves.groupby("searcher", sort=False)):
            steps = median_band(part, over, "volume")
            colour, line, _ = series_style(index)
            axes.step(steps.index, steps["value"], where="post", label=str(searcher), color=colour, linestyle=line)
            axes.fill_between(steps.index, steps["low"], steps["high"], step="post", alpha=0.12, color=colour)
        axes.set_xlabel(f"{over}\n{CURVE_READING_NOTE}")
        axes.set_ylabel("hypervolume of latency and accuracy")
        axes.set_title(title)
        axes.xaxis.set_major_locator(MaxNLocator(integer=over == "evaluations"))
        add_legend(axes)
