"""On problems whose optimum is known, searchers come closer to it than random search does."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

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
from search.algorithms.random import RandomSearcher
from search.algorithms.random_mutation import RandomMutationSearcher
from search.algorithms.surrogate import SurrogateSearcher
from search.testing import SyntheticObjective, common_initial_placements, run_search_loop, synthetic_space


@cache
def regret(make: Callable[..., Any], seeds: int) -> float:
    found = []
    for seed in range(seeds):
        space = synthetic_space(24, groups=6, seed=seed)
        objective = SyntheticObjective(space, seed=seed)
        observations = run_search_loop(make(space, seed=seed), objective, 60, initial=common_initial_placements(space))
        found.append(objective.regret(min(observations, key=lambda o: o.outcome.objective).placement))
    return float(np.mean(found))


@pytest.mark.parametrize(
    ("make", "seeds"),
    [
        (RandomMutationSearcher, 4),
        (TPESearcher, 4),
        (EvolutionarySearcher, 4),
        (LocalSearcher, 4),
        (AnnealingSearcher, 4),
        (NSGA2Searcher, 4),
        (PerPatternSearcher, 4),
        (partial(RandomMutationSearcher, scope="per_pattern", schemes_per_pattern=8), 4),
        (
            lambda space, seed: OptunaSearcher(
                space, seed=seed, sampler="NSGAIISampler", params={"population_size": 8}
            ),
            4,
        ),
        (partial(PerPatternSearcher, searcher="local"), 4),
        (SurrogateSearcher, 2),
        (AutoSearcher, 2),
        (SensitivityGreedySearcher, 3),
        (PortfolioSearcher, 3),
    ],
)
def test_searchers_have_lower_regret_than_random_search(make, seeds):
    assert regret(make, seeds) < regret(RandomSearcher, seeds)
