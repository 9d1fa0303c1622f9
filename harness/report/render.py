"""Writer of reports, and `load`, which returns the frames of a results folder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Group
from rich.text import Text

from harness.base.errors import UserError
from harness.base.files import explain_write_errors, file_sha256, write_json, write_text
from harness.base.paths import user_key
from harness.base.progress import NullProgress, Observer
from harness.base.text import printable
from harness.report.frames import (
    curve_frame,
    finalist_frame,
    hypervolume_frame,
    main_frame,
    precision_frame,
    sample_frame,
    variance_frame,
)
from harness.report.page.index_page import render_index
from harness.report.plots.plot_files import PlotCache, draw_plots
from harness.report.report_table import ReportTable, drop_repeated_lines, render_plain_text, write_table
from harness.report.tables.catalog import build_tables
from harness.report.tables.decision import decision_frame, tool_frame
from harness.report.tables.main import overview_frame
from harness.report.tables.notes import partial_note, progress_note
from harness.report.tables.paired_choices import ablation_frame, fixed_frame
from harness.report.tables.searchers import budget_frame, cost_frame, pair_frame, score_frame, target_frame
from harness.report.tables.transfer import transfer_frame
from harness.results.folder import Results
from harness.results.folder import load as load_results
from harness.results.manifest import MANIFEST_FILE, describe_files, find_changed_files, list_files, read_manifest
from harness.results.task_files import GRAPH_FILE, exported, read_graph, sizes_of, write_graph

MAX_TASKS_WITH_PLOTS = 20
"""Number of tasks up to which plots that the page draws itself are by default written as files too."""
PRINTED_TABLES = ("summary", "main", "budget", "cost")
TASK_FOLDER_FILES = ("task.json", "env.json", "stopped.txt")  # a folder with one of these is that of a task
RECORD_GLOBS = ("*", "runs/*", "explain/*")
RECORD_SUFFIXES = frozenset({".gz", ".json", ".jsonl", ".txt", ".yaml"})
CODE_SUFFIXES = frozenset({".css", ".j2", ".js", ".py"})
fast_small_frames = pd.option_context("mode.string_storage", "python")
"""Decorator that disables strings in Arrow format, which are slower per cell in frames of few rows."""
REPORT_LIBRARIES = ("jinja2", "matplotlib", "numpy", "pandas", "scipy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frames:
    """Unrounded figures of a results folder, finished or not; each attribute is described at the function `NAME_frame`.

    Attributes:
        main: Methods of each task.
        overview: Speedups by method with geometric means.
        finalists: All confirmed placements of searches.
        precision: Methods with a score, or of several precisions.
        decision: Float precisions, PTQ tools, fixed placements, and the best found.
        tools: Methods of tasks with rows of other tools, also scored as their files describe them.
        budget: Confirmed speedup by searcher and budget.
        fixed: Gain over the best fixed row of the task.
        targets: Evaluations and minutes to a share of the best gain.
        cost: Time of the searches.
        curves: Incumbent after every evaluation.
        volumes: Hypervolume after every scored evaluation.
        scores: Searchers against random search.
        pairs: Searchers in pairs over all tasks.
        ablation: Searchers against variants of themselves.
        transfer: Placements transferred to other backends and models.
        samples: Latencies of the confirmation.
        variance: Variance of inferences, turns and builds.
        complete: Whether nothing of the experiment is missing.
    """

    main: pd.DataFrame
    overview: pd.DataFrame
    finalists: pd.DataFrame
    precision: pd.DataFrame
    decision: pd.DataFrame
    tools: pd.DataFrame
    budget: pd.DataFrame
    fixed: pd.DataFrame
    targets: pd.DataFrame
    cost: pd.DataFrame
    curves: pd.DataFrame
    volumes: pd.DataFrame
    scores: pd.DataFrame
    pairs: pd.DataFrame
    ablation: pd.DataFrame
    transfer: pd.DataFrame
    samples: pd.DataFrame
    variance: pd.DataFrame
    complete: bool


@fast_small_frames
def load(folder: Path | str) -> Frames:
    """Read a results folder into frames.

    Raises:
        UserError: It is no results folder, has another schema, or is damaged.
    """
    results = load_results(Path(folder))
    main, budgets = main_frame(results), budget_frame(results)
    return Frames(
        main=main,
        overview=overview_frame(main, budgets),
        finalists=finalist_frame(results),
        precision=precision_frame(main),
        decision=decision_frame(results, main),
        tools=tool_frame(results, main),
        budget=budgets,
        fixed=fixed_frame(results),
        targets=target_frame(results),
        cost=cost_frame(results),
        curves=curve_frame(results.tasks),
        volumes=hypervolume_frame(results.tasks),
        scores=score_frame(results),
        pairs=pair_frame(results),
        ablation=ablation_frame(results),
        transfer=transfer_frame(results),
        samples=sample_frame(results.tasks),
        variance=variance_frame(results),
        complete=results.complete,
    )


@fast_small_frames
def write_report(
    folder: Path, *, task_plots: bool | None = None, observer: Observer | None = None, base: Path | None = None
) -> tuple[Results, list[ReportTable]]:
    """Write tables, plots and the page into `folder/report`; return the results and all tables.

    If the exported models exist, the graph of each task is stored in `TASK/graph.json`, so that the same page can be
    written without them; it is computed again if a model changed. The report of an unfinished run is marked
    UNFINISHED. Plots of tasks whose records did not change since the last report are not drawn again.

    Args:
        task_plots: Write the plots of each task that the page draws itself as files, too; None: if there are at most
            `MAX_TASKS_WITH_PLOTS` tasks.
        base: Folder from which relative paths of the experiment start, for the commands of the page.

    Raises:
        UserError: The folder is no results folder or damaged, or the report cannot be written.
    """
    digest, inputs = _input_digests(folder)  # before anything is read, because a run may write meanwhile
    results = load_results(folder)
    out, observer = folder / "report", observer or NullProgress()
    cache = PlotCache(out, inputs)
    with explain_write_errors(out):
        with observer.work("graphs", len(results.tasks)) as progress:
            for task in results.tasks:  # one at a time to save memory
                known = sizes_of(task)
                if any(name not in known and exported(task, row).exists() for name, row in task.rows.items()):
                    from harness.report.page.graph_layout import load_task_graph  # imports ONNX

                    if (graph := load_task_graph(task)) is not None:
                        write_graph(task, graph)
                progress.advance(task.name)
        tables = write_tables(results, out)
        all_plots = _wants_task_plots(folder, task_plots)
        pictures = draw_plots(results, out, cache, all_plots=all_plots, observer=observer)
        write_text(out / "index.html", render_index(results, tables, read_graph, pictures, base))
        files = describe_files(out, list_files(out))
        write_json(out / MANIFEST_FILE, {"inputs": digest, "files": files, "plots": cache.entries})
    return results, tables


def _wants_task_plots(folder: Path, task_plots: bool | None) -> bool:
    tasks = len(list(folder.glob("*/task.json")))
    return tasks <= MAX_TASKS_WITH_PLOTS if task_plots is None else task_plots


@fast_small_frames
def current_report(folder: Path, *, task_plots: bool | None = None) -> tuple[Results, list[ReportTable]] | None:
    """Return what `write_report` would return if its files are up to date, else None.

    Args:
        task_plots: See `write_report`.

    Raises:
        UserError: See `harness.results.folder.load`.
    """
    out = folder / "report"
    try:
        manifest = read_manifest(out)
        if manifest is None or any(find_changed_files(out, manifest["files"])):
            return None
    except (OSError, UserError):  # a damaged report is written again
        return None
    digest, tasks = _input_digests(folder)
    drawn = PlotCache(out, tasks).complete
    if manifest.get("inputs") != digest or (_wants_task_plots(folder, task_plots) and not drawn):
        return None
    results = load_results(folder)
    return results, list(build_tables(results))


def _input_digests(folder: Path) -> tuple[str, dict[str, str]]:
    """Return a digest of all inputs of the report, and of those of each task.

    Inputs are the content of records and code, the names of exported models (their digests are in `rows.json`), and the
    secret key of the user: a report that came with a folder from a stranger, whose page may contain any script, is thus
    written again.
    """
    common = hashlib.sha256(user_key())
    for name in REPORT_LIBRARIES:
        common.update(f"{name} {version(name)}\n".encode())
    code = Path(__file__).parents[1]
    _update_digest(common, code, (path for path in sorted(code.rglob("*")) if path.suffix in CODE_SUFFIXES))
    # The page names the folders to deploy.
    _update_digest(common, folder, (folder / "experiment.yaml", *sorted(folder.glob("ship/*/SHA256SUMS"))))
    tasks = {}
    for task in sorted({path.parent for name in TASK_FOLDER_FILES for path in folder.glob(f"*/{name}")}):
        own = common.copy()
        # Records of `qdq run` and `qdq explain`, without `graph.json` of the report.
        records = sorted(path for pattern in RECORD_GLOBS for path in task.glob(pattern))
        records = [path for path in records if path.name != GRAPH_FILE and path.suffix in RECORD_SUFFIXES]
        _update_digest(own, folder, filter(Path.is_file, records))
        for path in sorted(task.glob("models/*.onnx")):
            own.update(f"{path.relative_to(folder)}\n".encode())
        tasks[task.name] = own.hexdigest()
    common.update(f"{folder}\n{tasks}".encode())  # the page shows the path
    return common.hexdigest(), tasks


def _update_digest(digest: Any, folder: Path, paths: Iterable[Path]) -> None:
    for path in paths:
        try:
            content = file_sha256(path)
        except OSError:  # removed by a run that continues
            content = "gone"
        digest.update(f"{path.relative_to(folder)} {content}\n".encode())


def write_tables(results: Results, out: Path) -> list[ReportTable]:
    """Write every table that has a row, as Markdown, CSV and LaTeX; remove the files of tables without rows."""
    tables = list(build_tables(results))
    for table in tables:
        write_table(table, out)
    written = {table.name for table in tables}
    for path in out.glob("*.md"):
        files = [path.with_suffix(end) for end in (".md", ".csv", ".tex")]
        if path.stem not in written and all(file.exists() for file in files):
            for file in files:
                file.unlink()
    return tables


def report_text(results: Results, tables: Sequence[ReportTable]) -> str:
    """Return the printed tables (one summary, or main, budget and cost) as plain text, each line of notes once."""
    before, printed, after = _printed_parts(results, tables)
    return "\n\n".join(filter(None, [before, *map(render_plain_text, printed), after]))


def report_renderable(results: Results, tables: Sequence[ReportTable]) -> Group:
    """Return the printed tables (one summary, or main, budget and cost) for a terminal."""
    before, printed, after = _printed_parts(results, tables)
    notes = [[Text(printable(note), style="yellow")] if note else [] for note in (before, after)]
    return Group(*notes[0], *printed, *notes[1])


def _printed_parts(results: Results, tables: Sequence[ReportTable]) -> tuple[str, list[ReportTable], str]:
    """Return the note on the progress of the run, the tables that are printed, and the note on a run without tables."""
    printed = drop_repeated_lines(table for table in tables if table.name in PRINTED_TABLES)
    return progress_note(results), printed, "" if tables else partial_note(results)
