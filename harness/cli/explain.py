"""`qdq explain`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.common import (
    DimOption,
    ShapeOption,
    add_to_sys_path,
    explain_relative_paths,
    parse_param,
    parse_sizes,
    short_path,
)
from harness.errors import UserError

__all__ = ["explain"]


def explain(
    model: Annotated[
        str, typer.Argument(help="ONNX file, zoo:NAME or assets:PATH; or a results folder.", show_default=False)
    ],
    row: Annotated[
        str | None, typer.Argument(help="Row of the results folder's main table.", show_default=False)
    ] = None,
    backend: Annotated[str, typer.Option(help="Runtime: openvino, onnxruntime, tensorrt, trtexec.")] = "openvino",
    param: Annotated[list[str] | None, typer.Option(help="Parameter of the runtime, NAME=VALUE; repeat.")] = None,
    shape: ShapeOption = None,
    dim: DimOption = None,
    against: Annotated[
        str | None, typer.Option(help="A second model; show what runs otherwise in it.", show_default=False)
    ] = None,
    base: Annotated[
        Path | None, typer.Option(help="Where relative paths of a results folder's experiment start from.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Longest list.")] = 10,
    runs: Annotated[int, typer.Option(min=1, help="Inferences that times are the mean of.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Say what a runtime made of a Q/DQ model: what runs quantized, which pairs stayed alone, and why.

    With a results folder and a row, measure instead what each part of that row's placement is worth.

    Example: `qdq explain out/mine/CELL/models/float.onnx --against out/mine/CELL/models/DIGEST.onnx`
    """
    if row is not None or Path(model).is_dir():
        _explain_row(short_path(Path(model)), row, (base or Path.cwd()).resolve())
        return
    from harness.config.sections import PluginSpec
    from harness.explain.model_report import compare_reports, explain_model
    from harness.explain.text_lines import change_lines, report_data, report_lines

    add_to_sys_path(Path.cwd())
    use = PluginSpec(use=backend, params=dict(parse_param(text) for text in param or []))
    sizes = parse_sizes(shape, dim)
    found = explain_model(model, use, runs, **sizes)
    if against is None:
        typer.echo(json.dumps(report_data(found), indent=1) if as_json else _to_text(report_lines(found, top)))
        return
    other = explain_model(against, use, runs, **sizes)
    changes = compare_reports(found, other)
    if as_json:
        rows = [{"name": change.name, "before": change.before, "after": change.after} for change in changes]
        typer.echo(json.dumps({"before": report_data(found), "after": report_data(other), "changes": rows}, indent=1))
        return
    typer.echo(_to_text([*report_lines(other, top), "", *change_lines(found, other, changes, top)]))


def _to_text(lines: Iterable[str]) -> str:
    from harness.report.report_table import escape_control_characters

    return "\n".join(map(escape_control_characters, lines))


def _explain_row(folder: Path, row: str | None, base: Path) -> None:
    """What each part of a row's placement is worth.

    Raises:
        UserError: No row is named, or there is none such.
    """
    from harness.explain.render import explain_and_save
    from harness.terminal_progress import TerminalProgress

    if row is None:
        raise UserError(f"{folder}: a results folder needs a row beside it: qdq explain {folder} ROW (see qdq report)")
    add_to_sys_path(base)
    with explain_relative_paths(base), TerminalProgress() as terminal:
        typer.echo("\n".join(explain_and_save(folder, row, base=base, observer=terminal)))
