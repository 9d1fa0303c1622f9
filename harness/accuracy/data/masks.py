"""Segmentation masks: PNG files whose pixels are class indices, or COCO's panoptic PNGs with their JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from harness.accuracy.data.preprocess import Size
from harness.errors import UserError, suggest_names

VOID_CLASS = -1
"""Pixels of no class: they count for nothing."""
BORDER_PIXEL = 255  # PASCAL VOC and most others mark undecided pixels so
PICTURE_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # EPS would start Ghostscript
MAX_PICTURE_PIXELS = 50_000_000
Mask = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexMasks:
    """Index masks: a PNG per image, named like it; a pixel is a class index, 255 is no class."""

    folder: Path
    names: tuple[str, ...]

    def path(self, i: int) -> Path:
        """Return the path of the mask of image i."""
        return (self.folder / PurePath(self.names[i])).with_suffix(".png")

    def read(self, i: int, size: Size) -> Mask:
        """Return the class of each pixel of image i.

        Raises:
            UserError: See `_read_pixels`; also where the PNG is coloured, so that its pixels are no indices.
        """
        pixels = _read_pixels(self.path(i), size)
        if pixels.ndim != 2:
            raise UserError(
                f"{self.path(i)}: is coloured; a mask has one channel, whose values are class indices "
                "(panoptic masks need data.labels, their .json file)"
            )
        return np.where(pixels == BORDER_PIXEL, VOID_CLASS, pixels)


@dataclass(frozen=True, slots=True, kw_only=True)
class PanopticMasks:
    """COCO's panoptic form (Kirillov et al. 2019, arXiv:1801.00868; cocodataset.org, "Format Data", 4).

    A pixel is the id of a segment, red + 256 green + 65536 blue; 0 is none.

    Attributes:
        annotations: One an image, in data order: `file_name` and `segments_info`.
        categories: Name by category id.
        classes: Names of the model's classes in the order of its outputs. Pixels of no other class are of the first one
            where no category is called like it ("background"), else they count for nothing.
    """

    folder: Path
    annotations: tuple[Mapping[str, Any], ...]
    categories: Mapping[int, str]
    classes: Sequence[str]

    def path(self, i: int) -> Path:
        """Return the path of the mask of image i."""
        return self.folder / str(self.annotations[i]["file_name"])

    def read(self, i: int, size: Size) -> Mask:
        """Return the class of each pixel of image i.

        Raises:
            UserError: See `_read_pixels`; also where the PNG is not coloured.
        """
        pixels = _read_pixels(self.path(i), size)
        if pixels.ndim != 3:
            raise UserError(f"{self.path(i)}: has one channel, but a panoptic mask is coloured")
        ids = pixels[..., :3] @ np.array([1, 256, 65536])
        rest = VOID_CLASS if self.classes[0] in self.categories.values() else 0
        mask = np.full(ids.shape, rest, np.int64)
        for segment in self.annotations[i]["segments_info"]:
            name = self.categories[segment["category_id"]]
            if name in self.classes:
                mask[ids == segment["id"]] = self.classes.index(name)
        return mask


Masks = IndexMasks | PanopticMasks


def require_mask_files(masks: Masks, count: int) -> None:
    """Check that the mask files exist, without reading them.

    Raises:
        UserError: A mask is missing; a list of classes of which none is a category of the labels.
    """
    for i in range(count):
        if not masks.path(i).is_file():
            raise UserError(f"data.masks: {masks.path(i).name} is not in {masks.folder}")
    if isinstance(masks, PanopticMasks):
        known = set(masks.categories.values())
        for name in masks.classes[1:]:
            if name not in known:
                raise UserError(f"data.classes: the labels have no category {name!r}; {suggest_names(name, known)}")


@contextmanager
def open_picture(path: Path, what: str) -> Iterator[Image.Image]:
    """Open a picture of one of `PICTURE_FORMATS`; the file's content decides, not its name.

    Raises:
        UserError: It cannot be read, also within the context.
    """
    try:
        with Image.open(path, formats=PICTURE_FORMATS) as image:
            if image.width * image.height > MAX_PICTURE_PIXELS:
                raise UserError(f"{path}: {image.width}x{image.height} pixels, but at most {MAX_PICTURE_PIXELS:,}")
            yield image
    except UserError:
        raise
    except Exception as error:  # decoders of Pillow raise classes of many kinds on damaged files
        raise UserError(f"{path}: cannot be read as {what}: {error}") from error


def _read_pixels(path: Path, size: Size) -> Mask:
    """Return the raw values of a PNG.

    Raises:
        UserError: It cannot be read, or its size is not that of its image.
    """
    with open_picture(path, "a mask") as image:
        pixels = np.asarray(image.convert("RGB") if image.mode == "RGBA" else image).astype(np.int64)
    if pixels.shape[:2] != size:
        height, width = pixels.shape[:2]
        raise UserError(f"{path}: is {height}x{width}, but its image is {size[0]}x{size[1]}")
    return pixels
