"""Placements found in one cell and run in another: the transfer matrix, and how alike two runtimes rank."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from typing import Any

import pandas as pd

from harness.report.frames.main_frame import backend_label
from harness.report.load.results import CellResults, Results
from harness.results_dir.artifacts import FLOAT_ROW, Choice, best_choice

__all__ = ["similarity_frame", "transfer_frame"]

DIGEST_PATTERN = re.compile(r"[0-9a-f]{16}")
"""What rows are called that are placements, also those of a space of a search's own, or models of a peer."""
MIN_SHARED_ROWS = 4
"""Rows that two cells must share before their ranks are compared."""


def transfer_frame(results: Results) -> pd.DataFrame:
    """What the best placement of each cell gives elsewhere, and at home: on other backends, and in other models.

    The best is the finalist that did best before the confirmation, see `harness.results_dir.artifacts.best_choice`.
    Elsewhere it is
    the row that was brought over from there ("from_" and the name of the backend or model), else on another backend the
    row with the same resolved edges.

    Returns:
        Columns across ("backends" or "models"), within (what is the same: the model, or the backend), precision,
        source, target, cell (the target's), method, row, speedup, low, high, verdict, and share: the gain in time there
        over that of the target's own best placement, 1 at home, and None where that is no gain beyond the noise.
        Without any line where nothing was moved.
    """
    lines = []
    for across in ("backends", "models"):
        for (within, precision), cells in _task_families(results, across).items():
            facts = {"across": across, "within": within, "precision": precision}
            found = [
                {**facts, "source": _task_label(source, across), "target": _task_label(target, across), **line}
                for source, target in itertools.product(cells, cells)
                if (line := _transfer_row(source, target, across)) is not None
            ]
            if any(line["source"] != line["target"] for line in found):
                lines += found
    columns = [
        "across", "within", "precision", "source", "target", "cell", "method", "row", "speedup", "low", "high",
        "verdict", "share",
    ]  # fmt: skip
    return pd.DataFrame(lines, columns=columns)


def _task_label(cell: CellResults, across: str) -> str:
    return backend_label(cell) if across == "backends" else str(cell.facts["model"])


def _task_families(results: Results, across: str) -> dict[tuple[str, str], list[CellResults]]:
    """Cells that differ in their backend alone, or in their model alone."""
    other = "models" if across == "backends" else "backends"
    found: dict[tuple[str, str], list[CellResults]] = defaultdict(list)
    for cell in results.cells:
        found[_task_label(cell, other), str(cell.facts["precision"])].append(cell)
    return {key: cells for key, cells in found.items() if len(cells) > 1}


def _best_choice(cell: CellResults) -> Choice | None:
    """The finalist that the searches liked best."""
    return best_choice(pick for pick in cell.picks if pick.row in cell.summaries and not cell.wrong(pick.row))


def _transfer_row(source: CellResults, target: CellResults, across: str) -> dict[str, Any] | None:
    pick, own = _best_choice(source), _best_choice(target)
    row = None if pick is None else pick.row if source is target else _transferred_row(pick, source, target, across)
    if pick is None or row is None or row not in target.summaries:
        return None
    speedup, best = target.summaries[row].speedup, None if own is None else target.summaries[own.row]
    return {
        "cell": target.name, "method": pick.method, "row": row,
        "speedup": speedup.value, "low": speedup.low, "high": speedup.high, "verdict": target.summaries[row].verdict,
        "share": (1 - 1 / speedup.value) / (1 - 1 / best.speedup.value) if best and best.verdict == "faster" else None,
    }  # fmt: skip


def _transferred_row(pick: Choice, source: CellResults, target: CellResults, across: str) -> str | None:
    """The target's row that is the source's placement; None where nobody brought it there."""
    name = f"from_{_task_label(source, across)}"
    brought = next((p.row for p in target.picks if p.kind == "baseline" and p.method == name and p.row), None)
    if brought is not None or across == "models":
        return brought
    return pick.row if pick.row == FLOAT_ROW or _is_same_placement(pick.row, source, target) else None


def similarity_frame(results: Results) -> pd.DataFrame:
    """Rank correlation of confirmed latencies between two cells of one model, over the placements that both have.

    A tool's model counts where both have the same file: what a tool makes for one runtime is no placement of another.

    Returns:
        Columns model, precision, first, second, rows, spearman.
    """
    from scipy.stats import spearmanr

    lines = []
    for (model, precision), cells in _task_families(results, "backends").items():
        for one, two in itertools.combinations(cells, 2):
            shared = [row for row in one.summaries if row in two.summaries and _is_same_placement(row, one, two)]
            if len(shared) < MIN_SHARED_ROWS:
                continue
            latency_ms = [[cell.summaries[row].latency_ms.value for row in shared] for cell in (one, two)]
            names = {"first": backend_label(one), "second": backend_label(two)}
            facts = {"model": model, "precision": precision, **names, "rows": len(shared)}
            lines.append({**facts, "spearman": float(spearmanr(*latency_ms).statistic)})
    return pd.DataFrame(lines, columns=["model", "precision", "first", "second", "rows", "spearman"])


def _is_same_placement(row: str, one: CellResults, two: CellResults) -> bool:
    """Whether what both have is one placement: a digest says so, the name of a tool does not, and float is none."""
    own, other = one.rows.get(row), two.rows.get(row)
    if row.startswith(FLOAT_ROW) or own is None or other is None:
        return False
    placed = DIGEST_PATTERN.fullmatch(row) or None not in (own.choices, other.choices)
    return bool(placed) or own.sha256 == other.sha256
