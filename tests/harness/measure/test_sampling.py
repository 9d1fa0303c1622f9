from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.base.errors import MeasureFailed
from harness.base.statistics import Interval, median_ci
from harness.config.sections import Sampling
from harness.measure.machine_noise import MachineMonitor, MachineSnapshot
from harness.measure.sampling import Samples, make_fixed_inputs, sample_engine

QUIET = Sampling(warmup_ms=0, min_samples=11, max_samples=200, max_ms=1e6, target=0.01)


class Script:
    """Probe whose n-th reading is a function of n."""

    def __init__(self, reading: Callable[[int], float]) -> None:
        self._reading = reading
        self.count = 0
        self.calls = 0

    def sample(self, n: int) -> Sequence[float]:
        self.calls += 1
        values = [self._reading(self.count + index) for index in range(n)]
        self.count += n
        return values

    def infer(self, feeds: object) -> dict[str, object]:
        raise NotImplementedError


def sample(reading: Callable[[int], float], rival: Interval | None = None, **changes: float) -> Samples:
    return sample_engine(Script(reading), QUIET.model_copy(update=changes), rival)


def noise(sd: float, seed: int = 0) -> Callable[[int], float]:
    readings = np.exp(sd * np.random.default_rng(seed).standard_normal(100_000))
    return lambda index: float(readings[index])


def test_a_quiet_engine_needs_the_minimum():
    found = sample(lambda _: 2.0)
    assert found.latency_ms == (2.0,) * 11
    assert (found.warmup, found.stable) == (0, True)


def test_a_noisy_engine_is_sampled_until_its_median_is_known():
    found = sample(noise(0.02))
    assert 11 < len(found.latency_ms) < 200
    assert median_ci(found.latency_ms).relative_width <= 0.01


def test_sample_and_time_limits_hold():
    assert len(sample(noise(0.5)).latency_ms) == 200
    assert 11 <= len(sample(lambda n: 100.0 * noise(0.5)(n), max_ms=1500.0).latency_ms) <= 25
    assert len(sample(lambda n: 100.0 * noise(0.5)(n), max_ms=5.0).latency_ms) == 11


def test_warm_up_runs_for_its_time_and_is_excluded():
    probe = Script(lambda _: 1.0)
    found = sample_engine(probe, QUIET.model_copy(update={"warmup_ms": 50.0}))
    assert (found.warmup, probe.count) == (50, 61)
    assert probe.calls < 15


@pytest.mark.parametrize(
    ("reading", "warmup_ms", "warmup", "stable"),
    [
        (lambda n: 1.0 + 5.0 * 0.97**n, 100.0, range(101, 1000), True),
        (lambda n: 1000.0 * 0.99**n, 1000.0, range(1, 10_000), False),
        (lambda n: 500.0 if n == 0 else 400.0, 50.0, range(1, 11), False),
    ],
    ids=["until steady", "never steady", "one slow inference"],
)
def test_warm_up_continues_until_the_engine_is_steady(reading, warmup_ms, warmup, stable):
    found = sample(reading, warmup_ms=warmup_ms)
    assert found.warmup in warmup
    assert found.stable is stable


def test_readings_that_drift_are_repeated():
    found = sample(lambda n: 1.0 if n < 5 else 1.5, target=0.9)
    assert found.discarded_ms == (1.0,) * 5 + (1.5,) * 6
    assert found.disturbance == "drift: the first half took 1 ms, the second 1.5 ms"
    assert found.latency_ms == (1.5,) * 11
    assert found.stable
    assert not sample(lambda n: 1.0 + 0.02 * n, max_samples=40).stable


def test_outliers_and_pauses_stay_in_the_record():
    found = sample(lambda n: 90.0 if n == 4 else 1.0)
    assert found.latency_ms.count(90.0) == 1
    assert median_ci(found.latency_ms).value == 1.0
    assert 9000.0 in sample(lambda n: 9000.0 if n == 3 else 1.0).latency_ms


@pytest.mark.parametrize(("end_s", "measure_s"), [(7.5, 2.5), (1.0, 0.0)])
def test_measure_time_is_zero_if_clock_jumps_back(end_s, measure_s):
    assert sample_engine(Script(lambda _: 1.0), QUIET, clock=iter([5.0, end_s]).__next__).measure_s == measure_s


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (float("nan"), "impossible latency of nan ms: .* finite"),
        (float("inf"), "impossible latency of inf ms: .* finite"),
        (0.0, "impossible latency of 0 ms: .* too coarse"),
        (-1.0, "impossible latency of -1 ms: .* jumped back"),
        (4e6, r"impossible latency of 4e\+06 ms: .* at most an hour"),
        (50_000.0, "the clock jumped: a reading of 50000 ms where 1 ms is the median"),
        (0.0009, "the clock jumped: a reading of 0.0009 ms where 1 ms is the median"),
    ],
)
def test_impossible_readings_fail(wrong, why):
    for warmup_ms in (0.0, 50.0):
        if warmup_ms == 0.0 or why.startswith("impossible"):
            with pytest.raises(MeasureFailed, match=why):
                sample(lambda n: wrong if n == 3 else 1.0, warmup_ms=warmup_ms)


def test_a_probe_that_gives_too_few_readings_fails():
    class Short(Script):
        def sample(self, n: int) -> Sequence[float]:
            return super().sample(n)[1:]

    with pytest.raises(MeasureFailed, match="gave 10 readings where 11"):
        sample_engine(Short(lambda _: 1.0), QUIET)


def rival(value: float, width: float = 0.01) -> Interval:
    return Interval(value=value, low=value * (1 - width / 2), high=value * (1 + width / 2))


def test_a_clear_loser_stops_early_and_the_saved_samples_are_estimated():
    alone = [len(sample(noise(0.02, seed)).latency_ms) for seed in range(30)]
    losers = [sample(noise(0.02, seed), rival(0.5)) for seed in range(30)]
    assert {len(loser.latency_ms) for loser in losers} == {6}
    assert np.mean([loser.saved for loser in losers]) == pytest.approx(np.mean(alone) - 6, rel=0.5)
    assert sample(lambda _: 2.0, rival(0.5)).saved == 5
    assert len(sample(noise(0.02), rival(0.99)).latency_ms) > 11, "a small gap needs more samples"


@pytest.mark.parametrize("incumbent_ms", [1.0, 2.0])
def test_a_rival_of_the_incumbent_is_sampled_in_full(incumbent_ms):
    found = sample(noise(0.02), rival(incumbent_ms))
    assert median_ci(found.latency_ms).relative_width <= 0.01
    assert len(found.latency_ms) > 50
    assert found.saved == 0


def test_equal_candidate_rarely_stops_early():
    lost = [sample(noise(0.05, seed), rival(1.0)).latency_ms for seed in range(200)]
    assert sum(len(readings) == 6 for readings in lost) <= 10


class Throttled(MachineMonitor):
    """Machine that throttles during the first `times` attempts."""

    def __init__(self, times: int) -> None:
        self._left = 2 * times
        self._count = 0

    def read(self) -> MachineSnapshot:
        self._count += self._left > 0 and self._left % 2 == 1
        self._left -= 1
        return MachineSnapshot(at_s=0.0, mhz=3000.0, load=0.5, throttled=self._count)


@pytest.mark.parametrize(("times", "stable"), [(1, True), (2, False)])
def test_readings_of_a_throttled_machine_are_repeated_once(times, stable):
    found = sample_engine(Script(lambda _: 2.0), QUIET, machine=Throttled(times))
    assert found.discarded_ms == found.latency_ms == (2.0,) * 11
    assert found.disturbance == "throttled 1 times, by heat or by the container's CPU quota"
    assert (found.stable, found.disturbed) == (stable, "" if stable else found.disturbance)
    assert found.conditions == {"mhz": 3000.0, "load": 0.5}
    engine = Engine(ChangingMachine(7), 4.0)
    found = sample_engine(engine, SAMPLING, reference=(engine, 4.0), machine=Throttled(times))
    assert (found.stable, bool(found.discarded_ms), bool(found.disturbance)) == (stable, True, True)


@settings(max_examples=50)
@given(
    st.floats(min_value=1e-3, max_value=2e3), st.floats(min_value=0, max_value=1), st.integers(0, 5), st.floats(0, 200)
)
def test_sampling_always_ends_within_its_caps(scale, sd, seed, warmup_ms):
    reading = noise(sd, seed)
    limits = Sampling(warmup_ms=warmup_ms, min_samples=5, max_samples=50, max_ms=100.0)
    assert 5 <= len(sample_engine(Script(lambda n: scale * reading(n % 100_000)), limits).latency_ms) <= 50


def test_fixed_inputs_are_the_same_each_time_and_fit_every_type():
    types = {
        "image": (np.dtype("float32"), (1, 3, 4, 4)), "half": (np.dtype("float16"), (2,)),
        "ids": (np.dtype("int64"), (1, 8)), "mask": (np.dtype("bool"), (1, 8)), "scalar": (np.dtype("float32"), ()),
    }  # fmt: skip
    one, two = make_fixed_inputs(types), make_fixed_inputs(dict(reversed(types.items())))
    for name, (dtype, shape) in types.items():
        assert (one[name].dtype, one[name].shape) == (dtype, shape)
        np.testing.assert_array_equal(one[name], two[name])
    assert set(one["ids"].ravel().tolist()) <= {0, 1}
    assert len({value.tobytes() for value in itertools.chain(make_fixed_inputs(types, 1).values(), one.values())}) > 5
    with pytest.raises(MeasureFailed, match="input 'words' is of type 'str256'"):
        make_fixed_inputs({"words": (np.dtype("U8"), (1,))})


SAMPLING = Sampling(warmup_ms=20.0)


class ChangingMachine:
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
    def __init__(self, machine: ChangingMachine, latency_ms: float) -> None:
        self._machine, self._latency_ms = machine, latency_ms

    def sample(self, n: int) -> list[float]:
        return [self._machine.run(self._latency_ms) for _ in range(n)]


def paired(
    pace: ChangingMachine, latency_ms: float, reference_ms: float = 10.0, level_ms: float = 10.0, **changes: object
) -> Samples:
    reference = (Engine(pace, reference_ms), level_ms)
    return sample_engine(Engine(pace, latency_ms), changes.pop("sampling", SAMPLING), reference=reference, **changes)


def medians(latency_ms: float, first_seed: int = 0) -> list[float]:
    seeds = range(first_seed, first_seed + 40)
    return [median_ci(paired(ChangingMachine(seed), latency_ms).latency_ms).value for seed in seeds]


def test_machine_speed_changes_cancel():
    alone = [
        median_ci(sample_engine(Engine(ChangingMachine(seed), 4.0), SAMPLING).latency_ms).value for seed in range(40)
    ]
    assert np.std(np.log(medians(4.0))) < np.std(np.log(alone)) / 4
    assert np.median(medians(4.0)) == pytest.approx(4.0, rel=0.02)


def test_a_difference_of_five_percent_is_seen():
    assert np.mean(np.array(medians(4.0)) < np.array(medians(4.2, 100))) > 0.9


def test_raw_and_reference_readings_are_recorded():
    samples = paired(ChangingMachine(3), 4.0, reference_ms=8.0, level_ms=20.0)
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
        samples = paired(ChangingMachine(5), 4.0, sampling=Sampling(warmup_ms=20.0, target=1e-6), rival=rival)
        return len(samples.raw_ms), samples.saved

    turns, saved = race(Interval(value=2.0, low=1.9, high=2.1))
    assert (turns < race(None)[0], saved > 0, race(None)[1]) == (True, True, 0)


def test_a_slow_engine_gets_six_turns_however_short_the_time():
    assert len(paired(ChangingMachine(1), 900.0, reference_ms=2000.0, level_ms=2000.0).raw_ms) == 6


def test_sampling_time_is_independent_of_latency():
    def spent_ms(latency_ms: float) -> float:
        machine = ChangingMachine(7)
        paired(machine, latency_ms, latency_ms, sampling=Sampling(warmup_ms=20.0, target=1e-6, max_ms=400.0))
        return machine.now_ms

    assert spent_ms(0.5) == pytest.approx(spent_ms(10.0), rel=0.15)


def test_an_impossible_reference_fails():
    with pytest.raises(MeasureFailed, match="impossible latency of 0 ms"):
        paired(ChangingMachine(1), 4.0, reference_ms=0.0)


def test_conditions_of_the_candidates_device_are_recorded():
    class Device(Engine):
        gpu_mhz, calls = 1980.0, 0

        def conditions(self) -> dict[str, float]:
            self.calls += 1
            return {"gpu_mhz": self.gpu_mhz, "watts": float("nan")}  # the journal has no NaN

    class Still:
        def read(self) -> MachineSnapshot:
            return MachineSnapshot(at_s=0.0, mhz=3000.0)

    machine = ChangingMachine(3)
    candidate, reference = Device(machine, 4.0), Device(machine, 10.0)
    reference.gpu_mhz = 1200.0
    samples = sample_engine(candidate, SAMPLING, reference=(reference, 10.0), machine=Still())
    assert samples.conditions == {"mhz": 3000.0, "gpu_mhz": 1980.0}, "the candidate's, not the reference's"
    assert candidate.calls == 1, "after the turns, so that none is disturbed"
