"""The append-only journal of one search: JSON lines, a header first, fsynced at every outcome.

A process may be killed at any byte, and the disk may be full at any. On opening, a torn last line is cut
off and everything before it stands; so whatever `append` returned for is never lost. Files are written
unbuffered: nothing is left over that closing would try to write again.
"""

from __future__ import annotations

import json
import os
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from harness.errors import UserError
from harness.records import SCHEMA, Asked, Line, Told, decode, encode
from harness.results_dir.fingerprint import refuse_changes

__all__ = ["RETRY", "Entry", "Journal", "append_line", "cut_torn_line", "has_header", "read_journal", "writing"]

_HEAD = re.compile(rb'\{"kind":"(asked|told)","number":(\d+),')
RETRY = "retry"
"""Origin of a proposal that is a failed one once more, because somebody asked for it; it costs no budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One proposal with its outcome; `told` is None for a duplicate and where the run was cut off."""

    asked: Asked
    told: Told | None = None


class Journal:
    """An open journal: what was there already, read where it is asked for, and a handle that appends.

    Raises:
        UserError: The file belongs to another run (the difference is shown), to another schema, or
            has a damaged line that is not the last.
    """

    def __init__(self, path: Path, fingerprint: Mapping[str, Any]) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            cut_torn_line(path)
        fresh = not path.exists() or path.stat().st_size == 0
        self._before: _Entries | None = None
        if not fresh:
            _check_header(path, fingerprint)
            self._before = _Entries(path)
        self.entries: Sequence[Entry] = self._before or ()
        self._file = path.open("ab", buffering=0)
        if fresh:
            header = {"kind": "header", "schema": SCHEMA, "fingerprint": dict(fingerprint)}
            append_line(self._file, json.dumps(header, separators=(",", ":"), sort_keys=True), path)

    @property
    def elapsed_s(self) -> float:
        """Wall-clock that the run took so far, as the last outcome tells."""
        return self._before.elapsed_s() if self._before else 0.0

    def append(self, line: Line) -> None:
        """Write one line; when this returns, an outcome is on the disk.

        Raises:
            UserError: The disk is full or the folder read-only; the text says what is safe.
        """
        append_line(self._file, encode(line), self._path, sync=isinstance(line, Told))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if self._before is not None:
            self._before.close()


class _Entries(Sequence[Entry]):
    """Entries of a file, found by the places of their lines: a million lines are an index, not a million objects."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")
        self._asked = array("q")
        self._told = array("q")
        self._last = -1
        place = len(self._file.readline())
        for number, raw in enumerate(self._file, 2):
            told, which = _head(raw, path, number)
            places = self._told if told else self._asked
            if told:
                if which >= len(self._asked) or self._told[which] >= 0:
                    raise UserError(f"{path}, line {number}: an outcome without its proposal")
                places[which] = self._last = place
            else:
                if which != len(self._asked):
                    raise UserError(f"{path}, line {number}: proposal {which} stands where {len(self._asked)} belongs")
                self._asked.append(place)
                self._told.append(-1)
            place += len(raw)

    def __len__(self) -> int:
        return len(self._asked)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[each] for each in range(*index.indices(len(self))))
        asked, told = self._line(self._asked[index]), self._told[index]
        return Entry(asked=asked, told=None if told < 0 else self._line(told))

    def elapsed_s(self) -> float:
        """See `Journal`."""
        return 0.0 if self._last < 0 else float(self._line(self._last).elapsed_s)

    def _line(self, place: int) -> Any:
        self._file.seek(place)
        try:
            return decode(self._file.readline().decode())
        except ValueError as error:
            raise _damaged(f"{self._path}, byte {place}", error) from error

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


def _head(raw: bytes, path: Path, number: int) -> tuple[bool, int]:
    """Whether a line tells an outcome, and the number of its proposal; most of the line is not looked at."""
    match = _HEAD.match(raw)
    if match is not None:
        return match[1] == b"told", int(match[2])
    try:
        line = decode(raw.decode())
    except ValueError as error:
        raise _damaged(f"{path}, line {number}", error) from error
    return isinstance(line, Told), line.number


def _damaged(where: str, error: ValueError) -> UserError:
    return UserError(f"{where}: {error}; move the file away to start this run anew")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What is done here writes to the results; a disk that is full stops the run and costs nothing that was measured.

    Raises:
        UserError: It could not be written; the text says what is safe.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror or error}); everything measured before is safe: "
            "make room, then run the same command again to go on"
        ) from error


def append_line(file: FileIO, text: str, path: Path, *, sync: bool = True) -> None:
    """Append one whole line, or nothing.

    Args:
        file: Opened with "ab" and without a buffer.

    Raises:
        UserError: The line could not be written; everything before it is safe.
    """
    with writing(path):
        end = file.seek(0, os.SEEK_END)
        rest = memoryview(text.encode() + b"\n")
        try:
            while rest:
                rest = rest[file.write(rest) :]
            if sync:
                os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                file.truncate(end)
            raise


def cut_torn_line(path: Path) -> None:
    """Cut off what follows the last newline: the part of a line that a crash left behind."""
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        end = size
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


def has_header(path: Path) -> bool:
    """Whether the header, at least, was written to its end before the run was cut off."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        return file.readline().endswith(b"\n")


def read_journal(path: Path) -> Iterator[Entry]:
    """The entries of a journal in ask order; streams, and skips a torn last line.

    Outcomes stand in the order in which they came; an entry waits here for its own, and for those before it.

    Raises:
        UserError: Another schema, or a damaged line.
    """
    waiting: dict[int, Entry] = {}
    asked = 0
    for place, line in _lines(path):
        if isinstance(line, Asked):
            if line.number != asked:
                raise UserError(f"{path}, line {place}: proposal {line.number} stands where {asked} belongs")
            asked += 1
            waiting[line.number] = Entry(asked=line)
        else:
            entry = waiting.get(line.number)
            if entry is None or entry.told is not None:
                raise UserError(f"{path}, line {place}: an outcome without its proposal")
            waiting[line.number] = Entry(asked=entry.asked, told=line)
        yield from _settled(waiting)
    yield from waiting.values()


def _settled(waiting: dict[int, Entry]) -> Iterator[Entry]:
    """Take out the first entries as far as nothing more will be heard of them."""
    while waiting:
        number, entry = next(iter(waiting.items()))
        if entry.told is None and entry.asked.duplicate_of is None:
            return
        yield waiting.pop(number)


def _lines(path: Path) -> Iterator[tuple[int, Line]]:
    """The lines behind the header, each with its number."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if number == 1:
                _read_header(raw, path)
            elif raw.endswith(b"\n"):
                try:
                    yield number, decode(raw.decode())
                except ValueError as error:
                    raise _damaged(f"{path}, line {number}", error) from error


def _read_header(raw: bytes, path: Path) -> Mapping[str, Any]:
    try:
        header = json.loads(raw)
    except ValueError as error:
        raise UserError(f"{path}: not a journal of qdq-bench") from error
    if not isinstance(header, dict) or header.get("kind") != "header":
        raise UserError(f"{path}: not a journal of qdq-bench")
    if header.get("schema") != SCHEMA:
        raise UserError(f"{path}: written with schema {header.get('schema')}, this version reads schema {SCHEMA}")
    return header


def _check_header(path: Path, fingerprint: Mapping[str, Any]) -> None:
    with path.open("rb") as file:
        there = _read_header(file.readline(), path).get("fingerprint", {})
    refuse_changes(path, there, fingerprint)
