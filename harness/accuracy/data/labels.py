"""Label files: COCO's JSON for boxes and for panoptic masks, and lines "FILENAME CLASS" for classes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from harness.accuracy.data.preprocess import Size
from harness.base.errors import UserError, suggest_names
from harness.base.files import read_text

MAX_PIXELS = 1e9  # limit of coordinates; no image is larger
MAX_LABEL_BYTES = 2**30  # those of COCO's training images have 450 MB
MAX_CLASS_DIGITS = 9
MAX_ID = 2**63  # pycocotools stores ids as int64
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelFile:
    """Content of a label file.

    Attributes:
        files: File name of each image, in the order of the label file.
        classes: Class index of each image, or None.
        coco: COCO's mapping of images, annotations and categories, or None.
        panoptic: The mapping in COCO's panoptic form, with annotations in the order of the images, or None.
    """

    files: tuple[str, ...]
    classes: npt.NDArray[np.int64] | None = None
    coco: Mapping[str, Any] | None = None
    panoptic: Mapping[str, Any] | None = None


def read_labels(path: Path) -> LabelFile:
    """Read a `.json` or `.txt` label file and check it.

    Raises:
        UserError: The file is of another kind or malformed (the message names the line or entry), lists an image twice
            or outside of the folder of images, or has a box of an unknown image or category.
    """
    if path.suffix not in (".json", ".txt"):
        raise UserError(f"{path}: labels are a .json file (COCO) or a .txt file (lines 'FILENAME CLASS')")
    text = read_text(path, "labels", MAX_LABEL_BYTES)
    if path.suffix == ".json":
        labels = _parse_coco(text, path)
    else:
        files, classes = [], []
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip():
                continue
            file, _, index = line.strip().rpartition(" ")
            if not file or not index.isascii() or not index.isdecimal() or len(index) > MAX_CLASS_DIGITS:
                raise UserError(f"{path}, line {number}: 'FILENAME CLASS' with a class from 0, but got {line!r}")
            files.append(file.strip())
            classes.append(int(index))
        labels = LabelFile(files=tuple(files), classes=np.array(classes, np.int64))
    if not labels.files:
        raise UserError(f"{path}: lists no images")
    seen: set[str] = set()
    for file in labels.files:
        if file in seen:
            raise UserError(f"{path}: lists the image {file!r} twice")
        seen.add(file)
        _check_inside(file, f"{path}: names the image")
    return labels


def select_coco_images(coco: Mapping[str, Any], chosen: Sequence[int]) -> dict[str, Any]:
    """Return a copy of COCO labels with the images of the given positions, their annotations and all categories."""
    images = [coco["images"][i] for i in chosen]
    kept = {image["id"] for image in images}
    return {**coco, "images": images, "annotations": [a for a in coco["annotations"] if a["image_id"] in kept]}


def order_coco_categories(coco: Mapping[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """Return a copy of COCO labels with category ids by position in `classes`, so that they are in the model's order.

    Raises:
        UserError: A category that has boxes is not among the classes.
    """
    names = {category["id"]: category.get("name") for category in coco["categories"]}
    numbers = {name: number for number, name in enumerate(classes, 1)}
    for annotation in coco["annotations"]:
        name = names[annotation["category_id"]]
        if name not in numbers:
            raise UserError(
                f"data.classes: the labels have boxes of category {name!r}, which is none of them; "
                f"{suggest_names(str(name), classes)}"
            )
    annotations = [{**a, "category_id": numbers[names[a["category_id"]]]} for a in coco["annotations"]]
    categories = [{"id": number, "name": name} for name, number in numbers.items()]
    return {**coco, "annotations": annotations, "categories": categories}


def _check_inside(file: str, what: str) -> None:
    inside = PureWindowsPath(file)  # it knows both separators
    if inside.drive or inside.root or ".." in inside.parts:
        raise UserError(f"{what} {file!r}, outside of the folder of images, which is refused")


def _parse_coco(text: str, path: Path) -> LabelFile:
    try:
        coco = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON: {error}") from error
    for key in ("images", "annotations", "categories"):
        if not isinstance(coco, dict) or not isinstance(coco.get(key), list):
            raise UserError(f"{path}: COCO labels have a list {key!r}, but there is none")
    for image in coco["images"]:
        _check_fields(image, {"id": int, "file_name": str}, f"{path}: images")
        sizes = {key: int for key in ("height", "width") if image.get(key) is not None}
        _check_fields(image, sizes, f"{path}: images")
    for category in coco["categories"]:
        _check_fields(category, {"id": int}, f"{path}: categories")
    images = {image["id"] for image in coco["images"]}
    categories = {category["id"] for category in coco["categories"]}
    files = tuple(image["file_name"] for image in coco["images"])
    if any(isinstance(a, dict) and "segments_info" in a for a in coco["annotations"]):
        return LabelFile(files=files, panoptic=_parse_panoptic(coco, categories, path))
    boxes, seen = [], dict[tuple[Any, ...], int]()
    for number, annotation in enumerate(coco["annotations"], 1):
        _check_fields(annotation, {"image_id": int, "category_id": int, "bbox": list}, f"{path}: annotations")
        bbox, where = annotation["bbox"], f"{path}: annotation {number}"
        if len(bbox) != 4 or not all(isinstance(v, (int, float)) and abs(v) < MAX_PIXELS for v in bbox):
            raise UserError(f"{where}: 'bbox' is x, y, width, height in pixels, but got {bbox!r}")
        if min(bbox[2:]) < 0:
            raise UserError(f"{where}: 'bbox' has a negative width or height: {bbox!r}")
        # Ids are replaced because pycocotools treats a match with id 0 as no match.
        box = {"area": bbox[2] * bbox[3], "iscrowd": 0, **annotation, "id": number}
        area, crowd = box["area"], box["iscrowd"]
        if not isinstance(area, (int, float)) or not 0 <= area < MAX_PIXELS**2 or crowd not in (0, 1):
            raise UserError(f"{where}: 'area' is from 0, 'iscrowd' 0 or 1, but got {area!r}, {crowd!r}")
        boxes.append(box)
        first = seen.setdefault((box["image_id"], box["category_id"], *box["bbox"]), number)
        if first != number:
            logger.warning("%s: annotation %d repeats annotation %d: detections count once", path, number, first)
        for key, known in (("image", images), ("category", categories)):
            if box[f"{key}_id"] not in known:
                raise UserError(f"{path}: annotation {box['id']}: there is no {key} with id {box[f'{key}_id']}")
    return LabelFile(files=files, coco={**coco, "annotations": boxes})


def _parse_panoptic(coco: Mapping[str, Any], categories: set[int], path: Path) -> dict[str, Any]:
    """Return the validated mapping with its annotations in the order of the images."""
    found = {}
    for annotation in coco["annotations"]:
        _check_fields(annotation, {"image_id": int, "file_name": str, "segments_info": list}, f"{path}: annotations")
        _check_inside(annotation["file_name"], f"{path}: names the mask")
        for segment in annotation["segments_info"]:
            _check_fields(segment, {"id": int, "category_id": int}, f"{path}: segments_info")
            if segment["category_id"] not in categories:
                raise UserError(f"{path}: segment {segment['id']}: no category with id {segment['category_id']}")
        found[annotation["image_id"]] = annotation
    for category in coco["categories"]:
        _check_fields(category, {"name": str}, f"{path}: categories")
    for image in coco["images"]:
        if image["id"] not in found:
            raise UserError(f"{path}: the image {image['file_name']!r} has no mask")
    return {**coco, "annotations": [found[image["id"]] for image in coco["images"]]}


def _check_fields(entry: Any, fields: Mapping[str, type], where: str) -> None:
    for name, kind in fields.items():
        value: Any = entry.get(name) if isinstance(entry, dict) else None
        if not isinstance(value, kind) or (isinstance(value, int) and not -MAX_ID <= value < MAX_ID):
            raise UserError(f"{where}: every entry has {name!r} ({kind.__name__}), but got {str(entry)[:80]}")


VOID_CLASS = -1
"""Class of pixels that no metric counts."""
BORDER_PIXEL = 255  # value of undecided pixels in PASCAL VOC and most other data sets
PICTURE_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # no EPS, for which Pillow starts Ghostscript
MAX_PICTURE_PIXELS = 50_000_000
Mask = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Masks:
    """Source of the class index of each pixel of an image, read from a PNG.

    A pixel is a class index, 255 is no class; or in COCO's panoptic form the id of a segment, red + 256 green + 65536
    blue, 0 is no segment (Kirillov et al. 2019, arXiv:1801.00868; cocodataset.org, "Format Data", 4).

    Attributes:
        folder: Folder of the masks.
        files: File of the mask of each image.
        segments: `segments_info` of each image in the panoptic form; else None.
        categories: Name by category id of the segments.
        classes: Names of the model's classes in the order of its outputs. Pixels of other categories have class 0 if no
            category has the name of this class ("background"), else no class (`VOID_CLASS`).
    """

    folder: Path
    files: Sequence[str]
    segments: Sequence[Any] | None = None
    categories: Mapping[int, str] = field(default_factory=dict)
    classes: Sequence[str] = ()

    def read(self, i: int, size: Size) -> Mask:
        """Return the class of each pixel of image i (`VOID_CLASS`: none); `size` is its height and width.

        Raises:
            UserError: The file cannot be read, has another size than the image, or is coloured or not against its form.
        """
        path = self.folder / self.files[i]
        with open_picture(path, "a mask") as image:
            pixels = np.asarray(image.convert("RGB") if image.mode == "RGBA" else image).astype(np.int64)
        if pixels.shape[:2] != size:
            height, width = pixels.shape[:2]
            raise UserError(f"{path}: is {height}x{width}, but its image is {size[0]}x{size[1]}")
        if self.segments is None:
            if pixels.ndim != 2:
                raise UserError(
                    f"{path}: is coloured; a mask has one channel, whose values are class indices (panoptic masks need "
                    "data.labels, their .json file)"
                )
            return np.where(pixels == BORDER_PIXEL, VOID_CLASS, pixels)
        if pixels.ndim != 3:
            raise UserError(f"{path}: has one channel, but a panoptic mask is coloured")
        ids = pixels[..., :3] @ np.array([1, 256, 65536])
        mask = np.full(ids.shape, VOID_CLASS if self.classes[0] in self.categories.values() else 0, np.int64)
        for segment in self.segments[i]:
            name = self.categories[segment["category_id"]]
            if name in self.classes:
                mask[ids == segment["id"]] = self.classes.index(name)
        return mask


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
