from __future__ import annotations

import numpy as np
import pytest

from harness.api import Accuracy
from harness.records import Measured
from harness.report.cross_fitting import FOLDS, choose_cross_fitted, cross_fitted_drop

SAMPLES = 40


def placement(latency_ms: float, wrong: list[int]) -> Measured:
    per_item = tuple(float(i not in wrong) for i in range(SAMPLES))
    return Measured(
        samples_ms=(latency_ms,) * 3,
        build_s=1.0,
        measure_s=1.0,
        metrics={"top1": float(np.mean(per_item))},
        per_item=per_item,
    )


REFERENCE = Accuracy(metrics={"top1": 1.0}, per_item=(1.0,) * SAMPLES)


def test_a_fold_chooses_the_fastest_that_keeps_the_bound_on_the_others() -> None:
    lucky = np.zeros(SAMPLES)
    lucky[::FOLDS] = 1.0  # all its errors are in the first fold
    losses = np.array([lucky, np.zeros(SAMPLES)])
    assert choose_cross_fitted([1.0, 2.0], losses, 0.1) == [0, 1, 1, 1, 1]
    assert choose_cross_fitted([1.0], losses[:1], 0.1) == [0, None, None, None, None]


def test_a_choice_by_luck_loses_more_on_samples_that_took_no_part() -> None:
    steady = placement(2.0, [])
    lucky = placement(1.0, list(range(0, SAMPLES, FOLDS)))
    found = cross_fitted_drop([lucky, steady], REFERENCE, "top1", 0.1, higher_is_better=True)
    assert found is not None
    assert found.interval.value == pytest.approx(8 / SAMPLES)
    assert found.interval.low < found.interval.value < found.interval.high
    always = cross_fitted_drop([placement(1.0, [3]), steady], REFERENCE, "top1", 0.1, higher_is_better=True)
    assert always is not None
    assert always.interval.value == pytest.approx(1 / SAMPLES)
    loss = cross_fitted_drop([placement(1.0, [3]), steady], REFERENCE, "top1", 0.1, higher_is_better=False)
    assert loss is not None
    assert loss.interval.value == pytest.approx(-1 / SAMPLES)


def test_without_figures_of_samples_there_is_none() -> None:
    few = Accuracy(metrics={"top1": 1.0}, per_item=(1.0,) * 10)
    assert cross_fitted_drop([placement(1.0, [])], few, "top1", 0.1, higher_is_better=True) is None
    assert cross_fitted_drop([], REFERENCE, "top1", 0.1, higher_is_better=True) is None
