"""`qdq report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.commands.terminal import show

__all__ = ["report", "show_report"]


def report(
    folder: Annotated[Path, typer.Argument(help="Results folder of an experiment.", show_default=False)],
) -> None:
    """Make tables and curves of a results folder again and print the main table.

    Example: `qdq report out/quickstart`
    """
    show_report(folder)


def show_report(folder: Path) -> None:
    """Render the report of a results folder and print its main table."""
    from harness.report.render import drawing_of, text_of, write_report

    results, tables = write_report(folder)
    show(text_of(results, tables), drawing_of(results, tables))
    typer.echo(f"\nTables (Markdown, CSV, LaTeX) and curves: {folder / 'report'}")
