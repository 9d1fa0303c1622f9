"""`qdq sensitivity`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.common import DimOption, ShapeOption, advised, beside, param_option, sizes_option, table, tidy

__all__ = ["sensitivity"]


class By(StrEnum):
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
    by: Annotated[By, typer.Option(help="What is quantized, or left out, at a time.")] = By.pattern,
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
    from harness.terminal_progress import Terminal

    beside(model)
    study = make_study(
        model,
        backend=backend,
        params=dict(param_option(text) for text in param or []),
        **sizes_option(shape, dim),
        precision=precision,
    )
    folder = tidy(out or Path(f"sensitivity-{study.spec.name}"))
    with advised(), Terminal() as terminal:
        header, rows, notes = sensitivity_report(study, by.value, folder, terminal, samples)
    table(header, rows)
    typer.echo("\n".join(notes))
