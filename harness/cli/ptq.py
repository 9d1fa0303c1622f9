"""`qdq ptq`."""

from __future__ import annotations

import typer

__all__ = ["ptq"]


def ptq(context: typer.Context) -> None:
    """Quantize a model with ModelOpt's own command line; nothing is searched, nothing is timed.

    Example: `qdq ptq --onnx_path model.onnx --calibration_data calib.npy --output_path model-int8.onnx`
    """
    from harness.compat.tao_specs.ptq import run_ptq as run

    done = run(context.args)
    if isinstance(done, list):
        typer.echo("\n".join(done))
        return
    for op, counts in done.layers.items():
        typer.echo(f"{op}\t{', '.join(f'{count} {precision}' for precision, count in counts.items())}")
    typer.echo(f"{done.path}: calibrated on {done.calibrated_on}")
