"""Preprocessing of images into model inputs, shared by calibration and accuracy.

A custom preprocessing is a class with `prepare`, registered under `qdq.preprocessings` or
named as `package.module:Class`; ours are in `harness.accuracy.data.preprocessings`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from harness import registry
from harness.errors import UserError, suggest_names

__all__ = [
    "FloatArray",
    "ImagePreprocessor",
    "Prepared",
    "RgbImage",
    "Size",
    "open_preprocess",
    "parse_plugin_spec",
    "preprocess_fingerprint",
]  # fmt: skip

RgbImage = npt.NDArray[np.uint8]
"""Height x width x 3, red first."""
FloatArray = npt.NDArray[np.float32]
Size = tuple[int, int]
"""Height and width in pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Model input with its pixel positions on the original image.

    Attributes:
        tensor: Channels x height x width.
        scale: Input pixels per image pixel; (along x, along y) where they differ.
        offset: Where the image's top left corner lies in the input: (x, y) in input pixels.
        original: Height and width of the image.
    """

    tensor: FloatArray
    scale: float | tuple[float, float]
    offset: tuple[float, float]
    original: Size

    @property
    def scales(self) -> npt.NDArray[np.float64]:
        """Return input pixels per image pixel, along x and along y."""
        return np.broadcast_to(np.asarray(self.scale, np.float64), 2)

    def to_image(self, boxes: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Convert boxes (shape (n, 4): left, top, right, bottom) from input pixels to image pixels, clipped to the
        image.
        """
        height, width = self.original
        moved = (np.asarray(boxes, np.float64).reshape(-1, 4) - np.tile(self.offset, 2)) / np.tile(self.scales, 2)
        inside: npt.NDArray[np.float64] = np.clip(moved, 0.0, np.array([width, height, width, height], np.float64))
        return inside


class ImagePreprocessor(Protocol):
    """Turns images into inputs.

    1. `prepare` depends on its arguments alone: calibration and accuracy see the same input.
    2. The tensor is float32, channels first, of the asked height and width.
    """

    def prepare(self, image: RgbImage, size: Size) -> Prepared:
        """Return the input of height and width `size` for one image."""
        ...


def open_preprocess(spec: str | Mapping[str, Any]) -> ImagePreprocessor:
    """Return a preprocessing by name, or by `{use: NAME, params: {...}}`.

    Raises:
        UserError: Unknown name or parameter.
    """
    use, params = parse_plugin_spec(spec)
    made: ImagePreprocessor = registry.create_plugin("preprocessing", use, params)
    return made


def preprocess_fingerprint(spec: str | Mapping[str, Any]) -> str:
    """Return a fingerprint of name, parameters and source file of a preprocessing, for cache keys.

    Raises:
        UserError: The name is unknown.
    """
    use, params = parse_plugin_spec(spec)
    digest = hashlib.sha256(json.dumps([use, dict(params)], sort_keys=True, default=str).encode())
    try:
        file = inspect.getsourcefile(registry.load_plugin("preprocessing", use))
        digest.update(Path(file).read_bytes() if file else b"")
    except (TypeError, OSError):  # made in memory, or in C: its name has to do
        pass
    return digest.hexdigest()


def parse_plugin_spec(spec: str | Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return name and parameters of a plug-in that a parameter of an evaluator names.

    Raises:
        UserError: Neither a name nor a mapping of `use` and `params`.
    """
    if isinstance(spec, str):
        return spec, {}
    for key in spec:
        if key not in ("use", "params"):
            raise UserError(f"unknown key {key!r} next to 'use'; {suggest_names(str(key), ('use', 'params'))}")
    use, params = spec.get("use"), spec.get("params", {})
    if not isinstance(use, str) or not isinstance(params, Mapping):
        raise UserError(f"a name, or a mapping of 'use' (a name) and 'params' (a mapping), but got {dict(spec)!r}")
    return use, params
