"""Whether intervals cover and claims hold where the truth is known: searches and confirmations, simulated.

The tests run a few; `python tests/harness/run/test_interval_coverage.py 1000` prints the figures of
docs/explanation/measurement.md.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from harness.base.statistics import median_ci
from harness.config.sections import Confirmation, PluginSpec, Sampling
from harness.measure.records import Measured
from harness.measure.turn_log import ConfirmationSummary, summarize_turns
from harness.plugins import registry
from harness.plugins.api import Candidate
from harness.results.journal import Journal, read_journal
from harness.results.search_log import Goal, state_at_budgets
from harness.run.confirm.confirmation import TimedRow, confirm
from harness.run.search.loop import InitialPlacement, SearchTask, run_search
from harness.run.search.trial import measure
from harness.workers.engines import Engines, WorkerSpec
from harness.workers.sandbox import InProcess
from harness.workers.trial_pool import SyncExecutor
from search.api import Placement
from search.space import Dimension, Edge, Space

FULL_TURNS = True
SPACE = Space(
    tuple(
        Dimension(
            name=f"p{i}",
            group=f"g{i // 2}",
            kind="node_input",
            choices=("float", "int8"),
            edges=(Edge("t", f"n{i}", 0),),
        )
        for i in range(10)
    )
)
PLAN = Confirmation()
FEWER_TURNS = Confirmation(rounds=4)
"""Of the tests: intervals are over builds, so that more turns of each change no coverage."""
FLAT_EVALUATIONS = 25
FLOOR_PLAN = Confirmation(builds=3, rounds=4, samples=5)
SIMULATED = "harness.runtimes.simulated:SimulatedBenchmarker"
"""By its place, not by its name: looking names up takes longer than the rest."""
NOISE = {"noise": 0.02, "build_noise": 0.02}
"""Of readings within a run and between builds: a quiet machine."""
RESTLESS = {
    "noise": 0.1, "build_noise": 0.05, "wander": 0.15, "wander_readings": 40.0, "outliers": 0.1, "outlier_size": 0.5,
}  # fmt: skip
"""As the committed tables' `variance`: tenths between readings and between turns, a twentieth between builds."""


def candidate(placement: Placement) -> Candidate:
    return Candidate(digest=SPACE.digest(placement), edges=SPACE.resolve(placement), source=lambda: Path("never"))


def engines(
    folder: Path, number: int, effect: float, noise: Mapping[str, float] = NOISE
) -> Callable[[], AbstractContextManager[Engines]]:
    """Opens engines with noise of their own each time, the same in each run of this file."""
    seeds = itertools.count(number * 1000)

    def open_engines() -> InProcess:
        params = {**noise, "effect": effect, "noise_seed": next(seeds)}
        return InProcess(WorkerSpec(benchmarkers={"main": PluginSpec(use=SIMULATED, params=params)}, workdir=folder))

    return open_engines


def confirmed(
    open_engines: Callable[[], AbstractContextManager[Engines]], *placements: Placement, plan: Confirmation = PLAN
) -> ConfirmationSummary:
    """The confirmation of these placements as rows "0", "1", ..., with the floor from before."""
    float_row = TimedRow(name="float", candidate=candidate(SPACE.float_placement()))
    before = confirm([], float_row, open_engines=open_engines, schedule=FLOOR_PLAN, rng=np.random.default_rng(0))
    noise_floor = summarize_turns(before, "float").noise_floor
    rows = [TimedRow(name=str(number), candidate=candidate(placement)) for number, placement in enumerate(placements)]
    events = confirm(rows, float_row, open_engines=open_engines, schedule=plan, rng=np.random.default_rng(0))
    return summarize_turns(events, "float", noise_floor=noise_floor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one search on a flat landscape came to.

    Attributes:
        naive: Its own samples say that the winner is faster: intervals apart.
        shrinkage: Its speedup by its own samples, less the confirmed one.
    """

    verdict: str
    naive: bool
    shrinkage: float
    retaken: int
    saved: int
    samples: int


def flat_search(folder: Path, number: int, plan: Confirmation = PLAN) -> Found:
    """A search where nothing is faster than anything else, and the confirmation of its winner."""
    open_engines = engines(folder, number, effect=0.0)
    path = folder / f"{number}.jsonl"
    seeds = (
        InitialPlacement(name="float", placement=SPACE.float_placement()),
        InitialPlacement(name="all", placement=SPACE.quantize_all()),
    )
    task = SearchTask(
        space=SPACE,
        searcher=registry.load_plugin("searcher", "random")(SPACE, seed=number),  # type: ignore[operator]
        initial_design=seeds,
        candidate=candidate,
        evaluations=FLAT_EVALUATIONS,
    )
    with open_engines() as opened, Journal(path, {}) as journal:
        run_search(task, SyncExecutor(partial(measure, engines=opened, sampling=Sampling())), journal, lambda _: None)
    entries = tuple(read_journal(path))
    outcomes = [entry.result.outcome for entry in entries if entry.result is not None]
    measured = [outcome for outcome in outcomes if isinstance(outcome, Measured)]
    winner = state_at_budgets(entries, Goal(), [FLAT_EVALUATIONS])[FLAT_EVALUATIONS].best[0]
    own = next(
        m for e, m in zip((e for e in entries if e.result), measured, strict=True) if e.proposal.digest == winner.digest
    )
    float_ms, best_ms = median_ci(measured[0].samples_ms), median_ci(own.samples_ms)
    row = confirmed(open_engines, Placement(winner.choices), plan=plan).rows["0"]
    return Found(
        verdict=row.verdict,
        naive=best_ms.high < float_ms.low,
        shrinkage=row.shrinkage(float_ms.value / best_ms.value),
        retaken=sum(bool(m.rebuilt_ms) for m in measured),
        saved=sum(m.saved for m in measured),
        samples=sum(len(m.samples_ms) for m in measured),
    )


def coverage(folder: Path, runs: int, plan: Confirmation = PLAN) -> tuple[float, float, float]:
    """Share of 95 % intervals that hold the truth: of the speedup, of the latency, of one engine's median."""
    placement = SPACE.quantize_all()
    with engines(folder, 0, effect=0.05)() as opened:
        truth_ms = float(opened.build(candidate(placement)).info["truth_ms"])  # type: ignore[union-attr]
    hits = np.zeros(3)
    for number in range(runs):
        open_engines = engines(folder, number, effect=0.05)
        row = confirmed(open_engines, placement, plan=plan).rows["0"]
        hits[0] += row.speedup.low <= 10.0 / truth_ms <= row.speedup.high
        hits[1] += row.latency_ms.low <= truth_ms <= row.latency_ms.high
        rng = np.random.default_rng([number, 1])
        found = median_ci(truth_ms * np.exp(NOISE["noise"] * rng.standard_normal(40)))
        hits[2] += found.low <= truth_ms <= found.high
    speedup, latency, median = hits / runs
    return float(speedup), float(latency), float(median)


def speedup_coverage(folder: Path, runs: int, noise: Mapping[str, float], plan: Confirmation = PLAN) -> float:
    """Share of 95 % intervals that hold the true speedup. (A latency has the delays in it, and no single truth.)"""
    placement = SPACE.quantize_all()
    with engines(folder, 0, effect=0.05)() as opened:
        truth = 10.0 / float(opened.build(candidate(placement)).info["truth_ms"])  # type: ignore[union-attr]
    found = (confirmed(engines(folder, n, 0.05, noise), placement, plan=plan) for n in range(runs))
    rows = (summary.rows["0"].speedup for summary in found)
    return sum(speedup.low <= truth <= speedup.high for speedup in rows) / runs


@pytest.mark.slow
def test_speedup_intervals_cover_with_machine_drift(tmp_path):
    assert 0.905 <= speedup_coverage(tmp_path, 150, RESTLESS, FEWER_TURNS) <= 0.995


@pytest.mark.slow
def test_speedup_intervals_have_nominal_coverage(tmp_path):
    """Of 150 the standard error is 1.8 %, so 90.5 to 99.5 % is what a true 95 % gives."""
    for share in coverage(tmp_path, 150, FEWER_TURNS):
        assert 0.905 <= share <= 0.995


@pytest.fixture(scope="module")
def flat(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flat")
    return [flat_search(folder, number, FEWER_TURNS) for number in range(60)]


@pytest.mark.slow
def test_searches_on_flat_landscape_claim_no_speedup(flat):
    assert sum(found.verdict == "faster" for found in flat) <= 3


@pytest.mark.slow
def test_search_readings_overestimate_speedup_of_winner(flat):
    assert sum(found.naive for found in flat) > len(flat) / 2
    assert np.mean([found.shrinkage for found in flat]) > 0.01


def _lines(folder: Path, runs: int) -> Iterator[str]:
    speedup, latency, median = coverage(folder, runs)
    yield f"intervals of {runs} confirmations: speedup {speedup:.1%}, latency {latency:.1%}; of a median {median:.1%}"
    yield f"on a restless machine: speedup {speedup_coverage(folder, runs, RESTLESS):.1%}"
    flat = [flat_search(folder, number) for number in range(runs // 5)]
    claims, slower = (sum(found.verdict == verdict for found in flat) for verdict in ("faster", "slower"))
    yield f"{len(flat)} flat searches: {claims} claim faster, {slower} slower"
    yield f"by the search's own samples: {sum(found.naive for found in flat)}"
    yield f"mean shrinkage {np.mean([found.shrinkage for found in flat]):.3f}"
    yield f"surprises built again: {sum(found.retaken for found in flat) / len(flat):.1f} a search"
    saved, taken = (sum(getattr(found, name) for found in flat) for name in ("saved", "samples"))
    yield f"inferences saved: {saved} of {saved + taken}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        for line in _lines(Path(scratch), int(sys.argv[1]) if len(sys.argv) > 1 else 1000):
            print(line)
