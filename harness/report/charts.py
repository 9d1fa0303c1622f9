"""What the interactive charts of the page are drawn from; `assets/charts.js` draws them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import pandas as pd

from harness.report.naming import METRICS
from harness.report.plots import envelope, front
from harness.report.points import bounded, tried_frame
from harness.report.results import CellResults
from harness.report.searching import curve_frame
from harness.report.volumes import volume_frame

__all__ = ["charts_of"]

BAND = ("value", "low", "high")


def charts_of(
    cell: CellResults, main: pd.DataFrame, budgets: pd.DataFrame, samples: pd.DataFrame, labels: Mapping[str, str]
) -> dict[str, Any]:
    """What the interactive charts of a cell show.

    Args:
        main: The main rows of all cells.
        budgets: See `harness.report.searching.budget_frame`.
        samples: Of the cell's confirmation.
        labels: What the cell's rows are called.
    """
    curves, volumes = curve_frame([cell]), volume_frame([cell])
    marks = budgets[budgets["cell"] == cell.name]
    confirmed = [
        {"name": row["searcher"], "x": row["budget"], **{key: row[key] for key in ("speedup", "low", "high")}}
        for row in marks.to_dict("records")
    ]
    return {
        "anytime": {over: _steps(curves, over, "speedup") for over in ("evaluations", "minutes")},
        "volume": _steps(volumes, "evaluations", "volume"),
        "confirmed": confirmed,
        "latency": [
            {
                "name": labels[row],
                "quantiles": _numbers(np.quantile(part["latency_ms"], [0.05, 0.25, 0.5, 0.75, 0.95])),
                "builds": _numbers(part.groupby("build")["latency_ms"].median()),
            }
            for row in labels
            if len(part := samples[samples["row"] == row])
        ],
        "floor": cell.floor,
        "pareto": _pareto(cell, main[main["cell"] == cell.name], labels),
    }


def _steps(curves: pd.DataFrame, over: Literal["evaluations", "minutes"], figure: str) -> list[dict[str, Any]]:
    return [
        {"name": str(name), "x": _numbers(steps.index), **{key: _numbers(steps[key]) for key in BAND}}
        for name, part in curves.groupby("searcher", sort=False)
        if len(steps := envelope(part, over, figure))
    ]


def _pareto(cell: CellResults, lines: pd.DataFrame, labels: Mapping[str, str]) -> dict[str, Any] | None:
    points = bounded(lines)
    if points.empty or cell.metric is None:
        return None
    best = front(points, cell.higher_is_better)
    return {
        "metric": METRICS.get(cell.metric, (cell.metric, 4, ""))[0],
        "rows": [
            {
                "name": labels[row["row"]],
                "x": row["latency_ms"],
                "y": row["score"],
                "low": row["latency_low_ms"],
                "high": row["latency_high_ms"],
            }
            for row in points.drop_duplicates("row").to_dict("records")
        ],
        "front": [_numbers(best["latency_ms"]), _numbers(best["score"])],
        "tried": [_numbers(pair) for pair in tried_frame(cell).to_numpy()],
    }


def _numbers(values: Any) -> list[float]:
    return [float(f"{value:.6g}") for value in np.asarray(values, dtype=float)]
