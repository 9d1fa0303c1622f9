"""`qdq verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.commands.terminal import based, importable, tidy
from harness.errors import UserError

__all__ = ["verify"]

WORDS = {True: "ok", False: "MISMATCH", None: "not measured"}


def verify(
    file: Annotated[
        Path,
        typer.Argument(
            help="Exported model, RESULTS/CELL/models/NAME.onnx; or a results folder and a row of it.",
            show_default=False,
        ),
    ],
    row: Annotated[
        str | None, typer.Argument(help="Row of the results folder's main table.", show_default=False)
    ] = None,
    results: Annotated[
        Path | None, typer.Option(help="Results folder, where the file lies elsewhere.", show_default=False)
    ] = None,
    base: Annotated[
        Path | None, typer.Option(help="Folder that relative paths of the experiment start from [default: here].")
    ] = None,
) -> None:
    """Repeat what the tables say of an exported model: its hash, its Q/DQ edges, its accuracy, its speedup.

    Beside its accuracy stands by how much it dropped in the tables, and whether that is within the bound.
    Ends with status 1 where anything is not what is recorded.

    Example: `qdq verify out/mine auto`, or `qdq verify out/mine/resnet18-openvino-int8/models/0123456789abcdef.onnx`
    """
    from harness.run.verify import exported
    from harness.run.verify import verify as repeat
    from harness.show import Terminal

    model = exported(tidy(file), row) if file.is_dir() else file
    if not file.exists():
        raise UserError(f"{file}: no such file or folder")
    if model is file and row is not None:
        raise UserError(f"{file} {row}: a row is of a results folder, and this is no folder")
    start = (base or Path.cwd()).resolve()
    importable(start)
    with based(start), Terminal() as terminal:
        checks = repeat(model, terminal, results=results, base=start)
    for check in checks:
        typer.echo(f"{check.what}: {WORDS[check.holds]}: {check.found}")
    if any(check.holds is False for check in checks):
        raise typer.Exit(1)
