"""Why a cell stopped, or a search ended, before its time: kept beside the results, so that a report can say it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UserError
from harness.records import Failed
from harness.results_dir.artifacts import write_text

__all__ = ["Termination", "SearcherFailures", "clear_termination", "clear_task_error", "write_termination", "write_task_error", "read_termination", "read_task_error"]

TASK_ERROR_FILE = "stopped.txt"
TERMINATED_SUFFIX, FAILED_SUFFIX = ".ended.txt", ".broken.txt"
"""Beside the journal of a search; the latter, of one whose searcher broke, may have the end of the traceback below."""
MAX_REASON_CHARS = 4000
"""Characters that are read back: a reason, not a log."""


class SearcherFailures(UserError):
    """Searchers raised what they should not; everything else was done, and its results are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Termination:
    """How a search ended before its budget was spent.

    Attributes:
        said: For instance "ended at 17 of 100: it had nothing more to propose", behind the name of the search.
        broken: Its searcher raised what it should not.
        trace: The file with the traceback of that; None where there is none, as of what a plug-in raises as a reason.
    """

    reason: str
    failed: bool = False
    traceback_file: Path | None = None


def write_task_error(folder: Path, reason: str) -> None:
    """Keep why a cell stopped; where even that cannot be written, the terminal alone says it."""
    with suppress(UserError):
        write_text(folder / TASK_ERROR_FILE, f"{reason}\n")


def clear_task_error(folder: Path) -> None:
    """The cell goes on."""
    _remove_file(folder / TASK_ERROR_FILE)


def read_task_error(folder: Path) -> str:
    """Why the last run of a cell stopped; "" where it did not, or nobody knows."""
    return _read_text(folder / TASK_ERROR_FILE)


def write_termination(journal: Path, reason: str, failure: Failed | None) -> Termination:
    """Keep, beside its journal, how a search ended before its budget was spent, instead of how it did before.

    Args:
        said: One line.
        broken: What its searcher raised, if that is why.

    Raises:
        UserError: It cannot be written.
    """
    reason = reason.encode(errors="backslashreplace").decode()  # what plug-ins raise may hold anything
    suffix, other = (TERMINATED_SUFFIX, FAILED_SUFFIX) if failure is None else (FAILED_SUFFIX, TERMINATED_SUFFIX)
    path, trace = journal.with_suffix(suffix), "" if failure is None else failure.log_tail
    below = f"\n{trace}\n".encode(errors="backslashreplace").decode() if trace else ""
    write_text(path, f"{reason}\n{below}")
    _remove_file(journal.with_suffix(other))
    return Termination(reason=reason, failed=failure is not None, traceback_file=path if trace else None)


def clear_termination(journal: Path) -> None:
    """The search has spent its budget, or begins anew."""
    for suffix in (TERMINATED_SUFFIX, FAILED_SUFFIX):
        _remove_file(journal.with_suffix(suffix))


def read_termination(journal: Path) -> Termination | None:
    """How a search ended before its budget was spent; None where it did not, or nobody knows."""
    for suffix in (FAILED_SUFFIX, TERMINATED_SUFFIX):
        path = journal.with_suffix(suffix)
        said, _, trace = _read_text(path).partition("\n")
        if said:
            return Termination(reason=said, failed=suffix == FAILED_SUFFIX, traceback_file=path if trace else None)
    return None


def _remove_file(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _read_text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(MAX_REASON_CHARS).strip()
    except OSError:
        return ""
