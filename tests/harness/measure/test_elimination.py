"""A race ends with one of the best candidates, and continues while noise may decide."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.measure.elimination import TURNS_PER_RACING_ROUND, build_variance_slack, race_winner, surviving

TURNS = sum(TURNS_PER_RACING_ROUND)
RNG = np.random.default_rng(0)


def timed(latencies_ms: list[float], noise: float, races: int = 1, turns: int = TURNS) -> np.ndarray:
    """[race, candidate, turn]."""
    return np.log(latencies_ms)[:, None] + noise * RNG.standard_normal((races, len(latencies_ms), turns))


def test_common_turn_effects_cancel():
    effect = 0.5 * RNG.standard_normal((1, 1, 8))
    log_ms = timed([1.0, 1.02, 1.04], 0.001, turns=8) + effect
    assert surviving(log_ms)[0].tolist() == [True, False, False]
    assert surviving(log_ms, best=2)[0].tolist() == [True, True, False]
    assert surviving(log_ms, best=3)[0].all()
    assert surviving(log_ms, best=9)[0].all()


def test_equal_candidates_survive_at_nominal_rate():
    """The leader was selected by its readings, so one of two equals seems slower in 10 % of races: 5 % on each side."""
    stays = surviving(timed([1.0, 1.0], 0.05, races=4_000, turns=8)).all(axis=1)
    assert 0.86 < stays.mean() < 0.94


def test_slack_keeps_equal_candidates_despite_build_variance():
    """A test over turns alone mistakes the effect of a build, which all its turns share, for a gap."""
    builds = 0.006 * RNG.standard_normal((4_000, 2, 1))
    log_ms = timed([1.0, 1.0], 0.01, races=4_000, turns=8) + builds
    assert surviving(log_ms).all(axis=1).mean() < 0.7
    assert surviving(log_ms, slack=build_variance_slack(1)).all(axis=1).mean() > 0.93


def test_slack_shrinks_with_rounds_down_to_minimum_claimed_gain():
    assert build_variance_slack(1, 0.04) == pytest.approx(np.log(1.04))
    assert build_variance_slack(4, 0.04) == pytest.approx(np.log(1.04) / 2)
    assert build_variance_slack(1, 0.001) == build_variance_slack(1) == pytest.approx(np.log(1.01))


def test_missing_turns_do_not_count():
    log_ms = timed([1.0, 2.0, 1.0, 1.5], 0.01, turns=8)[0]
    log_ms[0, 4:] = np.nan  # half of them
    log_ms[2] = np.nan  # none
    log_ms[3, 1:] = np.nan  # one, which has no spread
    assert surviving(log_ms).tolist() == [True, False, False, True]
    assert not surviving(np.full((3, 8), np.nan)).any()


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_candidate_without_readings_never_wins(noise):
    log_ms = timed([3.0, 1.0, 2.0], noise, races=50)
    log_ms[:, 1] = np.inf
    assert set(race_winner(log_ms).tolist()) == {2}
    assert race_winner(np.full((1, 3, TURNS), np.inf)).tolist() == [0]


def test_race_winner_is_first_of_equals():
    assert race_winner(timed([1.0, 1.0, 2.0], 0.0)).tolist() == [0]


def test_race_is_better_than_first_round_and_as_good_as_all_turns():
    latencies_ms = [1.0, 1.01, 1.02, 1.05]
    log_ms = timed(latencies_ms, 0.03, races=4_000)
    first_round, race, all_turns = (
        np.take(latencies_ms, choice).mean() - 1.0
        for choice in (
            np.median(log_ms[..., : TURNS_PER_RACING_ROUND[0]], axis=-1).argmin(axis=-1),
            race_winner(log_ms),
            np.median(log_ms, axis=-1).argmin(axis=-1),
        )
    )
    assert race < 0.65 * first_round
    assert race < all_turns + 0.0005


@given(st.lists(st.lists(st.floats(-3.0, 3.0), min_size=TURNS, max_size=TURNS), min_size=1, max_size=5))
def test_candidate_with_lowest_median_survives_round(readings):
    log_ms = np.array(readings)
    medians = np.median(log_ms, axis=-1)
    assert surviving(log_ms)[int(medians.argmin())]
    assert 0 <= race_winner(log_ms) < len(readings)
