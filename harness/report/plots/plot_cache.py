"""Plots of tasks in the folder of a report, which are kept while the records and the code behind them are unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.errors import UserError
from harness.records import from_json
from harness.results_dir.manifest import FileTable, find_changed_files, read_manifest

PLOT_FILE_FORMATS = ("png", "svg", "pdf")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotFile:
    """Plot that was written in all `PLOT_FILE_FORMATS`.

    Attributes:
        task: Name of its task; "" for the whole experiment.
        path: Path of the SVG.
        on_page: The page shows the SVG; it draws the other plots itself.
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
        inputs: Digest of their inputs.
        complete: Not only the plots that the page shows.
        plots: Title, name of the SVG, and `on_page` of each.
    """

    inputs: str
    complete: bool = False
    plots: tuple[tuple[str, str, bool], ...] = ()


class PlotCache:
    """Plots of the tasks of a report by the digest of their inputs; its entries are part of the report's manifest.

    Args:
        out: Folder of the report.
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
            task: Name of the task.
            draw: Writes the plots.
            complete: `draw` writes not only the plots that the page shows.
        """
        known = self._known.get(task, _Entry(inputs=""))
        plots = [
            PlotFile(title=t, task=task, path=self._out / name, on_page=on_page) for t, name, on_page in known.plots
        ]
        names = {name for plot in plots for name in plot.names}
        recorded = {name: self._files[name] for name in names & self._files.keys()}
        inside = all(plot.path.parent == self._out for plot in plots)  # the manifest may be a stranger's
        whole = inside and len(recorded) == len(names) and not any(find_changed_files(self._out, recorded))
        if self.is_unchanged(task) and whole and known.complete >= complete:
            self._entries[task] = known
            return plots
        plots = list(draw())
        for name in recorded.keys() - {name for plot in plots for name in plot.names}:
            (self._out / name).unlink(missing_ok=True)  # of other records
        if task in self._inputs:
            lines = tuple((plot.title, plot.path.name, plot.on_page) for plot in plots)
            self._entries[task] = _Entry(inputs=self._inputs[task], complete=complete, plots=lines)
        return plots
