"""Scores of a task's rows, as `accuracy.json` has them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from harness.accuracy.metrics.intervals import drop_estimate
from harness.base.errors import UserError
from harness.base.files import read_json
from harness.measure.records import MAIN_BENCHMARKER, first_problem
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


_SCORES = TypeAdapter(dict[str, _StoredScore])


def read_scores(folder: Path, benchmarker: str | None = None) -> Mapping[str, Mapping[str, Any]]:
    """Return the stored scores by row id, as in `accuracy.json`; rows without one are left out.

    A score has `metrics`, or `failed` and `reason`.

    Args:
        benchmarker: Name of the benchmarker that computed the scores; by default that of each row.

    Raises:
        UserError: The file is damaged.
    """
    scores = read_stored_scores(folder)
    rows, _ = read_finalists(folder)
    by_row = {row.id: scores.get(score_key(row.sha256, benchmarker or row.benchmarker)) for row in rows}
    return {row: score for row, score in by_row.items() if score is not None}


def read_stored_scores(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the records of `accuracy.json` by key; empty without the file."""
    path = folder / ACCURACY_FILE_NAME
    records = read_json(path, {})
    try:
        _SCORES.validate_python(records)
    except ValidationError as error:
        raise UserError(f"{path}: damaged ({first_problem(error)})") from error
    return records


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
