"""What metrics and rows are called where people see them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from harness.report.load.results import CellResults
from harness.results_dir.artifacts import FLOAT_ROW
from harness.statistics import Interval

__all__ = [
    "BEYOND_BOUND_VERDICT",
    "METRIC_CAPS",
    "METRIC_FORMATS",
    "UNSCORED_VERDICT",
    "format_drop",
    "metric_name",
    "row_labels",
    "score_column_title",
    "truncate",
    "verdict_label",
]  # fmt: skip

METRIC_FORMATS = {"map": ("mAP", 4, ""), "top1": ("top-1", 4, ""), "sqnr_db": ("SQNR", 1, " dB")}
"""How a metric is shown: name, digits, unit. Others are shown under their own name with four digits."""
METRIC_CAPS = {"sqnr_db": 120.0}
"""Metrics of which the float model has no value of its own but the largest there is
(`harness.accuracy.metrics.fidelity`), so that no drop can be told."""
BEYOND_BOUND_VERDICT = "faster, beyond the bound"
"""Of a row that is faster and loses more accuracy than the experiment allows; it is no recommendation."""
UNSCORED_VERDICT = "faster, not scored"
"""Of a row that is faster and could not be scored: outputs that are not finite, as a rule; likewise."""


def truncate(text: str, width: int) -> str:
    """At most so many letters of a text, and a sign that there were more."""
    return text if len(text) <= width else f"{text[: width - 1].rstrip(' ,')}…"


def metric_name(metric: str | None) -> str:
    """What people call a metric."""
    return "accuracy" if metric is None else METRIC_FORMATS.get(metric, (metric,))[0]


def score_column_title(metrics: Iterable[str | None]) -> str:
    """Heading of a column of scores; a name that is not ours could be that of another column, so it is not taken."""
    names = dict.fromkeys(METRIC_FORMATS[m][0] if m in METRIC_FORMATS else "metric" for m in metrics if not pd.isna(m))
    return " or ".join(names) or "metric"


def verdict_label(line: Mapping[Any, Any]) -> str:
    """The verdict on the latency of a row of the main frame, and whether its accuracy speaks against it."""
    if line["verdict"] == "faster" and not pd.isna(line["metric"]) and pd.isna(line["score"]):
        return UNSCORED_VERDICT
    return BEYOND_BOUND_VERDICT if line["verdict"] == "faster" and line["beyond"] else str(line["verdict"])


def format_drop(drop: Interval, metric: str | None) -> str:
    """A loss of a metric with its interval, where the limits are known."""
    digits, unit = METRIC_FORMATS.get(metric or "", ("", 4, ""))[1:]
    if math.isnan(drop.low) or math.isnan(drop.high):
        return f"{drop.value:+.{digits}f}{unit}"
    return f"{drop.value:+.{digits}f} [{drop.low:+.{digits}f}, {drop.high:+.{digits}f}]{unit}"


def row_labels(cell: CellResults, main: pd.DataFrame) -> dict[str, str]:
    """What the rows of a cell are called beside pictures: the methods of the main table that chose them.

    Rows that other seeds or smaller budgets chose are called so; the baseline stands first.
    """
    names: dict[str, dict[str, None]] = {}
    for line in main[(main["cell"] == cell.name) & (main["row"] != "")].to_dict("records"):
        name = line["method"] if line["method"] != FLOAT_ROW else f"{FLOAT_ROW} {line['precision']}"
        names.setdefault(line["row"], {})[name] = None
    others: dict[str, dict[str, None]] = {}
    for pick in cell.picks:
        if pick.row and pick.row not in names:
            others.setdefault(pick.row, {})[f"{pick.method}, seed {pick.seed} at {pick.budget}"] = None
    return {row: ", ".join(found) for row, found in {**names, **others}.items()}
