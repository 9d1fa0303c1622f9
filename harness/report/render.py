"""Writes everything that a report consists of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from harness.report import plots
from harness.report.frames import finalist_frame, main_frame, precision_frame
from harness.report.page import bounded, index, labels_of, tried_frame
from harness.report.results import CellResults, Results
from harness.report.results import load as load_results
from harness.report.samples import sample_frame, variance_frame
from harness.report.searching import budget_frame, cost_frame, curve_frame, target_frame
from harness.report.shown import METRICS, partial, tables_of
from harness.report.tables import Table, markdown, note_markdown, write_table
from harness.run.journal import writing
from harness.run.rows import write_text

__all__ = ["Frames", "draw", "load", "render", "text_of", "write_tables"]

SHOWN = ("main", "budget", "cost")
"""Tables that go to the terminal; the files have all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frames:
    """A results folder as pandas frames of raw figures, finished or not.

    Attributes:
        main: One row a method; see `harness.report.frames.main_frame`.
        finalists: Everything that went to the confirmation.
        precision: The rows with an accuracy or of several precisions, with a decision.
        budget: Confirmed speedup by searcher and budget.
        targets: Evaluations and minutes to a share of the best gain.
        cost: Where the searches spent their time.
        curves: The incumbent after every evaluation of every search.
        samples: Every latency of the confirmation.
        variance: How much inferences, turns and builds scatter.
        complete: Everything that the experiment asks for is there.
    """

    main: pd.DataFrame
    finalists: pd.DataFrame
    precision: pd.DataFrame
    budget: pd.DataFrame
    targets: pd.DataFrame
    cost: pd.DataFrame
    curves: pd.DataFrame
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
        finalists=finalist_frame(results),
        precision=precision_frame(results),
        budget=budget_frame(results),
        targets=target_frame(results),
        cost=cost_frame(results),
        curves=curve_frame(results.cells),
        samples=sample_frame(results),
        variance=variance_frame(results),
        complete=results.complete,
    )


def render(folder: Path) -> str:
    """Write tables, plots and the page into `folder/report`; gives the main, budget and cost tables as Markdown.

    Of a run that is still going on, what is there is shown, and the text says UNFINISHED.

    Raises:
        UserError: Not a results folder, a damaged one, or the report cannot be written.
    """
    results = load_results(folder)
    out = folder / "report"
    with writing(out):
        tables = write_tables(results, out)
        draw(results, out)
        write_text(out / "index.html", index(results, tables))
    return text_of(results, tables)


def write_tables(results: Results, out: Path) -> list[Table]:
    """Write every table that has a row, as Markdown, CSV and LaTeX."""
    tables = list(tables_of(results))
    for table in tables:
        write_table(table, out)
    return tables


def text_of(results: Results, tables: Sequence[Table]) -> str:
    """What the terminal shows."""
    shown = [f"{markdown(table)}\n\n{note_markdown(table)}" for table in tables if table.name in SHOWN]
    if not any(cell.picks for cell in results.cells):
        shown.insert(0, "No search has ended yet." if results.cells else "No cell has begun yet.")
    return "\n\n".join(shown if tables else [*shown, partial(results)])


def draw(results: Results, out: Path) -> None:
    """Write the plots of every cell, as PNG and SVG."""
    main, budgets, samples = main_frame(results), budget_frame(results), sample_frame(results)
    for cell in results.cells:
        marks = budgets[budgets["cell"] == cell.name]
        curves = curve_frame([cell])
        if len(curves):
            plots.anytime(curves, cell.name, out / f"anytime-{cell.name}", confirmed=marks)
            plots.anytime(curves, cell.name, out / f"anytime-minutes-{cell.name}", over="minutes")
        if len(marks):
            plots.budget_bars(marks, cell.name, out / f"budget-{cell.name}")
        _draw_confirmed(cell, main[main["cell"] == cell.name], samples[samples["cell"] == cell.name], out)


def _draw_confirmed(cell: CellResults, main: pd.DataFrame, samples: pd.DataFrame, out: Path) -> None:
    labels = labels_of(cell, main)
    rows = {labels[row]: part for row in labels if len(part := samples[samples["row"] == row])}
    if rows:
        plots.latencies(rows, cell.floor, cell.name, out / f"latency-{cell.name}")
    points = bounded(main)
    if len(points) and cell.metric is not None:
        words = {"title": cell.name, "metric": METRICS.get(cell.metric, (cell.metric, 4, ""))[0]}
        path = out / f"pareto-{cell.name}"
        points = points.assign(label=points["row"].map(labels))
        plots.pareto(points, tried_frame(cell), words, path, higher=cell.higher_is_better)
