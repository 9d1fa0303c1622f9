"""JSON lines with checksums: plain files while a run appends to them, gzip files afterwards.

Every function takes the path of the plain file and finds the compressed one itself; readers take both.
"""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO

from harness.errors import UserError
from harness.results_dir.io import explain_write_errors, remove_checksum, truncate_partial_line

COMPRESSED_SUFFIX = ".gz"
MAX_IN_MEMORY = 32 * 2**20  # bytes; larger files are decompressed to a temporary one
MAX_LINE_BYTES = 256 * 2**20  # several readings of each of a million inferences
MAX_UNPACKED_BYTES = 4 * 2**30  # 20 times the journal of 100,000 evaluations; a few kB of gzip may unpack to any size


def stored_path(path: Path) -> Path | None:
    """Return the plain file `path`, or the compressed one (`path` with .gz), or None if there is neither.

    If a crash left both, the plain one is returned, as it has at least the lines of the other.
    """
    compressed = _compressed_path(path)
    return path if path.exists() else compressed if compressed.exists() else None


def shown_path(path: Path) -> Path:
    """Return the path of a file of lines for messages: that of the file that exists, the plain one without a file."""
    return stored_path(path) or path


def open_lines(path: Path) -> IO[bytes]:
    """Open a file of lines for reading and seeking.

    Raises:
        UserError: The compressed file is damaged.
        OSError: There is no such file.
    """
    stored = stored_path(path)
    if stored is None or stored.suffix != COMPRESSED_SUFFIX:
        return path.open("rb")
    plain = tempfile.SpooledTemporaryFile(MAX_IN_MEMORY)  # noqa: SIM115 - the caller closes it
    _decompress(stored, plain)
    plain.seek(0)
    return plain


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield each line with its number, from 1, without its checksum; a partial last line is ignored.

    Raises:
        UserError: A line or the file is damaged.
    """
    with open_lines(path) as file:
        for number, raw in enumerate(whole_lines(file, stored_path(path)), 1):
            try:
                yield number, remove_checksum(raw)
            except ValueError as error:
                raise UserError(
                    f"{stored_path(path)}, line {number}: {error}; move the file away to have it made again"
                ) from error


def whole_lines(file: IO[bytes], shown: object) -> Iterator[bytes]:
    """Yield the lines of an open file; a partial last line is ignored.

    Args:
        file: File of `open_lines`.
        shown: Path of the file in messages.

    Raises:
        UserError: A line has more than `MAX_LINE_BYTES`.
    """
    for raw in iter(partial(file.readline, MAX_LINE_BYTES), b""):
        if not raw.endswith(b"\n"):
            if len(raw) == MAX_LINE_BYTES:
                raise UserError(f"{shown}: a line of more than {MAX_LINE_BYTES} bytes, so no run wrote it")
            return
        yield raw


def has_lines(path: Path) -> bool:
    """Return whether a file exists with at least one whole line.

    Raises:
        UserError: The compressed file is damaged.
    """
    stored = stored_path(path)
    if stored is None:
        return False
    try:
        with gzip.open(stored) if stored.suffix == COMPRESSED_SUFFIX else stored.open("rb") as file:
            return file.readline(MAX_IN_MEMORY).endswith(b"\n")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{stored}: damaged ({error})") from error


def compress_lines(path: Path) -> None:
    """Replace a finished plain file by a compressed one, whose bytes depend on nothing but the lines.

    Raises:
        UserError: The compressed file cannot be written.
    """
    truncate_partial_line(path)
    target = _compressed_path(path)
    temporary = target.with_suffix(".tmp")
    with explain_write_errors(target):
        with path.open("rb") as plain, temporary.open("wb") as file:
            with gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=9, mtime=0) as packed:
                shutil.copyfileobj(plain, packed)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        path.unlink()


def restore_lines(path: Path) -> None:
    """Decompress a file so that lines can be appended; do nothing if it is plain.

    Raises:
        UserError: The compressed file is damaged, or the plain one cannot be written.
    """
    compressed = _compressed_path(path)
    if not compressed.exists():
        return
    with explain_write_errors(path):
        if not path.exists():
            temporary = path.with_suffix(".tmp")
            with temporary.open("wb") as file:
                _decompress(compressed, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        compressed.unlink()


def _compressed_path(path: Path) -> Path:
    return path.with_name(path.name + COMPRESSED_SUFFIX)


def _decompress(source: Path, target: IO[bytes]) -> None:
    unpacked_bytes = 0
    try:
        with gzip.open(source) as packed:
            while block := packed.read(2**20):
                unpacked_bytes += len(block)
                if unpacked_bytes > MAX_UNPACKED_BYTES:
                    raise UserError(f"{source}: unpacks to more than {MAX_UNPACKED_BYTES} bytes, so no run wrote it")
                target.write(block)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{source}: damaged ({error})") from error
