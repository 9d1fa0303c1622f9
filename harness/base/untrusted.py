"""Bounded reading of files that may come from a stranger: regular files only, limited in bytes and in memory.

A short text may describe many values, and a value takes up to a hundred times the bytes of its text. So the memory of
the parsed content is estimated before it is parsed.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from harness.base.errors import UserError

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
    """Open a regular file for reading; opening a pipe or a device could wait forever.

    Raises:
        UserError: The file cannot be opened, or is no regular file.
    """
    with explain_read_errors(path, kind):
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        with explain_read_errors(path, kind):
            if stat.S_ISDIR(mode):
                raise IsADirectoryError
        raise UserError(f"{path}: this is no file, but a pipe or a device")
    with open(handle, "rb") as file:
        yield file


def read_bounded(path: Path, kind: str = "a file of qdq-bench", max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file.

    Raises:
        UserError: The file cannot be read, is no regular file, or has more than `max_bytes`.
    """
    with open_regular(path, kind) as file, explain_read_errors(path, kind):
        if (size := os.fstat(file.fileno()).st_size) <= max_bytes:
            content = file.read(max_bytes + 1)
            size = len(content)
    if size > max_bytes:
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
    try:
        body = json.loads(raw, parse_int=_parse_int if _LONG_NUMBER.search(raw) else None)
        if b"\\ud" in raw:
            body = json.loads(json.dumps(body, ensure_ascii=False).encode(errors="replace"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return body


def _parse_int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)
