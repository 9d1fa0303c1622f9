"""Files: bounded reading of any file, and crash-safe reading and writing of those of a results folder.

Files may come from a stranger, so only regular files are read, limited in bytes and in memory. A short text may
describe many values, and a value takes up to a hundred times the bytes of its text. So the memory of the parsed content
is estimated before it is parsed.

The last field of each stored JSON object is a checksum: CRC-32 of the text before it. It detects accidental damage, not
forgery.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import itertools
import json
import os
import re
import stat
import zlib
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import IO, Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from harness.base.errors import UserError
from harness.base.text import shorten

T = TypeVar("T")

MAX_BYTES = 64 * 2**20
MAX_PARSED_BYTES = 128 * 2**20  # scores of 80 files on 50,000 images each
MAX_DIGITS = 300  # of an integer; larger ones cannot be floats
_LONG_NUMBER = re.compile(rb"\d{%d}" % MAX_DIGITS)
#: Bytes of the Python objects that a character of JSON begins; a key may be a wrong one, and an error takes 1 kB.
_BYTES_BY_CHARACTER = {b",": 32, b":": 1024, b'"': 32, b"[": 72, b"{": 240}


@contextmanager
def explain_read_errors(path: Path, kind: str) -> Iterator[None]:
    """Convert an `OSError` of the body, or that of an impossible path, to a `UserError` with the path.

    Args:
        kind: Description of the file for the message, such as "an experiment file".
    """
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file ({os.path.abspath(path)})") from error
    except IsADirectoryError as error:
        raise UserError(f"{path}: this is a folder, not {kind}; name the file in it") from error
    except (OSError, ValueError) as error:  # ValueError: NUL or a lone surrogate in the path
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


@contextmanager
def open_regular(path: Path, kind: str = "a file") -> Iterator[IO[bytes]]:
    """Open a regular file for reading; opening a pipe or a device could wait forever."""
    with explain_read_errors(path, kind):
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    with file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise UserError(f"{path}: this is no file, but a pipe or a device")
        yield file


def read_bounded(path: Path, kind: str = "a file of qdq-bench", max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file."""
    with open_regular(path, kind) as file, explain_read_errors(path, kind):
        size = os.fstat(file.fileno()).st_size
        content = file.read(max_bytes + 1) if size <= max_bytes else b""
    if (size := max(size, len(content))) > max_bytes:
        raise UserError(f"{path}: {size} bytes, but at most {max_bytes} for {kind}")
    return content


def read_text(path: Path, kind: str, max_bytes: int = MAX_BYTES) -> str:
    """Return the text of a regular file; the errors are those of `read_bounded`, or the file is no text."""
    try:
        return read_bounded(path, kind, max_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: this is not text, so not {kind}") from error


def check_parsed_size(raw: bytes, limit: int = MAX_PARSED_BYTES) -> None:
    """Raise `ValueError` for JSON whose values take more memory than any file of a run needs."""
    if len(raw) * max(_BYTES_BY_CHARACTER.values()) <= limit:
        return
    estimate = len(raw) + sum(raw.count(character) * size for character, size in _BYTES_BY_CHARACTER.items())
    if estimate > limit:
        raise ValueError(f"its values take about {estimate >> 20} MiB of memory, but at most {limit >> 20}")


def parse_json(raw: bytes | str) -> Any:
    """Return decoded JSON; lone surrogates, which no file can have, become question marks.

    Raises:
        ValueError: The text is no JSON, is nested too deeply, has an integer of more than `MAX_DIGITS` digits, or takes
            too much memory.
    """
    raw = raw.encode() if isinstance(raw, str) else raw
    check_parsed_size(raw)

    def parse_int(text: str) -> int:
        if len(text) > MAX_DIGITS:
            raise ValueError(f"a number of {len(text)} digits")
        return int(text)

    try:
        body = json.loads(raw, parse_int=parse_int if _LONG_NUMBER.search(raw) else None)
        if b"\\ud" in raw:
            body = json.loads(json.dumps(body, ensure_ascii=False).encode(errors="replace"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return body


def first_problem(error: ValidationError, skipped: int = 0) -> str:
    """Return the first error of pydantic as "key.path: message", without the first `skipped` keys of the path."""
    first = error.errors(include_url=False, include_input=False)[0]
    place, problem = ".".join(map(str, first["loc"][skipped:])), first["msg"].removeprefix("Value error, ")
    return f"{place}: {problem}" if place else problem


@functools.cache
def _adapter(schema: Any) -> TypeAdapter[Any]:
    return TypeAdapter(schema)


def from_json(schema: type[T], body: Any) -> T:
    """Return an instance of a type from decoded JSON, with tuples for lists.

    Raises:
        ValueError: The body does not fit the type.
    """
    try:
        record: T = _adapter(schema).validate_python(body)  # type: ignore[arg-type]
    except ValidationError as error:
        raise ValueError(first_problem(error)) from error
    return record


_CHECKSUM = re.compile(rb',?"crc32":"([0-9a-f]{8})"\}\Z')
_CHECKSUM_CHARS = 20


class DamagedFile(UserError):
    """File that is not as a run wrote it.

    Args:
        path: The file as it is on the disk.
        problem: Difference from what a run writes.
        where: Place in the file, such as "line 3"; "" for the whole file.
        remedy: Advice to the user.
    """

    def __init__(
        self,
        path: Path,
        problem: str,
        *,
        where: str = "",
        remedy: str = "move it away and repeat the run, which makes it again, or restore it",
    ) -> None:
        self.path, self.problem, self.where = path, problem, where
        super().__init__(f"{path}{', ' if where else ''}{where}: {problem}; {remedy}")


def add_checksum(text: str) -> str:
    """Return a JSON object, as text without white space around it, with its checksum as the last field."""
    body = text[:-1]
    return f'{body}{"," if len(body) > 1 else ""}"crc32":"{zlib.crc32(body.encode()):08x}"}}'


def remove_checksum(raw: bytes) -> bytes:
    """Compare the checksum of a JSON object that `add_checksum` wrote, and return the object without it.

    Raises:
        ValueError: The checksum is missing or differs.
    """
    raw = raw.rstrip(b"\n")
    match = _CHECKSUM.search(raw, max(0, len(raw) - _CHECKSUM_CHARS))
    if match is None:
        raise ValueError("damaged: no checksum")
    body = raw[: match.start()]
    if zlib.crc32(body) != int(match[1], 16):
        raise ValueError("damaged: the checksum differs")
    return body + b"}"


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Convert an `OSError` of the body to a `UserError`, with advice on how to continue if there is no room."""
    try:
        yield
    except OSError as error:
        advice = "; everything measured before is safe: make room, then run the same command again to continue"
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise UserError(f"{path}: cannot be written ({error.strerror or error}){advice * is_full}") from error


def read_json(path: Path, missing: Mapping[str, Any] | None = None, schema: Any = None) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        missing: Result if there is no file; None: an error. A link to nothing is an error too.
        schema: Type that the object must fit; keys that it does not have are not checked.
    """
    if missing is not None and not os.path.lexists(path):
        return dict(missing)
    try:
        body = parse_json(remove_checksum(read_bounded(path)))
    except ValueError as error:
        raise DamagedFile(path, f"cannot be read ({error})") from error
    if not isinstance(body, dict):
        raise DamagedFile(path, "not a file of qdq-bench")
    if schema is not None:
        try:
            from_json(schema, body)
        except ValueError as error:
            raise DamagedFile(path, f"damaged ({error})") from error
    return body


def write_json(path: Path, body: Any) -> None:
    """Replace a file with a JSON object and its checksum atomically."""
    write_text(path, add_checksum(json.dumps(body, separators=(",", ":"), allow_nan=False)) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically; after a crash or an error (`UserError`) it has the old or the new content."""
    temporary = path.with_suffix(".tmp")
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def append_line(file: FileIO, text: str, path: Path, *, sync: bool = True) -> None:
    """Append a whole line, or nothing if the disk is full.

    Args:
        file: Opened with "ab" and without a buffer.
        text: The line without newline.
        path: Path of the file, for messages.
        sync: Return only when the line is on the disk.
    """
    with explain_write_errors(path):
        end = file.seek(0, os.SEEK_END)
        remaining = memoryview(text.encode() + b"\n")
        try:
            while remaining:
                remaining = remaining[file.write(remaining) :]
            if sync:
                os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                file.truncate(end)
            raise


def truncate_partial_line(path: Path) -> None:
    """Remove the text after the last newline, which a crash left behind, if there is any."""
    with path.open("rb+") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end > 0:
            step = min(65536, end)
            file.seek(end - step)
            newline = file.read(step).rfind(b"\n")
            if newline >= 0:
                end = end - step + newline + 1
                break
            end -= step
        if end < size:
            file.truncate(end)


def file_sha256(path: Path) -> str:
    """Return the digest of a file, as `sha256sum` prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def archive_existing(path: Path) -> Path:
    """Rename a file or folder to its `next_backup_path` and return that."""
    backup = next_backup_path(path)
    with explain_write_errors(path):
        path.rename(backup)
    return backup


def next_backup_path(path: Path) -> Path:
    """Return the first unused path NAME.1, NAME.2, ..., with the number before the suffix of a file."""
    stem, suffix = (path.stem, path.suffix) if path.is_file() else (path.name, "")
    names = (path.with_name(f"{stem}.{number}{suffix}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def diff_leaves(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Yield each leaf that differs, for instance "backend.version: '2026.3' -> '2026.4'"; a missing one is None.

    Args:
        old: Value read from JSON.
        new: Value after a round trip through JSON, where tuples become lists.
        path: Key path of both values, the prefix of the results.
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted({*old, *new}):
            yield from diff_leaves(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
    elif not json_equal(old, new):
        yield f"{path}: {shorten(repr(old))} -> {shorten(repr(new))}"


def json_equal(one: Any, other: Any) -> bool:
    """Return whether two JSON values are equal, where NaN equals NaN."""
    return bool(one == other) or json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def facts_digest(facts: Any) -> str:
    """Return a digest (16 hexadecimal digits) of JSON values and sets, the same in every process."""

    def plain(value: Any) -> Any:
        return sorted(value) if isinstance(value, Set) else repr(value)

    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=plain).encode()).hexdigest()[:16]
