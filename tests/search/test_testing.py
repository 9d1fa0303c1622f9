"""The planted problem is what it says, and the kit catches searchers that break a promise."""

import itertools
import random

import numpy as np
import pytest

from search.algorithms.random import RandomSearcher
from search.api import Placement, Space
from search.moves import flip
from search.testing import (
    IncumbentContract,
    SearcherContract,
    SyntheticObjective,
    common_initial_placements,
    run_search_loop,
    synthetic_space,
)


@pytest.mark.parametrize("precisions", [("int8",), ("int8", "fp8")])
def test_synthetic_optimum_is_global_minimum(precisions):
    space = synthetic_space(7, groups=3, precisions=precisions, seed=4)
    objective = SyntheticObjective(space, seed=4, coupling=3.0)
    everything = (Placement(choices) for choices in itertools.product(*map(range, space.sizes)))
    best_ms = min(objective.latency_ms(placement) for placement in everything)
    assert objective.latency_ms(objective.optimum) == pytest.approx(best_ms)
    assert objective.regret(objective.optimum) == 0.0
    assert objective.regret(space.float_placement()) > 0.5, "there is something to find"


def test_synthetic_latency_depends_on_resolved_edges_only():
    space = synthetic_space(40, seed=2)
    objective = SyntheticObjective(space, seed=2)
    rng = np.random.default_rng(0)
    latencies = {}
    for _ in range(300):
        placement = Placement((*rng.integers(2, size=3).tolist(), *(0,) * 37))
        known = latencies.setdefault(space.digest(placement), objective.latency_ms(placement))
        assert objective.latency_ms(placement) == known


def test_synthetic_noise_is_repeatable_with_given_deviation():
    space = synthetic_space(10, groups=2)
    placement = space.quantize_all()
    one, two = (SyntheticObjective(space, seed=0, noise=0.02) for _ in range(2))
    readings = [one.observe(placement).outcome.objective for _ in range(500)]
    assert two.observe(placement).outcome.objective == readings[0]
    assert np.std(readings) == pytest.approx(0.02 * one.latency_ms(placement), rel=0.2)


def test_run_search_loop_counts_initial_and_skips_duplicates():
    space = synthetic_space(12, groups=3)
    told = run_search_loop(
        RandomSearcher(space, seed=0),
        SyntheticObjective(space, seed=0),
        20,
        batch=3,
        initial=common_initial_placements(space),
    )
    assert len({observation.digest for observation in told}) == len(told) == 20
    assert told[0].placement == space.float_placement()


class _Broken:
    """Asks correctly, until a subclass breaks one promise."""

    def __init__(self, space: Space, *, seed: int) -> None:
        self.space, self.rng, self.inner = space, np.random.default_rng(seed), RandomSearcher(space, seed=seed)

    def ask(self, n):
        return self.inner.ask(n)

    def tell(self, observation):
        self.inner.tell(observation)


class AsksTooMuch(_Broken):
    def ask(self, n):
        return self.inner.ask(n + 1)


class AsksInvalid(_Broken):
    def ask(self, n):
        return [Placement((9,) * len(self.space))] * min(n, 1)


class RepeatsInABatch(_Broken):
    def ask(self, n):
        return [*self.inner.ask(min(n, 1))] * n


class GivesUpOnFailure(_Broken):
    failed = False

    def ask(self, n):
        return [] if self.failed else self.inner.ask(n)

    def tell(self, observation):
        self.failed = self.failed or hasattr(observation.outcome, "reason")


class SharesRandomness(_Broken):
    def ask(self, n):
        return [Placement(tuple(random.randrange(size) for size in self.space.sizes)) for _ in range(min(n, 1))]


class DependsOnHashes(_Broken):
    def ask(self, n):
        drawn = np.random.default_rng(hash("a text") % 2**63)  # so large a number that no two hash seeds agree
        return [self.space.random(drawn)] if n else []


class WritesIntoMetrics(_Broken):
    def tell(self, observation):
        if not hasattr(observation.outcome, "reason"):
            observation.outcome.metrics["seen"] = 1.0


class GoesByTheLowestReading(_Broken):
    base, objective, slack = None, np.inf, 0.0

    def ask(self, n):
        return [flip(self.base, self.space, self.rng)] * min(n, 1)

    def tell(self, observation):
        if observation.outcome.objective < self.objective + self.slack:
            self.base, self.objective = observation.placement, observation.outcome.objective


class GoesToEveryTie(GoesByTheLowestReading):
    slack = 0.1


class HashContract(SearcherContract):
    """At the top level, because another process has to find it."""

    def make(self, space, seed):
        return DependsOnHashes(space, seed=seed)


@pytest.mark.parametrize(
    ("broken", "test", "message"),
    [
        (AsksTooMuch, "test_asks_are_valid_and_at_most_n", "ask"),
        (AsksInvalid, "test_asks_are_valid_and_at_most_n", "but got 9"),
        (RepeatsInABatch, "test_a_batch_holds_different_placements", "a batch repeats a digest"),
        (GivesUpOnFailure, "test_takes_tells_that_it_never_asked_for_failures_and_repeats", "stopped after failures"),
        (SharesRandomness, "test_changes_nothing_that_it_is_given_and_no_global_state", "global random state"),
        (SharesRandomness, "test_same_seed_and_tells_give_the_same_asks", "two runs in one process differ"),
        (WritesIntoMetrics, "test_changes_nothing_that_it_is_given_and_no_global_state", "changed an observation"),
        (GoesByTheLowestReading, "test_a_tie_leads_nowhere_that_a_loss_does_not", "elsewhere than a loss does"),
        (GoesByTheLowestReading, "test_noise_between_equals_changes_nothing", "the lowest reading leads the search"),
        (GoesToEveryTie, "test_a_tie_leads_nowhere_that_a_loss_does_not", "elsewhere than a loss does"),
    ],
)
def test_contract_detects_broken_searcher(broken, test, message):
    class Contract(IncumbentContract):
        def make(self, space, seed):
            return broken(space, seed=seed)

    with pytest.raises((AssertionError, ValueError), match=message):
        getattr(Contract(), test)()


def test_contract_detects_dependence_on_hash_seed():
    with pytest.raises(AssertionError, match="another process, with another hash seed, asks something else"):
        HashContract().test_another_process_gives_the_same_asks()


def test_nested_contract_class_raises_import_error():
    class Contract(SearcherContract):
        def make(self, space, seed):
            return RandomSearcher(space, seed=seed)

    with pytest.raises(ImportError, match="define the contract class at the top level of a Python file"):
        Contract().test_another_process_gives_the_same_asks()
