"""What surrogate, auto, sensitivity_greedy and portfolio do beyond the contract."""

import numpy as np
import pytest

from search.algorithms.bandit_portfolio import PortfolioSearcher
from search.algorithms.block_coordinate import PerPatternSearcher
from search.algorithms.greedy import SensitivityGreedySearcher
from search.algorithms.model_based import AutoSearcher
from search.algorithms.random import RandomSearcher
from search.algorithms.surrogate import SurrogateSearcher
from search.api import Dimension, Edge, Failure, Observation, Placement, Score, Space
from search.fixed_placements import expert_placements
from search.testing import SyntheticObjective, common_initial_placements, run_search_loop, synthetic_space


def scored(space, placement, objective, **facts):
    return Observation(placement=placement, digest=space.digest(placement), outcome=Score(objective=objective, **facts))


def plain_space(count, role=lambda i: "other", kind=lambda i: "node_input"):
    return Space(tuple(
        Dimension(
            name=f"d{i}", group=f"g{i // 4}", kind=kind(i), choices=("float", "int8"),
            edges=(Edge(f"t{i}", f"n{i}", 0),), role=role(i), cost=1 / (i + 1),
        )
        for i in range(count)
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("searcher", "setting", "message"),
    [
        (SurrogateSearcher, {"model": "net"}, r"model is one of \('ridge', 'forest'\), but got 'net'"),
        (SurrogateSearcher, {"startup": 0}, "startup is at least 1, but got 0"),
        (SurrogateSearcher, {"candidates": 5}, "candidates is at least 10, but got 5"),
        (SurrogateSearcher, {"parents": 0}, "parents is at least 1, but got 0"),
        (AutoSearcher, {"rules": -1}, "rules is at least 0, but got -1"),
        (AutoSearcher, {"candidates": 5}, "candidates is at least 20, but got 5"),
        (SensitivityGreedySearcher, {"direction": "up"}, r"direction is one of \('both', 'in', 'out'\), but got 'up'"),
        (SensitivityGreedySearcher, {"share": 2.0}, "share is 0 to 1, but got 2.0"),
        (SensitivityGreedySearcher, {"significance": -1.0}, "significance is at least 0, but got -1.0"),
        (PortfolioSearcher, {"members": []}, r"members is a list of different searchers, but got \[\]"),
        (PortfolioSearcher, {"members": "local"}, "members is a list of different searchers, but got 'local'"),
        (PortfolioSearcher, {"members": ["local", "local"]}, "members is a list of different searchers"),
        (PortfolioSearcher, {"members": ["missing"]}, "searcher is one of .*local.*, but got 'missing'"),
        (PortfolioSearcher, {"params": {"tpe": {}}}, r"params is for members \(surrogate, .*\), but got tpe"),
        (PortfolioSearcher, {"window": 0}, "window is at least 1, but got 0"),
        (PortfolioSearcher, {"exploration": -1.0}, "exploration is at least 0, but got -1.0"),
    ],
)
def test_a_wrong_setting_is_refused(searcher, setting, message):
    with pytest.raises(ValueError, match=message):
        searcher(synthetic_space(4, groups=2), seed=0, **setting)


def test_auto_proposes_unknown_expert_rules_first():
    space = plain_space(8, role=lambda i: ("linear", "pool", "add", "movement")[i % 4])
    searcher = AutoSearcher(space, seed=0)
    for placement in (space.float_placement(), space.quantize_roles({"linear", "add"})):
        searcher.tell(scored(space, placement, 5.0))
    without_additions, heads, movers = (Placement(scheme * 2) for scheme in ((1, 1, 0, 0), (1, 0, 0, 1), (1, 1, 1, 0)))
    assert searcher.ask(3) == [without_additions, heads, movers]
    assert space.quantize_roles({"linear", "add"}) in list(expert_placements(space)), "a rule, but known already"


def test_expert_rules_include_all_readers_of_quantized_outputs():
    """Twice a convolution, x * sigmoid(x) of its result, and a normalization."""
    roles = ("linear", "activation", "mul", "mul", "normalization")
    tensors = ("in", "x", "x", "gate", "y")
    dimensions = [
        Dimension(
            name=f"d{i}", group=f"g{i // 5}", kind="node_input", choices=("float", "int8"), role=roles[i % 5],
            edges=(Edge(f"{tensors[i % 5]}{i // 5}", f"n{i // 5}.{roles[i % 5]}", int(i % 5 == 3)),),
        )
        for i in range(10)
    ]  # fmt: skip
    end = Dimension(name="end", group="g1", kind="output", choices=("float", "int8"), edges=(Edge("z", "", 0),))
    space = Space((*dimensions, end))
    searcher = AutoSearcher(space, seed=0)
    searcher.tell(scored(space, space.float_placement(), 5.0))
    in_front, gates = Placement((1, 1, 1, 0, 0) * 2 + (0,)), Placement((1, 1, 1, 1, 0) * 2 + (0,))
    assert searcher.ask(2) == [in_front, gates]


def test_expert_rules_include_linear_operators_without_additions():
    """Twice a matrix product, the addition that reads it, and a normalization."""
    roles, tensors = ("linear", "add", "normalization"), ("in", "x", "sum")
    dimensions = [
        Dimension(
            name=f"d{i}", group="g", kind="node_input", choices=("float", "int8"), role=roles[i % 3],
            edges=(Edge(f"{tensors[i % 3]}{i // 3}", f"n{i}", 0),),
        )
        for i in range(6)
    ]  # fmt: skip
    end = Dimension(name="end", group="g", kind="output", choices=("float", "int8"), edges=(Edge("z", "", 0),))
    with_additions, alone = (Placement(scheme * 2 + (0,)) for scheme in ((1, 1, 1), (1, 1, 0)))
    found = list(expert_placements(Space((*dimensions, end))))
    assert found[:2] == [with_additions, alone]


def test_auto_skips_rules_that_increase_constraint_violation():
    space = plain_space(8, role=lambda i: ("linear", "other", "add", "activation")[i % 4])
    searcher = AutoSearcher(space, seed=0)
    searcher.tell(scored(space, space.float_placement(), 9.0, metrics={"top1": 0.8}))
    searcher.tell(scored(space, space.quantize_roles({"linear"}), 5.0, violation=0.1, metrics={"top1": 0.6}))
    (asked,) = searcher.ask(1)
    assert asked not in list(expert_placements(space))


@pytest.mark.parametrize("told_float", [True, False])
def test_auto_keeps_rules_if_float_feasibility_is_unknown(told_float):
    """A bound on latency is broken by too few Q/DQ pairs, and more of them heal it."""
    space = plain_space(8, role=lambda i: ("linear", "add", "pool", "concat")[i % 4])
    searcher = AutoSearcher(space, seed=0)
    if told_float:
        searcher.tell(scored(space, space.float_placement(), 0.0, violation=3.0, metrics={"too_slow": 3.0}))
    searcher.tell(scored(space, space.quantize_roles({"linear"}), 0.1, violation=1.0, metrics={"too_slow": 1.0}))
    assert searcher.ask(1) == list(expert_placements(space))[:1]


@pytest.mark.parametrize("outcome", [Score(objective=9.0), Failure(stage="build", reason="no")])
def test_per_pattern_continues_after_known_placement(outcome):
    """Also where the one inside proposes one at a time and waits for each."""
    space = plain_space(4)
    searcher = PerPatternSearcher(space, seed=0, searcher="sensitivity_greedy", evaluations=3)
    known = Placement((1, 0, 0, 0))
    searcher.tell(scored(space, space.float_placement(), 10.0))
    searcher.tell(Observation(placement=known, digest=space.digest(known), outcome=outcome))
    found = {known, space.float_placement()}
    while asked := searcher.ask(1):
        found.update(asked)
        searcher.tell(scored(space, asked[0], 10.0 - sum(asked[0].choices[1:])))
    assert len(found) >= 8


def test_auto_finds_a_fast_placement_within_the_bound():
    space = plain_space(16, role=lambda i: "linear" if i % 2 else "add")
    drop = np.zeros(16)
    drop[[1, 6]] = 0.2
    searcher = AutoSearcher(space, seed=0)

    def tell(placement):
        on = np.array(placement.choices)
        latency_ms, top1 = 10.0 - 0.4 * float(on.sum()), 0.8 - float(drop @ on)
        broken = max(0.0, 0.75 - top1)
        searcher.tell(scored(space, placement, latency_ms, violation=broken, metrics={"top1": top1}))
        return latency_ms if not broken else 10.0

    found = [tell(p) for p in (space.float_placement(), space.quantize_all(), space.quantize_roles({"linear"}))]
    found += [tell(placement) for _ in range(32) for placement in searcher.ask(1)]
    assert min(found) <= 4.8 + 1e-9, "13 of the 14 harmless points at least"


@pytest.mark.parametrize("settings", [{"surrogate": False}, {"blocks": False}, {"rules": 0}])
def test_auto_improves_with_each_component_disabled(settings):
    space = synthetic_space(16, groups=4, seed=0)
    objective = SyntheticObjective(space, seed=0)
    told = run_search_loop(
        AutoSearcher(space, seed=0, **settings), objective, 30, initial=common_initial_placements(space)
    )
    assert len(told) == 30
    assert min(o.outcome.objective for o in told) < min(o.outcome.objective for o in told[:3])


def test_auto_without_blocks_flips_single_points():
    space = plain_space(6, role=lambda i: f"role{i}")
    searcher = AutoSearcher(space, seed=0, rules=0, surrogate=False, blocks=False)
    searcher.tell(scored(space, space.float_placement(), 1.0))
    assert [p.choices.index(1) for p in searcher.ask(6) if sum(p.choices) == 1] == [0, 1, 2, 3, 4, 5], "costly first"


def test_sensitivity_greedy_combines_individual_gains_best_first():
    space = plain_space(4)
    gains = np.array([1.0, 0.0, 2.0, 0.0])
    searcher = SensitivityGreedySearcher(space, seed=0, share=1.0, direction="in")
    asked = []
    while len(asked) < 8 and (proposal := searcher.ask(1)):
        asked.append(proposal[0])
        on = np.array(proposal[0].choices)
        searcher.tell(scored(space, proposal[0], 10.0 - float(gains @ on) + 0.9 * float(on.sum())))
    alone = [p for p in asked if sum(p.choices) == 1]
    assert [p.choices.index(1) for p in alone] == [0, 1, 2, 3], "costly points first, each on its own"
    assert asked[-1] == Placement((1, 0, 1, 0)), "then those that gained, together"


def test_sensitivity_greedy_waits_for_base_outcome():
    searcher = SensitivityGreedySearcher(plain_space(4), seed=0)
    assert len(searcher.ask(5)) == 1, "nothing can be compared before the base is known"
    assert searcher.ask(5) == []


def test_portfolio_favours_improving_member():
    space = synthetic_space(30, groups=6, seed=0)
    objective = SyntheticObjective(space, seed=0)
    searcher = PortfolioSearcher(space, seed=0, members=["random", "local"])
    twin = RandomSearcher(space, seed=0)
    told = run_search_loop(searcher, objective, 60, initial=common_initial_placements(space))
    drawn = {space.digest(p) for _ in range(60) for p in twin.ask(1)}
    by_chance = sum(o.digest in drawn for o in told)
    assert 2 <= by_chance < 30, "both had turns, the one that improves more of them"


def test_portfolio_credits_gain_over_incumbent_despite_tie():
    space = plain_space(20)
    searcher = PortfolioSearcher(space, seed=0, members=["exhaustive", "random"], exploration=0.0)
    twin = RandomSearcher(space, seed=1)
    searcher.tell(scored(space, space.float_placement(), 10.0, stderr=0.1))
    for tie_or_gain in (9.9, 9.8):  # the first is a tie with float, the second gains on float and ties with the first
        (asked,) = searcher.ask(1)
        searcher.tell(scored(space, asked, tie_or_gain, stderr=0.1))
    assert asked == twin.ask(1)[0]
    assert searcher.ask(1) == twin.ask(1), "the turn stays with the member that gained"


def test_members_of_a_portfolio_take_their_parameters():
    space = synthetic_space(8, groups=2)
    with pytest.raises(ValueError, match="population is at least 1, but got 0"):
        PortfolioSearcher(space, seed=0, members=["evolutionary"], params={"evolutionary": {"population": 0}})
