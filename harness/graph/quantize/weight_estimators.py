"""Range estimators of weights; plug-ins add one by an entry point of `qdq.weight_estimators`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float32]
_SHRINK_FACTORS = np.linspace(0.5, 1.0, 51)[::-1]


class WeightEstimator(Protocol):
    """Estimator of the magnitude that the largest stored value (127 for INT8) represents, by channel."""

    def __call__(self, rows: Rows, quantize: Callable[[Rows], Rows]) -> Rows:
        """Return a magnitude of at least 0 for each channel.

        Args:
            rows: Weights with shape [channels, values]; one channel if the tensor has one scale.
            quantize: Function that quantizes and dequantizes `rows` with given magnitudes.
        """
        ...


def max_magnitude(rows: Rows, quantize: Callable[[Rows], Rows]) -> Rows:
    """Return the largest magnitude of each channel, so that no value is clipped; 0 for an empty channel."""
    return np.asarray(np.abs(rows).max(axis=1, initial=0), np.float32)


def least_squares(rows: Rows, quantize: Callable[[Rows], Rows]) -> Rows:
    """Return for each channel the magnitude with the smallest squared error, of 51 from half to all of the largest one.

    The grid search of Nagel et al. 2021, "A white paper on neural network quantization", arXiv:2106.08295, section
    3.1 (equation 19), with the largest magnitude where several errors are equal.
    """
    largest = np.abs(rows).max(axis=1, initial=0)
    best, error = largest, np.full(len(rows), np.inf)
    for factor in _SHRINK_FACTORS:
        magnitudes = np.asarray(largest * factor, np.float32)
        found = np.square(rows - quantize(magnitudes), dtype=np.float64).sum(axis=1)
        best, error = np.where(found < error, magnitudes, best), np.minimum(found, error)
    return np.asarray(best, np.float32)


class WeightEstimatorContract:
    """Tests of the contract of a weight estimator.

    Derive a class from it, set `estimator` to a `WeightEstimator`, such as a function, and run pytest.
    """

    estimator: Any

    def _magnitudes(self, rows: Rows) -> Rows:
        def quantize(magnitudes: Rows) -> Rows:
            scale = np.maximum(magnitudes, 1e-10)[:, None] / 127
            return np.asarray(np.clip(np.rint(rows / scale), -127, 127) * scale, np.float32)

        return np.asarray(type(self).estimator(rows, quantize))

    def test_one_magnitude_a_channel_within_the_largest(self) -> None:
        rows = np.random.default_rng(0).normal(0, 1, (5, 64)).astype(np.float32)
        found = self._magnitudes(rows)
        assert found.shape == (5,), "one magnitude for each channel"
        assert (found > 0).all(), "a channel with values has a magnitude above 0"
        assert (found <= np.abs(rows).max(axis=1) * 1.001).all(), "no magnitude is beyond the largest value"

    def test_channels_are_independent(self) -> None:
        rows = np.random.default_rng(1).standard_t(2, (4, 50)).astype(np.float32)
        alone = np.concatenate([self._magnitudes(row[None]) for row in rows])
        np.testing.assert_allclose(self._magnitudes(rows), alone, rtol=1e-6)

    def test_a_channel_of_zeros_and_one_without_values(self) -> None:
        assert self._magnitudes(np.zeros((2, 3), np.float32)).tolist() == [0, 0]
        assert self._magnitudes(np.zeros((1, 0), np.float32)).tolist() == [0]

    def test_the_weights_are_not_changed(self) -> None:
        rows = np.random.default_rng(2).normal(0, 1, (3, 9)).astype(np.float32)
        before = rows.copy()
        self._magnitudes(rows)
        np.testing.assert_array_equal(rows, before)
