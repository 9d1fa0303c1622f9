"""`qdq trace`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["trace"]


def trace(
    folder: Annotated[Path, typer.Argument(help="Results folder of an experiment.", show_default=False)],
    cell: Annotated[str, typer.Argument(help="ROW:COLUMN of the table.", show_default=False)],
    table: Annotated[str, typer.Option(help="Table, by the name of its files.")] = "main",
) -> None:
    """Show the raw readings behind a cell of a table, and the file and line that hold them.

    ROW is a row's number (the first is 1), its method, its id, or CELL/METHOD; COLUMN begins like the heading.

    Example: `qdq trace results/quickstart linear:speedup`
    """
    from harness.report import trace as tracing
    from harness.report.results import load

    found = tracing.trace(load(folder), cell, table)
    typer.echo(f"{found.row}, {found.column}: {found.shown}")
    for line in found.lines:
        typer.echo(line)
