"""The searcher that CONTRIBUTING.md shows, tested by the kit as its author would."""

import inspect
from pathlib import Path

import numpy as np
import pytest

from search.api import Observation, Placement, Score, Space
from search.testing import SearcherContract, SyntheticObjective, run_search_loop, synthetic_space


class HillClimber:
    """Redraws a few points of the best placement so far."""

    def __init__(self, space: Space, *, seed: int, rate: float = 0.1) -> None:
        self.space, self.rate, self.rng = space, rate, np.random.default_rng(seed)
        self.best, self.rank = space.float_placement(), (np.inf, True, np.inf)
        self.asked: dict[str, Placement] = {}

    def ask(self, n: int) -> list[Placement]:
        before = len(self.asked)
        for tries in range(200 * n):  # propose no model twice, so that workers do not repeat each other's work
            redrawn = self.rng.random(len(self.space)) < self.rate + tries / (200 * n)
            choices = np.where(redrawn, self.space.random(self.rng).choices, self.best.choices)
            placement = Placement(tuple(int(choice) for choice in choices))
            self.asked.setdefault(self.space.digest(placement), placement)
            if len(self.asked) == before + n:
                break
        return list(self.asked.values())[before:]

    def tell(self, observation: Observation) -> None:
        score = observation.outcome  # a Score or a Failure
        if isinstance(score, Score) and score.rank < self.rank:
            self.best, self.rank = observation.placement, score.rank


class TestHillClimber(SearcherContract):
    def make(self, space, seed):
        return HillClimber(space, seed=seed)


def test_hill_climber_halves_regret():
    space = synthetic_space(20, groups=4)
    objective = SyntheticObjective(space, seed=0)
    searcher = HillClimber(space, seed=0)
    run_search_loop(searcher, objective, 100)
    assert objective.regret(searcher.best) < 0.5 * objective.regret(space.float_placement())


def test_hill_climber_has_20_lines_and_matches_contributing():
    source = inspect.getsource(HillClimber)
    assert len([line for line in source.splitlines() if line.strip()]) <= 20
    contributing = Path(__file__).parents[2] / "CONTRIBUTING.md"
    if not contributing.exists():
        pytest.skip("CONTRIBUTING.md is not written yet")
    assert source in contributing.read_text(), "CONTRIBUTING.md shows another text than this test runs"
