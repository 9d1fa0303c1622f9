"""Writer of all plots of a results folder; those of a task are kept while its records and the code are unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from harness.base.errors import UserError
from harness.base.files import from_json
from harness.base.progress import NullProgress, Observer
from harness.base.text import safe_file_name
from harness.report.frames import (
    candidate_frame,
    candidate_label,
    close_intervals,
    curve_frame,
    hypervolume_frame,
    main_frame,
    sample_frame,
)
from harness.report.plots import layer_plots, result_plots, study_plots
from harness.report.plots.result_plots import PLOT_FILE_FORMATS
from harness.report.report_table import frame_rows
from harness.report.tables.main import overview_frame
from harness.report.tables.searchers import budget_frame, rank_searchers
from harness.report.tables.transfer import transfer_frame
from harness.results.folder import Results, TaskResults, row_labels
from harness.results.manifest import FileTable, find_changed_files, read_manifest
from harness.results.scores import metric_name
from harness.results.task_files import AttributionReport, read_attributions


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotFile:
    """Plot that was written in all `PLOT_FILE_FORMATS`.

    Attributes:
        task: Name of its task; "" for the whole experiment.
        path: The SVG; files of the other formats are next to it.
        on_page: Whether the page shows the SVG; it draws the other plots itself.
    """

    title: str
    task: str
    path: Path
    on_page: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its files."""
        return tuple(self.path.with_suffix(f".{kind}").name for kind in PLOT_FILE_FORMATS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """Plots of a task in the manifest of a report.

    Attributes:
        complete: Whether all plots were drawn, not only those that the page shows.
        plots: Title, name of the SVG, and `on_page` of each.
    """

    inputs: str
    complete: bool = False
    plots: tuple[tuple[str, str, bool], ...] = ()


class PlotCache:
    """Plots of the tasks of a report by the digest of their inputs; its entries are part of the report's manifest.

    Args:
        out: Folder of the report, from whose manifest the entries are read.
        inputs: Digest of the inputs by task; plots of other tasks are drawn each time and not recorded.
    """

    def __init__(self, out: Path, inputs: Mapping[str, str]) -> None:
        self._out, self._inputs = out, inputs
        self._files: FileTable = {}
        self._known: dict[str, _Entry] = {}
        self._entries: dict[str, _Entry] = {}
        try:
            manifest = read_manifest(out) or {"files": {}}
            self._known = {task: from_json(_Entry, body) for task, body in manifest.get("plots", {}).items()}
            self._files = manifest["files"]
        except (UserError, ValueError, AttributeError):  # damaged, so everything is drawn again
            self._known = {}

    @property
    def entries(self) -> dict[str, Any]:
        """Entries of the tasks drawn so far, for the manifest."""
        return {task: asdict(entry) for task, entry in self._entries.items()}

    @property
    def complete(self) -> bool:
        """True if the last report has all plots of every task."""
        return all(entry.complete for entry in self._known.values())

    def is_unchanged(self, task: str) -> bool:
        """Return whether the last report was made from the same inputs of a task."""
        return task in self._known and self._known[task].inputs == self._inputs.get(task)

    def draw(self, task: str, draw: Callable[[], Iterable[PlotFile]], *, complete: bool) -> list[PlotFile]:
        """Return the plots of a task, and call `draw` for them unless they are up to date.

        Args:
            complete: Whether `draw` writes all plots, not only those that the page shows.
        """
        entry = self._known.get(task, _Entry(inputs=""))
        plots = [
            PlotFile(title=t, task=task, path=self._out / name, on_page=on_page) for t, name, on_page in entry.plots
        ]
        names = {name for plot in plots for name in plot.names}
        recorded = {name: self._files[name] for name in names & self._files.keys()}
        inside = all(plot.path.parent == self._out for plot in plots)  # the manifest may be a stranger's
        is_intact = inside and len(recorded) == len(names) and not any(find_changed_files(self._out, recorded))
        if self.is_unchanged(task) and is_intact and entry.complete >= complete:
            self._entries[task] = entry
            return plots
        plots = list(draw())
        for name in recorded.keys() - {name for plot in plots for name in plot.names}:
            (self._out / name).unlink(missing_ok=True)  # drawn from other records
        if task in self._inputs:
            lines = tuple((plot.title, plot.path.name, plot.on_page) for plot in plots)
            self._entries[task] = _Entry(inputs=self._inputs[task], complete=complete, plots=lines)
        return plots


MAX_TRANSFER_MAPS = 20  # further maps are drawn only with `all_plots`; the table has their figures


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
        cache: Plots that need not be drawn again; None: all are drawn.
        all_plots: False leaves out the plots of tasks that have an interactive form on the page.

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
    labels = row_labels(task, frame_rows(main))
    confirmed = [row for row in labels if row in task.summaries]
    samples = dict(iter(sample_frame([task]).groupby("row")))
    rows = {labels[row]: samples[row] for row in confirmed}
    table_ms = {labels[row]: task.summaries[row].latency_ms.value for row in confirmed}
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
    """Draw latency by layer, effect of each pattern, and gain against drop of a row, and yield the written plots.

    A plot whose figures were not measured is left out.

    Args:
        task: Name of the task, for titles and file names.
        out: Folder of the files.
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
