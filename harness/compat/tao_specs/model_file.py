"""ONNX file of a spec: existence, format, and static shapes of its inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from harness.base.errors import UserError, prefix_key, suggest_names
from harness.base.paths import resolve_path
from harness.base.random_inputs import InputTypes
from harness.graph.load import Dims, ModelSignature, read_signature
from harness.graph.passes.dimension_sizes import Axes, InputSizes, format_axes, parse_shape, resolve_shapes
from harness.graph.passes.static_shapes import copy_with_static_inputs

PYTORCH_SUFFIXES = (".pt", ".pth", ".ckpt", ".tlt", ".safetensors", ".pt2")
PICKLE_MAGIC, ZIP_MAGIC = b"\x80", b"PK"  # first bytes of files of torch.save, before and since PyTorch 1.6
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeOptionNames:
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

    Raises:
        UserError: The file is missing, is a PyTorch file, has another suffix than .onnx, or is not an ONNX model.
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

    Raises:
        UserError: More than the batch is dynamic, and neither a shape nor data are given; the data have another shape
            than the input; there is no such input.
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
    """Return the shape of an input with its dynamic dimensions set from a sample; None if there are none or no sample.

    Raises:
        UserError: More than the batch is dynamic, and the sample has another shape.
    """
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
