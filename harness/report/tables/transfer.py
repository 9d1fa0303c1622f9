"""Transfer tables: the best placement of each task on other backends and in other models."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from harness.report.frames import backend_label
from harness.report.report_table import (
    Column,
    ReportTable,
    Row,
    TableSpec,
    format_interval,
    frame_rows,
    is_missing,
    text_column,
)
from harness.report.statistics import rank_values
from harness.results.artifacts import FLOAT_ROW, Choice, best_choice
from harness.results.folder import Results, TaskResults

PLACEMENT_ID = re.compile(r"[0-9a-f]{16}")  # row ids of placements and of external models
MIN_SHARED_ROWS = 4  # minimum number of common rows for a rank correlation
SHARE_NOTE = (
    "confirmed speedup over the float baseline of the column [95 %, Student's t over builds], and in parentheses the "
    "time saved as a share of what the column's own best placement saves; no share if that gain is within the noise."
)


def _format_transfer(row: Row) -> str:
    share: str = "" if is_missing(row["share"]) else f" ({row['share']:.0%})"
    return f"{format_interval(row['speedup'], row['low'], row['high'])}{share}"


TRANSFER = TableSpec(
    name="transfer",
    title="Transfer between backends",
    columns=(text_column("model", "within"), text_column("precision"), text_column("found on", "source")),
    caption=f"The best placement of the searches on the backend of the row, run on that of the column: {SHARE_NOTE}",
    group_by=("within", "precision", "source"),
    spread_by="target",
    spread=(Column("run on {target}", _format_transfer, of="speedup"),),
    timed=True,
    source="rows",
)
TRANSFER_MODELS = TableSpec(
    name="transfer_models",
    title="Transfer between models",
    columns=(text_column("backend", "within"), text_column("precision"), text_column("found in", "source")),
    caption=(
        "The best schemes of the patterns of the row's model, inserted into the model of the column by the pattern "
        f"cache: {SHARE_NOTE}"
    ),
    group_by=("within", "precision", "source"),
    spread_by="target",
    spread=(Column("run in {target}", _format_transfer, of="speedup"),),
    timed=True,
    source="rows",
)


def transfer_tables(results: Results) -> Iterator[ReportTable]:
    """Yield the tables between backends and between models."""
    transfer, notes = transfer_frame(results), []
    for (model, precision), tasks in _task_families(results, "backends").items():
        best = {task.name: task.rows[pick.row].choices for task in tasks if (pick := _best_pick(task)) is not None}
        parts = []
        for one, two in itertools.combinations(tasks, 2):
            own, other = best.get(one.name), best.get(two.name)
            if own and other and len(own) == len(other) and one.facts.get("space") == two.facts.get("space"):
                changed = sum(a != b for a, b in zip(own, other, strict=True))
                parts.append(f"{backend_label(one)} and {backend_label(two)} {changed or 'none'} of {len(own)}")
        if parts:
            notes.append(f"{model}, {precision}: choices in which the best placements differ: {', '.join(parts)}.")
    for row in frame_rows(similarity_frame(results)):
        both = f"rank correlation of latencies on {row['first']} and {row['second']}"
        notes.append(
            f"{row['model']}, {row['precision']}: {both}: {row['spearman']:+.2f} over {row['rows']} placements."
        )
    yield TRANSFER.build(transfer[transfer["across"] == "backends"], notes)
    yield TRANSFER_MODELS.build(transfer[transfer["across"] == "models"])


def transfer_frame(results: Results) -> pd.DataFrame:
    """Return the speedup of the best placement of each task on its own and on other backends, and in other models.

    The best is selected before the confirmation, see `harness.results.artifacts.best_choice`. In another task it is
    the row "from_BACKEND" or "from_MODEL"; without one, on another backend, the row with the same Q/DQ pairs.

    Returns:
        Columns across ("backends" or "models"), within (the model, or the backend), precision, source, target, task (of
        the target), method, row, speedup, low, high, verdict, and share: the time saved as a share of that of the
        target's own best placement, None if that gain is within the noise. Empty if nothing was transferred.
    """
    columns = [
        "across", "within", "precision", "source", "target", "task", "method", "row", "speedup", "low", "high",
        "verdict", "share",
    ]  # fmt: skip
    lines = []
    for across in ("backends", "models"):
        for (within, precision), tasks in _task_families(results, across).items():
            family = []
            for source, target in itertools.product(tasks, tasks):
                labels = _task_label(source, across), _task_label(target, across)
                if (figures := _transfer_row(source, target, across)) is not None:
                    family.append((across, within, precision, *labels, target.name, *figures))
            if any(line[3] != line[4] for line in family):
                lines += family
    return pd.DataFrame(lines, columns=columns)


def _task_label(task: TaskResults, across: str) -> str:
    return backend_label(task) if across == "backends" else str(task.facts["model"])


def _task_families(results: Results, across: str) -> dict[tuple[str, str], list[TaskResults]]:
    """Return the tasks that differ only in their backend, or only in their model."""
    other = "models" if across == "backends" else "backends"
    families: dict[tuple[str, str], list[TaskResults]] = defaultdict(list)
    for task in results.tasks:
        families[_task_label(task, other), str(task.facts["precision"])].append(task)
    return {key: tasks for key, tasks in families.items() if len(tasks) > 1}


def _best_pick(task: TaskResults) -> Choice | None:
    return best_choice(pick for pick in task.picks if pick.row in task.summaries and not task.wrong(pick.row))


def _transfer_row(source: TaskResults, target: TaskResults, across: str) -> tuple[Any, ...] | None:
    """Return method, row, speedup with limits, verdict and share of the source's best placement on the target."""
    pick, target_pick = _best_pick(source), _best_pick(target)
    if pick is None:
        return None
    row: str | None = pick.row
    if source is not target:
        name = f"from_{_task_label(source, across)}"
        row = next((p.row for p in target.picks if p.kind == "baseline" and p.method == name and p.row), None)
        is_same = pick.row == FLOAT_ROW or _is_same_placement(pick.row, source, target)
        if row is None and across == "backends" and is_same:
            row = pick.row
    if row is None or row not in target.summaries:
        return None
    summary, share = target.summaries[row], None
    best = None if target_pick is None else target.summaries[target_pick.row]
    if best is not None and best.verdict == "faster":
        share = (1 - 1 / summary.speedup.value) / (1 - 1 / best.speedup.value)
    speedup = summary.speedup
    return pick.method, row, speedup.value, speedup.low, speedup.high, summary.verdict, share


def similarity_frame(results: Results) -> pd.DataFrame:
    """Return the rank correlation of confirmed latencies on two backends, over the placements that both have.

    A tool's model counts if both backends have the same file.

    Returns:
        Columns model, precision, first, second, rows, spearman.
    """
    lines = []
    for (model, precision), tasks in _task_families(results, "backends").items():
        for one, two in itertools.combinations(tasks, 2):
            shared = [row for row in one.summaries if row in two.summaries and _is_same_placement(row, one, two)]
            if len(shared) >= MIN_SHARED_ROWS:
                latency_ms = [[task.summaries[row].latency_ms.value for row in shared] for task in (one, two)]
                ranks = [rank_values(np.array(values)) for values in latency_ms]
                correlation = float(np.asarray(np.corrcoef(ranks))[0, 1])
                names = model, precision, backend_label(one), backend_label(two)
                lines.append((*names, len(shared), correlation))
    return pd.DataFrame(lines, columns=["model", "precision", "first", "second", "rows", "spearman"])


def _is_same_placement(row: str, one: TaskResults, two: TaskResults) -> bool:
    """Return whether a row is one placement in both tasks: digests identify placements, names of tools do not."""
    own, other = one.rows.get(row), two.rows.get(row)
    if row.startswith(FLOAT_ROW) or own is None or other is None:
        return False
    placed = PLACEMENT_ID.fullmatch(row) or None not in (own.choices, other.choices)
    return bool(placed) or own.sha256 == other.sha256
