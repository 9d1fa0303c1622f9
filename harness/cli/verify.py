"""`qdq verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.common import add_to_sys_path, explain_relative_paths, short_path
from harness.errors import UserError

__all__ = ["verify"]

VERDICT_WORDS = {True: "ok", False: "MISMATCH", None: "not measured"}
BROKEN_BOUND_WORD = "BROKEN"
"""Of a bound on accuracy that does not hold: nothing that is recorded need differ."""


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
    max_drop: Annotated[
        str | None,
        typer.Option(
            help="Largest allowed loss of the metric, 0.01 or '1%' of the float model's, in the place of the "
            "experiment's bound.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Repeat what the tables say of an exported model: its hash, its Q/DQ edges, its accuracy, its speedup.

    Ends with status 1 where anything is not what is recorded, and where the accuracy measured now breaks the bound.

    Example: `qdq verify out/mine auto`, or `qdq verify out/mine/resnet18-openvino-int8/models/0123456789abcdef.onnx`
    """
    from harness.config.objective import parse_bound
    from harness.pipeline.verify import find_exported_row
    from harness.pipeline.verify import verify as repeat
    from harness.terminal_progress import TerminalProgress

    model = find_exported_row(short_path(file), row) if file.is_dir() else file
    if not file.exists():
        raise UserError(f"{file}: no such file or folder")
    if model is file and row is not None:
        raise UserError(f"{file} {row}: a row is of a results folder, and this is no folder")
    try:
        bound = None if max_drop is None else parse_bound(max_drop)
    except ValueError as error:
        raise UserError(f"--max-drop: {error}, but got {max_drop!r}") from error
    start = (base or Path.cwd()).resolve()
    add_to_sys_path(start)
    with explain_relative_paths(start), TerminalProgress() as terminal:
        checks = repeat(model, terminal, results=results, base=start, max_drop=bound)
    for check in checks:
        word = BROKEN_BOUND_WORD if check.what == "bound" and check.holds is False else VERDICT_WORDS[check.holds]
        typer.echo(f"{check.what}: {word}: {check.found}")
    if any(check.holds is False for check in checks):
        raise typer.Exit(1)
