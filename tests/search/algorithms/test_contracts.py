"""Every built-in searcher keeps every promise of the contract."""

import ast
from importlib.metadata import entry_points
from pathlib import Path

import search.algorithms
from search.acquisition import SurrogateModel
from search.algorithms.annealing import AnnealingSearcher
from search.algorithms.bandit_portfolio import PortfolioSearcher
from search.algorithms.block_coordinate import PerPatternSearcher
from search.algorithms.evolutionary import EvolutionarySearcher
from search.algorithms.exhaustive import ExhaustiveSearcher
from search.algorithms.greedy import SensitivityGreedySearcher
from search.algorithms.local_search import LocalSearcher
from search.algorithms.model_based import AutoSearcher
from search.algorithms.nsga2 import NSGA2Searcher
from search.algorithms.optuna_bridge import OptunaSearcher, TPESearcher
from search.algorithms.random import RandomSearcher
from search.algorithms.random_mutation import RandomMutationSearcher
from search.algorithms.surrogate import ExtraTrees, SurrogateSearcher
from search.testing import IncumbentContract, SearcherContract


class TestRandom(SearcherContract):
    def make(self, space, seed):
        return RandomSearcher(space, seed=seed)


class TestRandomUniform(SearcherContract):
    def make(self, space, seed):
        return RandomSearcher(space, seed=seed, density="uniform")


class TestRandomMutation(SearcherContract):
    def make(self, space, seed):
        return RandomMutationSearcher(space, seed=seed)


class TestRandomMutationPerPattern(SearcherContract):
    def make(self, space, seed):
        return RandomMutationSearcher(space, seed=seed, scope="per_pattern", schemes_per_pattern=12)


class TestTPE(SearcherContract):
    def make(self, space, seed):
        return TPESearcher(space, seed=seed)


class TestEvolutionary(IncumbentContract):
    def make(self, space, seed):
        return EvolutionarySearcher(space, seed=seed)


class TestLocal(IncumbentContract):
    def make(self, space, seed):
        return LocalSearcher(space, seed=seed)


class TestExhaustive(SearcherContract):
    def make(self, space, seed):
        return ExhaustiveSearcher(space, seed=seed)


class TestAnnealing(SearcherContract):
    def make(self, space, seed):
        return AnnealingSearcher(space, seed=seed)


class TestNSGA2(SearcherContract):
    def make(self, space, seed):
        return NSGA2Searcher(space, seed=seed)


class TestOptunaNSGAII(SearcherContract):
    def make(self, space, seed):
        return OptunaSearcher(space, seed=seed, sampler="NSGAIISampler", params={"population_size": 6})


class TestPerPattern(IncumbentContract):
    def make(self, space, seed):
        return PerPatternSearcher(space, seed=seed, evaluations=4)


class TestSurrogate(SearcherContract):
    def make(self, space, seed):
        return SurrogateSearcher(space, seed=seed)


class TestSurrogateForest(SearcherContract):
    def make(self, space, seed):
        searcher = SurrogateSearcher(space, seed=seed, model="forest", startup=4, candidates=10, parents=2)
        searcher._advisor = SurrogateModel(space, lambda: ExtraTrees(seed, trees=6))  # 40 would take most of the suite
        return searcher


class TestAuto(SearcherContract):
    def make(self, space, seed):
        return AutoSearcher(space, seed=seed)


class TestSensitivityGreedy(IncumbentContract):
    def make(self, space, seed):
        return SensitivityGreedySearcher(space, seed=seed)


class TestPortfolio(SearcherContract):
    def make(self, space, seed):
        return PortfolioSearcher(space, seed=seed)


def test_every_algorithm_has_entry_point_and_contract_test():
    folder = Path(search.algorithms.__file__).parent
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    declared = {point.value.partition(":")[0].rpartition(".")[2] for point in entry_points(group="qdq.searchers")}
    checked = {
        (node.module or "").rpartition(".")[2]
        for text in (path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
        if "(SearcherContract)" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("search.algorithms.")
    }
    assert files <= declared, "a file in search/algorithms has no entry point (then: pip install -e . again)"
    assert files == checked, "a searcher does not run through the contract"
