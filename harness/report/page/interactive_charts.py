"""Interactive charts of the page as Plotly figures (data and layout), which `assets/charts.js` draws."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import chain
from statistics import median
from typing import Any, Literal

import numpy as np
import pandas as pd

from harness.base.text import truncate
from harness.report.frames import (
    Curve,
    candidate_frame,
    candidate_label,
    close_intervals,
    hypervolume_frame,
    iter_speedup_curves,
    pareto_front,
    valid_turns,
)
from harness.report.plots.result_plots import median_steps, series_style
from harness.report.report_table import frame_rows
from harness.results.folder import TaskResults
from harness.results.scores import metric_name

PLOTLY_DASH_BY_LINE = {"-": "solid", "--": "dash", "-.": "dashdot", ":": "dot"}
PLOTLY_SYMBOL_BY_MARKER = {
    "o": "circle", "s": "square", "^": "triangle-up", "D": "diamond", "v": "triangle-down", "P": "cross", "X": "x",
    "*": "star",
}  # fmt: skip
MAX_LABEL_CHARS = 30  # of row names at an axis; hovering shows the full name
MIN_LABEL_DISTANCE = 0.06  # of two labels, as a share of the range of speedups
BAND_LEGEND = "bands: 95 % interval of the median over seeds, the range below six seeds"
NO_HOVER_NO_LEGEND = {"hoverinfo": "skip", "showlegend": False}

Chart = dict[str, Any]
FLOAT_LINE: Chart = {
    "type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1.0, "y1": 1.0, "line": {"color": "#888888", "width": 1}
}  # fmt: skip
Curves = Mapping[str, Sequence[Curve]]


def build_charts(
    task: TaskResults, main: pd.DataFrame, confirmed: Iterable[Mapping[Any, Any]], labels: Mapping[str, str]
) -> list[Chart]:
    """Return the charts of a task, each a title with Plotly's `data` and `layout`.

    Args:
        main: `main_frame` of all tasks.
        confirmed: Rows of `budget_frame`; those of other tasks are ignored.
        labels: Labels of the task's rows by id.
    """
    curves = _curves_by_searcher(iter_speedup_curves(task))
    marks = [line for line in confirmed if line["task"] == task.name]
    charts = [
        *(_speedup_chart(curves, over, marks) for over in ("evaluations", "minutes")),
        None if task.metric is None else _hypervolume_chart(task),
        _latency_chart(task, labels),
        None if task.metric is None else _pareto_chart(task, main[main["task"] == task.name], labels),
    ]
    return [chart for chart in charts if chart]


def build_answer_chart(task: TaskResults, main: pd.DataFrame, labels: Mapping[str, str]) -> Chart | None:
    """Return the chart of speedup against loss of accuracy, with labelled rows and the bound; None without a figure.

    Without losses the rows are in the order of their speedup. For the arguments see `build_charts`.
    """
    rows = main[(main["task"] == task.name) & main["speedup"].notna()].drop_duplicates("row")
    rows = rows.sort_values("speedup").reset_index(drop=True)
    scored = bool(rows["drop"].notna().any())
    rows = rows[rows["drop"].notna()] if scored else rows
    if rows.empty:
        return None
    losses = rows["drop"].to_numpy(dtype=float) if scored else np.arange(len(rows), dtype=float)
    speedups, low, high = (rows[key].to_numpy(dtype=float) for key in ("speedup", "speedup_low", "speedup_high"))
    names = [labels.get(row, row) for row in rows["row"]]
    bottom, top = min(1.0, np.nanmin(low, initial=1.0)), max(speedups.max(), np.nanmax(high, initial=1.0))
    least = MIN_LABEL_DISTANCE * (top - bottom or 1.0)
    heights = speedups.copy()  # of the labels, raised where they would cover one another
    for index in range(1, len(heights)):
        heights[index] = max(heights[index], heights[index - 1] + least)
    texts = [f"<b>{escape(name)}</b>" if best else escape(name) for name, best in zip(names, rows["best"], strict=True)]
    labels_shown = [f"&nbsp;&nbsp;{text}" for text in texts]  # right of the mark
    colours = [series_style(1 if beyond else 0)[0] for beyond in rows["beyond"]]
    data: list[Chart] = [
        {"type": "scatter", "mode": "markers", "x": _as_floats(losses), "y": _as_floats(speedups), "showlegend": False,
         "error_y": _error_bars(speedups, low, high, "#999999"), "text": texts,
         "marker": {"color": colours, "size": 9, "symbol": ["circle-open" if b else "circle" for b in rows["beyond"]]},
         "hovertemplate": "%{text}: %{y:.2f}x" + (", loss %{x:.4f}" if scored else "") + "<extra></extra>"},
        {"type": "scatter", "mode": "text", "x": _as_floats(losses), "y": _as_floats(heights), "text": labels_shown,
         "textposition": "middle right", **NO_HOVER_NO_LEGEND},
    ]  # fmt: skip
    bound = task.allowed if scored else None
    right = max(losses.max(), bound or 0.0)
    margin = (right - min(0.0, losses.min())) or 1.0
    x: Chart = {"range": [min(0.0, losses.min()) - 0.05 * margin, right + 0.4 * margin]}
    x["title"] = {"text": f"loss of {escape(metric_name(task.metric))} (lower is better)" if scored else "rows"}
    line = {"type": "line", "yref": "paper", "x0": bound, "x1": bound, "y0": 0, "y1": 1, "line": {"dash": "dash"}}
    y = {"title": {"text": "speedup over float (higher is better)"}}
    title = f"Speedup against loss{'; dashed: the bound' if bound is not None else ''}; bars: 95 %"
    return _build_chart(
        f"{task.name}: {title}", data, x, y, shapes=[FLOAT_LINE, *([line] if bound is not None else [])]
    )


def _curves_by_searcher(curves: Iterable[Curve]) -> dict[str, list[Curve]]:
    found: dict[str, list[Curve]] = {}
    for curve in curves:
        found.setdefault(curve.searcher, []).append(curve)
    return found


def _build_chart(title: str, data: Sequence[Chart], x: Chart, y: Chart, **layout: Any) -> Chart:
    grid = {"gridcolor": "#e6e6e1", "zeroline": False, "automargin": True}
    return {"title": title, "data": list(data), "layout": {"xaxis": {**grid, **x}, "yaxis": {**grid, **y}, **layout}}


def _speedup_chart(
    curves: Curves, over: Literal["evaluations", "minutes"], confirmed: Sequence[Mapping[Any, Any]]
) -> Chart | None:
    data = _curve_traces(curves, over, 2)
    if not data:
        return None
    last = max(int(curve.evaluations[-1]) for seeds in curves.values() for curve in seeds)
    for index, name in enumerate(curves if over == "evaluations" else ()):
        shift = 0.012 * last * (index - (len(curves) - 1) / 2)
        data += _marker_traces(index, name, [line for line in confirmed if str(line["searcher"]) == name], shift)
    x, y = {"title": {"text": over}}, {"title": {"text": "speedup over float"}}
    title = f"Speedup of the incumbent over {over}; {BAND_LEGEND}"
    return _build_chart(title, data, x, y, shapes=[FLOAT_LINE])


def _hypervolume_chart(task: TaskResults) -> Chart | None:
    columns = ("evaluations", "minutes", "volume")
    data = _curve_traces(
        _curves_by_searcher(
            Curve(str(searcher), int(part["seed"].iloc[0]), *(part[name].to_numpy() for name in columns))
            for (searcher, _), part in hypervolume_frame([task]).groupby(["searcher", "seed"], sort=False)
        ),
        "evaluations",
        3,
    )
    x, y = {"title": {"text": "evaluations"}}, {"title": {"text": "hypervolume"}}
    return _build_chart(f"Hypervolume of latency and accuracy; {BAND_LEGEND}", data, x, y) if data else None


def _curve_traces(curves: Curves, over: Literal["evaluations", "minutes"], digits: int) -> list[Chart]:
    return [
        trace
        for index, (name, seeds) in enumerate(curves.items())
        for trace in _step_traces(index, name, seeds, over, digits)
    ]


def _step_traces(
    index: int, name: str, seeds: Sequence[Curve], over: Literal["evaluations", "minutes"], digits: int
) -> list[Chart]:
    """Return the step curve of a searcher and the band of its interval as traces of one legend group."""
    seed_x = [curve.evaluations if over == "evaluations" else curve.minutes for curve in seeds]
    grid, steps = median_steps(zip(seed_x, (curve.values for curve in seeds), strict=True))
    if not steps:
        return []
    places, last = grid.tolist(), max(float(each.max()) for each in seed_x)
    if places[-1] != last:  # the last incumbent remains until the end of the search
        places.append(last)
        steps.append(steps[-1])
    colour, line, _ = series_style(index)
    middle, low, high = (_as_floats(column) for column in zip(*steps, strict=True))
    shared = {"type": "scatter", "x": _as_floats(places), "legendgroup": name}
    edge = {**shared, **NO_HOVER_NO_LEGEND, "mode": "lines", "line": {"shape": "hv", "width": 0, "color": colour}}
    return [
        {**edge, "y": low},
        {**edge, "y": high, "fill": "tonexty", "fillcolor": _translucent(colour)},
        {
            **shared,
            "name": escape(name),
            "y": middle,
            "mode": "lines",
            "line": {"shape": "hv", "width": 2, "color": colour, "dash": PLOTLY_DASH_BY_LINE[line]},
            "customdata": [list(pair) for pair in zip(low, high, strict=True)],
            "hovertemplate": f"%{{x:.4~g}} {over}: %{{y:.{digits}f}} "
            f"[%{{customdata[0]:.{digits}f}}, %{{customdata[1]:.{digits}f}}]",
        },
    ]


def _marker_traces(index: int, name: str, marks: Sequence[Mapping[Any, Any]], shift: float) -> list[Chart]:
    """Return the confirmed speedups of a searcher at each budget."""
    if not marks:
        return []
    colour, _, mark = series_style(index)
    budgets, speedups, low, high = (
        np.array([line[key] for line in marks], dtype=float) for key in ("budget", "speedup", "low", "high")
    )
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": f"{escape(name)}, confirmed",
            "legendgroup": name,
            "showlegend": False,
            "x": _as_floats(budgets + shift),
            "y": _as_floats(speedups),
            "error_y": _error_bars(speedups, low, high, colour),
            "marker": {
                "color": colour,
                "symbol": PLOTLY_SYMBOL_BY_MARKER[mark],
                "size": 8,
                "line": {"color": "#fff", "width": 1},
            },
            "customdata": [_as_floats(three) for three in zip(budgets, low, high, strict=True)],
            "hovertemplate": "confirmed at %{customdata[0]}: %{y:.2f} [%{customdata[1]:.2f}, %{customdata[2]:.2f}]",
        }
    ]


def _latency_chart(task: TaskResults, labels: Mapping[str, str]) -> Chart | None:
    """Return a chart of the confirmation's samples by row, with the latency of the tables and the noise floor."""
    confirmed = [row for row in labels if row in task.summaries]
    if not confirmed:
        return None
    names, noise_floor = [labels[row] for row in confirmed], task.noise_floor
    samples_ms: dict[str, dict[int, list[float]]] = {row: {} for row in confirmed}
    for turn in valid_turns(task.events):
        if turn.row in samples_ms:
            samples_ms[turn.row].setdefault(turn.build, []).extend(turn.samples_ms)
    parts = [list(chain.from_iterable(builds.values())) for builds in samples_ms.values()]
    table_ms = [task.summaries[row].latency_ms.value for row in confirmed]
    low, first, third, high = np.array([np.quantile(part, [0.05, 0.25, 0.75, 0.95]) for part in parts]).T
    builds = [
        (place, median(values)) for place, row in enumerate(confirmed) for _, values in sorted(samples_ms[row].items())
    ]
    rows = list(range(len(confirmed)))
    shared: Chart = {"y": rows, "text": [escape(name) for name in names]}
    data: list[Chart] = [
        {**_sample_range_bars(shared, "5 to 95 %", low, high), "width": 0.06, "marker": {"color": series_style(0)[0]}},
        {**_sample_range_bars(shared, "middle half", first, third), "width": 0.4,
        "marker": {"color": series_style(5)[0]}},
        {"type": "scatter", "mode": "markers", "name": "builds", "x": _as_floats([value for _, value in builds]),
         "y": [place - 0.32 for place, _ in builds], "text": [escape(names[place]) for place, _ in builds],
         "marker": {"color": series_style(1)[0], "size": 5},
         "hovertemplate": "%{text}: a build at %{x:.4g} ms<extra></extra>"},
        {**shared, "type": "scatter", "mode": "markers", "name": "latency as in the tables", "x": _as_floats(table_ms),
         "marker": {"color": "#fff", "symbol": "diamond", "size": 8, "line": {"color": "#000", "width": 1}},
         "hovertemplate": "%{text}: %{x:.4g} ms, geometric mean over builds<extra></extra>"},
    ]  # fmt: skip
    ticks = [escape(truncate(name, MAX_LABEL_CHARS)) for name in names]
    y = {"tickvals": rows, "ticktext": ticks, "range": [len(confirmed) - 0.4, -0.7]}
    grey = (
        []
        if noise_floor is None
        else [_interval_band(table_ms[0] / (1 + noise_floor), table_ms[0] * (1 + noise_floor))]
    )
    note = "" if noise_floor is None else f"; grey: noise floor {noise_floor:.1%}"
    x, height = {"title": {"text": "ms"}}, 170 + 32 * len(confirmed)
    return _build_chart(f"Latency of the confirmation{note}", data, x, y, shapes=grey, height=height, barmode="overlay")


def _sample_range_bars(shared: Chart, name: str, low_ms: Any, high_ms: Any) -> Chart:
    return {
        **shared, "type": "bar", "orientation": "h", "name": name, "base": _as_floats(low_ms),
        "x": _as_floats(high_ms - low_ms), "textposition": "none",
        "customdata": [_as_floats(pair) for pair in zip(low_ms, high_ms, strict=True)],
        "hovertemplate": "%{text}: " + name + " %{customdata[0]:.4g} to %{customdata[1]:.4g} ms<extra></extra>",
    }  # fmt: skip


def _interval_band(low_ms: float, high_ms: float) -> Chart:
    place = {"x0": low_ms, "x1": high_ms, "yref": "paper", "y0": 0, "y1": 1}
    return {"type": "rect", **place, "fillcolor": "#bbbbbb", "opacity": 0.4, "layer": "below", "line": {"width": 0}}


def _pareto_chart(task: TaskResults, lines: pd.DataFrame, labels: Mapping[str, str]) -> Chart | None:
    points = close_intervals(lines)
    if points.empty or task.metric is None:
        return None
    metric = metric_name(task.metric)
    hover = "%{x:.4g} ms [%{customdata[0]:.4g}, %{customdata[1]:.4g}], " + escape(metric) + " %{y:.4f}"
    best, tried = pareto_front(points, task.higher_is_better), candidate_frame(task)
    grey = {"color": "#999999", "size": 4, "opacity": 0.6}
    data: list[Chart] = [
        {"type": "scatter", "mode": "markers", "name": candidate_label(task), "marker": grey, "hoverinfo": "skip",
         "x": _as_floats(tried["latency_ms"]), "y": _as_floats(tried["score"])},
        {"type": "scatter", "mode": "lines", "name": "front", **NO_HOVER_NO_LEGEND, "x": _as_floats(best["latency_ms"]),
         "y": _as_floats(best["score"]), "line": {"shape": "hv", "color": "#555555", "width": 1}},
    ]  # fmt: skip
    for index, row in enumerate(frame_rows(points.drop_duplicates("row"))):
        colour, _, mark = series_style(index)
        low, high = row["latency_low_ms"], row["latency_high_ms"]
        data.append({
            "type": "scatter", "mode": "markers", "name": escape(labels[row["row"]]),
            "x": _as_floats([row["latency_ms"]]), "y": _as_floats([row["score"]]),
            "error_x": _error_bars([row["latency_ms"]], [low], [high], _translucent(colour, 0.5)),
            "customdata": [_as_floats([low, high])],
            "marker": {"color": _translucent(colour, 0.35), "symbol": PLOTLY_SYMBOL_BY_MARKER[mark], "size": 9,
                       "line": {"color": colour, "width": 1.5}},
            "hovertemplate": hover,
        })  # fmt: skip
    x, y = {"title": {"text": "latency, ms"}}, {"title": {"text": escape(metric)}}
    return _build_chart(
        f"Latency against {metric}; bars: 95 %; grey: {candidate_label(task)}", data, x, y, height=360 + 10 * len(data)
    )


def _error_bars(value: Any, low: Any, high: Any, colour: str) -> Chart:
    middle = np.asarray(value, dtype=float)
    up, down = np.asarray(high, dtype=float) - middle, middle - np.asarray(low, dtype=float)
    return {
        "symmetric": False,
        "array": _as_floats(up),
        "arrayminus": _as_floats(down),
        "color": colour,
        "thickness": 1.5,
    }


def _translucent(colour: str, share: float = 0.12) -> str:
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},{share:g})"


def _as_floats(values: Any) -> list[float]:
    return [float(f"{value:.6g}") for value in np.asarray(values, dtype=float).tolist()]
