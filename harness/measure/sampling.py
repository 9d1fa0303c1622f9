"""How an engine is timed: warm up until it is steady, then sample until the median is known well enough.

Time is counted by the readings themselves, never by a clock beside them: a simulated engine is then
sampled like a real one, and a clock that jumps shows up as an outlier, which the median ignores.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.api import Array, Probe
from harness.errors import MeasureFailed, UserError
from harness.feeds import random_feeds
from harness.measure.stats import median_ci
from harness.run.config import Sampling

__all__ = ["Samples", "fixed_inputs", "take"]

WINDOW = 5
"""Inferences whose medians are compared to see whether an engine is still warming up."""
LONGEST_WARMUP = 5
"""An engine that is not steady after so many times the warm-up is taken as it is."""
STEADY = 0.02
"""Medians that differ by no more than this share are equal for the purpose of warm-up and drift."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Raw readings of one engine.

    Attributes:
        latency_ms: In order of measurement, outliers included, warm-up excluded.
        discarded_ms: Readings of a first attempt that drifted, so that it was repeated.
        warmup: Inferences before the first reading.
        measure_s: Wall-clock of it all.
        stable: Warm-up ended in a steady state and the readings do not drift.
    """

    latency_ms: tuple[float, ...]
    discarded_ms: tuple[float, ...] = ()
    warmup: int
    measure_s: float
    stable: bool


def take(probe: Probe, sampling: Sampling, clock: Callable[[], float] = time.perf_counter) -> Samples:
    """Time an engine.

    Warms up for `warmup_ms` and then until two windows in a row agree, samples until the 95 % interval
    of the median is narrower than `target` or a cap is reached, and starts over once where the
    readings drift (throttling, a neighbour that woke up).

    Raises:
        MeasureFailed: A reading is not a positive finite number, or the probe gives too few of them.
    """
    started_s = clock()
    warmup, steady = _warm_up(probe, sampling)
    readings = _collect(probe, sampling)
    discarded: list[float] = []
    if _drifts(readings):
        discarded, readings = readings, _collect(probe, sampling)
    return Samples(
        latency_ms=tuple(readings),
        discarded_ms=tuple(discarded),
        warmup=warmup,
        measure_s=max(0.0, clock() - started_s),
        stable=steady and not _drifts(readings),
    )


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


def _warm_up(probe: Probe, sampling: Sampling) -> tuple[int, bool]:
    """Run without counting; the number of inferences, and whether the engine became steady."""
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
        readings += _read(probe, max(1, min(count, missing)))
    return len(readings), True


def _collect(probe: Probe, sampling: Sampling) -> list[float]:
    """Sample until the median is known well enough, or a cap is reached."""
    readings = _read(probe, sampling.min_samples)
    while len(readings) < sampling.max_samples and sum(readings) < sampling.max_ms:
        if median_ci(readings).relative_width <= sampling.target:
            break
        fits = math.ceil((sampling.max_ms - sum(readings)) / (sum(readings) / len(readings)))
        readings += _read(probe, min(max(1, len(readings) // 4), fits, sampling.max_samples - len(readings)))
    return readings


def _drifts(readings: list[float]) -> bool:
    """Whether the second half differs from the first by more than noise: 99 % intervals apart, medians too."""
    half = len(readings) // 2
    first, second = (median_ci(part, 0.99) for part in (readings[:half], readings[half:]))
    apart = first.high < second.low or second.high < first.low
    return half >= WINDOW and apart and abs(second.value / first.value - 1) > STEADY


def _read(probe: Probe, count: int) -> list[float]:
    """Readings of the probe, checked."""
    readings = [float(value) for value in probe.sample(count)]
    if len(readings) != count:
        raise MeasureFailed(f"the benchmarker gave {len(readings)} readings where {count} were asked for")
    wrong = next((value for value in readings if not (math.isfinite(value) and value > 0)), None)
    if wrong is not None:
        raise MeasureFailed(f"impossible latency of {wrong} ms: readings are positive, finite numbers")
    return readings
