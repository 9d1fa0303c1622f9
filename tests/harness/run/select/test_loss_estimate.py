"""Joint estimates of losses: limits, shrinkage, and the choice that they improve."""

from __future__ import annotations

import numpy as np
import pytest

from harness.results.cross_fitting import estimate_losses


def files(losses: list[float], stderr: float, sqnr_db: list[float]) -> list[tuple[float, float, float]]:
    return [(loss, stderr, figure) for loss, figure in zip(losses, sqnr_db, strict=True)]


def test_estimate_keeps_exact_losses():
    assert estimate_losses([]) == []
    assert estimate_losses(files([0.1, -0.02], 0.0, [20, 30])) == [0.1, -0.02]
    measured = [0.1, -0.02, 0.05]
    assert estimate_losses(files(measured, 1e-6, [20, 30, 25])) == pytest.approx(measured, abs=1e-6)


def test_estimate_of_noisy_losses_follows_output_error():
    estimated = estimate_losses(files([0.004, 0.006, 0.002], 0.01, [20, 26.02, 40]))
    assert estimated[0] > estimated[1] > estimated[2] > 0
    assert estimated[0] == pytest.approx(2 * estimated[1], rel=1e-3), "twice the amplitude"


def test_estimate_keeps_loss_far_from_prediction():
    estimated = estimate_losses(files([0.001, 0.002, 0.3], 0.005, [20, 21, 20.5]))
    assert estimated[2] == pytest.approx(0.3, abs=0.01)


def test_estimate_of_negative_losses_is_not_positive():
    assert max(estimate_losses(files([-0.01, -0.012, -0.009], 0.01, [20, 21, 22]))) <= 0


def test_estimate_has_lower_error_than_measurement():
    rng = np.random.default_rng(0)
    worse = []
    for _ in range(200):
        sqnr_db = rng.uniform(15, 30, 8)
        truth = 0.1 * 10 ** (-sqnr_db / 20) + rng.normal(0, 0.001, 8)
        measured = truth + rng.normal(0, 0.008, 8)
        estimated = np.array(estimate_losses(files(measured.tolist(), 0.008, sqnr_db.tolist())))
        worse.append(np.mean((estimated - truth) ** 2) / np.mean((measured - truth) ** 2))
    assert np.mean(worse) < 0.5
