"""`qdq regions`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from harness.commands.terminal import shape_option

__all__ = ["regions"]


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
    lines, data = inspect_regions(model, dict(shape_option(text) for text in shape or []), options)
    typer.echo(json.dumps(data, indent=1) if as_json else "\n".join(lines))
