"""How the front of latency and accuracy grew in the searches: its hypervolume over evaluations and minutes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pandas as pd

from harness.report.results import CellResults
from harness.report.searches import Looked, Search
from harness.report.searching import float_ms
from harness.run.rows import FLOAT_ROW
from search.pareto import hypervolume

__all__ = ["volume_frame"]

COLUMNS = ["cell", "searcher", "seed", "evaluations", "minutes", "volume"]


def volume_frame(cells: Iterable[CellResults]) -> pd.DataFrame:
    """Hypervolume of everything scored so far, after each evaluation that was scored, by the search's own samples.

    Both axes run from the ideal to a reference point: latency from 0 to the float model's of the same search, loss of
    accuracy from none to the largest that any search of the cell saw. So it is a share of that box (Zitzler and Thiele,
    "Multiobjective evolutionary algorithms", IEEE Transactions on Evolutionary Computation 3, 1999), and searches of
    one cell can be compared. A gain of accuracy counts as no loss.

    Returns:
        Columns cell, searcher, seed, evaluations, minutes, volume.
    """
    return pd.DataFrame([line for cell in cells for line in _lines(cell)], columns=COLUMNS)


def _lines(cell: CellResults) -> Iterator[dict[str, Any]]:
    if cell.metric is None:
        return
    found = {id(search): list(_losses(cell, search)) for search in cell.searches}
    worst = max((loss for trials in found.values() for _, loss in trials), default=0.0) or 1.0
    for search in cell.searches:
        base_ms = float_ms(cell, search)
        for trial, volume in _grown(found[id(search)], base_ms, worst) if base_ms is not None else ():
            yield {
                "cell": cell.name, "searcher": search.searcher, "seed": search.seed, "evaluations": trial.evaluations,
                "minutes": trial.elapsed_s / 60, "volume": volume,
            }  # fmt: skip


def _losses(cell: CellResults, search: Search) -> Iterator[tuple[Looked, float]]:
    """The evaluations that were scored, with their loss against the float model; none where that has no score."""
    reference = cell.score(FLOAT_ROW) if search.float_value is None else search.float_value
    if reference is None:
        return
    for trial in search.looked:
        drop = reference - trial.value
        yield trial, max(0.0, drop if cell.higher_is_better else -drop)


def _grown(trials: list[tuple[Looked, float]], base_ms: float, worst: float) -> Iterator[tuple[Looked, float]]:
    front: list[tuple[float, float]] = []
    for trial, loss in trials:
        own = (trial.latency_ms / base_ms, loss / worst)
        if not any(known[0] <= own[0] and known[1] <= own[1] for known in front):
            front = [known for known in front if own[0] > known[0] or own[1] > known[1]] + [own]
        yield trial, hypervolume(front, (1.0, 1.0))
