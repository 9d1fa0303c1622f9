"""Why a cell stopped before its time, kept beside its results so that a report can say it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from harness.errors import UserError
from harness.run.rows import write_text

__all__ = ["forget_stop", "note_stop", "read_stop"]

NAME = "stopped.txt"
LONGEST = 4000
"""Characters that are read back: a reason, not a log."""


def note_stop(folder: Path, reason: str) -> None:
    """Keep why a cell stopped; where even that cannot be written, the terminal alone says it."""
    with suppress(UserError):
        write_text(folder / NAME, f"{reason}\n")


def forget_stop(folder: Path) -> None:
    """The cell goes on."""
    with suppress(OSError):
        (folder / NAME).unlink(missing_ok=True)


def read_stop(folder: Path) -> str:
    """Why the last run of a cell stopped; "" where it did not, or nobody knows."""
    try:
        with (folder / NAME).open(encoding="utf-8", errors="replace") as file:
            return file.read(LONGEST).strip()
    except OSError:
        return ""
