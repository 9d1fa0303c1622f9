"""Images and arrays by a plain mapping, as the experiment file gives it.

    {use: images, images: assets:coco/val2017, labels: assets:coco/instances_val2017_128.json, start: 0, count: 128}
    {use: shapes, split: evaluation, count: 64}
    {use: images, images: street, masks: street_masks}
    {use: npz, path: feeds.npz}
    {use: npz, path: feeds.npz, labels: y}
    {use: npy, path: images.npy, labels: classes.csv}

Labels of images: a `.json` file in COCO's form (the images are those it lists, in its order), a
`.txt` file with lines "FILENAME CLASS" (likewise), or none (every image of the folder, by name).
`masks` is a folder of PNG files (`harness.accuracy.data.masks`). `classes` lists the names of the model's
classes in the order of its outputs; without it they are the categories of the labels by ascending id.
An `.npz` file has one array per input of the model, the samples along the first axis; a `.npy` file is
for a model with one input. Their `labels` are an array of the `.npz` file, by its name, or a `.npy`, `.npz`, `.csv` or
`.txt` file with one row a sample.

Each of them can be cut by `start` and `count`, and then by `half`: `search` and `report` are two halves that
share no sample, by a hash of its name (or row number), so a sample is of the same half in every cut. Choose on
one, report on the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from harness.accuracy.data.arrays import Arrays, Cut, open_arrays
from harness.accuracy.data.labels import Labels, cut_coco, ordered_coco, read_labels
from harness.accuracy.data.masks import IndexMasks, Mask, Masks, PanopticMasks, check_masks
from harness.accuracy.data.preprocess import RgbImage
from harness.accuracy.data.subsets import CUTS, HALVES, canonical, chosen_rows, half_of, text, whole
from harness.errors import UserError, suggest_names
from harness.paths import resolve_path
from harness.zoo import shapes

__all__ = ["HALVES", "Arrays", "Dataset", "evenly", "half_of", "open_data", "open_images"]

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
KEYS: Mapping[str, tuple[str, ...]] = {
    "images": ("images", "labels", "masks", "classes", *CUTS),
    "shapes": ("split", *CUTS),
    "npz": ("path", "labels", *CUTS),
    "npy": ("path", "labels", *CUTS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Images, read when asked for, and what is known of them.

    Attributes:
        names: One an image, in data order.
        image: Gives image i, height x width x 3, 8 bit, red first; raises UserError where it cannot
            be read or has another size than its labels say.
        labels: Class index of each image; None: not labelled so.
        coco: Boxes of exactly these images, as `pycocotools.coco.COCO.dataset` wants them, image i
            being `coco["images"][i]`, the model's class k the k-th category by ascending id; None: not labelled so.
        mask: Gives the class of each pixel of image i, `VOID` where there is none; raises UserError where it cannot
            be read or has another size than the image. None: not labelled so.
        fingerprint: Changes with the specification, the names and contents of the images, and the labels.
        available: Images that the source has for this use; above `len` where a limit left some out. None: not known.
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

    def id(self, i: int) -> str:
        """What messages call image i."""
        return self.names[i]


def open_data(
    spec: Mapping[str, Any], base: Path | None = None, limit: int | None = None, *, spread: bool = False
) -> Dataset | Arrays:
    """Open what a data mapping of an experiment describes (see the module's text).

    Args:
        spec: The mapping.
        base: Folder that relative paths start from.
        limit: Number of samples at most; the others are not read.
        spread: Take them evenly from all samples, as data are often sorted by class; otherwise the first ones.

    Raises:
        UserError: Unknown kind or key, nothing there, malformed labels, labels that name a missing
            image, or a cut beyond the end.
    """
    kind = str(spec.get("use"))
    if kind not in KEYS:
        raise UserError(f"data.use: no kind of data is called {kind!r}; {suggest_names(kind, KEYS)}")
    for key in spec:
        if key not in ("use", *KEYS[kind]):
            raise UserError(f"data.{key}: unknown key for {kind!r}; {suggest_names(str(key), KEYS[kind])}")

    def cut(samples: Sequence[int]) -> Sequence[int]:
        return [samples[i] for i in evenly(len(samples), limit)] if spread and limit is not None else samples[:limit]

    if kind in ("npz", "npy"):
        return open_arrays(spec, base, cut)
    return _open_shapes(spec, cut) if kind == "shapes" else _open_folder(spec, base, cut)


def evenly(total: int, count: int) -> Sequence[int]:
    """Return `count` ascending indices below `total`, evenly spread, the first and the last among them."""
    if count >= total:
        return range(total)
    return [int(index) for index in np.linspace(0, total - 1, count).round()]


def open_images(spec: Mapping[str, Any], base: Path | None = None) -> Dataset:
    """Like `open_data`, for those who need images.

    Raises:
        UserError: See `open_data`; also where the data are arrays.
    """
    data = open_data(spec, base)
    if isinstance(data, Arrays):
        raise UserError(
            f"data.use: images are needed here ('images' or 'shapes'), but got {spec['use']!r}: boxes and masks are "
            "labels of images. Arrays with a label each are for top1, top5, metric and loss"
        )
    return data


def _open_folder(spec: Mapping[str, Any], base: Path | None, cut: Cut) -> Dataset:
    folder = _folder(spec, "images", base)
    labels_path = resolve_path(text(spec, "labels"), base) if spec.get("labels") is not None else None
    labels = read_labels(labels_path) if labels_path else _unlabelled(folder)
    available = chosen_rows(spec, labels.files, str(spec["images"]))
    chosen = cut(available)
    names = tuple(labels.files[i] for i in chosen)
    for name in names:
        if not (folder / name).is_file():
            raise UserError(f"data.labels: {spec.get('labels')} names the image {name!r}, which is not in {folder}")
    coco = None if labels.coco is None else _coco(spec, cut_coco(labels.coco, chosen))
    sizes = [(i.get("height"), i.get("width")) for i in coco["images"]] if coco else [(None, None)] * len(names)
    masks = None if spec.get("masks") is None else _masks(spec, base, names, labels, chosen)

    def image(i: int) -> RgbImage:
        return _read_image(folder / names[i], sizes[i])

    digest = hashlib.sha256(canonical(spec))
    digest.update(labels_path.read_bytes() if labels_path else b"")
    for path in (*(folder / name for name in names), *([] if masks is None else map(masks.path, range(len(names))))):
        with path.open("rb") as file:
            digest.update(path.name.encode() + b"\0" + hashlib.file_digest(file, "sha256").digest())
    return Dataset(
        names=names,
        image=image,
        labels=None if labels.classes is None else labels.classes[list(chosen)],
        coco=coco,
        mask=None if masks is None else lambda i: masks.read(i, image(i).shape[:2]),
        fingerprint=digest.hexdigest(),
        available=len(available),
    )


def _coco(spec: Mapping[str, Any], coco: dict[str, Any]) -> dict[str, Any]:
    return coco if spec.get("classes") is None else ordered_coco(coco, _classes(spec))


def _masks(
    spec: Mapping[str, Any], base: Path | None, names: tuple[str, ...], labels: Labels, chosen: Sequence[int]
) -> Masks:
    folder = _folder(spec, "masks", base)
    masks: Masks = IndexMasks(folder=folder, names=names)
    if labels.panoptic is not None:
        masks = PanopticMasks(
            folder=folder,
            annotations=tuple(labels.panoptic["annotations"][i] for i in chosen),
            categories={category["id"]: category["name"] for category in labels.panoptic["categories"]},
            classes=_classes(spec),
        )
    check_masks(masks, len(names))
    return masks


def _unlabelled(folder: Path) -> Labels:
    files = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    if not files:
        raise UserError(f"data.images: no images ({', '.join(SUFFIXES)}) in {folder}")
    return Labels(files=tuple(files))


def _read_image(path: Path, expected: tuple[int | None, int | None]) -> RgbImage:
    try:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"{path}: cannot be read as an image: {error}") from error
    for have, want in zip(pixels.shape[:2], expected, strict=True):
        if want not in (None, have):
            height, width = pixels.shape[:2]
            raise UserError(f"{path}: is {height}x{width}, but its labels say {expected[0]}x{expected[1]}")
    return pixels


def _open_shapes(spec: Mapping[str, Any], cut: Cut) -> Dataset:
    first, count = whole(spec, "start", 0), spec.get("count")
    drawn = shapes.split(text(spec, "split"), None if count is None else first + whole(spec, "count", 1))
    files = [image["file_name"] for image in drawn.coco["images"]]
    available = chosen_rows(spec, files, f"split {spec['split']!r}")
    chosen = cut(available)
    images, coco = [drawn.images[i] for i in chosen], cut_coco(drawn.coco, chosen)
    digest = hashlib.sha256(canonical(spec) + canonical(coco))
    for image in images:
        digest.update(image.tobytes())
    names = tuple(image["file_name"] for image in coco["images"])
    return Dataset(
        names=names, image=lambda i: images[i], coco=coco, fingerprint=digest.hexdigest(), available=len(available)
    )


def _folder(spec: Mapping[str, Any], key: str, base: Path | None) -> Path:
    folder = resolve_path(text(spec, key), base)
    if not folder.is_dir():
        raise UserError(f"data.{key}: {spec[key]} is no folder")
    return folder


def _classes(spec: Mapping[str, Any]) -> tuple[str, ...]:
    names = spec.get("classes")
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
        raise UserError(
            f"data.classes: the names of the model's classes in the order of its outputs, but got {names!r}"
        )
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"data.classes: {name!r} appears twice")
    return tuple(names)
