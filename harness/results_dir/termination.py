"""State of tasks and searches in a results folder: complete, ended early, or failed."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UserError
from harness.records import Failed
from harness.results_dir.io import read_json, write_json, write_text

__all__ = [
    "SearcherFailures", "Termination", "clear_task_error", "clear_termination", "is_complete", "mark_complete",
    "read_task_error", "read_termination", "write_task_error", "write_termination",
]  # fmt: skip

COMPLETION_FILE = "through.json"
TASK_ERROR_FILE = "stopped.txt"
#: Suffixes next to the journal of a search. A file of a failed searcher may end with a traceback.
TERMINATED_SUFFIX, FAILED_SUFFIX = ".ended.txt", ".broken.txt"
MAX_REASON_CHARS = 4000
#: Files and folders of a task that are no results; dashboards write into the Optuna journal.
NON_RESULT_NAMES = frozenset({COMPLETION_FILE, TASK_ERROR_FILE, "work", "optuna.journal"})


class SearcherFailures(UserError):
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


def mark_complete(folder: Path, config: str) -> None:
    """Record that nothing is left to do in the folder of a task.

    The next run skips the task then. Otherwise it would replay the searches; an external searcher such as ModelOpt's
    autotuner needs minutes to generate its models again.

    Args:
        folder: Folder of the task.
        config: Digest of the configuration.
    """
    write_json(folder / COMPLETION_FILE, {"config": config, "files": _file_stamps(folder)})


def is_complete(folder: Path, config: str) -> bool:
    """Return whether a task is complete for this configuration, and its files are unchanged."""
    try:
        record = read_json(folder / COMPLETION_FILE) if (folder / COMPLETION_FILE).exists() else {}
    except UserError:  # a damaged marker costs only a replay
        return False
    files, existing = record.get("files"), _file_stamps(folder)  # later files are those of reports
    unchanged = isinstance(files, dict) and all(existing.get(name) == stamp for name, stamp in files.items())
    return unchanged and record.get("config") == config


def _file_stamps(folder: Path) -> dict[str, list[int]]:
    """Return size in bytes and modification time in ns of each file, the criteria of make and rsync."""
    paths = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
    stats = {str(name): path.stat() for name, path in paths.items() if name.parts[0] not in NON_RESULT_NAMES}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def write_task_error(folder: Path, reason: str) -> None:
    """Record why a task stopped; ignored on a full disk, as the terminal shows the reason too."""
    with suppress(UserError):
        write_text(folder / TASK_ERROR_FILE, f"{reason}\n")


def clear_task_error(folder: Path) -> None:
    """Remove the error of a task that continues."""
    _remove_file(folder / TASK_ERROR_FILE)


def read_task_error(folder: Path) -> str:
    """Return why the last run of a task stopped, or ""."""
    return _read_text(folder / TASK_ERROR_FILE)


def write_termination(journal: Path, reason: str, failure: Failed | None) -> Termination:
    """Record how a search ended before its budget was spent, in place of an earlier record.

    Args:
        journal: Journal of the search.
        reason: One line.
        failure: Exception of the searcher, if it ended the search.
    """
    reason = _encodable(reason)
    suffix, other = (TERMINATED_SUFFIX, FAILED_SUFFIX) if failure is None else (FAILED_SUFFIX, TERMINATED_SUFFIX)
    path, traceback = journal.with_suffix(suffix), "" if failure is None else failure.log_tail
    write_text(path, f"{reason}\n" + (_encodable(f"\n{traceback}\n") if traceback else ""))
    _remove_file(journal.with_suffix(other))
    return Termination(reason=reason, failed=failure is not None, traceback_file=path if traceback else None)


def clear_termination(journal: Path) -> None:
    """Remove the record of a search that has spent its budget or starts over."""
    for suffix in (TERMINATED_SUFFIX, FAILED_SUFFIX):
        _remove_file(journal.with_suffix(suffix))


def read_termination(journal: Path) -> Termination | None:
    """Return how a search ended before its budget was spent, or None."""
    for suffix in (FAILED_SUFFIX, TERMINATED_SUFFIX):
        path = journal.with_suffix(suffix)
        reason, _, traceback = _read_text(path).partition("\n")
        if reason:
            return Termination(
                reason=reason, failed=suffix == FAILED_SUFFIX, traceback_file=path if traceback else None
            )
    return None


def _encodable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()  # exceptions of plug-ins may have lone surrogates


def _remove_file(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _read_text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(MAX_REASON_CHARS).strip()
    except OSError:
        return ""
