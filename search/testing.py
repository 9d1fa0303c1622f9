"""Conformance tests for authors of searchers, and a synthetic problem with a known optimum.

Example::

    from search.testing import SearcherContract

    class TestMySearcher(SearcherContract):
        def make(self, space, seed): return MySearcher(space, seed=seed)

Run pytest on the file with this class. It tests the guarantees of `search.api` as far as `ask` and `tell` show them. If
your searcher also gives guarantee 6 (a tie displaces nothing), use `IncumbentContract` as the base class.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import multiprocessing
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from functools import cache

import numpy as np

from search.api import Failure, Observation, Placement, Score, Searcher, Space
from search.synthetic_problem import SyntheticObjective, common_initial_placements, run_search_loop, synthetic_space

__all__ = [
    "IncumbentContract",
    "SearcherContract",
    "SyntheticObjective",
    "common_initial_placements",
    "run_search_loop",
    "synthetic_space",
]  # fmt: skip


class SearcherContract:
    """Tests of the guarantees that every searcher gives (`search.api`); a subclass defines `make`."""

    def make(self, space: Space, seed: int) -> Searcher:
        """Return a new searcher; the only method that a subclass must implement."""
        raise NotImplementedError("a subclass of SearcherContract defines make(self, space, seed)")

    def _begin(
        self, dimensions: int, groups: int, *, initial: bool = False
    ) -> tuple[Space, SyntheticObjective, Searcher]:
        """Return a space, an objective and a new searcher.

        Args:
            dimensions: Number of insertion points.
            groups: Number of patterns.
            initial: Whether the searcher receives the outcomes of the common initial placements.
        """
        space = synthetic_space(dimensions, groups=groups)
        objective, searcher = SyntheticObjective(space, seed=0), self.make(space, 0)
        _tell(searcher, objective, common_initial_placements(space) if initial else ())
        return space, objective, searcher

    def transcript(self) -> list[list[int]]:
        """Return the proposed choices in a fixed run with batches, failures, repeats and initial placements."""
        space = synthetic_space(12, groups=3, precisions=("int8", "fp8"), seed=3)
        objective = SyntheticObjective(space, seed=3)
        searcher = self.make(space, 7)
        _tell(searcher, objective, common_initial_placements(space))
        asks: list[list[int]] = []
        for round_number in range(12):
            asked = searcher.ask(1 + round_number % 3)
            asks.extend(list(placement.choices) for placement in asked)
            fails = min(len(asked), round_number % 4 == 1)
            for placement in asked[:fails]:
                searcher.tell(_observation(space, placement, PLANTED))
            _tell(searcher, objective, [*asked[fails:], space.float_placement()])
        return asks

    def test_asks_are_valid_and_at_most_n(self) -> None:
        space = synthetic_space(12, groups=3, precisions=("int8", "fp8"))
        objective, searcher = SyntheticObjective(space, seed=0), self.make(space, 0)
        assert not searcher.ask(0), "ask(0) returns nothing"
        for n in (1, 2, 5, 3, 8):
            asked = searcher.ask(n)
            assert 1 <= len(asked) <= n, f"ask({n}) on a fresh space returned {len(asked)} placements"
            _tell(searcher, objective, map(space.validate, asked))

    def test_a_batch_holds_different_placements(self) -> None:
        space, objective, searcher = self._begin(12, 3, initial=True)
        for _ in range(6):
            asked = searcher.ask(4)
            assert len({space.digest(placement) for placement in asked}) == len(asked), "a batch repeats a digest"
            _tell(searcher, objective, asked)

    def test_asks_nothing_again_that_waits_for_its_outcome(self) -> None:
        space, objective, searcher = self._begin(24, 6, initial=True)
        for _ in range(4):
            waiting = [placement for _ in range(3) for placement in searcher.ask(2)]
            assert waiting, "nothing is awaited, and yet nothing was asked"
            assert len({space.digest(p) for p in waiting}) == len(waiting), "what waits for its outcome is asked again"
            _tell(searcher, objective, waiting)

    def test_asks_on_once_what_it_waited_for_is_told(self) -> None:
        space, objective, searcher = self._begin(24, 6, initial=True)
        for _ in range(2):
            waiting = list(searcher.ask(5))
            while len(waiting) < 15 and (more := searcher.ask(5)):
                waiting.extend(more)
            assert waiting, "an empty ask says 'not yet' only while outcomes are awaited; here none were"
            assert len({space.digest(p) for p in waiting}) == len(waiting), "a full window holds a placement twice"
            _tell(searcher, objective, waiting)

    def test_same_seed_and_tells_give_the_same_asks(self) -> None:
        known = _known_transcript(self.__class__)  # type: ignore[arg-type]  # mypy: no class is hashable
        assert self.transcript() == known, "two runs in one process differ"

    def test_another_process_gives_the_same_asks(self) -> None:
        asked = _other_process().submit(_load_transcript, inspect.getfile(type(self)), type(self).__qualname__)
        try:
            asks = asked.result()
        except BrokenExecutor:
            _other_process.cache_clear()  # the next contract gets a new one
            raise AssertionError("the other process ended while the searcher worked in it") from None
        known = _known_transcript(self.__class__)  # type: ignore[arg-type]  # mypy: no class is hashable
        assert asks == known, "another process, with another hash seed, asks something else"

    def test_takes_tells_that_it_never_asked_for_failures_and_repeats(self) -> None:
        space, objective, searcher = self._begin(12, 3)
        searcher.tell(_observation(space, space.quantize_all(), PLANTED))
        _tell(searcher, objective, [space.float_placement()] * 2)
        for _ in range(4):
            asked = searcher.ask(3)
            assert asked, "the searcher stopped after failures"
            for placement in asked:
                for _ in range(2):
                    searcher.tell(_observation(space, placement, PLANTED))
        _tell(searcher, objective, [space.quantize_all()])
        assert searcher.ask(1), "the searcher stopped after a failed placement was measured"

    def test_changes_nothing_that_it_is_given_and_no_global_state(self) -> None:
        space = synthetic_space(12, groups=3)
        score = Score(objective=1.0, metrics={"top1": 0.5})
        given = _observation(space, space.quantize_roles({"linear"}), score)
        before = (copy.deepcopy(given), _global_random_state())
        searcher = self.make(space, 0)
        searcher.tell(given)
        searcher.ask(3)
        assert given == before[0], "a searcher changed an observation that it was given"
        assert _global_random_state() == before[1], "a searcher draws from the global random state"

    def test_finds_better_placements_than_chance(self) -> None:
        space = synthetic_space(24, groups=6, seed=1)
        objective = SyntheticObjective(space, seed=1)
        observations = run_search_loop(self.make(space, 0), objective, 60, initial=common_initial_placements(space))
        best_ms = min(objective.latency_ms(observation.placement) for observation in observations)
        rng = np.random.default_rng(0)
        chance_ms = statistics.median(objective.latency_ms(space.random(rng)) for _ in range(200))
        assert best_ms < chance_ms, f"after 60 evaluations {best_ms:.2f} ms, a random placement has {chance_ms:.2f} ms"

    def test_takes_violations(self) -> None:
        space, objective, searcher = self._begin(24, 6)
        feasible_ms = [objective.latency_ms(space.float_placement())]
        _tell(searcher, objective, [space.float_placement()])
        for _ in range(40):
            for placement in searcher.ask(1):
                share = sum(map(bool, placement.choices)) / len(space)
                latency_ms = objective.latency_ms(placement)
                feasible_ms += [latency_ms] if share <= 0.4 else []
                score = Score(objective=latency_ms, violation=max(0.0, share - 0.4))
                searcher.tell(_observation(space, placement, score))
        assert min(feasible_ms) < feasible_ms[0], "40 evaluations found no placement within the bound faster than float"

    def test_takes_an_incumbent_that_was_measured_again(self) -> None:
        space, objective, searcher = self._begin(12, 3)
        observations = [objective.observe(placement) for placement in common_initial_placements(space)]
        for _ in range(4):
            for observation in observations:
                searcher.tell(observation)
            lucky = min(observations, key=_objective_of)
            again = Score(objective=2 * _objective_of(lucky), stderr=0.1)
            searcher.tell(_observation(space, lucky.placement, again))
            observations = [objective.observe(space.validate(placement)) for placement in searcher.ask(3)]
            assert observations, "the searcher stopped after its incumbent was measured again"

    def test_takes_several_objectives(self) -> None:
        space, objective, searcher = self._begin(12, 3)
        asked: list[Placement] = [space.float_placement(), space.quantize_all()]
        for _ in range(8):
            for placement in asked:
                latency_ms, share = objective.latency_ms(placement), sum(map(bool, placement.choices)) / len(space)
                score = Score(objective=latency_ms, objectives=(latency_ms, share))
                searcher.tell(_observation(space, placement, score))
            asked = [space.validate(placement) for placement in searcher.ask(2)]
            assert asked, "the searcher stopped after scores with several objectives"

    def test_a_small_space_ends(self) -> None:
        space, objective, searcher = self._begin(3, 1)
        seen: set[str] = set()
        for _ in range(40):
            asked = searcher.ask(4)
            seen.update(map(space.digest, asked))
            _tell(searcher, objective, asked)
        assert all(space.digest(p) in seen for p in searcher.ask(4)), "after 160 proposals 8 placements are not done"

    def test_takes_a_space_without_dimensions(self) -> None:
        space = Space(())
        searcher = self.make(space, 0)
        searcher.tell(_observation(space, Placement(()), Score(objective=1.0)))
        assert all(placement == Placement(()) for placement in searcher.ask(2)), "there is only one placement"


class IncumbentContract(SearcherContract):
    """Additional contract of searchers that continue from an incumbent: a tie displaces nothing."""

    def test_a_tie_leads_nowhere_that_a_loss_does_not(self) -> None:
        space = synthetic_space(24, groups=6)

        def asks(second_ms: float) -> list[Placement]:
            searcher = self.make(space, 0)
            searcher.tell(_observation(space, space.float_placement(), _scored(10.0)))
            searcher.tell(_observation(space, space.quantize_all(), _scored(second_ms)))
            return list(searcher.ask(8))

        assert asks(9.95) == asks(30.0), "a lucky reading within the noise leads the search elsewhere than a loss does"

    def test_noise_between_equals_changes_nothing(self) -> None:
        space = synthetic_space(8, groups=2)

        def asks(noise_ms: float) -> list[Placement]:
            rng = np.random.default_rng(0)
            searcher = self.make(space, 0)
            searcher.tell(_observation(space, space.float_placement(), _scored(10.0)))
            asked: list[Placement] = []
            for _ in range(60):
                for placement in searcher.ask(1):
                    asked.append(placement)
                    searcher.tell(_observation(space, placement, _scored(10.0 + noise_ms * float(rng.uniform(-1, 1)))))
            return asked

        assert asks(0.05) == asks(0.0), "where all are equal within the noise, the lowest reading leads the search"


PLANTED = Failure(stage="build", reason="planted")


def _tell(searcher: Searcher, objective: SyntheticObjective, placements: Iterable[Placement]) -> None:
    for placement in placements:
        searcher.tell(objective.observe(placement))


def _observation(space: Space, placement: Placement, outcome: Score | Failure) -> Observation:
    return Observation(placement=placement, digest=space.digest(placement), outcome=outcome)


def _scored(objective: float) -> Score:
    return Score(objective=objective, stderr=0.1)


def _objective_of(observation: Observation) -> float:
    assert isinstance(observation.outcome, Score)
    return observation.outcome.objective


def _global_random_state() -> tuple[object, ...]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return (random.getstate(), name, np.asarray(keys).tobytes(), *rest)


@cache
def _known_transcript(contract: Callable[[], SearcherContract]) -> list[list[int]]:
    return contract().transcript()


@cache
def _other_process() -> ProcessPoolExecutor:
    """Return a process of a new interpreter with another hash seed; shared, because its imports take seconds."""
    seed = os.environ.get("PYTHONHASHSEED")
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    os.environ["PYTHONHASHSEED"] = "12345"
    try:
        pool.submit(os.getpid).result()  # the process starts here
    finally:
        if seed is None:
            del os.environ["PYTHONHASHSEED"]
        else:
            os.environ["PYTHONHASHSEED"] = seed
    return pool


def _load_transcript(path: str, qualname: str) -> list[list[int]]:
    """Load a contract class from its file, as pytest's importlib mode does, and run its transcript."""
    spec = importlib.util.spec_from_file_location("contract_in_another_process", path)
    if spec is None or spec.loader is None or "<locals>" in qualname:
        raise ImportError(f"{qualname} in {path}: define the contract class at the top level of a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    contract: SearcherContract = getattr(module, qualname)()
    return contract.transcript()
