"""The ONNX file that a spec names: found, checked, and with the static shapes that the harness needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness.errors import UserError, nearest
from harness.feeds import Types
from harness.graph.cleaning.shapes import parse_shape
from harness.graph.declared import Declared, Dims, read_declared
from harness.paths import locate

__all__ = ["Place", "Samples", "found_file", "onnx_file", "static_shapes", "static_types"]

PYTORCH = (".pt", ".pth", ".ckpt", ".tlt", ".safetensors", ".pt2")
PICKLE, ZIP = b"\x80", b"PK"
"""How the files of torch.save begin, before and since PyTorch 1.6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where users say the shapes of inputs; NAME and SHAPE stand for an input's.

    Attributes:
        key: What messages call the shape of an input.
        remedy: How to give one.
    """

    key: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Shape of one sample of the calibration data by input, with or without the batch dimension.

    Attributes:
        source: Names the data in messages.
    """

    source: str = "calibration data"
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


SPEC = Place(key="dataset.shapes.NAME", remedy="its static shape under dataset.shapes, for instance {NAME: SHAPE}")


def onnx_file(text: str, base: Path, key: str) -> tuple[Path, Declared]:
    """The file behind a key of a spec, and what it says of itself.

    Args:
        text: A path, or `assets:PATH`.
        base: Folder that relative paths start from.
        key: What messages call it.

    Raises:
        UserError: Nothing there; a PyTorch file; a name that does not end in .onnx; no ONNX inside.
    """
    suffix = Path(text).suffix.lower()
    if suffix in PYTORCH:
        raise UserError(
            f"{key}: {text} is a PyTorch file, and this backend takes ONNX alone; export it first "
            "(torch.onnx.export, 'yolo export format=onnx', or TAO's export action)"
        )
    if suffix != ".onnx":
        raise UserError(f"{key}: the name of an ONNX file ends in .onnx, but got {text}")
    path = found_file(text, base, key)
    if path.is_file():
        with path.open("rb") as file:
            head = file.read(2)
        if head == ZIP or head[:1] == PICKLE:
            raise UserError(f"{key}: {text} is called .onnx, but is a PyTorch file (torch.save); export it to ONNX")
    return path, read_declared(path, text)


def found_file(text: str, base: Path, key: str) -> Path:
    """`harness.paths.locate`, with the key of the spec in its message.

    Raises:
        UserError: Nothing is there.
    """
    try:
        return locate(text, base)
    except UserError as error:
        raise UserError(f"{key}: {error}") from error


def static_shapes(
    declared: Declared,
    batch: int,
    given: Mapping[str, str],
    place: Place = SPEC,
    samples: Samples | None = None,
) -> dict[str, tuple[int, ...]]:
    """Return a shape without dynamic dimensions for each input: as given, else that of the calibration data.

    Args:
        declared: The model.
        batch: Size of a dynamic first dimension.
        given: Shapes by input.
        place: Names the option or key of `given` in messages.
        samples: Of the calibration data.

    Raises:
        UserError: More than the batch is dynamic, and neither a shape nor data are given; data of another shape than
            the input; a shape for an input that the model does not have.
    """
    for name in given:
        if name not in declared.inputs:
            key = place.key.replace("NAME", name)
            raise UserError(f"{key}: the model has no such input; {nearest(name, declared.inputs)}")
    found: dict[str, tuple[int, ...]] = {}
    for name, (_, dims) in declared.inputs.items():
        if name in given:
            found[name] = parse_shape(given[name], place.key.replace("NAME", name))
        elif (shape := _sample_shape(name, dims, samples or Samples(), batch)) is not None:
            found[name] = shape
        elif None in dims[1:]:
            remedy = place.remedy.replace("NAME", name).replace("SHAPE", _example(dims))
            missing = f", and {samples.source} has no array for it" if samples and samples.shapes else ""
            raise UserError(f"input {name!r} is {_times(dims)}{missing}: say {remedy}")
        else:
            found[name] = tuple(batch if size is None else size for size in dims)
    return found


def _sample_shape(name: str, dims: Dims, samples: Samples, batch: int) -> tuple[int, ...] | None:
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
        f"{samples.source}: a sample of {name!r} is {_times(sample, ' x ')}, but the input takes "
        f"{_times(dims[1:], ' x ')} (without the batch; ? is any size)"
    )


def _example(dims: Dims) -> str:
    """Return a usual shape for an input: an image where it has four dimensions, a sequence otherwise."""
    usual = (1, 3, 640, 640) if len(dims) == 4 else (1, *[128] * len(dims))
    return _times(tuple(size or other for size, other in zip(dims, usual, strict=False)))


def _times(dims: Dims, sign: str = "x") -> str:
    return sign.join("?" if size is None else str(size) for size in dims) or "a single number"


def static_types(declared: Declared, shapes: Mapping[str, tuple[int, ...]]) -> Types:
    """Element type and static shape of each input."""
    return {name: (dtype, shapes[name]) for name, (dtype, _) in declared.inputs.items()}
