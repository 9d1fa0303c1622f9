"""Cost of a searcher by its number of evaluations, counted and not timed."""

from itertools import groupby

import numpy as np
import pytest

import search.acquisition
import search.algorithms.evolutionary
import search.archive
from search.acquisition import MAX_TRAINING_ROWS, GaussianProcess
from search.algorithms.evolutionary import EvolutionarySearcher
from search.algorithms.model_based import AutoSearcher
from search.api import Observation, Score
from search.archive import Archive, improves
from search.pareto import nsga_ranking
from search.synthetic_problem import SyntheticObjective, common_initial_placements, run_search_loop, synthetic_space


def search_loop(make, evaluations, dimensions=30):
    space = synthetic_space(dimensions)
    initial = common_initial_placements(space)
    return run_search_loop(make(space, seed=0), SyntheticObjective(space, seed=0), evaluations, initial=initial)


def test_surrogate_training_rows_are_bounded(monkeypatch):
    monkeypatch.setattr(search.acquisition, "MAX_TRAINING_ROWS", 40)
    sizes, fit = [], GaussianProcess.fit

    def count(self, rows, values, errors):
        sizes.append(len(rows))
        return fit(self, rows, values, errors)

    monkeypatch.setattr(GaussianProcess, "fit", count)
    found = [observation.digest for observation in search_loop(AutoSearcher, 90)]
    assert len(found) == len(set(found)) == 90
    assert max(sizes) == 40
    assert MAX_TRAINING_ROWS >= 200, "shorter searches use all of their readings"


def test_comparisons_of_incumbents_grow_linearly(monkeypatch):
    counts = []

    def count(*arguments):
        counts.append(1)
        return improves(*arguments)

    monkeypatch.setattr(search.archive, "improves", count)
    search_loop(EvolutionarySearcher, 100)
    small = len(counts)
    search_loop(EvolutionarySearcher, 400)
    assert len(counts) - small <= 5 * small


def test_evolution_redraws_grow_linearly(monkeypatch):
    counts, draw = [], EvolutionarySearcher._child

    def count(self, parents):
        counts.append(1)
        return draw(self, parents)

    monkeypatch.setattr(EvolutionarySearcher, "_child", count)
    free = search_loop(EvolutionarySearcher, 230, dimensions=8)  # of 256 placements
    drawn = len(counts)
    monkeypatch.setattr(search.algorithms.evolutionary, "FREE_REPEATS", 0)
    limited = search_loop(EvolutionarySearcher, 230, dimensions=8)
    assert len(free) == len(limited) == 230
    assert len(counts) - drawn <= 3 * 230 < drawn


@pytest.mark.parametrize("seed", range(4))
def test_incremental_nsga_order_equals_full_ranking(seed):
    space, rng = synthetic_space(9), np.random.default_rng(seed)
    archive, k = Archive(), int(rng.integers(3, 12))
    for number in range(150):
        placement = space.random(rng)
        objectives = tuple(np.round(rng.random(2 + seed % 2), 1)) if number > 5 else ()
        score = Score(
            objective=float(objectives[0]) if objectives else 1.0, stderr=float(rng.choice([0.0, 0.2])),
            violation=float(rng.choice([0.0, 0.0, 0.5])), objectives=objectives,
        )  # fmt: skip
        archive.tell(Observation(placement=placement, digest=space.digest(placement), outcome=score))

        standing, expected = archive._standing, []
        for _, alike in groupby(sorted(archive, key=standing), key=standing):
            group = list(alike)
            values, errors = (np.array([getattr(e.score, name) for e in group]) for name in ("values", "stderr"))
            expected += [group[index] for index in nsga_ranking(values, errors)]
        assert archive.nsga_order(k) == tuple(expected[:k])
    assert len(archive._leading_entries(k)) < len(archive)


@pytest.mark.parametrize("seed", range(3))
def test_incremental_incumbents_equal_final_incumbents(seed):
    space = synthetic_space(6)
    objective, rng = SyntheticObjective(space, seed=seed), np.random.default_rng(seed)
    stepwise, at_end = Archive(), Archive()
    for _ in range(80):  # of 64 placements, so that several outcomes are repeated
        observation = objective.observe(space.random(rng))
        stepwise.tell(observation)
        at_end.tell(observation)
        stepwise.incumbents(int(rng.integers(1, 9)))
    assert stepwise.incumbents(5) == at_end.incumbents(5)
    assert stepwise.incumbents(20) == at_end.incumbents(20)
    assert list(stepwise.ranked) == sorted(stepwise, key=lambda entry: entry.score.rank)
