"""Pages of the leaderboard: Markdown with plots next to it, and HTML with the plots inside."""

from __future__ import annotations

import base64
import html as markup
from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from harness.replay.bench.leaderboard import CONTROL, Leaderboard
from harness.replay.bench.tasks import TierName
from harness.replay.recorded_landscape import Floats
from harness.report.plots.result_plots import series_style
from harness.report.report_table import render_markdown, render_note_markdown

SHOWN_CURVES = 8  # number of curves in colour: those of `ALWAYS_SHOWN`, then by rank
ALWAYS_SHOWN = (CONTROL, "random", "random_mutation", "tpe")
PLOT_TEXT = "Regret and targets over evaluations, and mean ranks"
INTRODUCTION = """# Leaderboard of QDQ-Bench, tier {tier}

Searchers replayed on recorded tables of real measurements. [QDQ-Bench](reference/bench.md) explains tasks, tiers,
scores and limits, and [CONTRIBUTING](../CONTRIBUTING.md#submit-to-the-leaderboard) how to submit.
`qdq bench leaderboard` writes this page from the submissions, in the order of the mean rank over all budgets.
"""


def write_page(board: Leaderboard, out: Path, tier: TierName, *, html: bool) -> None:
    """Write the Markdown page `out` and its plot `NAME.png`; with `html` also the self-contained `NAME.html`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    plot = out.with_suffix(".png")
    draw_leaderboard(board, plot)
    parts = [INTRODUCTION.format(tier=tier), f"![{PLOT_TEXT}]({plot.name})"]
    for table in board.tables:
        parts += [f"## {table.title}", render_markdown(table).replace("\\\\*\\\\*", "**"), render_note_markdown(table)]
    out.write_text("\n\n".join(part.strip() for part in parts) + "\n", encoding="utf-8")
    if html:
        out.with_suffix(".html").write_text(_render_html(board, plot), encoding="utf-8")


def _render_html(board: Leaderboard, plot: Path) -> str:
    image = base64.b64encode(plot.read_bytes()).decode()
    tables = "".join(
        f"<h2>{markup.escape(table.title)}</h2>{table.cells.to_html(index=False, border=0)}"
        f"<p>{markup.escape(table.note)}</p>"
        for table in board.tables
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Leaderboard of QDQ-Bench</title>'
        "<style>body{font:15px sans-serif;margin:2em auto;max-width:75em}td,th{padding:.2em .7em;text-align:left}"
        "tr:nth-child(even){background:#f3f3f3}img{max-width:100%}</style><h1>Leaderboard of QDQ-Bench</h1>"
        f'<img alt="{PLOT_TEXT}" src="data:image/png;base64,{image}">{tables}</html>\n'
    )


def draw_leaderboard(board: Leaderboard, path: Path) -> None:
    """Write a PNG with regret and reached targets over evaluations, and the mean ranks with the critical difference."""
    names = list(board.regret)
    first = dict.fromkeys([*(name for name in ALWAYS_SHOWN if name in names), *names])
    shown = [name for name in names if name in list(first)[:SHOWN_CURVES]]
    with mpl.rc_context({"text.usetex": False, "text.parse_math": False, "font.size": 8}):
        figure = Figure(figsize=(12, 4.6), layout="constrained")
        regret, targets, ranks = figure.subplots(1, 3, width_ratios=(1, 1, 1.1))
        _draw_curves(regret, board.regret, shown)
        regret.set(yscale="log", ylabel="latency of the choice above the optimum, %, mean over blocks")
        regret.yaxis.set_major_formatter("{x:g}")
        regret.yaxis.set_minor_formatter(NullFormatter())
        _draw_curves(targets, board.targets, shown)
        targets.set(ylabel="share of targets reached (0.5 to 50 % above the optimum)", ylim=(0, 1))
        regret.legend(fontsize=7)
        _draw_ranks(ranks, board)
        figure.savefig(path, dpi=130)


def _draw_curves(axes: Axes, curves: Mapping[str, Floats], shown: list[str]) -> None:
    for name, values in curves.items():
        evaluations = np.arange(1, len(values) + 1)
        if name in shown:
            colour, line, _ = series_style(shown.index(name))
            axes.step(evaluations, values, where="post", label=name, color=colour, linestyle=line, zorder=3)
        else:
            axes.step(evaluations, values, where="post", color="0.85", linewidth=0.8)
    axes.set(xlabel="evaluations (grey: the other searchers)", xscale="log", xlim=(1, None))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.25)


def _draw_ranks(axes: Axes, board: Leaderboard) -> None:
    names = list(board.regret)[::-1]
    for index, (budget, found) in enumerate(board.ranks.items()):
        colour, _, mark = series_style(index)
        places = [found.mean[name] for name in names]
        axes.plot(places, range(len(names)), mark, color=colour, markersize=4, label=f"{budget} evaluations")
    difference = next(iter(board.ranks.values())).critical_difference
    if difference is not None:
        axes.errorbar(1 + difference / 2, len(names), xerr=difference / 2, color="black", capsize=3)
        axes.annotate("critical difference", (1 + difference, len(names)), xytext=(5, -3), textcoords="offset points")
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="mean rank over blocks, 1 is the best", ylim=(-1, len(names) + 1))
    axes.grid(alpha=0.25)
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2)
