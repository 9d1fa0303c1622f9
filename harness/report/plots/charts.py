"""Charts of a task, each described once: Matplotlib draws them as files, and Plotly draws them on the page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from textwrap import fill
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from harness.base.statistics import median_ci
from harness.base.text import truncate
from harness.report.frames import (
    candidate_frame,
    close_intervals,
    curve_frame,
    hypervolume_frame,
    pareto_front,
    sample_frame,
)
from harness.report.plots.figures import add_legend, plot_files, series_style
from harness.report.report_table import Row, frame_rows
from harness.results.folder import TaskResults, row_labels
from harness.results.scores import metric_name

Values = npt.NDArray[Any]
MAX_CURVE_STEPS = 2000  # more than the width of a plot in pixels
CURVE_NOTE = (
    "median over seeds with its 95 % interval, the range below six seeds;\n"
    "the latency of a placement is the median over all searches that measured it"
)
CONFIRMED_NOTE = "\nmarks: confirmed speedup, median over seeds and limits as in the budget table"
BAND_LEGEND = "bands: 95 % interval of the median over seeds, the range below six seeds"
GREY = "#888888"
PLOTLY_DASHES = {"-": "solid", "--": "dash", "-.": "dashdot", ":": "dot"}
PLOTLY_SYMBOLS = {
    "o": "circle", "s": "square", "^": "triangle-up", "D": "diamond", "v": "triangle-down", "P": "cross", "X": "x",
    "*": "star",
}  # fmt: skip
PLOTLY_PX_PER_INCH, PLOTLY_PX_PER_POINT = 80, 1.75
MAX_LABEL_CHARS = 30  # of row names at an axis; hovering shows the full name
MIN_LABEL_DISTANCE = 0.06  # of two labels, as a share of the range of speedups
PlotlyFigure = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Marks of one series.

    Attributes:
        kind: Steps with a band, points with error bars, or horizontal bars between the limits.
        limits: Lower and upper limits along the axis `along`.
        name: Entry of the legend.
        in_legend: Whether the legend has the series; one without shares the entry of `group`.
        edge: Colour of the outline; "" for that of the marks.
        size: Size of a mark in points, or height of a bar in rows.
        opacity: Opacity of the inner part of a mark.
        texts: Name of each mark in the text on hovering.
        hover: Plotly's template of that text, in which `customdata` are the limits; "" for none.
    """

    kind: Literal["steps", "points", "bars"]
    x: Values
    y: Values
    name: str
    colour: str
    limits: tuple[Values, Values] | None = None
    along: Literal["x", "y"] = "y"
    group: str = ""
    in_legend: bool = True
    edge: str = ""
    line: str = "-"
    mark: str = "o"
    size: float = 4.5
    opacity: float = 1.0
    texts: Sequence[str] = ()
    hover: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Description of a chart.

    Attributes:
        title: Title on the page; files have the name of the task.
        note: Explanation below the x axis of a file.
        level: y of a grey line.
        band: Limits of a grey area along x.
        rows: Names of the rows at the y axis, from top to bottom.
        height: In inches of a file.
        counts: Whether x are whole numbers.
    """

    title: str
    x: str
    y: str
    marks: Sequence[Marks]
    note: str = ""
    level: float | None = None
    band: tuple[float, float] | None = None
    rows: Sequence[str] = ()
    height: float = 4.25
    counts: bool = False


def task_charts(task: TaskResults, main: pd.DataFrame, budgets: pd.DataFrame) -> dict[str, Chart]:
    """Return the charts of a task that have data, by the beginning of their file names.

    Args:
        main: `main_frame` of all tasks.
        budgets: `budget_frame` of all tasks.
    """
    rows, confirmed = main[main["task"] == task.name], budgets[budgets["task"] == task.name]
    labels = row_labels(task, frame_rows(rows))
    curves, volumes = curve_frame([task]), hypervolume_frame([task])
    charts: dict[str, Chart] = {}
    if len(curves):
        charts["anytime"] = speedup_chart(curves, "evaluations", confirmed)
        charts["anytime-minutes"] = speedup_chart(curves, "minutes")
    if task.metric is not None and len(volumes):
        title, marks = f"Hypervolume of latency and accuracy; {BAND_LEGEND}", _curve_marks(volumes, "volume")
        y = "hypervolume of latency and accuracy"
        charts["volume"] = Chart(title=title, x="evaluations", y=y, marks=marks, note=CURVE_NOTE, counts=True)
    names = {row: label for row, label in labels.items() if row in task.summaries}
    if names:
        charts["latency"] = _latency_chart(task, names)
    points = close_intervals(rows)
    if len(points) and task.metric is not None:
        charts["pareto"] = _pareto_chart(task, task.metric, points.assign(label=points["row"].map(labels)))
    return charts


def speedup_chart(
    curves: pd.DataFrame, over: Literal["evaluations", "minutes"], confirmed: pd.DataFrame | None = None
) -> Chart:
    """Return the chart of the incumbent's speedup of each searcher: median over seeds with its interval.

    Args:
        curves: `curve_frame` of one task.
        confirmed: Rows of `budget_frame` of the task, drawn as marks over evaluations.
    """
    rows = [] if confirmed is None else frame_rows(confirmed)
    return Chart(
        title=f"Speedup of the incumbent over {over}; {BAND_LEGEND}", x=over, y="speedup over the float model",
        marks=_curve_marks(curves, "speedup", over, rows),
        note=f"lines and bands: {CURVE_NOTE}{CONFIRMED_NOTE if rows else ''}", level=1.0,
        counts=over == "evaluations",
    )  # fmt: skip


def _curve_marks(
    curves: pd.DataFrame, value: Literal["speedup", "volume"], over: str = "evaluations", confirmed: Sequence[Row] = ()
) -> list[Marks]:
    marks = []
    digits, searchers, last = 2 if value == "speedup" else 3, curves["searcher"].nunique(), curves[over].max()
    for index, (name, part) in enumerate(curves.groupby("searcher", sort=False)):
        colour, line, mark = series_style(index)
        places, steps = median_steps(
            (seed[over].to_numpy(), seed[value].to_numpy()) for _, seed in part.groupby("seed")
        )
        limits = f"[%{{customdata[0]:.{digits}f}}, %{{customdata[1]:.{digits}f}}]"
        marks.append(
            Marks(
                kind="steps", x=places, y=steps[0], limits=(steps[1], steps[2]), name=str(name), group=str(name),
                colour=colour, line=line, hover=f"%{{x:.4~g}} {over}: %{{y:.{digits}f}} {limits}",
            )
        )  # fmt: skip
        if own := [row for row in confirmed if row["searcher"] == name]:
            budgets, speedups, low, high = (
                np.array([row[key] for row in own], dtype=float) for key in ("budget", "speedup", "low", "high")
            )
            shift = 0.012 * last * (index - (searchers - 1) / 2)  # marks of several searchers would overlap
            marks.append(
                Marks(
                    kind="points", x=budgets + shift, y=speedups, limits=(low, high), name=f"{name}, confirmed",
                    group=str(name), in_legend=False, colour=colour, mark=mark, 
                    texts=[str(row["budget"]) for row in own], hover=f"confirmed at %{{text}}: %{{y:.2f}} {limits}",
                )
            )  # fmt: skip
    return marks


def median_steps(seeds: Iterable[tuple[Values, Values]]) -> tuple[Values, Values]:
    """Return the median of a figure over seeds with its interval, wherever the figure of a seed changes.

    Args:
        seeds: x positions and values of each seed, of the same length.

    Returns:
        x positions, and the rows value, low and high (the 95 % interval of the median, the range below six seeds).
    """
    steps = []
    for positions, values in seeds:
        changes = np.append(True, values[1:] != values[:-1])
        changes[-1] = True  # the last incumbent remains until the end of the search
        steps.append((positions[changes], values[changes].astype(float)))
    places = np.unique(np.concatenate([places for places, _ in steps]))
    columns = []
    for positions, values in steps:
        last = np.searchsorted(positions, places, side="right") - 1
        columns.append(np.where(last < 0, np.nan, values[last]))
    table = np.column_stack(columns)
    is_complete = ~np.isnan(table).any(axis=1)
    table, places = table[is_complete], places[is_complete]
    if len(table) > MAX_CURVE_STEPS:
        sampled = np.linspace(0, len(table) - 1, MAX_CURVE_STEPS).astype(int)
        table, places = table[sampled], places[sampled]
    intervals = [median_ci(row) for row in table]
    return places, np.array([(interval.value, interval.low, interval.high) for interval in intervals]).T


def _latency_chart(task: TaskResults, names: dict[str, str]) -> Chart:
    """Return the chart of the confirmation's samples by row, with the latency of the tables and the noise floor.

    The latency of the tables is the geometric mean over builds: in a median of all samples, a slow build would count as
    many slow inferences.
    """
    samples = dict(iter(sample_frame([task]).groupby("row")))
    parts = [samples[row] for row in names]
    rows, texts = np.arange(len(parts)), list(names.values())
    low, first, third, high = np.array([part["latency_ms"].quantile([0.05, 0.25, 0.75, 0.95]) for part in parts]).T
    builds = [part.groupby("build")["latency_ms"].median() for part in parts]
    places = np.repeat(rows, [len(each) for each in builds])
    table_ms = np.array([task.summaries[row].latency_ms.value for row in names])
    to = "%{customdata[0]:.4g} to %{customdata[1]:.4g} ms<extra></extra>"
    bars = [
        Marks(
            kind="bars", x=start, y=rows, limits=(start, end), name=name, size=size, colour=series_style(style)[0],
            texts=texts, hover=f"%{{text}}: {name} {to}",
        )
        for name, start, end, size, style in (("5 to 95 %", low, high, 0.06, 0), ("middle half", first, third, 0.4, 5))
    ]  # fmt: skip
    of_builds = Marks(
        kind="points", x=np.concatenate(builds), y=places - 0.32, name="builds", size=2.6, colour=series_style(1)[0],
        texts=[texts[place] for place in places], hover="%{text}: a build at %{x:.4g} ms<extra></extra>",
    )  # fmt: skip
    of_tables = Marks(
        kind="points", x=table_ms, y=rows, name="latency as in the tables", colour="#FFFFFF", edge="#000000", mark="D",
        texts=texts, hover="%{text}: %{x:.4g} ms, geometric mean over builds<extra></extra>",
    )  # fmt: skip
    noise_floor = task.noise_floor or 0.0
    grey = "" if task.noise_floor is None else f"grey: noise floor {noise_floor:.1%}"
    return Chart(
        title=f"Latency of the confirmation{grey and f'; {grey}'}", x="latency, ms", y="",
        marks=[*bars, of_builds, of_tables], note=f"{grey} around the baseline's latency" if grey else "",
        band=(table_ms[0] / (1 + noise_floor), table_ms[0] * (1 + noise_floor)), rows=texts,
        height=2.1 + 0.4 * len(rows),
    )  # fmt: skip


def _pareto_chart(task: TaskResults, metric: str, points: pd.DataFrame) -> Chart:
    """Return the chart of the metric against latency: confirmed rows, their front, and candidates of searches in grey.

    Marks are small and translucent, with names in the legend only, since good rows are close together.
    """
    name, tried, best = metric_name(metric), candidate_frame(task), pareto_front(points, task.higher_is_better)
    candidates = "scored in the searches" + (", on their half of the data" if task.facts.get("halves") else "")
    marks = [
        Marks(
            kind="points", x=tried["latency_ms"].to_numpy(), y=tried["score"].to_numpy(), name=candidates, size=2.5,
            colour=GREY, opacity=0.6,
        ),
        Marks(
            kind="steps", x=best["latency_ms"].to_numpy(), y=best["score"].to_numpy(), name="front", colour="#555555"
        ),
    ]  # fmt: skip
    hover = f"%{{x:.4g}} ms [%{{customdata[0]:.4g}}, %{{customdata[1]:.4g}}], {escape(name)} %{{y:.4f}}"
    for index, row in enumerate(frame_rows(points.drop_duplicates("row"))):
        colour, _, mark = series_style(index)
        x, y, low, high = (
            np.array([row[key]], dtype=float) for key in ("latency_ms", "score", "latency_low_ms", "latency_high_ms")
        )
        marks.append(
            Marks(
                kind="points", x=x, y=y, limits=(low, high), along="x", name=row["label"], colour=colour, mark=mark,
                size=5, opacity=0.35, hover=hover,
            )
        )  # fmt: skip
    return Chart(
        title=f"Latency against {name}; bars: 95 %; grey: {candidates}", x="latency, ms", y=name, marks=marks,
        note="confirmed rows: 95 % interval", height=4.5 + 0.125 * len(marks),
    )  # fmt: skip


def answer_chart(task: TaskResults, main: pd.DataFrame) -> PlotlyFigure | None:
    """Return the chart of speedup against loss of accuracy, with labelled rows and the bound; None without a figure.

    Without losses the rows are in the order of their speedup. For the arguments see `task_charts`.
    """
    rows = main[main["task"] == task.name]
    labels = row_labels(task, frame_rows(rows))
    rows = rows[rows["speedup"].notna()].drop_duplicates("row").sort_values("speedup").reset_index(drop=True)
    scored = bool(rows["drop"].notna().any())
    rows = rows[rows["drop"].notna()] if scored else rows
    if rows.empty:
        return None
    losses = rows["drop"].to_numpy(dtype=float) if scored else np.arange(len(rows), dtype=float)
    speedups, low, high = (rows[key].to_numpy(dtype=float) for key in ("speedup", "speedup_low", "speedup_high"))
    bottom, top = min(1.0, np.nanmin(low, initial=1.0)), max(speedups.max(), np.nanmax(high, initial=1.0))
    least = MIN_LABEL_DISTANCE * (top - bottom or 1.0)
    heights = speedups.copy()  # of the labels, raised where they would cover one another
    for index in range(1, len(heights)):
        heights[index] = max(heights[index], heights[index - 1] + least)
    names = [labels.get(row, row) for row in rows["row"]]
    bound = task.allowed if scored else None
    metric = metric_name(task.metric)
    marks = [
        Marks(
            kind="points", x=losses[which], y=speedups[which], limits=(low[which], high[which]), name="",
            in_legend=False, colour=series_style(int(beyond))[0], size=5, opacity=1 - beyond,
            texts=[name for name, shown in zip(names, which, strict=True) if shown],
            hover=f"%{{text}}: %{{y:.2f}}x{', loss %{x:.4f}' if scored else ''}<extra></extra>",
        )
        for beyond in (False, True)
        if (which := rows["beyond"].to_numpy(dtype=bool) == beyond).any()
    ]  # fmt: skip
    title = f"{task.name}: Speedup against loss{'' if bound is None else '; dashed: the bound'}; bars: 95 %"
    x = f"loss of {metric} (lower is better)" if scored else "rows"
    figure = plotly_figure(Chart(title=title, x=x, y="speedup over float (higher is better)", marks=marks, level=1.0))
    texts = [f"<b>{escape(n)}</b>" if best else escape(n) for n, best in zip(names, rows["best"], strict=True)]
    figure["data"].append(
        {
            "type": "scatter", "mode": "text", "x": _as_floats(losses), "y": _as_floats(heights), "hoverinfo": "skip",
            "text": [f"&nbsp;&nbsp;{text}" for text in texts], "textposition": "middle right", "showlegend": False,
        }
    )  # fmt: skip
    left, right = min(0.0, losses.min()), max(losses.max(), bound or 0.0)
    width = (right - left) or 1.0
    figure["layout"]["xaxis"]["range"] = [left - 0.05 * width, right + 0.4 * width]
    if bound is not None:
        line = {"type": "line", "yref": "paper", "x0": bound, "x1": bound, "y0": 0, "y1": 1, "line": {"dash": "dash"}}
        figure["layout"]["shapes"].append(line)
    return figure


def draw_chart(chart: Chart, title: str, path: Path | None = None) -> Figure:
    """Draw a chart by Matplotlib.

    Args:
        path: Output path without suffix; None: nothing is written.
    """
    with plot_files(path, height=chart.height) as axes:
        axes.use_sticky_edges = False  # bars would touch the frame
        for marks in chart.marks:
            _draw_marks(axes, marks)
        if chart.level is not None:
            axes.axhline(chart.level, color="0.6", linewidth=0.8)
        if chart.band is not None:
            axes.axvspan(*chart.band, color="0.87", zorder=0)
        if chart.rows:
            axes.set_yticks(range(len(chart.rows)), [fill(name, 26) for name in chart.rows])
            axes.set_ylim(len(chart.rows) - 0.4, -0.7)
        if chart.counts:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(title=title, xlabel="\n".join(filter(None, [chart.x, chart.note])), ylabel=chart.y)
        add_legend(axes)
    figure = axes.figure
    assert isinstance(figure, Figure)  # not a subfigure
    return figure


def _draw_marks(axes: Axes, marks: Marks) -> None:
    colour, label = marks.colour, marks.name if marks.in_legend else None
    errors: dict[str, Any] = {}
    if marks.kind == "bars" and marks.limits is not None:
        low, high = marks.limits
        axes.barh(marks.y, high - low, marks.size, left=low, color=colour, label=label)
    elif marks.kind == "steps":
        axes.step(marks.x, marks.y, where="post", label=label, color=colour, linestyle=marks.line, linewidth=1.2)
        if marks.limits is not None:
            axes.fill_between(marks.x, *marks.limits, step="post", alpha=0.12, color=colour)
    else:
        if marks.limits is not None:
            middle = marks.x if marks.along == "x" else marks.y
            errors = {f"{marks.along}err": np.abs(np.subtract(marks.limits, middle))}
        axes.errorbar(
            marks.x, marks.y, fmt=marks.mark, ms=marks.size, mfc=(colour, marks.opacity), mec=marks.edge or colour,
            ecolor=colour, elinewidth=0.9, capsize=2, zorder=3, label=label, **errors,
        )  # fmt: skip


def plotly_figure(chart: Chart) -> PlotlyFigure:
    """Return a chart as a title with Plotly's `data` and `layout`, which `assets/charts.js` draws."""
    shapes: list[PlotlyFigure] = []
    if (y := chart.level) is not None:
        line = {"color": GREY, "width": 1}
        shapes.append({"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": line})
    if chart.band is not None:
        place = {"type": "rect", "x0": chart.band[0], "x1": chart.band[1], "yref": "paper", "y0": 0, "y1": 1}
        shapes.append({**place, "fillcolor": "#bbbbbb", "opacity": 0.4, "layer": "below", "line": {"width": 0}})
    grid: PlotlyFigure = {"gridcolor": "#e6e6e1", "zeroline": False, "automargin": True}
    axes = [{**grid, "title": {"text": escape(name)}} for name in (chart.x, chart.y)]
    if chart.rows:
        names = [escape(truncate(name, MAX_LABEL_CHARS)) for name in chart.rows]
        axes[1] |= {"tickvals": list(range(len(names))), "ticktext": names, "range": [len(names) - 0.4, -0.7]}
    height = round(PLOTLY_PX_PER_INCH * chart.height)
    layout = {"xaxis": axes[0], "yaxis": axes[1], "shapes": shapes, "barmode": "overlay", "height": height}
    data = [trace for marks in chart.marks for trace in _plotly_traces(marks)]
    return {"title": chart.title, "data": data, "layout": layout}


def _plotly_traces(marks: Marks) -> Iterator[PlotlyFigure]:
    colour, group = marks.colour, marks.group or marks.name
    trace: PlotlyFigure = {
        "type": "scatter", "name": escape(marks.name), "legendgroup": group, "showlegend": marks.in_legend,
        "x": _as_floats(marks.x), "y": _as_floats(marks.y),
    }  # fmt: skip
    trace |= {"hovertemplate": marks.hover} if marks.hover else {"hoverinfo": "skip"}
    if marks.texts:
        trace["text"] = [escape(text) for text in marks.texts]
    low, high = (None, None) if marks.limits is None else map(_as_floats, marks.limits)
    if low is not None and high is not None:
        trace["customdata"] = [list(pair) for pair in zip(low, high, strict=True)]
    if marks.kind == "bars" and marks.limits is not None:
        trace |= {"type": "bar", "orientation": "h", "width": marks.size, "textposition": "none"}
        trace |= {"base": low, "x": _as_floats(marks.limits[1] - marks.limits[0]), "marker": {"color": colour}}
    elif marks.kind == "steps":
        edge = {"type": "scatter", "mode": "lines", "hoverinfo": "skip", "showlegend": False, "x": trace["x"]}
        edge |= {"legendgroup": group, "line": {"shape": "hv", "width": 0}}
        if low is not None:
            yield {**edge, "y": low}
            yield {**edge, "y": high, "fill": "tonexty", "fillcolor": _translucent(colour, 0.12)}
        line = {"shape": "hv", "width": 1.6, "color": colour, "dash": PLOTLY_DASHES[marks.line]}
        trace |= {"mode": "lines", "line": line}
    else:
        if low is not None:
            middle = trace[marks.along]
            up, down = (_as_floats(np.subtract(*pair)) for pair in ((high, middle), (middle, low)))
            bars = {"symmetric": False, "array": up, "arrayminus": down, "thickness": 1.5}
            trace[f"error_{marks.along}"] = {**bars, "color": _translucent(colour, 0.5)}
        marker = {"color": _translucent(colour, marks.opacity), "line": {"color": marks.edge or colour, "width": 1}}
        size = round(PLOTLY_PX_PER_POINT * marks.size)
        trace |= {"mode": "markers", "marker": {**marker, "symbol": PLOTLY_SYMBOLS[marks.mark], "size": size}}
    yield trace


def _translucent(colour: str, share: float) -> str:
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},{share:g})"


def _as_floats(values: Any) -> list[float]:
    return [float(f"{value:.6g}") for value in np.asarray(values, dtype=float).tolist()]
