"""Display names and formats of metrics, verdicts and rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from harness.base.statistics import Interval
from harness.results.artifacts import FLOAT_ROW
from harness.results.folder import TaskResults

#: Name, digits and unit by metric; other metrics are shown by their key, with four digits.
METRIC_FORMATS = {"map": ("mAP", 4, ""), "top1": ("top-1", 4, ""), "sqnr_db": ("SQNR", 1, " dB")}
#: Value of the float model by metrics whose reference it is itself (`harness.accuracy.metrics.fidelity`); these metrics
#: have no drop.
METRIC_CAPS = {"sqnr_db": 120.0}
#: Metrics between 0 and 1, so that 0.01 is a point.
UNIT_INTERVAL_METRICS = frozenset({"agreement", "map", "miou", "top1", "top5"})
#: Verdicts of faster rows that are not recommended: too large a drop, or outputs that could not be scored.
BEYOND_BOUND_VERDICT, UNSCORED_VERDICT = "faster, beyond the bound", "faster, not scored"


def truncate(text: str, width: int) -> str:
    """Truncate text to `width` characters, ending with an ellipsis."""
    return text if len(text) <= width else f"{text[: width - 1].rstrip(' ,')}…"


def metric_name(metric: str | None) -> str:
    """Return the usual name of a metric; "accuracy" without one."""
    return "accuracy" if metric is None else METRIC_FORMATS.get(metric, (metric,))[0]


def score_column_title(metrics: Iterable[str | None]) -> str:
    """Return the heading of the score column; "metric" for the metric of a plug-in, as its name may be taken."""
    names = dict.fromkeys(METRIC_FORMATS[m][0] if m in METRIC_FORMATS else "metric" for m in metrics if not _is_nan(m))
    return " or ".join(names) or "metric"


def verdict_label(line: Mapping[Any, Any]) -> str:
    """Return the verdict of a row of the main frame: "tie", "faster, beyond the bound", "faster, not scored" etc."""
    if line["verdict"] == "faster" and not _is_nan(line["metric"]) and _is_nan(line["score"]):
        return UNSCORED_VERDICT
    return BEYOND_BOUND_VERDICT if line["verdict"] == "faster" and line["beyond"] else str(line["verdict"])


def format_score(value: float | None, metric: str | None) -> str:
    """Return a metric with its name and unit, or "-" without a value."""
    if value is None or _is_nan(value):
        return "-"
    name, digits, unit = METRIC_FORMATS.get(metric or "", (metric, 4, ""))
    return f"{name} {value:.{digits}f}{unit}"


def _is_nan(value: object) -> bool:
    """Return whether a cell of a frame is missing."""
    return value is None or value != value  # pandas takes 0.4 s to import, which the start of a search does not need


def format_drop(drop: Interval, metric: str | None) -> str:
    """Return a loss of a metric, with its limits if they are known."""
    digits, unit = METRIC_FORMATS.get(metric or "", ("", 4, ""))[1:]
    if math.isnan(drop.low) or math.isnan(drop.high):
        return f"{drop.value:+.{digits}f}{unit}"
    return f"{drop.value:+.{digits}f} [{drop.low:+.{digits}f}, {drop.high:+.{digits}f}]{unit}"


def row_labels(task: TaskResults, lines: Iterable[Mapping[Any, Any]]) -> dict[str, str]:
    """Return the labels of rows in plots, the baseline first: the methods of the main table that chose them.

    Rows that only other seeds or smaller budgets chose are named by these.

    Args:
        lines: Rows of the main frame; those of other tasks are ignored.
    """
    names: dict[str, dict[str, None]] = {}
    for line in (line for line in lines if line["task"] == task.name and line["row"] != ""):
        name = line["method"] if line["method"] != FLOAT_ROW else f"{FLOAT_ROW} {line['precision']}"
        names.setdefault(line["row"], {})[name] = None
    others: dict[str, dict[str, None]] = {}
    for pick in task.picks:
        if pick.row and pick.row not in names:
            others.setdefault(pick.row, {})[f"{pick.method}, seed {pick.seed} at {pick.budget}"] = None
    return {row: ", ".join(labels) for row, labels in {**names, **others}.items()}
