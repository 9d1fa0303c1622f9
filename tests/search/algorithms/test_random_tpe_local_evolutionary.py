"""What each algorithm does beyond the contract, and how it refuses wrong settings."""

import logging

import numpy as np
import optuna
import pytest

from search.algorithms.evolutionary import EvolutionarySearcher
from search.algorithms.local_search import LocalSearcher
from search.algorithms.optuna_bridge import TPESearcher
from search.algorithms.random import RandomSearcher
from search.algorithms.random_mutation import RandomMutationSearcher
from search.api import Dimension, Edge, Failure, Observation, Placement, Score, Space
from search.testing import SyntheticObjective, run_search_loop, synthetic_space

ALL = (RandomSearcher, RandomMutationSearcher, TPESearcher, EvolutionarySearcher, LocalSearcher)


def hamming(first: Placement, second: Placement) -> int:
    """Number of dimensions with different choices."""
    return sum(a != b for a, b in zip(first.choices, second.choices, strict=True))


def scored(space, placement, objective, **facts):
    return Observation(placement=placement, digest=space.digest(placement), outcome=Score(objective=objective, **facts))


def plain_space(count, group_of=lambda index: "g", role="other"):
    return Space(tuple(
        Dimension(
            name=f"d{i}", group=group_of(i), kind="node_input", choices=("float", "int8"),
            edges=(Edge(f"t{i}", f"n{i}", 0),), role=role, cost=1 / (i + 1),
        )
        for i in range(count)
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("searcher", "setting", "message"),
    [
        (RandomSearcher, {"density": "dense"}, r"density is one of \('stratified', 'uniform'\), but got 'dense'"),
        (RandomMutationSearcher, {"scope": "region"}, r"scope is one of \('joint', 'per_pattern'\), but got 'region'"),
        (RandomMutationSearcher, {"schemes_per_pattern": 0}, "schemes_per_pattern is at least 1, but got 0"),
        (RandomMutationSearcher, {"top_share": 1.5}, "top_share is 0 to 1, but got 1.5"),
        (RandomMutationSearcher, {"minimum_parents": 0}, "minimum_parents is at least 1, but got 0"),
        (RandomMutationSearcher, {"maximum_mutations": 0}, "maximum_mutations is at least 1, but got 0"),
        (RandomMutationSearcher, {"maximum_generation_attempts": 0}, "maximum_generation_attempts is at least 1, but"),
        (TPESearcher, {"n_startup_trials": -1}, "n_startup_trials is at least 0, but got -1"),
        (TPESearcher, {"n_ei_candidates": 0}, "n_ei_candidates is at least 1, but got 0"),
        (EvolutionarySearcher, {"population": 0}, "population is at least 1, but got 0"),
        (EvolutionarySearcher, {"tournament": 0}, "tournament is at least 1, but got 0"),
        (EvolutionarySearcher, {"crossover": 2.0}, "crossover is 0 to 1, but got 2.0"),
        (EvolutionarySearcher, {"block": -0.1}, "block is 0 to 1, but got -0.1"),
        (LocalSearcher, {"significance": -1.0}, "significance is at least 0, but got -1.0"),
        (LocalSearcher, {"perturbation": 3.0}, "perturbation is 0 to 1, but got 3.0"),
    ],
)
def test_a_wrong_setting_is_refused(searcher, setting, message):
    with pytest.raises(ValueError, match=message):
        searcher(synthetic_space(4, groups=2), seed=0, **setting)


@pytest.mark.parametrize("searcher", ALL)
def test_proposals_depend_on_seed(searcher):
    space = synthetic_space(30, groups=6)
    objective = SyntheticObjective(space, seed=0)

    def asks(seed):
        told = run_search_loop(searcher(space, seed=seed), objective, 60 if searcher is LocalSearcher else 15)
        return [observation.placement for observation in told]

    if searcher is LocalSearcher:  # draws only when it restarts: the tour of moves is the same for all seeds
        space = synthetic_space(5, groups=2)
        objective = SyntheticObjective(space, seed=0)
    assert asks(0) != asks(1)


@pytest.mark.parametrize("density", ["uniform", "stratified"])
def test_random_exhausts_small_space_without_duplicates(density):
    space = plain_space(6)
    searcher = RandomSearcher(space, seed=0, density=density)
    searcher.tell(scored(space, space.quantize_all(), 1.0))
    asked = [placement for _ in range(30) for placement in searcher.ask(3)]
    assert len(asked) == len(set(asked)) == 63, "all but the one with an outcome"
    assert searcher.ask(1) == []


def test_random_stratified_covers_sparse_and_dense_placements():
    space = plain_space(60)
    shares = [sum(p.choices) / 60 for p in RandomSearcher(space, seed=0).ask(100)]
    uniform = [sum(p.choices) / 60 for p in RandomSearcher(space, seed=0, density="uniform").ask(100)]
    assert min(shares) < 0.1 < 0.9 < max(shares)
    assert 0.25 < min(uniform) < max(uniform) < 0.75


def test_random_mutation_starts_from_float_and_mutates_measured_placements():
    space = plain_space(30)
    searcher = RandomMutationSearcher(space, seed=0)
    assert searcher.ask(1) == [space.float_placement()]
    searcher.tell(scored(space, space.float_placement(), 5.0))
    changed = [hamming(child, space.float_placement()) for child in searcher.ask(20)]
    assert len(changed) == 20
    assert set(changed) <= {1, 2, 3}


def test_random_mutation_draws_parents_from_the_best_tenth():
    space = plain_space(40)
    searcher = RandomMutationSearcher(space, seed=0, minimum_parents=1)
    best = space.quantize_all()
    searcher.tell(scored(space, best, 1.0))
    for index in range(9):
        one = Placement(tuple(int(i == index) for i in range(40)))
        searcher.tell(scored(space, one, 5.0))
    assert all(hamming(child, best) <= 6 for child in searcher.ask(20))


def test_random_mutation_per_pattern_commits_best_in_graph_order():
    space = plain_space(12, group_of=lambda i: f"g{i // 4}")
    searcher = RandomMutationSearcher(space, seed=0, scope="per_pattern", schemes_per_pattern=8)
    weights = np.array([-1, 2, -1, 2, -1, -1, 2, 2, 2, 2, 2, -1.0])
    batches = []
    while asked := searcher.ask(8):
        batches.append(asked)
        for placement in asked:
            searcher.tell(scored(space, placement, 20 + float(weights @ placement.choices)))
    assert len(batches) == 3
    assert all(len(batch) <= 8 for batch in batches), "each pattern has its own budget"
    frozen: tuple[int, ...] = ()
    for turn, batch in enumerate(batches):
        head, tail = 4 * turn, 4 * turn + 4
        assert {p.choices[:head] for p in batch} == {frozen}, "earlier patterns are frozen at their best"
        assert {p.choices[tail:] for p in batch} == {(0,) * (12 - tail)}, "later patterns are float until their turn"
        schemes = [(0,) * 4, *(p.choices[head:tail] for p in batch)]
        frozen += min(schemes, key=lambda scheme: float(weights[head:tail] @ scheme))
    assert searcher.ask(1) == []


def test_random_mutation_per_pattern_tries_known_schemes_first():
    space = plain_space(8, group_of=lambda i: f"g{i // 4}")
    searcher = RandomMutationSearcher(space, seed=0, scope="per_pattern", schemes_per_pattern=5)
    searcher.tell(scored(space, space.float_placement(), 9.0))
    searcher.tell(scored(space, space.quantize_all(), 3.0))
    assert searcher.ask(1)[0] == Placement((1, 1, 1, 1, 0, 0, 0, 0))


def test_random_mutation_ends_after_its_attempts():
    space = plain_space(2)
    searcher = RandomMutationSearcher(space, seed=0, maximum_generation_attempts=50)
    asked = []
    while proposal := searcher.ask(1):
        asked.append(proposal[0])
        searcher.tell(scored(space, proposal[0], 1.0))
    assert len(set(asked)) == len(asked) == 4


def test_tpe_learns_from_external_observations_and_failures():
    space = plain_space(20)
    searcher = TPESearcher(space, seed=0)
    rng = np.random.default_rng(0)
    for _ in range(40):
        placement = space.random(rng)
        first, second = placement.choices[:2]
        outcome = Failure(stage="build", reason="no") if first else Score(objective=5.0 - 4.0 * second)
        searcher.tell(Observation(placement=placement, digest=space.digest(placement), outcome=outcome))
    asked = searcher.ask(20)
    assert sum(p.choices[0] for p in asked) <= 4, "it stays away from what failed"
    assert sum(p.choices[1] for p in asked) >= 16, "and goes where it was fast"


def test_tpe_prefers_feasible_placements():
    space = plain_space(20)
    searcher = TPESearcher(space, seed=0)
    rng = np.random.default_rng(0)
    for _ in range(40):
        placement = space.random(rng)
        first = placement.choices[0]
        searcher.tell(scored(space, placement, 5.0 - 4.0 * first, violation=0.1 * first))
    assert sum(p.choices[0] for p in searcher.ask(20)) <= 4


def test_tpe_averages_repeated_observations():
    space = plain_space(10)
    lucky = space.quantize_all()
    searcher = TPESearcher(space, seed=0, n_startup_trials=0)
    rng = np.random.default_rng(1)
    searcher.tell(scored(space, lucky, 1.0))
    for _ in range(30):
        placement = space.random(rng)
        searcher.tell(scored(space, placement, 10.0 + sum(placement.choices)))
    pending = searcher.ask(2)
    searcher.tell(scored(space, lucky, 99.0))
    for placement in pending:
        searcher.tell(scored(space, placement, 10.0 + sum(placement.choices)))
    asked = searcher.ask(10)
    assert np.mean([sum(p.choices) for p in asked]) < 5, "the lucky reading no longer pulls towards all points"


def test_tpe_keeps_optuna_log_level_and_logs_no_record(caplog):
    before = optuna.logging.get_verbosity()
    optuna.logging.enable_propagation()
    try:
        with caplog.at_level(logging.INFO):
            searcher = TPESearcher(plain_space(5), seed=0)
            searcher.ask(3)
    finally:
        optuna.logging.disable_propagation()
    assert optuna.logging.get_verbosity() == before
    assert not caplog.records


def test_evolution_keeps_whole_patterns_of_its_parents():
    space = plain_space(40, group_of=lambda i: f"g{i // 10}")
    searcher = EvolutionarySearcher(space, seed=0, block=0.0, crossover=1.0)
    searcher.tell(scored(space, space.quantize_all(), 1.0))
    searcher.tell(scored(space, space.float_placement(), 1.1))
    mixed = 0
    for child in searcher.ask(30):
        shares = [sum(child.choices[i : i + 10]) for i in range(0, 40, 10)]
        assert all(share <= 3 or share >= 7 for share in shares), "each pattern comes from one parent, few points vary"
        mixed += len({share >= 7 for share in shares}) == 2
    assert mixed > 5


def test_evolution_breeds_from_feasible_placements():
    space = plain_space(40)
    searcher = EvolutionarySearcher(space, seed=0, population=1, block=0.0)
    searcher.tell(scored(space, space.quantize_all(), 1.0, violation=0.5))
    searcher.tell(scored(space, space.float_placement(), 9.0))
    assert [sum(child.choices) < 15 for child in searcher.ask(20)] == [True] * 20


def test_local_moves_from_the_incumbent_costly_points_first():
    space = plain_space(8)
    searcher = LocalSearcher(space, seed=0, blocks_first=False)
    searcher.tell(scored(space, space.float_placement(), 9.0))
    asked = searcher.ask(3)
    assert [p.choices.index(1) for p in asked] == [0, 1, 2]
    assert all(sum(p.choices) == 1 for p in asked)


def test_local_moves_whole_roles_and_patterns_first():
    space = Space(
        plain_space(4, group_of=lambda i: "a", role="linear").dimensions
        + tuple(
            Dimension(name=f"e{i}", group="b", kind="output", choices=("float", "int8"), edges=(Edge(f"u{i}", "m", i),))
            for i in range(3)
        )
    )
    searcher = LocalSearcher(space, seed=0)
    searcher.tell(scored(space, space.float_placement(), 9.0))
    assert [p.choices for p in searcher.ask(2)] == [(1, 1, 1, 1, 0, 0, 0), (0, 0, 0, 0, 1, 1, 1)]


def test_local_accepts_gain_above_noise_and_rejects_tie():
    space = plain_space(8)
    searcher = LocalSearcher(space, seed=0, blocks_first=False)
    searcher.tell(scored(space, space.float_placement(), 9.0, stderr=0.1))
    tie, gain = searcher.ask(2)
    searcher.tell(scored(space, tie, 8.95, stderr=0.1))
    (after_tie,) = searcher.ask(1)
    assert sum(after_tie.choices) == 1, "still a neighbour of float"
    searcher.tell(scored(space, gain, 8.0, stderr=0.1))
    (after_gain,) = searcher.ask(1)
    assert sum(after_gain.choices) == 2
    assert hamming(after_gain, gain) == 1


def test_local_restarts_near_best_without_improving_neighbour():
    space = plain_space(8)
    searcher = LocalSearcher(space, seed=0, blocks_first=False, perturbation=0.5)
    searcher.tell(scored(space, space.float_placement(), 1.0))
    for placement in searcher.ask(8):
        searcher.tell(scored(space, placement, 2.0))
    (restart,) = searcher.ask(1)
    assert sum(restart.choices) == 4
    searcher.tell(scored(space, restart, 1.5))
    assert hamming(searcher.ask(1)[0], restart) == 1, "it descends from there, although the best is better"


def test_local_accepts_gain_while_restart_is_pending():
    space = plain_space(8)
    searcher = LocalSearcher(space, seed=0, blocks_first=False, perturbation=0.5)
    searcher.tell(scored(space, space.float_placement(), 1.0))
    *neighbours, restart = searcher.ask(9)
    assert [sum(p.choices) for p in (*neighbours, restart)] == [1] * 8 + [4]
    searcher.tell(scored(space, neighbours[0], 1.0))
    searcher.tell(scored(space, neighbours[1], 0.5))
    (after,) = searcher.ask(1)
    assert hamming(after, neighbours[1]) == 1


def test_local_restarts_again_from_best_if_restart_fails():
    space = plain_space(8)
    searcher = LocalSearcher(space, seed=0, blocks_first=False, perturbation=0.5)
    searcher.tell(scored(space, space.float_placement(), 1.0))
    for placement in searcher.ask(8):
        searcher.tell(scored(space, placement, 2.0))
    (restart,) = searcher.ask(1)
    searcher.tell(
        Observation(placement=restart, digest=space.digest(restart), outcome=Failure(stage="build", reason="no"))
    )
    (again,) = searcher.ask(1)
    assert hamming(again, restart) > 1
    assert hamming(again, space.float_placement()) == 4, "another restart: the tour around the best was done"
