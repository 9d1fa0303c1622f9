"""Scores of a task's rows, as `accuracy.json` has them, and display names and formats of metrics and verdicts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from harness.accuracy.metrics.intervals import drop_estimate
from harness.base.files import read_json
from harness.base.statistics import Interval
from harness.measure.records import MAIN_BENCHMARKER
from harness.plugins.api import Accuracy
from harness.results.artifacts import read_finalists
from harness.results.output_check import MIN_FLOAT_SQNR_DB

ACCURACY_FILE_NAME = "accuracy.json"
"""Name of the file in the folder of a task."""
FILE_BENCHMARKER = "file"
"""Name of the benchmarker that computes a model as its file describes it."""


class _StoredScore(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    metrics: dict[str, float | None] = {}
    per_item: list[Any] = []
    evidence: str = ""
    mixable: str = ""
    note: str = ""


def read_scores(folder: Path, benchmarker: str | None = None) -> Mapping[str, Mapping[str, Any]]:
    """Return the stored scores by row id, as in `accuracy.json`; rows without one are left out.

    A score has `metrics`, or `failed` and `reason`.

    Args:
        benchmarker: Name of the benchmarker that computed the scores; by default that of each row.
    """
    scores = read_stored_scores(folder)
    rows, _ = read_finalists(folder)
    by_row = {row.id: scores.get(score_key(row.sha256, benchmarker or row.benchmarker)) for row in rows}
    return {row: score for row, score in by_row.items() if score is not None}


def read_stored_scores(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the records of `accuracy.json` by key; empty without the file."""
    return read_json(folder / ACCURACY_FILE_NAME, {}, dict[str, _StoredScore])


def score_key(sha256: str, benchmarker: str, evaluator: str = MAIN_BENCHMARKER) -> str:
    """Return the key of the score of a file."""
    return f"{sha256} {benchmarker}" if evaluator == MAIN_BENCHMARKER else f"{sha256} {benchmarker} {evaluator}"


MAX_SCORE_DIFFERENCE = 0.01
"""Largest difference of a metric that rounding alone explains."""
MAX_HALF_SCORE_DIFFERENCE = 0.05
"""The same for a float model in a runtime at a lower precision than FP32."""


def score_difference(by_runtime: Accuracy, by_file: Accuracy, metric: str, float_precision: str | None = None) -> str:
    """Return how the metric of a runtime contradicts that of a reference execution, or "".

    They differ if the paired interval excludes 0 and the difference is above `MAX_SCORE_DIFFERENCE`.

    Args:
        by_runtime: Score by the runtime.
        by_file: Score by the reference execution.
        metric: Name of the metric.
        float_precision: Precision of the float model in the runtime, for which a metric without an interval is compared
            too; None for a quantized model.
    """
    estimate = drop_estimate(by_file, by_runtime, metric)
    found, expected = by_runtime.metrics[metric], by_file.metrics[metric]
    largest = MAX_SCORE_DIFFERENCE
    if float_precision is not None and float_precision not in MIN_FLOAT_SQNR_DB:
        largest = MAX_HALF_SCORE_DIFFERENCE
    if estimate is None:
        differs = float_precision is not None and abs(found - expected) > largest * max(1.0, abs(expected))
    else:
        low, high = estimate.interval.low, estimate.interval.high
        differs = abs(estimate.interval.value) > largest and (low > 0 or high < 0)
    return f"{metric} is {found:.4f} by the runtime, and {expected:.4f} by the file" if differs else ""


#: Name, digits and unit by metric; other metrics are shown by their key, with four digits.
METRIC_FORMATS = {"map": ("mAP", 4, ""), "top1": ("top-1", 4, ""), "sqnr_db": ("SQNR", 1, " dB")}
#: Value of the float model by metrics whose reference it is itself (`harness.accuracy.metrics.fidelity`); these metrics
#: have no drop.
METRIC_CAPS = {"sqnr_db": 120.0}
#: Metrics between 0 and 1, so that 0.01 is a point.
UNIT_INTERVAL_METRICS = frozenset({"agreement", "map", "miou", "top1", "top5"})
#: Verdicts of faster rows that are not recommended: too large a drop, or outputs that could not be scored.
BEYOND_BOUND_VERDICT, UNSCORED_VERDICT = "faster, beyond the bound", "faster, not scored"


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
