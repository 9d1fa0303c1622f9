"""Why a cell stopped, or a search ended, before its time: kept beside the results, so that a report can say it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UserError
from harness.records import Failed
from harness.results_dir.artifacts import write_text

__all__ = ["End", "SearchesBroke", "forget_end", "forget_stop", "note_end", "note_stop", "read_end", "read_stop"]

NAME = "stopped.txt"
ENDED, BROKEN = ".ended.txt", ".broken.txt"
"""Beside the journal of a search; the latter, of one whose searcher broke, may have the end of the traceback below."""
LONGEST = 4000
"""Characters that are read back: a reason, not a log."""


class SearchesBroke(UserError):
    """Searchers raised what they should not; everything else was done, and its results are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a search ended before its budget was spent.

    Attributes:
        said: For instance "ended at 17 of 100: it had nothing more to propose", behind the name of the search.
        broken: Its searcher raised what it should not.
        trace: The file with the traceback of that; None where there is none, as of what a plug-in raises as a reason.
    """

    said: str
    broken: bool = False
    trace: Path | None = None


def note_stop(folder: Path, reason: str) -> None:
    """Keep why a cell stopped; where even that cannot be written, the terminal alone says it."""
    with suppress(UserError):
        write_text(folder / NAME, f"{reason}\n")


def forget_stop(folder: Path) -> None:
    """The cell goes on."""
    _forget(folder / NAME)


def read_stop(folder: Path) -> str:
    """Why the last run of a cell stopped; "" where it did not, or nobody knows."""
    return _read(folder / NAME)


def note_end(journal: Path, said: str, broken: Failed | None) -> End:
    """Keep, beside its journal, how a search ended before its budget was spent, instead of how it did before.

    Args:
        said: One line.
        broken: What its searcher raised, if that is why.

    Raises:
        UserError: It cannot be written.
    """
    said = said.encode(errors="backslashreplace").decode()  # what plug-ins raise may hold anything
    suffix, other = (ENDED, BROKEN) if broken is None else (BROKEN, ENDED)
    path, trace = journal.with_suffix(suffix), "" if broken is None else broken.log_tail
    below = f"\n{trace}\n".encode(errors="backslashreplace").decode() if trace else ""
    write_text(path, f"{said}\n{below}")
    _forget(journal.with_suffix(other))
    return End(said=said, broken=broken is not None, trace=path if trace else None)


def forget_end(journal: Path) -> None:
    """The search has spent its budget, or begins anew."""
    for suffix in (ENDED, BROKEN):
        _forget(journal.with_suffix(suffix))


def read_end(journal: Path) -> End | None:
    """How a search ended before its budget was spent; None where it did not, or nobody knows."""
    for suffix in (BROKEN, ENDED):
        path = journal.with_suffix(suffix)
        said, _, trace = _read(path).partition("\n")
        if said:
            return End(said=said, broken=suffix == BROKEN, trace=path if trace else None)
    return None


def _forget(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(LONGEST).strip()
    except OSError:
        return ""
