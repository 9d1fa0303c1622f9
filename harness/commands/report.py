"""`qdq report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
    from harness.report import render

    typer.echo(render(folder))
    typer.echo(f"\nTables (Markdown, CSV, LaTeX) and curves: {folder / 'report'}")
