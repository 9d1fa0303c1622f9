"""Plots of one task as PNG, SVG and PDF, colour-blind safe and legible in grey.

Colours are those of Okabe and Ito (2008), then of Paul Tol's palette "muted".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from textwrap import fill
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FixedFormatter, MaxNLocator

from harness.base.statistics import median_ci
from harness.base.text import printable_lines
from harness.report.frames import pareto_front
from harness.report.report_table import frame_rows

Values = npt.NDArray[Any]
SERIES_COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F",
    "#882255", "#999933", "#332288", "#AA4499",
)  # fmt: skip
SERIES_LINES = ("-", "--", "-.", ":")
SERIES_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
BAR_HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo", "--")
PLOT_FILE_FORMATS = ("png", "svg", "pdf")
PLOT_METADATA: Mapping[str, dict[str, None]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
PNG_DPI, MAX_PNG_HEIGHT_PX = 200, 4000  # limits memory: several copies of four bytes a pixel
MAX_CURVE_STEPS = 2000  # more than the width of a plot in pixels
CURVE_NOTE = (
    "median over seeds with its 95 % interval, the range below six seeds;\n"
    "the latency of a placement is the median over all searches that measured it"
)


class NotebookFigure(Figure):
    """Figure that a notebook displays without pyplot."""

    def _repr_png_(self) -> bytes:
        buffer = BytesIO()
        self.savefig(buffer, format="png", dpi=100)
        return buffer.getvalue()


@contextmanager
def figure_file(path: Path | None, height: float = 4.0, *, width: float = 6.4, grid: bool = True) -> Iterator[Axes]:
    """Yield the axes of a figure, which is written as PNG, SVG and PDF afterwards if there is a path (without suffix).

    Height and width are in inches. Files have no date and no random identifiers, so the same results give the same
    bytes. The PDF has TrueType fonts, which publishers ask for.
    """
    settings: Any = {
        "text.usetex": False,
        "text.parse_math": False,
        "font.size": 9,
        "svg.hashsalt": "qdq-bench",
        "pdf.fonttype": 42,
    }
    with mpl.rc_context(settings):
        figure = NotebookFigure(figsize=(width, height), layout="constrained")
        axes = figure.subplots()
        yield axes
        if grid:
            axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
        _make_printable(figure)
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        dpi = min(PNG_DPI, MAX_PNG_HEIGHT_PX / height)
        for kind in PLOT_FILE_FORMATS:
            figure.savefig(path.with_name(f"{path.name}.{kind}"), dpi=dpi, metadata=PLOT_METADATA.get(kind))
            figure.set_layout_engine("none")  # the layout of the first format serves all; it takes a third of a save


def _make_printable(figure: Figure) -> None:
    """Escape control characters in all texts, as XML and thus SVG forbids them."""
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        formatter = axis.get_major_formatter()
        if isinstance(formatter, FixedFormatter):
            formatter.seq = [printable_lines(str(label)) for label in formatter.seq]
    for text in figure.findobj(Text):
        text.set_text(printable_lines(text.get_text()))


def series_style(index: int) -> tuple[str, str, str]:
    """Return colour, line and mark of a series; used colours repeat with the next line and mark."""
    turn = index // len(SERIES_COLOURS)
    return (
        SERIES_COLOURS[index % len(SERIES_COLOURS)],
        SERIES_LINES[(index + turn) % len(SERIES_LINES)],
        SERIES_MARKERS[(index + turn) % len(SERIES_MARKERS)],
    )


def add_legend(axes: Axes, columns: int = 4) -> None:
    """Draw the legend below the axes."""
    handles, labels = axes.get_legend_handles_labels()
    columns = min(columns, max(1, len(labels)))
    axes.figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)


def median_band(curves: pd.DataFrame, over: Literal["evaluations", "minutes"], value: str = "speedup") -> pd.DataFrame:
    """Return the median of a figure over seeds with its interval, wherever the figure of a seed changes.

    Args:
        curves: Columns seed, evaluations, minutes and `value` of one searcher, each seed in order.
        over: Column of the x axis, the index of the result.

    Returns:
        Columns value, low, high: the 95 % interval of the median, the range below six seeds.
    """
    places, lines = median_steps((part[over].to_numpy(), part[value].to_numpy()) for _, part in curves.groupby("seed"))
    return pd.DataFrame(lines, index=pd.Index(places, name=over), columns=["value", "low", "high"])


def median_steps(seeds: Iterable[tuple[Values, Values]]) -> tuple[Values, list[tuple[float, float, float]]]:
    """Return the x positions of `median_band`, and value, low and high at each.

    Args:
        seeds: x positions and values of each seed, of the same length.
    """
    steps = [_change_points(positions, figures) for positions, figures in seeds]
    places = np.unique(np.concatenate([places for places, _ in steps])) if steps else np.empty(0)
    columns = []
    for positions, values in steps:
        last = np.searchsorted(positions, places, side="right") - 1
        columns.append(np.where(last < 0, np.nan, values[last]))
    table = np.column_stack(columns) if columns else np.empty((0, 1))
    is_complete = ~np.isnan(table).any(axis=1)
    table, places = table[is_complete], places[is_complete]
    if len(table) > MAX_CURVE_STEPS:
        sampled = np.linspace(0, len(table) - 1, MAX_CURVE_STEPS).astype(int)
        table, places = table[sampled], places[sampled]
    intervals = [median_ci(row) for row in table]
    return places, [(interval.value, interval.low, interval.high) for interval in intervals]


def _change_points(places: Values, values: Values) -> tuple[Values, Values]:
    """Return the x positions at which the value changes, and the last position, with the values."""
    changes = np.append(True, values[1:] != values[:-1])
    changes[-1] = True
    return places[changes], values[changes].astype(float)


def draw_curves(
    curves: pd.DataFrame,
    title: str,
    path: Path | None = None,
    *,
    value: Literal["speedup", "volume"] = "speedup",
    over: Literal["evaluations", "minutes"] = "evaluations",
    confirmed: pd.DataFrame | None = None,
) -> Figure:
    """Draw speedup or hypervolume of searchers over evaluations or minutes: median over seeds with its interval.

    Args:
        curves: Columns searcher, seed, evaluations, minutes and `value`; see `harness.report.frames`.
        path: Output path without suffix; None: nothing is written.
        confirmed: Columns searcher, budget, speedup, low, high of `budget_frame`, drawn as marks over evaluations.
    """
    is_speedup = value == "speedup"
    note = f"lines and bands: {CURVE_NOTE}" if is_speedup else CURVE_NOTE
    if confirmed is not None and len(confirmed):
        note += "\nmarks: confirmed speedup, median over seeds and limits as in the budget table"
    with figure_file(path, height=4.4 if is_speedup else 4.0) as axes:
        for index, (searcher, part) in enumerate(curves.groupby("searcher", sort=False)):
            colour, line, mark = series_style(index)
            steps = median_band(part, over, value)
            axes.step(steps.index, steps["value"], where="post", label=str(searcher), color=colour, linestyle=line)
            axes.fill_between(steps.index, steps["low"], steps["high"], step="post", alpha=0.12, color=colour)
            if confirmed is not None and len(marks := confirmed[confirmed["searcher"] == searcher]):
                shift = 0.012 * curves[over].max() * (index - (curves["searcher"].nunique() - 1) / 2)
                errors = np.abs(marks[["low", "high"]].to_numpy().T - marks["speedup"].to_numpy())
                place = marks["budget"] + shift
                axes.errorbar(place, marks["speedup"], yerr=errors, fmt=mark, ms=4.5, capsize=2, color=colour)
        if is_speedup:
            axes.axhline(1.0, color="0.6", linewidth=0.8)
        axes.set_xlabel(f"{over}\n{note}")
        axes.set_ylabel("speedup over the float baseline" if is_speedup else "hypervolume of latency and accuracy")
        axes.set_title(title)
        axes.xaxis.set_major_locator(MaxNLocator(integer=over == "evaluations"))
        add_legend(axes)
    figure = axes.figure
    assert isinstance(figure, Figure)  # not a subfigure
    return figure


def draw_budget_bars(budgets: pd.DataFrame, title: str, path: Path) -> None:
    """Draw bars of the confirmed speedup by searcher and budget.

    Args:
        budgets: Columns searcher, budget, speedup, low, high of `budget_frame`, for one task.
        path: Output path without suffix; .png, .svg and .pdf are written.
    """
    searchers, sizes = list(dict.fromkeys(budgets["searcher"])), sorted(set(budgets["budget"]))
    width = 0.8 / len(sizes)
    with figure_file(path, height=3.4) as axes:
        for index, size in enumerate(sizes):
            part = budgets[budgets["budget"] == size]
            place = [searchers.index(name) + (index - (len(sizes) - 1) / 2) * width for name in part["searcher"]]
            errors = np.abs(part[["low", "high"]].to_numpy().T - part["speedup"].to_numpy())
            axes.bar(
                place, part["speedup"], width * 0.92, yerr=errors, capsize=2, label=f"{size} evaluations",
                color=SERIES_COLOURS[index % len(SERIES_COLOURS)], hatch=BAR_HATCHES[index % len(BAR_HATCHES)],
                edgecolor="white",
                error_kw={"elinewidth": 0.9},
            )  # fmt: skip
        axes.axhline(1.0, color="0.3", linewidth=0.8)
        axes.set_xticks(range(len(searchers)), searchers)
        axes.set_xlabel("median over seeds; whiskers: 95 % interval,\nbelow six seeds the widest limits of their own")
        axes.set_ylabel("confirmed speedup")
        axes.set_title(title)
        add_legend(axes)


def draw_latencies(
    samples: Mapping[str, pd.DataFrame],
    table_ms: Mapping[str, float],
    noise_floor: float | None,
    title: str,
    path: Path,
) -> None:
    """Draw the distribution of the confirmation's samples of each row, with the latency of the tables.

    The latency of the tables is the geometric mean over builds: in a median of all samples, a slow build would count as
    many slow inferences.

    Args:
        samples: Samples of each row by label (columns build, latency_ms), the baseline first.
        table_ms: Latency of each row in the tables, by label.
        noise_floor: Relative noise floor, drawn around the baseline's latency; None: not drawn.
        path: Output path without suffix; .png, .svg and .pdf are written.
    """
    with figure_file(path, height=1.5 + 0.36 * len(samples)) as axes:
        baseline_ms = table_ms[next(iter(samples))]
        if noise_floor is not None:
            axes.axvspan(baseline_ms / (1 + noise_floor), baseline_ms * (1 + noise_floor), color="0.85")
        axes.axvline(baseline_ms, color="0.5", linewidth=0.8)
        for place, (name, part) in enumerate(samples.items()):
            low, first, third, high = np.quantile(part["latency_ms"], [0.05, 0.25, 0.75, 0.95])
            axes.plot([low, high], [place, place], color=SERIES_COLOURS[0], linewidth=1.0)
            axes.plot([first, third], [place, place], color=SERIES_COLOURS[0], linewidth=5.0, solid_capstyle="butt")
            axes.plot([table_ms[name]], [place], "D", ms=4.5, color="white", markeredgecolor="black")
            builds = part.groupby("build")["latency_ms"].median()
            axes.plot(
                builds, np.full(len(builds), place - 0.27), "o", ms=2.6, color=SERIES_COLOURS[1], linestyle="none"
            )
        axes.set_yticks(range(len(samples)), [fill(name, 26) for name in samples])
        axes.set_ylim(len(samples) - 0.6, -0.8)
        grey = "" if noise_floor is None else f"\ngrey: noise floor, {noise_floor:.1%} around the baseline's latency"
        axes.set_xlabel(
            "latency, ms\ndiamond: latency as in the tables, the geometric mean over builds\n"
            f"bar: middle half of the samples; line: 5 to 95 %; dots: medians of builds{grey}"
        )
        axes.set_title(title)


def draw_pareto(
    points: pd.DataFrame, tried: pd.DataFrame, words: Mapping[str, str], path: Path, *, higher: bool
) -> None:
    """Draw the metric against latency: confirmed rows with intervals and front, and candidates of searches in grey.

    Marks are small and translucent, with names in the legend only, since good rows are close together.

    Args:
        points: Columns label, latency_ms, latency_low_ms, latency_high_ms, score of confirmed rows.
        tried: Columns latency_ms, score of the candidates, by the searches' own samples.
        words: Texts "title", "metric" (y axis) and "tried" (legend entry of the candidates).
        path: Output path without suffix; .png, .svg and .pdf are written.
        higher: A higher score is better.
    """
    with figure_file(path, height=4.6) as axes:
        grey: Any = {"color": "0.45", "alpha": 0.5, "mew": 0, "ms": 3, "zorder": 1}
        axes.plot(tried["latency_ms"], tried["score"], "o", label=fill(words["tried"], 24), **grey)
        best = pareto_front(points, higher)
        axes.step(best["latency_ms"], best["score"], where="post", color="0.35", linewidth=1.0, label="front", zorder=2)
        for index, row in enumerate(frame_rows(points.drop_duplicates("label"))):
            errors = [[row["latency_ms"] - row["latency_low_ms"]], [row["latency_high_ms"] - row["latency_ms"]]]
            colour, _, mark = series_style(index)
            axes.errorbar(
                [row["latency_ms"]], [row["score"]], xerr=errors, fmt=mark, ms=5, mfc=(colour, 0.35), mec=colour,
                ecolor=(colour, 0.5), capsize=2, elinewidth=0.8, zorder=3, label=fill(row["label"], 24),
            )  # fmt: skip
        axes.set_xlabel("latency, ms (confirmed rows: 95 % interval)")
        axes.set_ylabel(words["metric"])
        axes.set_title(words["title"])
        add_legend(axes, columns=3)
