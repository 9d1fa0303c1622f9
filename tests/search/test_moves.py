"""Moves yield valid placements, change what they say, and nothing else."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from search.api import Dimension, Edge, Placement, Space
from search.moves import (
    assign,
    crossover_by_group,
    dimension_blocks,
    flip,
    mutate_per_kind,
    mutate_rate,
    random_with_density,
)
from search.testing import synthetic_space

SPACE = synthetic_space(30, groups=5, precisions=("int8", "fp8"))
seeds = st.integers(0, 2**32 - 1)
placements = st.builds(lambda seed: SPACE.random(np.random.default_rng(seed)), seeds)


def hamming(first: Placement, second: Placement) -> int:
    """Number of dimensions with different choices."""
    return sum(a != b for a, b in zip(first.choices, second.choices, strict=True))


def rng_of(seed):
    return np.random.default_rng(seed)


@given(placements, placements, seeds)
def test_moves_are_valid_and_deterministic(first, second, seed):
    moves = (
        lambda rng: flip(first, SPACE, rng, 3),
        lambda rng: mutate_rate(first, SPACE, rng, 0.2),
        lambda rng: mutate_per_kind(first, SPACE, rng),
        lambda rng: crossover_by_group(first, second, SPACE, rng),
        lambda rng: random_with_density(SPACE, rng, 0.3),
    )
    for move in moves:
        assert SPACE.validate(move(rng_of(seed))) == move(rng_of(seed))


@given(placements, seeds, st.integers(1, 30))
def test_flip_changes_requested_number_of_dimensions(placement, seed, count):
    assert hamming(placement, flip(placement, SPACE, rng_of(seed), count)) == count


@given(placements, seeds)
def test_mutate_rate_changes_at_least_one_dimension(placement, seed):
    assert hamming(placement, mutate_rate(placement, SPACE, rng_of(seed), 0.0)) == 1


@given(placements, seeds, st.integers(1, 4))
def test_mutate_per_kind_adds_and_removes_one_to_maximum_of_each_kind(placement, seed, maximum):
    child = mutate_per_kind(placement, SPACE, rng_of(seed), maximum)
    for kind in ("node_input", "child_input", "output"):
        points = [i for i, dimension in enumerate(SPACE.dimensions) if dimension.kind == kind]
        added = [i for i in points if child.choices[i] and not placement.choices[i]]
        removed = [i for i in points if placement.choices[i] and not child.choices[i]]
        assert len(added) <= maximum
        assert len(removed) <= maximum
    kept = [(a, b) for a, b in zip(placement.choices, child.choices, strict=True) if a and b and a != b]
    assert len(kept) <= 3 * maximum, "a point changes its precision only where it was removed just after being added"


@given(placements, seeds)
def test_mutate_per_kind_stays_within_the_given_dimensions(placement, seed):
    within = SPACE.groups["p2"]
    child = mutate_per_kind(placement, SPACE, rng_of(seed), within=within)
    changed = {i for i, (a, b) in enumerate(zip(placement.choices, child.choices, strict=True)) if a != b}
    assert changed <= set(within)


def test_mutation_both_adds_and_removes_and_reaches_every_mode():
    half = Placement(tuple(i % 2 for i in range(len(SPACE))))
    seen = set()
    for seed in range(60):
        child = mutate_per_kind(half, SPACE, rng_of(seed), within=SPACE.groups["p0"])
        added = any(b and not a for a, b in zip(half.choices, child.choices, strict=True))
        removed = any(a and not b for a, b in zip(half.choices, child.choices, strict=True))
        seen.add((added, removed))
    assert {(True, False), (False, True), (True, True)} <= seen


@given(placements, placements, seeds)
def test_crossover_takes_each_pattern_whole_from_one_parent(first, second, seed):
    child = crossover_by_group(first, second, SPACE, rng_of(seed))
    for indices in SPACE.groups.values():
        scheme = [child.choices[i] for i in indices]
        assert scheme in ([first.choices[i] for i in indices], [second.choices[i] for i in indices])


def test_density_is_the_share_of_quantized_points():
    assert random_with_density(SPACE, rng_of(0), 0.0) == SPACE.float_placement()
    assert all(random_with_density(SPACE, rng_of(0), 1.0).choices)
    assert {choice for choice in random_with_density(SPACE, rng_of(0), 1.0).choices} == {1, 2}


def test_assign_clips_choice_to_last_of_dimension():
    edge = Edge("t", "n", 0)
    space = Space((
        Dimension(name="a", group="g", kind="output", choices=("float", "int8"), edges=(edge,)),
        Dimension(name="b", group="g", kind="output", choices=("float", "int8", "fp8"), edges=(edge,)),
    ))  # fmt: skip
    assert assign(space.float_placement(), (0, 1), 2, space) == Placement((1, 2))


def test_blocks_are_roles_patterns_and_roles_within_patterns_by_cost():
    found = dimension_blocks(SPACE)
    assert SPACE.groups["p3"] in found
    assert tuple(i for i, d in enumerate(SPACE.dimensions) if d.role == "linear") == found[0]
    assert len(set(found)) == len(found)
    assert all(len(indices) > 1 for indices in found)
