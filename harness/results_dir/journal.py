"""Append-only journal of one search: JSON lines after a header, synced at every outcome.

A process may be killed at any byte, and the disk may be full at any. Opening a journal removes a partial last line and
keeps everything before it, so no outcome that `append` has returned for is lost. Files are unbuffered, so that closing
has nothing left to write.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from harness.errors import UserError
from harness.records import SCHEMA_VERSION, Failed, JournalLine, Proposal, TrialResult, decode_line, encode_line
from harness.results_dir.fingerprint import require_same_fingerprint
from harness.results_dir.io import add_checksum, append_line, remove_checksum, truncate_partial_line
from harness.results_dir.lines import open_lines, restore_lines, stored_path, whole_lines

_LINE_HEAD = re.compile(rb'\{"kind":"(proposal|result)","number":(\d+),')
#: Origin of a proposal that repeats a failed one on request; it costs no budget.
RETRY_ORIGIN = "retry"
_NO_PROPOSAL = "an outcome without its proposal"


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """Proposal with its result, which is None for a duplicate and if the run was interrupted."""

    proposal: Proposal
    result: TrialResult | None = None


class Journal:
    """Open journal: the existing entries, read on access, and a handle that appends.

    Raises:
        UserError: The file is the journal of another run (the message shows the difference), has another schema, or has
            a damaged line before the last.
    """

    def __init__(self, path: Path, fingerprint: Mapping[str, Any]) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        restore_lines(path)
        if path.exists():
            truncate_partial_line(path)
        is_new = not path.exists() or path.stat().st_size == 0
        self._existing: _IndexedEntries | None = None
        if not is_new:
            with open_lines(path) as file:
                header = _parse_header(next(whole_lines(file, path), b""), path)
            require_same_fingerprint(path, header.get("fingerprint", {}), fingerprint)
            self._existing = _IndexedEntries(path)
        self.entries: Sequence[JournalEntry] = self._existing or ()
        self._file = path.open("ab", buffering=0)
        if is_new:
            header = {"kind": "header", "schema": SCHEMA_VERSION, "fingerprint": dict(fingerprint)}
            append_line(self._file, add_checksum(json.dumps(header, separators=(",", ":"), sort_keys=True)), path)

    @property
    def elapsed_s(self) -> float:
        """Wall-clock seconds of the search until the last outcome that the journal had when opened; 0 if none."""
        return self._existing.elapsed_s() if self._existing else 0.0

    def append(self, line: JournalLine) -> None:
        """Write one line; an outcome is on the disk when this returns.

        Raises:
            UserError: The disk is full, or the folder is read-only.
        """
        append_line(
            self._file, add_checksum(encode_line(_hide_paths(line))), self._path, sync=isinstance(line, TrialResult)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._existing is not None:
            self._existing.close()


class _IndexedEntries(Sequence[JournalEntry]):
    """Entries of a file by byte offset, so that a million lines do not become a million objects.

    A partial last line is ignored.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open_lines(path)
        self._proposal_offsets = array("q")
        self._result_offsets = array("q")
        self._last_result_offset = -1
        shown, offset = stored_path(path), 0
        for line_number, raw in enumerate(whole_lines(self._file, shown), 1):
            where = f"{shown}, line {line_number}"
            if line_number > 1:  # the first is the header
                self._add(*_parse_head(raw, where), offset, where)
            offset += len(raw)

    def _add(self, is_result: bool, number: int, offset: int, where: str) -> None:
        count = len(self._proposal_offsets)
        if is_result:
            if number >= count or self._result_offsets[number] >= 0:
                raise UserError(f"{where}: {_NO_PROPOSAL}")
            self._result_offsets[number] = self._last_result_offset = offset
        else:
            _require_number(number, count, where)
            self._proposal_offsets.append(offset)
            self._result_offsets.append(-1)

    def __len__(self) -> int:
        return len(self._proposal_offsets)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[each] for each in range(*index.indices(len(self))))
        proposal, result = self._read_line(self._proposal_offsets[index]), self._result_offsets[index]
        return JournalEntry(proposal=proposal, result=None if result < 0 else self._read_line(result))

    def elapsed_s(self) -> float:
        return 0.0 if self._last_result_offset < 0 else float(self._read_line(self._last_result_offset).elapsed_s)

    def _read_line(self, offset: int) -> Any:
        self._file.seek(offset)
        return _decode(self._file.readline(), f"{self._path}, byte {offset}")

    def close(self) -> None:
        self._file.close()


def _parse_head(raw: bytes, where: str) -> tuple[bool, int]:
    """Return whether a line is a result, and the number of its proposal, usually without decoding the line."""
    match = _LINE_HEAD.match(raw)
    if match is None:
        line = _decode(raw, where)
        return isinstance(line, TrialResult), line.number
    try:
        remove_checksum(raw)
    except ValueError as error:
        raise _damage(where, error) from error
    return match[1] == b"result", int(match[2])


def _require_number(number: int, expected: int, where: str) -> None:
    if number != expected:
        raise UserError(f"{where}: proposal {number}, but expected {expected}")


def _decode(raw: bytes, where: str) -> JournalLine:
    try:
        return decode_line(remove_checksum(raw))
    except ValueError as error:
        raise _damage(where, error) from error


def _damage(where: str, error: ValueError) -> UserError:
    return UserError(f"{where}: {error}; move the file away to start this run anew")


def _hide_paths(line: JournalLine) -> JournalLine:
    if isinstance(line, Proposal) or not isinstance(line.outcome, Failed):
        return line
    return replace(line, outcome=line.outcome.without_paths())


def read_journal(path: Path) -> Iterator[JournalEntry]:
    """Yield the entries of a journal in ask order, one at a time; a partial last line is ignored.

    Each line is read once. An entry is yielded as soon as its result and those of all proposals before it are known.

    Raises:
        UserError: The file has another schema, or a damaged line.
    """
    shown, count, waiting, results = str(stored_path(path)), 0, deque[Proposal](), dict[int, TrialResult | None]()
    with open_lines(path) as file:
        lines = whole_lines(file, shown)
        _parse_header(next(lines, b""), path)
        for line_number, raw in enumerate(lines, 2):
            where = f"{shown}, line {line_number}"
            line = _decode(raw, where)
            if isinstance(line, Proposal):
                _require_number(line.number, count, where)
                count += 1
                waiting.append(line)
                results[line.number] = None
            elif results.get(line.number, line) is not None:
                raise UserError(f"{where}: {_NO_PROPOSAL}")
            else:
                results[line.number] = line
            while waiting and (waiting[0].duplicate_of is not None or results[waiting[0].number] is not None):
                proposal = waiting.popleft()
                yield JournalEntry(proposal=proposal, result=results.pop(proposal.number))
    for proposal in waiting:
        yield JournalEntry(proposal=proposal, result=results[proposal.number])


def _parse_header(raw: bytes, path: Path) -> Mapping[str, Any]:
    try:
        header = json.loads(raw)
        if header.get("schema") == SCHEMA_VERSION:
            header = json.loads(remove_checksum(raw))
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path}: not a journal of qdq-bench ({error})") from error
    if not isinstance(header, dict) or header.get("kind") != "header":
        raise UserError(f"{path}: not a journal of qdq-bench")
    if header.get("schema") != SCHEMA_VERSION:
        raise UserError(
            f"{path}: written with schema {header.get('schema')}, this version reads schema {SCHEMA_VERSION}"
        )
    return header
