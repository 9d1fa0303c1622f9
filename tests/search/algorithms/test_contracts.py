"""Every searcher keeps the contract of `search.api`, and refuses wrong parameters."""

from importlib.metadata import entry_points

import pytest
from spaces import make

from search.acquisition import SurrogateModel
from search.algorithms.surrogate import ExtraTrees
from search.testing import (
    IncumbentContract,
    SearcherContract,
    SyntheticObjective,
    common_initial_placements,
    synthetic_space,
)

CHECKED = set()


def searcher(name, **params):
    CHECKED.add(name)
    return lambda self, space, seed: make(name, space, seed, **params)


class TestRandom(SearcherContract):
    make = searcher("random")


class TestRandomUniform(SearcherContract):
    make = searcher("random", density="uniform")


class TestRandomMutation(SearcherContract):
    make = searcher("random_mutation")


class TestRandomMutationPerPattern(SearcherContract):
    make = searcher("random_mutation", scope="per_pattern", schemes_per_pattern=12)


class TestTPE(SearcherContract):
    make = searcher("tpe")


class TestEvolutionary(IncumbentContract):
    make = searcher("evolutionary")


class TestLocal(IncumbentContract):
    make = searcher("local")


class TestExhaustive(SearcherContract):
    make = searcher("exhaustive")


class TestAnnealing(SearcherContract):
    make = searcher("annealing")


class TestNSGA2(SearcherContract):
    make = searcher("nsga2")


class TestOptunaNSGAII(SearcherContract):
    make = searcher("optuna", sampler="NSGAIISampler", params={"population_size": 6})


class TestPerPattern(IncumbentContract):
    make = searcher("per_pattern", evaluations=4)


class TestSurrogate(SearcherContract):
    make = searcher("surrogate")


class TestAuto(SearcherContract):
    make = searcher("auto")


class TestSensitivityGreedy(IncumbentContract):
    make = searcher("sensitivity_greedy")


class TestPortfolio(SearcherContract):
    make = searcher("portfolio")


class TestSurrogateForest(SearcherContract):
    def make(self, space, seed):
        made = make("surrogate", space, seed, model="forest", startup=4, candidates=10, parents=2)
        made._advisor = SurrogateModel(space, lambda: ExtraTrees(seed, trees=6))  # 40 would take most of the suite
        return made


def test_every_searcher_has_a_contract_test():
    points = entry_points(group="qdq.searchers")
    assert {point.name for point in points if point.value.startswith("search.")} == CHECKED


@pytest.mark.parametrize("name", sorted(CHECKED))
def test_ask_fills_batch_with_distinct_placements(name):
    space = synthetic_space(30, groups=3)
    objective, made = SyntheticObjective(space, seed=0), make(name, space)
    for placement in common_initial_placements(space):
        made.tell(objective.observe(placement))
    assert len({space.digest(placement) for placement in made.ask(4)}) == 4


WRONG = [
    ("annealing", "hottest", 0.0001),
    ("annealing", "coldest", 0.0),
    ("annealing", "cycle", 0),
    ("annealing", "block", 2.0),
    ("evolutionary", "significance", -1.0),
    ("nsga2", "population", 1),
    ("nsga2", "crossover", 1.5),
    ("nsga2", "mutation", -1.0),
    ("optuna", "sampler", "GPSampling"),
    ("optuna", "sampler", "GridSampler"),
    ("optuna", "sampler", "os.system"),
    ("optuna", "params", {"seed": 3}),
    ("per_pattern", "evaluations", 0),
    ("per_pattern", "order", "size"),
    ("per_pattern", "searcher", "climb"),
    ("per_pattern", "params", {"population": 0}),
    ("random", "density", "dense"),
    ("random_mutation", "scope", "region"),
    ("random_mutation", "schemes_per_pattern", 0),
    ("random_mutation", "top_share", 1.5),
    ("random_mutation", "minimum_parents", 0),
    ("random_mutation", "maximum_mutations", 0),
    ("random_mutation", "maximum_generation_attempts", 0),
    ("tpe", "n_startup_trials", -1),
    ("tpe", "n_ei_candidates", 0),
    ("evolutionary", "population", 0),
    ("evolutionary", "tournament", 0),
    ("evolutionary", "crossover", 2.0),
    ("evolutionary", "block", -0.1),
    ("local", "significance", -1.0),
    ("local", "perturbation", 3.0),
    ("surrogate", "model", "net"),
    ("surrogate", "startup", 0),
    ("surrogate", "candidates", 5),
    ("surrogate", "parents", 0),
    ("auto", "rules", -1),
    ("auto", "candidates", 5),
    ("sensitivity_greedy", "direction", "up"),
    ("sensitivity_greedy", "share", 2.0),
    ("sensitivity_greedy", "significance", -1.0),
    ("portfolio", "members", []),
    ("portfolio", "members", "local"),
    ("portfolio", "members", ["local", "local"]),
    ("portfolio", "members", ["missing"]),
    ("portfolio", "params", {"tpe": {}}),
    ("portfolio", "params", {"evolutionary": {"population": 0}}),
    ("portfolio", "window", 0),
    ("portfolio", "exploration", -1.0),
]


@pytest.mark.parametrize(("name", "param", "value"), WRONG)
def test_wrong_parameter_is_refused_by_name(name, param, value):
    with pytest.raises(ValueError, match=rf"^(params of \w+|{param}|searcher|population) .*, but got "):
        make(name, synthetic_space(4, groups=2), **{param: value})
