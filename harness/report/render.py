"""Writer of a complete report, which also returns its frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from rich.console import Group
from rich.text import Text

from harness.report.frames.budget_frames import budget_frame, cost_frame, curve_frame, target_frame
from harness.report.frames.component_ablation import ablation_frame
from harness.report.frames.confirmation_samples import sample_frame, variance_frame
from harness.report.frames.decision import decision_frame
from harness.report.frames.gain_over_fixed import fixed_frame
from harness.report.frames.hypervolume import hypervolume_frame
from harness.report.frames.main_frame import finalist_frame, main_frame, precision_frame
from harness.report.frames.searcher_statistics import pair_frame, score_frame
from harness.report.frames.speedup_overview import overview_frame
from harness.report.frames.transfer import transfer_frame
from harness.report.load.graph_store import write_graph
from harness.report.load.results import Results
from harness.report.load.results import load as load_results
from harness.report.page.graph_snapshots import load_task_graph
from harness.report.page.index_page import render_index
from harness.report.plots.plot_files import draw_plots
from harness.report.report_cache import compute_inputs_digest, is_up_to_date, write_inputs_digest
from harness.report.report_table import (
    ReportTable,
    drop_repeated_lines,
    escape_control_characters,
    render_plain_text,
    write_table,
)
from harness.report.tables.notes import partial_note, progress_note
from harness.report.tables.table_layouts import build_tables
from harness.report.tables.terminal_table import TerminalTable
from harness.results_dir.io import explain_write_errors, write_text

__all__ = [
    "Frames", "current_report", "load", "render", "report_renderable", "report_text", "write_report",
    "write_tables",
]  # fmt: skip

PRINTED_TABLES = ("main", "budget", "cost")
"""Tables that go to the terminal; the files have all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frames:
    """A results folder as pandas frames of raw figures, finished or not.

    Attributes:
        main: One row a method; see `harness.report.frames.main_frame.main_frame`.
        overview: Speedups of several cells by method, and their geometric means; see
        `harness.report.frames.speedup_overview`.
        finalists: Everything that went to the confirmation.
        precision: The rows with an accuracy or of several precisions, with a decision.
        decision: Float, PTQ tools, everything quantized, and the best found; see `harness.report.frames.decision`.
        budget: Confirmed speedup by searcher and budget.
        fixed: The same over the best fixed row of the cell; see `harness.report.frames.gain_over_fixed`.
        targets: Evaluations and minutes to a share of the best gain.
        cost: Where the searches spent their time.
        curves: The incumbent after every evaluation of every search.
        volumes: Hypervolume of latency and accuracy after every evaluation that was scored.
        scores: Searchers against random search.
        pairs: Searchers against each other, over all cells.
        ablation: Searchers against variants of themselves, by budget; see `harness.report.frames.component_ablation`.
        transfer: Placements found on one backend and run on another.
        samples: Every latency of the confirmation.
        variance: How much inferences, turns and builds scatter.
        complete: Everything that the experiment asks for is there.
    """

    main: pd.DataFrame
    overview: pd.DataFrame
    finalists: pd.DataFrame
    precision: pd.DataFrame
    decision: pd.DataFrame
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


def load(folder: Path | str) -> Frames:
    """Read a results folder into frames.

    Raises:
        UserError: Not a results folder, written with another schema, or a damaged one.
    """
    results = load_results(Path(folder))
    return Frames(
        main=main_frame(results),
        overview=overview_frame(main_frame(results), budget_frame(results)),
        finalists=finalist_frame(results),
        precision=precision_frame(results),
        decision=decision_frame(results),
        budget=budget_frame(results),
        fixed=fixed_frame(results),
        targets=target_frame(results),
        cost=cost_frame(results),
        curves=curve_frame(results.cells),
        volumes=hypervolume_frame(results.cells),
        scores=score_frame(results),
        pairs=pair_frame(results),
        ablation=ablation_frame(results),
        transfer=transfer_frame(results),
        samples=sample_frame(results),
        variance=variance_frame(results),
        complete=results.complete,
    )


def render(folder: Path) -> str:
    """Write the report, see `write_report`; gives the main, budget and cost tables as Markdown.

    Raises:
        UserError: See `write_report`.
    """
    return report_text(*write_report(folder))


def write_report(folder: Path) -> tuple[Results, list[ReportTable]]:
    """Write tables, plots and the page into `folder/report`; gives what was read, and all tables.

    Where the exported models are there, the graph of each cell is kept in `CELL/graph.json`: with it, and without the
    models, the same page can be written again. Of a run that is still going on, what is there is shown, and the text
    says UNFINISHED.

    Raises:
        UserError: Not a results folder, a damaged one, or the report cannot be written.
    """
    digest, results = compute_inputs_digest(folder), load_results(folder)
    out = folder / "report"
    with explain_write_errors(out):
        graphs = {cell.name: graph for cell in results.cells if (graph := load_task_graph(cell)) is not None}
        for cell in results.cells:
            if cell.name in graphs:
                write_graph(cell, graphs[cell.name])
        tables = write_tables(results, out)
        pictures = draw_plots(results, out)
        write_text(out / "index.html", render_index(results, tables, graphs, pictures))
        write_inputs_digest(folder, digest)
    return results, tables


def current_report(folder: Path) -> tuple[Results, list[ReportTable]] | None:
    """What `write_report` would give, where it would write what is there already; None where it would not.

    Raises:
        UserError: See `harness.report.load.results.load`.
    """
    if not is_up_to_date(folder):
        return None
    results = load_results(folder)
    return results, list(build_tables(results))


def write_tables(results: Results, out: Path) -> list[ReportTable]:
    """Write every table that has a row, as Markdown, CSV and LaTeX; one that has none any more goes."""
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
    """Return the main, budget and cost tables for a pipe or a file, each line of notes once."""
    shown = map(render_plain_text, drop_repeated_lines(table for table in tables if table.name in PRINTED_TABLES))
    return "\n\n".join(filter(None, [progress_note(results), *shown, "" if tables else partial_note(results)]))


def report_renderable(results: Results, tables: Sequence[ReportTable]) -> Group:
    """Return the same tables drawn for a terminal."""
    shown = [
        TerminalTable(table=table)
        for table in drop_repeated_lines(table for table in tables if table.name in PRINTED_TABLES)
    ]
    said = (progress_note(results), "" if tables else partial_note(results))
    before, after = ([Text(escape_control_characters(text), style="yellow")] if text else [] for text in said)
    return Group(*before, *shown, *after)
