"""Writer of all plots of a results folder."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pandas as pd

from harness.progress import NullProgress, Observer
from harness.report.frames.confirmation import sample_frame
from harness.report.frames.curves import (
    candidate_frame,
    candidate_label,
    close_intervals,
    curve_frame,
    hypervolume_frame,
)
from harness.report.frames.main_frame import main_frame
from harness.report.load.display_names import metric_name, row_labels
from harness.report.load.results import Results, TaskResults
from harness.report.load.task_files import AttributionReport, read_attributions
from harness.report.plots import layer_plots, result_plots, study_plots
from harness.report.plots.plot_cache import PlotCache, PlotFile
from harness.report.tables.budget import budget_frame
from harness.report.tables.overview import overview_frame
from harness.report.tables.searchers import rank_searchers
from harness.report.tables.transfer import transfer_frame
from harness.text import safe_file_name

MAX_TRANSFER_MAPS = 20  # more are drawn only if all plots are asked for; the table has their figures


def draw_plots(
    results: Results,
    out: Path,
    cache: PlotCache | None = None,
    *,
    all_plots: bool = True,
    observer: Observer | None = None,
) -> list[PlotFile]:
    """Write plots as PNG, SVG and PDF; return those without an interactive form on the page.

    Args:
        results: The results.
        out: Folder of the report.
        cache: Plots that need not be drawn again; None: all are drawn.
        all_plots: False leaves out the plots of tasks that have an interactive form on the page.
        observer: Shows the progress over tasks.

    Raises:
        UserError: An attribution in the folder is damaged.
    """
    main, budgets, cache = main_frame(results), budget_frame(results), cache or PlotCache(out, {})
    files = [*_draw_overview(overview_frame(main, budgets), out), *_draw_study(results, out, all_plots=all_plots)]
    with (observer or NullProgress()).work("plots", len(results.tasks)) as progress:
        for task in results.tasks:
            rows, own_budgets = main[main["task"] == task.name], budgets[budgets["task"] == task.name]
            draw = partial(_draw_task, task, rows, own_budgets, out, all_plots=all_plots)
            files += cache.draw(task.name, draw, complete=all_plots)
            progress.advance(task.name)
    return [file for file in files if file.on_page]


def _draw_task(
    task: TaskResults, main: pd.DataFrame, budgets: pd.DataFrame, out: Path, *, all_plots: bool
) -> Iterator[PlotFile]:
    if all_plots:
        drawn = [*_draw_searches(task, budgets, out), *_draw_confirmed(task, main, out)]
        yield from (PlotFile(title=task.name, task=task.name, path=path, on_page=False) for path in drawn)
    for report in read_attributions(task):
        yield from draw_attribution(task.name, report, out)


def _draw_overview(overview: pd.DataFrame, out: Path) -> Iterator[PlotFile]:
    for number, ((device, quantized), part) in enumerate(overview.groupby(["device", "quantized"], sort=False), 1):
        name = "overview" if number == 1 else f"overview-{number}"
        title = f"Speedups at a glance, {quantized}, {device}"
        study_plots.draw_speedups(part, title, out / name)
        yield PlotFile(title=title, task="", path=out / f"{name}.svg")


def _draw_study(results: Results, out: Path, *, all_plots: bool) -> Iterator[PlotFile]:
    ranks = rank_searchers(results)
    if ranks is not None:
        title = "; ".join(filter(None, ["Searchers by mean rank", ranks.untested_reason]))
        study_plots.draw_critical_difference(ranks, title, out / "ranks")
        yield PlotFile(title=title, task="", path=out / "ranks.svg")
    maps = list(transfer_frame(results).groupby(["across", "within", "precision"], sort=False))
    for (_, within, precision), part in maps if all_plots or len(maps) <= MAX_TRANSFER_MAPS else ():
        name = f"transfer-{safe_file_name(f'{within}-{precision}')}"
        study_plots.draw_transfer_map(part, f"{within}, {precision}", out / name)
        yield PlotFile(title=f"Transfer: {within}, {precision}", task="", path=out / f"{name}.svg")


def _draw_searches(task: TaskResults, budgets: pd.DataFrame, out: Path) -> Iterator[Path]:
    curves, volumes = curve_frame([task]), hypervolume_frame([task])
    if len(curves):
        result_plots.draw_curves(curves, task.name, out / f"anytime-{task.name}", confirmed=budgets)
        result_plots.draw_curves(curves, task.name, out / f"anytime-minutes-{task.name}", over="minutes")
        yield from (out / f"anytime-{task.name}.svg", out / f"anytime-minutes-{task.name}.svg")
    if len(volumes):
        result_plots.draw_curves(volumes, task.name, out / f"volume-{task.name}", value="volume")
        yield out / f"volume-{task.name}.svg"
    if len(budgets):
        result_plots.draw_budget_bars(budgets, task.name, out / f"budget-{task.name}")
        yield out / f"budget-{task.name}.svg"


def _draw_confirmed(task: TaskResults, main: pd.DataFrame, out: Path) -> Iterator[Path]:
    labels = row_labels(task, main.to_dict("records"))
    known = [row for row in labels if row in task.summaries]
    samples = dict(iter(sample_frame([task]).groupby("row")))
    rows = {labels[row]: samples[row] for row in known}
    table_ms = {labels[row]: task.summaries[row].latency_ms.value for row in known}
    if rows:
        result_plots.draw_latencies(rows, table_ms, task.noise_floor, task.name, out / f"latency-{task.name}")
        yield out / f"latency-{task.name}.svg"
    points = close_intervals(main)
    if len(points) and task.metric is not None:
        words = {"title": task.name, "metric": metric_name(task.metric), "tried": candidate_label(task)}
        path = out / f"pareto-{task.name}"
        points = points.assign(label=points["row"].map(labels))
        result_plots.draw_pareto(points, candidate_frame(task), words, path, higher=task.higher_is_better)
        yield out / f"pareto-{task.name}.svg"


def draw_attribution(task: str, report: AttributionReport, out: Path) -> Iterator[PlotFile]:
    """Draw the attribution of a row as far as it was measured, and yield the plots.

    Args:
        task: Name of the task.
        out: Output folder.
    """
    name, title = f"{task}-{safe_file_name(report.row)}", f"{task}: {report.method}"
    parts = layer_plots.waterfall_frame(report.before, report.after)
    if len(parts):
        layer_plots.draw_waterfall(parts, title, out / f"waterfall-{name}")
        yield PlotFile(title=f"Latency by layer, {report.method}", task=task, path=out / f"waterfall-{name}.svg")
    if any(effect.ratio is not None for effect in report.patterns):
        layer_plots.draw_sensitivity(report.patterns, report.noise_floor, title, out / f"sensitivity-{name}")
        yield PlotFile(title=f"Patterns of {report.method}", task=task, path=out / f"sensitivity-{name}.svg")
    if any(effect.ratio is not None and effect.drop is not None for effect in report.patterns):
        metric = metric_name(report.metric)
        layer_plots.draw_gain_and_drop(report, metric, title, out / f"price-{name}")
        heading = f"Gain of patterns of {report.method}, and their cost in {metric}"
        yield PlotFile(title=heading, task=task, path=out / f"price-{name}.svg")
