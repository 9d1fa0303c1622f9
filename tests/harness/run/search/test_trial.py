"""One trial: what is scored, what is taken again before it is believed, and what its record says."""

from __future__ import annotations

import time
from collections.abc import Container, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.base.statistics import Interval
from harness.config.sections import Sampling
from harness.measure.records import MAIN_BENCHMARKER, Failed, Measured, Outcome, TrialResult, decode_line, encode_line
from harness.measure.sampling import Samples
from harness.plugins.api import Accuracy, Candidate
from harness.results.search_log import Goal
from harness.run.search.trial import AccuracyGate, NoisePolicy, measure
from harness.workers.engines import BuiltEngine

CANDIDATE = Candidate(digest="d", edges=(), source=lambda: Path("never"))
SAMPLING = Sampling()
JUDGE = AccuracyGate(goal=Goal(metric="map", reference=0.5))
INCUMBENT = Interval(value=10.0, low=9.9, high=10.1)


class Bench:
    """Engines whose builds have these latencies, one after the other; text is a failure of that stage.

    The readings of builds whose number is in `disturbed` have a wide interval and are not stable.
    """

    def __init__(self, *builds: float | str, score: float | None = 0.5, disturbed: Container[int] = ()) -> None:
        self.builds = list(builds)
        self.disturbed = disturbed
        self.sampled = 0
        self.score = score
        self.diary: list[str] = []

    def build(self, candidate: Candidate, benchmarker: str = MAIN_BENCHMARKER) -> BuiltEngine | Failed:
        self.diary.append("build")
        if self.builds[0] == "build":
            return Failed(stage="build", reason="no")
        return BuiltEngine(handle=0, build_s=0.5, info={"left": len(self.builds)})

    def sample(
        self, handle: int, sampling: Sampling, rival: Interval | None = None, level_ms: float | None = None
    ) -> Samples | Failed:
        value = self.builds.pop(0)
        if isinstance(value, str):
            return Failed(stage="measure", reason="no")
        stable = self.sampled not in self.disturbed
        self.sampled += 1
        spread = 0.001 if stable else 0.99
        readings = (value * (1 - spread), value, value * (1 + spread))
        return Samples(latency_ms=readings, warmup=3, measure_s=0.25, stable=stable, saved=4, conditions={"load": 1.0})

    def evaluate(self, handle: int, evaluator: str = MAIN_BENCHMARKER) -> Accuracy | Failed:
        self.diary.append("evaluate")
        if self.score is None:
            return Failed(stage="evaluate", reason="no")
        return Accuracy(metrics={"map": self.score}, per_item=(1.0, 0.0))

    def prepare(self, handle: int, evaluator: str = MAIN_BENCHMARKER) -> Failed | None:
        return None

    def release(self, handle: int) -> None:
        self.diary.append("release")

    def describe(self, benchmarker: str = MAIN_BENCHMARKER) -> Mapping[str, Any]:
        return {}


def measured(outcome: Outcome) -> Measured:
    assert isinstance(outcome, Measured), outcome
    return outcome


def test_first_candidate_is_built_once_without_rival():
    bench = Bench(5.0)
    found = measured(measure(CANDIDATE, None, engines=bench, sampling=SAMPLING))
    assert (found.samples_ms[1], found.rebuilt_ms, found.saved, found.conditions) == (5.0, (), 4, {"load": 1.0})
    assert bench.diary == ["build", "release"]


def test_release_time_is_recorded():
    class Slow(Bench):
        def release(self, handle: int) -> None:
            time.sleep(0.01)

    found = measured(measure(CANDIDATE, INCUMBENT, engines=Slow(5.0, 5.1), sampling=SAMPLING))
    assert found.release_s >= 0.02, "two builds"


@pytest.mark.parametrize("latency_ms", [9.95, 10.0, 30.0])
def test_candidate_without_significant_gain_is_built_once(latency_ms):
    bench = Bench(latency_ms)
    assert measured(measure(CANDIDATE, INCUMBENT, engines=bench, sampling=SAMPLING)).rebuilt_ms == ()
    assert bench.diary == ["build", "release"]


def test_confirmed_gain_uses_readings_of_rebuild():
    bench = Bench(5.0, 5.1)
    found = measured(measure(CANDIDATE, INCUMBENT, engines=bench, sampling=SAMPLING))
    assert found.samples_ms[1] == 5.1
    assert [readings[1] for readings in found.rebuilt_ms] == [5.0]
    assert bench.diary == ["build", "release", "build", "release"]
    assert (found.build_s, found.measure_s, found.saved) == (1.0, 0.5, 8)


@pytest.mark.parametrize(("third", "believed"), [(5.2, 5.2), (12.0, 12.0), (11.0, 11.0)])
def test_third_build_decides_if_rebuild_disagrees(third, believed):
    found = measured(measure(CANDIDATE, INCUMBENT, engines=Bench(5.0, 13.0, third), sampling=SAMPLING))
    assert found.samples_ms[1] == believed
    assert len(found.rebuilt_ms) == 2
    assert found.build_s == 1.5


def test_single_low_reading_is_discarded():
    found = measured(measure(CANDIDATE, INCUMBENT, engines=Bench(2.0, 10.0, 10.05), sampling=SAMPLING))
    assert found.samples_ms[1] == 10.0


@pytest.mark.parametrize(
    ("builds", "disturbed", "believed"),
    [
        ((5.0, 12.0), (0,), 12.0),
        ((5.0, 9.99), (0,), 9.99),
        ((5.0, 4.0, 12.0), (0, 1), 12.0),
        ((5.0, 4.0, 4.5), (0, 1, 2), 4.5),
        ((5.0, 4.5, 12.0), (1,), 12.0),
        ((5.0, 13.0, 12.0), (1, 2), 12.0),
    ],
)
def test_disturbed_gain_is_rebuilt(builds, disturbed, believed):
    bench = Bench(*builds, disturbed=disturbed)
    found = measured(measure(CANDIDATE, INCUMBENT, engines=bench, sampling=SAMPLING))
    assert found.samples_ms[1] == believed
    assert bench.diary.count("build") == len(builds)


def test_disturbed_readings_are_discarded_but_recorded():
    found = measured(measure(CANDIDATE, INCUMBENT, engines=Bench(5.0, 9.0, disturbed=(0,)), sampling=SAMPLING))
    assert found.rebuilt_ms == ()
    assert found.discarded_ms[1] == 5.0


def test_disturbed_reading_without_gain_is_not_rebuilt():
    bench = Bench(10.0, disturbed=(0,))
    assert not measured(measure(CANDIDATE, INCUMBENT, engines=bench, sampling=SAMPLING)).stable
    assert bench.diary.count("build") == 1


def test_disturbed_reading_is_accepted_without_rebuilds():
    bench = Bench(5.0, disturbed=(0,))
    assert (
        measured(
            measure(CANDIDATE, INCUMBENT, engines=bench, sampling=SAMPLING, noise=NoisePolicy(builds=1))
        ).samples_ms[1]
        == 5.0
    )
    assert bench.diary.count("build") == 1


def test_gain_within_noise_floor_is_not_rebuilt():
    bench = Bench(9.5)
    measure(CANDIDATE, INCUMBENT, engines=bench, sampling=SAMPLING, noise=NoisePolicy(noise_floor=0.1))
    assert bench.diary.count("build") == 1


@pytest.mark.parametrize("builds", [("build",), ("sample",), (5.0, "build"), (5.0, "sample"), (5.0, 12.0, "build")])
def test_failed_build_is_outcome_and_engines_are_released(builds):
    bench = Bench(*builds)
    found = measure(CANDIDATE, INCUMBENT, engines=bench, sampling=SAMPLING)
    assert isinstance(found, Failed)
    assert bench.diary.count("release") == bench.diary.count("build") - (builds[-1] == "build")


def test_only_faster_candidate_is_scored_once():
    slow, fast = Bench(11.0), Bench(5.0, 5.0)
    assert measured(measure(CANDIDATE, INCUMBENT, engines=slow, sampling=SAMPLING, gate=JUDGE)).metrics == {}
    found = measured(measure(CANDIDATE, INCUMBENT, engines=fast, sampling=SAMPLING, gate=JUDGE))
    assert (found.metrics, found.per_item) == ({"map": 0.5}, (1.0, 0.0))
    assert fast.diary.count("evaluate") == 1


def test_infeasible_candidate_is_not_rebuilt():
    bench = Bench(5.0)
    attempt = partial(
        measure,
        engines=bench,
        sampling=SAMPLING,
        gate=AccuracyGate(goal=Goal(metric="map", reference=0.7, max_drop=0.1)),
    )
    assert measured(attempt(CANDIDATE, INCUMBENT)).samples_ms[1] == 5.0
    assert bench.diary == ["build", "evaluate", "release"]


def test_an_evaluation_that_fails_is_the_outcome():
    found = measure(CANDIDATE, None, engines=Bench(5.0, score=None), sampling=SAMPLING, gate=JUDGE)
    assert isinstance(found, Failed)
    assert found.stage == "evaluate"


def test_outcome_round_trips_through_journal():
    outcome = measure(CANDIDATE, INCUMBENT, engines=Bench(5.0, 13.0, 6.0), sampling=SAMPLING, gate=JUDGE)
    told = TrialResult(number=3, outcome=outcome, elapsed_s=1.5)
    assert decode_line(encode_line(told)) == told


def test_journals_from_before_racing_are_read():
    outcome = '{"status":"measured","samples_ms":[1.5],"build_s":0.1,"measure_s":0.2}'
    told = decode_line(f'{{"kind":"result","number":0,"outcome":{outcome},"elapsed_s":1}}')
    assert isinstance(told, TrialResult)
    assert measured(told.outcome).rebuilt_ms == ()
