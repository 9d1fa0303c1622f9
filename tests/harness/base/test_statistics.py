from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.base.statistics import (
    Interval,
    block_ci,
    median_ci,
    noise_floor_from_ratios,
    paired_ratio_ci,
    speedup_verdict,
    stderr_of_median,
)  # fmt: skip

READINGS = st.lists(st.floats(min_value=1e-3, max_value=1e3), min_size=1, max_size=60)


def interval(value: float, low: float, high: float) -> Interval:
    return Interval(value=value, low=low, high=high)


def test_median_interval_of_few_samples_is_their_range():
    assert median_ci([3.0, 1.0, 2.0]) == interval(2.0, 1.0, 3.0)
    assert median_ci([4.0]) == interval(4.0, 4.0, 4.0)
    assert median_ci([1.0, 2.0, 3.0, 4.0, 9.0]) == interval(3.0, 1.0, 9.0)


def test_median_interval_between_two_order_statistics():
    # n = 10: ranks 1 to 10 cover 0.9980, 2 to 9 cover 0.9785, 3 to 8 cover 0.8906 (binomial table).
    # For 0.95, share = (0.9785 - 0.95) / (0.9785 - 0.8906) and weight = 8 share / (2 + 6 share).
    share = (0.978515625 - 0.95) / (0.978515625 - 0.890625)
    weight = 8 * share / (2 + 6 * share)
    found = median_ci(range(1, 11))
    assert found.value == 5.5
    assert found.low == pytest.approx(2 + weight)
    assert found.high == pytest.approx(9 - weight)


def test_median_interval_needs_a_sample():
    with pytest.raises(ValueError, match="a median needs at least one sample"):
        median_ci([])


@given(READINGS, st.floats(min_value=0.1, max_value=10))
def test_median_interval_contains_the_median_and_scales(samples, factor):
    found, scaled = median_ci(samples), median_ci([factor * value for value in samples])
    assert min(samples) <= found.low <= found.value <= found.high <= max(samples)
    assert found.value == np.median(samples)
    assert [scaled.low, scaled.value, scaled.high] == pytest.approx(
        [factor * found.low, factor * found.value, factor * found.high]
    )


@pytest.mark.parametrize("count", [7, 11, 30, 101])
def test_median_interval_has_nominal_coverage(count):
    rng = np.random.default_rng(count)
    hits = [median_ci(np.exp(0.1 * row)) for row in rng.standard_normal((2000, count))]
    assert np.mean([found.low <= 1 <= found.high for found in hits]) == pytest.approx(0.95, abs=0.02)


def test_standard_error_of_the_median_is_that_of_theory():
    rng = np.random.default_rng(0)
    errors = [stderr_of_median(rng.standard_normal(101)) for _ in range(200)]
    assert np.mean(errors) == pytest.approx(np.sqrt(np.pi / 2 / 101), rel=0.1)
    assert stderr_of_median([5.0]) == 0.0


@pytest.mark.parametrize(("between", "within"), [(0.0, 0.01), (0.005, 0.005), (0.02, 0.001)])
@pytest.mark.parametrize("builds", [3, 5])
def test_paired_ratio_interval_has_nominal_coverage(builds, between, within):
    rng = np.random.default_rng(builds)
    hits = 0
    for _ in range(500):
        base, own = (
            10 * np.exp(between * rng.standard_normal((builds, 1)) + within * rng.standard_normal((builds, 6)))
            for _ in range(2)
        )
        found = paired_ratio_ci(list(base), list(own / 1.5))
        hits += found.low <= 1.5 <= found.high
    assert hits / 500 == pytest.approx(0.95, abs=0.025)


def test_ratios_without_noise_are_exact():
    found = paired_ratio_ci([[3.0, 3.0], [6.0, 6.0], [4.0, 4.0]], [[2.0, 2.0], [4.0, 4.0], [8 / 3, 8 / 3]])
    assert [found.low, found.value, found.high] == pytest.approx([1.5] * 3)


def test_block_interval_of_one_build_uses_rounds():
    found = block_ci([[1.0, 1.1, 0.9, 1.0]])
    assert found.low < 1 < found.high
    assert block_ci([[2.0]]) == interval(pytest.approx(2.0), 0.0, float("inf"))


def test_block_interval_is_robust_to_outlier_round():
    quiet = block_ci([[1.0, 1.0, 1.0], [1.01, 1.01, 1.01], [0.99, 0.99, 0.99]])
    assert block_ci([[1.0, 1.0, 50.0], [1.01, 1.01, 1.01], [0.99, 0.99, 0.99]]) == quiet


@pytest.mark.parametrize("builds", [[], [[]], [[1.0, 0.0]], [[1.0], [-1.0]], [[float("nan")]]])
def test_block_interval_rejects_nonpositive_readings(builds):
    with pytest.raises(ValueError, match="an interval needs readings, all of them positive"):
        block_ci(builds)


def test_paired_ratio_needs_equal_rounds():
    with pytest.raises(ValueError, match="the same rounds on both sides"):
        paired_ratio_ci([[1.0, 2.0]], [[1.0]])


def test_noise_floor_covers_gains_in_both_directions():
    assert noise_floor_from_ratios([]) == 0.0
    assert noise_floor_from_ratios([1.0, 1.0]) == 0.0
    assert noise_floor_from_ratios([1.0, 1 / 1.04, 1.01]) == pytest.approx(0.04)
    assert noise_floor_from_ratios([1.0] * 99 + [2.0]) == 0.0


@pytest.mark.parametrize(
    ("speedup", "noise_floor", "expected"),
    [
        (interval(1.5, 1.4, 1.6), 0.0, "faster"),
        (interval(0.8, 0.7, 0.9), 0.0, "slower"),
        (interval(1.5, 0.9, 2.4), 0.0, "tie"),
        (interval(1.009, 1.008, 1.010), 0.0, "tie"),
        (interval(1.03, 1.02, 1.04), 0.05, "tie"),
        (interval(0.97, 0.96, 0.98), 0.05, "tie"),
        (interval(1.06, 1.02, 1.10), 0.05, "faster"),
        (interval(0.951, 0.94, 0.96), 0.05, "slower"),
    ],
)
def test_speedup_verdict_by_interval_and_noise_floor(speedup, noise_floor, expected):
    assert speedup_verdict(speedup, noise_floor) == expected
    swapped = {"faster": "slower", "slower": "faster", "tie": "tie"}
    inverse = interval(1 / speedup.value, 1 / speedup.high, 1 / speedup.low)
    assert speedup_verdict(inverse, noise_floor) == swapped[expected]
