"""`qdq record`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.common import DimOption, ShapeOption, add_parent_to_sys_path, parse_param, parse_sizes, rewrite_advice

__all__ = ["record"]


def record(
    model: Annotated[
        str,
        typer.Argument(
            help="ONNX file, zoo:NAME, assets:PATH, or an experiment file (.yaml) with one cell.", show_default=False
        ),
    ],
    dimensions: Annotated[
        int | None,
        typer.Option(
            help="At most 2^N placements of the most telling dimensions [default: 11, or those of a finished table].",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Parquet file [default: MODEL-BACKEND-PRECISION.parquet].")] = None,
    backend: Annotated[str | None, typer.Option(help="Benchmarker [default: openvino].", show_default=False)] = None,
    param: Annotated[list[str] | None, typer.Option(help="Parameter of the backend, NAME=VALUE; repeat.")] = None,
    shape: ShapeOption = None,
    dim: DimOption = None,
    fidelity: Annotated[bool, typer.Option("--fidelity", help="Also compare outputs with the float model's.")] = False,
    search: Annotated[
        int, typer.Option(help="Evaluations of a search first; its best is looked around too.", min=0)
    ] = 0,
) -> None:
    """Measure every placement of a model's most telling dimensions: a table to replay searchers on.

    Goes on where it was interrupted. 1,024 placements of a small model take 20 to 30 minutes; leave the machine alone.

    What does not vary is fixed at the fastest placement seen. Where single changes find none that is fast, as of a
    Transformer on ONNX Runtime, let a search look for it first: `--search 100`.

    Example: `qdq record zoo:resnet18 --dimensions 11 --param precision=f32`
    """
    from harness.benchmark_table import read_table
    from harness.studies.record_table import record as record_table
    from harness.studies.replay_report import table_lines
    from harness.studies.study_task import make_study
    from harness.terminal_progress import TerminalProgress

    add_parent_to_sys_path(model)
    study = make_study(
        model,
        backend=backend,
        params=dict(parse_param(text) for text in param or []),
        **parse_sizes(shape, dim),
        fidelity=fidelity,
    )
    path = out or Path(f"{study.spec.name}.parquet")
    with rewrite_advice(), TerminalProgress() as terminal:
        record_table(study, path, dimensions, terminal, search=search)
    typer.echo("\n".join(table_lines(read_table(path))))
