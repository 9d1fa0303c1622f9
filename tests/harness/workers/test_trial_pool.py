"""Trials in several workers: each submitted trial is collected once, whatever fails, is lost or is ended meanwhile."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from harness.base.errors import UserError
from harness.measure.records import Failed, Measured
from harness.plugins.api import Candidate
from harness.workers.engines import ExclusiveTiming, PolicedEngines, SerialTiming, TimingPolicy, WorkerLost
from harness.workers.trial_pool import SyncExecutor, ThreadedExecutor, run_concurrently

CANDIDATE = Candidate(digest="d", edges=(), source=lambda: Path("never"))
DONE = Measured(samples_ms=(1.0,), build_s=0.0, measure_s=0.0)


class Bench:
    """Factory of stand-ins for engines, which counts them."""

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


@contextmanager
def opened_queue(open_worker: Any, workers: int, trial: Callable[..., Any]) -> Iterator[Any]:
    pool = ThreadedExecutor(open_worker, workers, TimingPolicy())
    with pool, pool.open_queue(lambda engines: trial) as queue:
        yield queue


def outcomes(open_worker: Any, workers: int, trial: Callable[..., Any], count: int) -> dict[int, Any]:
    """Submit trials with their number as the incumbent, and collect them."""
    with opened_queue(open_worker, workers, trial) as queue:
        for number in range(count):
            queue.submit(number, CANDIDATE, number)
        return dict(queue.collect() for _ in range(count))


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_each_trial_is_collected_once(workers):
    bench = Bench()
    assert outcomes(bench.open, workers, lambda *_: DONE, 20) == dict.fromkeys(range(20), DONE)
    assert bench.opened == bench.closed == workers


def test_the_sync_executor_runs_a_trial_when_it_is_collected():
    made = []
    executor = SyncExecutor(lambda candidate, incumbent: made.append(incumbent) or DONE)  # type: ignore[func-returns-value]
    executor.submit(7, CANDIDATE, None)
    assert made == []
    assert executor.collect() == (7, DONE)


def test_outcomes_come_in_the_order_in_which_trials_finish():
    finish = threading.Event()
    with opened_queue(Bench().open, 2, lambda _, slow: ((slow and finish.wait(10)) and DONE) or DONE) as queue:
        for number in range(3):
            queue.submit(number, CANDIDATE, number == 0)
        order = [queue.collect()[0], queue.collect()[0]]
        finish.set()
        order.append(queue.collect()[0])
    assert order == [1, 2, 0]


def test_the_trial_of_a_lost_worker_is_reassigned_once():
    """The first attempt of trial 3 loses its worker, and so do all of trial 5."""
    bench, tried = Bench(), []

    def trial(candidate: Candidate, number: Any) -> Measured:
        tried.append(number)
        if number == 5 or (number == 3 and tried.count(3) == 1):
            raise WorkerLost("the worker on node-a was lost: power cut")
        return DONE

    found = outcomes(bench.open, 2, trial, 8)
    assert {number for number, outcome in found.items() if outcome == DONE} == set(range(8)) - {5}
    assert isinstance(found[5], Failed)
    assert (found[5].stage, tried.count(3), tried.count(5)) == ("crash", 2, 2)
    assert "2 workers" in found[5].reason
    assert "power cut" in found[5].reason
    assert bench.opened == bench.closed == 5, "three losses, and three openings after the first two"


def test_the_other_workers_continue_if_one_cannot_be_replaced():
    opened: list[int] = []

    @contextmanager
    def once() -> Iterator[Any]:
        opened.append(1)
        if len(opened) > 2:
            raise UserError("the node is gone")
        yield None

    lost: list[int] = []

    def trial(*_: Any) -> Measured:
        if not lost:
            lost.append(1)
            raise WorkerLost("gone")
        return DONE

    assert len(outcomes(once, 2, trial, 10)) == 10


def refuse(*_: Any) -> Any:
    raise UserError("disk full")


@pytest.mark.parametrize(("open_worker", "trial"), [(refuse, lambda *_: DONE), (Bench().open, refuse)])
def test_errors_of_all_workers_or_of_a_trial_reach_the_search(open_worker, trial):
    with opened_queue(open_worker, 3, trial) as queue:
        queue.submit(0, CANDIDATE, None)
        with pytest.raises(UserError, match="disk full"):
            queue.collect()


def test_an_interrupted_run_ends_running_trials():
    """Leaving the pool closes the engines that a trial waits for."""
    released = threading.Event()

    class Slow:
        def __enter__(self) -> Slow:
            return self

        def __exit__(self, *_: object) -> None:
            released.set()

    def trial(*_: Any) -> Measured:
        assert released.wait(15)
        return DONE

    def interrupt() -> None:
        with opened_queue(Slow, 1, trial) as queue:
            queue.submit(0, CANDIDATE, None)
            raise KeyboardInterrupt

    started_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert released.is_set()
    assert time.monotonic() - started_s < 14


@pytest.mark.parametrize(("policy", "overlap"), [(ExclusiveTiming(), False), (SerialTiming(), True)])
def test_timing_is_exclusive_and_builds_overlap_by_policy(policy, overlap):
    now = {"build": 0, "sample": 0}
    seen: set[tuple[int, int]] = set()
    lock = threading.Lock()

    class Engines:
        def _run(self, what: str) -> None:
            with lock:
                now[what] += 1
                seen.add((now["build"], now["sample"]))
            time.sleep(0.003)
            with lock:
                now[what] -= 1

        def build(self, *_: Any) -> None:
            self._run("build")

        def request(self, *_: Any) -> None:
            self._run("sample")

    def work() -> None:
        engines = PolicedEngines(Engines(), policy, threading.Lock())  # type: ignore[arg-type]
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
    assert any(builds and samples for builds, samples in seen) == overlap


@pytest.mark.parametrize("threads", [1, 2])
def test_concurrent_functions_all_run_and_the_first_error_is_raised(threads):
    done: list[int] = []
    run_concurrently([lambda n=n: done.append(n) for n in range(9)], threads)  # type: ignore[misc]
    assert sorted(done) == list(range(9))
    with pytest.raises(UserError, match="disk full"):
        run_concurrently([refuse, *([lambda: None] * 5)], threads)


def test_a_function_that_still_runs_does_not_keep_the_process_alive():
    code = """
import time
from harness.workers.trial_pool import run_concurrently

def refuse():
    raise RuntimeError("refused")

run_concurrently([lambda: time.sleep(600), refuse], 2)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "refused" in done.stderr
