"""A cell that goes on, goes on elsewhere, or begins a new section of the table beside what was measured before."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

from harness.timing.workers.trial_pool import WorkerLost
from harness.results_dir.fingerprint import FingerprintMismatch
from harness.results_dir.journal import explain_write_errors
from harness.progress import Observer

__all__ = ["MAX_WORKER_LOSSES", "next_backup_path", "run_with_recovery", "archive_existing"]

MAX_WORKER_LOSSES = 3
"""So often a cell goes on after it lost a worker while it had no other that could take over."""


def run_with_recovery(folder: Path, work: Callable[[], None], accept_changes: bool, observer: Observer) -> None:
    """Do a cell's work; it can be begun again at any time, and then goes on where it was.

    Args:
        folder: The cell's.
        accept_changes: Where the cell was begun with something else, keep that as `<folder>.<n>` and begin anew.

    Raises:
        Changed: It was begun with something else, and that is not accepted.
        UserError: As `work` raises it.
    """
    losses = 0
    while True:
        try:
            return work()
        except WorkerLost as error:
            losses += 1
            if losses > MAX_WORKER_LOSSES:
                raise
            observer.say(f"{folder.name}: {error}; it goes on with what is left")
        except FingerprintMismatch as error:
            if not accept_changes:
                raise
            kept = archive_existing(folder)
            observer.say(f"{error}\naccepted: {kept.name} keeps what was measured before; {folder.name} begins anew")


def archive_existing(path: Path) -> Path:
    """Give a file or folder the next name of `free_name`.

    Raises:
        UserError: It cannot be renamed.
    """
    kept = next_backup_path(path)
    with explain_write_errors(path):
        path.rename(kept)
    return kept


def next_backup_path(path: Path) -> Path:
    """The next free name NAME.<n> beside a file or folder, before the suffix of a file."""
    stem, suffix = (path.stem, path.suffix) if path.is_file() else (path.name, "")
    names = (path.with_name(f"{stem}.{number}{suffix}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())
