"""`qdq replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.common import add_to_sys_path, print_table

__all__ = ["replay"]


def replay(
    recorded: Annotated[Path, typer.Argument(metavar="TABLE", help="Parquet file of qdq record.", show_default=False)],
    searcher: Annotated[list[str] | None, typer.Option(help="Searcher; repeat to compare.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Searches of each searcher.")] = 100,
    budget: Annotated[int, typer.Option(min=1, help="Evaluations of each search.")] = 100,
    initial: Annotated[
        list[str] | None, typer.Option(help="Tell every search this placement first (float, all, linear); repeat.")
    ] = None,
    at_least: Annotated[
        str | None, typer.Option(help="Only placements that reach METRIC=VALUE, for instance sqnr_db=20.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Refuse the table unless it is of this model.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for curves.csv and curves.png.")] = None,
) -> None:
    """Replay searchers on a recorded table, beside ten thousand random searches from the same start.

    Example: `qdq replay resnet18-openvino-int8.parquet --searcher tpe --searcher local --seeds 20`
    """
    from harness.benchmark_table import read_table
    from harness.studies.replay_report import ReplayRequest, replay_all, table_lines

    add_to_sys_path(Path.cwd())
    opened = read_table(recorded)
    order = ReplayRequest(seeds=seeds, budget=budget, initial=tuple(initial or ()), at_least=at_least, model=model)
    typer.echo("\n".join(table_lines(opened)))
    header, rows, notes = replay_all(opened, tuple(searcher or ()), order, out)
    print_table(header, rows)
    typer.echo("\n".join(notes))
