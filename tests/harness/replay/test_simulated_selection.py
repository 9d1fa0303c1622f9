"""The choice of a search is that of a final selection among its best readings, and never a failure."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from harness.measure.records import Measured, Outcome
from harness.replay.recorded_landscape import Floats, Landscape, MetricBound
from harness.replay.simulated_selection import DEFAULT_FINALISTS, TURNS_PER_RACE, Searches, simulate_selection

INF = float("inf")


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


def test_infeasible_placement_has_latency_of_slowest(make_table):
    def outcome(choices: tuple[int, ...]) -> Outcome:
        metrics = {"sqnr_db": 0.0 if choices[1] else 30.0}
        return Measured(samples_ms=(4.0 - sum(choices[:2]),) * 7, build_s=1.0, measure_s=0.5, metrics=metrics)

    landscape = Landscape(make_table(dimensions=2, outcome=outcome), MetricBound(metric="sqnr_db", at_least=20.0))
    searches = Searches(landscape, {0: np.array([1, 2], dtype=np.int32)}, 2)
    assert searches.latency_ms.tolist() == searches.found_ms.tolist() == [[4.0, 3.0]]


@pytest.mark.parametrize("path", [[4], [-1], [1, 1], [0, 1, 2]])
def test_path_that_no_search_can_have_is_refused(make_table, path):
    with pytest.raises(ValueError, match="seed 3: more than 2 evaluations, or no search of this table"):
        Searches(Landscape(make_table(dimensions=2)), {3: np.array(path, dtype=np.int32)}, 2)
