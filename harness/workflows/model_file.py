"""The ONNX file that a spec names: found, checked, and with the static shapes that the harness needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UserError, nearest
from harness.feeds import Types
from harness.graph.cleaning.shapes import parse_shape
from harness.graph.declared import Declared, read_declared
from harness.paths import locate

__all__ = ["Place", "found_file", "onnx_file", "static_shapes", "static_types"]

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
    declared: Declared, batch: int, given: Mapping[str, str], place: Place = SPEC
) -> dict[str, tuple[int, ...]]:
    """A shape without dynamic dimensions for each input: as given, else the batch where only the first is dynamic.

    Args:
        declared: The model.
        batch: For inputs of which only the first dimension is dynamic.
        given: Shapes by input.
        place: Where those come from.

    Raises:
        UserError: More than the batch is dynamic and nothing is given; a shape for an input that there is not.
    """
    for name in given:
        if name not in declared.inputs:
            key = place.key.replace("NAME", name)
            raise UserError(f"{key}: the model has no such input; {nearest(name, declared.inputs)}")
    found: dict[str, tuple[int, ...]] = {}
    for name, (_, dims) in declared.inputs.items():
        if name in given:
            found[name] = parse_shape(given[name], place.key.replace("NAME", name))
            continue
        if None in dims[1:]:
            shown = "x".join("?" if size is None else str(size) for size in dims)
            example = "x".join(str(size or 640) for size in (dims[0] or 1, *dims[1:]))
            remedy = place.remedy.replace("NAME", name).replace("SHAPE", example)
            raise UserError(f"input {name!r} is {shown}: say {remedy}")
        found[name] = tuple(batch if size is None else size for size in dims)
    return found


def static_types(declared: Declared, shapes: Mapping[str, tuple[int, ...]]) -> Types:
    """Element type and static shape of each input."""
    return {name: (dtype, shapes[name]) for name, (dtype, _) in declared.inputs.items()}
