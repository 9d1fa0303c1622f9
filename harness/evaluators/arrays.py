"""Ready-made inputs from `.npy` and `.npz` files; never a pickle, and no more samples in memory than are asked for."""

from __future__ import annotations

import hashlib
import math
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from harness.api import Array
from harness.errors import UserError
from harness.evaluators.cuts import canonical, chosen_rows, text
from harness.evaluators.labels import read_rows
from harness.paths import locate

__all__ = ["UNNAMED", "Arrays", "is_arrays", "open_arrays", "read_arrays"]

UNNAMED = ""
"""The array of a `.npy` file: for the only input of a model, whatever its name."""
MAX_BYTES = 8 * 2**30
Choose = Callable[[int], Sequence[int]]
"""Ascending indices of the wanted samples, given how many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrays:
    """Ready-made inputs by name, the samples along the first axis.

    Attributes:
        source: What they are called in messages: the file.
        labels: One row for each sample; None: not labelled.
        rows: Their row in the file.
        total: Rows of the file.
    """

    arrays: Mapping[str, Array]
    fingerprint: str
    source: str = "data"
    labels: Array | None = None
    rows: Sequence[int] = ()
    total: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    def id(self, i: int) -> str:
        """Return what messages call sample i."""
        return f"row {self.rows[i]}"


def is_arrays(data: object) -> bool:
    """Return whether a data mapping is one of arrays."""
    return isinstance(data, Mapping) and data.get("use") in ("npz", "npy")


def open_arrays(spec: Mapping[str, Any], base: Path | None = None, limit: int | None = None) -> Arrays:
    """Open what a data mapping says of arrays; see `harness.evaluators.datasets.open_data`."""
    path = locate(text(spec, "path"), base)
    if path.suffix != f".{spec['use']}":
        raise UserError(f"data.path: use: {spec['use']} takes a .{spec['use']} file, but got {path.name}")
    found = read_arrays(path, lambda total: chosen_rows(spec, [f"row {i}" for i in range(total)], path.name, limit))
    digest = hashlib.sha256(canonical(spec) + found.fingerprint.encode())
    if spec.get("labels") is not None:
        name = text(spec, "labels")
        if name in found.arrays:
            inputs = {key: array for key, array in found.arrays.items() if key != name}
            found = replace(found, arrays=inputs, labels=found.arrays[name])
        else:
            file = _label_file(name, base, found)
            rows = read_rows(file)
            if len(rows) != found.total:
                raise UserError(f"data.labels: {name} has {len(rows)} rows, but {path.name} has {found.total} samples")
            found = replace(found, labels=rows[list(found.rows)])
            digest.update(file.read_bytes())
    return replace(found, fingerprint=digest.hexdigest())


def _label_file(name: str, base: Path | None, data: Arrays) -> Path:
    """Return the file with the labels of arrays, which are not among them."""
    try:
        return locate(name, base)
    except UserError as error:
        named = ", ".join(repr(key) for key in data.arrays if key)
        among = f"{data.source} has no array {name!r}, only {named}, and " if named else ""
        raise UserError(f"data.labels: {among}{error}") from error


def read_arrays(path: Path, choose: Choose) -> Arrays:
    """Read the chosen samples. A `.npy` file is mapped: its samples come into memory when they are used.

    Returns:
        The arrays, and a fingerprint of the whole file.

    Raises:
        UserError: Not a file of plain arrays, or of arrays of different lengths; NaN or infinite values; more than
            8 GiB of an `.npz` file at once.
    """
    seen: list[tuple[int, Sequence[int]]] = []

    def kept(total: int) -> Sequence[int]:
        seen.append((total, choose(total)))
        return seen[-1][1]

    with _explained(path):
        found, fingerprint = _mapped(path, kept) if path.suffix == ".npy" else _unpacked(path, kept)
    for name, array in found.items():
        _check_finite(path, name, array)
    total, rows = seen[-1]
    return Arrays(arrays=found, fingerprint=fingerprint, source=str(path), rows=rows, total=total)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile, NotImplementedError) as error:
        raise UserError(f"{path}: not an {path.suffix or '.npz'} file of plain arrays: {error}") from error


def _mapped(path: Path, choose: Choose) -> tuple[dict[str, Array], str]:
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    _check_lengths(path, {UNNAMED: array.shape})
    with path.open("rb") as file:
        fingerprint = hashlib.file_digest(file, "sha256").hexdigest()
    chosen = choose(len(array))
    return {UNNAMED: array[_span(chosen)][_within(chosen)]}, fingerprint


def _unpacked(path: Path, choose: Choose) -> tuple[dict[str, Array], str]:
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        headers = {}
        for member in members:
            with archive.open(member) as file:
                headers[member.filename.removesuffix(".npy")] = _header(file)
        chosen = choose(_check_lengths(path, {name: shape for name, (shape, _, _) in headers.items()}))
        _check_size(path, headers, chosen)
        found = {}
        for member, (name, header) in zip(members, headers.items(), strict=True):
            with archive.open(member) as file:
                found[name] = _rows(file, header, _span(chosen))[_within(chosen)]
    sums = "".join(f"{member.filename}\0{member.CRC}\n" for member in members)
    return found, hashlib.sha256(sums.encode()).hexdigest()


Header = tuple[tuple[int, ...], bool, "np.dtype[Any]"]


def _header(file: IO[bytes]) -> Header:
    """Shape, column order and type; NEP 1, "A simple file format for NumPy arrays"."""
    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"format version {version} is not one of {', '.join(map(str, readers))}")
    shape, by_column, dtype = readers[version](file)
    if dtype.hasobject:
        raise ValueError("object arrays are pickles, which are never read")
    return shape, by_column, dtype


def _rows(file: IO[bytes], header: Header, rows: slice) -> Array:
    """Some rows of an array in a file, without those before and after."""
    shape, by_column, dtype = header
    _header(file)
    if by_column and len(shape) > 1:
        whole = np.frombuffer(file.read(math.prod(shape) * dtype.itemsize), dtype)
        return whole.reshape(shape, order="F")[rows]
    width = math.prod(shape[1:]) * dtype.itemsize
    file.seek(rows.start * width, 1)
    part = (rows.stop - rows.start, *shape[1:])
    return np.frombuffer(file.read(part[0] * width), dtype).reshape(part)


def _span(chosen: Sequence[int]) -> slice:
    return slice(chosen[0], chosen[-1] + 1)


def _within(chosen: Sequence[int]) -> Any:
    """The chosen ones among their span: nothing to copy where they are all of it."""
    shifted = [index - chosen[0] for index in chosen]
    return slice(None) if shifted == list(range(len(shifted))) else shifted


def _check_lengths(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> int:
    lengths = {name: shape[0] if shape else 0 for name, shape in shapes.items()}
    if len(set(lengths.values())) != 1 or not all(lengths.values()):
        raise UserError(f"{path}: the first axis of every array counts the samples, but their lengths are {lengths}")
    return next(iter(lengths.values()))


def _check_size(path: Path, headers: Mapping[str, Header], chosen: Sequence[int]) -> None:
    rows = chosen[-1] + 1 - chosen[0]
    asked = sum((shape[0] if by_column else rows) * math.prod(shape[1:]) * dtype.itemsize
                for shape, by_column, dtype in headers.values())  # fmt: skip
    if asked > MAX_BYTES:
        raise UserError(
            f"{path}: {len(chosen)} samples take {asked / 2**30:.1f} GiB, more than {MAX_BYTES / 2**30:.0f}; "
            "use fewer ('count'), or a .npy file, which is read as needed"
        )


def _check_finite(path: Path, name: str, array: Array) -> None:
    if array.dtype.kind == "f" and not all(np.isfinite(row).all() for row in array):
        raise UserError(f"{path}: array {name!r} has NaN or infinite values")
