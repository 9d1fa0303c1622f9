"""Calibration data: from a folder, a `.npy` or `.npz` file, or a data loader of one's own."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.accuracy.data.arrays import UNNAMED_ARRAY
from harness.accuracy.data.batching import describe_sample_count, make_batches
from harness.accuracy.data.datasets import ArrayDataset, open_data
from harness.accuracy.data.preprocess import open_preprocess
from harness.api import Array
from harness.compat.tao_specs.error_key_mapping import map_error_keys
from harness.compat.tao_specs.model_file import SampleShapes, locate_spec_file
from harness.compat.tao_specs.spec import DatasetSection
from harness.errors import UserError
from harness.random_inputs import InputTypes, random_feeds

__all__ = ["CalibrationFeeds", "loader_feeds", "open_calibration_feeds", "peek_sample_shapes", "sample_shapes"]

logger = logging.getLogger(__name__)

SINGLE_INPUT_KEYS = ("input", "data", "x", "images")
STEREO_INPUT_KEYS = ("images_left", "images_right")
"""Keys of a batch that is a mapping, as TAO's loaders have them."""
RANDOM_BATCH_COUNT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationFeeds:
    """Input arrays by name, as often as they are gone through, and what they are, for people."""

    batches: Iterable[Mapping[str, Array]]
    description: str


def open_calibration_feeds(
    dataset: DatasetSection, inputs: InputTypes, base: Path, key: str = "dataset.calibration_data"
) -> CalibrationFeeds:
    """What section `dataset` gives for calibration; without anything, random numbers, with a warning.

    Raises:
        UserError: Nothing there, a folder without images, images without preprocessing, arrays that do not fit.
    """
    place, sources = dataset.calibration_data, dataset.test_data_sources
    if place is None and sources is not None:
        place = sources.image_dir or sources.arrays
        logger.warning(
            "%s: not given, so test_data_sources are used; the accuracy on them will look better than "
            "it is on others", key,
        )  # fmt: skip
    if place is None:
        logger.warning(
            "%s: not given, so random numbers are used (dummy data): do not trust any accuracy of this model; "
            "give a folder of images, a .npy or an .npz file ('qdq calib-data' makes one)", key,
        )  # fmt: skip
        return CalibrationFeeds(batches=_RandomFeeds(inputs), description="random data")
    path = locate_spec_file(place, base, key)
    spec = _data_mapping(path, key)
    if sources is not None and sources.labels is not None and place == sources.arrays:
        spec["labels"] = sources.labels
    if spec["use"] == "images" and dataset.preprocess is None:
        raise UserError(f"dataset.preprocess: {place} holds images; say what turns one into an input, such as 'yolox'")
    use = dataset.preprocess
    preprocess = None if use is None else open_preprocess({"use": use.use, "params": use.params})
    with map_error_keys({"images": key, "path": key}):
        data = open_data(spec, base, dataset.samples, spread=True)
    limit = dataset.samples if "samples" in dataset.model_fields_set else None
    return CalibrationFeeds(
        batches=make_batches(data, preprocess, inputs), description=describe_sample_count(data, limit, place)
    )


def sample_shapes(
    dataset: DatasetSection, names: Sequence[str], base: Path, key: str = "dataset.calibration_data"
) -> SampleShapes | None:
    """Return the shape of one sample by input, as far as calibration arrays tell; None: images tell nothing.

    Args:
        dataset: Section `dataset`.
        names: Inputs of the model.
        base: Folder that relative paths start from.
        key: Names the option or key of the data in messages.

    Raises:
        UserError: The file is not there or cannot be read.
    """
    if dataset.calibration_data is None:
        return None
    path = locate_spec_file(dataset.calibration_data, base, key)
    if path.suffix not in (".npy", ".npz") or path.is_dir():
        return None
    with map_error_keys({"path": key}):
        data = open_data(_data_mapping(path, key), base, 1)
    arrays = data.arrays if isinstance(data, ArrayDataset) else {}
    if UNNAMED_ARRAY in arrays:
        arrays = dict.fromkeys(names[:1], arrays[UNNAMED_ARRAY])
    return SampleShapes(source=str(path), shapes={name: array.shape[1:] for name, array in arrays.items()})


def peek_sample_shapes(loader: Iterable[Any], names: Sequence[str]) -> tuple[SampleShapes, Iterator[Any]]:
    """Return the shape of one sample by input, as the first batch of a data loader has it, and all its batches."""
    batches = iter(loader)
    first = list(itertools.islice(batches, 1))
    shapes = {n: array.shape[1:] for batch in first for n, array in _batch_to_feed(batch, names, 1).items()}
    return SampleShapes(source="calibration batch 1", shapes=shapes), itertools.chain(first, batches)


def _data_mapping(path: Path, key: str) -> dict[str, Any]:
    if path.is_dir():
        return {"use": "images", "images": str(path)}
    if path.suffix in (".npy", ".npz"):
        return {"use": path.suffix[1:], "path": str(path)}
    raise UserError(f"{key}: a folder of images, a .npy or an .npz file, but got {path.name}")


@dataclass(frozen=True, slots=True)
class _RandomFeeds:
    """Random feeds, the same each time."""

    inputs: InputTypes

    def __iter__(self) -> Iterator[dict[str, Array]]:
        return random_feeds(self.inputs, RANDOM_BATCH_COUNT)


def loader_feeds(loader: Iterable[Any], inputs: InputTypes) -> Iterator[dict[str, Array]]:
    """Batches of a data loader as inputs of a model, in the batch size that the model takes.

    A batch is an array or a tensor, a tuple or list (its first element counts), or a mapping: of the model's own
    input names, of `images_left` and `images_right` for two inputs, else with one of the keys input, data, x, images.

    Raises:
        UserError: Nothing of that, with what the batch has.
    """
    for number, batch in enumerate(loader, start=1):
        yield from _rebatch(_batch_to_feed(batch, tuple(inputs), number), inputs)


def _batch_to_feed(batch: Any, names: Sequence[str], number: int) -> dict[str, Array]:
    if isinstance(batch, Mapping):
        return _select_inputs(batch, names, number)
    if isinstance(batch, tuple | list):
        if not batch:
            raise UserError(f"calibration batch {number}: an empty {type(batch).__name__}")
        return _batch_to_feed(batch[0], names, number)
    if len(names) != 1:
        raise UserError(
            f"calibration batch {number}: one array, but the model has the inputs {', '.join(map(repr, names))}; "
            "give a mapping with these names"
        )
    return {names[0]: _to_array(batch, number)}


def _select_inputs(batch: Mapping[str, Any], names: Sequence[str], number: int) -> dict[str, Array]:
    if all(name in batch for name in names):
        return {name: _to_array(batch[name], number) for name in names}
    if len(names) == 2 and all(key in batch for key in STEREO_INPUT_KEYS):
        first, second = sorted(names, key=lambda name: "right" in name.lower())
        return {
            key: _to_array(batch[side], number) for key, side in zip((first, second), STEREO_INPUT_KEYS, strict=True)
        }
    key = next((key for key in SINGLE_INPUT_KEYS if key in batch), None)
    if key is None or len(names) != 1:
        raise UserError(
            f"calibration batch {number}: a mapping with the keys {', '.join(map(repr, batch))}, but wanted are "
            f"{', '.join(map(repr, names))}, or for one input one of {', '.join(SINGLE_INPUT_KEYS)}"
        )
    return {names[0]: _to_array(batch[key], number)}


def _to_array(value: Any, number: int) -> Array:
    """A NumPy array; tensors come from whichever device they are on."""
    for step in ("detach", "cpu", "numpy"):
        value = getattr(value, step)() if hasattr(value, step) else value
    array = np.asarray(value)
    if array.dtype.kind not in "fiub" or not array.ndim:
        raise UserError(f"calibration batch {number}: an array of numbers is wanted, but got {type(value).__name__}")
    return array


def _rebatch(feed: Mapping[str, Array], inputs: InputTypes) -> Iterator[dict[str, Array]]:
    """Batches of the model's own size; the last sample fills up the last one."""
    rows = {name: len(array) for name, array in feed.items()}
    for name, array in feed.items():
        if array.shape[1:] != inputs[name][1][1:]:
            raise UserError(
                f"calibration data: a sample of {name!r} is {_format_shape(array.shape[1:])}, but the input takes "
                f"{_format_shape(inputs[name][1][1:])}"
            )
    size = {name: shape[0] for name, (_, shape) in inputs.items() if shape}
    steps = {-(-count // size[name]) for name, count in rows.items()}
    if len(steps) != 1:
        raise UserError(f"calibration data: inputs of one batch have different numbers of samples: {rows}")
    for step in range(steps.pop()):
        chosen = {n: np.minimum(np.arange(step * size[n], (step + 1) * size[n]), rows[n] - 1) for n in feed}
        yield {name: array[chosen[name]].astype(_dtype(inputs[name][0]), copy=False) for name, array in feed.items()}


def _dtype(kind: str) -> np.dtype[Any]:
    return np.dtype({"float": "float32", "double": "float64"}.get(kind, kind))


def _format_shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "a single number"
