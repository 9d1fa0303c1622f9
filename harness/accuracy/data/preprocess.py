"""Preprocessing of images into model inputs, shared by calibration and accuracy.

A custom preprocessing is a class with `prepare`, registered under `qdq.preprocessings` or named as
`package.module:Class`; ours are in `harness.accuracy.data.preprocess`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt
from PIL import Image

from harness.base.errors import UserError, suggest_names
from harness.plugins import registry

RgbImage = npt.NDArray[np.uint8]
"""Height x width x 3, red first."""
FloatArray = npt.NDArray[np.float32]
Layout = Literal["nchw", "nhwc"]
"""Order of the axes of an image input: N batch, C channels, H height, W width."""
Size = tuple[int, int]
"""Height and width in pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Model input with its pixel positions on the original image.

    Attributes:
        tensor: Channels x height x width; height x width x channels for an input in the layout "nhwc".
        scale: Input pixels per image pixel; (along x, along y) where they differ.
        offset: Position of the image's top left corner in the input: (x, y) in input pixels.
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
        """Convert boxes (n, 4) of left, top, right, bottom from input to image pixels, clipped to the image."""
        height, width = self.original
        moved = (np.asarray(boxes, np.float64).reshape(-1, 4) - np.tile(self.offset, 2)) / np.tile(self.scales, 2)
        inside: npt.NDArray[np.float64] = np.clip(moved, 0.0, np.array([width, height, width, height], np.float64))
        return inside


class ImagePreprocessor(Protocol):
    """Turns images into inputs.

    1. `prepare` depends on its arguments alone: calibration and accuracy see the same input.
    2. The tensor is float32, channels first, of the asked height and width; the harness transposes it for an input with
       the channels last.
    """

    def prepare(self, image: RgbImage, size: Size) -> Prepared:
        """Return the input of height and width `size` for one image."""
        ...


def open_preprocess(spec: str | Mapping[str, Any]) -> ImagePreprocessor:
    """Return a preprocessing by name, or by `{use: NAME, params: {...}, layout: ...}`.

    Raises:
        UserError: Unknown name or parameter.
    """
    use, params, _ = parse_preprocess(spec)
    made: ImagePreprocessor = registry.create_plugin("preprocessing", use, params)
    return made


def preprocess_fingerprint(spec: str | Mapping[str, Any]) -> str:
    """Return a fingerprint of name, parameters and source file of a preprocessing, for cache keys.

    Raises:
        UserError: The name is unknown.
    """
    use, params, layout = parse_preprocess(spec)
    facts = [use, dict(params), *([] if layout is None else [layout])]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    try:
        file = inspect.getsourcefile(registry.load_plugin("preprocessing", use))
        digest.update(Path(file).read_bytes() if file else b"")
    except (TypeError, OSError):  # made in memory, or in C: its name has to do
        pass
    return digest.hexdigest()


def parse_preprocess(spec: str | Mapping[str, Any]) -> tuple[str, Mapping[str, Any], Layout | None]:
    """Return name, parameters and layout of a preprocessing; the layout is None if the shape of the input decides.

    Raises:
        UserError: Neither a name nor a mapping of `use`, `params` and `layout`, or an unknown layout.
    """
    if isinstance(spec, str):
        return spec, {}, None
    use, params = parse_plugin_spec({key: value for key, value in spec.items() if key != "layout"})
    layout = spec.get("layout")
    if layout not in (None, *get_args(Layout)):
        raise UserError(f"layout: {' or '.join(get_args(Layout))}, but got {layout!r}")
    return use, params, layout


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


Resize = Literal["shrink", "shorter_side", "center_crop", "stretch"]
Resample = Literal["bilinear", "bicubic"]
FILTERS = MappingProxyType({"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC})
SHORTER_SIDE = 256 / 224  # the shorter side before the crop, over the crop's


def _resize_image(image: RgbImage, size: Size, resample: Resample = "bilinear") -> RgbImage:
    if image.shape[:2] == size:
        return image
    return np.asarray(Image.fromarray(image).resize((size[1], size[0]), FILTERS[resample]))


def _channels_first(image: npt.NDArray[Any]) -> FloatArray:
    return np.ascontiguousarray(image.transpose(2, 0, 1), np.float32)


def _center_crop(image: RgbImage, size: Size, resize: Resize, resample: Resample) -> Prepared:
    """Return the centre crop of an image, following the ImageNet protocol, with values 0 to 255."""
    if resize == "stretch":
        return _stretch(image, size, resample)
    height, width = image.shape[:2]
    shorter_side = min(size) * SHORTER_SIDE / min(height, width)
    wanted = {"center_crop": 1.0, "shorter_side": shorter_side, "shrink": min(1.0, shorter_side)}[resize]
    scale = max(wanted, size[0] / height, size[1] / width)
    resized = _resize_image(image, (max(round(height * scale), size[0]), max(round(width * scale), size[1])), resample)
    top, left = ((have - want) // 2 for have, want in zip(resized.shape[:2], size, strict=True))
    part = resized[top : top + size[0], left : left + size[1]]
    return Prepared(tensor=_channels_first(part), scale=scale, offset=(-left, -top), original=(height, width))


def _stretch(image: RgbImage, size: Size, resample: Resample = "bilinear") -> Prepared:
    """Resize the whole image without preserving its aspect ratio."""
    height, width = image.shape[:2]
    scale = (size[1] / width, size[0] / height)
    tensor = _channels_first(_resize_image(image, size, resample))
    return Prepared(tensor=tensor, scale=scale, offset=(0.0, 0.0), original=(height, width))


def _letterbox(
    image: RgbImage, size: Size, pad: int, *, centred: bool, whole: Callable[[float], int] = int
) -> Prepared:
    """Fit the whole image with its aspect ratio on a background of `pad`; channels in the order blue, green, red."""
    height, width = image.shape[:2]
    scale = min(size[0] / height, size[1] / width)
    inner = _resize_image(image, (max(whole(height * scale), 1), max(whole(width * scale), 1)))
    free = (size[0] - inner.shape[0], size[1] - inner.shape[1])
    top, left = (free[0] // 2, free[1] // 2) if centred else (0, 0)
    canvas = np.full((*size, 3), pad, np.uint8)
    canvas[top : top + inner.shape[0], left : left + inner.shape[1]] = inner[..., ::-1]
    return Prepared(tensor=_channels_first(canvas), scale=scale, offset=(left, top), original=(height, width))


def _normalize(prepared: Prepared, mean: tuple[float, ...], std: tuple[float, ...]) -> Prepared:
    """Return (x - mean) / std with one value per channel, in units of 0 to 255."""
    columns = (np.asarray(values, np.float32)[:, None, None] for values in (mean, std))
    return replace(prepared, tensor=(prepared.tensor - next(columns)) / next(columns))


@dataclass(frozen=True, slots=True)
class TorchImageNet:
    """Red, green, blue; torchvision's mean and standard deviation; the middle of the image.

    https://pytorch.org/vision/stable/models.html, "transforms" of a classification weight.

    Attributes:
        resize: Resizing before the crop. "shrink": a shorter side above 8/7 of the crop (256 for
            224) is brought to it, and smaller images are cropped as they are, so that images cut
            beforehand (227 x 227) keep their pixels; "shorter_side": always brought to it, as
            torchvision does; "center_crop": never. An image smaller than the crop is enlarged to it.
            "stretch": no crop, the whole image is brought to the input's height and width.
        resample: Filter that resizes.
    """

    resize: Resize = "shrink"
    resample: Resample = "bilinear"
    mean: ClassVar = (123.675, 116.28, 103.53)
    std: ClassVar = (58.395, 57.12, 57.375)

    def prepare(self, image: RgbImage, size: Size) -> Prepared:
        """See `ImagePreprocessor`."""
        return _normalize(_center_crop(image, size, self.resize, self.resample), self.mean, self.std)


class TFImageNet(TorchImageNet):
    """Red, green, blue; -1 to 1 (x / 127.5 - 1); the middle of the image; parameters as of `TorchImageNet`."""

    mean = std = (127.5,) * 3


class YOLOX:
    """Blue, green, red; 0 to 255; the image at the top left, the rest 114.

    https://github.com/Megvii-BaseDetection/YOLOX, `yolox/data/data_augment.py:preproc`.
    """

    def prepare(self, image: RgbImage, size: Size) -> Prepared:
        """See `ImagePreprocessor`."""
        return _letterbox(image, size, 114, centred=False)


class NanoDet:
    """Blue, green, red; ImageNet's mean and standard deviation; the image in the middle, the rest black.

    https://github.com/RangiLyu/nanodet, `nanodet/data/transform` with `keep_ratio: True`.
    """

    def prepare(self, image: RgbImage, size: Size) -> Prepared:
        """See `ImagePreprocessor`."""
        boxed = _letterbox(image, size, 0, centred=True)
        return _normalize(boxed, (103.53, 116.28, 123.675), (57.375, 57.12, 58.395))


class Ultralytics:
    """Red, green, blue; 0 to 1; the image in the middle, the rest 114: YOLOv8, YOLO11 and their like.

    https://github.com/ultralytics/ultralytics, `ultralytics/data/augment.py:LetterBox` with `auto=False`.
    """

    def prepare(self, image: RgbImage, size: Size) -> Prepared:
        """See `ImagePreprocessor`."""
        boxed = _letterbox(image, size, 114, centred=True, whole=round)
        return replace(boxed, tensor=np.ascontiguousarray(boxed.tensor[::-1]) / np.float32(255))


class RTDETR:
    """Red, green, blue; 0 to 1; the whole image brought to the input's size, its aspect ratio given up.

    https://github.com/lyuwenyu/RT-DETR, `rtdetrv2_pytorch/configs/dataset/coco_detection.yml`, validation transforms.
    """

    def prepare(self, image: RgbImage, size: Size) -> Prepared:
        """See `ImagePreprocessor`."""
        return _normalize(_stretch(image, size), (0.0,) * 3, (255.0,) * 3)


class Pixels:
    """Red, green, blue; 0 to 255 as they are; never resized: for models that do the rest themselves ("array")."""

    def prepare(self, image: RgbImage, size: Size) -> Prepared:
        """See `ImagePreprocessor`.

        Raises:
            UserError: The image has another size than the model's input.
        """
        return _require_same_size("array", image, size)


class Shapes:
    """Red, green, blue; 0 to 1; never resized: for `harness.zoo.shapes`."""

    def prepare(self, image: RgbImage, size: Size) -> Prepared:
        """See `ImagePreprocessor`.

        Raises:
            UserError: The image has another size than the model's input.
        """
        return _normalize(_require_same_size("shapes", image, size), (0.0,) * 3, (255.0,) * 3)


def _require_same_size(name: str, image: RgbImage, size: Size) -> Prepared:
    height, width = image.shape[:2]
    if (height, width) != size:
        raise UserError(
            f"preprocess {name!r} does not resize: the image is {height}x{width}, the input {size[0]}x{size[1]}"
        )
    return Prepared(tensor=_channels_first(image), scale=1.0, offset=(0.0, 0.0), original=(height, width))
