"""`qdq report`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.common import print_rich_or_text, short_path
from harness.results_dir.termination import SearcherFailures

__all__ = ["report", "report_afterwards", "report_run", "show_report"]


def report(
    folder: Annotated[Path, typer.Argument(help="Results folder of an experiment.", show_default=False)],
) -> None:
    """Make tables and curves of a results folder again, where anything has changed since, and print the main table.

    Example: `qdq report out/quickstart`
    """
    show_report(folder)


@contextmanager
def report_afterwards(show_found: Callable[[], None]) -> Iterator[None]:
    """Show what is found by what is run within; searches that broke are no reason not to, and are said behind it."""
    try:
        yield
    except SearcherFailures:
        show_found()
        raise
    show_found()


def report_run(folder: Path) -> AbstractContextManager[None]:
    """Show the report of what is run within; see `report_afterwards`."""
    return report_afterwards(partial(show_report, folder))


def show_report(folder: Path) -> None:
    """Render the report of a results folder, where it is not there already, print its main table and what may help."""
    from harness.report.render import current_report, report_renderable, report_text, write_report
    from harness.report.tables.next_steps import describe_next_steps, describe_winners

    folder = short_path(folder)
    current = current_report(folder)
    results, tables = current or write_report(folder)
    print_rich_or_text(report_text(results, tables), report_renderable(results, tables))
    for main in (table.raw for table in tables if table.name == "main"):
        for line in (*describe_winners(results, main), *describe_next_steps(results, main)):
            typer.echo(f"\n{line}")
    typer.echo(f"\nTables (Markdown, CSV, LaTeX) and curves: {folder / 'report'}")
    if current:
        typer.echo("Nothing has changed since they were drawn; to draw them again all the same, remove that folder.")
