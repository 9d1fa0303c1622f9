"""Label files: COCO's JSON for boxes and for panoptic masks, lines "FILENAME CLASS" for classes, rows for arrays."""

from __future__ import annotations

import csv
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.errors import UserError, suggest_names

__all__ = ["LabelFile", "order_coco_categories", "read_labels", "read_rows", "select_coco_images"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelFile:
    """Content of a label file.

    Attributes:
        files: File name of each image, in the order of the label file.
        classes: Class index of each image, or None.
        coco: COCO's mapping of images, annotations and categories, or None.
        panoptic: The same in COCO's panoptic form, annotation i belonging to image i, or None.
    """

    files: tuple[str, ...]
    classes: npt.NDArray[np.int64] | None = None
    coco: Mapping[str, Any] | None = None
    panoptic: Mapping[str, Any] | None = None


def read_labels(path: Path) -> LabelFile:
    """Read a `.json` or `.txt` label file and check it.

    Raises:
        UserError: Another kind of file, malformed (with the line or the entry), an image twice or outside of
            the folder of images, or a box of an image or category that the file does not list.
    """
    if path.suffix not in (".json", ".txt"):
        raise UserError(f"{path}: labels are a .json file (COCO) or a .txt file (lines 'FILENAME CLASS')")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    labels = _parse_coco(text, path) if path.suffix == ".json" else _parse_classes(text, path)
    if not labels.files:
        raise UserError(f"{path}: lists no images")
    seen: set[str] = set()
    for file in labels.files:
        if file in seen:
            raise UserError(f"{path}: lists the image {file!r} twice")
        seen.add(file)
        _check_inside(file, f"{path}: names the image")
    return labels


def read_rows(path: Path) -> npt.NDArray[Any]:
    """Return the labels of arrays, one row a sample, of a `.npy`, `.npz`, `.csv` or `.txt` file.

    An `.npz` file holds one array. Text holds one number a line, or several between commas or spaces; a first line that
    is no numbers is a heading.

    Raises:
        UserError: Another kind of file, or one that is not so, with the line.
    """
    if path.suffix not in (".npy", ".npz", ".csv", ".txt"):
        raise UserError(f"{path}: labels of arrays are a .npy, .npz, .csv or .txt file, one row for each sample")
    try:
        if path.suffix in (".csv", ".txt"):
            return _read_numbers(path)
        found = np.load(path, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return found
        with found:
            if len(found.files) != 1:
                raise UserError(f"{path}: holds {', '.join(found.files)}; labels are a file with one array")
            array: npt.NDArray[Any] = found[found.files[0]]
            return array
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: cannot be read as labels: {error}") from error


def _read_numbers(path: Path) -> npt.NDArray[Any]:
    text = path.read_text(encoding="utf-8-sig")
    lines = list(csv.reader(text.splitlines())) if path.suffix == ".csv" else [row.split() for row in text.splitlines()]
    rows: list[list[float]] = []
    for number, line in enumerate(lines, 1):
        if not any(cell.strip() for cell in line):
            continue
        try:
            rows.append([float(cell) for cell in line])
        except ValueError:
            if rows or number > 1:
                raise UserError(f"{path}, line {number}: numbers are wanted, but got {','.join(line)!r}") from None
    widths = {len(row) for row in rows}
    if len(widths) != 1:
        raise UserError(f"{path}: rows of one length are wanted, but they have {sorted(widths) or 'no'} numbers")
    array = np.array(rows)
    whole = array.astype(np.int64) if np.isfinite(array).all() and (array == np.rint(array)).all() else array
    return whole[:, 0] if widths == {1} else whole


def select_coco_images(coco: Mapping[str, Any], chosen: Sequence[int]) -> dict[str, Any]:
    """Return the chosen images with their annotations and all categories."""
    images = [coco["images"][i] for i in chosen]
    kept = {image["id"] for image in images}
    return {**coco, "images": images, "annotations": [a for a in coco["annotations"] if a["image_id"] in kept]}


def order_coco_categories(coco: Mapping[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """Renumber the categories by their position in `classes`, so that ascending ids are the model's classes.

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


def _parse_classes(text: str, path: Path) -> LabelFile:
    files, classes = [], []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        file, _, index = line.strip().rpartition(" ")
        if not file or not index.isascii() or not index.isdecimal():
            raise UserError(f"{path}, line {number}: 'FILENAME CLASS' with a class from 0, but got {line!r}")
        files.append(file.strip())
        classes.append(int(index))
    return LabelFile(files=tuple(files), classes=np.array(classes, np.int64))


def _parse_coco(text: str, path: Path) -> LabelFile:
    try:
        coco = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from error
    for key in ("images", "annotations", "categories"):
        if not isinstance(coco, dict) or not isinstance(coco.get(key), list):
            raise UserError(f"{path}: COCO labels have a list {key!r}, but there is none")
    for image in coco["images"]:
        _check_fields(image, {"id": int, "file_name": str}, f"{path}: images")
    for category in coco["categories"]:
        _check_fields(category, {"id": int}, f"{path}: categories")
    images = {image["id"] for image in coco["images"]}
    categories = {category["id"] for category in coco["categories"]}
    files = tuple(image["file_name"] for image in coco["images"])
    if any(isinstance(a, dict) and "segments_info" in a for a in coco["annotations"]):
        return LabelFile(files=files, panoptic=_parse_panoptic(coco, categories, path))
    boxes = [_normalize_annotation(a, number, path) for number, a in enumerate(coco["annotations"], 1)]
    for box in boxes:
        if box["image_id"] not in images:
            raise UserError(f"{path}: annotation {box['id']}: there is no image with id {box['image_id']}")
        if box["category_id"] not in categories:
            raise UserError(f"{path}: annotation {box['id']}: there is no category with id {box['category_id']}")
    return LabelFile(files=files, coco={**coco, "annotations": boxes})


def _parse_panoptic(coco: Mapping[str, Any], categories: set[int], path: Path) -> dict[str, Any]:
    """Return the validated annotations in the order of the images."""
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


def _normalize_annotation(annotation: Any, number: int, path: Path) -> dict[str, Any]:
    """Return one annotation with its optional fields, area and iscrowd, and a new number.

    pycocotools counts a detection that matches the annotation with id 0 as one that matches none.
    """
    _check_fields(annotation, {"image_id": int, "category_id": int, "bbox": list}, f"{path}: annotations")
    bbox = annotation["bbox"]
    if len(bbox) != 4 or not all(isinstance(v, (int, float)) for v in bbox) or not np.isfinite(bbox).all():
        raise UserError(f"{path}: annotations: 'bbox' is x, y, width, height in pixels, but got {bbox!r}")
    return {"area": bbox[2] * bbox[3], "iscrowd": 0, **annotation, "id": number}


def _check_fields(entry: Any, fields: Mapping[str, type], where: str) -> None:
    for name, kind in fields.items():
        if not isinstance(entry, dict) or not isinstance(entry.get(name), kind):
            raise UserError(f"{where}: every entry has {name!r} ({kind.__name__}), but got {str(entry)[:80]}")
