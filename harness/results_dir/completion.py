"""A cell that is through: while its files are as they were left, nothing is asked, built or timed a second time.

Without this a cell that is gone over again asks its searches anew up to where their journals end. Ours answer at once;
a peer such as ModelOpt's autotuner takes minutes to make its models again, which nobody needs any more.
"""

from __future__ import annotations

from pathlib import Path

from harness.errors import UserError
from harness.results_dir.artifacts import read_json, write_json

__all__ = ["is_complete", "mark_complete"]

COMPLETION_FILE = "through.json"
NON_RESULT_NAMES = frozenset({COMPLETION_FILE, "work", "optuna.journal", "stopped.txt"})
"""What is no result of a cell; a dashboard writes into the Optuna journal."""


def mark_complete(folder: Path, config: str) -> None:
    """Write down that nothing is left to do in a cell's folder.

    Args:
        folder: The cell's.
        config: Digest of what it was done for.

    Raises:
        UserError: It cannot be written.
    """
    write_json(folder / COMPLETION_FILE, {"config": config, "files": _file_stamps(folder)})


def is_complete(folder: Path, config: str) -> bool:
    """Whether a cell was done for just this, and each of its files is as it was then."""
    try:
        record = read_json(folder / COMPLETION_FILE) if (folder / COMPLETION_FILE).exists() else {}
    except UserError:  # nothing depends on it: a cell without it is gone over
        return False
    files, there = record.get("files"), _file_stamps(folder)
    unchanged = isinstance(files, dict) and all(there.get(name) == facts for name, facts in files.items())
    return unchanged and record.get("config") == config  # what has come since, a report puts there


def _file_stamps(folder: Path) -> dict[str, list[int]]:
    """Size in bytes and time of the last change in nanoseconds of each file, as make and rsync tell what changed."""
    named = {path.relative_to(folder): path.stat() for path in sorted(folder.rglob("*")) if path.is_file()}
    kept = {str(name): facts for name, facts in named.items() if name.parts[0] not in NON_RESULT_NAMES}
    return {name: [facts.st_size, facts.st_mtime_ns] for name, facts in kept.items()}
