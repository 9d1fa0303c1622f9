"""Surrogate of a model's whole space: an ONNX file that predicts latencies, trained on the readings of a replay table.

A table enumerates some dimensions and also has readings near named placements. Trees with random splits (Geurts et al.
2006) are trained on all readings, so placements outside of the table get a prediction with an interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.base.errors import UserError
from harness.base.files import explain_write_errors
from harness.base.statistics import median_ci
from harness.graph.forest import write_forest
from harness.measure.records import Measured
from harness.runtimes.benchmark_table import BenchmarkTable

Floats = npt.NDArray[np.float64]
TREES, FOLDS, COVERAGE = 100, 5, 0.9
MIN_READINGS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class SurrogateError:
    """Error of a surrogate on held-out placements.

    Attributes:
        readings: Number of placements in the training data.
        rank_correlation: Spearman's correlation of predicted and recorded latencies of held-out placements.
        ceiling: Highest correlation that the noise of the readings allows, from two halves of the samples.
        outside: Rank correlation over placements outside of the table's subspace; NaN for fewer than 10.
        interval: Factor of the interval: latency / interval to latency * interval.
        coverage: Share of held-out placements within an interval from the other folds; the target is 0.9.
    """

    readings: int
    rank_correlation: float
    ceiling: float
    outside: float
    interval: float
    coverage: float


def write_surrogate(table: BenchmarkTable, path: Path) -> SurrogateError:
    """Train a surrogate, write it as an ONNX file, and return its error.

    The model has the input `choices`, int64 as [placements, dimensions of the whole space], and the outputs
    `latency_ms`, `low_ms` and `high_ms`. Its metadata have the error and the names of the dimensions.

    Raises:
        UserError: The table has too few readings, or the file cannot be written.
    """
    digests = [digest for digest, row in table.rows.items() if isinstance(row.outcome, Measured)]
    if len(digests) < MIN_READINGS:
        raise UserError(f"{table.path}: {len(digests)} readings, fewer than the {MIN_READINGS} of a surrogate")
    features = _features(np.array([table.rows[digest].choices for digest in digests]))
    samples = [_samples_ms(table, digest) for digest in digests]
    target = np.log([median_ci(each).value for each in samples])
    subspace = table.subspace
    inside = {subspace.full_space.digest(subspace.to_full_space(placement)) for placement in subspace.placements()}
    error = _cross_validate(features, target, samples, np.array([digest not in inside for digest in digests]))
    facts = {"model": table.metadata.model, "model_sha256": table.metadata.model_sha256, **asdict(error)}
    names = ",".join(dimension.name for dimension in subspace.full_space.dimensions)
    props = {name: str(value) for name, value in facts.items()} | {"dimensions": names}
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_forest(_fit(features, target), features.shape[1] - 1, error.interval, props, path)
    return error


def _samples_ms(table: BenchmarkTable, digest: str) -> Sequence[float]:
    outcome = table.rows[digest].outcome
    assert isinstance(outcome, Measured)
    return outcome.samples_ms


def _features(choices: npt.NDArray[np.int64]) -> Floats:
    """Return the choices with an additional last column, the number of dimensions that are not float."""
    return np.hstack([choices, (choices > 0).sum(axis=1, keepdims=True)]).astype(np.float64)


def _fit(features: Floats, target: Floats) -> Any:
    from sklearn.ensemble import ExtraTreesRegressor  # takes a second to import

    return ExtraTreesRegressor(TREES, random_state=0).fit(features, target)


def _cross_validate(
    features: Floats, target: Floats, samples: Sequence[Sequence[float]], outside: npt.NDArray[np.bool_]
) -> SurrogateError:
    fold = np.random.default_rng(0).permutation(len(target)) % FOLDS
    predicted = np.zeros(len(target))
    for each in range(FOLDS):
        predicted[fold == each] = _fit(features[fold != each], target[fold != each]).predict(features[fold == each])
    missed = np.abs(predicted - target)
    covered = [missed[fold == each] <= np.quantile(missed[fold != each], COVERAGE) for each in range(FOLDS)]
    return SurrogateError(
        readings=len(target),
        rank_correlation=_rank_correlation(predicted, target),
        ceiling=_noise_ceiling(samples),
        outside=_rank_correlation(predicted[outside], target[outside]) if outside.sum() >= 10 else float("nan"),
        interval=float(np.exp(np.quantile(missed, COVERAGE))),
        coverage=float(np.concatenate(covered).mean()),
    )


def _noise_ceiling(samples: Sequence[Sequence[float]]) -> float:
    """Return the correlation of a perfect prediction with the readings (Spearman and Brown, 1910)."""
    rng = np.random.default_rng(0)
    halves = [[np.median(half) for half in np.array_split(rng.permutation(each), 2)] for each in samples]
    correlation = max(0.0, _rank_correlation(*np.array(halves).T))
    return float(np.sqrt(2 * correlation / (1 + correlation)))


def _rank_correlation(first: Floats, second: Floats) -> float:
    from scipy.stats import spearmanr

    return float(spearmanr(first, second).statistic)
