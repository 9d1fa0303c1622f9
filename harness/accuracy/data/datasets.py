"""Data sets of images and arrays, described by a mapping as in an experiment file.

    {use: images, images: assets:coco/val2017, labels: assets:coco/instances_val2017_128.json, start: 0, count: 128}
    {use: shapes, split: evaluation, count: 64}
    {use: images, images: street, masks: street_masks}
    {use: npz, path: feeds.npz}
    {use: npz, path: feeds.npz, labels: y}
    {use: npy, path: images.npy, labels: classes.csv}

Labels of images are a `.json` file in COCO's form or a `.txt` file with lines "FILENAME CLASS"; the images are those
that the file lists, in its order. Without labels they are all images of the folder, by name. `masks` is a folder of PNG
files (`harness.accuracy.data.labels`). `classes` lists the names of the model's classes in the order of its outputs;
without it they are the categories of the labels by ascending id. An `.npz` file has one array per input of the model,
the samples along the first axis; a `.npy` file is for a model with one input. `path` may be a folder of such files,
whose samples may differ in shape. `labels` of arrays are the name of an
array in the `.npz` file, or a `.npy`, `.npz`, `.csv` or `.txt` file with one row per sample.

`start` and `count` select a part of the samples, and `half` one half of this part: "search" to choose placements, or
"report" to report their accuracy. The halves share no sample: a hash of the sample's name (or row number) decides, so a
sample belongs to the same half in every selection. `every: n` then selects every n-th sample.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.accuracy.data.arrays import (
    SUBSET_KEYS,
    ArrayDataset,
    SubsetSelector,
    canonical_json,
    open_arrays,
    read_int_key,
    read_text_key,
    select_rows,
)
from harness.accuracy.data.labels import (
    LabelFile,
    Mask,
    Masks,
    open_picture,
    order_coco_categories,
    read_labels,
    select_coco_images,
)
from harness.accuracy.data.preprocess import RgbImage
from harness.base.errors import UserError, suggest_names
from harness.base.paths import resolve_path
from harness.config.sections import duplicates
from harness.zoo import shapes

logger = logging.getLogger(__name__)
ORIENTATION_TAG = 0x0112  # EXIF 2.32, table 4
IMAGE_SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
ALLOWED_DATA_KEYS: Mapping[str, tuple[str, ...]] = {
    "images": ("images", "labels", "masks", "classes", *SUBSET_KEYS),
    "shapes": ("split", *SUBSET_KEYS),
    "npz": ("path", "labels", "spread", *SUBSET_KEYS),
    "npy": ("path", "labels", "spread", *SUBSET_KEYS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageDataset:
    """Images, which are read on demand, with their labels.

    Attributes:
        names: File name of each image.
        image: Function that returns the image with an index as 8-bit RGB, height x width x 3; raises UserError if it
            cannot be read or its size differs from that in the labels.
        labels: Class index of each image; None: no labels of this kind.
        coco: Boxes of these images in the form of `pycocotools.coco.COCO.dataset`, with `coco["images"]` in the order
            of `names`; class k of the model is the k-th category by ascending id. None: no labels of this kind.
        mask: Function that returns the class of each pixel of the image with an index, `VOID_CLASS` for pixels of no
            class; raises UserError if the mask cannot be read or its size differs from that of the image. None: no
            labels of this kind.
        fingerprint: SHA-256 of the specification, the names and contents of the images, and the labels.
        available: Number of images before a limit was applied; None: unknown.
    """

    names: tuple[str, ...]
    image: Callable[[int], RgbImage]
    labels: npt.NDArray[np.int64] | None = None
    coco: Mapping[str, Any] | None = None
    mask: Callable[[int], Mask] | None = None
    fingerprint: str
    available: int | None = None

    def __len__(self) -> int:
        return len(self.names)

    def sample_name(self, i: int) -> str:
        """Return the name of image i for messages."""
        return self.names[i]


def open_data(
    spec: Mapping[str, Any], base: Path | None = None, limit: int | None = None, *, spread: bool = False
) -> ImageDataset | ArrayDataset:
    """Open the images or arrays that a mapping of an experiment describes (see the module's docstring).

    Args:
        spec: The mapping; its key `use` is "images", "shapes", "npz" or "npy".
        base: Folder that relative paths start from.
        limit: Maximum number of samples; the others are not read.
        spread: Whether a limit selects samples evenly, because data are often sorted by class, or the first ones.

    Raises:
        UserError: A kind, key or value is invalid, there are no data, labels are malformed or name a missing image, or
            the selection is beyond the end.
    """
    kind = str(spec.get("use"))
    if kind not in ALLOWED_DATA_KEYS:
        raise UserError(f"data.use: no kind of data is called {kind!r}; {suggest_names(kind, ALLOWED_DATA_KEYS)}")
    for key in spec:
        if key not in ("use", *ALLOWED_DATA_KEYS[kind]):
            raise UserError(f"data.{key}: unknown key for {kind!r}; {suggest_names(str(key), ALLOWED_DATA_KEYS[kind])}")

    if not isinstance(spread := spread or spec.get("spread", False), bool):
        raise UserError(f"data.spread: true or false, but got {spread!r}")

    def cut(samples: Sequence[int]) -> Sequence[int]:
        if not spread or limit is None or limit >= len(samples):
            return samples[:limit]
        return [samples[int(i)] for i in np.linspace(0, len(samples) - 1, limit).round()]

    if kind in ("npz", "npy"):
        return open_arrays(spec, base, cut)
    return _open_shapes(spec, cut) if kind == "shapes" else _open_folder(spec, base, cut)


def _open_folder(spec: Mapping[str, Any], base: Path | None, cut: SubsetSelector) -> ImageDataset:
    folder = _resolve_folder(spec, "images", base)
    labels_path = resolve_path(read_text_key(spec, "labels"), base) if spec.get("labels") is not None else None
    if labels_path is not None:
        labels = read_labels(labels_path)
    else:
        files = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)
        if not files:
            raise UserError(f"data.images: no images ({', '.join(IMAGE_SUFFIXES)}) in {folder}")
        labels = LabelFile(files=tuple(files))
    available = select_rows(spec, labels.files, str(spec["images"]))
    chosen = cut(available)
    names = tuple(labels.files[i] for i in chosen)
    for name in names:
        if not (folder / name).is_file():
            raise UserError(f"data.labels: {spec.get('labels')} names the image {name!r}, which is not in {folder}")
    coco = None if labels.coco is None else select_coco_images(labels.coco, chosen)
    if coco is not None and spec.get("classes") is not None:
        coco = order_coco_categories(coco, _class_names(spec))
    masks = None if spec.get("masks") is None else _open_masks(spec, base, names, labels, chosen)

    def image(i: int) -> RgbImage:
        path = folder / names[i]
        with open_picture(path, "an image") as picture:
            if picture.mode[0] in "IF":  # Pillow would clip values at 255
                raise UserError(
                    f"{path}: has {picture.mode} pixels, of more than 8 bits; convert it to 8 bits a channel"
                )
            if (orientation := picture.getexif().get(ORIENTATION_TAG, 1)) != 1:
                logger.warning("%s: EXIF orientation %s is ignored: pixels are used as stored", path, orientation)
            pixels = np.asarray(picture.convert("RGB"))
        if coco is not None:
            size = tuple(coco["images"][i].get(key) for key in ("height", "width"))
            if any(want not in (None, have) for have, want in zip(pixels.shape, size, strict=False)):
                height, width = pixels.shape[:2]
                raise UserError(f"{path}: is {height}x{width}, but its labels say {size[0]}x{size[1]}")
        return pixels

    digest = hashlib.sha256(canonical_json(spec))
    digest.update(labels_path.read_bytes() if labels_path else b"")
    for path in [
        *(folder / name for name in names),
        *(() if masks is None else map(masks.folder.joinpath, masks.files)),
    ]:
        with path.open("rb") as file:
            digest.update(path.name.encode() + b"\0" + hashlib.file_digest(file, "sha256").digest())
    return ImageDataset(
        names=names,
        image=image,
        labels=None if labels.classes is None else labels.classes[list(chosen)],
        coco=coco,
        mask=None if masks is None else lambda i: masks.read(i, image(i).shape[:2]),
        fingerprint=digest.hexdigest(),
        available=len(available),
    )


def _open_masks(
    spec: Mapping[str, Any], base: Path | None, names: Sequence[str], labels: LabelFile, chosen: Sequence[int]
) -> Masks:
    folder = _resolve_folder(spec, "masks", base)
    if labels.panoptic is None:
        masks = Masks(folder=folder, files=[str(Path(name).with_suffix(".png")) for name in names])
    else:
        annotations = [labels.panoptic["annotations"][i] for i in chosen]
        masks = Masks(
            folder=folder,
            files=[str(annotation["file_name"]) for annotation in annotations],
            segments=[annotation["segments_info"] for annotation in annotations],
            categories={category["id"]: category["name"] for category in labels.panoptic["categories"]},
            classes=_class_names(spec),
        )
    for file in masks.files:
        if not (folder / file).is_file():
            raise UserError(f"data.masks: {Path(file).name} is not in {folder}")
    known = set(masks.categories.values())
    for name in masks.classes[1:]:
        if name not in known:
            raise UserError(f"data.classes: the labels have no category {name!r}; {suggest_names(name, known)}")
    return masks


def _open_shapes(spec: Mapping[str, Any], cut: SubsetSelector) -> ImageDataset:
    first, count = read_int_key(spec, "start", 0), spec.get("count")
    drawn = shapes.draw_split(
        read_text_key(spec, "split"), None if count is None else first + read_int_key(spec, "count", 1)
    )
    available = select_rows(spec, [image["file_name"] for image in drawn.coco["images"]], f"split {spec['split']!r}")
    chosen = cut(available)
    images, coco = [drawn.images[i] for i in chosen], select_coco_images(drawn.coco, chosen)
    digest = hashlib.sha256(canonical_json(spec) + canonical_json(coco))
    for image in images:
        digest.update(image.tobytes())
    names = tuple(image["file_name"] for image in coco["images"])
    return ImageDataset(
        names=names, image=lambda i: images[i], coco=coco, fingerprint=digest.hexdigest(), available=len(available)
    )


def _resolve_folder(spec: Mapping[str, Any], key: str, base: Path | None) -> Path:
    folder = resolve_path(read_text_key(spec, key), base)
    if not folder.is_dir():
        raise UserError(f"data.{key}: {spec[key]} is no folder")
    return folder


def _class_names(spec: Mapping[str, Any]) -> tuple[str, ...]:
    names = spec.get("classes")
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
        raise UserError(
            f"data.classes: the names of the model's classes in the order of its outputs, but got {names!r}"
        )
    for name in duplicates(names):
        raise UserError(f"data.classes: {name!r} appears twice")
    return tuple(names)


class DatasetCache:
    """Cache of data sets by specification, so that each is opened once for all models that use it."""

    def __init__(self) -> None:
        self._seen: list[tuple[Mapping[str, Any], ImageDataset | ArrayDataset]] = []

    def open(self, spec: Mapping[str, Any], base_dir: Path) -> ImageDataset | ArrayDataset:
        for known, opened in self._seen:
            if known == spec:
                return opened
        opened = open_data(spec, base_dir)
        self._seen.append((spec, opened))
        return opened
