"""`qdq noise`."""

from __future__ import annotations

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
)

__all__ = ["noise"]


def noise(
    model: Annotated[
        str,
        typer.Argument(
            help="ONNX file, zoo:NAME, assets:PATH, or an experiment file (.yaml) with one cell.", show_default=False
        ),
    ],
    backend: Annotated[str | None, typer.Option(help="Benchmarker [default: openvino].", show_default=False)] = None,
    param: Annotated[list[str] | None, typer.Option(help="Parameter of the backend, NAME=VALUE; repeat.")] = None,
    shape: ShapeOption = None,
    dim: DimOption = None,
    placement: Annotated[str, typer.Option(help="What is measured: float, all or linear.")] = "float",
    processes: Annotated[int, typer.Option(help="Fresh processes.")] = 6,
    builds: Annotated[int, typer.Option(help="Fresh builds in each process.")] = 4,
    readings: Annotated[int, typer.Option(help="Inferences of each build.")] = 30,
    out: Annotated[
        Path | None, typer.Option(help="Folder [default: noise-MODEL-BACKEND-PARAMETERS-PLACEMENT].")
    ] = None,
) -> None:
    """Show where the noise of a latency comes from: within a run, between builds, between processes.

    A model alone gets random data; an experiment file with one cell brings calibration data and its own sampling.

    Example: `qdq noise zoo:resnet18 --param precision=f32`
    """
    from harness.analysis.noise import NestedDesign
    from harness.analysis.noise_report import noise_report
    from harness.studies.study_task import make_study, study_name
    from harness.terminal_progress import TerminalProgress

    add_parent_to_sys_path(model)
    study = make_study(
        model,
        backend=backend,
        params=dict(parse_param(text) for text in param or []),
        **parse_sizes(shape, dim),
    )
    design = NestedDesign(processes=processes, builds=builds, readings=readings)
    folder = out or Path(f"noise-{study_name(study, placement)}")
    with rewrite_advice(), TerminalProgress() as terminal:
        header, rows, notes = noise_report(study, placement, design, folder, terminal)
    print_table(header, rows)
    typer.echo("\n".join(notes))
