"""`qdq compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.common import print_rich_or_text, short_path

__all__ = ["compare"]


def compare(
    first: Annotated[Path, typer.Argument(help="Results folder.", show_default=False)],
    second: Annotated[Path, typer.Argument(help="Another one: machine, version, or after a change.")],
) -> None:
    """Put two results folders side by side: rows matched, ratio with interval, what differs in the environment.

    Example: `qdq compare results/quickstart out/quickstart`
    """
    from harness.report.frames.folder_comparison import comparison_table, describe_differences
    from harness.report.load.results import load
    from harness.report.report_table import render_plain_text
    from harness.report.tables.terminal_table import TerminalTable

    first, second = short_path(first), short_path(second)
    one, two = load(first), load(second)
    table = comparison_table(one, two)
    print_rich_or_text(f"{render_plain_text(table)}\n", TerminalTable(table=table))
    lines = list(describe_differences(one, two))
    typer.echo(f"What differs, {first} -> {second}:" if lines else "Environment, model and settings are the same.")
    for line in lines:
        typer.echo(f"  {line}")
