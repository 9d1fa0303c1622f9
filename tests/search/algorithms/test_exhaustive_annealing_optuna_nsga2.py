"""What exhaustive, annealing, optuna, nsga2 and per_pattern do beyond the contract, and ties and re-measurements."""

import itertools
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec

import numpy as np
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
from search.algorithms.optuna_bridge import OptunaSearcher, TPESearcher
from search.algorithms.random import RandomSearcher
from search.algorithms.random_mutation import RandomMutationSearcher
from search.algorithms.surrogate import SurrogateSearcher
from search.api import Dimension, Edge, Failure, Observation, Placement, Score, Space
from search.pareto import hypervolume
from search.testing import SyntheticObjective, common_initial_placements, synthetic_space


def scored(space, placement, objective, **facts):
    return Observation(placement=placement, digest=space.digest(placement), outcome=Score(objective=objective, **facts))


def plain_space(count, kind_of=lambda index: "node_input", group_of=lambda index: "g"):
    return Space(tuple(
        Dimension(
            name=f"d{i}", group=group_of(i), kind=kind_of(i), choices=("float", "int8"),
            edges=(Edge(f"t{i}", f"n{i}", 0),), cost=1 / (i + 1),
        )
        for i in range(count)
    ))  # fmt: skip


def distance(first, second):
    return sum(a != b for a, b in zip(first.choices, second.choices, strict=True))


@pytest.mark.parametrize(
    ("searcher", "settings", "message"),
    [
        (AnnealingSearcher, {"hottest": 0.0001}, "hottest is at least 0.001, but got 0.0001"),
        (AnnealingSearcher, {"coldest": 0.0}, "coldest is at least 1e-09, but got 0.0"),
        (AnnealingSearcher, {"cycle": 0}, "cycle is at least 1, but got 0"),
        (AnnealingSearcher, {"block": 2.0}, "block is 0 to 1, but got 2.0"),
        (EvolutionarySearcher, {"significance": -1.0}, "significance is at least 0, but got -1.0"),
        (NSGA2Searcher, {"population": 1}, "population is at least 2, but got 1"),
        (NSGA2Searcher, {"crossover": 1.5}, "crossover is 0 to 1, but got 1.5"),
        (NSGA2Searcher, {"mutation": -1.0}, "mutation is at least 0, but got -1.0"),
        (OptunaSearcher, {"sampler": "GPSampling"}, r"a class of optuna.samplers \(GPSampler\), but got 'GPSampling'"),
        (OptunaSearcher, {"sampler": "GridSampler"}, "but got 'GridSampler'"),
        (OptunaSearcher, {"sampler": "os.system"}, "but got 'os.system'"),
        (OptunaSearcher, {"params": {"seed": 3}}, r"params of GPSampler are .*, but got seed"),
        (PerPatternSearcher, {"evaluations": 0}, "evaluations is at least 1, but got 0"),
        (PerPatternSearcher, {"order": "size"}, r"order is one of \('graph', 'cost'\), but got 'size'"),
        (PerPatternSearcher, {"searcher": "climb"}, "searcher is one of .*, but got 'climb'"),
        (PerPatternSearcher, {"params": {"population": 0}}, "population is at least 1, but got 0"),
    ],
)
def test_a_wrong_setting_is_refused(searcher, settings, message):
    with pytest.raises(ValueError, match=message):
        searcher(synthetic_space(4, groups=2), seed=0, **settings)


@pytest.mark.skipif(find_spec("cmaes") is not None, reason="the package is there")
def test_optuna_reports_missing_sampler_package_on_creation():
    with pytest.raises(ValueError, match="CmaEsSampler needs a package: pip install cmaes"):
        OptunaSearcher(synthetic_space(4, groups=2), seed=0, sampler="CmaEsSampler")


@pytest.mark.parametrize("facts", [{"violation": 0.1}, {"objectives": (1.0, 2.0)}])
def test_optuna_sampler_without_constraints_names_alternative(monkeypatch, facts):
    monkeypatch.setattr("search.algorithms.optuna_bridge.find_spec", lambda name: object())
    space = synthetic_space(4, groups=2)
    searcher = OptunaSearcher(space, seed=0, sampler="CmaEsSampler")
    searcher.tell(scored(space, space.float_placement(), 1.0))
    with pytest.raises(ValueError, match="CmaEsSampler knows one objective and no bound: take GPSampler"):
        searcher.tell(scored(space, space.quantize_all(), 1.0, **facts))


def test_per_pattern_starts_from_best_observed_placement():
    space = plain_space(12, group_of=lambda index: f"g{index // 4}")
    searcher = PerPatternSearcher(space, seed=0)
    searcher.tell(scored(space, space.float_placement(), 9.0))
    searcher.tell(scored(space, space.quantize_all(), 3.0))
    assert {placement.choices[4:] for placement in searcher.ask(5)} == {(1,) * 8}


@pytest.mark.parametrize("told_again", [False, True])
def test_per_pattern_perturbs_best_if_neighbourhood_is_exhausted(told_again):
    space = synthetic_space(9, groups=3)
    objective = SyntheticObjective(space, seed=0)
    searcher = PerPatternSearcher(space, seed=0)
    told, best = set(), None
    for number in range(200):  # of 256 graphs
        [placement] = searcher.ask(1)
        assert placement not in told
        told.add(placement)
        observation = objective.observe(placement)
        searcher.tell(observation)
        best = min(best or observation, observation, key=lambda known: known.outcome.objective)
        if told_again and not number % 5:  # as a run does with what leads
            searcher.tell(replace(best, outcome=replace(best.outcome, stderr=0.01 + number / 10000)))
    assert objective.regret(best.placement) == 0


def test_optuna_gp_sampler_finds_optimum_in_few_evaluations():
    space = plain_space(5)
    searcher = OptunaSearcher(space, seed=0, sampler="GPSampler", params={"n_startup_trials": 6})
    weights = np.array([-3.0, 2.0, -1.0, 1.0, 0.5])
    best = 99.0
    for _ in range(9):
        for placement in searcher.ask(1):
            latency_ms = 10 + float(weights @ placement.choices)
            best = min(best, latency_ms)
            searcher.tell(scored(space, placement, latency_ms))
    assert best == 6.0


def test_optuna_gp_sampler_is_reproducible_without_duplicates():
    """The short form of its contract, which would take it minutes: batches, a failure and repeated tells."""

    def asks():
        space = synthetic_space(6, groups=2)
        objective = SyntheticObjective(space, seed=0)
        searcher = OptunaSearcher(space, seed=7, params={"n_startup_trials": 4})
        for placement in common_initial_placements(space):
            searcher.tell(objective.observe(placement))
        asked = []
        for number in range(2):
            batch = searcher.ask(2)
            told = [objective.observe(placement) for placement in batch]
            if number == 0:
                told[0] = replace(told[0], outcome=Failure(stage="build", reason="no"))
            for observation in (*told, objective.observe(space.float_placement())):
                searcher.tell(observation)
            asked += [space.digest(placement) for placement in batch]
        return asked

    first = asks()
    assert len(set(first)) == len(first) == 4
    assert first == asks()


def test_exhaustive_enumerates_once_by_count_then_cost():
    space = plain_space(5)
    searcher = ExhaustiveSearcher(space, seed=3)
    searcher.tell(scored(space, space.quantize_all(), 1.0))
    asked = list(itertools.chain.from_iterable(iter(lambda: searcher.ask(4), [])))
    assert len(asked) == len(set(asked)) == 31, "all but the one with an outcome"
    weights = [sum(placement.choices) for placement in asked]
    assert weights == sorted(weights)
    assert [placement.choices.index(1) for placement in asked[1:6]] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "make",
    [
        EvolutionarySearcher,
        NSGA2Searcher,
        TPESearcher,
        AnnealingSearcher,
        LocalSearcher,
        RandomSearcher,
        RandomMutationSearcher,
        ExhaustiveSearcher,
        PerPatternSearcher,
        AutoSearcher,
        SurrogateSearcher,
        partial(SurrogateSearcher, model="forest"),
        SensitivityGreedySearcher,
        PortfolioSearcher,
        OptunaSearcher,
    ],
)
def test_ask_fills_batch_with_distinct_placements(make):
    space = synthetic_space(30, groups=3)
    searcher = make(space, seed=0)
    objective = SyntheticObjective(space, seed=0)
    for placement in common_initial_placements(space):
        searcher.tell(objective.observe(placement))
    assert len({space.digest(placement) for placement in searcher.ask(4)}) == 4


@pytest.mark.parametrize("make", [EvolutionarySearcher, NSGA2Searcher, AnnealingSearcher, LocalSearcher])
def test_searchers_leave_incumbent_after_slower_remeasurement(make):
    space = plain_space(40)
    searcher = make(space, seed=0, **({"population": 2} if hasattr(make, "_parents") else {}))
    lucky, sound = space.quantize_all(), space.float_placement()
    sound_too = Placement((1,) + (0,) * 39)
    searcher.tell(scored(space, lucky, 1.0, stderr=0.1))
    searcher.tell(scored(space, sound, 5.0, stderr=0.1))
    searcher.tell(scored(space, sound_too, 5.0, stderr=0.1))
    for _ in range(3):
        searcher.tell(scored(space, lucky, 30.0 + _, stderr=0.1))
    asked = searcher.ask(12)
    nearer = [distance(placement, sound) < distance(placement, lucky) for placement in asked]
    assert sum(nearer) >= 9


def test_sensitivity_greedy_replaces_base_after_remeasurement():
    space = plain_space(4)
    searcher = SensitivityGreedySearcher(space, seed=0, share=1.0, direction="in")
    searcher.tell(scored(space, space.float_placement(), 1.0, stderr=0.1))
    asked = []
    for number in range(6):
        asked += searcher.ask(1)
        for reading in (30.0, 31.0, 32.0) if number == 0 else ():
            searcher.tell(scored(space, space.float_placement(), reading, stderr=0.1))
        searcher.tell(scored(space, asked[-1], 4.0 + 0.5 * sum(asked[-1].choices), stderr=0.1))
    assert sum(sum(placement.choices) > 1 for placement in asked) >= 5, "around float there is nothing to probe"


def test_evolution_keeps_its_parents_against_a_tie():
    space = plain_space(40)
    searcher = EvolutionarySearcher(space, seed=0, population=1, block=0.0)
    searcher.tell(scored(space, space.float_placement(), 5.0, stderr=0.1))
    searcher.tell(scored(space, space.quantize_all(), 4.9, stderr=0.1))
    assert [sum(child.choices) < 20 for child in searcher.ask(10)] == [True] * 10


def test_annealing_accepts_slower_neighbour_if_temperature_is_high():
    space = plain_space(20)

    def moves(temperature):
        stayed = 0
        for seed in range(40):
            searcher = AnnealingSearcher(space, seed=seed, hottest=temperature, coldest=temperature, block=0.0)
            searcher.tell(scored(space, space.float_placement(), 10.0))
            (slower,) = searcher.ask(1)
            searcher.tell(scored(space, slower, 10.1))
            stayed += distance(searcher.ask(1)[0], slower) > distance(slower, space.float_placement())
        return stayed

    assert moves(1.0) < moves(0.001)


def test_annealing_never_goes_to_a_larger_violation():
    space = plain_space(20)
    searcher = AnnealingSearcher(space, seed=0, hottest=10.0, coldest=10.0, block=0.0, cycle=1000)
    searcher.tell(scored(space, space.float_placement(), 10.0))
    for _ in range(15):
        (placement,) = searcher.ask(1)
        assert distance(placement, space.float_placement()) <= 6
        searcher.tell(scored(space, placement, 1.0, violation=1.0))


@cache
def front_volume(make, seed):
    space = synthetic_space(24, groups=6, seed=seed)
    objective = SyntheticObjective(space, seed=seed, noise=0.0)
    damage = np.random.default_rng(seed).exponential(1 / 24, size=24)
    searcher = make(space, seed=seed)
    found, waiting = [], list(common_initial_placements(space))
    while len(found) < 50:
        for placement in waiting:
            values = (objective.latency_ms(placement), float(damage @ np.array(placement.choices)))
            found.append(values)
            searcher.tell(scored(space, placement, values[0], objectives=values))
        waiting = searcher.ask(1)
    return hypervolume(found, (10.5, 1.5))


@pytest.mark.parametrize(
    ("make", "other"),
    [(NSGA2Searcher, RandomSearcher), (SurrogateSearcher, NSGA2Searcher), (AutoSearcher, NSGA2Searcher)],
)
def test_surrogate_hypervolume_exceeds_evolution_and_random(make, other):
    seeds = range(2)
    assert sum(front_volume(make, s) for s in seeds) > sum(front_volume(other, s) for s in seeds)


def test_nsga2_selects_parents_from_whole_feasible_front():
    space = plain_space(40)
    searcher = NSGA2Searcher(space, seed=0, population=2, crossover=0.0)
    searcher.tell(scored(space, space.quantize_all(), 1.0, objectives=(1.0, 9.0)))
    searcher.tell(scored(space, space.float_placement(), 9.0, objectives=(9.0, 1.0)))
    assert {sum(child.choices) > 20 for child in searcher.ask(20)} == {True, False}, "both ends of the front"
    half = Placement((1,) * 20 + (0,) * 20)
    for digest_of in (half, Placement((0,) * 20 + (1,) * 20)):
        searcher.tell(scored(space, digest_of, 50.0, objectives=(50.0, 50.0)))
    for placement in (space.quantize_all(), space.float_placement()):
        for _ in range(2):
            searcher.tell(scored(space, placement, 1.0 + _, violation=0.5, objectives=(1.0, 1.0)))
    children = searcher.ask(20)
    assert all(15 <= sum(child.choices) <= 25 for child in children), "what breaks the constraint is no parent"


def test_optuna_handles_failures_and_multiple_objectives():
    space = plain_space(6)
    searcher = OptunaSearcher(space, seed=0, sampler="NSGAIISampler", params={"population_size": 4})
    searcher.tell(scored(space, space.float_placement(), 5.0))
    searcher.tell(scored(space, space.quantize_all(), 2.0, objectives=(2.0, 0.5)))
    (failing,) = searcher.ask(1)
    outcome = Failure(stage="build", reason="no")
    searcher.tell(Observation(placement=failing, digest=space.digest(failing), outcome=outcome))
    asked = [failing]
    for _ in range(8):
        proposals = searcher.ask(2)
        assert len(proposals) == 2
        for placement in proposals:
            searcher.tell(scored(space, placement, 3.0, objectives=(3.0, 0.1), violation=0.1))
        asked += proposals
    assert all(space.digest(space.nearest(dict(space.resolve(p)))) == space.digest(p) for p in asked)
    assert len({p.choices for p in asked}) > 4, "it continues to search"


def test_per_pattern_visits_graph_order_and_revises_next_round():
    space = plain_space(6, group_of=lambda i: f"g{i // 2}")
    searcher = PerPatternSearcher(space, seed=0, searcher="exhaustive", evaluations=2)
    latency_ms = {(1, 0): -2.0, (0, 1): -1.0, (1, 1): 3.0, (0, 0): 0.0}

    def latency(placement):
        pairs = [placement.choices[i : i + 2] for i in (0, 2, 4)]
        # With the last pattern quantized, the first is better off the other way round.
        first = latency_ms[pairs[0][::-1]] if pairs[2] == (1, 0) else latency_ms[pairs[0]]
        return 20 + first + 2 * latency_ms[pairs[1]] + 4 * latency_ms[pairs[2]]

    searcher.tell(scored(space, space.float_placement(), latency(space.float_placement())))
    varied, best = [], (np.inf, None)
    while asked := searcher.ask(1):
        placement = asked[0]
        base = best[1] or space.float_placement()
        varied.append({i // 2 for i in range(6) if placement.choices[i] != base.choices[i]})
        best = min(best, (latency(placement), placement), key=lambda pair: pair[0])
        searcher.tell(scored(space, placement, latency(placement)))
    assert varied[0] == {0}
    assert best[1].choices == (0, 1, 1, 0, 1, 0), "the first pattern was revised after the last had its turn"


def test_random_mutation_visits_composite_patterns_last():
    kinds = {0: "child_input", 1: "child_input"}
    space = plain_space(6, kind_of=lambda i: kinds.get(i, "node_input"), group_of=lambda i: f"g{i // 2}")
    searcher = RandomMutationSearcher(space, seed=0, scope="per_pattern", schemes_per_pattern=3)
    turns = []
    while asked := searcher.ask(3):
        turns.append([placement.choices for placement in asked])
        for placement in asked:
            searcher.tell(scored(space, placement, 9.0 + sum(placement.choices)))
    assert turns[0][0] == (0,) * 6
    assert [len(turn) for turn in turns] == [3, 2, 2], "later patterns have their float scheme measured already"
    changed = [{i // 2 for choices in turn for i in range(6) if choices[i]} for turn in turns]
    assert changed == [{1}, {2}, {0}]


def test_random_mutation_waits_for_the_outcomes_that_decide_a_pattern():
    space = plain_space(4, group_of=lambda i: f"g{i // 2}")
    searcher = RandomMutationSearcher(space, seed=0, scope="per_pattern", schemes_per_pattern=2)
    waiting = [*searcher.ask(1), *searcher.ask(1)]
    assert searcher.ask(1) == [], "the first pattern has had its turns, but nothing is known yet"
    for placement in waiting:
        searcher.tell(scored(space, placement, 1.0))
    assert searcher.ask(1)
