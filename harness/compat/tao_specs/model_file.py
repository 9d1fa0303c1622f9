"""The ONNX file that a spec names: found, checked, and with the static shapes that the harness needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from harness.errors import UserError, suggest_names
from harness.graph.passes.dimension_sizes import Axes, InputSizes, format_axes, parse_shape, resolve_shapes
from harness.graph.signature import Dims, ModelSignature, read_signature
from harness.paths import resolve_path
from harness.random_inputs import InputTypes

__all__ = ["SampleShapes", "ShapeOptionNames", "locate_spec_file", "open_onnx_file", "static_shapes", "static_types"]

PYTORCH_SUFFIXES = (".pt", ".pth", ".ckpt", ".tlt", ".safetensors", ".pt2")
PICKLE_MAGIC, ZIP_MAGIC = b"\x80", b"PK"
"""How the files of torch.save begin, before and since PyTorch 1.6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeOptionNames:
    """Where users say the shapes of inputs; NAME and SHAPE stand for an input's.

    Attributes:
        key: What messages call the shape of an input.
        remedy: How to give one.
        dim_remedy: How to give sizes of symbols; SIZES stands for them.
        dim_form: How one of them is written, and what stands between two.
    """

    key: str
    remedy: str
    dim_remedy: str = ""
    dim_form: tuple[str, str] = ("", "")

    @property
    def section(self) -> str:
        """Begins messages about sizes that do not fit."""
        return self.key.removesuffix("NAME").rstrip(". ")

    def describe_remedy(self, name: str, axes: Axes, symbols: Sequence[str]) -> str:
        """Return how to make an input static: by its missing symbols, or by its shape."""
        usual = 640 if len(axes) == 4 else 128
        example = "x".join(str(a if isinstance(a, int) else usual if place else 1) for place, a in enumerate(axes))
        by_shape = self.remedy.replace("NAME", name).replace("SHAPE", example)
        if not (symbols and self.dim_remedy) or None in axes[1:]:
            return by_shape
        form, between = self.dim_form
        sizes = between.join(form.replace("SYMBOL", symbol).replace("SIZE", str(usual)) for symbol in symbols)
        return f"{self.dim_remedy.replace('SIZES', sizes)}, or {by_shape}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleShapes:
    """Shape of one sample of the calibration data by input, with or without the batch dimension.

    Attributes:
        source: Names the data in messages.
    """

    source: str = "calibration data"
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


SPEC_OPTION_NAMES = ShapeOptionNames(
    key="dataset.shapes.NAME", remedy="its static shape under dataset.shapes, for instance {NAME: SHAPE}"
)
SPEC_OPTION_NAMES = ShapeOptionNames(
    key="dataset.shapes.NAME",
    remedy="its static shape under dataset.shapes, for instance {NAME: SHAPE}",
    dim_remedy="each size under dataset.dims, for instance {SIZES}",
    dim_form=("SYMBOL: SIZE", ", "),
)


def open_onnx_file(text: str, base: Path, key: str) -> tuple[Path, ModelSignature]:
    """The file behind a key of a spec, and what it says of itself.

    Args:
        text: A path, or `assets:PATH`.
        base: Folder that relative paths start from.
        key: What messages call it.

    Raises:
        UserError: Nothing there; a PyTorch file; a name that does not end in .onnx; no ONNX inside.
    """
    suffix = Path(text).suffix.lower()
    if suffix in PYTORCH_SUFFIXES:
        raise UserError(
            f"{key}: {text} is a PyTorch file, and this backend takes ONNX alone; export it first "
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
    """`harness.paths.resolve_path`, with the key of the spec in its message.

    Raises:
        UserError: Nothing is there.
    """
    try:
        return resolve_path(text, base)
    except UserError as error:
        raise UserError(f"{key}: {error}") from error


def static_shapes(
    declared: ModelSignature,
    batch: int,
    given: Mapping[str, str],
    names: ShapeOptionNames = SPEC_OPTION_NAMES,
    samples: SampleShapes | None = None,
    dims: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, tuple[int, ...]]:
    """Return a shape without dynamic dimensions for each input: as given, else that of the calibration data.

    Args:
        declared: The model.
        batch: For dimensions that are the batch by their name, and where only the first dimension is dynamic.
        given: Shapes by input.
        names: Names the option or key of `given` in messages.
        samples: Of the calibration data.
        dims: Sizes by symbol.

    Raises:
        UserError: More than the batch is dynamic, and neither a shape nor data are given; data of another shape than
            the input; a shape for an input that the model does not have.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in given.items():
        key = names.key.replace("NAME", name)
        if name not in declared.inputs:
            raise UserError(f"{key}: the model has no such input; {suggest_names(name, declared.inputs)}")
        found[name] = parse_shape(shape, key)
    for name, (_, own) in declared.inputs.items():
        if name not in found and (whole := _sample_shape(name, own, samples or SampleShapes(), batch)) is not None:
            found[name] = whole
    dynamic = {
        name: _zero_as_unknown(declared.axes[name]) for name, (_, sizes) in declared.inputs.items() if None in sizes
    }
    sizes = InputSizes(
        shapes={name: found[name] for name in dynamic if name in found},
        dims={**_batch_symbols(dynamic, batch, found, dims), **dims},
    )
    known = resolve_shapes(dynamic, sizes, names.section, batch=batch)
    for name, axes in dynamic.items():
        if name not in known.shapes:
            asked = names.describe_remedy(name, axes or (), known.missing.symbols)
            missing = f", and {samples.source} has no array for it" if samples and samples.shapes else ""
            raise UserError(f"input {name!r} is {format_axes(axes)}{missing}: say {asked}")
    for name, (_, declared_sizes) in declared.inputs.items():
        found.setdefault(name, known.shapes.get(name) or tuple(size for size in declared_sizes if size is not None))
    return {name: found[name] for name in declared.inputs}


def _zero_as_unknown(axes: Axes | None) -> Axes | None:
    """Return the dimensions of an input with those of size 0 as unknown ones."""
    return None if axes is None else tuple(axis or None for axis in axes)


def _batch_symbols(
    dynamic: Mapping[str, Axes | None], batch: int, found: Mapping[str, object], dims: Mapping[str, int]
) -> dict[str, int]:
    """Return the batch for symbols, whatever their name, that are the only dynamic dimension and the first."""
    given = {axis for name in found for axis in dynamic.get(name) or ()}
    others = {axis for axes in dynamic.values() for axis in (axes or ())[1:]}
    first = {axes[0] for axes in dynamic.values() if axes and all(isinstance(axis, int) for axis in axes[1:])}
    return {axis: batch for axis in first - given - others if isinstance(axis, str) and axis not in dims}


def _sample_shape(name: str, dims: Dims, samples: SampleShapes, batch: int) -> tuple[int, ...] | None:
    """Return the shape of an input with the sizes of a sample where its own are dynamic; None: nothing tells.

    Raises:
        UserError: More than the batch is dynamic, and the sample is of another shape.
    """
    sample = samples.shapes.get(name)
    if sample is None or (dims and None not in dims):
        return None
    if not dims:  # the file says nothing of its rank: a sample without dimensions is a single number
        return (batch, *sample) if sample else ()
    whole = sample if len(sample) == len(dims) else (dims[0] or batch, *sample)
    if len(whole) == len(dims) and all(size in (None, own) for size, own in zip(dims, whole, strict=True)):
        return whole
    if None not in dims[1:]:  # who feeds the data compares them
        return None
    raise UserError(
        f"{samples.source}: a sample of {name!r} is {_format_dims(sample, ' x ')}, but the input takes "
        f"{_format_dims(dims[1:], ' x ')} (without the batch; ? is any size)"
    )


def _format_dims(dims: Dims, sign: str = "x") -> str:
    return sign.join("?" if size is None else str(size) for size in dims) or "a single number"


def static_types(declared: ModelSignature, shapes: Mapping[str, tuple[int, ...]]) -> InputTypes:
    """Element type and static shape of each input."""
    return {name: (dtype, shapes[name]) for name, (dtype, _) in declared.inputs.items()}
