"""Data of section `dataset`: labelled data, calibration data, data loaders, and calibration files from images."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from harness.accuracy.data.arrays import UNNAMED_ARRAY, ArrayDataset
from harness.accuracy.data.batching import (
    RANDOM_DATA,
    InputBatches,
    describe_sample_count,
    image_input,
    make_array_batches,
    make_batches,
    random_batches,
)
from harness.accuracy.data.datasets import ImageDataset, open_data
from harness.base.errors import UserError, prefix_key, suggest_names
from harness.base.paths import replacing, resolve_path
from harness.base.random_inputs import InputTypes
from harness.compat.tao_specs.spec import DatasetSection
from harness.graph.load import Dims, ModelSignature, read_signature
from harness.graph.passes.dimension_sizes import Axes, InputSizes, format_axes, parse_shape, resolve_shapes
from harness.graph.passes.static_shapes import copy_with_static_inputs
from harness.plugins import registry
from harness.plugins.api import Array

PYTORCH_SUFFIXES = (".pt", ".pth", ".ckpt", ".tlt", ".safetensors", ".pt2")
PICKLE_MAGIC, ZIP_MAGIC = b"\x80", b"PK"  # first bytes of files of torch.save, before and since PyTorch 1.6
Shape = tuple[int, ...]


class ShapeOptionNames(NamedTuple):
    """Options for the shapes of inputs, for messages; NAME, SHAPE, SYMBOL and SIZE are placeholders.

    Attributes:
        key: Name of the option of a shape.
        remedy: Advice on how to give a shape.
        dim_remedy: Advice on how to give sizes of symbols; SIZES is replaced by their list.
        dim_form: Format of one size, and separator between sizes.
    """

    key: str
    remedy: str
    dim_remedy: str = ""
    dim_form: tuple[str, str] = ("", "")

    def describe_remedy(self, name: str, axes: Axes, symbols: Sequence[str]) -> str:
        """Return advice on how to make an input static: by sizes of its missing symbols, or by its shape."""
        usual = 640 if len(axes) == 4 else 128
        example = "x".join(str(a if isinstance(a, int) else usual if place else 1) for place, a in enumerate(axes))
        by_shape = self.remedy.replace("NAME", name).replace("SHAPE", example)
        if not (symbols and self.dim_remedy) or None in axes[1:]:
            return by_shape
        form, separator = self.dim_form
        sizes = separator.join(form.replace("SYMBOL", symbol).replace("SIZE", str(usual)) for symbol in symbols)
        return f"{self.dim_remedy.replace('SIZES', sizes)}, or {by_shape}"


class SampleShapes(NamedTuple):
    """Name of calibration data in messages, and the shape of one sample by input, with or without the batch."""

    source: str
    shapes: Mapping[str, Shape]


SPEC_OPTION_NAMES = ShapeOptionNames(
    key="dataset.shapes.NAME",
    remedy="its static shape under dataset.shapes, for instance {NAME: SHAPE}",
    dim_remedy="each size under dataset.dims, for instance {SIZES}",
    dim_form=("SYMBOL: SIZE", ", "),
)


def open_onnx_file(text: str, base: Path, key: str) -> tuple[Path, ModelSignature]:
    """Return path and signature of the ONNX file that is the value of a key in a spec.

    Args:
        text: A path, or `assets:PATH`.
        base: Folder that relative paths start from.
    """
    suffix = Path(text).suffix.lower()
    if suffix in PYTORCH_SUFFIXES:
        raise UserError(
            f"{key}: {text} is a PyTorch file, but this backend takes only ONNX; export it first "
            "(torch.onnx.export, 'yolo export format=onnx', or TAO's export action)"
        )
    if suffix != ".onnx":
        raise UserError(f"{key}: the name of an ONNX file ends in .onnx, but got {text}")
    path = locate_spec_file(text, base, key)
    if path.is_file():
        with path.open("rb") as file:
            head = file.read(2)
        if head == ZIP_MAGIC or head[:1] == PICKLE_MAGIC:
            raise UserError(f"{key}: {text} is called .onnx, but is a PyTorch file (torch.save); export it to ONNX")
    return path, read_signature(path, text)


def locate_spec_file(text: str, base: Path, key: str) -> Path:
    """Return `resolve_path(text, base)`; error messages start with the key."""
    with prefix_key(key):
        return resolve_path(text, base)


@contextmanager
def name_write_errors(target: str) -> Iterator[None]:
    """Convert an `OSError` of the body to a `UserError` whose message begins with the target."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error.strerror or error}") from error


def static_inputs(
    declared: ModelSignature,
    shapes: Mapping[str, str],
    dims: Mapping[str, int] = MappingProxyType({}),
    *,
    batch: int = 1,
    samples: SampleShapes | None = None,
    names: ShapeOptionNames = SPEC_OPTION_NAMES,
) -> InputTypes:
    """Return element type and static shape of each input: the given shape, else that of the calibration data.

    Args:
        shapes: Shapes by input.
        dims: Sizes by symbol.
        batch: Size of dimensions with a usual name of the batch, and of a first dimension if no other is dynamic.
    """
    fixed: dict[str, Shape] = {}
    for name, shape in shapes.items():
        key = names.key.replace("NAME", name)
        if name not in declared.inputs:
            raise UserError(f"{key}: the model has no such input; {suggest_names(name, declared.inputs)}")
        fixed[name] = parse_shape(shape, key)
    for name, (_, input_dims) in declared.inputs.items():
        found = None if samples is None or name in fixed else _sample_shape(name, input_dims, samples, batch)
        if found is not None:
            fixed[name] = found
    dynamic = {name: declared.axes[name] for name, (_, sizes) in declared.inputs.items() if None in sizes}
    # A symbol of any name is that of the batch if it is the only dynamic dimension of an input, its first.
    of_fixed_inputs = {axis for name in fixed for axis in dynamic.get(name) or ()}
    of_later_axes = {axis for axes in dynamic.values() for axis in (axes or ())[1:]}
    leading = {axes[0] for axes in dynamic.values() if axes and all(isinstance(axis, int) for axis in axes[1:])}
    batch_symbols = {axis for axis in leading - of_fixed_inputs - of_later_axes if isinstance(axis, str)}
    sizes = InputSizes(
        shapes={name: fixed[name] for name in dynamic if name in fixed},
        dims={**dict.fromkeys(batch_symbols, batch), **dims},
    )
    resolved = resolve_shapes(dynamic, sizes, names.key.removesuffix("NAME").rstrip(". "), batch=batch)
    for name, axes in dynamic.items():
        if name not in resolved.shapes:
            remedy = names.describe_remedy(name, axes or (), resolved.missing_symbols)
            missing = f", and {samples.source} has no array for it" if samples and samples.shapes else ""
            raise UserError(f"input {name!r} is {format_axes(axes)}{missing}: give {remedy}")
    for name, (_, declared_sizes) in declared.inputs.items():
        fixed.setdefault(name, resolved.shapes.get(name) or tuple(size for size in declared_sizes if size is not None))
    return {name: (dtype, fixed[name]) for name, (dtype, _) in declared.inputs.items()}


def _sample_shape(name: str, dims: Dims, samples: SampleShapes, batch: int) -> Shape | None:
    """Return the shape of an input with its dynamic dimensions set from a sample, or None without any or a sample."""
    sample = samples.shapes.get(name)
    if sample is None or (dims and None not in dims):
        return None
    if not dims:  # unknown rank; a sample without dimensions is a scalar input without a batch
        return (batch, *sample) if sample else ()
    shape = sample if len(sample) == len(dims) else (batch if dims[0] is None else dims[0], *sample)
    if len(shape) == len(dims) and all(size in (None, length) for size, length in zip(dims, shape, strict=True)):
        return shape
    if None not in dims[1:]:  # a difference is reported when the data are read
        return None
    given, taken = (
        " x ".join("?" if size is None else str(size) for size in each) or "a single number"
        for each in (sample, dims[1:])
    )
    raise UserError(
        f"{samples.source}: a sample of {name!r} is {given}, but the input takes {taken} (without the batch; ? is any "
        "size)"
    )


def shapes_of(types: InputTypes) -> dict[str, Shape]:
    """Return the shape of each input."""
    return {name: shape for name, (_, shape) in types.items()}


def write_static_copy(path: Path, declared: ModelSignature, types: InputTypes, target: Path) -> Path:
    """Write a copy of a model with static inputs and return its path; return `path` if its inputs are static."""
    if not any(None in dims for _, dims in declared.inputs.values()):
        return path
    return copy_with_static_inputs(path, InputSizes(shapes=shapes_of(types)), target)


logger = logging.getLogger(__name__)

ADVISED_SAMPLE_COUNT = 500  # minimum for CNNs and ViTs in the README of ModelOpt's ONNX PTQ
CALIBRATION_KEY = "dataset.calibration_data"
RANDOM_BATCH_COUNT = 8
#: Keys of batches that are mappings, in TAO's data loaders.
SINGLE_INPUT_KEYS, STEREO_INPUT_KEYS = ("input", "data", "x", "images"), ("images_left", "images_right")
DATA_KEY_PATTERN = re.compile(r"(?<![\w/])data\.(\w+)(?![\w./])")
#: Usual inputs of models with these preprocessings; YOLOX-Nano and -Tiny have 416 x 416.
DEFAULT_INPUT_SIZES: Mapping[str, tuple[int, int]] = {
    "ultralytics": (640, 640), "rtdetr": (640, 640), "yolox": (640, 640), "nanodet": (320, 320),
    "torch_imagenet": (224, 224), "tf_imagenet": (224, 224),
}  # fmt: skip
MODEL_OPTION_NAMES = ShapeOptionNames(key="--model", remedy="its height and width instead, such as --size 640x640")


def data_keys(dataset: DatasetSection) -> Mapping[str, str]:
    """Return the key of the spec by key of the `data` mapping of an evaluator."""
    sources = dataset.test_data_sources
    arrays = sources is not None and sources.arrays is not None
    data, labels = ("arrays", "labels") if arrays else ("image_dir", "json_file")
    return {
        "path" if arrays else "images": f"dataset.test_data_sources.{data}",
        "labels": f"dataset.test_data_sources.{labels}",
        "classes": "dataset.classes",
        "count": "dataset.count",
    }


def labelled_data(dataset: DatasetSection, base: Path) -> dict[str, Any]:
    """Return the labelled data of a spec as the `data` mapping of an evaluator.

    Args:
        base: Folder that relative paths start from.
    """
    sources, keys = dataset.test_data_sources, data_keys(dataset)
    if sources is not None and sources.arrays is not None:
        suffix = Path(sources.arrays).suffix
        if suffix not in (".npz", ".npy"):
            raise UserError(f"{keys['path']}: expected a .npz or .npy file, but got {sources.arrays}")
        data: dict[str, Any] = {"use": suffix[1:], "path": sources.arrays, "labels": sources.labels}
        files = ["path"]
    elif sources is not None and sources.image_dir and sources.json_file:
        data = {"use": "images", "images": sources.image_dir, "labels": sources.json_file}
        files = ["images", "labels"]
    else:
        raise UserError(
            "dataset.test_data_sources: image_dir and json_file are needed, the images and their labels (.json in "
            "COCO format, or .txt with lines 'FILENAME CLASS'), or arrays and labels (a .npz file and the name of "
            "an array in it)"
        )
    for name in files:
        locate_spec_file(data[name], base, keys[name])
    data |= {"classes": list(dataset.classes), "count": dataset.count}
    return {name: value for name, value in data.items() if value}


@contextmanager
def map_error_keys(keys: Mapping[str, str], source: str = "") -> Iterator[None]:
    """Replace keys of a `data` mapping in error messages by keys of the spec.

    Args:
        keys: Key of the spec by key of the mapping.
        source: File that messages start with; "": none.
    """
    try:
        yield
    except UserError as error:
        text = DATA_KEY_PATTERN.sub(lambda match: keys.get(match[1], match[0]), str(error))
        raise UserError(f"{source}: {text}" if source else text) from error


def open_calibration_data(
    dataset: DatasetSection, base: Path, key: str = CALIBRATION_KEY
) -> ImageDataset | ArrayDataset | None:
    """Open `calibration_data`, else `test_data_sources`; return None and log a warning without either.

    Args:
        base: Folder that relative paths start from.
        key: Name of the calibration data in messages: a key of the spec or an option.
    """
    place, sources = _calibration_place(dataset), dataset.test_data_sources
    if place is None:
        logger.warning(
            "%s: not given, so random numbers are used (dummy data): do not trust any accuracy of this model; "
            "give a folder of images, a .npy or an .npz file ('qdq calib-data' makes one)", key,
        )  # fmt: skip
        return None
    if place != dataset.calibration_data:
        logger.warning(
            "%s: not given, so test_data_sources are used; the accuracy on them is better than on other data", key
        )
    path = locate_spec_file(place, base, key)
    if not path.is_dir() and path.suffix not in (".npy", ".npz"):
        raise UserError(f"{key}: expected a folder of images, a .npy or an .npz file, but got {path.name}")
    data = {"use": "images", "images": str(path)} if path.is_dir() else {"use": path.suffix[1:], "path": str(path)}
    if sources is not None and sources.labels is not None and place == sources.arrays:
        data["labels"] = sources.labels
    if path.is_dir() and dataset.preprocess is None:
        raise UserError(f"dataset.preprocess: {place} holds images; give their preprocessing, such as 'yolox'")
    with map_error_keys({"images": key, "path": key}):
        return open_data(data, base, dataset.samples, spread=True)


def _calibration_place(dataset: DatasetSection) -> str | None:
    sources = dataset.test_data_sources
    return dataset.calibration_data or (sources and (sources.image_dir or sources.arrays)) or None


def open_feeds(
    dataset: DatasetSection,
    base: Path,
    declared: ModelSignature,
    key: str = CALIBRATION_KEY,
    names: ShapeOptionNames = SPEC_OPTION_NAMES,
) -> tuple[InputTypes, InputBatches, str]:
    """Return element types and static shapes of the inputs of a model, its calibration batches, and a description.

    Args:
        base: Folder that relative paths start from.
        declared: Signature of the model.
        key: Name of the calibration data in messages: a key of the spec or an option.
        names: Options for the shapes of inputs, for messages.
    """
    data = open_calibration_data(dataset, base, key)
    samples = None
    if isinstance(data, ArrayDataset):
        unnamed = data.arrays.get(UNNAMED_ARRAY)
        arrays = data.arrays if unnamed is None else dict.fromkeys([*declared.inputs][:1], unnamed)
        samples = SampleShapes(data.source, {name: array.shape[1:] for name, array in arrays.items()})
    types = static_inputs(declared, dataset.shapes, dataset.dims, samples=samples, names=names)
    return types, *calibration_feeds(dataset, data, types)


def calibration_feeds(
    dataset: DatasetSection, data: ImageDataset | ArrayDataset | None, inputs: InputTypes
) -> tuple[InputBatches, str]:
    """Return batches of the data, or of random numbers if `data` is None, and a description of them."""
    if data is None:
        return random_batches(inputs, RANDOM_BATCH_COUNT), RANDOM_DATA
    limit = dataset.samples if "samples" in dataset.model_fields_set else None
    preprocess = None if dataset.preprocess is None else dataset.preprocess.mapping
    description = describe_sample_count(data, limit, str(_calibration_place(dataset)))
    return make_batches(data, preprocess, inputs), description


def peek_sample_shapes(loader: Iterable[Any], names: Sequence[str]) -> tuple[SampleShapes, Iterator[Any]]:
    """Return the shape of one sample by input from the first batch of a data loader, and all its batches."""
    batches = iter(loader)
    first = list(itertools.islice(batches, 1))
    shapes = {n: array.shape[1:] for batch in first for n, array in _batch_to_feed(batch, names, 1).items()}
    return SampleShapes("calibration batch 1", shapes), itertools.chain(first, batches)


def loader_feeds(loader: Iterable[Any], inputs: InputTypes) -> Iterator[dict[str, Array]]:
    """Yield the batches of a data loader as feeds of a model, split to the model's batch size.

    A rest that is smaller than the model's batch is filled up with copies of its last sample.
    A batch is an array or a tensor, a tuple or list whose first element is one, or a mapping with the model's input
    names, with `images_left` and `images_right` for two inputs, or with one of the keys input, data, x, images.
    """
    for number, batch in enumerate(loader, start=1):
        feed, source = _batch_to_feed(batch, tuple(inputs), number), f"calibration batch {number}"
        rows = {name: len(array) for name, array in feed.items()}
        if len(set(rows.values())) > 1:
            raise UserError(f"{source}: inputs of one batch have different numbers of samples: {rows}")
        count = next(iter(rows.values()), 0)
        yield from make_array_batches(ArrayDataset(arrays=feed, fingerprint="", source=source), inputs, count)


def _batch_to_feed(batch: Any, names: Sequence[str], number: int) -> dict[str, Array]:
    """Return the arrays of a batch by input name."""
    if isinstance(batch, tuple | list):
        if not batch:
            raise UserError(f"calibration batch {number}: an empty {type(batch).__name__}")
        return _batch_to_feed(batch[0], names, number)
    if not isinstance(batch, Mapping):
        if len(names) != 1:
            raise UserError(
                f"calibration batch {number}: one array, but the model has the inputs {', '.join(map(repr, names))}; "
                "give a mapping with these names"
            )
        return {names[0]: _to_array(batch, number)}
    single = next((key for key in SINGLE_INPUT_KEYS if key in batch), None)
    if all(name in batch for name in names):
        keys: Sequence[str] = names
    elif len(names) == 2 and all(key in batch for key in STEREO_INPUT_KEYS):
        names, keys = sorted(names, key=lambda name: "right" in name.lower()), STEREO_INPUT_KEYS
    elif len(names) == 1 and single is not None:
        keys = [single]
    else:
        raise UserError(
            f"calibration batch {number}: a mapping with the keys {', '.join(map(repr, batch))}, but expected are "
            f"{', '.join(map(repr, names))}, or for one input one of {', '.join(SINGLE_INPUT_KEYS)}"
        )
    return {name: _to_array(batch[key], number) for name, key in zip(names, keys, strict=True)}


def _to_array(value: Any, number: int) -> Array:
    """Return a NumPy array; tensors of any device are copied to the host."""
    for step in ("detach", "cpu", "numpy"):
        value = getattr(value, step)() if hasattr(value, step) else value
    array = np.asarray(value)
    if array.dtype.kind not in "fiub" or not array.ndim:
        raise UserError(f"calibration batch {number}: an array of numbers is needed, but got {type(value).__name__}")
    return array


def sample_shape(preprocess: str, size: str | None, model: str | None) -> tuple[int, ...]:
    """Return the shape of one image input: that of the model, 3 x the given size, or 3 x that of the preprocessing.

    Args:
        size: "640x640", height first.
        model: ONNX file.
    """
    if size is not None and model is not None:
        raise UserError("--size and --model: give one of them")
    if model is not None:
        types = static_inputs(open_onnx_file(model, Path.cwd(), "--model")[1], {}, names=MODEL_OPTION_NAMES)
        return types[image_input(types)][1][1:]
    if size is not None:
        dimensions = parse_shape(size, "--size")
        if len(dimensions) != 2 or not all(dimensions):
            raise UserError(f"--size: height and width, such as 640x640, but got {size!r}")
        return 3, *dimensions
    registry.find_entry_point("preprocessing", preprocess)
    if preprocess not in DEFAULT_INPUT_SIZES:
        raise UserError(f"--preprocess {preprocess}: give the input size by --size 640x640 or --model FILE.onnx")
    return 3, *DEFAULT_INPUT_SIZES[preprocess]


def write_calibration(
    images: Path, output: Path, preprocess: Mapping[str, Any], shape: tuple[int, ...], samples: int
) -> tuple[int, int]:
    """Write preprocessed images to a float32 `.npy` file, one at a time.

    Args:
        images: Folder of images; the samples are evenly spread in the order of their names.
        output: Path of the file; an incomplete file is removed.
        preprocess: `{use: NAME, params: {...}}`.
        shape: Shape of one image input, see `sample_shape`.
        samples: Maximum number of samples.

    Returns:
        Number of samples, and of images in the folder.
    """
    if output.suffix != ".npy":
        raise UserError(f"-o {output}: the name of a .npy file is needed")
    with map_error_keys({"images": "IMAGES"}):
        data = open_data({"use": "images", "images": str(images)}, Path.cwd(), samples, spread=True)
        batches = make_batches(data, preprocess, {"images": ("float", (1, *shape))})
    with name_write_errors(f"-o {output}"):
        output.parent.mkdir(parents=True, exist_ok=True)
        with replacing(output) as part:
            file = np.lib.format.open_memmap(part, mode="w+", dtype=np.float32, shape=(len(data), *shape))
            for row, batch in enumerate(batches):
                file[row] = batch["images"][0]
            file.flush()
            del file
    return len(data), data.available or len(data)
