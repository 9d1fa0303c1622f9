"""What one more evaluation is worth where a front of two objectives is searched."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search.acquisition import SurrogateModel, expected_hypervolume_improvement, front_with_reference
from search.api import Observation, Placement, Score
from search.archive import Archive
from search.pareto import hypervolume
from search.testing import synthetic_space

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
    front = made((0.0, 8.0), (2.0, 3.0), (3.0, 2.5), (8.0, 0.0))
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


def told(space, archive, placement, latency_ms, loss, **facts):
    score = Score(objective=latency_ms, objectives=(latency_ms, loss), **facts)
    archive.tell(Observation(placement=placement, digest=space.digest(placement), outcome=score))


def archive_with_a_gap(space):
    """Latency falls and loss rises with every point quantized, and the middle is not evaluated."""
    archive = Archive()
    count = len(space)
    for on in (0, 1, 2, count - 2, count - 1, count):
        told(space, archive, Placement((1,) * on + (0,) * (count - on)), 10.0 - 0.5 * on, 0.02 * on)
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
        told(space, archive, placement, 10.0 - 0.5 * on, loss, violation=broken, metrics={"top1": 0.9 - loss})
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
    told(space, archive, space.float_placement(), 10.0, 0.0)
    told(space, archive, space.quantize_all(), 5.0, 0.3, violation=0.2, metrics={"top1": 0.5})
    advisor = SurrogateModel(space)
    advisor.fit(archive)
    assert advisor.constrained
    near_float, near_all = Placement((1,) + (0,) * 9), Placement((0,) + (1,) * 9)
    worth = advisor.score([near_float, near_all]).acquisition
    assert (worth >= 0).all()
    assert worth[0] > 0
