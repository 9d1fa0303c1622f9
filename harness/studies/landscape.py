"""What a complete table says of the problem itself: optimum, readings as a search would take them, how hard it is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from harness.errors import UserError, nearest
from harness.measure.stats import median_ci, stderr_of_median
from harness.records import Measured
from harness.tables import Table
from search.api import Failure, Score
from search.space import Placement

__all__ = ["NEAR", "Bound", "Difficulty", "Floats", "Landscape"]

Floats = npt.NDArray[np.float64]
NEAR = 0.01
"""Share of the optimum's latency within which a placement is as good as the optimum."""
FLAT = 1e-9
"""Smaller differences of log latency are rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A recorded metric that a placement must reach, for instance an SQNR of 20 dB."""

    metric: str
    at_least: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Difficulty:
    """How hard the table is to search.

    Attributes:
        near_optimum: Share of placements within 1 % of the optimum.
        random_evaluations: Evaluations that random search needs on average to find one of them.
        fitness_distance: Correlation of log latency with the number of dimensions that differ from the nearest
            optimum: 1 leads straight there, 0 and below mislead (Jones and Forrest, "Fitness distance correlation as a
            measure of problem difficulty for genetic algorithms", ICGA 1995).
        neighbour_correlation: Of log latency between placements that differ in one dimension, over all pairs:
            1 is smooth, 0 is rugged (Weinberger, "Correlated and uncorrelated fitness landscapes", Biological
            Cybernetics 63, 1990, with the walk replaced by the whole table).
        local_optima: Share of placements that no single change improves by more than their noise.
        additive: Share of the variance of log latency that single dimensions explain.
        pairwise: Share that pairs of dimensions explain besides (both: Sobol', "Sensitivity estimates for nonlinear
            mathematical models", 1993; exact, because the table is a full factorial).
    """

    near_optimum: float
    random_evaluations: float
    fitness_distance: float
    neighbour_correlation: float
    local_optima: float
    additive: float
    pairwise: float


class Landscape:
    """A table as arrays over its placements, in the order of `Subspace.placements`.

    Placements that failed, or miss the bound, count as slow as the slowest that is allowed: they help nobody, and an
    average over them stays a latency.

    Attributes:
        table: What was read.
        sizes: Choices of each dimension.
        latency_ms: Of each placement, the median of its samples.
        allowed: Whether it was measured and keeps the bound.
        identity: Which placements are the same model.

    Raises:
        UserError: No placement is allowed, or the table does not have the metric.
    """

    def __init__(self, table: Table, bound: Bound | None = None) -> None:
        self.table = table
        self.sizes = table.subspace.space.sizes
        self.outcomes = [table.row(placement).outcome for placement in table.subspace.placements()]
        self.identity = np.array([table.row(p).number for p in table.subspace.placements()])
        self._bound = bound
        if bound is not None:
            known = {name for o in self.outcomes if isinstance(o, Measured) for name in o.metrics}
            if bound.metric not in known:
                raise UserError(
                    f"{table.path}: no metric {bound.metric!r} was recorded; {nearest(bound.metric, known)}"
                )
        self._scores = [self._score(index) for index in range(len(self.outcomes))]
        self.allowed = np.array([isinstance(s, Score) and s.violation == 0 for s in self._scores])
        if not self.allowed.any():
            raise UserError(f"{table.path}: no placement {'reaches the bound' if bound else 'could be measured'}")
        raw = np.array([s.objective if isinstance(s, Score) else np.inf for s in self._scores])
        self.latency_ms: Floats = np.where(self.allowed, raw, raw[self.allowed].max())
        self._samples = [np.sort(o.samples_ms if isinstance(o, Measured) else []) for o in self.outcomes]

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """What one step of each dimension's choice adds to the index of a placement."""
        return tuple(math.prod(self.sizes[place + 1 :]) for place in range(len(self.sizes)))

    def index(self, placement: Placement) -> int:
        """Where a placement of the subspace stands in the arrays."""
        return sum(choice * stride for choice, stride in zip(placement.choices, self.strides, strict=True))

    def observe(self, index: int, rng: np.random.Generator) -> Score | Failure:
        """One measurement; see `readings_ms`."""
        score = self._scores[index]
        if isinstance(score, Failure):
            return score
        reading = float(self.readings_ms(index, rng, 1)[0])
        return Score(objective=reading, stderr=score.stderr, violation=score.violation, metrics=score.metrics)

    def readings_ms(self, index: int, rng: np.random.Generator, count: int) -> Floats:
        """Measurements of a placement that did not fail: medians of as many samples as were recorded, drawn from them.

        Drawn with replacement, so that who reads it is fooled by noise as on the machine.
        """
        samples = self._samples[index]
        drawn = np.sort((rng.random((count, len(samples))) * len(samples)).astype(int), axis=1)
        middle: Floats = samples[drawn[:, [(len(samples) - 1) // 2, len(samples) // 2]]].mean(axis=1)
        return middle

    @cached_property
    def optimum(self) -> int:
        """Index of the fastest placement that is allowed."""
        return int(np.argmin(np.where(self.allowed, self.latency_ms, np.inf)))

    @cached_property
    def distinct_ms(self) -> Floats:
        """Latency of each different model, sorted."""
        _, first = np.unique(self.identity, return_index=True)
        return np.sort(self.latency_ms[first])

    @cached_property
    def anchors_ms(self) -> Mapping[str, float]:
        """Latency of the named placements that could be measured."""
        whole, found = self.table.subspace.whole, {}
        for name, choices in self.table.facts.anchors.items():
            outcome = self.table.rows[whole.digest(Placement(choices))].outcome
            if isinstance(outcome, Measured):
                found[name] = median_ci(outcome.samples_ms).value
        return found

    def difficulty(self) -> Difficulty:
        """How hard this table is to search."""
        near = self.distinct_ms <= self.distinct_ms[0] * (1 + NEAR)
        additive, pairwise = self._explained()
        return Difficulty(
            near_optimum=float(near.mean()),
            random_evaluations=(len(near) + 1) / (int(near.sum()) + 1),
            fitness_distance=self._fitness_distance(),
            neighbour_correlation=self._neighbour_correlation(),
            local_optima=self._local_optima(),
            additive=additive,
            pairwise=pairwise,
        )

    def drift(self) -> tuple[float, float]:
        """Change of log latency over the recording of the table, and its standard error; infinite where unknown.

        The order is random, so a slope over it of what single dimensions leave unexplained is the machine's.
        """
        inside = set(self.identity.tolist())
        first = max((row.number for row in self.table.rows.values() if row.number not in inside), default=-1)
        used = self.allowed & (self.identity > first)
        if used.sum() < 3:
            return 0.0, math.inf
        grid = self._grid - self._grid.mean()
        rest = (grid - sum(self._effects(grid))).ravel()[used]
        place = self.identity[used] - self.identity[used].mean()
        place = place / np.ptp(place)
        slope = float(place @ rest / (place @ place))
        left = rest - rest.mean() - slope * place
        return slope, float(np.sqrt(left @ left / (len(left) - 2) / (place @ place)))

    @property
    def _grid(self) -> Floats:
        logs: Floats = np.log(self.latency_ms).reshape(self.sizes)
        return logs

    def _score(self, index: int) -> Score | Failure:
        outcome = self.outcomes[index]
        if not isinstance(outcome, Measured):
            return Failure(stage=outcome.stage, reason=outcome.reason)
        missed = 0.0
        if self._bound is not None:
            missed = max(0.0, self._bound.at_least - outcome.metrics.get(self._bound.metric, -math.inf))
        return Score(
            objective=median_ci(outcome.samples_ms).value,
            stderr=stderr_of_median(outcome.samples_ms),
            violation=missed,
            metrics=outcome.metrics,
        )

    def _fitness_distance(self) -> float:
        choices = np.indices(self.sizes).reshape(len(self.sizes), -1)
        best = np.flatnonzero(self.allowed & (self.latency_ms <= self.latency_ms[self.optimum]))
        distance = np.min([(choices != choices[:, [index]]).sum(axis=0) for index in best], axis=0)
        return _correlation(self._grid.ravel(), distance.astype(float))

    def _neighbour_correlation(self) -> float:
        """Pearson's over all ordered pairs; both sides have the same values, hence one mean and one variance."""
        grid = self._grid
        here, there = zip(*_neighbouring(grid), strict=True)
        return _correlation(np.concatenate([*here, *there]), np.concatenate([*there, *here]))

    def _local_optima(self) -> float:
        grid = self._grid
        noise = np.array([s.stderr / s.objective if isinstance(s, Score) else 0.0 for s in self._scores])
        best = grid - 2 * noise.reshape(self.sizes)
        optimal = np.ones(self.sizes, dtype=bool)
        for axis, size in enumerate(self.sizes):
            for step in range(1, size):
                optimal &= np.roll(grid, step, axis=axis) >= best
        return float((optimal.ravel() & self.allowed).mean())

    def _effects(self, grid: Floats) -> list[Floats]:
        """The mean over all other dimensions, for each dimension, in a form that can be added to the grid."""
        axes = range(len(self.sizes))
        return [grid.mean(axis=tuple(a for a in axes if a != axis), keepdims=True) for axis in axes]

    def _explained(self) -> tuple[float, float]:
        """Shares of variance of first and of second order."""
        grid = self._grid - self._grid.mean()
        total = float(grid.var())
        if np.ptp(grid) < FLAT:
            return 1.0, 0.0
        single, axes, pairs = self._effects(grid), range(len(self.sizes)), 0.0
        for first, second in itertools.combinations(axes, 2):
            others = tuple(axis for axis in axes if axis not in (first, second))
            pairs += float((grid.mean(axis=others, keepdims=True) - single[first] - single[second]).var())
        return sum(float(effect.var()) for effect in single) / total, pairs / total


def _neighbouring(grid: Floats) -> list[tuple[Floats, Floats]]:
    """Values of all pairs of placements that differ in one dimension, each pair once."""
    return [
        (np.take(grid, first, axis=axis).ravel(), np.take(grid, second, axis=axis).ravel())
        for axis, size in enumerate(grid.shape)
        for first, second in itertools.combinations(range(size), 2)
    ]


def _correlation(first: Floats, second: Floats) -> float:
    """Pearson's; 0 where one side is constant."""
    if min(np.ptp(first), np.ptp(second)) < FLAT:
        return 0.0
    a, b = first - first.mean(), second - second.mean()
    return float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))
