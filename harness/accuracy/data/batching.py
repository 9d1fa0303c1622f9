"""Batches of model inputs from images or arrays, in the batch size of the model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from harness.accuracy.data.arrays import UNNAMED_ARRAY, ArrayDataset
from harness.accuracy.data.datasets import ImageDataset
from harness.accuracy.data.preprocess import (
    FloatArray,
    ImagePreprocessor,
    Layout,
    Prepared,
    RgbImage,
    Size,
    parse_preprocess,
)
from harness.base.errors import UserError, suggest_names
from harness.base.random_inputs import InputTypes, check_types, random_feed
from harness.base.text import pluralize
from harness.graph.passes.dimension_sizes import Axes
from harness.plugins import registry
from harness.plugins.api import Array

logger = logging.getLogger(__name__)

RANDOM_DATA = "random data"  # description of random batches


@dataclass(frozen=True, slots=True, kw_only=True)
class InputBatches:
    """Batches of inputs by name; each iteration makes them again.

    Attributes:
        count: Number of batches.
        make: Function that returns the batch with an index.
        size: Number of samples in a batch.
        batch_label: Function that returns the name of a batch for messages: a file, or the images.
        own_sizes: Whether a batch has other sizes than the inputs of the model.
    """

    count: int
    make: Callable[[int], dict[str, Array]]
    size: int = 1
    batch_label: Callable[[int], str] = field(default=lambda _: "")
    own_sizes: bool = False

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[dict[str, Array]]:
        return map(self.make, range(self.count))


def random_batches(inputs: InputTypes, count: int) -> InputBatches:
    """Return random inputs, the same in each iteration, as `harness.base.random_inputs.random_feed` makes them."""
    return InputBatches(count=count, make=lambda index: random_feed(inputs, index), batch_label=lambda _: RANDOM_DATA)


def image_layout(input_name: str, shape: Sequence[int], layout: Layout | None = None) -> Layout:
    """Return the layout of an image input: the given one, or that of the axis which has the three channels.

    Raises:
        UserError: The input is neither batch x 3 x height x width nor batch x height x width x 3, it has another layout
            than the given one, or it could have both and none is given.
    """
    axes: Mapping[Layout, int] = {"nchw": 1, "nhwc": 3}
    known = len(shape) == 4 and all(isinstance(n, int) and n > 0 for n in shape)
    fitting = [name for name, axis in axes.items() if known and shape[axis] == 3 and layout in (None, name)]
    shown = f"{input_name!r} is {' x '.join(map(str, shape))}"
    if not fitting:
        wanted = {"nchw": "batch x 3 x height x width", "nhwc": "batch x height x width x 3"}
        forms = " or ".join(wanted.values()) if layout is None else f"{wanted[layout]} (layout: {layout})"
        raise UserError(f"images need an input of {forms}, but {shown}; feed it arrays (use: npz or npy)")
    if len(fitting) > 1:
        raise UserError(
            f"preprocess: {shown}, so axis 1 or axis 3 could be the channels; add the layout, nchw or nhwc: "
            "{use: NAME, layout: nhwc}"
        )
    return fitting[0]


def image_size(input_name: str, shape: Sequence[int], layout: Layout | None = None) -> Size:
    """Return height and width of an image input; see `image_layout` for arguments and errors."""
    return (shape[1], shape[2]) if image_layout(input_name, shape, layout) == "nhwc" else (shape[2], shape[3])


def image_preparer(
    preprocess: str | Mapping[str, Any], input_name: str, shape: Sequence[int]
) -> tuple[Size, Callable[[RgbImage], Prepared]]:
    """Return the size of an image input, and a function that prepares an image for it in its layout.

    Args:
        preprocess: Name, or `{use: NAME, params: {...}, layout: ...}`.
        input_name: Name of the input.
        shape: Static shape of the input.

    Raises:
        UserError: The preprocessing is invalid, or the input takes no images.
    """
    use, params, given = parse_preprocess(preprocess)
    opened: ImagePreprocessor = registry.create_plugin("preprocessing", use, params)
    layout = image_layout(input_name, shape, given)
    size = image_size(input_name, shape, layout)

    def prepare_channels_last(image: RgbImage) -> Prepared:
        prepared = opened.prepare(image, size)
        return replace(prepared, tensor=np.ascontiguousarray(prepared.tensor.transpose(1, 2, 0)))

    return size, prepare_channels_last if layout == "nhwc" else lambda image: opened.prepare(image, size)


def image_input(inputs: InputTypes) -> str:
    """Return the name of the input that takes images.

    Raises:
        UserError: No input has three channels in axis 1 or 3 of four, or there are other inputs.
    """
    images = [name for name, (_, shape) in inputs.items() if len(shape) == 4 and 3 in (shape[1], shape[3])]
    name = next(iter([*images, *inputs]), "")
    if not images:
        image_layout(name, inputs[name][1] if inputs else ())  # which raises
    others = [repr(other) for other in inputs if other != name]
    if others:
        raise UserError(f"data: images feed only {name!r}; use: npz for the others as well ({', '.join(others)})")
    return name


def make_batch(tensors: Sequence[FloatArray], batch: int) -> FloatArray:
    """Return tensors as one array with `batch` rows; if there are fewer, the last tensor is repeated.

    A batch of one is not copied.
    """
    if batch == 1:
        return np.ascontiguousarray(tensors[0])[None]
    return np.stack([*tensors, *[tensors[-1]] * (batch - len(tensors))])


def describe_sample_count(data: ImageDataset | ArrayDataset, limit: int | None, place: str) -> str:
    """Describe how many samples are used and whether the limit dropped some or exceeds their number.

    Args:
        data: Data opened with this limit, spread evenly.
        limit: Limit that the user requested; None: none.
        place: Name of the file or folder.
    """
    used, available = len(data), data.available or len(data)
    if used < available:
        return f"{used} of the {available} samples of {place}, evenly spread"
    if limit is not None and limit > used:
        return f"{pluralize(used, 'sample')} of {place}, all there are of the {limit} asked for"
    return f"{pluralize(used, 'sample')} of {place}"


def make_batches(
    data: ImageDataset | ArrayDataset,
    preprocess: str | Mapping[str, Any] | None,
    inputs: InputTypes,
    count: int | None = None,
    axes: Mapping[str, Axes | None] | None = None,
) -> InputBatches:
    """Return model inputs in batches of the model's batch size; the last sample is repeated in the last batch.

    Arrays whose samples have other sizes than the inputs give batches of one sample at its own sizes, where the axes
    are dynamic.

    Args:
        data: Images, or arrays for all inputs.
        preprocess: Preprocessing of images, by name or as `{use: NAME, params: {...}, layout: ...}`; not for arrays.
        inputs: Element type and shape of each input of the model.
        count: Maximum number of samples; None: all.
        axes: Declared dimensions of each input in the original file, see `harness.graph.model.DynamicOriginal`; None:
            all are fixed.

    Raises:
        UserError: Images have no valid preprocessing or the model has several inputs, or arrays do not match the inputs
            by name, shape or type.
    """
    total = len(data) if count is None else min(count, len(data))
    if total == 1:
        logger.warning("there is one sample: other samples may leave its ranges, and have other outputs; give more")
    if isinstance(data, ArrayDataset):
        return make_array_batches(data, inputs, total, axes)
    if preprocess is None:
        raise UserError("data: images need 'preprocess', the name of what turns an image into an input")
    name = image_input(inputs)
    shape = inputs[name][1]
    batch, (_, prepare) = shape[0], image_preparer(preprocess, name, shape)

    def make(index: int) -> dict[str, Array]:
        chosen = range(index * batch, min((index + 1) * batch, total))
        return {name: make_batch([prepare(data.image(i)).tensor for i in chosen], batch)}

    def label(index: int) -> str:
        first, last = index * batch, min((index + 1) * batch, total) - 1
        return data.sample_name(first) if first == last else f"{data.sample_name(first)} to {data.sample_name(last)}"

    return InputBatches(count=-(-total // batch), make=make, size=batch, batch_label=label)


def make_array_batches(
    data: ArrayDataset, inputs: InputTypes, total: int, axes: Mapping[str, Axes | None] | None = None
) -> InputBatches:
    """Return batches of the first `total` samples of arrays; see `make_batches`, also for errors."""
    if UNNAMED_ARRAY in data.arrays:
        if len(inputs) > 1:
            raise UserError(
                f"{data.source}: a .npy file feeds one input, but the model has {', '.join(map(repr, inputs))}; "
                "use a .npz file"
            )
        data = replace(data, arrays=dict.fromkeys(inputs, data.arrays[UNNAMED_ARRAY]))
    arrays = data.arrays
    for name in arrays:
        if name not in inputs:
            remedy = f"an array of labels is named by 'labels: {name}' next to its path"
            if data.labels is not None:
                remedy = "leave it out of the file, or give it the name of an input"
            raise UserError(f"{data.source}: the model has no input {name!r}; {suggest_names(name, inputs)}; {remedy}")
    dtypes = check_types(inputs)
    for name, dtype in dtypes.items():
        if name not in arrays:
            raise UserError(f"{data.source}: there is no array for the input {name!r}")
        given = (arrays[name][0] if arrays[name].dtype.hasobject else arrays[name]).dtype
        if not np.can_cast(given, dtype, "same_kind"):
            raise UserError(f"{data.source}: array {name!r} holds {given}, but the input takes {dtype}")
        if given.kind in "iu" and dtype.kind == "f":
            logger.warning(
                "%s: array %r holds %s, and goes into a %s input as it is: is it prepared as the model was trained?",
                data.source, name, given, dtype,
            )  # fmt: skip
    fixed = {name: inputs[name][1] for name in dtypes}
    differ = axes and any(arrays[n].shape[1:] not in (fixed[n], fixed[n][1:]) for n in fixed)
    if differ or any(array.dtype.hasobject for array in arrays.values()):
        return _make_single_batches(data, dtypes, fixed, axes or {}, total)
    sizes = {name: _batch_size(data, name, inputs[name][1]) for name in dtypes}
    if len(set(sizes.values())) > 1:
        raise UserError(
            f"{data.source}: one sample for each input is needed, but a batch of them is, by input, {sizes}"
        )
    batch = next(iter(sizes.values()))

    def make(index: int) -> dict[str, Array]:
        chosen = np.minimum(np.arange(index * batch, (index + 1) * batch), total - 1)
        return {name: arrays[name][chosen].astype(t, copy=False).reshape(inputs[name][1]) for name, t in dtypes.items()}

    return InputBatches(count=-(-total // batch), make=make, size=batch, batch_label=lambda _: data.source)


def _make_single_batches(
    data: ArrayDataset,
    dtypes: Mapping[str, np.dtype[Any]],
    fixed: Mapping[str, tuple[int, ...]],
    axes: Mapping[str, Axes | None],
    total: int,
) -> InputBatches:
    """Return a batch for each of the first samples, at its own sizes; `fixed` are the shapes of the model's inputs."""
    shapes = [_own_shapes(data, i, fixed, axes) for i in range(total)]

    def make(i: int) -> dict[str, Array]:
        own = {name: np.asarray(data.arrays[name][i]) for name in dtypes}
        return {name: array.astype(dtypes[name], copy=False).reshape(shapes[i][name]) for name, array in own.items()}

    return InputBatches(
        count=total,
        make=make,
        batch_label=lambda i: f"{data.source}, {data.sample_name(i)}",
        own_sizes=any(shape != fixed for shape in shapes),
    )


def _own_shapes(
    data: ArrayDataset, i: int, inputs: Mapping[str, tuple[int, ...]], axes: Mapping[str, Axes | None]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the inputs for one sample alone.

    Raises:
        UserError: The sample has another size than a fixed axis, or two sizes for one symbol.
    """
    found, symbols = {}, dict[str, tuple[int, str]]()
    for name, fixed in inputs.items():
        where = f"{data.source}: {data.sample_name(i)}"
        own = data.arrays[name][i].shape
        shape = own if len(own) == len(fixed) else (1, *own)
        if len(shape) != len(fixed):
            raise UserError(
                f"{where}: array {name!r} is {_format_dimensions(own)}, but the input takes "
                f"{_format_dimensions(fixed)}, the batch first"
            )
        for axis, (size, known) in enumerate(zip(shape, fixed, strict=True)):
            declared = axes.get(name, fixed)
            symbol = None if declared is None else declared[axis]
            if isinstance(symbol, int) and size != known:
                one = "samples of different sizes are run one at a time" if axis == 0 and size == 1 else ""
                raise UserError(
                    f"{where}: array {name!r} has {size} in axis {axis} of the input, which the model fixes to {known}"
                    f"{one and f' ({one})'}; {_describe_layout(own, fixed)}pad or cut the samples to "
                    f"{_format_dimensions(fixed)}, or export the model with this axis dynamic"
                )
            other, first = symbols.setdefault(symbol, (size, name)) if isinstance(symbol, str) else (size, name)
            if other != size:
                raise UserError(
                    f"{where}: array {name!r} has {size} in axis {axis}, but array {first!r} has {other} of the same "
                    f"dimension {symbol!r}; the arrays of a sample have one size of it"
                )
        found[name] = shape
    return found


def _batch_size(data: ArrayDataset, name: str, shape: tuple[int, ...]) -> int:
    """Return the batch size of an input, or 1 if each sample of the array has the shape of the whole input."""
    array = data.arrays[name]
    if array.shape[1:] == shape:
        return 1
    if shape and array.shape[1:] == shape[1:]:
        return shape[0]
    raise UserError(
        f"{data.source}: a sample of array {name!r} is {_format_dimensions(array.shape[1:])}, "
        f"but the input takes {_format_dimensions(shape)}, the batch first"
        f"{'; ' * bool(layout := _describe_layout(array.shape[1:], shape))}{layout.removesuffix(', or ')}"
    )


def _describe_layout(sample: Sequence[int], shape: Sequence[int]) -> str:
    """Return the transposition of samples that have the channels at the other end than the input, as text; else ""."""
    axes = range(1, len(shape))
    orders = {"last": (0, axes[-1], *axes[:-1]), "first": (0, *axes[1:], 1)} if len(shape) > 2 else {}
    for place, order in orders.items():
        if len(sample) == len(axes) and all(sample[order[axis] - 1] == shape[axis] for axis in axes):
            return f"the samples have the channels {place}: x.transpose{order}, or "
    return ""


def _format_dimensions(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "a single number"
