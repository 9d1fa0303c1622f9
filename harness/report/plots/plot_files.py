"""Draws every plot of a results folder that there is something for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from harness.report.frames.budget_frames import budget_frame, curve_frame
from harness.report.frames.confirmation_samples import sample_frame
from harness.report.frames.hypervolume import hypervolume_frame
from harness.report.frames.layer_waterfall import waterfall_frame
from harness.report.frames.main_frame import main_frame
from harness.report.frames.pareto_points import candidate_frame, candidate_label, close_intervals
from harness.report.frames.searcher_statistics import rank_searchers
from harness.report.frames.speedup_overview import overview_frame
from harness.report.frames.transfer import transfer_frame
from harness.report.load.attribution_store import AttributionReport, read_attributions
from harness.report.load.display_names import metric_name, row_labels
from harness.report.load.results import CellResults, Results
from harness.report.plots import layer_plots, result_plots, study_plots

__all__ = ["PlotFile", "draw_attribution", "draw_plots", "read_task_attributions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotFile:
    """A plot that the page shows as it was drawn.

    Attributes:
        cell: The cell that it belongs to; "" for the whole experiment.
        path: Of the SVG.
    """

    title: str
    cell: str
    path: Path


def draw_plots(results: Results, out: Path) -> list[PlotFile]:
    """Write the plots as PNG and SVG; gives those that the page has no interactive form of.

    Raises:
        UserError: An explanation in the folder is damaged.
    """
    main, budgets, samples = main_frame(results), budget_frame(results), sample_frame(results)
    pictures = [*_draw_overview(overview_frame(main, budgets), out), *_draw_study(results, out)]
    for cell in results.cells:
        marks = budgets[budgets["cell"] == cell.name]
        _draw_searches(cell, marks, out)
        _draw_confirmed(cell, main[main["cell"] == cell.name], samples[samples["cell"] == cell.name], out)
        for found in read_task_attributions(cell):
            pictures += draw_attribution(cell.name, found, out)
    return pictures


def read_task_attributions(cell: CellResults) -> Iterator[AttributionReport]:
    """The explanations of rows that are still what they were."""
    return read_attributions(cell.folder, {row: facts.sha256 for row, facts in cell.rows.items()})


def _draw_overview(overview: pd.DataFrame, out: Path) -> Iterator[PlotFile]:
    """A picture for each device, as the table of the overview has it."""
    for number, ((device, quantized), part) in enumerate(overview.groupby(["device", "quantized"], sort=False), 1):
        name = "overview" if number == 1 else f"overview-{number}"
        title = f"Speedups at a glance, {quantized}, {device}"
        study_plots.draw_speedups(part, title, out / name)
        yield PlotFile(title=title, cell="", path=out / f"{name}.svg")


def _draw_study(results: Results, out: Path) -> Iterator[PlotFile]:
    """What goes over all cells."""
    found = rank_searchers(results)
    if found is not None:
        title = "; ".join(filter(None, ["Searchers by mean rank", found.untested_reason]))
        study_plots.draw_critical_difference(found, title, out / "ranks")
        yield PlotFile(title=title, cell="", path=out / "ranks.svg")
    transfer = transfer_frame(results)
    for (_, within, precision), part in transfer.groupby(["across", "within", "precision"], sort=False):
        name = f"transfer-{_safe_file_name(f'{within}-{precision}')}"
        study_plots.draw_transfer_map(part, f"{within}, {precision}", out / name)
        yield PlotFile(title=f"Transfer: {within}, {precision}", cell="", path=out / f"{name}.svg")


def _draw_searches(cell: CellResults, marks: pd.DataFrame, out: Path) -> None:
    curves, volumes = curve_frame([cell]), hypervolume_frame([cell])
    if len(curves):
        result_plots.draw_anytime(curves, cell.name, out / f"anytime-{cell.name}", confirmed=marks)
        result_plots.draw_anytime(curves, cell.name, out / f"anytime-minutes-{cell.name}", over="minutes")
    if len(volumes):
        study_plots.draw_hypervolumes(volumes, cell.name, out / f"volume-{cell.name}")
    if len(marks):
        result_plots.draw_budget_bars(marks, cell.name, out / f"budget-{cell.name}")


def _draw_confirmed(cell: CellResults, main: pd.DataFrame, samples: pd.DataFrame, out: Path) -> None:
    labels = row_labels(cell, main)
    known = [row for row in labels if row in cell.summaries]
    rows = {labels[row]: samples[samples["row"] == row] for row in known}
    table_ms = {labels[row]: cell.summaries[row].latency_ms.value for row in known}
    if rows:
        result_plots.draw_latencies(rows, table_ms, cell.floor, cell.name, out / f"latency-{cell.name}")
    points = close_intervals(main)
    if len(points) and cell.metric is not None:
        words = {"title": cell.name, "metric": metric_name(cell.metric), "tried": candidate_label(cell)}
        path = out / f"pareto-{cell.name}"
        points = points.assign(label=points["row"].map(labels))
        result_plots.draw_pareto(points, candidate_frame(cell), words, path, higher=cell.higher_is_better)


def draw_attribution(cell: str, found: AttributionReport, out: Path) -> Iterator[PlotFile]:
    """What is known of a row, as pictures.

    Args:
        cell: Name of its cell.
        found: The explanation.
        out: Folder.
    """
    name, about = f"{cell}-{_safe_file_name(found.row)}", f"{cell}: {found.method}"
    parts = waterfall_frame(found.before, found.after)
    if len(parts):
        layer_plots.draw_waterfall(parts, about, out / f"waterfall-{name}")
        yield PlotFile(title=f"Latency by layer, {found.method}", cell=cell, path=out / f"waterfall-{name}.svg")
    if any(effect.ratio is not None for effect in found.patterns):
        layer_plots.draw_sensitivity(found.patterns, found.floor, about, out / f"sensitivity-{name}")
        yield PlotFile(title=f"Patterns of {found.method}", cell=cell, path=out / f"sensitivity-{name}.svg")
    if any(effect.ratio is not None and effect.drop is not None for effect in found.patterns):
        metric = metric_name(found.metric)
        layer_plots.draw_gain_and_drop(found, metric, about, out / f"price-{name}")
        title = f"What patterns of {found.method} give, and cost in {metric}"
        yield PlotFile(title=title, cell=cell, path=out / f"price-{name}.svg")


def _safe_file_name(name: str) -> str:
    """A name as part of a file's."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)[:100]
