"""What one more evaluation is worth where a front of two objectives is searched."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search.acquisition import (
    FeatureExtractor,
    GaussianProcess,
    SurrogateModel,
    expected_hypervolume_improvement,
    front_with_reference,
    signed_violations,
)
from search.algorithms.surrogate import ExtraTrees
from search.api import Dimension, Edge, Failure, Observation, Placement, Score, Space
from search.archive import Archive
from search.moves import move_sets, next_inputs
from search.pareto import hypervolume
from search.testing import SyntheticObjective, synthetic_space

LEVELS = st.integers(0, 8).map(float)


def grown(front, points):
    attained, reference = front
    before = hypervolume(attained, reference)
    return np.array([hypervolume([*attained, point], reference) - before for point in points])


def made(*points):
    return front_with_reference(np.array(points), np.array(points))


@settings(max_examples=80)
@given(st.lists(st.tuples(LEVELS, LEVELS), min_size=1, max_size=8))
def test_expected_hypervolume_improvement_exact_without_variance(points):
    front = made((0.0, 8.0), (2.0, 3.0), (3.0, 2.5), (4.0, 4.0), (8.0, 0.0), (8.0, 0.0))
    candidates = np.array(points) + 0.25
    found = expected_hypervolume_improvement(*front, candidates.T, np.full((2, len(points)), 1e-9))
    assert found == pytest.approx(grown(front, candidates), abs=1e-6)


def test_expected_hypervolume_improvement_equals_monte_carlo_mean():
    front = made((1.0, 4.0), (2.0, 2.0), (5.0, 1.0))
    mean, deviation = np.array([[2.0, 4.0, 6.0], [3.0, 0.5, 6.0]]), np.array([[0.5, 1.0, 1.0], [1.0, 0.3, 1.0]])
    draws = np.random.default_rng(0).normal(size=(2000, 2))
    for column, found in enumerate(expected_hypervolume_improvement(*front, mean, deviation)):
        volumes = grown(front, mean[:, column] + deviation[:, column] * draws)
        assert found == pytest.approx(volumes.mean(), abs=4 * volumes.std() / np.sqrt(len(draws)) + 1e-3)


def test_expected_improvement_of_single_point_and_equal_points():
    for front in (
        made((2.0, 3.0)),
        made(*[(2.0, 3.0)] * 3),
        front_with_reference(np.array([(2.0, 3.0)]), np.array([(2.0, 3.0), (9.0, 0.0)])),
    ):
        better, worse = expected_hypervolume_improvement(
            *front, np.array([[1.0, 3.0], [2.0, 4.0]]), np.full((2, 2), 1e-6)
        )
        assert better > worse >= 0


def told_both(space, archive, placement, latency_ms, loss, **facts):
    score = Score(objective=latency_ms, objectives=(latency_ms, loss), **facts)
    archive.tell(Observation(placement=placement, digest=space.digest(placement), outcome=score))


def archive_with_a_gap(space):
    """Latency falls and loss rises with every point quantized, and the middle is not evaluated."""
    archive = Archive()
    count = len(space)
    for on in (0, 1, 2, count - 2, count - 1, count):
        told_both(space, archive, Placement((1,) * on + (0,) * (count - on)), 10.0 - 0.5 * on, 0.02 * on)
    return archive


def test_acquisition_prefers_gap_in_front():
    space = synthetic_space(10, groups=2)
    advisor, archive = SurrogateModel(space), archive_with_a_gap(space)
    advisor.fit(archive)
    middle, second = Placement((1,) * 5 + (0,) * 5), Placement((0, 1) + (0,) * 8)
    advice = advisor.score([middle, second])
    assert advice.acquisition[0] > advice.acquisition[1]


def test_pending_placement_joins_front():
    space = synthetic_space(10, groups=2)
    advisor, archive = SurrogateModel(space), archive_with_a_gap(space)
    middle = Placement((1,) * 5 + (0,) * 5)
    advisor.fit(archive)
    before = advisor.score([middle]).acquisition[0]
    archive.ask(1, lambda: middle, space)
    advisor.fit(archive)
    assert advisor.score([middle]).acquisition[0] < 0.5 * before


def test_pending_placement_predicted_infeasible_stays_off_front():
    """Else it would hide what may still be found behind it."""
    space = synthetic_space(10, groups=2)
    archive = Archive()
    for on in range(10):
        placement, loss = Placement((1,) * on + (0,) * (10 - on)), 0.02 * on
        broken = max(0.0, loss - 0.1)
        told_both(space, archive, placement, 10.0 - 0.5 * on, loss, violation=broken, metrics={"top1": 0.9 - loss})
    advisor, candidate = SurrogateModel(space), Placement((0, 1, 1) + (0,) * 7)
    advisor.fit(archive)
    before = advisor.score([candidate]).acquisition
    archive.ask(1, space.quantize_all, space)
    advisor.fit(archive)
    front = advisor._front
    assert front is not None
    assert front[0][:, 1].max() <= 0.1 + 1e-9
    assert before[0] >= 0


def test_infeasible_placement_stays_off_front():
    space = synthetic_space(10, groups=2)
    archive = Archive()
    told_both(space, archive, space.float_placement(), 10.0, 0.0)
    told_both(space, archive, space.quantize_all(), 5.0, 0.3, violation=0.2, metrics={"top1": 0.5})
    advisor = SurrogateModel(space)
    advisor.fit(archive)
    assert advisor.constrained
    near_float, near_all = Placement((1,) + (0,) * 9), Placement((0,) + (1,) * 9)
    worth = advisor.score([near_float, near_all]).acquisition
    assert (worth >= 0).all()
    assert worth[0] > 0


SPACE = synthetic_space(24, groups=5, precisions=("int8", "fp8"), seed=2)


def told(space, placements, outcomes):
    archive = Archive()
    for placement, outcome in zip(placements, outcomes, strict=True):
        archive.tell(Observation(placement=placement, digest=space.digest(placement), outcome=outcome))
    return archive


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_feature_keys_are_equal_iff_graphs_are_equal(first, second):
    a, b = (SPACE.random(np.random.default_rng(seed)) for seed in (first, second))
    later = Placement((*a.choices[:-1], b.choices[-1]))
    described = FeatureExtractor(SPACE)([a, b, later])
    keys = described.keys()
    for i, j, same in ((0, 1, SPACE.digest(a) == SPACE.digest(b)), (0, 2, SPACE.digest(a) == SPACE.digest(later))):
        assert (keys[i] == keys[j]) == same
    assert np.isfinite(described.roles).all()


def test_move_sets_include_roles_with_next_inputs():
    roles = ("linear", "other", "linear", "add")
    space = Space(
        tuple(
            Dimension(
                name=f"d{i}", group="g", kind="node_input", choices=("float", "int8"),
                edges=(Edge(f"t{i}", f"n{i}", 0),), role=role, cost=0.5 * (role == "linear"),
            )
            for i, role in enumerate(roles)
        )
    )  # fmt: skip
    assert next_inputs(space) == {0: 1, 1: 2, 2: 3}
    wide, _, points = move_sets(space)
    assert {(0, 2), (1, 3), (0, 1, 2, 3)} <= set(wide), "linear, what reads its results, both"
    everything = [block for stage in move_sets(space) for block in stage]
    assert len(everything) == len(set(everything)), "no block comes twice"
    assert all(block in everything for block in ((0,), (1,), (2,), (3,)))
    assert len(points) < 4, "a role with one point is a block already"


def test_next_input_belongs_to_another_node():
    """Both inputs of an addition are followed by what comes after it."""
    consumers = ("conv", "add", "add", "concat", "concat", "concat", "last")
    space = Space(
        tuple(
            Dimension(
                name=f"d{i}", group="g", kind="node_input", choices=("float", "int8"), edges=(Edge(f"t{i}", node, i),)
            )
            for i, node in enumerate(consumers)
        )
    )  # fmt: skip
    assert next_inputs(space) == {0: 1, 1: 3, 2: 3, 3: 6, 4: 6, 5: 6}


def test_prediction_is_accurate_and_more_certain_on_training_data():
    space = synthetic_space(24, groups=6, seed=1)
    objective = SyntheticObjective(space, seed=1)
    rng = np.random.default_rng(0)
    placements = [space.random(rng) for _ in range(90)]
    values = np.log([objective.latency_ms(p) for p in placements])
    features, model = FeatureExtractor(space), GaussianProcess()
    model.fit(features(placements[:60]), values[:60], np.full(60, 0.01))
    mean, deviation = model.predict(features(placements[60:]))
    assert np.corrcoef(mean, values[60:])[0, 1] > 0.8
    assert np.abs((mean - values[60:]) / deviation).mean() < 2
    _, known = model.predict(features(placements[:60]))
    assert known.mean() < deviation.mean()


@pytest.mark.parametrize("order", [range(40), range(39, -1, -1), [*range(20), *range(30, 40)], range(10)])
def test_refit_equals_fresh_fit(order):
    space = synthetic_space(24, groups=6, seed=1)
    rng = np.random.default_rng(0)
    rows = FeatureExtractor(space)([space.random(rng) for _ in range(40)])
    values, errors = rng.normal(size=40), np.full(40, 0.1)
    again, fresh = GaussianProcess(), GaussianProcess()
    again.fit(rows[:25], values[:25], errors[:25])
    chosen = list(order)
    smooth = again.fit(rows[chosen], values[chosen], errors[chosen])
    assert smooth == pytest.approx(fresh.fit(rows[chosen], values[chosen], errors[chosen]))
    assert smooth == pytest.approx(again.predict(rows[chosen])[0]), "what a fit expects is what it predicts"
    assert np.array(again.predict(rows)) == pytest.approx(np.array(fresh.predict(rows)))


def test_signed_violations_infer_bound_from_metrics():
    scores = [
        Score(objective=9.0, metrics={"loss": 1.0, "top1": 0.75}),
        Score(objective=5.0, violation=0.04, metrics={"loss": 1.3, "top1": 0.70}),
        Score(objective=4.0, violation=0.14, metrics={"loss": 1.1, "top1": 0.60}),
        Score(objective=9.5, assumed=True),
    ]
    signed = signed_violations(scores)
    assert signed[:3] == pytest.approx([-0.01, 0.04, 0.14]), "float has 0.01 to spare: the bound is 0.74"
    assert np.isnan(signed[3])


def test_signed_violations_infer_bound_despite_proxy_rejections():
    scores = [
        Score(objective=9.0, metrics={"proxy": 30.0, "top1": 0.75}),
        Score(objective=5.0, violation=0.04, metrics={"proxy": 22.0, "top1": 0.70}),
        Score(objective=4.0, violation=0.14, metrics={"proxy": 21.0, "top1": 0.60}),
        Score(objective=3.0, violation=0.30, metrics={"proxy": 4.0, "believed": 0.44}),
    ]
    assert signed_violations(scores) == pytest.approx([-0.01, 0.04, 0.14, 0.30])


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (Score(objective=4.0, assumed=True), [0.0, 0.05]),  # either may be behind it
        (Score(objective=4.0, violation=0.10, metrics={"proxy": 19.0, "top1": 0.65}), [-0.05, 0.05]),
    ],
)
def test_signed_violations_with_ambiguous_metric(second, expected):
    scores = [
        Score(objective=9.0, metrics={"proxy": 30.0, "top1": 0.80}),
        Score(objective=5.0, violation=0.05, metrics={"proxy": 22.0, "top1": 0.70}),
        second,
    ]
    assert signed_violations(scores)[:2] == pytest.approx(expected)


def test_signed_violations_without_matching_metric_are_unchanged():
    scores = [Score(objective=1.0), Score(objective=1.0, violation=0.3), Score(objective=1.0, violation=0.1)]
    assert signed_violations(scores).tolist() == [0.0, 0.3, 0.1]


def test_surrogate_avoids_failures_and_constraint_violations():
    space = synthetic_space(20, groups=4, seed=0)
    rng = np.random.default_rng(0)
    placements = [space.float_placement(), *(space.random(rng) for _ in range(40))]
    first, second = [int(d.kind == "node_input") for d in space.dimensions].index(1), len(space) - 1

    def outcome(p):
        if p.choices[first]:
            return Failure(stage="build", reason="no")
        return Score(objective=5.0, violation=0.1 * p.choices[second], metrics={"top1": 0.9 - 0.1 * p.choices[second]})

    advisor = SurrogateModel(space)
    advisor.fit(told(space, placements, [outcome(p) for p in placements]))
    assert advisor.constrained
    fresh = [space.random(rng) for _ in range(60)]
    advice = advisor.score(fresh)
    best = [fresh[index] for index in np.argsort(-advice.acquisition)[:10]]
    assert sum(p.choices[first] for p in best) <= 2
    assert sum(p.choices[second] for p in best) <= 2


def test_forest_weighs_measured_rows_above_pending_rows():
    """An error of 0 is one that is not known, and must not outweigh those that are."""
    space = synthetic_space(20, groups=4, seed=0)
    rng = np.random.default_rng(0)
    rows = FeatureExtractor(space)([space.random(rng) for _ in range(30)])
    values, errors = np.array([0.0] * 10 + [1.0] * 20), np.array([0.01] * 10 + [0.0] * 20)
    assert ExtraTrees(0).fit(rows, values, errors)[:10].mean() < 0.4


class Counting:
    """Predicts that each quantized atom saves the same, independent of the outcomes."""

    def fit(self, rows, values, errors):
        return self.predict(rows)[0]

    def predict(self, rows):
        return -0.1 * rows.states.sum(axis=1).astype(float), np.full(len(rows.states), 0.1)


def test_pending_faster_placement_lowers_acquisition_of_others():
    space = synthetic_space(20, groups=4, seed=2)
    archive = told(space, [space.float_placement()], [Score(objective=1.0)])
    awaited, other = space.quantize_all(), space.random(np.random.default_rng(0))
    advisor = SurrogateModel(space, Counting)
    advisor.fit(archive)
    before = advisor.score([other]).acquisition[0]
    archive.ask(1, lambda: awaited, space)
    advisor.fit(archive)
    assert 0 < advisor.score([other]).acquisition[0] < before
