"""Figures of a table agree with calculations by hand, and with chance."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from made_up_tables import outcomes_of

from harness.base.errors import UserError
from harness.measure.records import Failed, Measured, Outcome
from harness.replay.replay import Landscape
from harness.replay.replay_report import estimate_drift, measure_difficulty
from search.api import Failure


def measured(latency_ms: float, **metrics: float) -> Measured:
    return Measured(samples_ms=(latency_ms,) * 7, build_s=0.1, measure_s=0.1, metrics=metrics)


def test_optimum_and_anchors(make_table):
    landscape = Landscape(make_table())
    best = list(landscape.table.subspace.placements())[landscape.optimum]
    assert best.choices == (1, 1, 1, 0, 1, 0)  # the second helps only with the first
    assert landscape.latency_ms[landscape.optimum] == pytest.approx(
        10 * math.exp(-0.4 + 0.3 - 0.4 - 0.2 - 0.05), rel=1e-6
    )
    assert landscape.anchors_ms["float"] == pytest.approx(10.0, rel=1e-6)
    assert set(landscape.anchors_ms) == {"float", "all"}
    assert [landscape.index(p) for p in landscape.table.subspace.placements()] == list(range(64))


def test_variance_decomposition_is_exact(make_table):
    """Of a pair product, half the effect falls to each single dimension and a quarter of it to the pair."""
    difficulty = measure_difficulty(Landscape(make_table()))
    single = np.array([-0.4 - 0.2, 0.3 - 0.2, -0.2, 0.1, -0.05, 0.02]) / 2
    pair = 0.4 / 4
    total = float((single**2).sum() + pair**2)
    assert difficulty["additive"] == pytest.approx((single**2).sum() / total, rel=1e-4)
    assert difficulty["pairwise"] == pytest.approx(pair**2 / total, rel=1e-3)
    assert difficulty["additive"] + difficulty["pairwise"] == pytest.approx(1)


def test_difficulty_separates_smooth_from_random_landscape(make_table):
    rng = np.random.default_rng(1)

    def rough(choices: tuple[int, ...]) -> Outcome:
        return measured(float(np.exp(rng.standard_normal())))

    easy, hard = measure_difficulty(Landscape(make_table())), measure_difficulty(Landscape(make_table(outcome=rough)))
    assert easy["fitness_distance"] > 0.5 > hard["fitness_distance"]
    assert easy["neighbour_correlation"] > 0.5 > hard["neighbour_correlation"]
    assert easy["local_optima"] == pytest.approx(1 / 64)
    assert hard["local_optima"] > 4 / 64
    assert easy["additive"] > 0.9 > hard["additive"]
    assert easy["near_optimum"] == pytest.approx(1 / 64)
    assert easy["random_evaluations"] == pytest.approx(65 / 2)


def test_difficulty_of_flat_table(make_table):
    difficulty = measure_difficulty(Landscape(make_table(outcome=lambda _: measured(3.0))))
    assert difficulty["near_optimum"] == difficulty["local_optima"] == difficulty["additive"] == 1.0
    assert difficulty["random_evaluations"] == 1.0
    assert difficulty["fitness_distance"] == difficulty["neighbour_correlation"] == difficulty["pairwise"] == 0.0


def test_optimum_excludes_failed_and_infeasible_placements(make_table):
    latency_ms = outcomes_of(lambda a, b: None if a and b else 5.0 - a - 0.5 * b, sqnr_db=lambda a, b: 30.0 - 20 * a)
    table = make_table(outcome=latency_ms)
    free, bound = Landscape(table), Landscape(table, ("sqnr_db", 20.0))
    assert free.latency_ms[free.optimum] == pytest.approx(4.0)
    assert free.allowed.sum() == 48
    assert bound.latency_ms[bound.optimum] == pytest.approx(4.5)
    assert bound.allowed.sum() == 32
    assert bound.latency_ms.max() == pytest.approx(5.0)  # the slowest allowed one


def test_infinite_metric_counts_as_failure_under_bound(make_table):
    """The distance from the bound is unknown."""
    table = make_table(outcome=outcomes_of(lambda a, b: 1.0, sqnr_db=lambda a, b: -math.inf if a and b else 20.0))
    landscape = Landscape(table, ("sqnr_db", -1000.0))
    assert landscape.allowed.sum() == 48
    failures = {score.reason for score in landscape.scores if isinstance(score, Failure)}
    assert failures == {"no sqnr_db was recorded"}


def test_bounds_that_no_placement_reaches_are_refused(make_table):
    table = make_table()
    with pytest.raises(UserError, match="no metric 'sqnr' was recorded; did you mean 'sqnr_db'"):
        Landscape(table, ("sqnr", 1.0))
    with pytest.raises(UserError, match="no placement reaches the bound"):
        Landscape(table, ("sqnr_db", 1000.0))
    nothing = make_table(outcome=lambda _: Failed(stage="build", reason="unsupported"))
    with pytest.raises(UserError, match="no placement could be measured"):
        Landscape(nothing)


def test_replayed_readings_are_recorded_samples(make_table):
    landscape = Landscape(make_table(noise=0.1))
    rng = np.random.default_rng(0)
    seen = [landscape.observe(5, rng).objective for _ in range(300)]  # type: ignore[union-attr]
    assert set(seen) <= set(landscape.outcomes[5].samples_ms)  # type: ignore[union-attr]
    assert len(set(seen)) > 3
    assert np.median(seen) == pytest.approx(landscape.latency_ms[5])


def test_drift_is_estimated_despite_random_order(make_table):
    order = [1, *(i for i in np.random.default_rng(4).permutation(65).tolist() if i != 1)]  # first what is outside
    turn = itertools.count()

    def drifting(choices: tuple[int, ...]) -> Outcome:
        return measured(math.exp(-0.4 * choices[0] + 0.1 * next(turn) / 64))

    def shuffled(rows: dict) -> dict:  # type: ignore[type-arg]
        items = [list(rows.items())[i] for i in order]
        turned = [(digest, row, drifting(row.choices)) for digest, row in items]
        return {d: type(r)(number=i, choices=r.choices, outcome=o) for i, (d, r, o) in enumerate(turned)}

    slope, stderr = estimate_drift(Landscape(make_table(anchors={}, rows=shuffled)))
    assert slope == pytest.approx(0.1, abs=3 * stderr)
    assert 0 < stderr < 0.03
    slope, stderr = estimate_drift(Landscape(make_table(noise=0.05)))
    assert abs(slope) < 3 * stderr
