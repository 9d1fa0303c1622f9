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
    last: Annotated[int, typer.Option(min=1, help="Turns or trials shown of each source, the last ones.")] = 5,
    raw: Annotated[bool, typer.Option("--raw", help="Show every single reading of every turn and trial.")] = False,
) -> None:
    """Show the readings behind a cell of a table, the file and line that hold them, and how they come to the figure.

    ROW is a row's number (the first is 1), its method, its id, or CELL/METHOD; COLUMN begins like the heading.

    Example: `qdq trace results/quickstart linear:speedup`
    """
    from harness.cli.common import short_path
    from harness.report import trace as tracing
    from harness.report.load.results import load

    found = tracing.trace_cell(load(short_path(folder)), cell, table)
    typer.echo(f"{found.row}, {found.column}: {found.shown}")
    for source in found.sources:
        for line in source.lines() if raw else source.brief(last):
            typer.echo(line)
    if found.measured and not raw:
        typer.echo("--raw shows every single reading.")
