"""JSON lines that are chained by digests: plain files while a run appends to them, gzip files afterwards.

The first line is a header with the name of the file and a random number. Each line ends with a digest of its text and
of the digest of the line before, so a line that was changed, dropped, repeated or moved is found. Lines of earlier
versions have a checksum of their own instead, as JSON files have. A partial last line, which a crash leaves behind, is
ignored.

Every function takes the path of the plain file and finds the compressed one itself; readers take both.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, Self

from harness.base.files import (
    DamagedFile,
    add_checksum,
    append_line,
    check_parsed_size,
    explain_write_errors,
    open_regular,
    parse_json,
    remove_checksum,
    truncate_partial_line,
)
from harness.base.text import shorten

COMPRESSED_SUFFIX = ".gz"
CHAINED_SCHEMA = 3  # of headers; files of schema 2 are not chained
#: Of a parsed line: several readings of each of 100,000 inferences, and the accuracy of as many images.
MAX_LINE_BYTES = 64 * 2**20
MAX_UNPACKED_BYTES = 4 * 2**30  # 20 times the journal of 100,000 evaluations; a few kB of gzip may unpack to any size
_SEAL = re.compile(rb',?"(?:chain":"([0-9a-f]{16})|crc32":"([0-9a-f]{8}))"\}\n?\Z')
_SEAL_BYTES = 40


class LineLog:
    """Open file to which chained lines are appended; a file of an earlier version keeps its form.

    Opening decompresses the file, removes a partial last line, and writes the header of a new file.

    Args:
        header: Content of the header of a new file.

    Attributes:
        header: First line of a file that existed; empty for a new one.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self._path, self.header = path, dict[str, Any]()
        self._last: str | None = ""
        with explain_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            restore_lines(path)
            if path.exists():
                truncate_partial_line(path)
            if first := first_line(path):
                self.header = log_header(path)
                with path.open("rb") as file:
                    file.seek(-min(_SEAL_BYTES, file.seek(0, os.SEEK_END)), os.SEEK_END)
                    try:
                        chained = _find_seal(file.read())[1]
                    except ValueError as error:
                        raise DamagedFile(path, str(error), where="the last line") from error
                self._last = None if chained is None else chained.decode()
            self._file = path.open("ab", buffering=0)
        if not first:
            head = {"kind": "header", "schema": CHAINED_SCHEMA, "log": path.name.removesuffix(".jsonl")}
            head["id"] = secrets.token_hex(4)  # otherwise logs of two runs of one experiment have equal headers
            content = {**head, **header}
            self.append(json.dumps(content, separators=(",", ":"), sort_keys=True))

    def append(self, text: str, *, sync: bool = True) -> None:
        """Append a JSON object; it is on the disk when this returns, unless `sync` is False."""
        sealed, digest = seal_line(text, self._last)
        append_line(self._file, sealed, self._path, sync=sync)
        self._last = digest

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def seal_line(text: str, last: str | None) -> tuple[str, str | None]:
    """Return a JSON object, as text without white space around it, with its digest as the last field; and the digest.

    Args:
        last: Digest of the line before; "" for the first line; None in a file of an earlier version.
    """
    if last is None:
        return add_checksum(text), None
    body = text[:-1]
    digest = _digest(last, body.encode())
    return f'{body}{"," if len(body) > 1 else ""}"chain":"{digest}"}}', digest


def _digest(last: str, body: bytes) -> str:
    digest = hashlib.blake2b(last.encode(), digest_size=8)
    digest.update(body)
    return digest.hexdigest()


def _unseal(raw: bytes, last: str | None) -> tuple[bytes, str | None]:
    """Return a line without its digest, and the digest that the next line continues from.

    Raises:
        ValueError: The digest is missing or differs.
    """
    seal = _find_seal(raw)
    if last == "" and seal[1] is None:  # the first line decides
        last = None
    if (seal[1] is None) != (last is None):
        raise ValueError("damaged: a line of another version")
    if last is None:
        return remove_checksum(raw), None
    body = raw[: seal.start()]
    if (digest := _digest(last, body)) != seal[1].decode():
        raise ValueError("damaged: a line was changed, dropped, repeated or moved, here or just before")
    return body + b"}", digest


def _find_seal(raw: bytes) -> re.Match[bytes]:
    seal = _SEAL.search(raw, max(0, len(raw) - _SEAL_BYTES))
    if seal is None:
        raise ValueError("damaged: no checksum")
    return seal


def strip_seal(raw: bytes) -> bytes:
    """Return a line without its digest, which was compared before."""
    return raw[: _find_seal(raw).start()] + b"}"


def stored_path(path: Path) -> Path | None:
    """Return the plain file `path`, or the compressed one (`path` with .gz), or None if there is neither.

    If a crash left both, the plain one is returned, as it has at least the lines of the other.
    """
    return next(filter(os.path.lexists, (path, _compressed_path(path))), None)


def shown_path(path: Path) -> Path:
    """Return the path of a file of lines for messages: that of the file that exists, the plain one without a file."""
    return stored_path(path) or path


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield each line with its number, from 1, without its digest."""
    return ((number, body) for number, _, body in scan_lines(path))


def scan_lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield what `read_lines` yields, with the offset of each line in bytes after its number."""
    shown, offset = shown_path(path), 0
    digest: str | None = ""
    for number, raw in enumerate(_whole_lines(shown), 1):
        try:
            check_parsed_size(raw, MAX_LINE_BYTES)
            body, digest = _unseal(raw, digest)
            if number == 1:
                facts = parse_json(body)
                facts = facts if isinstance(facts, dict) else {}
                if digest is None and facts.get("schema") == CHAINED_SCHEMA:
                    raise ValueError("damaged: its lines are not chained")
                own = path.name.removesuffix(COMPRESSED_SUFFIX).removesuffix(".jsonl")
                name = str(facts.get("log", own))
                if not re.fullmatch(rf"{re.escape(name)}(\.\d+)?", own):  # archived files have a number added
                    raise ValueError(f"damaged: this is the file {shorten(name)!r} of a run")
        except ValueError as error:
            raise DamagedFile(shown, str(error), where=f"line {number}") from error
        yield number, offset, body
        offset += len(raw)


def _whole_lines(shown: Path) -> Iterator[bytes]:
    """Yield the lines of a file; a partial last line is ignored."""
    with _open_stored(shown) as file:
        for raw in iter(partial(file.readline, MAX_LINE_BYTES), b""):
            if not raw.endswith(b"\n"):
                if len(raw) == MAX_LINE_BYTES:
                    raise DamagedFile(shown, f"a line of more than {MAX_LINE_BYTES} bytes, so no run wrote it")
                return
            yield raw


@contextmanager
def _open_stored(shown: Path) -> Iterator[IO[bytes]]:
    """Open a plain or a compressed file; errors on decompressing it become `DamagedFile`."""
    with open_regular(shown) as file:
        try:
            yield gzip.open(file) if shown.suffix == COMPRESSED_SUFFIX else file  # type: ignore[misc]  # noqa: SIM115
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DamagedFile(shown, f"damaged ({error})") from error


def first_line(path: Path) -> bytes:
    """Return the first whole line; empty without one or without a file."""
    stored = stored_path(path)
    return b"" if stored is None else next(_whole_lines(stored), b"")


def log_header(path: Path) -> dict[str, Any]:
    """Return the first line of a file of lines; empty without one or if it is no JSON object."""
    first = first_line(path)
    try:
        header = parse_json(first) if first else {}
    except ValueError as error:
        raise DamagedFile(shown_path(path), f"not a log of qdq-bench ({error})", where="line 1") from error
    return header if isinstance(header, dict) else {}


def compress_lines(path: Path) -> None:
    """Replace a finished plain file by a compressed one, whose bytes depend on nothing but the lines."""
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
    """Decompress a file so that lines can be appended; do nothing if it is plain."""
    compressed = _compressed_path(path)
    if not compressed.exists():
        return
    with explain_write_errors(path):
        if not path.exists():
            temporary, unpacked_bytes = path.with_suffix(".tmp"), 0
            with temporary.open("wb") as file, _open_stored(compressed) as packed:
                while block := packed.read(2**20):
                    unpacked_bytes += len(block)
                    if unpacked_bytes > MAX_UNPACKED_BYTES:
                        problem = f"unpacks to more than {MAX_UNPACKED_BYTES} bytes, so no run wrote it"
                        raise DamagedFile(compressed, problem)
                    file.write(block)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        compressed.unlink()


def _compressed_path(path: Path) -> Path:
    return path.with_name(path.name + COMPRESSED_SUFFIX)
