"""Sampling of one engine's latency: warm-up, stopping rules, and one retry if the machine disturbed the readings.

An engine is timed alone, or in turns with a reference engine, which removes changes of the machine's speed. A machine
changes its speed within a second, by work of a sibling thread or another cloud guest, or by its temperature. Readings
of two engines in short alternating turns share these changes, so their ratio does not contain them (a control variate;
Kalibera and Jones, ISMM 2013, section 9, on ratios of paired readings). On the machine of the committed tables turns of
50 ms differ by a third, their ratios to adjacent turns of the reference by a tenth.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
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
MIN_REFERENCE_TURN_MS = 10.0  # short, to follow the machine's speed; but each turn needs an inference for the caches
MIN_TURN_SAMPLES = 2  # inferences of a turn, without the one that warms the caches
MAX_TURN_SAMPLES = 200
PAIRED_TIME_FACTOR = 2.0  # time limit of both engines together, in units of a candidate's limit alone


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
        drift: Change of the engine's latency during the readings, or "".
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
    drift: str = ""
    warmup: int = 0
    measure_s: float = 0.0
    stable: bool = True
    saved: int = 0
    conditions: Mapping[str, float] = field(default_factory=dict)
    raw_ms: tuple[float, ...] = ()
    reference_ms: tuple[float, ...] = ()
    parts_ms: Mapping[str, float] = field(default_factory=dict)


def sample_engine(
    probe: Probe,
    sampling: Sampling,
    rival: Interval | None = None,
    *,
    reference: tuple[Probe, float] | None = None,
    machine: MachineMonitor | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Samples:
    """Time an engine.

    Warm up for `warmup_ms` and then until the medians of two consecutive windows agree. Sample until the 95 % interval
    of the median is narrower than `target` or a limit of `sampling` is reached. Repeat this once if the readings drift
    or the machine was disturbed (throttling, another process).

    Args:
        rival: The incumbent's latency in ms; sampling stops as soon as the engine is clearly slower.
        reference: Open and warmed-up engine of the float model, in turns with which this one is timed, and the latency
            in ms to which readings are scaled, the same for a whole search; None: the engine is timed alone.
        machine: Monitor for disturbances; None if the readings are not times of this machine.

    Raises:
        MeasureFailed: A reading is not a positive finite number, the clock jumped, or the probe returned too few.
    """

    def attempt() -> Samples:
        before = None if machine is None else machine.read()
        if reference is None:
            taken = _sample_until_target(probe, sampling, rival)
        else:
            taken = _alternate_turns(probe, *reference, sampling, rival)
        if machine is None or before is None:
            return taken
        after = machine.read()
        own = probe.conditions() if isinstance(probe, ReportsConditions) else {}
        finite = {name: float(value) for name, value in own.items() if math.isfinite(value)}  # for JSON
        return replace(taken, disturbed=describe_disturbance(before, after), conditions={**after.facts(), **finite})

    started_s = clock()
    warmup, steady = warm_up(probe, sampling)
    first = attempt()
    disturbance = first.disturbed or first.drift
    last = attempt() if disturbance else first
    return replace(
        last,
        discarded_ms=first.latency_ms if disturbance else (),
        disturbance=disturbance,
        warmup=warmup,
        measure_s=max(0.0, clock() - started_s),
        stable=steady and not (last.disturbed or last.drift),
    )


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
        readings += _read_checked(probe, max(1, min(count, missing)))
    return len(readings), True


def _sample_until_target(probe: Probe, sampling: Sampling, rival: Interval | None) -> Samples:
    """Sample until the engine is clearly slower than `rival`, the median is precise enough, or a limit is reached."""
    least = sampling.min_samples if rival is None else min(MIN_RACE_SAMPLES, sampling.min_samples)
    readings, saved, most_ms = _read_checked(probe, least), 0, sampling.max_ms
    while True:
        median, count, spent_ms = median_ci(readings), len(readings), sum(readings)
        precise = median.relative_width <= sampling.target
        if count >= sampling.min_samples and (count >= sampling.max_samples or spent_ms >= most_ms or precise):
            break
        if count >= MIN_RACE_SAMPLES and _is_clearly_slower(median, rival):
            # Without racing: the width of an interval shrinks with the root of the number of readings.
            needed = math.ceil(count * min(1e6, (median.relative_width / sampling.target) ** 2))
            planned = min(needed, math.ceil(most_ms * count / spent_ms), sampling.max_samples)
            saved = max(0, sampling.min_samples - count, planned - count)
            break
        missing = sampling.min_samples - count
        if missing <= 0:
            fits = math.ceil((most_ms - spent_ms) * count / spent_ms)
            missing = min(max(1, count // 4), fits, sampling.max_samples - count)
        readings += _read_checked(probe, missing)
    _check_clock_jumps(readings)
    half, drift = len(readings) // 2, ""
    if half >= WARMUP_WINDOW_SAMPLES:
        first, second = (median_ci(part, 0.99) for part in (readings[:half], readings[half:]))
        disjoint = first.high < second.low or second.high < first.low
        if disjoint and abs(second.value / first.value - 1) > STEADY_TOLERANCE:
            drift = f"drift: the first half took {first.value:.4g} ms, the second {second.value:.4g} ms"
    return Samples(latency_ms=tuple(readings), saved=saved, drift=drift)


def _alternate_turns(
    probe: Probe, reference: Probe, level_ms: float, sampling: Sampling, rival: Interval | None
) -> Samples:
    """Time an engine in turns with a fixed reference.

    Every turn of the candidate is between two turns of the reference. Its latency is the median of its inferences over
    the mean of those two turns, times `level_ms`. Turns continue until the 95 % interval of their median is narrower
    than `target`, the engine is clearly slower than `rival`, which was timed in the same way, or the time is up.

    Changes of speed that both engines share cancel. Another process on the same core does not cancel: it takes whole
    time slices, which interrupt long inferences more often, so the slower engine loses more than its share.
    """
    candidate, other = _PairedEngine(probe), _PairedEngine(reference)
    reference_ms = [other.take_turn()]
    raw_ms: list[float] = []
    latency_ms: list[float] = []
    cap_ms = PAIRED_TIME_FACTOR * sampling.max_ms
    saved = 0
    while len(raw_ms) < MIN_RACE_SAMPLES or candidate.spent_ms + other.spent_ms < cap_ms:
        raw_ms.append(candidate.take_turn())
        reference_ms.append(other.take_turn())
        latency_ms.append(raw_ms[-1] * level_ms / (0.5 * (reference_ms[-2] + reference_ms[-1])))
        if len(raw_ms) < MIN_RACE_SAMPLES:
            continue
        median = median_ci(latency_ms)
        if median.relative_width <= sampling.target:
            break
        if _is_clearly_slower(median, rival):
            share_left = max(0.0, cap_ms / (candidate.spent_ms + other.spent_ms) - 1)
            saved = math.floor(share_left * candidate.counted)
            break
    _check_clock_jumps(raw_ms)
    return Samples(latency_ms=tuple(latency_ms), raw_ms=tuple(raw_ms), reference_ms=tuple(reference_ms), saved=saved)


class _PairedEngine:
    """Engine of an interleaved pair.

    Attributes:
        spent_ms: Time of all inferences in ms, including those that warm the caches.
        counted: Number of inferences, without those that warm the caches.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._fastest_ms = math.inf
        self.spent_ms, self.counted = 0.0, 0

    def take_turn(self) -> float:
        """Run one turn and return its median latency in ms; its first inference only warms the caches.

        The number of inferences follows from the fastest one so far, so that an interrupted one does not shorten turns.
        """
        (first,) = _read_checked(self._probe, 1)
        self._fastest_ms = min(self._fastest_ms, first)
        count = math.ceil(MIN_REFERENCE_TURN_MS / self._fastest_ms)
        readings = _read_checked(self._probe, min(MAX_TURN_SAMPLES, max(MIN_TURN_SAMPLES, count)))
        self._fastest_ms = min(self._fastest_ms, *readings)
        self.spent_ms += first + sum(readings)
        self.counted += len(readings)
        return float(np.median(readings))


def _is_clearly_slower(median: Interval, rival: Interval | None) -> bool:
    """Return whether an engine's interval is above the incumbent's by more than 2 %; False without an incumbent."""
    return rival is not None and median.low > rival.high * (1 + STEADY_TOLERANCE)


def _check_clock_jumps(readings: list[float]) -> None:
    """Raise `MeasureFailed` if a reading is so far from the median that the clock must have jumped."""
    median = statistics.median(readings)
    low, high = min(readings), max(readings)
    slow = high > max(CLOCK_JUMP_FACTOR * median, MIN_CLOCK_JUMP_MS)
    jumped = low if low < median / CLOCK_JUMP_FACTOR else high if slow else None
    if jumped is not None:
        raise MeasureFailed(f"the clock jumped: a reading of {jumped:g} ms where {median:g} ms is the median")


def _read_checked(probe: Probe, count: int) -> list[float]:
    """Return `count` readings in ms; raise `MeasureFailed` for another number, or values not in 0 ms to 1 hour."""
    readings = [float(value) for value in probe.sample(count)]
    if len(readings) != count:
        raise MeasureFailed(f"the benchmarker gave {len(readings)} readings where {count} were requested")
    for value in readings:
        if not 0 < value <= MAX_INFERENCE_MS:
            raise MeasureFailed(
                f"impossible latency of {value:g} ms: it is above 0 (else nothing ran, or the clock is too coarse or "
                "jumped back), finite, and at most an hour"
            )
    return readings
