"""What turns an image into a model's input: one place for calibration and for accuracy.

A preprocessing of one's own is a class with `prepare`, registered under `qdq.preprocessings` or
named as `package.module:Class`. Images are resized by Pillow, bilinear unless said otherwise; its
filters average over the covered pixels when they shrink.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt
from PIL import Image

from harness import registry
from harness.errors import UserError, nearest

__all__ = [
    "YOLOX", "FloatArray", "NanoDet", "Prepared", "Preprocess", "Resample", "Resize", "RgbImage", "Shapes", "Size",
    "TFImageNet", "TorchImageNet", "open_plugin", "open_preprocess",
    "preprocess_fingerprint",
]  # fmt: skip

RgbImage = npt.NDArray[np.uint8]
"""Height x width x 3, red first."""
FloatArray = npt.NDArray[np.float32]
Size = tuple[int, int]
"""Height and width in pixels."""
Resize = Literal["shrink", "shorter_side", "center_crop"]
Resample = Literal["bilinear", "bicubic"]
FILTERS = MappingProxyType({"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC})
SHORTER_SIDE = 256 / 224  # the shorter side before the crop, over the crop's


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """One model input, and how its pixels lie on the image it was made from.

    Attributes:
        tensor: Channels x height x width.
        scale: Input pixels per image pixel.
        offset: Where the image's top left corner lies in the input: (x, y) in input pixels.
        original: Height and width of the image.
    """

    tensor: FloatArray
    scale: float
    offset: tuple[float, float]
    original: Size

    def to_image(self, boxes: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Boxes (n x 4: left, top, right, bottom) from input pixels to image pixels, cut off at the image's border."""
        height, width = self.original
        moved = (np.asarray(boxes, np.float64).reshape(-1, 4) - np.tile(self.offset, 2)) / self.scale
        inside: npt.NDArray[np.float64] = np.clip(moved, 0.0, np.array([width, height, width, height], np.float64))
        return inside


class Preprocess(Protocol):
    """Turns images into inputs.

    1. `prepare` depends on its arguments alone: calibration and accuracy see the same input.
    2. The tensor is float32, channels first, of the asked height and width.
    """

    def prepare(self, image: RgbImage, size: Size) -> Prepared:
        """The input of height and width `size` for one image."""
        ...


def open_preprocess(spec: str | Mapping[str, Any]) -> Preprocess:
    """A preprocessing by name, or by `{use: NAME, params: {...}}`.

    Raises:
        UserError: Unknown name or parameter.
    """
    use, params = open_plugin(spec)
    made: Preprocess = registry.create("preprocessing", use, params)
    return made


def preprocess_fingerprint(spec: str | Mapping[str, Any]) -> str:
    """Changes with name, parameters and source file of a preprocessing: what was made by another one is not kept.

    Raises:
        UserError: Unknown name.
    """
    use, params = open_plugin(spec)
    digest = hashlib.sha256(json.dumps([use, dict(params)], sort_keys=True, default=str).encode())
    try:
        file = inspect.getsourcefile(registry.load("preprocessing", use))
        digest.update(Path(file).read_bytes() if file else b"")
    except (TypeError, OSError):  # made in memory, or in C: its name has to do
        pass
    return digest.hexdigest()


def open_plugin(spec: str | Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Name and parameters of a plug-in that a parameter of an evaluator names.

    Raises:
        UserError: Neither a name nor a mapping of `use` and `params`.
    """
    if isinstance(spec, str):
        return spec, {}
    for key in spec:
        if key not in ("use", "params"):
            raise UserError(f"unknown key {key!r} beside 'use'; {nearest(str(key), ('use', 'params'))}")
    use, params = spec.get("use"), spec.get("params", {})
    if not isinstance(use, str) or not isinstance(params, Mapping):
        raise UserError(f"a name, or a mapping of 'use' (a name) and 'params' (a mapping), but got {dict(spec)!r}")
    return use, params


def _resized(image: RgbImage, size: Size, resample: Resample = "bilinear") -> RgbImage:
    if image.shape[:2] == size:
        return image
    return np.asarray(Image.fromarray(image).resize((size[1], size[0]), FILTERS[resample]))


def _channels_first(image: npt.NDArray[Any]) -> FloatArray:
    return np.ascontiguousarray(image.transpose(2, 0, 1), np.float32)


def _cropped(image: RgbImage, size: Size, resize: Resize, resample: Resample) -> Prepared:
    """The middle of an image, as the ImageNet protocol has it; the tensor still holds 0 to 255."""
    height, width = image.shape[:2]
    shorter_side = min(size) * SHORTER_SIDE / min(height, width)
    wanted = {"center_crop": 1.0, "shorter_side": shorter_side, "shrink": min(1.0, shorter_side)}[resize]
    scale = max(wanted, size[0] / height, size[1] / width)
    resized = _resized(image, (max(round(height * scale), size[0]), max(round(width * scale), size[1])), resample)
    top, left = ((have - want) // 2 for have, want in zip(resized.shape[:2], size, strict=True))
    part = resized[top : top + size[0], left : left + size[1]]
    return Prepared(tensor=_channels_first(part), scale=scale, offset=(-left, -top), original=(height, width))


def _letterboxed(image: RgbImage, size: Size, pad: int, *, centred: bool) -> Prepared:
    """The whole image, its aspect ratio kept, on a ground of `pad`; channels in the order blue, green, red."""
    height, width = image.shape[:2]
    scale = min(size[0] / height, size[1] / width)
    inner = _resized(image, (max(int(height * scale), 1), max(int(width * scale), 1)))
    free = (size[0] - inner.shape[0], size[1] - inner.shape[1])
    top, left = (free[0] // 2, free[1] // 2) if centred else (0, 0)
    canvas = np.full((*size, 3), pad, np.uint8)
    canvas[top : top + inner.shape[0], left : left + inner.shape[1]] = inner[..., ::-1]
    return Prepared(tensor=_channels_first(canvas), scale=scale, offset=(left, top), original=(height, width))


def _normalised(prepared: Prepared, mean: tuple[float, ...], std: tuple[float, ...]) -> Prepared:
    """(x - mean) / std, a value a channel, in units of 0 to 255."""
    columns = (np.asarray(values, np.float32)[:, None, None] for values in (mean, std))
    tensor = (prepared.tensor - next(columns)) / next(columns)
    return Prepared(tensor=tensor, scale=prepared.scale, offset=prepared.offset, original=prepared.original)


@dataclass(frozen=True, slots=True)
class TorchImageNet:
    """Red, green, blue; torchvision's mean and standard deviation; the middle of the image.

    https://pytorch.org/vision/stable/models.html, "transforms" of a classification weight.

    Attributes:
        resize: What comes before the crop. "shrink": a shorter side above 8/7 of the crop (256 for
            224) is brought to it, and smaller images are cropped as they are, so that images cut
            beforehand (227 x 227) keep their pixels; "shorter_side": always brought to it, as
            torchvision does; "center_crop": never. An image smaller than the crop is enlarged to it.
        resample: Filter that resizes.
    """

    resize: Resize = "shrink"
    resample: Resample = "bilinear"

    def __post_init__(self) -> None:
        _check(self.resize, self.resample)

    def prepare(self, image: RgbImage, size: Size) -> Prepared:
        """See `Preprocess`."""
        part = _cropped(image, size, self.resize, self.resample)
        return _normalised(part, (123.675, 116.28, 103.53), (58.395, 57.12, 57.375))


@dataclass(frozen=True, slots=True)
class TFImageNet:
    """Red, green, blue; -1 to 1 (x / 127.5 - 1); the middle of the image; parameters as of `TorchImageNet`."""

    resize: Resize = "shrink"
    resample: Resample = "bilinear"

    def __post_init__(self) -> None:
        _check(self.resize, self.resample)

    def prepare(self, image: RgbImage, size: Size) -> Prepared:
        """See `Preprocess`."""
        return _normalised(_cropped(image, size, self.resize, self.resample), (127.5,) * 3, (127.5,) * 3)


@dataclass(frozen=True, slots=True)
class YOLOX:
    """Blue, green, red; 0 to 255; the image at the top left, the rest 114.

    https://github.com/Megvii-BaseDetection/YOLOX, `yolox/data/data_augment.py:preproc`.
    """

    def prepare(self, image: RgbImage, size: Size) -> Prepared:
        """See `Preprocess`."""
        return _letterboxed(image, size, 114, centred=False)


@dataclass(frozen=True, slots=True)
class NanoDet:
    """Blue, green, red; ImageNet's mean and standard deviation; the image in the middle, the rest black.

    https://github.com/RangiLyu/nanodet, `nanodet/data/transform` with `keep_ratio: True`.
    """

    def prepare(self, image: RgbImage, size: Size) -> Prepared:
        """See `Preprocess`."""
        boxed = _letterboxed(image, size, 0, centred=True)
        return _normalised(boxed, (103.53, 116.28, 123.675), (57.375, 57.12, 58.395))


@dataclass(frozen=True, slots=True)
class Shapes:
    """Red, green, blue; 0 to 1; never resized: for `harness.zoo.shapes`."""

    def prepare(self, image: RgbImage, size: Size) -> Prepared:
        """See `Preprocess`.

        Raises:
            UserError: The image has another size than the model's input.
        """
        height, width = image.shape[:2]
        if (height, width) != size:
            raise UserError(
                f"preprocess 'shapes' does not resize: the image is {height}x{width}, the input {size[0]}x{size[1]}"
            )
        tensor = _channels_first(image) / np.float32(255)
        return Prepared(tensor=tensor, scale=1.0, offset=(0.0, 0.0), original=(height, width))


def _check(resize: str, resample: str) -> None:
    for name, value, allowed in (("resize", resize, get_args(Resize)), ("resample", resample, get_args(Resample))):
        if value not in allowed:
            raise ValueError(f"{name} is one of {', '.join(allowed)}, but got {value!r}")
