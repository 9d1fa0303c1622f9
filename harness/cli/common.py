"""Options, path handling and terminal output that several commands share."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from harness.base.errors import MAX_COUNT, UserError
from harness.base.paths import RelativePathMissing, plugins_trusted
from harness.base.text import printable, printable_lines

if TYPE_CHECKING:
    import pandas as pd

    from harness.config.sections import PluginSpec
    from harness.results.output_check import OutputCheck
    from harness.run.prepare.study_task import StudyTask

ModelArgument = Annotated[str, typer.Argument(help="ONNX file, zoo:NAME or assets:PATH.")]
StudyArgument = Annotated[
    str, typer.Argument(help="ONNX file, zoo:NAME, assets:PATH, or an experiment file (.yaml) with one task.")
]
ResultsArgument = Annotated[Path, typer.Argument(help="Results folder of an experiment.")]
ShapeOption = Annotated[
    list[str] | None, typer.Option("--shape", help="Shape of an input as NAME:1x3x224x224; repeat for each input.")
]
DimOption = Annotated[
    list[str] | None,
    typer.Option(
        "--dim", help="Size of a dynamic dimension as SYMBOL=128; repeat for each symbol [default: a batch of 1]."
    ),
]
ParamOption = Annotated[
    list[str] | None,
    typer.Option("--param", help="Parameter of the backend as NAME=VALUE, such as threads=2; repeat for each."),
]
TargetOption = Annotated[
    str | None, typer.Option("--target", help="GPU architecture for NVIDIA's compiler (rtx_compile) [default: sm89].")
]
StudyBackendOption = Annotated[
    str | None, typer.Option("--backend", help="Runtime, see `qdq list` [default: that of the file, or openvino].")
]
BaseOption = Annotated[
    Path | None,
    typer.Option(
        "--base", help="Folder from which relative paths of the experiment start [default: the working directory]."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the output as JSON.")]

RunOption = Annotated[
    bool, typer.Option("--run/--no-run", help="Run the written file in its runtime, and compare it with its meaning.")
]


class ExitStatus(IntEnum):
    """Exit status of every command; `harness.cli.main.main` chooses it for exceptions."""

    DONE = 0
    DOES_NOT_HOLD = 1
    USAGE = 2
    INTERNAL = 3
    INTERRUPTED = 130
    PIPE_CLOSED = 141


OTHER_FOLDER_ADVICE = "use another {}, or move the existing results away to start over"


def count_option(help_text: str, *, least: int = 1, most: int = MAX_COUNT) -> Any:
    """Return a typer option for an integer from `least` to `most`."""
    return typer.Option(min=least, max=most, help=help_text)


@contextmanager
def replace_change_advice(option: str = "--out") -> Iterator[None]:
    """Replace --accept-changes in the advice of a `UserError` by the option of the results folder.

    For commands other than `qdq run`, which lack --accept-changes.

    Args:
        option: Name of the option of the results folder.
    """
    from harness.results.journal import CHANGED_RUN_ADVICE

    try:
        yield
    except UserError as error:
        if CHANGED_RUN_ADVICE not in str(error):
            raise
        raise UserError(str(error).replace(CHANGED_RUN_ADVICE, OTHER_FOLDER_ADVICE.format(option))) from error


@contextmanager
def explain_relative_paths(folder: Path) -> Iterator[None]:
    """Add to a `UserError` about a missing relative path that relative paths start from `folder`."""
    try:
        yield
    except UserError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, RelativePathMissing):
            cause = cause.__cause__
        if cause is None:
            raise
        raise UserError(
            f"{error}; relative paths of the experiment start from {short_path(folder)}: set the folder of its file "
            "by --base"
        ) from error


def add_to_sys_path(folder: Path) -> None:
    """Append a folder to the end of `sys.path` for `use: module:Class`, if plug-ins are trusted."""
    if plugins_trusted() and str(folder) not in sys.path:
        sys.path.append(str(folder))


def study_of(
    model: str,
    backend: str | None,
    param: Sequence[str] | None,
    shape: Sequence[str] | None,
    dim: Sequence[str] | None,
    **more: Any,
) -> StudyTask:
    """Return the study of a model or of an experiment file, from the options of a command; print remarks on it.

    The folder of an experiment file is added to `sys.path`, see `add_to_sys_path`.

    Args:
        model: ONNX file, `zoo:NAME` or `assets:PATH`, or an experiment file (.yaml).
        backend: Option `--backend`.
        param: Options `--param`.
        shape: Options `--shape`.
        dim: Options `--dim`.
        more: Further arguments of `make_study`.
    """
    from harness.config.yaml_loader import parse_params
    from harness.run.prepare.study_task import make_study

    if Path(model).suffix in (".yaml", ".yml"):
        add_to_sys_path(Path(model).resolve().parent)
    study = make_study(model, backend=backend, params=parse_params(param), **parse_sizes(shape, dim), **more)
    print_remarks(study.remarks)
    return study


def backend_spec(backend: str, param: Sequence[str] | None) -> PluginSpec:
    """Return the backend with its parameters.

    Args:
        param: Texts NAME=VALUE; values are parsed as YAML.
    """
    from harness.config.sections import PluginSpec
    from harness.config.yaml_loader import parse_params

    return PluginSpec(use=backend, params=parse_params(param))


def parse_sizes(shapes: Sequence[str] | None, dims: Sequence[str] | None) -> dict[str, Any]:
    """Return --shape and --dim as keyword arguments `shapes` and `dims`."""
    from harness.graph.passes.static_shapes import parse_dims, parse_named_shapes

    return {"shapes": parse_named_shapes("--shape", shapes or ()), "dims": parse_dims(dims or ())}


def short_path(path: Path) -> Path:
    """Return a path for messages: without inner `..`, relative to the working directory if that is shorter.

    A symbolic link keeps its name, except before `..`, which leads to the parent of its target.
    """
    absolute = path.resolve() if ".." in path.parts else path.absolute()
    return min((absolute, Path(os.path.relpath(absolute))), key=lambda found: len(str(found)))


def echo(text: str, *, err: bool = False) -> None:
    """Print text on standard output or standard error; control characters in untrusted names are escaped."""
    typer.echo(printable_lines(text), err=err)


def frame_values(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a frame as JSON values, with None for missing ones."""
    values: list[dict[str, Any]] = json.loads(frame.to_json(orient="records"))
    return values


def print_remarks(remarks: Iterable[str]) -> None:
    """Print remarks on standard error, a line each."""
    for remark in remarks:
        echo(remark, err=True)


def print_rich_or_text(text: str, drawing: RenderableType) -> None:
    """Print the drawing on a terminal, and the text if the output is a file or a pipe."""
    if sys.stdout.isatty():
        Console().print(drawing)
    else:
        echo(text)


def print_json(value: Any) -> None:
    """Print a value as JSON; characters beyond ASCII are escaped."""
    echo(json.dumps(value, indent=1))


def report_check(check: OutputCheck, path: Path, remedies: Sequence[str], *, as_json: bool) -> None:
    """Print the check of a written file, and end the command if the file is not usable.

    Args:
        path: The file, which is set aside if it is not usable.
        remedies: Remedies of the command, such as another placement; they are no help if the runtime fails for the
            float model, too.
        as_json: Whether the command has printed the check as JSON, so that only a file that is not usable is reported.

    Raises:
        typer.Exit: The file is not usable.
    """
    from harness.measure.provenance import describe_installed
    from harness.results.output_check import wrong_result_remedies

    if check.is_usable:
        if not as_json:
            echo(check.summary)
        return
    cause = f"; the runtime fails for the float model, too ({check.float_verdict})" if check.float_verdict else ""
    runtime = check.runtime.partition(" ")[0]
    known = wrong_result_remedies([check], runtime, describe_installed(runtime))
    steps = [*([] if check.float_verdict else remedies), *known]
    steps.append("--no-run, if the file is for another runtime or processor than those of this machine")
    echo("\n- ".join([f"qdq: {check.summary}{cause}; the file is kept as {path}. Remedies:", *steps]), err=True)
    raise typer.Exit(ExitStatus.DOES_NOT_HOLD)


def print_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = (), *, as_json: bool = False
) -> None:
    """Print a table and its notes; without a terminal as tab-separated lines. Cells are plain text, not markup.

    With `as_json`, print an object with `rows`, each with its cells by heading, and `notes`.
    """
    if as_json:
        print_json({"rows": [dict(zip(header, row, strict=True)) for row in rows], "notes": list(notes)})
        return
    if sys.stdout.isatty():
        drawn = Table(*header)
        for row in rows:
            drawn.add_row(*(Text(printable(cell)) for cell in row))
        Console().print(drawn)
    else:
        for row in (header, *rows):
            echo("\t".join(map(printable, row)))
    for line in notes:
        echo(line)
