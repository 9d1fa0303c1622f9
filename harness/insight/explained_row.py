"""Row of a results folder whose placement is explained, with the placement behind a recovered file."""

from __future__ import annotations

from dataclasses import dataclass

from harness.base.errors import UserError
from harness.config.experiment import Experiment
from harness.config.initial import PTQ_TOOLS
from harness.report.frames.main_frame import main_frame
from harness.report.report_table import frame_rows
from harness.report.trace import find_main_row
from harness.results.artifacts import FLOAT_ROW, ExportedModel, recovered_row
from harness.results.folder import Results, TaskResults
from harness.results.journal import read_journal
from search.space import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedRow:
    """Row of the main table with its placement.

    Attributes:
        recovery: For a recovered file: digest of the placement it was made from, and what changed; "" for others.
    """

    task: TaskResults
    row: ExportedModel
    method: str
    placement: Placement
    recovery: str = ""


def find_explained_row(results: Results, where: str, experiment: Experiment) -> ExplainedRow:
    """Return a row with its placement.

    Args:
        where: ROW of `harness.report.trace.find_main_row`, or the digest of a recovered placement.

    Raises:
        UserError: The row is unknown, has no placement, or was not timed.
    """
    line = find_main_row(results, _number_by_id(results, where) or where)
    task, method = results.task(str(line["task"])), str(line["method"])
    row = task.rows.get(str(line["row"]))
    is_float = row is not None and row.id == FLOAT_ROW and method != FLOAT_ROW
    if is_float or (row is not None and row.choices and not any(row.choices)):
        raise UserError(
            f"{where}: nothing faster was found, so this row is the float model itself, without a placement to explain"
        )
    tools = {*PTQ_TOOLS, *(start.name for start in experiment.initial if start.use == "import")}
    if row is not None and row.id in tools and row.id != method:
        raise UserError(
            f"{where}: its choice is the file of {row.id} as that tool made it, whose parts cannot be left out: "
            f"{_advice(results)}"
        )
    placement, recovery = (None, "") if row is None else _placement(task, row)
    if row is None or placement is None:
        raise UserError(f"{where}: the placement of this row is not recorded ({method}): {_advice(results)}")
    if not row.timed:
        raise UserError(f"{where}: this device only emulates {line['precision']}, so its latency is not measured")
    return ExplainedRow(task=task, row=row, method=method, placement=placement, recovery=recovery)


def _number_by_id(results: Results, where: str) -> str:
    """Return the number of the first row with an id, or with a file recovered from a placement; "" without one.

    Several searches may have chosen the same file, whose explanation is the same.
    """
    rows = frame_rows(main_frame(results))
    for task in results.tasks:
        name = where.removeprefix(f"{task.name}/")
        row = recovered_row(task.recovery.get(name, {}).get("sha256", ""))
        alike = [n for n, line in enumerate(rows, 1) if line["task"] == task.name and line["row"] in (name, row)]
        if alike and name != FLOAT_ROW and (name in task.rows or row in task.rows):
            return str(alike[0])
    return ""


def _placement(task: TaskResults, row: ExportedModel) -> tuple[Placement | None, str]:
    """Return the placement of a row, and a note if its file was recovered from this placement."""
    if row.choices:
        return Placement(row.choices), ""
    made_from = ((d, facts) for d, facts in task.recovery.items() if recovered_row(facts.get("sha256", "")) == row.id)
    digest, facts = next(made_from, ("", {}))
    proposals = (entry.proposal for search in task.searches if digest for entry in read_journal(search.path))
    choices = next((proposal.choices for proposal in proposals if proposal.digest == digest), None)
    if choices is None or not any(choices):
        return None, ""
    return Placement(choices), f"placement {digest}, {facts.get('label')}"


def _advice(results: Results) -> str:
    """Return advice with the rows that have a placement."""
    tasks = {task.name: task for task in results.tasks}
    named = []
    for line in frame_rows(main_frame(results)):
        task = tasks.get(line["task"])
        row = None if task is None else task.rows.get(line["row"])
        if task is None or row is None or not row.timed:
            continue
        placement, _ = _placement(task, row)
        if placement is not None and any(placement.choices):
            named.append(str(line["method"]) if len(tasks) == 1 else f"{task.name}/{line['method']}")
    shown = ", ".join(dict.fromkeys(named))
    return f"explain another one: {shown}" if named else "no row of this folder has one"
