"""Time that a searcher spends on one evaluation (ask and tell) at 250 points, over 200 evaluations.

Figure to reach: 5 ms for the simple searchers; `auto` at most 5 % of a run, so 15 ms where an evaluation takes 0.3 s;
TPE is Optuna's and takes what it takes. No figure is asserted.
"""

import pytest
from spaces import make

from search.testing import SyntheticObjective, common_initial_placements, synthetic_space

pytestmark = pytest.mark.slow
POINTS, EVALUATIONS = 250, 200


@pytest.mark.parametrize(
    "name",
    [
        "random", "exhaustive", "local", "annealing", "evolutionary", "nsga2", "random_mutation", "per_pattern",
        "sensitivity_greedy", "surrogate", "portfolio", "tpe", "auto",
    ],
)  # fmt: skip
def test_ask_and_tell(benchmark, name):
    evaluations = EVALUATIONS if benchmark.enabled else 3
    # 31 patterns of 8 points; outcomes are made before the clock runs.
    space = synthetic_space(POINTS, groups=31)
    objective = SyntheticObjective(space, seed=0)
    searcher = make(name, space)
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
        print(f"{name}: {benchmark.stats['mean'] * 1e3:.2f} ms per evaluation")
