"""The command `qdq`. Text for people is made here and in `harness.report`, nowhere else."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from harness.errors import UserError

__all__ = ["app", "main"]

app = typer.Typer(
    name="qdq",
    help="Finds where Q/DQ pairs belong in an ONNX model, by measured latency and measured accuracy.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.callback()
def _options(
    context: typer.Context,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show what the parts log.")] = False,
) -> None:
    _importable(Path.cwd())
    context.with_resource(_logged(verbose))


@contextmanager
def _logged(verbose: bool) -> Iterator[None]:
    """Show what the parts log while a command runs: our own warnings, others' errors; with `verbose` all."""
    root, handler = logging.getLogger(), _Echo()
    before = root.level
    if verbose:
        root.setLevel(logging.INFO)
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    else:
        handler.addFilter(lambda r: r.levelno >= logging.ERROR or r.name.partition(".")[0] in ("harness", "search"))
        handler.setLevel(logging.WARNING)
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before)


class _Echo(logging.Handler):
    """Writes to what standard error is at the time: progress bars put themselves in its place."""

    def emit(self, record: logging.LogRecord) -> None:
        typer.echo(self.format(record), err=True)


def _importable(folder: Path) -> None:
    """Let `use: module:Class` find modules in a folder; last, so that they never hide an installed one."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


@app.command()
def run(
    experiment: Annotated[Path, typer.Argument(help="Experiment file (YAML).", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="Results folder [default: results/NAME of the experiment].")] = None,
    check: Annotated[bool, typer.Option("--check", help="Check the file and show the plan; run nothing.")] = False,
) -> None:
    """Run an experiment and print its tables. Run the same command again to go on after an interruption.

    Example: `qdq run experiments/quickstart.yaml --out out/quickstart`
    """
    from harness.run.check import check_experiment
    from harness.run.config import load_experiment
    from harness.run.experiment import run_experiment
    from harness.run.plan import plan
    from harness.show import Terminal

    config = load_experiment(experiment)
    base = experiment.resolve().parent
    _importable(base)
    check_experiment(config, base)
    if check:
        for cell in plan(config):
            typer.echo(f"{cell.name}: {', '.join(search.name for search in cell.runs)}")
        return
    folder = out or Path("results") / config.experiment
    with Terminal() as terminal:
        run_experiment(config, base=base, out=folder, observer=terminal)
    _report(folder)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Results folder of an experiment.", show_default=False)],
) -> None:
    """Make tables and curves of a results folder again and print the main table.

    Example: `qdq report out/quickstart`
    """
    _report(folder)


def _report(folder: Path) -> None:
    from harness.report import render

    typer.echo(render(folder))
    typer.echo(f"\nTables (Markdown, CSV, LaTeX) and curves: {folder / 'report'}")


@app.command()
def regions(
    model: Annotated[str, typer.Argument(help="ONNX file, zoo:NAME or assets:PATH.", show_default=False)],
    shape: Annotated[list[str] | None, typer.Option(help="Input shape as NAME:1x3x224x224; repeat per input.")] = None,
    dialect: Annotated[str, typer.Option(help="Whose rules say where Q/DQ is legal.")] = "openvino",
    max_sequence_size: Annotated[int, typer.Option(min=1, help="Longest sequence that stays one region.")] = 10,
    include_all_regions: Annotated[bool, typer.Option(help="Also regions without a linear operator.")] = False,
    sizes: Annotated[bool, typer.Option(help="Also the distribution of sizes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Show regions, patterns and insertion points of a model.

    Example: `qdq regions zoo:resnet18`
    """
    from harness.inspect import Inspection, inspect_regions

    options = Inspection(
        dialect=dialect, max_sequence_size=max_sequence_size, include_all=include_all_regions, verbose=sizes
    )
    lines, data = inspect_regions(model, dict(_shape_option(text) for text in shape or []), options)
    typer.echo(json.dumps(data, indent=1) if as_json else "\n".join(lines))


def _shape_option(text: str) -> tuple[str, str]:
    name, colon, shape = text.rpartition(":")
    if not colon:
        raise UserError(f"--shape {text}: NAME:SHAPE, for instance --shape images:1x3x224x224")
    return name, shape


@app.command(name="zoo")
def zoo_command(
    name: Annotated[str, typer.Argument(help="Name of a zoo model; see qdq list.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="ONNX file to write.", show_default=False)],
) -> None:
    """Write a zoo model (made by code, seeded, no download).

    Example: `qdq zoo resnet18 -o resnet18.onnx`
    """
    from harness import zoo

    typer.echo(f"{zoo.write(name, output)}: {zoo.names()[name]}")


@app.command(name="list")
def list_command() -> None:
    """List searchers, benchmarkers, evaluators, preprocessings, decoders, dialects and zoo models with their origin."""
    from harness import zoo
    from harness.registry import GROUPS, plugins

    rows = [(kind, plugin.name, plugin.origin) for kind in GROUPS for plugin in plugins(kind)]
    rows += [("zoo model", name, what) for name, what in zoo.names().items()]
    _table(("kind", "name", "origin"), rows)


@app.command()
def doctor() -> None:
    """Say what this machine can run, and what to install for the rest."""
    from harness.doctor import examine

    _table(("what", "state", "detail"), examine())


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    if not sys.stdout.isatty():
        for row in rows:
            typer.echo("\t".join(row))
        return
    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def main(arguments: list[str] | None = None) -> None:
    """Entry point: returns after success; mistakes of the user end with one message and exit code 2."""
    try:
        app(args=arguments)
    except SystemExit as end:  # typer ends so after success too
        if end.code:
            raise
    except UserError as error:
        typer.echo(f"qdq: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        typer.echo("qdq: interrupted; run the same command again to go on", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
