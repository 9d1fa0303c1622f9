"""Time that a searcher spends on one evaluation (ask and tell) at 250 points, over 200 evaluations.

Figure to reach: 5 ms for the simple searchers; `auto` at most 5 % of a run, so 15 ms where an evaluation takes 0.3 s;
TPE is Optuna's and takes what it takes. No figure is asserted.
"""

import pytest

from search.algorithms.annealing import AnnealingSearcher
from search.algorithms.bandit_portfolio import PortfolioSearcher
from search.algorithms.block_coordinate import PerPatternSearcher
from search.algorithms.evolutionary import EvolutionarySearcher
from search.algorithms.exhaustive import ExhaustiveSearcher
from search.algorithms.greedy import SensitivityGreedySearcher
from search.algorithms.local_search import LocalSearcher
from search.algorithms.model_based import AutoSearcher
from search.algorithms.nsga2 import NSGA2Searcher
from search.algorithms.optuna_bridge import TPESearcher
from search.algorithms.random import RandomSearcher
from search.algorithms.random_mutation import RandomMutationSearcher
from search.algorithms.surrogate import SurrogateSearcher
from search.testing import SyntheticObjective, common_initial_placements, synthetic_space

pytestmark = pytest.mark.slow
POINTS, EVALUATIONS = 250, 200


@pytest.mark.parametrize(
    "make",
    [
        RandomSearcher, ExhaustiveSearcher, LocalSearcher, AnnealingSearcher, EvolutionarySearcher, NSGA2Searcher,
        RandomMutationSearcher, PerPatternSearcher, SensitivityGreedySearcher, SurrogateSearcher, PortfolioSearcher,
        TPESearcher, AutoSearcher,
    ],
)  # fmt: skip
def test_ask_and_tell(benchmark, make):
    evaluations = EVALUATIONS if benchmark.enabled else 3
    # 31 patterns of 8 points; outcomes are made before the clock runs.
    space = synthetic_space(POINTS, groups=31)
    objective = SyntheticObjective(space, seed=0)
    searcher = make(space, seed=0)
    for placement in common_initial_placements(space):
        searcher.tell(objective.observe(placement))
    waiting = list(searcher.ask(1))

    def prepare():
        return ([objective.observe(placement) for placement in waiting],), {}

    def evaluate(observations):
        for observation in observations:
            searcher.tell(observation)
        waiting[:] = searcher.ask(1)

    benchmark.pedantic(evaluate, setup=prepare, rounds=evaluations, iterations=1)
    if benchmark.enabled:
        benchmark.extra_info["ms_per_evaluation"] = round(benchmark.stats["mean"] * 1e3, 3)
        print(f"{make.__name__}: {benchmark.stats['mean'] * 1e3:.2f} ms per evaluation")
