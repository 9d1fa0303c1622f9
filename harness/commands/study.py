"""`qdq study`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["study"]


def study(
    recorded: Annotated[
        list[Path], typer.Argument(metavar="TABLE...", help="Parquet files of qdq record.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="Folder for the tables, the plot and the curves.", show_default=False)],
    searcher: Annotated[list[str] | None, typer.Option(help="Searcher; repeat. [default: all]")] = None,
    budget: Annotated[
        list[int] | None, typer.Option(min=1, help="Compare after so many evaluations; repeat. [default: 10 to 200]")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Searches of each searcher on each table.")] = 100,
    cold: Annotated[bool, typer.Option("--cold", help="Tell searches no placement first.")] = False,
) -> None:
    """Budget ablation: every searcher on every recorded table at every budget, with statistics over seeds and tables.

    Replays in memory; goes on where it was interrupted.

    Example: `qdq study results/tables/*.parquet --out out/budgets`
    """
    from harness.report.tables import markdown, note_markdown
    from harness.show import Terminal
    from harness.studies.budgets import BudgetOrder, study_budgets
    from harness.tables import read_table

    default = BudgetOrder()
    order = BudgetOrder(
        budgets=tuple(sorted(set(budget or default.budgets))), seeds=seeds, initial=() if cold else default.initial
    )
    tables = [read_table(path) for path in recorded]
    with Terminal() as terminal:
        found = study_budgets(tables, tuple(searcher or ()), order, out, terminal)
    for table in found.tables:
        typer.echo(f"{markdown(table)}\n\n{note_markdown(table)}\n")
