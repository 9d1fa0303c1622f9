"""Images and arrays by a plain mapping, as the experiment file gives it.

    {use: images, images: assets:coco/val2017, labels: assets:coco/instances_val2017_128.json, start: 0, count: 128}
    {use: shapes, split: evaluation, count: 64}
    {use: npz, path: feeds.npz}

Labels of images: a `.json` file in COCO's form (the images are those it lists, in its order), a
`.txt` file with lines "FILENAME CLASS" (likewise), or none (every image of the folder, by name).
An `.npz` file has one array per input of the model, the samples along the first axis. Each of
them can be cut by `start` and `count`.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from harness.api import Array
from harness.errors import UserError, nearest
from harness.evaluators.labels import Labels, cut_coco, read_labels
from harness.evaluators.preprocess import RgbImage
from harness.paths import locate
from harness.zoo import shapes

__all__ = ["Arrays", "Dataset", "open_data", "open_images"]

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
KEYS: Mapping[str, tuple[str, ...]] = {
    "images": ("images", "labels", "start", "count"),
    "shapes": ("split", "start", "count"),
    "npz": ("path", "start", "count"),
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
            being `coco["images"][i]`; None: not labelled so.
        fingerprint: Changes with the specification, the names and contents of the images, and the labels.
    """

    names: tuple[str, ...]
    image: Callable[[int], RgbImage]
    labels: npt.NDArray[np.int64] | None = None
    coco: Mapping[str, Any] | None = None
    fingerprint: str

    def __len__(self) -> int:
        return len(self.names)

    def id(self, i: int) -> str:
        """What messages call image i."""
        return self.names[i]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrays:
    """Ready-made inputs by name, the samples along the first axis."""

    arrays: Mapping[str, Array]
    fingerprint: str

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))


def open_data(spec: Mapping[str, Any], base: Path | None = None, limit: int | None = None) -> Dataset | Arrays:
    """Open what a data mapping of an experiment describes (see the module's text).

    Args:
        spec: The mapping.
        base: Folder that relative paths start from.
        limit: So many samples at most; what comes after them is not even read.

    Raises:
        UserError: Unknown kind or key, nothing there, malformed labels, labels that name a missing
            image, or a cut beyond the end.
    """
    kind = str(spec.get("use"))
    if kind not in KEYS:
        raise UserError(f"data.use: no kind of data is called {kind!r}; {nearest(kind, KEYS)}")
    for key in spec:
        if key not in ("use", *KEYS[kind]):
            raise UserError(f"data.{key}: unknown key for {kind!r}; {nearest(str(key), KEYS[kind])}")
    if kind == "npz":
        return _open_npz(spec, base, limit)
    return _open_shapes(spec, limit) if kind == "shapes" else _open_folder(spec, base, limit)


def open_images(spec: Mapping[str, Any], base: Path | None = None) -> Dataset:
    """Like `open_data`, for those who need images.

    Raises:
        UserError: See `open_data`; also where the data are arrays.
    """
    data = open_data(spec, base)
    if isinstance(data, Arrays):
        raise UserError("data.use: images are needed here ('images' or 'shapes'), but got 'npz'")
    return data


def _open_folder(spec: Mapping[str, Any], base: Path | None, limit: int | None) -> Dataset:
    folder = locate(_text(spec, "images"), base)
    if not folder.is_dir():
        raise UserError(f"data.images: {spec['images']} is no folder")
    labels_path = locate(_text(spec, "labels"), base) if spec.get("labels") is not None else None
    labels = read_labels(labels_path) if labels_path else _unlabelled(folder)
    start, stop = _cut(spec, len(labels.files), str(spec["images"]), limit)
    names = labels.files[start:stop]
    digest = hashlib.sha256(_canonical(spec))
    digest.update(labels_path.read_bytes() if labels_path else b"")
    for name in names:
        path = folder / name
        if not path.is_file():
            raise UserError(f"data.labels: {spec.get('labels')} names the image {name!r}, which is not in {folder}")
        with path.open("rb") as file:
            digest.update(name.encode() + b"\0" + hashlib.file_digest(file, "sha256").digest())
    coco = cut_coco(labels.coco, start, stop) if labels.coco is not None else None
    sizes = [(i.get("height"), i.get("width")) for i in coco["images"]] if coco else [(None, None)] * len(names)
    return Dataset(
        names=names,
        image=lambda i: _read_image(folder / names[i], sizes[i]),
        labels=labels.classes[start:stop] if labels.classes is not None else None,
        coco=coco,
        fingerprint=digest.hexdigest(),
    )


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


def _open_shapes(spec: Mapping[str, Any], limit: int | None) -> Dataset:
    first, count = _whole(spec, "start", 0), spec.get("count")
    drawn = shapes.split(_text(spec, "split"), None if count is None else first + _whole(spec, "count", 1))
    start, stop = _cut(spec, len(drawn.images), f"split {spec['split']!r}", limit)
    images, coco = drawn.images[start:stop], cut_coco(drawn.coco, start, stop)
    digest = hashlib.sha256(_canonical(spec) + _canonical(coco))
    for image in images:
        digest.update(image.tobytes())
    names = tuple(image["file_name"] for image in coco["images"])
    return Dataset(names=names, image=lambda i: images[i], coco=coco, fingerprint=digest.hexdigest())


def _open_npz(spec: Mapping[str, Any], base: Path | None, limit: int | None) -> Arrays:
    path = locate(_text(spec, "path"), base)
    try:
        with np.load(path, allow_pickle=False) as file, zipfile.ZipFile(path) as archive:
            arrays = {name: file[name] for name in file.files}
            sums = "".join(f"{m.filename}\0{m.CRC}\n" for m in archive.infolist())
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: not an .npz file of plain arrays: {error}") from error
    lengths = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if len(set(lengths.values())) != 1 or not all(lengths.values()):
        raise UserError(f"{path}: the first axis of every array counts the samples, but their lengths are {lengths}")
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise UserError(f"{path}: array {name!r} has NaN or infinite values")
    start, stop = _cut(spec, next(iter(lengths.values())), str(spec["path"]), limit)
    doubles = {name: a.astype(np.float32) if a.dtype == np.float64 else a for name, a in arrays.items()}
    fingerprint = hashlib.sha256(_canonical(spec) + sums.encode()).hexdigest()
    return Arrays(arrays={name: a[start:stop] for name, a in doubles.items()}, fingerprint=fingerprint)


def _cut(spec: Mapping[str, Any], total: int, what: str, limit: int | None) -> tuple[int, int]:
    start = _whole(spec, "start", 0)
    count = total - start if spec.get("count") is None else _whole(spec, "count", 1)
    if start >= total or start + count > total:
        asked = f"start {start}" + (f" and count {count}" if spec.get("count") is not None else "")
        raise UserError(f"data: {asked} reach beyond the end: {what} has {total}")
    return start, start + min(count, count if limit is None else limit)


def _whole(spec: Mapping[str, Any], key: str, least: int) -> int:
    value = spec.get(key, least)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"data.{key}: a whole number from {least}, but got {value!r}")
    return value


def _text(spec: Mapping[str, Any], key: str) -> str:
    value = spec.get(key)
    if not isinstance(value, str) or not value:
        raise UserError(f"data.{key}: this key is required, but got {value!r}")
    return value


def _canonical(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()
