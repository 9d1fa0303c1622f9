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

from harness.base.errors import UserError
from harness.base.files import DamagedFile, diff_leaves, read_json
from harness.base.text import shorten
from harness.measure.records import SCHEMA_VERSION, Failed, JournalLine, Proposal, TrialResult, decode_line, encode_line
from harness.results.lines import (
    CHAINED_SCHEMA,
    LineLog,
    first_line,
    log_header,
    read_lines,
    scan_lines,
    shown_path,
    strip_seal,
)

CHANGED_RUN_ADVICE = "use another --out, or --accept-changes to archive these results and start over"
KEYS_ADDED_LATER = frozenset({"data"})  # missing in records from before 2026-11-23, and ignored for those


class FingerprintMismatch(UserError):
    """The inputs of a run have changed, so its results would not be comparable with the existing ones."""


def require_same_fingerprint(path: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raise `FingerprintMismatch`, with each leaf that differs, if a run has other inputs than at its start."""
    compared = {key: value for key, value in new.items() if key not in KEYS_ADDED_LATER or old.get(key) is not None}
    differences = diff_leaves(old, json.loads(json.dumps(compared)))
    lines = (changed_data(old, compared) if line.startswith("data.") else line for line in differences)
    if changed := "".join(f"  {line}\n" for line in dict.fromkeys(lines)):
        problem = "this run was started with something else; results would not be comparable"
        raise FingerprintMismatch(f"{path}: {problem}:\n{changed}{CHANGED_RUN_ADVICE}")


def changed_data(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return that the evaluator has other data than at the start of a run, with their files; "" if it has the same.

    Args:
        old: Recorded facts of a task, which have digests by the key `data`.
        new: Facts now, and `evaluator`, its entry in the experiment.
    """
    before, now = old.get("data") or {}, new.get("data") or {}
    if all(before.get(name, digest) == digest for name, digest in now.items()):
        return ""
    data = ((new.get("evaluator") or {}).get("params") or {}).get("data")
    files = [data[key] for key in ("path", "images", "labels") if data.get(key)] if isinstance(data, Mapping) else []
    named = f" ({', '.join(map(str, files))})" if files else ""
    return f"the data of the evaluator changed{named}, or its code or preprocessing"


def read_matching_record(path: Path, basis: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the record of a file, or None if there is none yet.

    Args:
        basis: Current decisive facts; raise `FingerprintMismatch` if those of the record differ.
    """
    if not path.exists():
        return None
    record = read_json(path)
    require_same_fingerprint(path, {key: record.get(key) for key in basis}, basis)
    return record


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
    """Open journal: the existing entries, read on access, and a handle that appends."""

    def __init__(self, path: Path, fingerprint: Mapping[str, Any]) -> None:
        header = read_header(path)
        if header is not None:
            require_same_fingerprint(path, header.get("fingerprint", {}), fingerprint)
        self._log = LineLog(path, {"fingerprint": dict(fingerprint)})
        try:
            self._existing = None if header is None else _IndexedEntries(path)
        except BaseException:
            self._log.close()
            raise
        self.entries: Sequence[JournalEntry] = self._existing or ()

    @property
    def elapsed_s(self) -> float:
        """Wall-clock seconds of the search until the last outcome that the journal had when opened; 0 if none."""
        return self._existing.elapsed_s() if self._existing else 0.0

    def append(self, line: JournalLine) -> None:
        """Write one line; an outcome is on the disk when this returns."""
        if isinstance(line, TrialResult) and isinstance(line.outcome, Failed):
            line = replace(line, outcome=line.outcome.without_paths())
        self._log.append(encode_line(line), sync=isinstance(line, TrialResult))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._log.close()
        if self._existing is not None:
            self._existing.close()


class _IndexedEntries(Sequence[JournalEntry]):
    """Entries of a file by byte offset, so that a million lines do not become a million objects.

    A partial last line is ignored.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._proposal_offsets = array("q")
        self._result_offsets = array("q")
        self._last_result_offset = -1
        for line_number, offset, body in scan_lines(path):
            if line_number == 1:  # the header
                continue
            if (match := _LINE_HEAD.match(body)) is not None:  # usually the line needs no decoding
                is_result, number = match[1] == b"result", int(match[2])
            else:
                line = _decode(body, path, f"line {line_number}")
                is_result, number = isinstance(line, TrialResult), line.number
            count = len(self._proposal_offsets)
            if is_result and (number >= count or self._result_offsets[number] >= 0):
                raise _damage(path, line_number, _NO_PROPOSAL)
            if is_result:
                self._result_offsets[number] = self._last_result_offset = offset
                continue
            _require_number(number, count, path, line_number)
            self._proposal_offsets.append(offset)
            self._result_offsets.append(-1)
        self._file = path.open("rb")

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
        return _decode(strip_seal(self._file.readline()), self._path, f"byte {offset}")

    def close(self) -> None:
        self._file.close()


def _require_number(number: int, expected: int, path: Path, line_number: int) -> None:
    if number != expected:
        raise _damage(path, line_number, f"proposal {number}, but expected {expected}")


def _decode(body: bytes, path: Path, where: str) -> JournalLine:
    try:
        return decode_line(body)
    except ValueError as error:
        raise DamagedFile(shown_path(path), str(error), where=where) from error


def _damage(path: Path, line_number: int, problem: str) -> DamagedFile:
    return DamagedFile(shown_path(path), problem, where=f"line {line_number}")


def read_journal(path: Path) -> Iterator[JournalEntry]:
    """Yield the entries of a journal in ask order, one at a time; a partial last line is ignored.

    Each line is read once. An entry is yielded as soon as its result and those of all proposals before it are known.
    """
    read_header(path)
    count, waiting, results = 0, deque[Proposal](), dict[int, TrialResult | None]()
    for line_number, body in read_lines(path):
        if line_number == 1:
            continue
        line = _decode(body, path, f"line {line_number}")
        if isinstance(line, Proposal):
            _require_number(line.number, count, path, line_number)
            count += 1
            waiting.append(line)
            results[line.number] = None
        elif results.get(line.number, line) is not None:
            raise _damage(path, line_number, _NO_PROPOSAL)
        else:
            results[line.number] = line
        while waiting and (waiting[0].duplicate_of is not None or results[waiting[0].number] is not None):
            proposal = waiting.popleft()
            yield JournalEntry(proposal=proposal, result=results.pop(proposal.number))
    for proposal in waiting:
        yield JournalEntry(proposal=proposal, result=results[proposal.number])


def read_header(path: Path) -> dict[str, Any] | None:
    """Return the header of a journal, or None if there is no whole line yet."""
    if not first_line(path):
        return None
    header = log_header(path)
    if header.get("kind") != "header":
        raise DamagedFile(shown_path(path), "not a journal of qdq-bench")
    if header.get("schema") not in (SCHEMA_VERSION, CHAINED_SCHEMA):
        raise UserError(
            f"{shown_path(path)}: written with schema {shorten(header.get('schema'))}, this version reads schema "
            f"{CHAINED_SCHEMA}"
        )
    return header


def check_journal(path: Path) -> None:
    """Compare the header of a search's journal with the inputs of its task; check each line of an earlier version."""
    header, task = read_header(path), path.parents[1] / "task.json"
    if header is None:
        return
    fingerprint, facts = header.get("fingerprint") or {}, read_json(task, {})
    if not (isinstance(fingerprint, dict) and isinstance(facts, dict)):
        raise _damage(path, 1, "damaged: its fingerprint, or that of the task, is no mapping")
    shared = {key: facts[key] for key in facts.keys() & fingerprint.keys()}
    for difference in diff_leaves({key: fingerprint[key] for key in shared}, shared):
        raise _damage(path, 1, f"damaged: the journal of another task or run ({difference})")
    if header["schema"] != CHAINED_SCHEMA:
        for _ in read_journal(path):
            pass
