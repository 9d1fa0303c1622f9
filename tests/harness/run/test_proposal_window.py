"""Several proposals under way: asks depend on the width of the window alone, whatever comes first or breaks off."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from incumbents import iter_incumbents
from stored import read_records, write_lines

from harness.base.errors import UserError
from harness.measure.records import Failed, Measured
from harness.plugins.api import Candidate
from harness.results.journal import RETRY_ORIGIN, Journal, read_journal
from harness.results.search_log import Goal
from harness.run.search.loop import InitialPlacement, SearchTask, run_search
from search.api import Failure, Observation, Score
from search.space import Dimension, Edge, Placement, Space

SPACE = Space(
    tuple(
        Dimension(name=f"p{i}", group="g", kind="node_input", choices=("float", "int8"), edges=(Edge(f"t{i}", "n", i),))
        for i in range(5)
    )
)
SEEDS = (
    InitialPlacement(name="float", placement=SPACE.float_placement()),
    InitialPlacement(name="all", placement=SPACE.quantize_all()),
    InitialPlacement(name="again", placement=SPACE.quantize_all()),
)


class Learner:
    """Outcomes and their times change its random numbers; now and then it has no proposal until the next outcome."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.told: list[Observation] = []
        self.asked = 0
        self.idle = False

    def ask(self, n: int) -> list[Placement]:
        self.idle = not self.idle and self.asked > len(self.told) - 3
        if self.idle:
            return []
        self.asked += n
        return [SPACE.random(self.rng) for _ in range(n)]

    def tell(self, observation: Observation) -> None:
        self.told.append(observation)
        self.rng.random(len(self.told) % 3 + (isinstance(observation.outcome, Score)))


class Eager(Learner):
    def ask(self, n: int) -> list[Placement]:
        return [SPACE.random(self.rng) for _ in range(n)]


class Shuffled:
    """An executor whose attempts end in any order; may be cut off before an outcome."""

    def __init__(self, rng: np.random.Generator, stop_after: int | None, failing: frozenset[int]) -> None:
        self._rng = rng
        self._stop_after = stop_after
        self._failing = failing
        self._given: list[tuple[int, Candidate]] = []
        self.made: list[str] = []
        self.most = 0

    def submit(self, number: int, candidate: Candidate, incumbent: Any) -> None:
        self._given.append((number, candidate))
        self.most = max(self.most, len(self._given))

    def collect(self) -> tuple[int, Measured | Failed]:
        if self._stop_after is not None and len(self.made) >= self._stop_after:
            raise KeyboardInterrupt
        number, candidate = self._given.pop(int(self._rng.integers(len(self._given))))
        self.made.append(candidate.digest)
        if len(candidate.edges) in self._failing:
            return number, Failed(stage="build", reason="the machine was out of memory")
        value = 10.0 - len(candidate.edges)
        return number, Measured(samples_ms=(value, value + 0.1, value + 0.2), build_s=0.1, measure_s=0.1)


def search(
    path: Path, order: int, *, window: int, stop_after: int | None = None,
    failing: frozenset[int] = frozenset({2}), retry_failed: bool = False,
) -> tuple[Shuffled, Learner]:  # fmt: skip
    executor = Shuffled(np.random.default_rng(order), stop_after, failing)
    searcher = Learner(1)
    task = SearchTask(
        space=SPACE,
        searcher=searcher,
        initial_design=SEEDS,
        candidate=lambda p: Candidate(digest=SPACE.digest(p), edges=SPACE.resolve(p), source=lambda: Path("never")),
        evaluations=14,
        window=window,
        retry_failed=retry_failed,
    )
    with Journal(path, {}) as journal:
        run_search(task, executor, journal, lambda trial: None)
    return executor, searcher


def asks(path: Path) -> list[tuple[str, tuple[int, ...], int | None]]:
    return [(e.proposal.origin, e.proposal.choices, e.proposal.duplicate_of) for e in read_journal(path)]


@settings(max_examples=40)
@given(st.integers(1, 5), st.integers(0, 99), st.lists(st.integers(0, 5), max_size=5))
def test_proposals_do_not_depend_on_order_or_interruption(window, order, stops):
    with tempfile.TemporaryDirectory() as folder:
        whole, cut = Path(folder) / "whole.jsonl", Path(folder) / "cut.jsonl"
        executor, searcher = search(whole, 0, window=window)
        kept = 0
        for part, stop in enumerate(stops):
            with suppress(KeyboardInterrupt):
                search(cut, order + part, window=window, stop_after=stop)
            told = [e.result.number for e in read_journal(cut) if e.result is not None]
            assert len(told) == len(set(told)) == min(14, kept + stop), "nothing is measured twice, nothing is lost"
            kept = len(told)
        last, again = search(cut, order, window=window)
        assert asks(cut) == asks(whole)
        assert kept + len(last.made) == len(executor.made) == 14
        assert [o.digest for o in again.told] == [o.digest for o in searcher.told], "told in ask order"
        assert executor.most <= window


def test_window_runs_proposals_concurrently_initial_first(tmp_path):
    executor, searcher = search(tmp_path / "j.jsonl", 3, window=4)
    assert executor.most == 4
    assert [origin for origin, _, _ in asks(tmp_path / "j.jsonl")][:4] == [
        "initial:float",
        "initial:all",
        "initial:again",
        "searcher",
    ]
    assert asks(tmp_path / "j.jsonl")[2][2] == 1, "a seed that is the same graph as one under way is a duplicate"
    assert [o.digest for o in searcher.told[:3]] == [SPACE.digest(seed.placement) for seed in SEEDS]


def test_failed_trials_are_retried_once_and_replayed_in_order(tmp_path):
    path = tmp_path / "j.jsonl"
    with pytest.raises(KeyboardInterrupt):
        search(path, 0, window=3, stop_after=9)
    failed = [e.proposal.digest for e in read_journal(path) if e.result and isinstance(e.result.outcome, Failed)]
    assert failed
    _, searcher = search(path, 1, window=3, failing=frozenset(), retry_failed=True)
    retried = [e.proposal.digest for e in read_journal(path) if e.proposal.origin == RETRY_ORIGIN]
    assert set(failed) <= set(retried)
    assert len(retried) == len(set(retried))
    told = [o for o in searcher.told if o.digest == failed[0]]
    assert isinstance(told[0].outcome, Failure)
    assert isinstance(told[-1].outcome, Score)
    fresh = Counter(e.proposal.digest for e in read_journal(path) if e.result and e.proposal.origin != RETRY_ORIGIN)
    assert len(fresh) == 14, "retries cost no budget"
    before = path.read_bytes()
    replayed, again = search(path, 2, window=3)
    assert replayed.made == []
    assert path.read_bytes() == before
    assert [o.digest for o in again.told] == [o.digest for o in searcher.told]
    best = list(iter_incumbents(read_journal(path), Goal()))[-1]
    assert best.score.objective == pytest.approx(5.1)
    assert best.evaluations <= 14


def test_window_of_one_alternates_ask_and_tell_and_retries_once(tmp_path):
    path = tmp_path / "j.jsonl"
    search(path, 0, window=1)
    unique = [line["kind"] for line in read_records(path)[1:] if line.get("duplicate_of") is None]
    assert unique == ["proposal", "result"] * 14
    failed = [e.proposal.digest for e in read_journal(path) if e.result and isinstance(e.result.outcome, Failed)]
    assert sorted(search(path, 0, window=1, retry_failed=True)[0].made) == sorted(failed), "though they fail again"


@pytest.mark.parametrize("window", [1, 3, 8])
def test_retry_works_if_all_initial_placements_failed(tmp_path, window):
    path = tmp_path / "j.jsonl"
    with pytest.raises(UserError, match="no initial placement could be measured"):
        search(path, 0, window=window, failing=frozenset(range(6)))
    search(path, 1, window=window, failing=frozenset(), retry_failed=True)
    fresh = {e.proposal.digest for e in read_journal(path) if e.result and e.proposal.origin != RETRY_ORIGIN}
    assert len(fresh) == 14


@pytest.mark.parametrize("window", [1, 3])
def test_retry_interrupted_by_kill_is_not_repeated(tmp_path, window):
    path = tmp_path / "j.jsonl"
    search(path, 0, window=window, failing=frozenset({2, 3}))
    with pytest.raises(KeyboardInterrupt):
        search(path, 0, window=window, stop_after=1, failing=frozenset(), retry_failed=True)
    search(path, 0, window=window, failing=frozenset(), retry_failed=True)
    tried = Counter(e.proposal.digest for e in read_journal(path) if e.proposal.origin == RETRY_ORIGIN)
    assert set(tried.values()) == {1}


@pytest.mark.parametrize("window", [1, 4])
def test_cold_search_stops_if_first_trials_all_fail(tmp_path, window):
    executor = Shuffled(np.random.default_rng(0), None, frozenset(range(6)))
    task = SearchTask(
        space=SPACE,
        searcher=Eager(2),
        initial_design=(),
        candidate=lambda p: Candidate(digest=SPACE.digest(p), edges=SPACE.resolve(p), source=lambda: Path("never")),
        evaluations=30,
        window=window,
    )
    with (
        Journal(tmp_path / "j.jsonl", {}) as journal,
        pytest.raises(UserError, match=r"none of the first 8 placements could be measured.*build: the machine was out"),
    ):
        run_search(task, executor, journal, lambda trial: None)
    assert len(executor.made) <= 8 + window


def test_a_journal_that_two_runs_wrote_is_refused(tmp_path):
    path = tmp_path / "j.jsonl"
    search(path, 0, window=1)
    lines = [json.dumps(each) for each in read_records(path)]
    write_lines(path, [*lines, lines[1]])
    with pytest.raises(UserError, match=r"line \d+: proposal 0, but expected \d+"):
        list(read_journal(path))
    write_lines(path, [*lines, lines[2]])
    with pytest.raises(UserError, match=r"line \d+: an outcome without its proposal"):
        list(read_journal(path))
