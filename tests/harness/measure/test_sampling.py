from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.api import Array
from harness.errors import MeasureFailed
from harness.measure.conditions import Conditions, Machine
from harness.measure.sampling import fixed_inputs, take
from harness.measure.stats import Interval, median_ci
from harness.run.config import Sampling

QUIET = Sampling(warmup_ms=0, min_samples=11, max_samples=200, max_ms=1e6, target=0.01)


class Script:
    """A probe whose n-th reading is a function of n."""

    def __init__(self, reading: Callable[[int], float]) -> None:
        self._reading = reading
        self.count = 0
        self.calls = 0

    def sample(self, n: int) -> Sequence[float]:
        self.calls += 1
        values = [self._reading(self.count + index) for index in range(n)]
        self.count += n
        return values

    def infer(self, feeds: dict[str, Array]) -> dict[str, Array]:
        raise NotImplementedError


def noise(sd: float, seed: int = 0) -> Callable[[int], float]:
    readings = np.exp(sd * np.random.default_rng(seed).standard_normal(100_000))
    return lambda index: float(readings[index])


def test_a_quiet_engine_needs_the_minimum() -> None:
    found = take(Script(lambda _: 2.0), QUIET)
    assert found.latency_ms == (2.0,) * 11
    assert (found.warmup, found.stable) == (0, True)


def test_a_noisy_engine_is_sampled_until_its_median_is_known() -> None:
    found = take(Script(noise(0.02)), QUIET)
    assert 11 < len(found.latency_ms) < 200
    assert median_ci(found.latency_ms).relative_width <= 0.01


def test_caps_hold() -> None:
    assert len(take(Script(noise(0.5)), QUIET).latency_ms) == 200
    slow = take(Script(lambda n: 100.0 * noise(0.5)(n)), QUIET.model_copy(update={"max_ms": 1500.0}))
    assert 11 <= len(slow.latency_ms) <= 25
    enough = QUIET.model_copy(update={"max_ms": 5.0})
    assert len(take(Script(lambda n: 100.0 * noise(0.5)(n)), enough).latency_ms) == 11


def test_warm_up_runs_its_time_and_does_not_count() -> None:
    probe = Script(lambda _: 1.0)
    found = take(probe, QUIET.model_copy(update={"warmup_ms": 50.0}))
    assert found.warmup == 50
    assert probe.count == 61
    assert probe.calls < 15


def test_warm_up_goes_on_until_steady() -> None:
    warming = Script(lambda n: 1.0 + 5.0 * 0.97**n)
    found = take(warming, QUIET.model_copy(update={"warmup_ms": 100.0}))
    assert found.warmup > 100
    assert found.stable
    assert found.latency_ms[0] < 1.1


def test_an_engine_that_never_settles_is_called_unstable() -> None:
    found = take(Script(lambda n: 1000.0 * 0.99**n), QUIET.model_copy(update={"warmup_ms": 1000.0}))
    assert not found.stable


def test_one_slow_inference_is_no_reason_to_warm_up_for_long() -> None:
    found = take(Script(lambda n: 500.0 if n == 0 else 400.0), QUIET.model_copy(update={"warmup_ms": 50.0}))
    assert found.warmup <= 10


def test_readings_that_drift_are_taken_again() -> None:
    found = take(Script(lambda n: 1.0 if n < 5 else 1.5), QUIET.model_copy(update={"target": 0.9}))
    assert found.discarded_ms == (1.0,) * 5 + (1.5,) * 6
    assert found.trouble == "drift: the first half took 1 ms, the second 1.5 ms"
    assert found.latency_ms == (1.5,) * 11
    assert found.stable


def test_readings_that_keep_drifting_are_called_unstable() -> None:
    found = take(Script(lambda n: 1.0 + 0.02 * n), QUIET.model_copy(update={"max_samples": 40}))
    assert len(found.latency_ms) == 40
    assert not found.stable


def test_outliers_stay_in_the_record() -> None:
    found = take(Script(lambda n: 90.0 if n == 4 else 1.0), QUIET)
    assert found.latency_ms.count(90.0) == 1
    assert median_ci(found.latency_ms).value == 1.0


def test_time_is_the_clocks_but_a_clock_that_jumps_back_gives_zero() -> None:
    assert take(Script(lambda _: 1.0), QUIET, clock=iter([5.0, 7.5]).__next__).measure_s == 2.5
    assert take(Script(lambda _: 1.0), QUIET, clock=iter([5.0, 1.0]).__next__).measure_s == 0.0


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (float("nan"), "nan ms: readings are finite numbers"),
        (float("inf"), "inf ms: readings are finite numbers"),
        (0.0, "0 ms: nothing ran, or the clock is too coarse"),
        (-1.0, "-1 ms: the clock jumped back"),
        (4e6, r"4e\+06 ms: more than an hour for one inference"),
    ],
)
@pytest.mark.parametrize("warmup_ms", [0.0, 50.0])
def test_impossible_readings_fail(wrong: float, why: str, warmup_ms: float) -> None:
    with pytest.raises(MeasureFailed, match=f"impossible latency of {why}"):
        take(Script(lambda n: wrong if n == 3 else 1.0), QUIET.model_copy(update={"warmup_ms": warmup_ms}))


def test_a_constant_zero_fails() -> None:
    with pytest.raises(MeasureFailed, match="impossible latency of 0 ms: nothing ran, or the clock is too coarse"):
        take(Script(lambda _: 0.0), QUIET)


@pytest.mark.parametrize("jump_ms", [50_000.0, 0.0009])
def test_a_clock_that_jumps_fails(jump_ms: float) -> None:
    with pytest.raises(MeasureFailed, match=f"the clock jumped: a reading of {jump_ms:g} ms where 1 ms is the median"):
        take(Script(lambda n: jump_ms if n == 3 else 1.0), QUIET)


def test_a_machine_that_pauses_is_slow_and_nothing_worse() -> None:
    assert 9000.0 in take(Script(lambda n: 9000.0 if n == 3 else 1.0), QUIET).latency_ms


def rival(value: float, width: float = 0.01) -> Interval:
    return Interval(value=value, low=value * (1 - width / 2), high=value * (1 + width / 2))


def test_a_clear_loser_is_let_go_early_and_what_that_saved_is_said() -> None:
    alone = [len(take(Script(noise(0.02, seed)), QUIET).latency_ms) for seed in range(30)]
    losers = [take(Script(noise(0.02, seed)), QUIET, rival(0.5)) for seed in range(30)]
    assert {len(loser.latency_ms) for loser in losers} == {6}
    assert np.mean([loser.saved for loser in losers]) == pytest.approx(np.mean(alone) - 6, rel=0.5)
    assert take(Script(lambda _: 2.0), QUIET, rival(0.5)).saved == 5


def test_a_loser_by_a_hair_is_told_apart_first() -> None:
    found = take(Script(noise(0.02)), QUIET, rival(0.99))
    assert len(found.latency_ms) > 11


@pytest.mark.parametrize("incumbent_ms", [1.0, 2.0])
def test_a_rival_of_the_incumbent_gets_its_full_share(incumbent_ms: float) -> None:
    found = take(Script(noise(0.02)), QUIET, rival(incumbent_ms))
    assert median_ci(found.latency_ms).relative_width <= 0.01
    assert len(found.latency_ms) > 50
    assert found.saved == 0


def test_races_seldom_end_against_the_truth() -> None:
    lost = [take(Script(noise(0.05, seed)), QUIET, rival(1.0)).latency_ms for seed in range(200)]
    assert sum(len(readings) == 6 for readings in lost) <= 10


class Throttled(Machine):
    """Throttles while the first `times` series run."""

    def __init__(self, times: int) -> None:
        self._left = 2 * times
        self._count = 0

    def read(self) -> Conditions:
        self._count += self._left > 0 and self._left % 2 == 1
        self._left -= 1
        return Conditions(at_s=0.0, mhz=3000.0, load=0.5, throttled=self._count)


def test_readings_of_a_throttled_machine_are_taken_again() -> None:
    found = take(Script(lambda _: 2.0), QUIET, machine=Throttled(1))
    assert found.discarded_ms == found.latency_ms == (2.0,) * 11
    assert found.trouble == "throttled 1 times, by heat or by the container's CPU quota"
    assert (found.stable, found.disturbed) == (True, "")
    assert found.conditions == {"mhz": 3000.0, "load": 0.5}


def test_readings_of_a_machine_that_stays_throttled_are_called_unstable() -> None:
    found = take(Script(lambda _: 2.0), QUIET, machine=Throttled(2))
    assert (found.stable, found.disturbed) == (False, found.trouble)


def test_a_probe_that_gives_too_few_readings_fails() -> None:
    class Short(Script):
        def sample(self, n: int) -> Sequence[float]:
            return super().sample(n)[1:]

    with pytest.raises(MeasureFailed, match="gave 10 readings where 11 were asked for"):
        take(Short(lambda _: 1.0), QUIET)


@settings(max_examples=50, deadline=None)
@given(
    st.floats(min_value=1e-3, max_value=2e3), st.floats(min_value=0, max_value=1), st.integers(0, 5), st.floats(0, 200)
)
def test_sampling_always_ends_within_its_caps(scale: float, sd: float, seed: int, warmup_ms: float) -> None:
    reading = noise(sd, seed)
    settings_ = Sampling(warmup_ms=warmup_ms, min_samples=5, max_samples=50, max_ms=100.0)
    found = take(Script(lambda n: scale * reading(n % 100_000)), settings_)
    assert 5 <= len(found.latency_ms) <= 50


def test_fixed_inputs_are_the_same_each_time_and_fit_every_type() -> None:
    types = {
        "image": (np.dtype("float32"), (1, 3, 4, 4)), "half": (np.dtype("float16"), (2,)),
        "ids": (np.dtype("int64"), (1, 8)), "mask": (np.dtype("bool"), (1, 8)), "scalar": (np.dtype("float32"), ()),
    }  # fmt: skip
    one, two = fixed_inputs(types), fixed_inputs(dict(reversed(types.items())))
    for name, (dtype, shape) in types.items():
        assert (one[name].dtype, one[name].shape) == (dtype, shape)
        np.testing.assert_array_equal(one[name], two[name])
    assert set(one["ids"].ravel().tolist()) <= {0, 1}
    assert len({value.tobytes() for value in itertools.chain(fixed_inputs(types, 1).values(), one.values())}) > 5


def test_text_inputs_are_refused() -> None:
    with pytest.raises(MeasureFailed, match=r"input 'words' is of type 'str256': .* cannot be timed"):
        fixed_inputs({"words": (np.dtype("U8"), (1,))})


def test_a_probe_may_tell_what_its_device_did() -> None:
    class Telling:
        def sample(self, n: int) -> list[float]:
            return [1.0] * n

        def infer(self, feeds: object) -> dict[str, object]:
            return {}

        def conditions(self) -> dict[str, float]:
            return {"gpu_mhz": np.float32(1980.0), "watts": float("nan")}  # type: ignore[dict-item]

    samples = take(Telling(), Sampling(warmup_ms=0, min_samples=3, max_samples=3), machine=Machine())
    assert samples.conditions["gpu_mhz"] == 1980.0
    assert "watts" not in json.loads(json.dumps(samples.conditions, allow_nan=False)), "what the journal keeps"
