"""`qdq study`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.common import add_to_sys_path
from harness.errors import UserError

if TYPE_CHECKING:
    from harness.studies.study_file import BudgetStudy

__all__ = ["study"]


def study(
    what: Annotated[
        list[Path],
        typer.Argument(
            metavar="STUDY.yaml|TABLE...",
            help="A study's file, or Parquet files of qdq record.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="Folder for the tables, the plots and the walks of all searches.", show_default=False)
    ],
    searcher: Annotated[
        list[str] | None, typer.Option(help="Searcher; repeat. [default: all but exhaustive and optuna]")
    ] = None,
    budget: Annotated[
        list[int] | None,
        typer.Option(min=1, max=5_000, help="Compare after so many evaluations; repeat. [default: 10 to 200]"),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="Searches of each searcher on each table. [default: 100]")
    ] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Tell searches no placement first.")] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that replay at once. [default: one a core]")
    ] = None,
) -> None:
    """Budget ablation: every searcher on every recorded table at every budget, with statistics over seeds and tables.

    Replays in memory; goes on where it was interrupted.

    Example: `qdq study experiments/studies/budgets.yaml --out out/budgets`
    """
    from harness.report.report_table import render_markdown, render_note_markdown
    from harness.studies.budget_study import study_budgets
    from harness.terminal_progress import TerminalProgress
    from harness.timing.provenance import count_cores

    add_to_sys_path(Path.cwd())
    options: dict[str, Any] = {
        "--searcher": {"searchers": [{"use": name} for name in searcher]} if searcher else {},
        "--budget": {"budgets": sorted(set(budget))} if budget else {},
        "--seeds": {"seeds": seeds} if seeds else {},
        "--cold": {"initial": []} if cold else {},
    }
    planned = _load_budget_study(what, {name: said for name, said in options.items() if said})
    with TerminalProgress() as terminal:
        found = study_budgets(planned, out, terminal, workers=workers or count_cores())
    for table in found:
        typer.echo(f"{render_markdown(table)}\n\n{render_note_markdown(table)}\n")


def _load_budget_study(what: Sequence[Path], options: Mapping[str, Mapping[str, Any]]) -> BudgetStudy:
    """The study of a file, which says everything itself, or of some tables."""
    from harness.studies.study_file import BudgetStudy, load_study

    if what[0].suffix not in (".yaml", ".yml"):
        said = {key: value for option in options.values() for key, value in option.items()}
        return BudgetStudy.model_validate({"study": "tables", "tables": [str(path) for path in what], **said})
    if len(what) > 1 or options:
        others = ", ".join([*map(str, what[1:]), *options])
        raise UserError(f"{what[0]} is a study, which says everything itself; leave out {others}, or change the file")
    add_to_sys_path(what[0].resolve().parent)
    return load_study(what[0])
