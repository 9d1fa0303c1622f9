"""`qdq zoo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["zoo"]


def zoo(
    name: Annotated[str, typer.Argument(help="Name of a zoo model; see qdq list.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="ONNX file to write.", show_default=False)],
) -> None:
    """Write a zoo model (made by code, seeded, no download).

    Example: `qdq zoo resnet18 -o resnet18.onnx`
    """
    from harness import zoo as models

    typer.echo(f"{models.write_model(name, output)}: {models.model_names()[name]}")
