"""Placements found on one runtime and run on another: the transfer matrix, and how alike two runtimes rank."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import pandas as pd

from harness.report.frames import backend_of
from harness.report.results import CellResults, Results
from harness.run.rows import FLOAT_ROW, Pick

__all__ = ["likeness_frame", "transfer_frame"]

FEWEST = 4
"""Rows that two cells must share before their ranks are compared."""


def transfer_frame(results: Results) -> pd.DataFrame:
    """What the best placement of each cell gives in the others of the same model and precision, and at home.

    The best is the finalist with the lowest latency by its own search. Elsewhere it is the row that has the same
    resolved edges, or that was brought over under the name of the cell.

    Returns:
        Columns model, precision, source, target (names of backends), method, row, speedup, low, high, verdict, and
        share: the gain in time there over that of the target's own best placement, 1 at home.
    """
    lines = []
    for (model, precision), cells in _families(results).items():
        for source, target in itertools.product(cells, cells):
            pick = _best(source)
            if pick is not None and (line := _moved(pick, source, target)) is not None:
                names = {"source": backend_of(source), "target": backend_of(target)}
                lines.append({"model": model, "precision": precision, **names, **line})
    columns = [
        "model", "precision", "source", "target", "method", "row", "speedup", "low", "high", "verdict", "share",
    ]  # fmt: skip
    return pd.DataFrame(lines, columns=columns)


def _families(results: Results) -> dict[tuple[str, str], list[CellResults]]:
    """Cells that differ in their backend alone."""
    found: dict[tuple[str, str], list[CellResults]] = defaultdict(list)
    for cell in results.cells:
        found[str(cell.facts["model"]), str(cell.facts["precision"])].append(cell)
    return {key: cells for key, cells in found.items() if len(cells) > 1}


def _best(cell: CellResults) -> Pick | None:
    """The finalist that the searches liked best."""
    found = [p for p in cell.picks if p.kind == "search" and p.row in cell.summaries and p.search_ms is not None]
    return min(found, key=lambda pick: pick.search_ms or 0.0, default=None)


def _moved(pick: Pick, source: CellResults, target: CellResults) -> dict[str, Any] | None:
    row = pick.row if source is target else _counterpart(pick, source, target)
    if row is None or row not in target.summaries:
        return None
    summary, own = target.summaries[row], _best(target)
    best = None if own is None else target.summaries[own.row].speedup.value
    speedup = summary.speedup
    return {
        "method": pick.method, "row": row, "speedup": speedup.value, "low": speedup.low, "high": speedup.high,
        "verdict": summary.verdict,
        "share": None if best is None or best <= 1 else (1 - 1 / speedup.value) / (1 - 1 / best),
    }  # fmt: skip


def _counterpart(pick: Pick, source: CellResults, target: CellResults) -> str | None:
    """The target's row that is the source's placement."""
    if pick.row in target.rows:
        return pick.row
    names = (source.name, backend_of(source), f"from_{source.name}", f"from_{backend_of(source)}")
    return next((other.row for other in target.picks if other.kind == "baseline" and other.method in names), None)


def likeness_frame(results: Results) -> pd.DataFrame:
    """Rank correlation of confirmed latencies between two cells of one model, over the placements that both have.

    Returns:
        Columns model, precision, first, second, rows, spearman.
    """
    from scipy.stats import spearmanr

    lines = []
    for (model, precision), cells in _families(results).items():
        for one, two in itertools.combinations(cells, 2):
            shared = [row for row in one.summaries if row in two.summaries and not row.startswith(FLOAT_ROW)]
            if len(shared) < FEWEST:
                continue
            latency_ms = [[cell.summaries[row].latency_ms.value for row in shared] for cell in (one, two)]
            names = {"first": backend_of(one), "second": backend_of(two)}
            facts = {"model": model, "precision": precision, **names, "rows": len(shared)}
            lines.append({**facts, "spearman": float(spearmanr(*latency_ms).statistic)})
    return pd.DataFrame(lines, columns=["model", "precision", "first", "second", "rows", "spearman"])
