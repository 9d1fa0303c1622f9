"""Rows and candidates as points of latency and accuracy."""

from __future__ import annotations

import numpy as np
import pandas as pd

from harness.report.results import CellResults

__all__ = ["bounded", "tried_frame"]


def bounded(main: pd.DataFrame) -> pd.DataFrame:
    """Rows with latency and score, their latency's interval closed where a single build leaves it open."""
    points = main[main["score"].notna() & main["latency_ms"].notna()].copy()
    for column in ("latency_low_ms", "latency_high_ms"):
        points[column] = points[column].where(
            np.isfinite(points["latency_high_ms"].astype(float)), points["latency_ms"]
        )
    return points


def tried_frame(cell: CellResults) -> pd.DataFrame:
    """Latency and metric of every candidate that a search scored, by the search's own samples."""
    lines = [(found.latency_ms, found.value) for search in cell.searches for found in search.looked]
    return pd.DataFrame(lines, columns=["latency_ms", "score"]).drop_duplicates()
