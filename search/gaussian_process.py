"""Regression with uncertainty from few noisy placements: an additive and pairwise Gaussian process.

Rasmussen and Williams 2006, "Gaussian Processes for Machine Learning": algorithm 2.1 for the posterior, eq. 5.8 for the
marginal likelihood. A linear kernel is Bayesian ridge regression on its features (their section 2.1), so the model is
one ridge regression on point, role, pattern and border features, plus terms that depend only on the distance between
two placements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_solve, cholesky, solve_triangular

from search.placement_features import FeatureRows

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


class GaussianProcess:
    """Gaussian process on features of placements.

    Values are standardised, and the kernel is scaled to explain their variance. The nugget, the variance that no
    feature explains, is chosen by marginal likelihood.

    Args:
        kernel_weights: Relative prior variances of the kernel's parts.
    """

    def __init__(self, kernel_weights: Sequence[float] = KERNEL_WEIGHTS) -> None:
        self._mix = np.array(kernel_weights)
        self._rows: FeatureRows | None = None
        self._nugget = NUGGET_VARIANCES[0]
        self._fits = 0

    def fit(self, rows: FeatureRows, values: Vector, errors: Vector) -> Vector:
        """Fit the model and choose the nugget; arguments and result as in `Regressor.fit`."""
        self._mean, self._scale = float(values.mean()), max(float(values.std()), 1e-9)
        targets, noise = (values - self._mean) / self._scale, (errors / self._scale) ** 2
        self._fits += 1
        nuggets: tuple[float, ...] = NUGGET_VARIANCES
        if self._rows is not None and len(rows) >= LARGE_FIT_ROWS and self._fits % NUGGET_PERIOD:
            nuggets = (self._nugget,)
        self._kernel = plain = self._extend_kernel(rows)
        self._rows = rows
        explained = max(float(np.trace(plain) / len(plain) - plain.mean()), 1e-6)
        self._scaled_mix, kernel = self._mix / explained, plain / explained
        solved = {nugget: _solve(kernel + np.diag(nugget + noise), targets) for nugget in nuggets}
        self._nugget = max(solved, key=lambda nugget: solved[nugget][0])
        _, self._root, self._weights = solved[self._nugget]
        smooth: Vector = self._mean + self._scale * (kernel @ self._weights)
        return smooth

    def _extend_kernel(self, rows: FeatureRows) -> Matrix:
        """Return the kernel of the rows; values of row pairs of the last fit are reused."""
        kernel, keys = np.empty((len(rows), len(rows))), rows.keys()
        places = {} if self._rows is None else {key: place for place, key in enumerate(self._rows.keys())}
        known = [number for number, key in enumerate(keys) if key in places]
        if known:
            before = [places[keys[number]] for number in known]
            kernel[np.ix_(known, known)] = self._kernel[np.ix_(before, before)]
        fresh = [number for number, key in enumerate(keys) if key not in places]
        block = _kernel(rows[fresh], rows, self._mix)
        kernel[:, fresh] = block.T
        kernel[fresh] = block
        return kernel

    def predict(self, rows: FeatureRows) -> tuple[Vector, Vector]:
        """Return the posterior mean and standard deviation of each row.

        Raises:
            ValueError: `fit` was not called.
        """
        if self._rows is None:
            raise ValueError("predict needs a fit first")
        across = _kernel(rows, self._rows, self._scaled_mix)
        inner = solve_triangular(self._root, across.T, lower=True, check_finite=False)
        ones, borders = np.ones(len(rows)), _squared_norms(rows.borders) / max(rows.borders.shape[1], 1)
        scopes, points, pairs = map(_squared_norms, (rows.scopes, rows.points, rows.pairs))
        prior = self._scaled_mix @ np.stack([ones, scopes, points, pairs, borders, ones])
        variance = np.maximum(prior - (inner**2).sum(axis=0), 1e-10)
        return self._mean + self._scale * (across @ self._weights), self._scale * np.sqrt(variance)


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
    borders = mix[4] / max(a.borders.shape[1], 1) * a.borders
    weighted = np.concatenate([mix[1] * a.scopes, mix[3] * a.pairs, borders], axis=1)
    kernel += weighted @ np.concatenate([b.scopes, b.pairs, b.borders], axis=1).T
    kernel += mix[5] * np.exp(-4.0 * np.sqrt(_squared_distances(a.points, b.points, points)))
    return kernel


def _squared_distances(a: Matrix, b: Matrix, products: Matrix) -> Matrix:
    """Return the squared distances of the rows, computed from their inner products."""
    distances: Matrix = np.maximum(_squared_norms(a)[:, None] + _squared_norms(b) - 2 * products, 0.0)
    return distances


def _squared_norms(rows: Matrix) -> Vector:
    squares: Vector = np.einsum("ij,ij->i", rows, rows)
    return squares
