"""Forecast of the further gain of a search, and the stopping rule based on it.

The inputs are three counts: evaluations so far, evaluations since the last gain, and evaluations left. The coefficients
were fitted to replayed searches of `auto` on recorded tables (`experiments/scripts/gain_forecast.py`, which prints the
calibration on held-out models). The posterior of a Gaussian process, as in Wilson 2024 ("Stopping Bayesian optimization
with probabilistic regret bounds"), did not predict the later gains of these searches better.
"""

from __future__ import annotations

import math

WORTHWHILE_GAIN = 0.005
"""Relative gain of latency up to which a search counts as not improved."""
HORIZON = 100
"""Largest number of further evaluations that a forecast covers."""
FIRST_FORECAST = 8
"""Number of evaluations before the first forecast."""
THRESHOLD_SHARE = 0.6
"""Factor on the chance of a gain below which a search stops. The chance is compared after every evaluation, and the
first value below the threshold is on average an underestimate; the factor corrects for that."""
CHANCE_WEIGHTS = (-2.973, 0.08, -0.847, 0.927)
"""Coefficients of `features` for the log odds of a further gain above `WORTHWHILE_GAIN`."""
MEAN_WEIGHTS = (-5.713, -0.205, -0.547, 0.834)
"""Coefficients of `features` for the logarithm of the expected relative gain."""


def features(evaluations: int, since_gain: int, left: int) -> tuple[float, float, float, float]:
    """Return the features of a forecast: 1, log(evaluations), and log(1 + count) of the other two counts."""
    return 1.0, math.log(evaluations), math.log1p(since_gain), math.log1p(min(left, HORIZON))


class GainForecast:
    """Forecast of the further gain of one search.

    Args:
        budget: Number of evaluations of the search.

    Attributes:
        evaluations: Number of evaluations so far.
        evaluations_since_gain: Number of evaluations since the last gain of more than 0.5 %.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._best_ms = self._level_ms = math.inf
        self.evaluations = self.evaluations_since_gain = 0

    def tell(self, latency_ms: float) -> None:
        """Count one evaluation.

        Args:
            latency_ms: Measured latency in milliseconds; infinite after a failure or a violated constraint.
        """
        self.evaluations += 1
        self.evaluations_since_gain += 1
        self._best_ms = min(self._best_ms, latency_ms)
        if self._best_ms < self._level_ms * (1 - WORTHWHILE_GAIN):
            self._level_ms = self._best_ms
            self.evaluations_since_gain = 0

    @property
    def expected_gain(self) -> float | None:
        """Return the expected further gain as a share of the latency; None before 8 evaluations or without a score."""
        return None if not self._is_ready else math.exp(self._dot(MEAN_WEIGHTS))

    def is_spent(self, probability: float) -> bool:
        """Return whether no further gain above 0.5 % is expected with a probability (0 to 1); False if too early."""
        if not self._is_ready:
            return False
        chance = 1 / (1 + math.exp(-self._dot(CHANCE_WEIGHTS)))
        return chance < THRESHOLD_SHARE * (1 - probability)

    @property
    def _is_ready(self) -> bool:
        return self.evaluations >= FIRST_FORECAST and self._best_ms < math.inf

    def _dot(self, weights: tuple[float, ...]) -> float:
        left = max(0, self._budget - self.evaluations)
        counts = features(self.evaluations, self.evaluations_since_gain, left)
        return sum(weight * value for weight, value in zip(weights, counts, strict=True))
