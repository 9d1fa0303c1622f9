"""The forecast of a search's further gain: from readings alone, calibrated on recorded tables."""

import math

import pytest

from search.gain_forecast import FIRST_FORECAST, GainForecast


def forecast_of(readings_ms, budget=100):
    forecast = GainForecast(budget)
    for latency_ms in readings_ms:
        forecast.tell(latency_ms)
    return forecast


def test_forecast_needs_enough_finite_readings():
    assert forecast_of([10.0] * (FIRST_FORECAST - 1)).expected_gain is None
    assert forecast_of([math.inf] * 20).expected_gain is None
    assert not forecast_of([math.inf] * 20).is_spent(0.5)
    assert forecast_of([10.0] * FIRST_FORECAST).expected_gain > 0


@pytest.mark.parametrize(("small", "large"), [
    ([10.0] * 40, [10.0] * 20),  # a longer wait
    ([10.0, *[9.0] * 39], [*[10.0] * 38, 9.0, 9.0]),  # an older gain
])  # fmt: skip
def test_expected_gain_falls_with_evaluations_since_gain(small, large):
    assert forecast_of(small).expected_gain < forecast_of(large).expected_gain


def test_gain_within_noise_does_not_count():
    forecast = forecast_of([10.0, *[9.99] * 9])
    assert forecast.evaluations_since_gain == 9
    forecast.tell(9.9)
    assert forecast.evaluations_since_gain == 0


def test_search_ends_earlier_at_lower_probability_and_budget():
    def end(probability, budget=100):
        return next(n for n in range(1, budget + 1) if forecast_of([10.0] * n, budget).is_spent(probability))

    assert FIRST_FORECAST <= end(0.8) < end(0.9) < end(0.95) < 100
    assert end(0.9, budget=50) < 50
