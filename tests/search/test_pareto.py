"""Fronts, crowding and hypervolume against their definitions."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import search.pareto
from search.pareto import crowding_distance, front_numbers, hypervolume

POINTS = st.integers(1, 3).flatmap(
    lambda width: st.lists(st.tuples(*[st.integers(0, 5)] * width), min_size=1, max_size=12)
)


@given(POINTS, st.integers(0, 2**32))
@settings(max_examples=150)
def test_front_numbers_equal_pairwise_comparison(points, seed):
    values, noise = np.array(points, dtype=float), np.random.default_rng(seed).choice([0.0, 0.5, 1.5], len(points))
    expected = np.zeros(len(points), dtype=int)
    for _ in points:  # as long as the longest chain
        for (one, a), (two, b) in itertools.product(enumerate(noise), enumerate(noise)):
            if search.pareto.dominates(points[one], points[two], np.hypot(a, b)):
                expected[two] = max(expected[two], expected[one] + 1)
    assert front_numbers(values, noise).tolist() == expected.tolist()


def test_points_within_noise_share_front():
    values = np.array([[10.0], [9.9], [9.0]])
    assert front_numbers(values, np.array([0.1, 0.1, 0.1])).tolist() == [1, 1, 0]
    assert front_numbers(values).tolist() == [2, 1, 0]
    same = np.array([[10.0, 0.2], [9.9, 0.1]])
    assert front_numbers(same, np.array([0.1, 0.1])).tolist() == [1, 0], "the other coordinate decides"


def test_crowding_distance_is_infinite_at_front_ends():
    room = crowding_distance(np.array([[0.0, 10.0], [1.0, 9.0], [2.0, 8.0], [9.0, 1.0], [10.0, 0.0]]))
    assert np.isinf(room[[0, 4]]).all()
    assert room[1] == pytest.approx(0.4)
    assert room[2] == pytest.approx(1.6)
    assert np.isinf(crowding_distance(np.array([[1.0, 2.0]]))).all()


@given(POINTS)
@settings(max_examples=60)
def test_hypervolume_is_the_number_of_unit_cubes_that_are_dominated(points):
    width = len(points[0])
    cubes = itertools.product(range(5), repeat=width)
    counted = sum(any(all(p <= c for p, c in zip(point, cube, strict=True)) for point in points) for cube in cubes)
    assert hypervolume(points, (5,) * width) == pytest.approx(counted)


def test_hypervolume_is_zero_outside_reference_point():
    assert hypervolume([(6.0, 0.0), (0.0, 5.0)], (5.0, 5.0)) == 0.0
    assert hypervolume([], (1.0,)) == 0.0
