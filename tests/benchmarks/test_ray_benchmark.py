"""What Ray adds to a trial, and what a second worker gives, on a real cluster of two nodes on this machine.

Run with `pytest tests/benchmarks/test_ray_benchmark.py --benchmark-enable -s` on a machine that does nothing else; it
prints rows for docs/explanation/reliability.md. Figures to reach: 20 ms a trial more than in this process, and with two
workers 1.7 times the trials a minute where builds take 0.2 s of processor time. Needs two cores, and one more for the
driver helps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from harness.base.progress import NullProgress
from harness.config.sections import ExecutorSpec, Limits, PluginSpec, Sampling
from harness.graph.io.files import model_files
from harness.measure.records import MAIN_BENCHMARKER
from harness.plugins.api import Candidate
from harness.results.journal import Journal
from harness.run.search.loop import SearchTask, run_search
from harness.run.search.trial import measure
from harness.workers.engines import WorkerSpec
from harness.workers.ray import RAY_ENVIRONMENT, open_execution_target
from search.api import Observation, Placement
from search.synthetic_problem import synthetic_space

pytestmark = pytest.mark.slow
SPACE = synthetic_space(20, groups=5)
ROUNDS = 3
SHORT, LONG = 300, 60
"""Trials of a search that measures what Ray adds, and of one that builds."""
BUILD_S = 0.2


class Blind:
    """Proposes whatever comes, so that nothing but the trials takes time."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def ask(self, n: int) -> Sequence[Placement]:
        return [SPACE.random(self._rng) for _ in range(n)]

    def tell(self, observation: Observation) -> None:
        pass


class Driver:
    """Searches on this machine's processes, or on Ray, and says how long a trial took.

    Args:
        folder: For journals and scratch files.
        address: Of the cluster.
    """

    def __init__(self, folder: Path, address: str) -> None:
        self._folder = folder
        self._address = address

    def trial_s(self, executor: ExecutorSpec, cost_s: float, trials: int) -> list[float]:
        """Wall-clock of a trial, once for each round; the workers are warm."""
        with (
            open_execution_target(executor, Limits(), None, NullProgress(), model_files) as site,
            self._lanes(site, cost_s) as lane,
        ):
            return [self._search(lane, executor.max_pending, trials, number) for number in range(ROUNDS)]

    def on_ray(self, workers: int) -> ExecutorSpec:
        """An executor with this number of workers."""
        return ExecutorSpec(use="ray", address=self._address, workers=workers)

    @contextmanager
    def _lanes(self, site: Any, cost_s: float) -> Iterator[Any]:
        params = {"seed": 1, "noise_seed": 1, "cost_s": cost_s}
        spec = WorkerSpec(
            benchmarkers={MAIN_BENCHMARKER: PluginSpec(use="costly:Costly", params=params)},
            workdir=self._folder / "work",
        )
        attempt = lambda engines: partial(measure, engines=engines, sampling=Sampling(max_samples=20))  # noqa: E731
        with site.open(spec) as engines, site.workers(spec, engines, None, None) as workers:
            with workers.lane(attempt) as lane:
                for _ in range(8):  # until every worker has its engines
                    lane.submit(-1, _candidate(SPACE.quantize_all()), None)
                for _ in range(8):
                    lane.collect()
            with workers.lane(attempt) as lane:
                yield lane

    def _search(self, lane: Any, window: int, trials: int, number: int) -> float:
        path = self._folder / "journal.jsonl"
        path.unlink(missing_ok=True)
        task = SearchTask(
            space=SPACE, searcher=Blind(), initial_design=(), candidate=_candidate, evaluations=trials, window=window
        )
        with Journal(path, {"round": number}) as journal:
            started_s = time.monotonic()
            run_search(task, lane, journal, lambda trial: None)
            return (time.monotonic() - started_s) / trials


def _candidate(placement: Placement) -> Candidate:
    return Candidate(digest=SPACE.digest(placement), edges=SPACE.resolve(placement), source=lambda: Path("never"))


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in RAY_ENVIRONMENT.items():
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster

        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        for _ in range(2):
            made.add_node(num_cpus=1)
        yield Driver(tmp_path_factory.mktemp("ray"), made.address)
        made.shutdown()


def test_ray_overhead_per_trial(benchmark, request):
    if benchmark.disabled:
        pytest.skip("tests/harness/workers/ray runs a cluster; enable benchmarks to take its time")
    driver: Driver = request.getfixturevalue("driver")
    here = driver.trial_s(ExecutorSpec(), 0.0, SHORT)
    there = benchmark.pedantic(lambda: driver.trial_s(driver.on_ray(1), 0.0, SHORT), rounds=1)
    added = [1e3 * (ray_s - local_s) for ray_s, local_s in zip(there, here, strict=True)]
    benchmark.extra_info["added_ms"] = added
    print(
        f"\n| a trial through Ray, {SHORT} trials, {ROUNDS} times | {median(added):.1f} ms more than in the driver "
        f"({min(added):.1f} to {max(added):.1f}; {1e3 * median(there):.1f} and {1e3 * median(here):.1f} in all) |"
    )


def test_ray_speedup_of_second_worker(benchmark, request):
    if benchmark.disabled:
        pytest.skip("tests/harness/workers/ray runs a cluster; enable benchmarks to take its time")
    driver: Driver = request.getfixturevalue("driver")
    one = driver.trial_s(driver.on_ray(1), BUILD_S, LONG)
    two = benchmark.pedantic(lambda: driver.trial_s(driver.on_ray(2), BUILD_S, LONG), rounds=1)
    gain = [alone_s / both_s for alone_s, both_s in zip(one, two, strict=True)]
    benchmark.extra_info["gain"] = gain
    print(
        f"\n| two workers, builds of {BUILD_S} s of processor time, {LONG} trials, {ROUNDS} times | {median(gain):.2f} "
        f"times the trials a minute of one ({min(gain):.2f} to {max(gain):.2f}) |"
    )
