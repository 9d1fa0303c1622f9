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
from harness.records import SCHEMA_VERSION, Proposal, JournalLine, TrialResult, decode_line, encode_line
from harness.results_dir.fingerprint import require_same_fingerprint

__all__ = ["RETRY_ORIGIN", "JournalEntry", "Journal", "append_line", "truncate_partial_line", "has_header", "read_journal", "explain_write_errors"]

_LINE_HEAD = re.compile(rb'\{"kind":"(asked|told)","number":(\d+),')
RETRY_ORIGIN = "retry"
"""Origin of a proposal that is a failed one once more, because somebody asked for it; it costs no budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """One proposal with its outcome; `told` is None for a duplicate and where the run was cut off."""

    proposal: Proposal
    result: TrialResult | None = None


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
            truncate_partial_line(path)
        fresh = not path.exists() or path.stat().st_size == 0
        self._existing: _IndexedEntries | None = None
        if not fresh:
            _check_header(path, fingerprint)
            self._existing = _IndexedEntries(path)
        self.entries: Sequence[JournalEntry] = self._existing or ()
        self._file = path.open("ab", buffering=0)
        if fresh:
            header = {"kind": "header", "schema": SCHEMA_VERSION, "fingerprint": dict(fingerprint)}
            append_line(self._file, json.dumps(header, separators=(",", ":"), sort_keys=True), path)

    @property
    def elapsed_s(self) -> float:
        """Wall-clock that the run took so far, as the last outcome tells."""
        return self._existing.elapsed_s() if self._existing else 0.0

    def append(self, line: JournalLine) -> None:
        """Write one line; when this returns, an outcome is on the disk.

        Raises:
            UserError: The disk is full or the folder read-only; the text says what is safe.
        """
        append_line(self._file, encode_line(line), self._path, sync=isinstance(line, TrialResult))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if self._existing is not None:
            self._existing.close()


class _IndexedEntries(Sequence[JournalEntry]):
    """Entries of a file, found by the places of their lines: a million lines are an index, not a million objects."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")
        self._proposal_offsets = array("q")
        self._result_offsets = array("q")
        self._last_result_offset = -1
        place = len(self._file.readline())
        for number, raw in enumerate(self._file, 2):
            told, which = _parse_head(raw, path, number)
            places = self._result_offsets if told else self._proposal_offsets
            if told:
                if which >= len(self._proposal_offsets) or self._result_offsets[which] >= 0:
                    raise UserError(f"{path}, line {number}: an outcome without its proposal")
                places[which] = self._last_result_offset = place
            else:
                if which != len(self._proposal_offsets):
                    raise UserError(f"{path}, line {number}: proposal {which} stands where {len(self._proposal_offsets)} belongs")
                self._proposal_offsets.append(place)
                self._result_offsets.append(-1)
            place += len(raw)

    def __len__(self) -> int:
        return len(self._proposal_offsets)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[each] for each in range(*index.indices(len(self))))
        asked, told = self._read_line(self._proposal_offsets[index]), self._result_offsets[index]
        return JournalEntry(proposal=asked, result=None if told < 0 else self._read_line(told))

    def elapsed_s(self) -> float:
        """See `Journal`."""
        return 0.0 if self._last_result_offset < 0 else float(self._read_line(self._last_result_offset).elapsed_s)

    def _read_line(self, place: int) -> Any:
        self._file.seek(place)
        try:
            return decode_line(self._file.readline().decode())
        except ValueError as error:
            raise _damaged_line(f"{self._path}, byte {place}", error) from error

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


def _parse_head(raw: bytes, path: Path, number: int) -> tuple[bool, int]:
    """Whether a line tells an outcome, and the number of its proposal; most of the line is not looked at."""
    match = _LINE_HEAD.match(raw)
    if match is not None:
        return match[1] == b"told", int(match[2])
    try:
        line = decode_line(raw.decode())
    except ValueError as error:
        raise _damaged_line(f"{path}, line {number}", error) from error
    return isinstance(line, TrialResult), line.number


def _damaged_line(where: str, error: ValueError) -> UserError:
    return UserError(f"{where}: {error}; move the file away to start this run anew")


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
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
    with explain_write_errors(path):
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


def truncate_partial_line(path: Path) -> None:
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


def read_journal(path: Path) -> Iterator[JournalEntry]:
    """The entries of a journal in ask order; streams, and skips a torn last line.

    Outcomes stand in the order in which they came; an entry waits here for its own, and for those before it.

    Raises:
        UserError: Another schema, or a damaged line.
    """
    waiting: dict[int, JournalEntry] = {}
    asked = 0
    for place, line in _iter_lines(path):
        if isinstance(line, Proposal):
            if line.number != asked:
                raise UserError(f"{path}, line {place}: proposal {line.number} stands where {asked} belongs")
            asked += 1
            waiting[line.number] = JournalEntry(proposal=line)
        else:
            entry = waiting.get(line.number)
            if entry is None or entry.result is not None:
                raise UserError(f"{path}, line {place}: an outcome without its proposal")
            waiting[line.number] = JournalEntry(proposal=entry.proposal, result=line)
        yield from _pop_complete(waiting)
    yield from waiting.values()


def _pop_complete(waiting: dict[int, JournalEntry]) -> Iterator[JournalEntry]:
    """Take out the first entries as far as nothing more will be heard of them."""
    while waiting:
        number, entry = next(iter(waiting.items()))
        if entry.result is None and entry.proposal.duplicate_of is None:
            return
        yield waiting.pop(number)


def _iter_lines(path: Path) -> Iterator[tuple[int, JournalLine]]:
    """The lines behind the header, each with its number."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if number == 1:
                _read_header(raw, path)
            elif raw.endswith(b"\n"):
                try:
                    yield number, decode_line(raw.decode())
                except ValueError as error:
                    raise _damaged_line(f"{path}, line {number}", error) from error


def _read_header(raw: bytes, path: Path) -> Mapping[str, Any]:
    try:
        header = json.loads(raw)
    except ValueError as error:
        raise UserError(f"{path}: not a journal of qdq-bench") from error
    if not isinstance(header, dict) or header.get("kind") != "header":
        raise UserError(f"{path}: not a journal of qdq-bench")
    if header.get("schema") != SCHEMA_VERSION:
        raise UserError(f"{path}: written with schema {header.get('schema')}, this version reads schema {SCHEMA_VERSION}")
    return header


def _check_header(path: Path, fingerprint: Mapping[str, Any]) -> None:
    with path.open("rb") as file:
        there = _read_header(file.readline(), path).get("fingerprint", {})
    require_same_fingerprint(path, there, fingerprint)
