"""The ONNX file that a spec names: found, checked, and with the static shapes that the harness needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from harness.errors import UserError, nearest
from harness.feeds import Types
from harness.graph.cleaning.sizes import Axes, Sizes, parse_shape, resolve, shown
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

    def asking(self, name: str, axes: Axes, symbols: Sequence[str]) -> str:
        """Return how to make an input static: by its missing symbols, or by its shape."""
        usual = 640 if len(axes) == 4 else 128
        example = "x".join(str(a if isinstance(a, int) else usual if place else 1) for place, a in enumerate(axes))
        by_shape = self.remedy.replace("NAME", name).replace("SHAPE", example)
        if not (symbols and self.dim_remedy) or None in axes[1:]:
            return by_shape
        form, between = self.dim_form
        sizes = between.join(form.replace("SYMBOL", symbol).replace("SIZE", str(usual)) for symbol in symbols)
        return f"{self.dim_remedy.replace('SIZES', sizes)}, or {by_shape}"


SPEC = Place(
    key="dataset.shapes.NAME",
    remedy="its static shape under dataset.shapes, for instance {NAME: SHAPE}",
    dim_remedy="each size under dataset.dims, for instance {SIZES}",
    dim_form=("SYMBOL: SIZE", ", "),
)


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
    dims: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, tuple[int, ...]]:
    """A shape without dynamic dimensions for each input: as given, else the batch where only the first is dynamic.

    Args:
        declared: The model.
        batch: For dimensions that are the batch by their name, and where only the first dimension is dynamic.
        given: Shapes by input.
        place: Where those come from.
        dims: Sizes by symbol.

    Raises:
        UserError: More than the batch is dynamic and nothing is given; a shape for an input that there is not.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in given.items():
        key = place.key.replace("NAME", name)
        if name not in declared.inputs:
            raise UserError(f"{key}: the model has no such input; {nearest(name, declared.inputs)}")
        found[name] = parse_shape(shape, key)
    dynamic = {name: _unsized(declared.axes[name]) for name, (_, sizes) in declared.inputs.items() if None in sizes}
    sizes = Sizes(
        shapes={name: found[name] for name in dynamic if name in found},
        dims={**_leading(dynamic, batch, found, dims), **dims},
    )
    known = resolve(dynamic, sizes, place.section, batch=batch)
    for name, axes in dynamic.items():
        if name not in known.shapes:
            asked = place.asking(name, axes or (), known.missing.symbols)
            raise UserError(f"input {name!r} is {shown(axes)}: say {asked}")
    for name, (_, declared_sizes) in declared.inputs.items():
        found.setdefault(name, known.shapes.get(name) or tuple(size for size in declared_sizes if size is not None))
    return {name: found[name] for name in declared.inputs}


def _unsized(axes: Axes | None) -> Axes | None:
    """Return the dimensions of an input with those of size 0 as unknown ones."""
    return None if axes is None else tuple(axis or None for axis in axes)


def _leading(
    dynamic: Mapping[str, Axes | None], batch: int, found: Mapping[str, object], dims: Mapping[str, int]
) -> dict[str, int]:
    """Return the batch for symbols, whatever their name, that are the only dynamic dimension and the first."""
    given = {axis for name in found for axis in dynamic.get(name) or ()}
    others = {axis for axes in dynamic.values() for axis in (axes or ())[1:]}
    first = {axes[0] for axes in dynamic.values() if axes and all(isinstance(axis, int) for axis in axes[1:])}
    return {axis: batch for axis in first - given - others if isinstance(axis, str) and axis not in dims}


def static_types(declared: Declared, shapes: Mapping[str, tuple[int, ...]]) -> Types:
    """Element type and static shape of each input."""
    return {name: (dtype, shapes[name]) for name, (dtype, _) in declared.inputs.items()}
