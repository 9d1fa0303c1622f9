"""Notes on rows with wrong results, and on rows that could not be compared with their file."""

from __future__ import annotations

from collections.abc import Iterator

from harness.report.load.results import CellResults

__all__ = ["check_notes", "wrong_result_rows"]


def check_notes(cell: CellResults) -> Iterator[str]:
    """Yield a line for each row with a wrong result, and one for each reason why rows were not compared."""
    for name, row in wrong_result_rows(cell).items():
        found = cell.checks[row]
        shown = f"; {cell.name}/{found.model} shows it, the text beside it says how" if found.model else ""
        yield f"{name} of {cell.name}: {found}{shown}."
    reasons: dict[str, list[str]] = {}
    for name, row in _rows_by_method_label(cell).items():
        if row in cell.checks and cell.checks[row].verdict == "not checked":
            reasons.setdefault(cell.checks[row].reason, []).append(name)
    for reason, names in reasons.items():
        yield f"Not compared with their files, {cell.name}: {', '.join(names)} ({reason})."


def wrong_result_rows(cell: CellResults) -> dict[str, str]:
    """Return the rows with a wrong result, by the methods that chose them."""
    return {name: row for name, row in _rows_by_method_label(cell).items() if cell.wrong(row)}


def _rows_by_method_label(cell: CellResults) -> dict[str, str]:
    """Return rows by the methods that chose them."""
    methods: dict[str, dict[str, None]] = {}
    for pick in cell.picks:
        if pick.row:
            methods.setdefault(pick.row, {})[pick.method] = None
    return {f"{', '.join(names)} ({row})": row for row, names in methods.items()}
