from __future__ import annotations

import numpy as np
import pytest

from harness.base.errors import MeasureFailed
from harness.base.statistics import Interval, median_ci
from harness.config.sections import Sampling
from harness.measure.machine_noise import MachineSnapshot
from harness.measure.sampling import Samples, sample_engine

SAMPLING = Sampling(warmup_ms=20.0)


class Machine:
    """Machine whose speed changes every half second or so, by a third, for all engines."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._slowdown, self._until_ms, self.now_ms = 1.0, 0.0, 0.0

    def run(self, latency_ms: float) -> float:
        while self.now_ms >= self._until_ms:
            self._slowdown = self._rng.choice([1.0, 1.35])
            self._until_ms += self._rng.exponential(500)
        reading = latency_ms * self._slowdown * float(np.exp(0.01 * self._rng.standard_normal()))
        self.now_ms += reading
        return reading


class Engine:
    def __init__(self, machine: Machine, latency_ms: float) -> None:
        self._machine, self._latency_ms = machine, latency_ms

    def sample(self, n: int) -> list[float]:
        return [self._machine.run(self._latency_ms) for _ in range(n)]


def paired(
    pace: Machine, latency_ms: float, reference_ms: float = 10.0, level_ms: float = 10.0, **changes: object
) -> Samples:
    reference = (Engine(pace, reference_ms), level_ms)
    return sample_engine(Engine(pace, latency_ms), changes.pop("sampling", SAMPLING), reference=reference, **changes)


def medians(latency_ms: float, first_seed: int = 0) -> list[float]:
    seeds = range(first_seed, first_seed + 40)
    return [median_ci(paired(Machine(seed), latency_ms).latency_ms).value for seed in seeds]


def test_machine_speed_changes_cancel():
    alone = [median_ci(sample_engine(Engine(Machine(seed), 4.0), SAMPLING).latency_ms).value for seed in range(40)]
    assert np.std(np.log(medians(4.0))) < np.std(np.log(alone)) / 4
    assert np.median(medians(4.0)) == pytest.approx(4.0, rel=0.02)


def test_a_difference_of_five_percent_is_seen():
    assert np.mean(np.array(medians(4.0)) < np.array(medians(4.2, 100))) > 0.9


def test_raw_and_reference_readings_are_recorded():
    samples = paired(Machine(3), 4.0, reference_ms=8.0, level_ms=20.0)
    assert len(samples.reference_ms) == len(samples.raw_ms) + 1 == len(samples.latency_ms) + 1
    reference = np.array(samples.reference_ms)
    assert samples.latency_ms == pytest.approx(
        np.array(samples.raw_ms) * 20.0 / (0.5 * (reference[:-1] + reference[1:]))
    )
    assert np.median(samples.latency_ms) == pytest.approx(10.0, rel=0.03), "on the reference's scale"
    assert samples.stable
    assert samples.warmup > 0


def test_slower_candidate_stops_early():
    def race(rival: Interval | None) -> tuple[int, int]:
        samples = paired(Machine(5), 4.0, sampling=Sampling(warmup_ms=20.0, target=1e-6), rival=rival)
        return len(samples.raw_ms), samples.saved

    turns, saved = race(Interval(value=2.0, low=1.9, high=2.1))
    assert (turns < race(None)[0], saved > 0, race(None)[1]) == (True, True, 0)


def test_a_slow_engine_gets_six_turns_however_short_the_time():
    assert len(paired(Machine(1), 900.0, reference_ms=2000.0, level_ms=2000.0).raw_ms) == 6


def test_sampling_time_is_independent_of_latency():
    def spent_ms(latency_ms: float) -> float:
        machine = Machine(7)
        paired(machine, latency_ms, latency_ms, sampling=Sampling(warmup_ms=20.0, target=1e-6, max_ms=400.0))
        return machine.now_ms

    assert spent_ms(0.5) == pytest.approx(spent_ms(10.0), rel=0.15)


def test_an_impossible_reference_fails():
    with pytest.raises(MeasureFailed, match="impossible latency of 0 ms"):
        paired(Machine(1), 4.0, reference_ms=0.0)


def test_conditions_of_the_candidates_device_are_recorded():
    class Device(Engine):
        gpu_mhz, calls = 1980.0, 0

        def conditions(self) -> dict[str, float]:
            self.calls += 1
            return {"gpu_mhz": self.gpu_mhz, "watts": float("nan")}  # the journal has no NaN

    class Still:
        def read(self) -> MachineSnapshot:
            return MachineSnapshot(at_s=0.0, mhz=3000.0)

    machine = Machine(3)
    candidate, reference = Device(machine, 4.0), Device(machine, 10.0)
    reference.gpu_mhz = 1200.0
    samples = sample_engine(candidate, SAMPLING, reference=(reference, 10.0), machine=Still())
    assert samples.conditions == {"mhz": 3000.0, "gpu_mhz": 1980.0}, "the candidate's, not the reference's"
    assert candidate.calls == 1, "after the turns, so that none is disturbed"
