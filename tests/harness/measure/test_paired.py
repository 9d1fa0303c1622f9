from __future__ import annotations

import numpy as np
import pytest

from harness.errors import MeasureFailed
from harness.measure.conditions import Conditions
from harness.measure.paired import Reference, take_beside
from harness.measure.sampling import take
from harness.measure.stats import Interval, median_ci
from harness.run.config import Sampling


class Machine:
    """Its pace changes every half second or so, by a third, for all that runs on it."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._pace, self._until_ms, self.now_ms = 1.0, 0.0, 0.0

    def run(self, latency_ms: float) -> float:
        while self.now_ms >= self._until_ms:
            self._pace = self._rng.choice([1.0, 1.35])
            self._until_ms += self._rng.exponential(500)
        reading = latency_ms * self._pace * float(np.exp(0.01 * self._rng.standard_normal()))
        self.now_ms += reading
        return reading


class Engine:
    def __init__(self, machine: Machine, latency_ms: float) -> None:
        self._machine, self._latency_ms = machine, latency_ms

    def sample(self, n: int) -> list[float]:
        return [self._machine.run(self._latency_ms) for _ in range(n)]


def measured(seed: int, latency_ms: float, beside: bool, **changes: float) -> float:
    machine = Machine(seed)
    sampling = Sampling(**{"warmup_ms": 20.0, **changes})
    if not beside:
        return median_ci(take(Engine(machine, latency_ms), sampling).latency_ms).value
    reference = Reference(Engine(machine, 10.0), 10.0)
    return median_ci(take_beside(Engine(machine, latency_ms), reference, sampling).latency_ms).value


def test_the_pace_of_a_restless_machine_is_taken_out() -> None:
    alone = [measured(seed, 4.0, beside=False) for seed in range(40)]
    beside = [measured(seed, 4.0, beside=True) for seed in range(40)]
    assert np.std(np.log(beside)) < np.std(np.log(alone)) / 4
    assert np.median(beside) == pytest.approx(4.0, rel=0.02)


def test_five_percent_are_told_apart() -> None:
    faster = [measured(seed, 4.0, beside=True) for seed in range(40)]
    slower = [measured(seed + 100, 4.2, beside=True) for seed in range(40)]
    assert np.mean(np.array(faster) < np.array(slower)) > 0.9


def test_raw_figures_are_kept() -> None:
    machine = Machine(3)
    samples = take_beside(Engine(machine, 4.0), Reference(Engine(machine, 8.0), 20.0), Sampling(warmup_ms=20.0))
    assert len(samples.beside_ms) == len(samples.raw_ms) + 1 == len(samples.latency_ms) + 1
    beside = np.array(samples.beside_ms)
    assert samples.latency_ms == pytest.approx(np.array(samples.raw_ms) * 20.0 / (0.5 * (beside[:-1] + beside[1:])))
    assert np.median(samples.latency_ms) == pytest.approx(10.0, rel=0.03), "on the scale of the level"
    assert samples.stable
    assert samples.warmup > 0


def test_a_lost_race_ends_early() -> None:
    def race(rival: Interval | None) -> tuple[int, int]:
        machine = Machine(5)
        sampling = Sampling(warmup_ms=20.0, target=1e-6)
        samples = take_beside(Engine(machine, 4.0), Reference(Engine(machine, 10.0), 10.0), sampling, rival)
        return len(samples.raw_ms), samples.saved

    turns, saved = race(Interval(value=2.0, low=1.9, high=2.1))
    assert (turns < race(None)[0], saved > 0, race(None)[1]) == (True, True, 0)


def test_a_slow_engine_gets_six_turns_however_short_the_time() -> None:
    machine = Machine(1)
    samples = take_beside(Engine(machine, 900.0), Reference(Engine(machine, 2000.0), 2000.0), Sampling(warmup_ms=20.0))
    assert len(samples.raw_ms) == 6


def test_an_impossible_reference_fails() -> None:
    class Stopped:
        def sample(self, n: int) -> list[float]:
            return [0.0] * n

    with pytest.raises(MeasureFailed, match="impossible latency of 0 ms"):
        take_beside(Engine(Machine(1), 4.0), Reference(Stopped(), 10.0), Sampling(warmup_ms=20.0))


class Still:
    """A machine that always says the same."""

    def read(self) -> Conditions:
        return Conditions(at_s=0.0, mhz=3000.0)


def test_what_the_device_did_beside_a_reference_is_kept() -> None:
    class Telling(Engine):
        def __init__(self, machine: Machine, latency_ms: float, gpu_mhz: float) -> None:
            super().__init__(machine, latency_ms)
            self.gpu_mhz, self.asked = gpu_mhz, 0

        def conditions(self) -> dict[str, float]:
            self.asked += 1
            return {"gpu_mhz": self.gpu_mhz}

    machine = Machine(3)
    candidate, reference = Telling(machine, 4.0, 1980.0), Telling(machine, 10.0, 1200.0)
    sampling = Sampling(warmup_ms=20.0)
    samples = take_beside(candidate, Reference(reference, 10.0), sampling, machine=Still())
    assert samples.conditions == {"mhz": 3000.0, "gpu_mhz": 1980.0}, "the candidate's, not the reference's"
    assert candidate.asked == 1, "after the turns, so that none is disturbed"
    assert take_beside(candidate, Reference(reference, 10.0), sampling).conditions == {}


def test_small_engines_get_no_more_time_than_large_ones() -> None:
    def spent_ms(latency_ms: float) -> float:
        machine = Machine(7)
        reference = Reference(Engine(machine, latency_ms), latency_ms)
        take_beside(Engine(machine, latency_ms), reference, Sampling(warmup_ms=20.0, target=1e-6, max_ms=400.0))
        return machine.now_ms

    assert spent_ms(0.5) == pytest.approx(spent_ms(10.0), rel=0.15)


class Crowded:
    """A machine on which another process works the first so many times that somebody looks."""

    def __init__(self, attempts: int) -> None:
        self._attempts, self._looks = attempts, 0

    def read(self) -> Conditions:
        self._looks += 1
        attempt, second = divmod(self._looks - 1, 2)
        waited_s = 0.5 if second and attempt < self._attempts else 0.0
        return Conditions(at_s=float(attempt + second), waited_s=waited_s)


@pytest.mark.parametrize(("attempts", "stable"), [(0, True), (1, True), (2, False)])
def test_turns_that_another_process_interrupted_are_taken_again(attempts: int, stable: bool) -> None:
    """Slices of time that others take do not cancel: the longer inferences meet more of them."""
    pace = Machine(7)
    reference = Reference(Engine(pace, 8.0), 8.0)
    found = take_beside(Engine(pace, 4.0), reference, Sampling(warmup_ms=20.0), machine=Crowded(attempts))
    assert found.stable is stable
    assert bool(found.discarded_ms) is (attempts > 0)
    assert found.disturbed == ("" if stable else found.trouble)
    assert found.trouble == (
        "waited for a core 50% of the time: something else runs on this machine" if attempts else ""
    )
