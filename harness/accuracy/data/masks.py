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
from harness.base.errors import UserError, suggest_names

VOID_CLASS = -1
"""Class of pixels that no metric counts."""
BORDER_PIXEL = 255  # value of undecided pixels in PASCAL VOC and most other data sets
PICTURE_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # no EPS, for which Pillow starts Ghostscript
MAX_PICTURE_PIXELS = 50_000_000
Mask = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexMasks:
    """Source of the class index of each pixel of an image, read from a PNG with the image's name; 255 is no class.

    Attributes:
        folder: Folder of the masks.
        names: File names of the images.
    """

    folder: Path
    names: tuple[str, ...]

    def path(self, i: int) -> Path:
        """Return the path of the mask of image i."""
        return (self.folder / PurePath(self.names[i])).with_suffix(".png")

    def read(self, i: int, size: Size) -> Mask:
        """Return the class of each pixel of image i (`VOID_CLASS`: none); `size` is its height and width.

        Raises:
            UserError: The file cannot be read, has another size than the image, or is coloured.
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
    """Source of the class index of each pixel of an image, read from masks in COCO's panoptic form.

    A pixel of a mask is the id of a segment, red + 256 green + 65536 blue; 0 is no segment (Kirillov et al. 2019,
    arXiv:1801.00868; cocodataset.org, "Format Data", 4).

    Attributes:
        folder: Folder of the masks.
        annotations: `file_name` and `segments_info` of each image.
        categories: Name by category id.
        classes: Names of the model's classes in the order of its outputs. All other pixels have class 0 if no category
            has the name of this class ("background"), else no class (`VOID_CLASS`).
    """

    folder: Path
    annotations: tuple[Mapping[str, Any], ...]
    categories: Mapping[int, str]
    classes: Sequence[str]

    def path(self, i: int) -> Path:
        """Return the path of the mask of image i."""
        return self.folder / str(self.annotations[i]["file_name"])

    def read(self, i: int, size: Size) -> Mask:
        """Return the class of each pixel of image i (`VOID_CLASS`: none); `size` is its height and width.

        Raises:
            UserError: The file cannot be read, has another size than the image, or is not coloured.
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
        UserError: A mask is missing, or a class other than the first is no category of the labels.
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
        UserError: The picture cannot be read or has more than 50 million pixels; also for errors within the context.
            The message calls it `what`.
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
        UserError: The file cannot be read, or has another size than the image.
    """
    with open_picture(path, "a mask") as image:
        pixels = np.asarray(image.convert("RGB") if image.mode == "RGBA" else image).astype(np.int64)
    if pixels.shape[:2] != size:
        height, width = pixels.shape[:2]
        raise UserError(f"{path}: is {height}x{width}, but its image is {size[0]}x{size[1]}")
    return pixels
