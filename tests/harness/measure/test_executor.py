"""Several attempts at once: whatever is given out comes back once, whoever fails, leaves or is ended on the way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from harness.api import Candidate
from harness.errors import UserError
from harness.measure.executor import Inline, Pool, WorkerLost, at_once
from harness.measure.gate import Alternating, Beside, Gate, Gated, Open
from harness.records import Failed, Measured

CANDIDATE = Candidate(digest="d", edges=(), source=lambda: Path("never"))
DONE = Measured(samples_ms=(1.0,), build_s=0.0, measure_s=0.0)


@pytest.mark.parametrize("threads", [1, 2])
def test_whatever_a_work_raises_is_raised(threads: int) -> None:
    def breaks() -> None:
        raise IndexError("list index out of range")

    with pytest.raises(IndexError, match="list index out of range"):
        at_once([breaks, lambda: None], threads)


class Bench:
    """Stands for engines; knows how many of it are open."""

    def __init__(self) -> None:
        self.opened = 0
        self.closed = 0

    @contextmanager
    def open(self) -> Iterator[Any]:
        self.opened += 1
        try:
            yield self
        finally:
            self.closed += 1


def outcomes(pool: Pool, attempt: Callable[..., Any], count: int) -> dict[int, Any]:
    with pool, pool.lane(lambda engines: attempt) as lane:
        for number in range(count):
            lane.submit(number, CANDIDATE, None)
        return dict(lane.collect() for _ in range(count))


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_what_is_given_out_comes_back_once(workers: int) -> None:
    bench = Bench()
    found = outcomes(Pool(bench.open, workers, Open()), lambda *_: DONE, 20)
    assert found == dict.fromkeys(range(20), DONE)
    assert bench.opened == bench.closed == workers


def test_inline_makes_the_attempt_when_it_is_asked_for() -> None:
    made = []
    lane = Inline(lambda candidate, incumbent: made.append(incumbent) or DONE)  # type: ignore[func-returns-value]
    lane.submit(7, CANDIDATE, None)
    assert made == []
    assert lane.collect() == (7, DONE)


def test_workers_that_are_slow_are_overtaken() -> None:
    order, gone = [], threading.Event()

    def attempt(candidate: Candidate, incumbent: Any) -> Measured:
        if incumbent == "slow":
            gone.wait(10)
        return DONE

    with Pool(Bench().open, 2, Open()) as pool, pool.lane(lambda engines: attempt) as lane:
        lane.submit(0, CANDIDATE, "slow")  # type: ignore[arg-type]
        for number in (1, 2):
            lane.submit(number, CANDIDATE, None)
        order += [lane.collect()[0], lane.collect()[0]]
        gone.set()
        order.append(lane.collect()[0])
    assert order == [1, 2, 0]


def test_a_worker_that_is_lost_gives_its_trial_back_once() -> None:
    """The first attempt of trial 3 loses its worker, and so do all of trial 5."""
    bench, tried = Bench(), []

    def attempt(candidate: Candidate, incumbent: Any) -> Measured:
        tried.append(incumbent)
        if incumbent == 5 or (incumbent == 3 and tried.count(3) == 1):
            raise WorkerLost("the worker on node-a was lost: power cut")
        return DONE

    with Pool(bench.open, 2, Open()) as pool, pool.lane(lambda engines: attempt) as lane:
        for number in range(8):
            lane.submit(number, CANDIDATE, number)  # type: ignore[arg-type]
        found = dict(lane.collect() for _ in range(8))
    assert {number for number, outcome in found.items() if outcome == DONE} == set(range(8)) - {5}
    assert isinstance(found[5], Failed)
    assert (found[5].stage, tried.count(3), tried.count(5)) == ("crash", 2, 2)
    assert "2 workers were lost one after the other while they had it" in found[5].reason
    assert bench.opened == bench.closed == 5, "three losses, and three openings beside the first two"


def test_when_no_worker_can_be_opened_the_search_is_told_why() -> None:
    def refused() -> Any:
        raise UserError("no such runtime here")

    with Pool(refused, 3, Open()) as pool, pool.lane(lambda engines: lambda *_: DONE) as lane:
        lane.submit(0, CANDIDATE, None)
        with pytest.raises(UserError, match="no such runtime here"):
            lane.collect()


def test_those_that_are_left_go_on_when_a_worker_cannot_come_back() -> None:
    opened = []

    @contextmanager
    def once() -> Iterator[Any]:
        opened.append(1)
        if len(opened) > 2:
            raise UserError("the node is gone")
        yield None

    lost: list[int] = []

    def attempt(candidate: Candidate, incumbent: Any) -> Measured:
        if not lost:
            lost.append(1)
            raise WorkerLost("gone")
        return DONE

    assert len(outcomes(Pool(once, 2, Open()), attempt, 10)) == 10


def test_what_an_attempt_raises_reaches_the_search() -> None:
    def attempt(*_: Any) -> Any:
        raise UserError("disk full")

    with Pool(Bench().open, 2, Open()) as pool, pool.lane(lambda engines: attempt) as lane:
        lane.submit(0, CANDIDATE, None)
        with pytest.raises(UserError, match="disk full"):
            lane.collect()


def test_a_run_that_is_cut_off_ends_what_is_under_way() -> None:
    """Leaving the pool closes the engines that an attempt waits for."""
    released = threading.Event()

    class Slow:
        def __enter__(self) -> Slow:
            return self

        def __exit__(self, *_: object) -> None:
            released.set()

    def attempt(*_: Any) -> Measured:
        assert released.wait(15)
        return DONE

    def cut_off() -> None:
        pool = Pool(Slow, 1, Open())  # type: ignore[arg-type]
        with pool, pool.lane(lambda engines: attempt) as lane:
            lane.submit(0, CANDIDATE, None)
            raise KeyboardInterrupt

    started_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        cut_off()
    assert released.is_set()
    assert time.monotonic() - started_s < 14


@pytest.mark.parametrize(("gate", "beside"), [(Alternating(), False), (Beside(), True)])
def test_only_one_is_timed_and_what_runs_beside_it_is_as_the_gate_says(gate: Gate, beside: bool) -> None:
    now = {"build": 0, "sample": 0}
    seen: set[tuple[int, int]] = set()
    lock = threading.Lock()

    class Engines:
        def __init__(self, kind: str = "") -> None:
            self.kind = kind

        def _do(self, what: str) -> None:
            with lock:
                now[what] += 1
                seen.add((now["build"], now["sample"]))
            time.sleep(0.003)
            with lock:
                now[what] -= 1

        def build(self, candidate: Candidate, benchmarker: str) -> None:
            self._do("build")

        def sample(self, handle: int, sampling: Any, rival: Any, level_ms: Any) -> None:
            self._do("sample")

    def work() -> None:
        engines = Gated(Engines(), gate, threading.Lock())  # type: ignore[arg-type]
        for _ in range(15):
            engines.build(CANDIDATE)
            engines.sample(0, None)  # type: ignore[arg-type]

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert max(samples for _, samples in seen) == 1
    assert any(builds > 1 for builds, _ in seen), "builds run together"
    assert any(builds and samples for builds, samples in seen) == beside


def test_works_at_once_are_all_done_and_the_first_error_is_raised() -> None:
    done: list[int] = []
    at_once([lambda n=n: done.append(n) for n in range(9)], 3)  # type: ignore[misc]
    assert sorted(done) == list(range(9))

    def broken() -> None:
        raise UserError("this one")

    with pytest.raises(UserError, match="this one"):
        at_once([broken, *([lambda: None] * 5)], 2)
