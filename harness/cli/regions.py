"""`qdq regions`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.common import DimOption, ShapeOption, parse_sizes
from harness.errors import UserError

__all__ = ["regions"]


def regions(
    model: Annotated[str, typer.Argument(help="ONNX file, zoo:NAME or assets:PATH.", show_default=False)],
    shape: ShapeOption = None,
    dim: DimOption = None,
    dialect: Annotated[str, typer.Option(help="Whose rules say where Q/DQ is legal.")] = "openvino",
    max_sequence_size: Annotated[int, typer.Option(min=1, help="Longest sequence that stays one region.")] = 10,
    include_all_regions: Annotated[
        bool, typer.Option("--include-all-regions", help="Also regions without quantizable operators.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also the names of nodes and boundary tensors.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write the graph as a picture, regions coloured by pattern.", show_default=False)
    ] = None,
) -> None:
    """Show regions, patterns and insertion points of a model.

    Example: `qdq regions zoo:resnet18 --html resnet18.html`
    """
    from harness.analysis.region_report import inspect_regions
    from harness.graph.partition.summary import TreeOptions

    found = inspect_regions(model, **parse_sizes(shape, dim), dialect=dialect, max_sequence_size=max_sequence_size)
    if html is not None:
        try:
            html.write_text(found.html(), encoding="utf-8")
        except OSError as error:
            raise UserError(f"--html {html}: cannot be written ({error.strerror or error})") from error
        typer.echo(f"{html}: open it in a browser; it needs no network", err=True)
    if as_json:
        typer.echo(json.dumps(found.data(), indent=1))
    elif html is None:
        typer.echo("\n".join(found.lines(TreeOptions(include_all=include_all_regions, verbose=verbose))))
