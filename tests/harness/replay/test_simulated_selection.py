"""The choice of a search is that of a final selection, and random searches have the distribution of single ones."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from made_up_tables import outcomes_of

from harness.config.sections import PluginSpec
from harness.replay.record_table import EnumeratingSearcher
from harness.replay.replay import (
    Floats,
    Landscape,
    ReplayRequest,
    initial_placements,
    replay,
    replay_once,
)
from harness.replay.simulated_selection import (
    DEFAULT_FINALISTS,
    TURNS_PER_RACE,
    Searches,
    random_search,
    simulate_selection,
)
from harness.report.statistics import score_against_random
from search.api import Placement

INF = float("inf")


@pytest.fixture(autouse=True)
def fewer_random_searches(monkeypatch):
    """Two thousand searches, seven times as many as the seeds that they are compared with."""
    monkeypatch.setattr("harness.replay.simulated_selection.RANDOM_SEARCHES", 2000)


def settled(readings: Floats, final_selection: Floats) -> np.ndarray:
    """Return the choices if every turn of a final selection has the same reading."""

    def log_ms_of(rows: np.ndarray, evaluations: np.ndarray) -> np.ndarray:
        return np.repeat(np.log(final_selection[rows[:, None], evaluations])[..., None], TURNS_PER_RACE, axis=-1)

    return simulate_selection(readings, log_ms_of)


@pytest.mark.parametrize(
    ("readings", "final_selection", "expected"),
    [
        ([3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [0, 1, 2]),
        ([1.0, 2.0, 3.0], [2.5, 2.0, 3.0], [0, 1, 1]),  # the lowest reading was a lucky one
        ([INF, 2.0, INF], [INF, 2.0, INF], [-1, 1, 1]),
        ([INF, INF], [INF, INF], [-1, -1]),
        ([5.0, 1.0, 2.0, 3.0, 4.0], [0.5, 1.0, 2.0, 3.0, 4.0], [0, 0, 0, 0, 1]),  # four read lower
    ],
)
def test_simulated_selection_of_small_examples(readings, final_selection, expected):
    assert settled(np.array([readings]), np.array([final_selection]))[0].tolist() == expected


figures = arrays(float, (3, 12), elements=st.sampled_from([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, INF]))


@given(figures, figures)
def test_simulated_selection_picks_best_of_leading_readings(readings, final_selection):
    final_selection = np.where(np.isfinite(final_selection), final_selection, 9.0)
    found = settled(readings, final_selection)
    for search, latest in np.ndindex(found.shape):
        so_far = [n for n in range(latest + 1) if np.isfinite(readings[search, n])]
        leading = sorted(so_far, key=lambda n: (readings[search, n], n))[:DEFAULT_FINALISTS]
        wanted = min(leading, key=lambda n: (final_selection[search, n], readings[search, n], n), default=-1)
        assert found[search, latest] == wanted


def test_ended_search_keeps_choice_and_elapsed_time(make_table):
    landscape = Landscape(make_table(dimensions=2))
    searches = Searches(landscape, {0: np.array([0, 1], dtype=np.int32)}, 3)
    assert searches.latency_ms[0].tolist() == [landscape.latency_ms[0]] * 3
    assert searches.found_ms[0].tolist() == np.minimum.accumulate(landscape.latency_ms[[0, 1, 1]]).tolist()
    assert 0 < searches.elapsed_s[0, 0] < searches.elapsed_s[0, 1] == searches.elapsed_s[0, 2]


@pytest.mark.parametrize("path", [[4], [-1], [1, 1], [0, 1, 2]])
def test_path_that_no_search_can_have_is_refused(make_table, path):
    with pytest.raises(ValueError, match="seed 3: more than 2 evaluations, or no search of this table"):
        Searches(Landscape(make_table(dimensions=2)), {3: np.array(path, dtype=np.int32)}, 2)


def enumerated(landscape: Landscape, evaluations: int, first: Sequence[Placement]) -> np.ndarray:
    """Return the latency of the incumbent for each order of the placements."""
    found = []
    for order in itertools.permutations(landscape.table.subspace.placements()):
        walk = replay_once(landscape, EnumeratingSearcher(order), budget=evaluations, seed=0, first=first)
        readings_ms = Searches(landscape, {0: np.array(walk, dtype=np.int32)}, len(walk)).readings_ms[0]
        curve = np.minimum(np.minimum.accumulate(readings_ms), landscape.latency_ms.max()).tolist()
        found.append(curve + curve[-1:] * (evaluations - len(curve)))
    return np.array(found)


ALL_DIFFERENT = {(0, 0): 8.0, (0, 1): 4.0, (1, 0): 2.0, (1, 1): 1.0}


@pytest.mark.parametrize("initial", [(), ("float",), ("all", "float"), ("float", "float")])
@pytest.mark.parametrize(
    ("latency_ms", "alike"),
    [
        (ALL_DIFFERENT, ()),
        ({**ALL_DIFFERENT, (0, 1): 2.0}, ()),
        ({**ALL_DIFFERENT, (0, 1): 2.0}, (1, 2)),  # one model, which two placements give
        ({**ALL_DIFFERENT, (1, 1): 8.0}, (0, 3)),  # everything quantized is the float model
        ({(0, 0): 8.0, (0, 1): 4.0, (1, 0): 2.0}, ()),
        ({(0, 1): 4.0, (1, 0): 2.0}, ()),
    ],
)
def test_random_search_equals_mean_over_all_orders(make_table, latency_ms, alike, initial):
    landscape = Landscape(make_table(dimensions=2, outcome=outcomes_of(lambda *choices: latency_ms.get(choices))))
    landscape.identity[list(alike)] = min(landscape.identity[list(alike)], default=0)
    curves = enumerated(landscape, 6, initial_placements(landscape, initial))
    for evaluations in (1, 2, 3, 6):  # up to more than the initial placements, and more than all placements
        wanted = curves[:, :evaluations]
        found = random_search(landscape, evaluations, initial)
        assert found.shape[1] == evaluations
        error = wanted.std(axis=0) / np.sqrt(len(found))
        assert (abs(found.mean(axis=0) - wanted.mean(axis=0)) <= 4 * error + 1e-9).all()
        for seen, there in zip(found.T, wanted.T, strict=True):
            assert set(seen) == set(there)


@pytest.mark.parametrize("initial", [(), ("float", "all", "linear")])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_random_searcher_matches_random_search_mean_and_score_0(make_table, noise, initial):
    landscape, seeds = Landscape(make_table(noise=noise)), 300
    searcher, table = PluginSpec(use="random"), landscape.table.path
    request = ReplayRequest(searcher=searcher, table=table, seeds=range(seeds), budget=25, initial=initial)
    searched = Searches(landscape, replay(landscape, request), 25).latency_ms
    found = random_search(landscape, 25, initial)
    random_ms, error = found.mean(axis=0), found.std(axis=0) / np.sqrt(seeds)
    assert (abs(searched.mean(axis=0) - random_ms) < 4 * error + 1e-9).all()
    scores = score_against_random(searched, random_ms, landscape.latency_ms.min(), len(initial))
    assert 0 < abs(scores.mean()) < 4 * scores.std() / np.sqrt(seeds)


def test_noise_increases_regret_of_random_search(make_table):
    quiet, noisy = (Landscape(make_table(noise=noise)) for noise in (0.0, 0.3))
    found = [random_search(each, 64).mean(axis=0) / each.latency_ms.min() - 1 for each in (quiet, noisy)]
    np.testing.assert_array_equal(random_search(noisy, 5), random_search(noisy, 5))
    assert found[0][-1] == pytest.approx(0.0)
    assert found[1][-1] > 0.01
