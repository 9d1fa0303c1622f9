"""Model inputs from `.npy` and `.npz` files; pickles are refused, and only the selected samples are loaded."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import zipfile
from array import array as number_array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from harness.accuracy.data.labels import MAX_LABEL_BYTES
from harness.base.errors import MAX_COUNT, UserError
from harness.base.files import read_text
from harness.base.paths import resolve_path
from harness.base.text import shorten
from harness.plugins.api import Array

SUBSET_KEYS = ("start", "count", "half", "every")
HALF_NAMES = ("search", "report")


def half_of(name: str) -> str:
    """Return the half ("search" or "report") that a sample belongs to, by a hash of its name."""
    return HALF_NAMES[hashlib.sha256(name.encode()).digest()[0] % 2]


def select_rows(spec: Mapping[str, Any], names: Sequence[str], what: str) -> Sequence[int]:
    """Return the indices of the samples that the keys `start`, `count`, `half` and `every` select, ascending.

    Args:
        spec: A data mapping; `half` is "search" or "report" (see `half_of`), and `every` n takes each n-th of the
            samples that the other keys select.
        names: Names of all samples.
        what: Name of the data for messages.

    Raises:
        UserError: A key has an invalid value, or no sample is selected.
    """
    total, start = len(names), read_int_key(spec, "start", 0)
    count = total - start if spec.get("count") is None else read_int_key(spec, "count", 1)
    if start >= total or start + count > total:
        asked = f"start {start}" + (f" and count {count}" if spec.get("count") is not None else "")
        raise UserError(f"data: {asked} reach beyond the end: {what} has {total}")
    chosen: Sequence[int] = range(start, start + count)
    half = spec.get("half")
    if half is not None:
        if half not in HALF_NAMES:
            raise UserError(f"data.half: one of {', '.join(HALF_NAMES)}, but got {half!r}")
        chosen = [i for i in chosen if half_of(names[i]) == half]
        if not chosen:
            raise UserError(f"data.half: none of the {count} samples is of the half {half!r}; use more of them")
    return chosen[:: read_int_key(spec, "every", 1)]


def read_int_key(spec: Mapping[str, Any], key: str, least: int) -> int:
    """Return an integer key of a data mapping.

    Args:
        spec: A data mapping.
        key: Name of the key.
        least: Smallest allowed value, and the default.

    Raises:
        UserError: The value is no integer, too small or too large.
    """
    value = spec.get(key, least)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"data.{key}: a whole number from {least}, but got {value!r}")
    if value > MAX_COUNT:
        raise UserError(f"data.{key}: at most {MAX_COUNT:,}, but got {value}")
    return value


def read_text_key(spec: Mapping[str, Any], key: str) -> str:
    """Return a required text key of a data mapping; raise `UserError` if it is missing, "" or no text."""
    value = spec.get(key)
    if not isinstance(value, str) or not value:
        raise UserError(f"data.{key}: this key is required, but got {value!r}")
    return value


def canonical_json(value: Mapping[str, Any]) -> bytes:
    """Return a mapping as JSON with sorted keys, for digests."""
    return json.dumps(value, sort_keys=True, default=str).encode()


UNNAMED_ARRAY = ""
"""Name of the array of a `.npy` file, which is for the only input of a model."""
MAX_ARRAY_BYTES = 8 * 2**30
Header = tuple[tuple[int, ...], bool, "np.dtype[Any]"]
"""Shape, whether in column order, and type of an array."""
RowSelector = Callable[[int], Sequence[int]]
"""Function of the number of samples that returns the ascending indices of those to read."""
SubsetSelector = Callable[[Sequence[int]], Sequence[int]]
"""Function of the indices that a specification selects that returns those to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayDataset:
    """Model inputs by name, the samples along the first axis.

    Attributes:
        arrays: Arrays by the name of the input. If samples differ in shape, the array has the type object and one
            dimension, and its elements are the arrays of the samples.
        fingerprint: Digest of the specification, the file and the labels.
        source: Name of the file for messages.
        labels: One row for each sample, in the form of `arrays`; None: no labels.
        rows: Row in the file of each sample.
        total: Number of rows of the file.
        available: Number of samples before a limit was applied; None: unknown.
        files: Name of the file and row in it of each row, if `source` is a folder.
    """

    arrays: Mapping[str, Array]
    fingerprint: str
    source: str = "data"
    labels: Array | None = None
    rows: Sequence[int] = ()
    total: int = 0
    available: int | None = None
    files: Sequence[tuple[str, int]] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def sample_name(self, i: int) -> str:
        """Return the name of sample i for messages."""
        if not self.files:
            return f"row {self.rows[i]}"
        name, row = self.files[self.rows[i]]
        return f"row {row} of {name}"


def array_names(path: Path) -> frozenset[str]:
    """Return the names of the arrays of a `.npz` file, or of the first one of a folder; empty if none can be read."""
    try:
        path = next(iter(array_files(path, "npz")), path) if path.is_dir() else path
        if not path.is_file():
            return frozenset()
        with zipfile.ZipFile(path) as archive:
            return frozenset(name.removesuffix(".npy") for name in archive.namelist())
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile):  # damaged; `read_arrays` reports it
        return frozenset()


def read_sample_shapes(
    spec: Mapping[str, Any], base: Path | None = None, pick: Callable[[int, int], int] = max
) -> dict[str, tuple[int, ...]]:
    """Return the shape of one sample of each array of a data mapping's file, by name; empty if it cannot be read.

    Samples in a folder may differ in shape; `pick` chooses between two sizes of an axis.
    """
    try:
        path = resolve_path(read_text_key(spec, "path"), base)
        found: dict[str, tuple[int, ...]] = {}
        for file in array_files(path, str(spec.get("use"))) if path.is_dir() else (path,):
            for name, (shape, _, _) in _read_headers(file).items():
                found[name] = tuple(map(pick, found.get(name, shape[1:]), shape[1:]))
        return found
    except (
        UserError,
        OSError,
        ValueError,
        NotImplementedError,
        zipfile.BadZipFile,
    ):  # damaged; `read_arrays` reports it
        return {}


def _read_headers(path: Path) -> dict[str, Header]:
    if path.suffix == ".npy":
        with path.open("rb") as file:
            return {UNNAMED_ARRAY: _read_header(file)}
    headers = {}
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            with archive.open(member) as inside:
                shape, _, dtype = header = _read_header(inside)
            if math.prod(shape) * dtype.itemsize > member.file_size:
                raise ValueError(f"array {member.filename!r} is shorter than its header says")
            headers[member.filename.removesuffix(".npy")] = header
    return headers


def array_files(folder: Path, kind: str) -> list[Path]:
    """Return the `.npz` or `.npy` files (`kind` without the dot) of a folder in the order of their names."""
    return sorted(path for path in folder.iterdir() if path.suffix == f".{kind}")


def array_kind(path: Path) -> str:
    """Return the kind of data of a file, the suffix, or of a folder: "npz", "npy", or "" without such a file."""
    if not path.is_dir():
        return path.suffix.removeprefix(".")
    return next((kind for kind in ("npz", "npy") if array_files(path, kind)), "")


def count_samples(spec: Mapping[str, Any]) -> int:
    """Return the number of samples in the file, or the folder of files, of a data mapping, without a selection."""
    path = Path(spec["path"])
    count = 0
    for file in array_files(path, spec["use"]) if path.is_dir() else (path,):
        with _translate_read_errors(file):
            count += _check_lengths(file, _read_headers(file))
    return count


def is_array_data(data: object) -> bool:
    """Return whether a data mapping describes arrays (`use` is npz or npy), not images."""
    return isinstance(data, Mapping) and data.get("use") in ("npz", "npy")


def open_arrays(
    spec: Mapping[str, Any], base: Path | None = None, cut: SubsetSelector = lambda samples: samples
) -> ArrayDataset:
    """Open the arrays that a data mapping describes.

    Args:
        spec: The mapping; see `harness.accuracy.data.datasets`.
        base: Folder that relative paths start from.
        cut: Function that selects the samples to use from those that the mapping selects.

    Raises:
        UserError: The file or its labels are invalid, or the selection is beyond the end.
    """
    path = resolve_path(read_text_key(spec, "path"), base)
    files = array_files(path, spec["use"]) if path.is_dir() else ()
    if not files and path.suffix != f".{spec['use']}":
        kind = f"a .{spec['use']} file" + " or a folder of them" * path.is_dir()
        raise UserError(f"data.path: use: {spec['use']} takes {kind}, but got {path.name}")
    available: Sequence[int] = ()

    def choose(total: int) -> Sequence[int]:
        nonlocal available
        available = select_rows(spec, [f"row {i}" for i in range(total)], path.name)
        return cut(available)

    found = _read_folder(path, files, choose) if files else read_arrays(path, choose)
    digest = hashlib.sha256(canonical_json(spec) + found.fingerprint.encode())
    if spec.get("labels") is not None:
        name = read_text_key(spec, "labels")
        if name in found.arrays:
            inputs = {key: array for key, array in found.arrays.items() if key != name}
            found = replace(found, arrays=inputs, labels=found.arrays[name])
        else:
            try:
                file = resolve_path(name, base)
            except UserError as error:
                named = ", ".join(repr(key) for key in found.arrays if key)
                among = f"{found.source} has no array {name!r}, only {named}, and " if named else ""
                raise UserError(f"data.labels: {among}{error}") from error
            rows = read_rows(file)
            if len(rows) != found.total:
                raise UserError(f"data.labels: {name} has {len(rows)} rows, but {path.name} has {found.total} samples")
            found = replace(found, labels=rows[list(found.rows)])
            digest.update(file.read_bytes())
    return replace(found, fingerprint=digest.hexdigest(), available=len(available))


def _read_folder(folder: Path, files: Sequence[Path], choose: RowSelector) -> ArrayDataset:
    """Read some samples of the files of a folder, whose samples may differ in shape.

    Raises:
        UserError: A file is invalid, or has other arrays, types or numbers of dimensions than the first one.
    """
    by_file: dict[Path, list[int]] = {}
    places: list[tuple[str, int]] = []
    for file in files:
        with _translate_read_errors(file):
            count = _check_lengths(file, _read_headers(file))
        places += [(file.name, row) for row in range(count)]
    rows = choose(len(places))
    for name, row in (places[row] for row in rows):
        by_file.setdefault(folder / name, []).append(row)
    samples: dict[str, list[Array]] = {}
    names, first = hashlib.sha256(), dict[str, tuple[Any, int]]()
    for file, own_rows in by_file.items():
        part = read_arrays(file, lambda _, own_rows=own_rows: own_rows)  # type: ignore[misc]
        own = {name: (array.dtype, array.ndim) for name, array in part.arrays.items()}
        if own != (first := first or own):
            shown = [", ".join(f"{n!r} of {t} with {d} axes" for n, (t, d) in each.items()) for each in (own, first)]
            raise UserError(
                f"{file}: the files of a folder have equal names, types and numbers of axes, but this one has "
                f"{shown[0]}, and {next(iter(by_file)).name} has {shown[1]}"
            )
        names.update(f"{file.name}\0{part.fingerprint}\n".encode())
        for name, array in part.arrays.items():
            samples.setdefault(name, []).extend(np.array(array))  # a mapped file would stay open
    stacked: dict[str, Array] = {}
    for name, arrays in samples.items():
        if len({array.shape for array in arrays}) == 1:
            stacked[name] = np.stack(arrays)
            continue
        stacked[name] = np.empty(len(arrays), object)
        for i, array in enumerate(arrays):  # NumPy would broadcast a list
            stacked[name][i] = array
    return ArrayDataset(
        arrays=stacked,
        fingerprint=names.hexdigest(),
        source=str(folder),
        rows=rows,
        total=len(places),
        files=places,
    )


def read_rows(path: Path) -> Array:
    """Return the labels of samples, one row for each, from a `.npy`, `.npz`, `.csv` or `.txt` file.

    An `.npz` file must have one array. A text file has one number per line, or several separated by commas (`.csv`) or
    spaces (`.txt`); a first line without numbers is a heading.

    Raises:
        UserError: The file is of another kind or malformed; for a text file the message names the line.
    """
    if path.suffix not in (".npy", ".npz", ".csv", ".txt"):
        raise UserError(f"{path}: labels of arrays are a .npy, .npz, .csv or .txt file, one row for each sample")
    if path.suffix in (".npy", ".npz"):
        arrays = read_arrays(path, range).arrays
        if len(arrays) != 1:
            raise UserError(f"{path}: holds {', '.join(arrays)}; labels are a file with one array")
        return next(iter(arrays.values()))
    values, widths = number_array("d"), set[int]()  # a list would take 60 bytes for each number
    try:
        lines = io.StringIO(read_text(path, "labels", MAX_LABEL_BYTES).removeprefix("\ufeff"), newline=None)
        for number, line in enumerate(csv.reader(lines) if path.suffix == ".csv" else map(str.split, lines), 1):
            if not any(cell.strip() for cell in line):
                continue
            try:
                values.extend([float(cell) for cell in line])
            except ValueError:
                if widths or number > 1:
                    shown = shorten(",".join(line))
                    raise UserError(f"{path}, line {number}: numbers are needed, but got {shown!r}") from None
            else:
                widths.add(len(line))
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read as labels: {error}") from error
    if len(widths) != 1:
        shown = shorten(sorted(widths) or "no")
        raise UserError(f"{path}: rows of one length are needed, but they have {shown} numbers")
    found = np.array(values).reshape(-1, *widths)
    whole = found.astype(np.int64) if np.isfinite(found).all() and (found == np.rint(found)).all() else found
    return whole[:, 0] if widths == {1} else whole


def read_arrays(path: Path, choose: RowSelector) -> ArrayDataset:
    """Read some samples of a file.

    A `.npy` file and the uncompressed arrays of an `.npz` file are memory-mapped: samples are loaded when they are
    used.

    Args:
        path: Path of the file.
        choose: Function that selects the samples, given their number.

    Returns:
        The arrays, and a fingerprint of the whole file.

    Raises:
        UserError: The file has other contents than plain arrays of one length, has NaN or infinite values, or more than
            8 GiB of compressed arrays.
    """
    with _translate_read_errors(path):
        headers = _read_headers(path)
        total = _check_lengths(path, headers)
        rows = choose(total)
        if path.suffix == ".npy":
            found = {UNNAMED_ARRAY: np.load(path, mmap_mode="r", allow_pickle=False)[rows[0] : rows[-1] + 1]}
            with path.open("rb") as file:
                fingerprint = hashlib.file_digest(file, "sha256").hexdigest()
        else:
            found, fingerprint = _unpack_arrays(path, headers, rows)
    within = [row - rows[0] for row in rows]
    if within != list(range(len(within))):  # else no copy is needed
        found = {name: array[within] for name, array in found.items()}
    for name, array in found.items():
        for number, row in enumerate(array if array.dtype.kind == "f" else ()):
            if not np.isfinite(row).all():
                raise UserError(f"{path}: array {name!r} has NaN or infinite values, in row {number}")
    return ArrayDataset(arrays=found, fingerprint=fingerprint, source=str(path), rows=rows, total=total)


@contextmanager
def _translate_read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # zipfile, its decoders and NumPy raise classes of many kinds on damaged files
        raise UserError(f"{path}: not an {path.suffix or '.npz'} file of plain arrays: {error}") from error


def _unpack_arrays(path: Path, headers: Mapping[str, Header], rows: Sequence[int]) -> tuple[dict[str, Array], str]:
    """Return the rows of each array from the first to the last chosen one, and the digest of all checksums."""
    span, found = slice(rows[0], rows[-1] + 1), {}
    with zipfile.ZipFile(path) as archive:
        members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
        asked, mapped = 0, set[str]()
        for name, (shape, by_column, dtype) in headers.items():
            if members[name].compress_type == zipfile.ZIP_STORED and math.prod(shape) * dtype.itemsize:
                mapped.add(name)
            else:
                asked += (shape[0] if by_column else span.stop - span.start) * math.prod(shape[1:]) * dtype.itemsize
        if asked > MAX_ARRAY_BYTES:
            raise UserError(
                f"{path}: {len(rows)} samples take {asked / 2**30:.1f} GiB, more than {MAX_ARRAY_BYTES / 2**30:.0f}; "
                "use fewer ('count'), or a file that is read as needed: .npy, or .npz by numpy.savez, uncompressed"
            )
        for name, header in headers.items():
            with archive.open(members[name]) as file:
                if name not in mapped:
                    found[name] = _read_rows(file, header, span)
                    continue
                while file.read(1 << 20):  # at the end `zipfile` raises BadZipFile if the checksum is wrong
                    pass
            found[name] = _map_member(path, members[name], header)[span]
        sums = "".join(f"{member.filename}\0{member.CRC}\n" for member in archive.infolist())
    return found, hashlib.sha256(sums.encode()).hexdigest()


def _read_header(file: IO[bytes]) -> Header:
    """Return shape, whether in column order, and type of an array (NEP 1, "A simple file format for NumPy arrays")."""
    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"format version {version} is not one of {', '.join(map(str, readers))}")
    shape, by_column, dtype = readers[version](file)
    if dtype.hasobject:
        raise ValueError("object arrays are pickles, which are never read")
    return shape, by_column, dtype


def _map_member(path: Path, member: zipfile.ZipInfo, header: Header) -> Array:
    """Memory-map an uncompressed array of an archive.

    Raises:
        ValueError: The header declares more bytes than the member has.
    """
    shape, by_column, dtype = header
    with path.open("rb") as file:
        file.seek(member.header_offset + 26)  # lengths of name and extra field in the local header (APPNOTE.TXT 4.3.7)
        start = member.header_offset + 30 + sum(int.from_bytes(file.read(2), "little") for _ in range(2))
        file.seek(start)
        _read_header(file)
        offset = file.tell()
    if offset - start + math.prod(shape) * dtype.itemsize > member.file_size:
        raise ValueError(f"array {member.filename!r} is shorter than its header says")
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=shape, order="F" if by_column else "C")


def _read_rows(file: IO[bytes], header: Header, rows: slice) -> Array:
    """Read some rows of an array in a file, without the rows before and after."""
    shape, by_column, dtype = header
    _read_header(file)
    if by_column and len(shape) > 1:
        whole = np.frombuffer(file.read(math.prod(shape) * dtype.itemsize), dtype)
        return whole.reshape(shape, order="F")[rows]
    width = math.prod(shape[1:]) * dtype.itemsize
    file.seek(rows.start * width, 1)
    part = (rows.stop - rows.start, *shape[1:])
    return np.frombuffer(file.read(part[0] * width), dtype).reshape(part)


def _check_lengths(path: Path, headers: Mapping[str, Header]) -> int:
    """Return the number of samples; raise `UserError` if the arrays are of several lengths or without samples."""
    rule = f"{path}: the first axis of every array counts the samples, but"
    for name, (shape, _, _) in headers.items():
        if not shape:
            one = "a file of one sample has labels of shape (1,), and inputs with a first axis of 1 (array[None])"
            raise UserError(f"{rule} {name!r} is a single number: {one}")
        if not shape[0]:
            raise UserError(f"{path}: there are no samples: array {name!r} has length 0")
    lengths = {name: shape[0] for name, (shape, _, _) in headers.items()}
    if len(set(lengths.values())) != 1:
        raise UserError(f"{rule} their lengths are {lengths}")
    return next(iter(lengths.values()))
