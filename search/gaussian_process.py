"""Regression with uncertainty from few noisy placements: an additive and pairwise Gaussian process.

Rasmussen and Williams 2006, "Gaussian Processes for Machine Learning": algorithm 2.1 for the posterior, eq. 5.8 for the
marginal likelihood. A linear kernel is Bayesian ridge regression on its features (their section 2.1), so the model is
one ridge regression on point, role, pattern and border features, plus terms that depend only on the distance between
two placements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_solve, cholesky, solve_triangular

from search.placement_features import FeatureRows

__all__ = ["ADDITIVE_KERNEL_WEIGHTS", "GaussianProcess", "Regressor", "Vector"]

Vector = npt.NDArray[np.float64]
Matrix = npt.NDArray[np.float64]

KERNEL_WEIGHTS = (2.0, 1.0, 1.0, 1.0, 1.0, 1.0)
"""Relative prior variances of the kernel's parts: roles, scopes, points, pairs, borders, distance. Chosen by predicting
held-out placements of four zoo spaces; the best single part differs by model, and the sum is almost as good."""
ADDITIVE_KERNEL_WEIGHTS = (0.3, 1.0, 2.0, 0.2, 0.2, 0.3)
"""Relative prior variances for the loss of accuracy, in which the effects of points add up more than in latency."""
NUGGET_VARIANCES = (1e-3, 1e-2, 6e-2)
"""Candidates for the variance that no feature explains, relative to that of the observations."""
LARGE_FIT_ROWS = 300
"""Number of rows from which the nugget is chosen only at every `NUGGET_PERIOD`-th fit, because choosing it takes a
Cholesky decomposition per candidate."""
NUGGET_PERIOD = 10


class Regressor(Protocol):
    """Regression that predicts the value of a placement and its standard deviation."""

    def fit(self, rows: FeatureRows, values: Vector, errors: Vector) -> Vector:
        """Fit the model to data, which replace those of earlier fits.

        Args:
            rows: Features of n placements.
            values: Observed values, shape (n,).
            errors: Standard errors of the values, shape (n,); 0 if unknown.

        Returns:
            Expected values of the rows, shape (n,).
        """
        ...

    def predict(self, rows: FeatureRows) -> tuple[Vector, Vector]:
        """Return the expected value and the standard deviation of each row, both of shape (n,); call `fit` first."""
        ...


@dataclass(frozen=True, slots=True)
class _Posterior:
    """Result of a fit.

    Attributes:
        rows: Features that the model was fitted to.
        kernel: Kernel of the rows, not scaled.
        mean: Mean of the values.
        scale: Standard deviation of the values.
        kernel_weights: Prior variances of the kernel's parts, scaled to explain the variance of the values.
        cholesky_factor: Lower Cholesky factor of the covariance of the values.
        weights: Weights of the rows in a prediction.
        nugget: Chosen variance of `NUGGET_VARIANCES`.
    """

    rows: FeatureRows
    kernel: Matrix
    mean: float
    scale: float
    kernel_weights: Vector
    cholesky_factor: Matrix
    weights: Vector
    nugget: float


class GaussianProcess:
    """Gaussian process on features of placements.

    Values are standardised, and the kernel is scaled to explain their variance. The nugget, the variance that no
    feature explains, is chosen by marginal likelihood.

    Args:
        kernel_weights: Relative prior variances of the kernel's parts.
    """

    def __init__(self, kernel_weights: Sequence[float] = KERNEL_WEIGHTS) -> None:
        self._mix = np.array(kernel_weights)
        self._fitted: _Posterior | None = None
        self._fits = 0

    def fit(self, rows: FeatureRows, values: Vector, errors: Vector) -> Vector:
        """Fit the model and choose the nugget; arguments and result as in `Regressor.fit`."""
        mean, scale = float(values.mean()), max(float(values.std()), 1e-9)
        targets, noise = (values - mean) / scale, (errors / scale) ** 2
        plain = self._extend_kernel(rows)
        explained = max(float(np.trace(plain) / len(plain) - plain.mean()), 1e-6)
        kernel, mix = plain / explained, self._mix / explained
        solved = {n: _solve(kernel + np.diag(n + noise), targets) for n in self._nuggets(len(rows))}
        nugget, (_, root, weights) = max(solved.items(), key=lambda found: found[1][0])
        self._fitted = _Posterior(rows, plain, mean, scale, mix, root, weights, nugget)
        smooth: Vector = mean + scale * (kernel @ weights)
        return smooth

    def _extend_kernel(self, rows: FeatureRows) -> Matrix:
        """Return the kernel of the rows; values of row pairs of the last fit are reused."""
        kernel, keys = np.empty((len(rows), len(rows))), rows.keys()
        fresh = list(range(len(rows)))
        if (last := self._fitted) is not None:
            places = {key: place for place, key in enumerate(last.rows.keys())}
            known = [number for number, key in enumerate(keys) if key in places]
            before = [places[keys[number]] for number in known]
            kernel[np.ix_(known, known)] = last.kernel[np.ix_(before, before)]
            fresh = [number for number, key in enumerate(keys) if key not in places]
        block = _kernel(rows[fresh], rows, self._mix)
        kernel[:, fresh] = block.T
        kernel[fresh] = block
        return kernel

    def _nuggets(self, size: int) -> tuple[float, ...]:
        """Return the nuggets to choose from: all, or in most large fits only that of the last fit."""
        self._fits += 1
        last = self._fitted
        if last is None or size < LARGE_FIT_ROWS or self._fits % NUGGET_PERIOD == 0:
            return NUGGET_VARIANCES
        return (last.nugget,)

    def predict(self, rows: FeatureRows) -> tuple[Vector, Vector]:
        """Return the posterior mean and standard deviation of each row.

        Raises:
            ValueError: `fit` was not called.
        """
        fitted = self._fitted
        if fitted is None:
            raise ValueError("predict needs a fit first")
        across = _kernel(rows, fitted.rows, fitted.kernel_weights)
        inner = solve_triangular(fitted.cholesky_factor, across.T, lower=True, check_finite=False)
        variance = np.maximum(fitted.kernel_weights @ _kernel_diagonals(rows) - (inner**2).sum(axis=0), 1e-10)
        return fitted.mean + fitted.scale * (across @ fitted.weights), fitted.scale * np.sqrt(variance)


def _solve(covariance: Matrix, targets: Vector) -> tuple[float, Matrix, Vector]:
    """Return the log marginal likelihood up to a constant, the Cholesky factor and the weights of the observations."""
    root: Matrix = cholesky(covariance, lower=True, check_finite=False)
    weights: Vector = cho_solve((root, True), targets, check_finite=False)
    evidence = -0.5 * float(targets @ weights) - float(np.log(np.diag(root)).sum())
    return round(evidence, 6), root, weights  # rounded, so that last bits of a BLAS do not change the chosen nugget


def _kernel(a: FeatureRows, b: FeatureRows, mix: Vector) -> Matrix:
    """Return the kernel, shape (rows of a, rows of b): a weighted sum of parts of about unit variance."""
    roles, points = a.roles @ b.roles.T, a.points @ b.points.T
    kernel: Matrix = mix[0] * np.exp(-0.5 * _squared_distances(a.roles, b.roles, roles))
    kernel += mix[2] * points
    kernel += _weighted_features(a, mix) @ np.concatenate([b.scopes, b.pairs, b.borders], axis=1).T
    kernel += mix[5] * np.exp(-4.0 * np.sqrt(_squared_distances(a.points, b.points, points)))
    return kernel


def _weighted_features(rows: FeatureRows, mix: Vector) -> Matrix:
    """Return scope, pair and border features weighted by their prior variances, for one matrix product."""
    borders = mix[4] / max(rows.borders.shape[1], 1)
    return np.concatenate([mix[1] * rows.scopes, mix[3] * rows.pairs, borders * rows.borders], axis=1)


def _squared_distances(a: Matrix, b: Matrix, products: Matrix) -> Matrix:
    """Return the squared distances of the rows, computed from their inner products."""
    distances: Matrix = np.maximum(_squared_norms(a)[:, None] + _squared_norms(b) - 2 * products, 0.0)
    return distances


def _kernel_diagonals(rows: FeatureRows) -> Matrix:
    ones = np.ones(len(rows.states))
    borders = _squared_norms(rows.borders) / max(rows.borders.shape[1], 1)
    return np.stack(
        [ones, _squared_norms(rows.scopes), _squared_norms(rows.points), _squared_norms(rows.pairs), borders, ones]
    )


def _squared_norms(rows: Matrix) -> Vector:
    squares: Vector = np.einsum("ij,ij->i", rows, rows)
    return squares
