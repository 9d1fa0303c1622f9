"""Sampling of one engine's latency: warm-up, stopping rules, and one retry if the machine disturbed the readings."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from harness.base.errors import MeasureFailed, UserError
from harness.base.random_inputs import random_feeds
from harness.base.statistics import Interval, median_ci
from harness.config.sections import Sampling
from harness.measure.machine_noise import MachineMonitor, describe_disturbance
from harness.plugins.api import Array, Probe, ReportsConditions

WARMUP_WINDOW_SAMPLES = 5  # size of the two windows whose medians are compared to detect warm-up
MAX_WARMUP_FACTOR = 5  # after this multiple of `warmup_ms` an engine is sampled even if it is not steady
STEADY_TOLERANCE = 0.02  # relative difference below which medians are equal for warm-up, drift and races
MIN_RACE_SAMPLES = 6  # smallest number of readings whose range covers the median with 95 %
CLOCK_JUMP_FACTOR = 1000.0  # a reading that differs from the median by this factor is an error of the clock
MIN_CLOCK_JUMP_MS = 10_000.0  # a slow reading below this is no error of the clock, because machines may pause
MAX_INFERENCE_MS = 3.6e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Readings of one engine; latencies are in ms.

    Attributes:
        latency_ms: Latencies in order of measurement, with outliers and without warm-up.
        raw_ms: Latency of each turn before the correction for drift, if a reference was timed too; else empty.
        reference_ms: Latencies of the reference's turns, before the first of `raw_ms` and after each.
        discarded_ms: Latencies of a first attempt that was repeated.
        disturbance: Reason for the repetition, or "".
        disturbed: Disturbance of the repetition, whose readings count anyway, or "".
        warmup: Number of inferences before the first reading.
        measure_s: Wall-clock seconds of all attempts.
        stable: Whether the warm-up ended in a steady state and the readings were neither disturbed nor drifting.
        saved: Estimated number of inferences that racing saved.
        conditions: Clock in MHz, temperature in °C and load average, if readable, and facts of the probe.
        parts_ms: Median in ms of each part by name, see `harness.plugins.api.ReportsParts`.
    """

    latency_ms: tuple[float, ...]
    discarded_ms: tuple[float, ...] = ()
    disturbance: str = ""
    disturbed: str = ""
    warmup: int
    measure_s: float
    stable: bool
    saved: int = 0
    conditions: Mapping[str, float] = field(default_factory=dict)
    raw_ms: tuple[float, ...] = ()
    reference_ms: tuple[float, ...] = ()
    parts_ms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRun:
    """Readings of one attempt; see `Samples` for the other fields.

    Attributes:
        drift: Change of the engine's latency during the attempt, or "".
    """

    latency_ms: Sequence[float]
    raw_ms: Sequence[float] = ()
    reference_ms: Sequence[float] = ()
    saved: int = 0
    drift: str = ""
    disturbed: str = ""
    conditions: Mapping[str, float] = field(default_factory=dict)

    @property
    def disturbance(self) -> str:
        return self.disturbed or self.drift


def sample_engine(
    probe: Probe,
    sampling: Sampling,
    rival: Interval | None = None,
    *,
    machine: MachineMonitor | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Samples:
    """Time an engine.

    Warm up for `warmup_ms` and then until the medians of two consecutive windows agree. Sample until the 95 % interval
    of the median is narrower than `target` or a limit of `sampling` is reached. Repeat this once if the readings drift
    or the machine was disturbed (throttling, another process).

    Args:
        rival: The incumbent's latency in ms; sampling stops as soon as the engine is clearly slower.
        machine: Monitor for disturbances; None if the readings are not times of this machine.

    Raises:
        MeasureFailed: A reading is not a positive finite number, the clock jumped, or the probe returned too few.
    """
    return sample_with_retry(lambda: _sample_until_target(probe, sampling, rival), probe, sampling, machine, clock)


def sample_with_retry(
    attempt: Callable[[], SampleRun],
    probe: Probe,
    sampling: Sampling,
    machine: MachineMonitor | None,
    clock: Callable[[], float] = time.perf_counter,
) -> Samples:
    """Warm an engine up, make an attempt to time it, and repeat it once if it was disturbed or drifted.

    Args:
        attempt: Function that takes the readings of one attempt.
        machine: Monitor for disturbances; None: only drift counts.
    """
    started_s = clock()
    warmup, steady = warm_up(probe, sampling)
    run, discarded = _run_monitored(attempt, probe, machine), None
    if run.disturbance:
        run, discarded = _run_monitored(attempt, probe, machine), run
    return Samples(
        latency_ms=tuple(run.latency_ms),
        raw_ms=tuple(run.raw_ms),
        reference_ms=tuple(run.reference_ms),
        discarded_ms=tuple(discarded.latency_ms) if discarded else (),
        disturbance=discarded.disturbance if discarded else "",
        disturbed=run.disturbed,
        warmup=warmup,
        measure_s=max(0.0, clock() - started_s),
        stable=steady and not run.disturbance,
        saved=run.saved,
        conditions=run.conditions,
    )


def _run_monitored(attempt: Callable[[], SampleRun], probe: Probe, machine: MachineMonitor | None) -> SampleRun:
    if machine is None:
        return attempt()
    before = machine.read()
    run = attempt()
    after = machine.read()
    probe_conditions = probe.conditions if isinstance(probe, ReportsConditions) else dict
    own = {name: float(value) for name, value in probe_conditions().items() if math.isfinite(value)}  # for JSON
    conditions = {**after.facts(), **own}
    return replace(run, disturbed=describe_disturbance(before, after), conditions=conditions)


def make_fixed_inputs(types: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]], seed: int = 0) -> dict[str, Array]:
    """Return random inputs for timing of the element type and shape in `types`, equal for every candidate of a model.

    Raises:
        MeasureFailed: No random values can be made for a type.
    """
    try:
        return next(random_feeds({name: (dtype.name, shape) for name, (dtype, shape) in types.items()}, 1, seed))
    except UserError as error:
        raise MeasureFailed(str(error)) from error


def warm_up(probe: Probe, sampling: Sampling) -> tuple[int, bool]:
    """Run inferences that are not recorded for `warmup_ms`, and further until their median no longer falls by 2 %.

    Returns:
        Number of inferences, and False if the latency still fell after five times `warmup_ms`, else True.
    """
    readings: list[float] = []
    while sampling.warmup_ms:
        spent_ms, count = sum(readings), len(readings)
        missing = math.ceil((sampling.warmup_ms - spent_ms) * count / spent_ms) if count else 1
        if missing <= 0 and count > 1:
            width = min(WARMUP_WINDOW_SAMPLES, count // 2)
            last, previous = statistics.median(readings[-width:]), statistics.median(readings[-2 * width : -width])
            if last >= previous * (1 - STEADY_TOLERANCE):  # a rising latency is no warm-up but drift, checked later
                break
            if spent_ms >= MAX_WARMUP_FACTOR * sampling.warmup_ms:
                return count, False
            missing = WARMUP_WINDOW_SAMPLES
        # Doubling takes few calls for a fast engine and overshoots by at most one inference of a slow one.
        readings += read_checked(probe, max(1, min(count, missing)))
    return len(readings), True


def _sample_until_target(probe: Probe, sampling: Sampling, rival: Interval | None) -> SampleRun:
    """Sample until the engine is clearly slower than `rival`, the median is precise enough, or a limit is reached."""
    least = sampling.min_samples if rival is None else min(MIN_RACE_SAMPLES, sampling.min_samples)
    readings, saved = read_checked(probe, least), 0
    while missing := _samples_needed(readings, median := median_ci(readings), sampling):
        if len(readings) >= MIN_RACE_SAMPLES and is_clearly_slower(median, rival):
            saved = _samples_without_racing(readings, median, sampling) - len(readings)
            break
        readings += read_checked(probe, missing)
    check_clock_jumps(readings)
    return SampleRun(latency_ms=readings, saved=saved, drift=_describe_drift(readings))


def is_clearly_slower(median: Interval, rival: Interval | None) -> bool:
    """Return whether an engine's interval is above the incumbent's by more than 2 %; False without an incumbent."""
    return rival is not None and median.low > rival.high * (1 + STEADY_TOLERANCE)


def _samples_needed(readings: list[float], median: Interval, sampling: Sampling) -> int:
    """Return the number of readings to add before the next check; 0 if these suffice."""
    count, spent_ms = len(readings), sum(readings)
    if count < sampling.min_samples:
        return sampling.min_samples - count
    if count >= sampling.max_samples or spent_ms >= sampling.max_ms or median.relative_width <= sampling.target:
        return 0
    fits = math.ceil((sampling.max_ms - spent_ms) * count / spent_ms)
    return min(max(1, count // 4), fits, sampling.max_samples - count)


def _samples_without_racing(readings: list[float], median: Interval, sampling: Sampling) -> int:
    """Estimate the number of readings without racing; the width of an interval shrinks with the root of the number."""
    count = len(readings)
    needed = math.ceil(count * min(1e6, (median.relative_width / sampling.target) ** 2))
    fits = math.ceil(sampling.max_ms * count / sum(readings))
    return max(count, sampling.min_samples, min(needed, fits, sampling.max_samples))


def _describe_drift(readings: list[float]) -> str:
    """Describe the drift if the halves have disjoint 99 % intervals and clearly different medians, or return ""."""
    half = len(readings) // 2
    if half < WARMUP_WINDOW_SAMPLES:
        return ""
    first, second = (median_ci(part, 0.99) for part in (readings[:half], readings[half:]))
    disjoint = first.high < second.low or second.high < first.low
    if not disjoint or abs(second.value / first.value - 1) <= STEADY_TOLERANCE:
        return ""
    return f"drift: the first half took {first.value:.4g} ms, the second {second.value:.4g} ms"


def check_clock_jumps(readings: list[float]) -> None:
    """Raise `MeasureFailed` if a reading is so far from the median that the clock must have jumped."""
    median = statistics.median(readings)
    low, high = min(readings), max(readings)
    slow = high > max(CLOCK_JUMP_FACTOR * median, MIN_CLOCK_JUMP_MS)
    jumped = low if low < median / CLOCK_JUMP_FACTOR else high if slow else None
    if jumped is not None:
        raise MeasureFailed(f"the clock jumped: a reading of {jumped:g} ms where {median:g} ms is the median")


def read_checked(probe: Probe, count: int) -> list[float]:
    """Return `count` readings in ms; raise `MeasureFailed` for another number, or values not in 0 ms to 1 hour."""
    readings = [float(value) for value in probe.sample(count)]
    if len(readings) != count:
        raise MeasureFailed(f"the benchmarker gave {len(readings)} readings where {count} were requested")
    wrong = next((value for value in readings if not 0 < value <= MAX_INFERENCE_MS), None)
    if wrong is not None:
        raise MeasureFailed(f"impossible latency of {wrong:g} ms: {_explain_invalid(wrong)}")
    return readings


def _explain_invalid(latency_ms: float) -> str:
    if latency_ms == 0:
        return "nothing ran, or the clock is too coarse for this engine"
    if latency_ms < 0:
        return "the clock jumped back"
    return "more than an hour for one inference" if math.isfinite(latency_ms) else "readings are finite numbers"
