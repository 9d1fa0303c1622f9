"""Random searches at once have the distribution of single searches, on any table and from any start."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from harness.config.sections import PluginSpec
from harness.measure.records import Failed, Measured, Outcome
from harness.replay.recorded_landscape import Landscape
from harness.replay.replay import ReplayRequest, initial_models, initial_placements, replay, replay_once
from harness.replay.simulated_selection import Searches, random_search
from harness.report.statistics import score_against_random
from search.api import Observation, Placement


@pytest.fixture(autouse=True)
def fewer_random_searches(monkeypatch):
    """Two thousand searches, seven times as many as the seeds that they are compared with."""
    monkeypatch.setattr("harness.replay.simulated_selection.RANDOM_SEARCHES", 2000)


class Listed:
    """Searcher that asks for placements in a given order."""

    def __init__(self, placements: Sequence[Placement]) -> None:
        self.left = list(placements)

    def ask(self, n: int) -> Sequence[Placement]:
        taken, self.left = self.left[:n], self.left[n:]
        return taken

    def tell(self, observation: Observation) -> None:
        pass


def enumerated(landscape: Landscape, evaluations: int, first: Sequence[Placement]) -> np.ndarray:
    """Return the latency of the incumbent for each order of the placements."""
    found = []
    for order in itertools.permutations(landscape.table.subspace.placements()):
        walk = replay_once(landscape, Listed(order), budget=evaluations, seed=0, first=first)
        readings_ms = Searches(landscape, {0: np.array(walk, dtype=np.int32)}, len(walk)).readings_ms[0]
        curve = np.minimum(np.minimum.accumulate(readings_ms), landscape.latency_ms.max()).tolist()
        found.append(curve + curve[-1:] * (evaluations - len(curve)))
    return np.array(found)


def by_latency(latency_ms: dict[tuple[int, int], float]) -> Callable[[tuple[int, ...]], Outcome]:
    """Return outcomes by the first two choices; missing ones are failures."""

    def outcome(choices: tuple[int, ...]) -> Outcome:
        ms = latency_ms.get((choices[0], choices[1]))
        if ms is None:
            return Failed(stage="build", reason="unsupported", wall_s=1.0)
        return Measured(samples_ms=(ms,) * 7, build_s=0.1, measure_s=0.1)

    return outcome


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
    landscape = Landscape(make_table(dimensions=2, outcome=by_latency(latency_ms)))
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


def partly_alike(noise: float) -> Callable[[tuple[int, ...]], Outcome]:
    """Return outcomes in which the sixth choice matters only with the first: some models have two placements."""

    def outcome(choices: tuple[int, ...]) -> Outcome:
        effective = (*choices[:5], choices[5] if choices[0] else 0)
        log_ms = 2 + np.array([-0.2, -0.1, 0.15, -0.05, 0.04, -0.02]) @ effective - 0.1 * effective[0] * effective[2]
        samples = np.exp(log_ms + noise * np.random.default_rng(effective).standard_normal(7))
        return Measured(samples_ms=tuple(samples.tolist()), build_s=0.1, measure_s=0.1)

    return outcome


@pytest.mark.parametrize("initial", [(), ("float", "all", "linear")])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_random_searcher_matches_random_search_mean_and_score_0(make_table, noise, initial):
    landscape = Landscape(make_table(outcome=partly_alike(noise)))
    landscape.identity[1:32:2] = landscape.identity[0:32:2]
    seeds, use = 300, PluginSpec(use="random")
    request = ReplayRequest(searcher=use, table=landscape.table.path, seeds=range(seeds), budget=25, initial=initial)
    searched = Searches(landscape, replay(landscape, request), 25).latency_ms
    random_ms = random_search(landscape, 25, initial).mean(axis=0)
    error = searched.std(axis=0) / np.sqrt(seeds)
    assert (abs(searched.mean(axis=0) - random_ms) < 4 * error + 1e-9).all()
    effective = len(initial_models(landscape, initial))
    scores = score_against_random(searched, random_ms, landscape.latency_ms.min(), effective)
    assert abs(scores.mean()) < 4 * scores.std() / np.sqrt(seeds)
    assert scores.std() > 0


def test_noise_increases_regret_of_random_search(make_table):
    quiet, noisy = (Landscape(make_table(noise=noise)) for noise in (0.0, 0.3))
    found = [random_search(each, 64).mean(axis=0) / each.latency_ms.min() - 1 for each in (quiet, noisy)]
    np.testing.assert_array_equal(random_search(noisy, 5), random_search(noisy, 5))
    assert found[0][-1] == pytest.approx(0.0)
    assert found[1][-1] > 0.01
