"""`qdq report`, with the comparison of two results folders and the trace of a table cell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.common import (
    ExitStatus,
    JsonOption,
    ResultsArgument,
    count_option,
    echo,
    frame_values,
    print_json,
    print_rich_or_text,
    short_path,
)

if TYPE_CHECKING:
    from harness.report.report_table import ReportTable


def report(
    folder: ResultsArgument,
    plots: Annotated[
        bool | None,
        typer.Option(
            "--plots/--no-plots",
            help="Write the plots of each task as PNG, SVG and PDF. [default: if there are at most 20 tasks]",
        ),
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(
            help="Compare with the results folder of another machine, version, or after a change: ratios of matching "
            "rows and differences of the environment. The exit status is 1 if a row differs."
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="ROW:COLUMN",
            help="Show the samples from which a table cell is computed, with file and line of each. ROW is the number "
            "of a row (from 1), its method, its id, or TASK/METHOD; COLUMN is the start of a heading.",
        ),
    ] = None,
    table: Annotated[
        str, typer.Option(help="With --trace: table, by the name of its file in `report` without suffix.")
    ] = "main",
    last: Annotated[int, count_option("With --trace: number of turns or trials of each source, the last ones.")] = 5,
    raw: Annotated[
        bool, typer.Option("--raw", help="With --trace: show every sample of every turn and trial.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write the tables and curves of a results folder, unless they are up to date, and print the tables.

    Example: `qdq report out/quickstart`, `qdq report results/quickstart --compare out/quickstart`, or
    `qdq report results/quickstart --trace linear:speedup`
    """
    from harness.plugins.registry import without_module

    # pandas always imports an installed pyarrow, which takes 34 MiB and which no table of a report needs. Without it,
    # pandas cannot read Parquet in this process, which reads none.
    with without_module("pyarrow"):
        import pandas  # noqa: F401
    if compare is not None:
        print_comparison(folder, compare, as_json=as_json)
    elif trace is not None:
        _print_trace(folder, trace, table, last=last, raw=raw, as_json=as_json)
    else:
        show_report(folder, task_plots=plots, as_json=as_json)


@contextmanager
def report_afterwards(show: Callable[[], None]) -> Iterator[None]:
    """Call `show` after the body.

    If the body raises `SearcherFailures`, `show` is called too, and the error is raised again afterwards. After any
    other error it is not called.
    """
    from harness.results.termination import SearcherFailures

    try:
        yield
    except SearcherFailures:
        with suppress(typer.Exit):  # of a comparison, whose status is the same
            show()
        raise
    show()


def _ship_models(folder: Path) -> None:
    """Write the folder `ship` of a results folder, with the models to deploy."""
    from harness.base.terminal_progress import TerminalProgress
    from harness.report.frames import main_frame
    from harness.results.folder import load
    from harness.ship.results_bundle import ship_results

    with TerminalProgress() as terminal:
        ship_results(found := load(folder), main_frame(found), terminal)


def show_report(
    folder: Path,
    *,
    task_plots: bool | None = None,
    ship: bool = False,
    original: Path | None = None,
    base: Path | None = None,
    as_json: bool = False,
) -> None:
    """Write the report of a results folder unless it is up to date; print answers, tables and next steps.

    Args:
        task_plots: Whether the plots of each task are written; None: only for few tasks.
        ship: Whether this is the end of a run: the folder `ship` with the models to deploy is written, a summary
            replaces the tables, and no plots are written, because the page draws them from the data.
        original: Results folder to compare with this one; None: no comparison is printed.
        base: Folder from which relative paths of the experiment start; None: the working folder.
        as_json: Whether answers, next steps and the raw values of each table are printed as JSON.

    Raises:
        typer.Exit: The results differ from those of `original`.
    """
    from harness.base.terminal_progress import TerminalProgress
    from harness.report.next_steps import describe_answers, describe_next_steps
    from harness.report.render import current_report, report_renderable, report_text, write_report
    from harness.report.tables.main import summary_table

    folder, task_plots = short_path(folder), False if ship else task_plots
    if ship:
        _ship_models(folder)  # before the page, which shows the commands of the folders
    current = current_report(folder, task_plots=task_plots)
    if current is None:
        with TerminalProgress() as terminal:
            results, tables = write_report(folder, task_plots=task_plots, observer=terminal, base=base)
    else:
        results, tables = current
    mains = [table.raw for table in tables if table.name == "main"]
    answers = [line for main in mains for line in describe_answers(results, main, base)]
    steps = [line for main in mains for line in describe_next_steps(results, main, base)]
    if as_json:
        values = {table.name: frame_values(table.raw) for table in tables}
        compared = {} if original is None else {"comparison": _comparison(original, folder)[1]}
        print_json({"answers": answers, "next_steps": steps, "tables": values, **compared})
        raise typer.Exit(ExitStatus(bool(compared and compared["comparison"]["differing_rows"])))
    for line in answers:
        echo(f"{line}\n")
    printed = [summary_table(results, main) for main in mains] if ship else tables
    print_rich_or_text(report_text(results, printed), report_renderable(results, printed))
    for line in steps:
        echo(f"\n{line}")
    page = folder / "report" / "index.html"
    plots = f"; plots as PNG, SVG and PDF: qdq report {folder}" if ship else ""
    echo(f"\nTables (Markdown, CSV, LaTeX): {page.parent}; with curves on one page: {page}{plots}")
    if current:
        echo("Nothing has changed since they were drawn; to draw them again, remove that folder.")
    if original is not None:
        echo("")
        print_comparison(original, folder)


def print_comparison(first: Path, second: Path, *, as_json: bool = False) -> None:
    """Print ratios of matching rows of two results folders, and differences of the environment.

    Raises:
        typer.Exit: Always; the status is 1 if a row differs: its latency beyond noise, its verdict, or the score of the
            same file.
    """
    from harness.report.report_table import render_plain_text

    first, second = short_path(first), short_path(second)
    table, values = _comparison(first, second)
    differing, lines = values["differing_rows"], values["differences"]
    if as_json:
        print_json(values)
        raise typer.Exit(ExitStatus(bool(differing)))
    print_rich_or_text(f"{render_plain_text(table)}\n", table)
    echo(f"Rows that differ: {', '.join(differing) or 'none'}.")
    echo(f"What differs, {first} -> {second}:" if lines else "Environment, model and settings are the same.")
    for line in lines:
        echo(f"  {line}")
    raise typer.Exit(ExitStatus(bool(differing)))


def _comparison(first: Path, second: Path) -> tuple[ReportTable, dict[str, Any]]:
    """Return the table of matching rows, and these, the rows that differ and lines on the environment as values."""
    from harness.report.folder_comparison import comparison_table, describe_differences, differing_rows
    from harness.results.folder import load

    one, two = load(first), load(second)
    table = comparison_table(one, two)
    differing, lines = differing_rows(one, two, table.raw), list(describe_differences(one, two))
    return table, {"rows": frame_values(table.raw), "differing_rows": differing, "differences": lines}


def _print_trace(folder: Path, cell: str, table: str, *, last: int, raw: bool, as_json: bool) -> None:
    from harness.report import trace as tracing
    from harness.results.folder import load

    traced = tracing.trace_cell(load(short_path(folder)), cell, table)
    lines = [line for source in traced.sources for line in source.lines(None if raw else last)]
    if as_json:
        print_json({"row": traced.row, "column": traced.column, "shown": traced.shown, "lines": lines})
        return
    echo(f"{traced.row}, {traced.column}: {traced.shown}")
    for line in lines:
        echo(line)
    if not raw and any(next(iter(source.readings()), None) for source in traced.sources):
        echo("--raw shows every single reading.")
