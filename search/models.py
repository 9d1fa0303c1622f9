"""Regression with uncertainty from few noisy placements: an additive and pairwise Gaussian process.

Rasmussen and Williams 2006, "Gaussian Processes for Machine Learning": algorithm 2.1 for the posterior, eq. 5.8 for the
marginal likelihood. A linear kernel is Bayesian ridge regression on its features (their section 2.1), so this is one
ridge regression over point, role, pattern and border features, with a remainder that knows only which are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from search.features import Described

__all__ = ["ADDITIVE", "GaussianProcess", "Regressor", "Vector"]

Vector = npt.NDArray[np.float64]
Matrix = npt.NDArray[np.float64]

MIX = (2.0, 1.0, 1.0, 1.0, 1.0, 1.0)
"""Relative prior variances of the kernel's parts: roles, scopes, points, pairs, borders, likeness. Chosen by predicting
held-out placements of four zoo spaces; the best part differs by model, and the sum is never far behind it."""
ADDITIVE = (0.3, 1.0, 2.0, 0.2, 0.2, 0.3)
"""The same for what adds up over points more than latency does: the loss of accuracy."""
NUGGETS = (1e-3, 1e-2, 6e-2)
"""Variance that no feature explains, relative to that of the observations; chosen by marginal likelihood."""


class Regressor(Protocol):
    """Learns values of placements and says how sure it is."""

    def fit(self, rows: Described, values: Vector, errors: Vector) -> None:
        """Forget what was learned, and learn values with their standard errors."""
        ...

    def predict(self, rows: Described) -> tuple[Vector, Vector]:
        """Expected value and standard deviation of each row."""
        ...


@dataclass(frozen=True, slots=True)
class _Fitted:
    rows: Described
    mean: float
    scale: float
    mix: Vector
    inverse: Matrix
    weights: Vector


class GaussianProcess:
    """See the module. Values are standardised, and the kernel is scaled to explain their variance.

    Args:
        mix: Relative prior variances of the kernel's parts.
    """

    def __init__(self, mix: Sequence[float] = MIX) -> None:
        self._mix = np.array(mix)
        self._fitted: _Fitted | None = None

    def fit(self, rows: Described, values: Vector, errors: Vector) -> None:
        """See `Regressor`."""
        mean, scale = float(values.mean()), max(float(values.std()), 1e-9)
        targets, noise = (values - mean) / scale, (errors / scale) ** 2
        parts = _kernels(rows, rows)
        kernel = np.tensordot(self._mix, parts, axes=1)
        mix = self._mix / max(float(np.trace(kernel) / len(kernel) - kernel.mean()), 1e-6)
        kernel = np.tensordot(mix, parts, axes=1)
        solved = [_solved(kernel + np.diag(nugget + noise), targets) for nugget in NUGGETS]
        _, root, weights = max(solved, key=lambda found: found[0])
        inverse = np.asarray(np.linalg.inv(root), dtype=np.float64)
        self._fitted = _Fitted(rows, mean, scale, mix, inverse, weights)

    def predict(self, rows: Described) -> tuple[Vector, Vector]:
        """See `Regressor`."""
        fitted = self._fitted
        if fitted is None:
            raise ValueError("predict needs a fit first")
        across = np.tensordot(fitted.mix, _kernels(rows, fitted.rows), axes=1)
        inner = fitted.inverse @ across.T
        variance = np.maximum(fitted.mix @ _diagonals(rows) - (inner**2).sum(axis=0), 1e-10)
        return fitted.mean + fitted.scale * (across @ fitted.weights), fitted.scale * np.sqrt(variance)


def _solved(covariance: Matrix, targets: Vector) -> tuple[float, Matrix, Vector]:
    """Log marginal likelihood but for a constant, Cholesky root of the covariance, weights of the observations."""
    root: Matrix = np.asarray(np.linalg.cholesky(covariance), dtype=np.float64)
    weights: Vector = np.asarray(np.linalg.solve(covariance, targets), dtype=np.float64)
    evidence = -0.5 * float(targets @ weights) - float(np.log(np.diag(root)).sum())
    return round(evidence, 6), root, weights  # rounded: another library's last bit must not choose another nugget


def _kernels(a: Described, b: Described) -> Matrix:
    """All parts of the kernel [parts, rows of a, rows of b], each of about unit variance."""
    shares = a.roles @ b.roles.T
    distance = _squares(a.points)[:, None] + _squares(b.points) - 2 * a.points @ b.points.T
    return np.stack([
        np.exp(-0.5 * np.maximum(_squares(a.roles)[:, None] + _squares(b.roles) - 2 * shares, 0.0)),
        a.scopes @ b.scopes.T,
        a.points @ b.points.T,
        a.pairs @ b.pairs.T,
        a.borders @ b.borders.T / max(a.borders.shape[1], 1),
        np.exp(-4.0 * np.sqrt(np.maximum(distance, 0.0))),
    ])  # fmt: skip


def _diagonals(rows: Described) -> Matrix:
    ones = np.ones(len(rows.states))
    borders = _squares(rows.borders) / max(rows.borders.shape[1], 1)
    return np.stack([ones, _squares(rows.scopes), _squares(rows.points), _squares(rows.pairs), borders, ones])


def _squares(rows: Matrix) -> Vector:
    squares: Vector = np.einsum("ij,ij->i", rows, rows)
    return squares
