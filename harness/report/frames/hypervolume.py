"""Hypervolume of the latency-accuracy front over evaluations and minutes of a search."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import pandas as pd

from harness.report.frames.budget_frames import median_float_ms
from harness.report.load.results import CellResults
from harness.report.load.search_logs import SearchLog
from harness.results_dir.artifacts import FLOAT_ROW
from search.pareto import hypervolume

__all__ = ["hypervolume_frame"]

HYPERVOLUME_COLUMNS = ["cell", "searcher", "seed", "evaluations", "minutes", "volume", "scored"]


def hypervolume_frame(cells: Iterable[CellResults]) -> pd.DataFrame:
    """Hypervolume of everything scored so far, after each evaluation that was scored and at the end of the search.

    Both axes run from the ideal to a reference point: latency from 0 to the float model's, loss of accuracy from none
    to the largest that any search of the cell saw. A placement is as fast as `CellResults.levels_ms` says, in every
    search that scored it. So it is a share of that box (Zitzler and Thiele, "Multiobjective evolutionary algorithms",
    IEEE Transactions on Evolutionary Computation 3, 1999), and searches of one cell can be compared. A gain of accuracy
    counts as no loss.

    Returns:
        Columns cell, searcher, seed, evaluations, minutes, volume, and scored: how many evaluations were, until then.
    """
    grown = [frame for cell in cells for frame in _growth_frames(cell)]
    return pd.concat(grown, ignore_index=True) if grown else pd.DataFrame(columns=HYPERVOLUME_COLUMNS)


def _growth_frames(cell: CellResults) -> Iterator[pd.DataFrame]:
    """Of each search that scored something."""
    losses = [_accuracy_losses(cell, search) for search in cell.searches]
    worst = max((float(found.max()) for found in losses if len(found)), default=0.0) or 1.0
    base_ms = median_float_ms(cell)
    for search, found in zip(cell.searches, losses, strict=True):
        if base_ms is None or not len(found):
            continue
        latency = np.array([cell.levels_ms[trial.digest] for trial in search.looked]) / base_ms
        figures = {
            "cell": cell.name, "searcher": search.searcher, "seed": search.seed,
            "evaluations": [trial.evaluations for trial in search.looked],
            "minutes": np.array([trial.elapsed_s for trial in search.looked]) / 60,
            "volume": list(_cumulative_hypervolumes(zip(latency.tolist(), (found / worst).tolist(), strict=True))),
            "scored": range(1, len(found) + 1),
        }  # fmt: skip
        yield _extend_to_end(pd.DataFrame(figures, columns=HYPERVOLUME_COLUMNS), search)


def _extend_to_end(grown: pd.DataFrame, search: SearchLog) -> pd.DataFrame:
    """The same with a line more where the search went on without scoring anything: what it had stays."""
    last = grown.iloc[[-1]].assign(evaluations=search.evaluations, minutes=search.elapsed_s[-1] / 60)
    return grown if search.looked[-1].evaluations == search.evaluations else pd.concat([grown, last])


def _accuracy_losses(cell: CellResults, search: SearchLog) -> npt.NDArray[np.float64]:
    """Of each evaluation that was scored, against the float model; none where that has no score."""
    reference = cell.score(FLOAT_ROW) if search.float_value is None else search.float_value
    if cell.metric is None or reference is None:
        return np.empty(0)
    drop = reference - np.array([trial.value for trial in search.looked])
    return np.maximum(0.0, drop if cell.higher_is_better else -drop)


def _cumulative_hypervolumes(points: Iterable[tuple[float, float]]) -> Iterator[float]:
    """What the points so far dominate, after each of them; it is calculated anew where the front has changed."""
    front: list[tuple[float, float]] = []
    volume = 0.0
    for own in points:
        if not any(known[0] <= own[0] and known[1] <= own[1] for known in front):
            front = [known for known in front if own[0] > known[0] or own[1] > known[1]] + [own]
            volume = hypervolume(front, (1.0, 1.0))
        yield volume
