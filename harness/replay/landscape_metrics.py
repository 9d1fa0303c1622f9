"""Metrics of a complete table: difficulty of the search, and drift of the machine."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from harness.replay.recorded_landscape import NEAR_OPTIMUM_SHARE, Floats, Landscape
from search.api import Score

FLAT_LOG_LATENCY = 1e-9  # smaller differences of log latency are rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Difficulty:
    """Difficulty of a table.

    Attributes:
        near_optimum: Share of placements within 1 % of the optimum.
        random_evaluations: Evaluations that random search needs on average to find one of them; exact.
        fitness_distance: Correlation of log latency with the number of dimensions that differ from the nearest optimum:
            1 leads straight there, 0 and below mislead (Jones and Forrest, "Fitness distance correlation as a measure
            of problem difficulty for genetic algorithms", ICGA 1995).
        neighbour_correlation: Correlation of log latency over all pairs that differ in one dimension: 1 is
            smooth, 0 is rugged (Weinberger, "Correlated and uncorrelated fitness landscapes", Biological Cybernetics
            63, 1990, with the walk replaced by the whole table).
        local_optima: Share of placements that no single change improves by more than the noise of both.
        additive: Share of the variance of log latency that single dimensions explain.
        pairwise: Share that pairs of dimensions explain in addition (both: Sobol', "Sensitivity estimates for nonlinear
            mathematical models", 1993; exact, because the table is a full factorial).
    """

    near_optimum: float
    random_evaluations: float
    fitness_distance: float
    neighbour_correlation: float
    local_optima: float
    additive: float
    pairwise: float


def measure_difficulty(landscape: Landscape) -> Difficulty:
    """Return the difficulty of a table for a search."""
    near = landscape.latency_ms <= landscape.latency_ms[landscape.optimum] * (1 + NEAR_OPTIMUM_SHARE)
    grid = _grid(landscape)
    additive, pairwise = _explained_variance(grid)
    return Difficulty(
        near_optimum=float(near.mean()),
        random_evaluations=_expected_random_evaluations(landscape, near),
        fitness_distance=_fitness_distance(landscape, grid),
        neighbour_correlation=_neighbour_correlation(grid),
        local_optima=_local_optima(landscape, grid),
        additive=additive,
        pairwise=pairwise,
    )


def estimate_drift(landscape: Landscape) -> tuple[float, float]:
    """Return the change of log latency over the recording of a table, and its standard error (infinite if unknown).

    Placements were measured in random order, so a slope over the order in the residuals of a model of single
    dimensions is drift of the machine.
    """
    identity = landscape.identity
    inside = set(identity.tolist())
    first = max((row.number for row in landscape.table.rows.values() if row.number not in inside), default=-1)
    once = np.zeros(len(identity), dtype=bool)
    once[np.unique(identity, return_index=True)[1]] = True  # placements with the same model share one measurement
    used = landscape.allowed & (identity > first) & once
    if used.sum() < 3:
        return 0.0, math.inf
    grid = _grid(landscape)
    grid = grid - grid.mean()
    residuals = (grid - sum(_main_effects(grid))).ravel()[used]
    place = identity[used] - identity[used].mean()
    place = place / np.ptp(place)
    slope = float(place @ residuals / (place @ place))
    errors = residuals - residuals.mean() - slope * place
    return slope, float(np.sqrt(errors @ errors / (len(errors) - 2) / (place @ place)))


def _grid(landscape: Landscape) -> Floats:
    """Return log latency over the choices of each dimension."""
    logs: Floats = np.log(landscape.latency_ms).reshape(landscape.sizes)
    return logs


def _expected_random_evaluations(landscape: Landscape, near: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> float:
    """Return the mean number of models up to the first near-optimal one, in a random order of placements.

    A model of c placements precedes all C near-optimal placements with probability c / (c + C); the mean is 1 plus the
    sum of these over the other models.
    """
    _, place, models = np.unique(landscape.identity, return_index=True, return_inverse=True)
    copies = np.bincount(models)
    far_copies = copies[~near[place]]
    return 1.0 + float((far_copies / (far_copies + int(near.sum()))).sum())


def _fitness_distance(landscape: Landscape, grid: Floats) -> float:
    choices = np.indices(landscape.sizes).reshape(len(landscape.sizes), -1)
    lowest = landscape.latency_ms[landscape.optimum]
    best = np.flatnonzero(landscape.allowed & (landscape.latency_ms <= lowest))
    distance = np.min([(choices != choices[:, [index]]).sum(axis=0) for index in best], axis=0)
    return _correlation(grid.ravel(), distance.astype(float))


def _neighbour_correlation(grid: Floats) -> float:
    """Return Pearson's correlation of log latency over all ordered pairs of neighbours."""
    pairs = [
        (np.take(grid, first, axis=axis).ravel(), np.take(grid, second, axis=axis).ravel())
        for axis, size in enumerate(grid.shape)
        for first, second in itertools.combinations(range(size), 2)
    ]
    first, second = zip(*pairs, strict=True)
    return _correlation(np.concatenate([*first, *second]), np.concatenate([*second, *first]))


def _local_optima(landscape: Landscape, grid: Floats) -> float:
    scores = landscape.scores
    errors = [score.stderr / score.objective if isinstance(score, Score) else 0.0 for score in scores]
    noise = np.array(errors).reshape(grid.shape)
    optimal = np.ones(grid.shape, dtype=bool)
    for axis, size in enumerate(grid.shape):
        for step in range(1, size):
            other, its_noise = np.roll(grid, step, axis=axis), np.roll(noise, step, axis=axis)
            optimal &= other >= grid - 2 * np.hypot(noise, its_noise)
    return float((optimal.ravel() & landscape.allowed).mean())


def _main_effects(grid: Floats) -> list[Floats]:
    """Return the mean over all other dimensions, for each dimension, in a shape that broadcasts over the grid."""
    axes = range(grid.ndim)
    return [grid.mean(axis=tuple(a for a in axes if a != axis), keepdims=True) for axis in axes]


def _explained_variance(grid: Floats) -> tuple[float, float]:
    """Return the shares of variance of first and of second order (Sobol' indices)."""
    if np.ptp(grid) < FLAT_LOG_LATENCY:
        return 1.0, 0.0
    grid = grid - grid.mean()
    total = float(grid.var())
    single, axes, pairs = _main_effects(grid), range(grid.ndim), 0.0
    for first, second in itertools.combinations(axes, 2):
        others = tuple(axis for axis in axes if axis not in (first, second))
        pairs += float((grid.mean(axis=others, keepdims=True) - single[first] - single[second]).var())
    return sum(float(effect.var()) for effect in single) / total, pairs / total


def _correlation(first: Floats, second: Floats) -> float:
    """Return Pearson's correlation; 0 if one side is constant."""
    if min(np.ptp(first), np.ptp(second)) < FLAT_LOG_LATENCY:
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])
