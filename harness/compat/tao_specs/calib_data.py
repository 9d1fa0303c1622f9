"""`qdq calib-data`: a folder of images as one calibration file, prepared as for the model at run time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from harness import registry
from harness.accuracy.data.batching import image_input, image_size
from harness.accuracy.data.datasets import open_images, spread_indices
from harness.accuracy.data.preprocess import Size, open_preprocess
from harness.compat.tao_specs.error_key_mapping import map_error_keys
from harness.compat.tao_specs.model_file import ShapeOptionNames, open_onnx_file, static_shapes, static_types
from harness.errors import UserError
from harness.graph.passes.static_shapes import parse_shape

__all__ = ["ADVISED_SAMPLE_COUNT", "DEFAULT_INPUT_SIZES", "input_size", "write_calibration"]

ADVISED_SAMPLE_COUNT = 500
"""Samples for CNNs and ViTs (ModelOpt's ONNX PTQ README)."""
DEFAULT_INPUT_SIZES: Mapping[str, Size] = MappingProxyType(
    {
        "ultralytics": (640, 640), "rtdetr": (640, 640), "yolox": (640, 640), "nanodet": (320, 320),
        "torch_imagenet": (224, 224), "tf_imagenet": (224, 224),
    }
)  # fmt: skip
"""Inputs that models with these preprocessings have as a rule; YOLOX-Nano and -Tiny have 416 x 416."""


MODEL_OPTION_NAMES = ShapeOptionNames(key="--model", remedy="its height and width instead, such as --size 640x640")


def input_size(preprocess: str, size: str | None, model: str | None) -> Size:
    """Height and width of the inputs: of the model, as given, or as usual for the preprocessing.

    Args:
        preprocess: Its name.
        size: "640x640", height first.
        model: ONNX file.

    Raises:
        UserError: Nothing of that, both size and model, or no preprocessing of that name.
    """
    if size is not None and model is not None:
        raise UserError("--size and --model: give one of them")
    if model is not None:
        _, declared = open_onnx_file(model, Path.cwd(), "--model")
        types = static_types(declared, static_shapes(declared, 1, {}, MODEL_OPTION_NAMES))
        name = image_input(types)
        return image_size(name, types[name][1])
    if size is not None:
        found = parse_shape(size, "--size")
        if len(found) != 2:
            raise UserError(f"--size: height and width, such as 640x640, but got {size!r}")
        return found
    registry.find_entry_point("preprocessing", preprocess)
    if preprocess not in DEFAULT_INPUT_SIZES:
        raise UserError(
            f"--preprocess {preprocess}: say the size of the inputs, by --size 640x640 or --model FILE.onnx"
        )
    return DEFAULT_INPUT_SIZES[preprocess]


def write_calibration(images: Path, output: Path, preprocess: Mapping[str, Any], size: Size, samples: int) -> Size:
    """Write `samples` x 3 x height x width float32 to a `.npy` file, one image in memory at a time.

    Args:
        images: Folder; its images are taken in the order of their names, evenly spread where there are more.
        output: The file; appears whole or not at all.
        preprocess: `{use: NAME, params: {...}}`.
        size: Height and width of the inputs.
        samples: At most.

    Returns:
        Number of samples, and of images in the folder.

    Raises:
        UserError: No images, one that cannot be read, or a file that cannot be written.
    """
    if output.suffix != ".npy":
        raise UserError(f"-o {output}: a .npy file is written")
    prepare = open_preprocess(preprocess)
    with map_error_keys({"images": "IMAGES"}):
        data = open_images({"use": "images", "images": str(images)})
    chosen = spread_indices(len(data), samples)
    part = output.with_name(f"{output.name}.{os.getpid()}.part")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"-o {output}: cannot be written: {error.strerror or error}") from error
    try:
        file = np.lib.format.open_memmap(part, mode="w+", dtype=np.float32, shape=(len(chosen), 3, *size))
        for row, index in enumerate(chosen):
            file[row] = prepare.prepare(data.image(index), size).tensor
        file.flush()
        del file
        part.replace(output)
    except OSError as error:
        raise UserError(f"-o {output}: cannot be written: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)
    return len(chosen), len(data)
