"""Exported model of a row of a results folder, found by the row's name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.base.errors import UserError
from harness.report.trace import find_main_row
from harness.results.folder import TaskResults, load


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedRow:
    """Row of a results folder with its file, which several rows may share.

    Attributes:
        row: Row id.
    """

    task: str
    row: str
    file: Path


def find_exported_row(folder: Path, where: str | None) -> ExportedRow:
    """Return the exported model of a row.

    Args:
        where: Name of the row, see `harness.report.trace.find_main_row`; None raises the error with the list.

    Raises:
        UserError: No row is named, or the row or its model does not exist; the message lists those that exist.
    """
    results = load(folder)
    if where is not None:
        line = find_main_row(results, where)
        found = _exported_row(results.task(str(line["task"])), str(line["row"]))
        if found is not None:
            return found
    files = [line for task in results.tasks for line in _exported_lines(task)]
    problem = "name a row, or its file" if where is None else f"row {where!r} has no exported model"
    listing = "\n".join(["; there are:", *dict.fromkeys(files)]) if files else "; nothing is exported there"
    raise UserError(f"{folder}: {problem}{listing}")


def _exported_lines(task: TaskResults) -> list[str]:
    """Return a line for each exported file with the methods that chose it, or with its row if none did."""
    labels = [
        (pick.row, f"{pick.method}{'' if pick.budget is None else f' after {pick.budget}'}") for pick in task.picks
    ]
    labels += [(row, row) for row in task.rows if row not in {pick.row for pick in task.picks}]
    found = [(label, _exported_row(task, row)) for row, label in labels]
    return [f"  {label}: {exported.file}" for label, exported in found if exported is not None]


def _exported_row(task: TaskResults, row: str) -> ExportedRow | None:
    if row not in task.rows or not (file := task.folder / "models" / task.rows[row].file).is_file():
        return None
    return ExportedRow(task=task.name, row=row, file=file)
