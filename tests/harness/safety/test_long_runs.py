"""A long search keeps figures and no more: a smaller size of tests/benchmarks/test_long_run_benchmark.py."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from harness.config.sections import PluginSpec, Sampling
from harness.measure.records import MAIN_BENCHMARKER
from harness.plugins.api import Candidate
from harness.results.journal import Journal
from harness.results.search_log import Goal
from harness.run.search.loop import SearchTask, run_search
from harness.run.search.optuna_mirror import mirror_to_optuna
from harness.run.search.trial import measure
from harness.workers.engines import WorkerSpec
from harness.workers.sandbox import InProcess
from harness.workers.trial_pool import SyncExecutor
from search.api import Observation, Placement
from search.synthetic_problem import synthetic_space

pytestmark = pytest.mark.slow
SPACE = synthetic_space(60, groups=10)
TRIALS = 500
BYTES = 40_000
"""Of a trial at most, so that 10,000 of them stay below half a GiB."""


class Blind:
    """Proposes whatever comes."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def ask(self, n: int) -> Sequence[Placement]:
        return [SPACE.random(self._rng) for _ in range(n)]

    def tell(self, observation: Observation) -> None:
        pass


def candidate(placement: Placement) -> Candidate:
    return Candidate(digest=SPACE.digest(placement), edges=SPACE.resolve(placement), source=lambda: Path("never"))


def test_memory_and_journal_size_of_long_search_are_bounded(tmp_path):
    use = PluginSpec(use="simulated", params={"seed": 1, "noise_seed": 1})
    task = SearchTask(space=SPACE, searcher=Blind(), initial_design=(), candidate=candidate, evaluations=TRIALS)
    watch = mirror_to_optuna(tmp_path / "live.journal", "task/blind-0", SPACE, Goal(), fresh=True)
    with (
        InProcess(WorkerSpec(benchmarkers={MAIN_BENCHMARKER: use}, workdir=tmp_path / "work")) as engines,
        Journal(tmp_path / "blind-0.jsonl", {}) as journal,
    ):
        tracemalloc.start()
        run_search(
            task,
            SyncExecutor(partial(measure, engines=engines, sampling=Sampling(warmup_ms=0, max_samples=20))),
            journal,
            watch,
        )
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < BYTES * TRIALS
    assert (tmp_path / "blind-0.jsonl").stat().st_size < 3000 * TRIALS
