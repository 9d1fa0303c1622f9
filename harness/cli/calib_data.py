"""`qdq calib-data`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["calib_data"]


def calib_data(
    images: Annotated[Path, typer.Argument(help="Folder of images.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="The .npy file to write.", show_default=False)],
    preprocess: Annotated[str, typer.Option(help="As for the model at run time; see qdq list.", show_default=False)],
    samples: Annotated[int, typer.Option(min=1, help="Images at most; 500 or more are advised.")] = 512,
    size: Annotated[
        str | None, typer.Option(help="Height and width of the inputs, 640x640 [default: usual for PREPROCESS].")
    ] = None,
    model: Annotated[str | None, typer.Option(help="ONNX file whose input says the size.")] = None,
) -> None:
    """Make a calibration file from a folder of images.

    Example: `qdq calib-data coco/train2017 -o calib.npy --preprocess ultralytics --samples 500`
    """
    from harness.compat.tao_specs.calib_data import ADVISED_SAMPLE_COUNT, input_size, write_calibration

    found = input_size(preprocess, size, model)
    count, total = write_calibration(images, output, {"use": preprocess, "params": {}}, found, samples)
    typer.echo(f"{output}: {count} of {total} images, {count} x 3 x {found[0]} x {found[1]} float32, {preprocess}")
    if count < ADVISED_SAMPLE_COUNT:
        typer.echo(f"{count} samples are few: {ADVISED_SAMPLE_COUNT} or more are advised for CNNs and ViTs", err=True)
