"""Statistics of the searchers over all tasks of a results folder: scores, pairs, ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from harness.report.frames.budget_frames import curve_frame, speedups_at
from harness.report.load.results import CellResults, Results
from harness.report.statistics import FriedmanRanks, compare_pairs, compute_ranks, score_against_random
from harness.statistics import median_ci

__all__ = ["pair_frame", "rank_searchers", "score_frame"]

RANDOM_SEARCHER = "random"


def score_frame(results: Results) -> pd.DataFrame:
    """Score of each searcher against random search, by cell; see `harness.report.statistics.score_against_random`.

    What random search reaches is the mean over the seeds of the searcher `random` in the same cell, latencies are
    the cell's (see `curve_frame`) over the float model's, and the best is the lowest that any search of the cell found.
    Cells without random search have no line, nor have those where the initial placements leave less than 1 %, nor
    searchers that were told other placements first than random search: peers (cold ones apart where nobody is told
    any), and those `without: [seeds]`. Nor have cells that search for accuracy or for a front: what counts there is not
    the latency. On recorded tables ten thousand random searches take the place of those few: `qdq study`.

    Returns:
        Columns cell, searcher, seeds, score, low, high: median over seeds with its 95 % interval.
    """
    lines = [line for cell in results.cells for line in _score_rows(cell, results.stored.uses)]
    return pd.DataFrame(lines, columns=["cell", "searcher", "seeds", "score", "low", "high"])


def _score_rows(cell: CellResults, uses: Mapping[str, Any]) -> list[dict[str, Any]]:
    if cell.goal.minimize != "latency":
        return []
    curves = curve_frame([cell])
    random = next((name for name in curves["searcher"].unique() if uses.get(name, (name,))[0] == RANDOM_SEARCHER), None)
    if random is None:
        return []
    begun: dict[str, set[int]] = {}
    for search in cell.searches:
        begun.setdefault(search.searcher, set()).add(search.initial)
    first = max(begun[random])
    last = int(curves["evaluations"].max())
    latency = {
        str(name): _incumbent_latency_ratios(part, last) for name, part in curves.groupby("searcher", sort=False)
    }
    best = min(float(values.min()) for values in latency.values())
    lines = []
    for name, values in latency.items():
        scores = score_against_random(values, latency[random].mean(axis=0), best, first)
        warm = "qdq_baseline" in uses.get(name, ("", {}))[1]
        if name != random and begun[name] == {first} and not warm and not np.isnan(scores).any():
            middle = median_ci(scores)
            figures = {"score": middle.value, "low": middle.low, "high": middle.high}
            lines.append({"cell": cell.name, "searcher": name, "seeds": len(scores), **figures})
    return lines


def _incumbent_latency_ratios(curves: pd.DataFrame, last: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Latency of the incumbent over that of the float model: [seed, evaluation]; 1 while there is none."""
    table = curves.pivot_table(index="seed", columns="evaluations", values="speedup")
    whole = table.reindex(columns=range(1, last + 1)).ffill(axis=1).fillna(1.0)
    return 1 / whole.to_numpy(dtype=float)


def pair_frame(results: Results) -> pd.DataFrame:
    """Every pair of searchers by confirmed speedup at the largest budget; see `compare_pairs`. Blocks are cells.

    Cells that search for accuracy or for a front are left out: their searchers want something else than speed.
    """
    return compare_pairs(_speedups_by_searcher(results))


def _speedups_by_searcher(results: Results) -> dict[str, dict[str, Sequence[float]]]:
    found: dict[str, dict[str, Sequence[float]]] = {name: {} for name in results.stored.searchers}
    for cell in (each for each in results.pooled if each.goal.minimize == "latency"):
        for searcher, speedups in speedups_at(cell, cell.budget).items():
            found.setdefault(searcher, {})[cell.name] = speedups
    return {name: blocks for name, blocks in found.items() if blocks}


def rank_searchers(results: Results) -> FriedmanRanks | None:
    """Mean ranks of the searchers over the cells that have all of them; None with fewer than two of either."""
    found = {
        name: {b: median_ci(v).value for b, v in blocks.items()}
        for name, blocks in _speedups_by_searcher(results).items()
    }
    table = pd.DataFrame(found).dropna()
    return None if min(table.shape) < 2 else compute_ranks(table)
