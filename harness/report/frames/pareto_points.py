"""Rows and candidates as points of latency and accuracy."""

from __future__ import annotations

import numpy as np
import pandas as pd

from harness.report.load.results import CellResults

__all__ = ["candidate_frame", "candidate_label", "close_intervals"]

FIELDS = 150
"""Along each axis of a picture: dots of one field lie on top of each other there."""


def close_intervals(main: pd.DataFrame) -> pd.DataFrame:
    """Rows with latency and score, their latency's interval closed where a single build leaves it open."""
    points = main[main["score"].notna() & main["latency_ms"].notna()].copy()
    for column in ("latency_low_ms", "latency_high_ms"):
        points[column] = points[column].where(
            np.isfinite(points["latency_high_ms"].astype(float)), points["latency_ms"]
        )
    return points


def candidate_frame(cell: CellResults) -> pd.DataFrame:
    """Latency and metric of the candidates that searches scored, by their own samples: one a field of the picture."""
    found = [(trial.latency_ms, trial.value) for search in cell.searches for trial in search.looked]
    points = pd.DataFrame(found, columns=["latency_ms", "score"], dtype=float)
    ranges = (points.max() - points.min()).replace(0.0, 1.0)
    fields = ((points - points.min()) / ranges * FIELDS).round()
    return points[~fields.duplicated()]


def candidate_label(cell: CellResults) -> str:
    """What the candidates are called in a key: where they were scored on other images than the rows, that is said."""
    return "scored in the searches" + (", on their half of the data" if cell.facts.get("halves") else "")
