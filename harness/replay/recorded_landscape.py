"""Search problem of a complete table: its optimum, and readings with recorded noise."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from harness.base.errors import UserError, suggest_names
from harness.base.statistics import median_ci, stderr_of_median
from harness.measure.records import Measured
from harness.runtimes.benchmark_table import BenchmarkTable
from search.api import Failure, Score
from search.space import Placement

Floats = npt.NDArray[np.float64]
NEAR_OPTIMUM_SHARE = 0.01  # relative to the optimum's latency; placements within it count as optimal


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricBound:
    """A recorded metric that a placement must reach, for instance an SQNR of 20 dB."""

    metric: str
    at_least: float


class Landscape:
    """A table as arrays over its placements, in the order of `TableSubspace.placements`.

    Placements that failed or violate the bound have the latency of the slowest allowed one; averages are thus finite.

    Attributes:
        table: The table.
        sizes: Number of choices of each dimension.
        latency_ms: Median of the samples of each placement.
        allowed: Whether a placement was measured and keeps the bound.
        identity: Number of the model of each placement; placements with equal models share it.
        scores: Score of each placement without noise.

    Raises:
        UserError: No placement is allowed, or the table does not have the metric.
    """

    def __init__(self, table: BenchmarkTable, bound: MetricBound | None = None) -> None:
        self.table = table
        self.sizes = table.subspace.space.sizes
        rows = [table.row(placement) for placement in table.subspace.placements()]
        self.outcomes, self.identity = [row.outcome for row in rows], np.array([row.number for row in rows])
        self._bound = bound
        if bound is not None:
            known = {name for o in self.outcomes if isinstance(o, Measured) for name in o.metrics}
            if bound.metric not in known:
                raise UserError(
                    f"{table.path}: no metric {bound.metric!r} was recorded; {suggest_names(bound.metric, known)}"
                )
        self.scores = [self._score(index) for index in range(len(self.outcomes))]
        self.allowed = np.array([isinstance(s, Score) and s.violation == 0 for s in self.scores])
        if not self.allowed.any():
            raise UserError(f"{table.path}: no placement {'reaches the bound' if bound else 'could be measured'}")
        raw = np.array([s.objective if isinstance(s, Score) else np.inf for s in self.scores])
        self.latency_ms: Floats = np.where(self.allowed, raw, raw[self.allowed].max())
        self._samples = [np.sort(o.samples_ms if isinstance(o, Measured) else []) for o in self.outcomes]

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Return by how much `index` grows with the next choice of each dimension; 1 for the last dimension."""
        return tuple(math.prod(self.sizes[place + 1 :]) for place in range(len(self.sizes)))

    def index(self, placement: Placement) -> int:
        """Return the index of a placement of the subspace in the arrays."""
        return sum(map(operator.mul, placement.choices, self.strides))

    def observe(self, index: int, rng: np.random.Generator) -> Score | Failure:
        """Return the score of one measurement; see `readings_ms`."""
        score = self.scores[index]
        if isinstance(score, Failure):
            return score
        reading = float(self.readings_ms(index, rng, 1)[0])
        return Score(objective=reading, stderr=score.stderr, violation=score.violation, metrics=score.metrics)

    def readings_ms(self, index: int, rng: np.random.Generator, count: int, size: int = 0) -> Floats:
        """Return measurements of a placement that did not fail: medians of samples drawn from the recorded ones.

        Samples are drawn with replacement, so that readings have the noise of the machine.

        Args:
            count: Number of measurements.
            size: Number of samples per measurement; 0: as many as were recorded.
        """
        samples = self._samples[index]
        size = size or len(samples)
        drawn = (rng.random((count, size)) * len(samples)).astype(int)
        drawn.sort(axis=1)
        middle: Floats = (samples[drawn[:, (size - 1) // 2]] + samples[drawn[:, size // 2]]) / 2
        return middle

    @cached_property
    def optimum(self) -> int:
        """Return the index of the fastest allowed placement."""
        return int(np.argmin(np.where(self.allowed, self.latency_ms, np.inf)))

    @cached_property
    def distinct_ms(self) -> Floats:
        """Return the sorted latencies of the different models."""
        _, first = np.unique(self.identity, return_index=True)
        return np.sort(self.latency_ms[first])

    @cached_property
    def anchors_ms(self) -> Mapping[str, float]:
        """Return the latency of the named placements that could be measured, by name."""
        whole, found = self.table.subspace.full_space, {}
        for name, choices in self.table.metadata.anchors.items():
            outcome = self.table.rows[whole.digest(Placement(choices))].outcome
            if isinstance(outcome, Measured):
                found[name] = median_ci(outcome.samples_ms).value
        return found

    def _score(self, index: int) -> Score | Failure:
        outcome = self.outcomes[index]
        if not isinstance(outcome, Measured):
            return Failure(stage=outcome.stage, reason=outcome.reason)
        missed = 0.0
        if self._bound is not None:
            found = outcome.metrics.get(self._bound.metric, math.nan)
            if not found > -math.inf:  # nor NaN
                return Failure(stage="evaluate", reason=f"no {self._bound.metric} was recorded")
            missed = max(0.0, self._bound.at_least - found)
        return Score(
            objective=median_ci(outcome.samples_ms).value,
            stderr=stderr_of_median(outcome.samples_ms),
            violation=missed,
            metrics=outcome.metrics,
        )
