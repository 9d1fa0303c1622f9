"""`qdq sensitivity`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.common import (
    DimOption,
    ShapeOption,
    add_parent_to_sys_path,
    parse_param,
    parse_sizes,
    print_table,
    rewrite_advice,
    short_path,
)

__all__ = ["sensitivity"]


class Granularity(StrEnum):
    """What is quantized together."""

    pattern = "pattern"
    point = "point"


def sensitivity(
    model: Annotated[
        str,
        typer.Argument(
            help="ONNX file, zoo:NAME, assets:PATH, or an experiment file (.yaml) with one cell.", show_default=False
        ),
    ],
    by: Annotated[Granularity, typer.Option(help="What is quantized, or left out, at a time.")] = Granularity.pattern,
    backend: Annotated[str | None, typer.Option(help="Benchmarker [default: openvino].", show_default=False)] = None,
    param: Annotated[list[str] | None, typer.Option(help="Parameter of the backend, NAME=VALUE; repeat.")] = None,
    shape: ShapeOption = None,
    dim: DimOption = None,
    precision: Annotated[
        str | None, typer.Option(help="int8, fp8 or mixed [default: int8].", show_default=False)
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples that outputs are compared on.")] = 8,
    out: Annotated[
        Path | None, typer.Option(help="Folder [default: sensitivity-MODEL-BACKEND-PRECISION].", show_default=False)
    ] = None,
) -> None:
    """Show what each pattern, or each point, does to latency and fidelity: alone, and left out of a full model.

    Writes a plot, and sensitivity.json, from which searches can start: {use: sensitivity, params: {path: ...}}.
    A model alone gets random data, so do not trust its fidelity; an experiment file with one cell brings real data.

    Example: `qdq sensitivity zoo:resnet18 --param precision=f32`
    """
    from harness.analysis.sensitivity_report import sensitivity_report
    from harness.studies.study_task import make_study
    from harness.terminal_progress import TerminalProgress

    add_parent_to_sys_path(model)
    study = make_study(
        model,
        backend=backend,
        params=dict(parse_param(text) for text in param or []),
        **parse_sizes(shape, dim),
        precision=precision,
    )
    folder = short_path(out or Path(f"sensitivity-{study.spec.name}"))
    with rewrite_advice(), TerminalProgress() as terminal:
        header, rows, notes = sensitivity_report(study, by.value, folder, terminal, samples)
    print_table(header, rows)
    typer.echo("\n".join(notes))
