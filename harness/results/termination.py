"""Tasks and searches that ended early or failed, with the reason, and the wall-clock of each phase of a task."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness.base.errors import DoesNotHold, UserError
from harness.base.files import read_json, write_text
from harness.base.paths import hide_paths
from harness.measure.records import Failed
from harness.results.manifest import TASK_ERROR_FILE, recorded, write_record

#: Suffixes next to the journal of a search. A file of a failed searcher may end with a traceback.
TERMINATED_SUFFIX, FAILED_SUFFIX = ".ended.txt", ".failed.txt"
MAX_REASON_CHARS = 4000


class SearcherFailures(DoesNotHold):
    """Some searchers raised unexpectedly; everything else was done and has results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Termination:
    """End of a search before its budget was spent.

    Attributes:
        reason: For instance "ended at 17 of 100: it had nothing more to propose".
        failed: The searcher raised unexpectedly.
        traceback_file: File with the traceback, if there is one.
    """

    reason: str
    failed: bool = False
    traceback_file: Path | None = None


def write_task_error(folder: Path, reason: str) -> None:
    """Record why a task stopped; ignored on a full disk, as the terminal shows the reason too."""
    path = folder / TASK_ERROR_FILE
    with suppress(UserError), recorded(path):
        write_text(path, f"{hide_paths(reason)}\n")


def clear_task_error(folder: Path) -> None:
    """Remove the error of a task that continues."""
    _remove_file(folder / TASK_ERROR_FILE)


def read_task_error(folder: Path) -> str:
    """Return why the last run of the task in a folder stopped early, or "" if it did not."""
    return _read_text(folder / TASK_ERROR_FILE)


def write_termination(journal: Path, reason: str, failure: Failed | None) -> Termination:
    """Record how a search ended before its budget was spent, in place of an earlier record.

    Args:
        reason: One line.
        failure: Exception of the searcher, if it ended the search.
    """
    suffix, other = (TERMINATED_SUFFIX, FAILED_SUFFIX) if failure is None else (FAILED_SUFFIX, TERMINATED_SUFFIX)
    path, traceback = journal.with_suffix(suffix), "" if failure is None else failure.without_paths().log_tail
    # Exceptions of plug-ins may have lone surrogates.
    texts = (text.encode(errors="backslashreplace").decode() for text in (hide_paths(reason), traceback))
    reason, traceback = texts
    with recorded(path):
        write_text(path, f"{reason}\n" + (f"\n{traceback}\n" if traceback else ""))
    _remove_file(journal.with_suffix(other))
    return Termination(reason=reason, failed=failure is not None, traceback_file=path if traceback else None)


def clear_termination(journal: Path) -> None:
    """Remove the record of a search that has spent its budget or starts over."""
    for suffix in (TERMINATED_SUFFIX, FAILED_SUFFIX):
        _remove_file(journal.with_suffix(suffix))


def read_termination(journal: Path) -> Termination | None:
    """Return how a search ended before its budget was spent, or None if it did not."""
    for suffix in (FAILED_SUFFIX, TERMINATED_SUFFIX):
        path = journal.with_suffix(suffix)
        reason, _, traceback = _read_text(path).partition("\n")
        if reason:
            shown = path if traceback else None
            return Termination(reason=reason, failed=suffix == FAILED_SUFFIX, traceback_file=shown)
    return None


def _remove_file(path: Path) -> None:
    if os.path.lexists(path):
        with recorded(path), suppress(OSError):
            path.unlink()


def _read_text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(MAX_REASON_CHARS).strip()
    except OSError:
        return ""


PHASES_FILE = "phases.json"
SEARCH_SHARE = 0.5
"""Share of a task's time limit at which searches end, with noise floor, calibration and the float model's score."""


class PhaseClock:
    """Clock of the phases of a task, summed over interruptions; the time of an interrupted phase is not counted.

    Args:
        phase: First phase.
    """

    def __init__(self, folder: Path, phase: str) -> None:
        self._path, self._phase = folder / PHASES_FILE, phase
        self._seconds = dict(read_phases(folder))
        self._since_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Return the seconds of all phases so far, interrupted ones included where they were written."""
        return sum(self._seconds.values()) + time.monotonic() - self._since_s

    def seconds_of(self, phase: str) -> float:
        """Return the seconds of an ended phase; 0 for others."""
        return self._seconds.get(phase, 0.0)

    def start(self, phase: str) -> None:
        """End the current phase and start another one; `write` writes the file."""
        now_s = time.monotonic()
        self._seconds[self._phase] = round(self._seconds.get(self._phase, 0.0) + now_s - self._since_s, 3)
        self._phase, self._since_s = phase, now_s

    def split(self, phase: str, into: str, share: float) -> None:
        """Move a share of the time of an earlier phase to the phase `into`."""
        moved_s = share * self.seconds_of(phase)
        self._seconds[phase] = round(self.seconds_of(phase) - moved_s, 3)
        self._seconds[into] = round(self.seconds_of(into) + moved_s, 3)

    def write(self, phase: str) -> None:
        """End the current phase, write the file and start another phase."""
        self.start(phase)
        write_record(self._path, self._seconds)


def read_phases(folder: Path) -> Mapping[str, float]:
    """Return the seconds of each phase in their order; empty without a valid record."""
    phases = read_json(folder / PHASES_FILE, {})
    valid = all(isinstance(value, int | float) and 0 <= value < math.inf for value in phases.values())
    return phases if valid else {}
