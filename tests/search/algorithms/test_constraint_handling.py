"""Every searcher that uses outcomes continues from placements that keep the bound, even if others are faster.

`random` and `exhaustive` are left out: no outcome changes what they ask, so nothing tells them apart here.
"""

import numpy as np
import pytest

from search.algorithms.annealing import AnnealingSearcher
from search.algorithms.bandit_portfolio import PortfolioSearcher
from search.algorithms.block_coordinate import PerPatternSearcher
from search.algorithms.evolutionary import EvolutionarySearcher
from search.algorithms.greedy import SensitivityGreedySearcher
from search.algorithms.local_search import LocalSearcher
from search.algorithms.model_based import AutoSearcher
from search.algorithms.nsga2 import NSGA2Searcher
from search.algorithms.optuna_bridge import OptunaSearcher, TPESearcher
from search.algorithms.random_mutation import RandomMutationSearcher
from search.algorithms.surrogate import SurrogateSearcher
from search.api import Dimension, Edge, Failure, Observation, Placement, Score, Space
from search.testing import synthetic_space

POINTS, TOLD = 20, 40
FASTEST = 1
"""The one point that makes fast and, where there is a bound, breaks it."""


def modelopt_walk(space, *, seed):
    return RandomMutationSearcher(space, seed=seed, scope="per_pattern", schemes_per_pattern=8)


def asked_within(make, proposals, **broken):
    """The share of the proposals that leave the fastest point float, which is `broken`."""
    space = Space(tuple(
        Dimension(
            name=f"d{i}", group=f"g{i // 4}", kind="node_input", choices=("float", "int8"),
            edges=(Edge(f"t{i}", f"n{i}", 0),), cost=1 / POINTS,
        )
        for i in range(POINTS)
    ))  # fmt: skip
    searcher = make(space, seed=0)

    def tell(placement):
        breaks = placement.choices[FASTEST]
        latency_ms = 10.0 - 4.0 * breaks - 0.05 * sum(placement.choices)
        score = Score(objective=latency_ms, stderr=0.01, **(broken if breaks else {}))
        searcher.tell(Observation(placement=placement, digest=space.digest(placement), outcome=score))

    rng = np.random.default_rng(0)
    for placement in [space.float_placement(), *(space.random(rng) for _ in range(TOLD))]:
        tell(placement)
    asked = []
    for _ in range(proposals):
        for placement in searcher.ask(1):
            asked.append(placement)
            tell(placement)
    assert asked
    return sum(placement.choices[FASTEST] == 0 for placement in asked) / len(asked)


@pytest.mark.parametrize(
    ("make", "proposals"),
    [
        (AutoSearcher, 20),
        (SurrogateSearcher, 20),
        (PortfolioSearcher, 20),
        (SensitivityGreedySearcher, 20),
        (LocalSearcher, 20),
        (AnnealingSearcher, 20),
        (EvolutionarySearcher, 20),
        (NSGA2Searcher, 20),
        (PerPatternSearcher, 20),
        (TPESearcher, 20),
        (OptunaSearcher, 2),  # its Gaussian process takes its time over each
        (RandomMutationSearcher, 20),
        (modelopt_walk, 20),
    ],
)
def test_searchers_explore_around_feasible_placements(make, proposals):
    assert asked_within(make, proposals, violation=0.1) >= 0.7
    assert asked_within(make, proposals) <= 0.3, "without a bound it goes where it is fast"


def test_tpe_ranks_unscored_before_failed_by_latency():
    """Of 40 outcomes, Optuna's sampler takes 10 as good: two that keep the bound, then the fastest without a score."""
    space = synthetic_space(POINTS, groups=4)
    searcher = TPESearcher(space, seed=0)
    rng = np.random.default_rng(0)
    outcomes = [Score(objective=9.0), Score(objective=8.0, violation=0.1)]
    outcomes += [Failure(stage="build", reason="no")] * 18
    outcomes += [Score(objective=7.0 - 0.1 * n, assumed=True) for n in range(20)]
    for outcome in outcomes:
        fast = isinstance(outcome, Score) and outcome.assumed and outcome.objective < 6.2
        choices = [int(rng.integers(2)) for _ in range(POINTS)]
        choices[FASTEST] = int(fast)
        placement = Placement(tuple(choices))
        searcher.tell(Observation(placement=placement, digest=space.digest(placement), outcome=outcome))
    asked = searcher.ask(20)
    assert sum(placement.choices[FASTEST] for placement in asked) >= 14


@pytest.mark.parametrize(("make", "proposals"), [(TPESearcher, 20), (OptunaSearcher, 2)])
def test_searchers_rank_unscored_behind_feasible_placements(make, proposals):
    assert asked_within(make, proposals, assumed=True) >= 0.7
