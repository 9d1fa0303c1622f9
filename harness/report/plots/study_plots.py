"""Plots of searchers and methods: speedups, budgets, critical differences of ranks, regret, and transfer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import fill

import numpy as np
import pandas as pd
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, NullLocator

from harness.base.text import pluralize
from harness.report.plots.figures import COLOURS, add_legend, plot_files, series_style
from harness.report.report_table import frame_rows
from harness.report.statistics import Floats, FriedmanRanks

BAR_HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo", "--")
SPEEDUP_TICKS = (1, 1.5, 2, 3, 4, 6, 8)  # in each decade of a logarithmic axis


def draw_speedups(overview: pd.DataFrame, title: str, path: Path) -> None:
    """Draw confirmed speedups with their intervals by task and method, and the geometric means.

    Args:
        overview: Rows of one device of `harness.report.tables.main.overview_frame`.
        path: Output path without suffix; .png, .svg and .pdf are written.
    """
    overview = overview.assign(task=overview["task"].fillna(""))  # rows of means have no task
    columns = list(dict.fromkeys(overview["column"]))
    bands = list(dict.fromkeys(zip(overview["task"], overview["model"], strict=True)))
    models = [model for _, model in bands]
    step = 0.84 / len(columns)
    with plot_files(path, height=1.3 + len(bands) * max(0.3, 0.05 * len(columns)), width=9.6) as axes:
        for band in range(0, len(bands), 2):
            axes.axhspan(band - 0.5, band + 0.5, color="0.955", zorder=0)
        axes.axvline(1.0, color="0.4", linewidth=0.9)
        for index, (column, part) in enumerate(overview.groupby("column", sort=False)):
            colour, _, mark = series_style(index)
            axes.plot([], [], mark, ms=4.5, color=colour, label=fill(str(column), 24))
            part = part[part["speedup"].notna()]
            shift = (index - (len(columns) - 1) / 2) * step
            places = [bands.index(band) + shift for band in zip(part["task"], part["model"], strict=True)]
            low, high = (part[f"speedup_{end}"].astype(float).fillna(0.0) for end in ("low", "high"))
            has_limits = (low > 0) & np.isfinite(high)  # NaN with a single build
            for (beyond, has_interval), rows in part.assign(place=places).groupby(
                [part["beyond"].astype(bool), has_limits]
            ):
                errors = [rows["speedup"] - low[rows.index], high[rows.index] - rows["speedup"]]
                axes.errorbar(
                    rows["speedup"], rows["place"], fmt=mark, ms=4.5, color=colour, elinewidth=0.9,
                    xerr=errors if has_interval else None, mfc="white" if beyond else colour,
                )  # fmt: skip
        axes.set_xscale("log")
        is_wide = bool(
            overview["speedup"].max() > 2 * overview["speedup"].min()
        )  # a logarithmic axis of a smaller range has too few ticks
        axes.xaxis.set_major_locator(LogLocator(subs=SPEEDUP_TICKS) if is_wide else MaxNLocator(6))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
        names = [model if models.count(model) == 1 else task for task, model in bands]
        axes.set_yticks(range(len(bands)), [fill(str(name), 20) for name in names])
        axes.set_ylim(len(bands) - 0.5, -0.5)
        hollow = "; hollow: breaks the bound on accuracy" if overview["beyond"].any() else ""
        limits = f"log scale; limits as in the table{hollow}"
        axes.set(xlabel=f"confirmed speedup over the float model, higher is better ({limits})", title=fill(title, 90))
        axes.figure.legend(loc="outside right center", frameon=False, fontsize=8)


def draw_budget_bars(budgets: pd.DataFrame, title: str, path: Path) -> None:
    """Draw bars of the confirmed speedup by searcher and budget.

    Args:
        budgets: Columns searcher, budget, speedup, low, high of `budget_frame`, for one task.
        path: Output path without suffix; .png, .svg and .pdf are written.
    """
    searchers, sizes = list(dict.fromkeys(budgets["searcher"])), sorted(set(budgets["budget"]))
    width = 0.8 / len(sizes)
    with plot_files(path, height=3.4) as axes:
        for index, size in enumerate(sizes):
            part = budgets[budgets["budget"] == size]
            place = [searchers.index(name) + (index - (len(sizes) - 1) / 2) * width for name in part["searcher"]]
            errors = np.abs(part[["low", "high"]].to_numpy().T - part["speedup"].to_numpy())
            axes.bar(
                place, part["speedup"], width * 0.92, yerr=errors, capsize=2, label=f"{size} evaluations",
                color=COLOURS[index % len(COLOURS)], hatch=BAR_HATCHES[index % len(BAR_HATCHES)],
                edgecolor="white",
                error_kw={"elinewidth": 0.9},
            )  # fmt: skip
        axes.axhline(1.0, color="0.3", linewidth=0.8)
        axes.set_xticks(range(len(searchers)), searchers)
        note = "median over seeds; whiskers: 95 % interval,\nbelow six seeds the widest limits of their own"
        axes.set(xlabel=note, ylabel="confirmed speedup", title=title)
        add_legend(axes)


def draw_critical_difference(ranks: FriedmanRanks, title: str, path: Path) -> None:
    """Draw mean ranks on a line, with bars that join searchers that Nemenyi's test does not distinguish.

    The form of the plot is that of Demšar 2006, figure 1. Without a test it has the ranks alone.

    Args:
        path: Output path without suffix; .png, .svg and .pdf are written.
    """
    names, count = list(ranks.mean), len(ranks.mean)
    rows = (count + 1) // 2
    with plot_files(path, height=1.3 + 0.3 * rows + 0.16 * len(ranks.cliques), grid=False) as axes:
        low, high = 1.0, float(max(2, count))
        bars = 0.35 * len(ranks.cliques)
        for place, name in enumerate(names):
            rank = ranks.mean[name]
            left = place < rows
            depth = -bars - 0.6 - (place if left else count - 1 - place)
            end = low - 0.15 if left else high + 0.15
            axes.plot([rank, rank, end], [0, depth, depth], color="0.2", linewidth=0.9)
            axes.text(end, depth, f" {name}  {rank:.2f} ", ha="right" if left else "left", va="center")
        for level, clique in enumerate(ranks.cliques):
            ends = [ranks.mean[clique[0]] - 0.03, ranks.mean[clique[-1]] + 0.03]
            axes.plot(ends, [-0.3 - 0.35 * level] * 2, color=COLOURS[0], linewidth=4, solid_capstyle="butt")
        axes.plot([low, high], [0, 0], color="black", linewidth=1.2)
        for rank in range(int(low), int(high) + 1):
            axes.plot([rank, rank], [0, 0.18], color="black", linewidth=1.2)
            axes.text(rank, 0.28, str(rank), ha="center", va="bottom")
        text = f"mean ranks over {pluralize(ranks.blocks, ranks.unit)}, 1 is the best"
        if ranks.critical_difference is not None:
            stop = min(low + ranks.critical_difference, high * 1.4)
            axes.plot([low, stop], [1.35, 1.35], color="black", linewidth=1.2, marker="|")
            text = f"critical difference {ranks.critical_difference:.2f} at 5 %, {pluralize(ranks.blocks, ranks.unit)}"
        axes.text(low, 1.5, text, ha="left", va="bottom")
        axes.set_xlim(low - 0.6 * (high - low), high + 0.6 * (high - low))
        axes.set_ylim(-bars - 0.6 - rows, 2.2)
        axes.set_title(fill(title, 70))
        axes.set_axis_off()


def draw_regret(regret: Mapping[str, Floats], title: str, path: Path) -> None:
    """Draw the regret of searchers after each evaluation, both axes logarithmic.

    Args:
        regret: Regret in % after each evaluation, by searcher.
        path: Output path without suffix; .png, .svg and .pdf are written.
    """
    with plot_files(path) as axes:
        for index, (searcher, values) in enumerate(regret.items()):
            colour, line, _ = series_style(index)
            evaluations = np.arange(1, len(values) + 1)
            axes.step(evaluations, values, where="post", label=searcher, color=colour, linestyle=line)
        axes.set(xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
        axes.set(xlabel="evaluations", ylabel="latency above the optimum in %", title=fill(title, 70))
        add_legend(axes)


def draw_transfer_map(transfer: pd.DataFrame, title: str, path: Path) -> None:
    """Draw a heat map of the share of the target's own best gain, with the speedup in each field.

    Args:
        transfer: Rows of one model or backend of `harness.report.tables.transfer.transfer_frame`.
        path: Output path without suffix; .png, .svg and .pdf are written.
    """
    names = list(dict.fromkeys([*transfer["source"], *transfer["target"]]))
    shares = np.full((len(names), len(names)), np.nan)
    texts = np.full(shares.shape, "not run", dtype=object)
    for row in frame_rows(transfer):
        place = names.index(row["source"]), names.index(row["target"])
        shares[place] = np.nan if row["share"] is None else row["share"]
        texts[place] = f"{row['speedup']:.2f}x"
    with plot_files(path, height=1.6 + 0.55 * len(names), grid=False) as axes:
        image = axes.imshow(np.clip(shares, 0, 1), cmap="cividis", vmin=0, vmax=1, aspect="auto")
        for (source, target), text in np.ndenumerate(texts):
            dark = not np.isnan(shares[source, target]) and shares[source, target] < 0.6
            axes.text(target, source, text, ha="center", va="center", color="white" if dark else "black")
        axes.set_xticks(range(len(names)), [fill(name, 18) for name in names])
        axes.set_yticks(range(len(names)), [fill(name, 18) for name in names])
        axes.set(xlabel="run on", ylabel="found on", title=title)
        axes.figure.colorbar(image, ax=axes, label="share of its own best gain")
        axes.tick_params(length=0)
