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
from harness.report.frames import main_frame
from harness.report.plots import layer_plots, study_plots
from harness.report.plots.charts import draw_chart, task_charts
from harness.report.plots.figures import PLOT_FILE_FORMATS
from harness.report.tables.main import overview_frame
from harness.report.tables.searchers import budget_frame, rank_searchers
from harness.report.tables.transfer import transfer_frame
from harness.results.folder import Results, TaskResults
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

    Attributes:
        entries: Entries of the tasks drawn so far, for the manifest.
        complete: Whether the last report has all plots of every task.
    """

    def __init__(self, out: Path, inputs: Mapping[str, str]) -> None:
        self._out, self._inputs = out, inputs
        self._files: FileTable = {}
        self._known: dict[str, _Entry] = {}
        self.entries: dict[str, dict[str, Any]] = {}
        try:
            manifest = read_manifest(out) or {"files": {}}
            self._known = {task: from_json(_Entry, body) for task, body in manifest.get("plots", {}).items()}
            self._files = manifest["files"]
        except (UserError, ValueError, AttributeError):  # damaged, so everything is drawn again
            self._known = {}
        self.complete = all(entry.complete for entry in self._known.values())

    def draw(self, task: str, draw: Callable[[], Iterable[PlotFile]], *, complete: bool) -> list[PlotFile]:
        """Return the plots of a task, and call `draw` for them unless they are up to date.

        Args:
            complete: Whether `draw` writes all plots, not only those that the page shows.
        """
        entry, inputs = self._known.get(task), self._inputs.get(task)
        kept = () if entry is None else entry.plots
        names = {_file_name(name, kind) for _, name, _ in kept for kind in PLOT_FILE_FORMATS}
        recorded = {name: self._files[name] for name in names & self._files.keys()}
        if entry is not None and entry.inputs == inputs and entry.complete >= complete:
            inside = all((self._out / name).parent == self._out for _, name, _ in kept)  # it may be a stranger's
            if inside and len(recorded) == len(names) and not any(find_changed_files(self._out, recorded)):
                self.entries[task] = asdict(entry)
                return [
                    PlotFile(title=title, task=task, path=self._out / name, on_page=shown)
                    for title, name, shown in kept
                ]
        plots = list(draw())
        drawn = {_file_name(plot.path.name, kind) for plot in plots for kind in PLOT_FILE_FORMATS}
        for name in recorded.keys() - drawn:
            (self._out / name).unlink(missing_ok=True)  # drawn from other records
        if inputs is not None:
            lines = tuple((plot.title, plot.path.name, plot.on_page) for plot in plots)
            self.entries[task] = asdict(_Entry(inputs=inputs, complete=complete, plots=lines))
        return plots


def _file_name(svg: str, kind: str) -> str:
    return Path(svg).with_suffix(f".{kind}").name


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
    """
    main, budgets, cache = main_frame(results), budget_frame(results), cache or PlotCache(out, {})
    files = list(_draw_study(results, overview_frame(main, budgets), out, all_plots=all_plots))
    with (observer or NullProgress()).work("plots", len(results.tasks)) as progress:
        for task in results.tasks:
            draw = partial(_draw_task, task, main, budgets, out, all_plots=all_plots)
            files += cache.draw(task.name, draw, complete=all_plots)
            progress.advance(task.name)
    return [file for file in files if file.on_page]


def _draw_study(results: Results, overview: pd.DataFrame, out: Path, *, all_plots: bool) -> Iterator[PlotFile]:
    for number, ((device, quantized), part) in enumerate(overview.groupby(["device", "quantized"], sort=False), 1):
        name = "overview" if number == 1 else f"overview-{number}"
        title = f"Speedups at a glance, {quantized}, {device}"
        study_plots.draw_speedups(part, title, out / name)
        yield PlotFile(title=title, task="", path=out / f"{name}.svg")
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


def _draw_task(
    task: TaskResults, main: pd.DataFrame, budgets: pd.DataFrame, out: Path, *, all_plots: bool
) -> Iterator[PlotFile]:
    if all_plots:
        charts, own = task_charts(task, main, budgets), budgets[budgets["task"] == task.name]
        for name, chart in charts.items():
            draw_chart(chart, task.name, out / f"{name}-{task.name}")
        if len(own):
            study_plots.draw_budget_bars(own, task.name, out / f"budget-{task.name}")
        for name in (*charts, *(["budget"] if len(own) else [])):
            path = out / f"{name}-{task.name}.svg"
            yield PlotFile(title=task.name, task=task.name, path=path, on_page=False)
    for report in read_attributions(task):
        yield from draw_attribution(task.name, report, out)


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
