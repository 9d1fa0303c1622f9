"""What several commands share: options in text form, tables on the terminal, paths, modules beside the experiment."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypedDict

import typer
import yaml
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from harness.errors import UserError
from harness.paths import RelativePathMissing
from harness.results_dir.fingerprint import CHANGED_RUN_ADVICE

__all__ = [
    "DimOption",
    "ShapeOption",
    "SizeOptions",
    "add_parent_to_sys_path",
    "add_to_sys_path",
    "explain_relative_paths",
    "parse_param",
    "parse_shape_option",
    "parse_sizes",
    "print_rich_or_text",
    "print_table",
    "rewrite_advice",
    "short_path",
]  # fmt: skip

ShapeOption = Annotated[
    list[str] | None, typer.Option("--shape", help="Input shape as NAME:1x3x224x224; repeat per input.")
]
DimOption = Annotated[
    list[str] | None,
    typer.Option("--dim", help="Size of a dynamic dimension as SYMBOL=128; repeat per symbol; the batch is 1."),
]


class SizeOptions(TypedDict):
    """What --shape and --dim give."""

    shapes: dict[str, str]
    dims: dict[str, int]


OTHER_FOLDER_ADVICE = "use another --out, or move away what is there to begin anew"
"""What to do about changes where a command has no --accept-changes."""


@contextmanager
def rewrite_advice() -> Iterator[None]:
    """Advise on changes what a command without --accept-changes offers.

    Raises:
        UserError: As it was raised within, with that advice.
    """
    try:
        yield
    except UserError as error:
        if CHANGED_RUN_ADVICE not in str(error):
            raise
        raise UserError(str(error).replace(CHANGED_RUN_ADVICE, OTHER_FOLDER_ADVICE)) from error


@contextmanager
def explain_relative_paths(folder: Path) -> Iterator[None]:
    """Say where relative paths of an experiment start from, where one of them leads to nothing.

    Raises:
        UserError: As it was raised within, with that.
    """
    try:
        yield
    except UserError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, RelativePathMissing):
            cause = cause.__cause__
        if cause is None:
            raise
        raise UserError(
            f"{error}; relative paths of the experiment were looked for from {short_path(folder)}: name the "
            "folder of its "
            "file by --base"
        ) from error


def add_to_sys_path(folder: Path) -> None:
    """Let `use: module:Class` find modules in a folder; last, so that they never hide an installed one."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def add_parent_to_sys_path(text: str) -> None:
    """Let `use: module:Class` find modules beside an experiment file, where a command is given one and no model."""
    if Path(text).suffix in (".yaml", ".yml"):
        add_to_sys_path(Path(text).resolve().parent)


def parse_param(text: str) -> tuple[str, Any]:
    """NAME=VALUE as a pair; the value is read as in an experiment file.

    Raises:
        UserError: No equals sign, or a value that is no YAML.
    """
    name, equals, value = text.partition("=")
    try:
        if not equals:
            raise ValueError("no '='")
        return name, yaml.safe_load(value)
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"--param {text}: NAME=VALUE, for instance --param threads=1 ({error})") from error


def parse_shape_option(text: str) -> tuple[str, str]:
    """NAME:SHAPE as a pair.

    Raises:
        UserError: No colon.
    """
    name, colon, shape = text.rpartition(":")
    if not colon:
        raise UserError(f"--shape {text}: NAME:SHAPE, for instance --shape images:1x3x224x224")
    return name, shape


def parse_sizes(shapes: Sequence[str] | None, dims: Sequence[str] | None) -> SizeOptions:
    """Return what --shape and --dim give, as keyword arguments.

    Raises:
        UserError: One of them has another form, or a symbol has two sizes.
    """
    from harness.graph.passes.dimension_errors import parse_dims

    return {"shapes": dict(map(parse_shape_option, shapes or ())), "dims": parse_dims(dims or ())}


def short_path(path: Path) -> Path:
    """The same place without `..` inside, relative to the working directory where that is shorter; for messages.

    A path that goes through a symbolic link keeps its name unless it leaves again by `..`, which leads elsewhere there.
    """
    whole = path.resolve() if ".." in path.parts else path.absolute()
    return min((whole, Path(os.path.relpath(whole))), key=lambda found: len(str(found)))


def print_rich_or_text(text: str, drawing: RenderableType) -> None:
    """A drawing for people, or the text where the output is no terminal."""
    if sys.stdout.isatty():
        Console().print(drawing)
    else:
        typer.echo(text)


def print_table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Print a table on a terminal, or tab-separated lines with the headings first elsewhere; cells are plain text."""
    if not sys.stdout.isatty():
        for row in (header, *rows):
            typer.echo("\t".join(row))
        return
    drawn = Table(*header)
    for row in rows:
        drawn.add_row(*map(Text, row))
    Console().print(drawn)
