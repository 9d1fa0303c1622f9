"""How an engine is timed: warm up until it is steady, then sample until the median is known well enough.

Time is counted by the readings themselves, never by a clock beside them: a simulated engine is then
sampled like a real one. Readings that no engine can have (a clock that jumps) are a failure, not an outlier.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harness.api import Array, Probe
from harness.errors import MeasureFailed, UserError
from harness.feeds import random_feeds
from harness.measure.conditions import Machine, disturbance
from harness.measure.stats import Interval, median_ci
from harness.run.config import Sampling

__all__ = [
    "FIRST_LOOK", "STEADY", "Readings", "Samples", "fixed_inputs", "read", "refuse_jumps", "settle", "take", "warm_up",
]  # fmt: skip

WINDOW = 5
"""Inferences whose medians are compared to see whether an engine is still warming up."""
LONGEST_WARMUP = 5
"""An engine that is not steady after so many times the warm-up is taken as it is."""
STEADY = 0.02
"""Medians that differ by no more than this share are equal for the purpose of warm-up, drift and races."""
FIRST_LOOK = 6
"""Readings after which a race can be lost: the fewest whose range covers the median with 95 %."""
JUMP = 1000.0
"""No inference is so many times faster or slower than the median of its engine."""
JUMP_MS = 10_000.0
"""A slower one that took no longer than this was not the clock's fault: machines do pause."""
LONGEST_MS = 3.6e6
"""An inference of more than an hour is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Raw readings of one engine.

    Attributes:
        latency_ms: In order of measurement, outliers included, warm-up excluded.
        raw_ms: The clock's own figures where `latency_ms` was taken beside a reference; one a turn, like the others.
        beside_ms: The reference's turns, before the first of `raw_ms` and after each.
        discarded_ms: Readings of a first attempt that was repeated.
        trouble: Why it was repeated; "" where it was not.
        disturbed: What the machine did beside the readings that count, although they were repeated; "" where nothing
            was seen.
        warmup: Inferences before the first reading.
        measure_s: Wall-clock of it all.
        stable: Warm-up ended in a steady state, and nothing speaks against the readings that count.
        saved: Inferences that racing saved, an estimate.
        conditions: Clock in MHz, temperature in °C, load average; those that can be read; and what the probe tells.
    """

    latency_ms: tuple[float, ...]
    discarded_ms: tuple[float, ...] = ()
    trouble: str = ""
    disturbed: str = ""
    warmup: int
    measure_s: float
    stable: bool
    saved: int = 0
    conditions: Mapping[str, float] = field(default_factory=dict)
    raw_ms: tuple[float, ...] = ()
    beside_ms: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """What one attempt to time an engine read; fields as in `Samples`.

    Attributes:
        drift: How the engine changed meanwhile, which speaks against them.
    """

    latency_ms: Sequence[float]
    raw_ms: Sequence[float] = ()
    beside_ms: Sequence[float] = ()
    saved: int = 0
    drift: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Watched:
    """Readings, and what the machine did meanwhile."""

    readings: Readings
    disturbed: str = ""
    conditions: Mapping[str, float] = field(default_factory=dict)

    @property
    def trouble(self) -> str:
        return self.disturbed or self.readings.drift


def take(
    probe: Probe,
    sampling: Sampling,
    rival: Interval | None = None,
    *,
    machine: Machine | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Samples:
    """Time an engine.

    Warms up for `warmup_ms` and then until two windows in a row agree, samples until the 95 % interval of the
    median is narrower than `target` or a cap is reached, and starts over once where the readings drift or the
    machine was disturbed (throttling, a neighbour that woke up).

    Args:
        rival: The incumbent's latency in milliseconds. An engine that is clearly slower is let go early.
        machine: Asked for disturbances; None: readings are not of this machine's time.

    Raises:
        MeasureFailed: A reading is not a positive finite number, the clock jumped, or there are too few of them.
    """
    return settle(lambda: _collect(probe, sampling, rival), probe, sampling, machine, clock)


def settle(
    attempt: Callable[[], Readings],
    probe: Probe,
    sampling: Sampling,
    machine: Machine | None,
    clock: Callable[[], float],
) -> Samples:
    """Warm an engine up and make an attempt to time it; one more where something speaks against the first."""
    started_s = clock()
    warmup, steady = warm_up(probe, sampling)
    counts, discarded = _watched(attempt, probe, machine), None
    if counts.trouble:
        counts, discarded = _watched(attempt, probe, machine), counts
    return Samples(
        latency_ms=tuple(counts.readings.latency_ms),
        raw_ms=tuple(counts.readings.raw_ms),
        beside_ms=tuple(counts.readings.beside_ms),
        discarded_ms=tuple(discarded.readings.latency_ms) if discarded else (),
        trouble=discarded.trouble if discarded else "",
        disturbed=counts.disturbed,
        warmup=warmup,
        measure_s=max(0.0, clock() - started_s),
        stable=steady and not counts.trouble,
        saved=counts.readings.saved,
        conditions=counts.conditions,
    )


def _watched(attempt: Callable[[], Readings], probe: Probe, machine: Machine | None) -> _Watched:
    if machine is None:
        return _Watched(readings=attempt())
    before = machine.read()
    readings = attempt()
    after = machine.read()
    told: Callable[[], Mapping[str, float]] = getattr(probe, "conditions", dict)
    own = {name: float(value) for name, value in told().items() if math.isfinite(value)}  # JSON has no others
    return _Watched(readings=readings, disturbed=disturbance(before, after), conditions={**after.facts(), **own})


def fixed_inputs(types: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]], seed: int = 0) -> dict[str, Array]:
    """The inputs that engines are timed on: the same for every candidate of a model.

    Args:
        types: Element type and static shape of each input.
        seed: See `harness.feeds.random_feeds`.

    Raises:
        MeasureFailed: An element type that is none of these (text).
    """
    try:
        return next(random_feeds({name: (dtype.name, shape) for name, (dtype, shape) in types.items()}, 1, seed))
    except UserError as error:
        raise MeasureFailed(str(error)) from error


def warm_up(probe: Probe, sampling: Sampling) -> tuple[int, bool]:
    """Run an engine without counting; the number of inferences, and whether the engine became steady."""
    readings: list[float] = []
    while sampling.warmup_ms:
        spent_ms, count = sum(readings), len(readings)
        missing = math.ceil((sampling.warmup_ms - spent_ms) * count / spent_ms) if count else 1
        if missing <= 0 and count > 1:
            width = min(WINDOW, count // 2)
            # Only a falling latency is warm-up; a rising one is left to the check on drift.
            if np.median(readings[-width:]) >= np.median(readings[-2 * width : -width]) * (1 - STEADY):
                break
            if spent_ms >= LONGEST_WARMUP * sampling.warmup_ms:
                return count, False
            missing = WINDOW
        # Doubling keeps the calls few for fast engines and overshoots a slow one by one inference at most.
        readings += read(probe, max(1, min(count, missing)))
    return len(readings), True


def _collect(probe: Probe, sampling: Sampling, rival: Interval | None) -> Readings:
    """Sample until the race is lost, the median is known well enough, or a cap is reached."""
    least = sampling.min_samples if rival is None else min(FIRST_LOOK, sampling.min_samples)
    readings, saved = read(probe, least), 0
    while missing := _missing(readings, median := median_ci(readings), sampling):
        if rival is not None and len(readings) >= FIRST_LOOK and median.low > rival.high * (1 + STEADY):
            saved = _expected(readings, median, sampling) - len(readings)
            break
        readings += read(probe, missing)
    refuse_jumps(readings)
    return Readings(latency_ms=readings, saved=saved, drift=_drift(readings))


def _missing(readings: list[float], median: Interval, sampling: Sampling) -> int:
    """How many readings to add before the next look; 0 where these are enough."""
    count, spent_ms = len(readings), sum(readings)
    if count < sampling.min_samples:
        return sampling.min_samples - count
    if count >= sampling.max_samples or spent_ms >= sampling.max_ms or median.relative_width <= sampling.target:
        return 0
    fits = math.ceil((sampling.max_ms - spent_ms) * count / spent_ms)
    return min(max(1, count // 4), fits, sampling.max_samples - count)


def _expected(readings: list[float], median: Interval, sampling: Sampling) -> int:
    """How many readings would have been enough: widths go by the root of the count."""
    count = len(readings)
    wanted = math.ceil(count * min(1e6, (median.relative_width / sampling.target) ** 2))
    fits = math.ceil(sampling.max_ms * count / sum(readings))
    return max(count, sampling.min_samples, min(wanted, fits, sampling.max_samples))


def _drift(readings: list[float]) -> str:
    """How the second half differs from the first by more than noise: 99 % intervals apart, medians too."""
    half = len(readings) // 2
    if half < WINDOW:
        return ""
    first, second = (median_ci(part, 0.99) for part in (readings[:half], readings[half:]))
    apart = first.high < second.low or second.high < first.low
    if not apart or abs(second.value / first.value - 1) <= STEADY:
        return ""
    return f"drift: the first half took {first.value:.4g} ms, the second {second.value:.4g} ms"


def refuse_jumps(readings: list[float]) -> None:
    """Refuse readings that only a clock that jumped can have given.

    Raises:
        MeasureFailed: One is a thousand times its engine's median, or a thousandth.
    """
    middle = float(np.median(readings))
    low, high = min(readings), max(readings)
    jumped = low if low < middle / JUMP else high if high > max(JUMP * middle, JUMP_MS) else None
    if jumped is not None:
        raise MeasureFailed(f"the clock jumped: a reading of {jumped:g} ms where {middle:g} ms is the median")


def read(probe: Probe, count: int) -> list[float]:
    """Readings of the probe, checked.

    Raises:
        MeasureFailed: One that no engine can have, or not as many as were asked for.
    """
    readings = [float(value) for value in probe.sample(count)]
    if len(readings) != count:
        raise MeasureFailed(f"the benchmarker gave {len(readings)} readings where {count} were asked for")
    wrong = next((value for value in readings if not 0 < value <= LONGEST_MS), None)
    if wrong is not None:
        raise MeasureFailed(f"impossible latency of {wrong:g} ms: {_why(wrong)}")
    return readings


def _why(wrong: float) -> str:
    if wrong == 0:
        return "nothing ran, or the clock is too coarse for this engine"
    if wrong < 0:
        return "the clock jumped back"
    return "more than an hour for one inference" if math.isfinite(wrong) else "readings are finite numbers"
