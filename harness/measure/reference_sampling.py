"""Sampling against a reference engine, which removes changes of the machine's speed from a candidate's readings.

A machine changes its speed within a second, by work of a sibling thread or another cloud guest, or by its temperature.
Readings of two engines in short alternating turns share these changes, so their ratio does not contain them (a control
variate; Kalibera and Jones, ISMM 2013, section 9, on ratios of paired readings). On the machine of the committed tables
turns of 50 ms differ by a third, their ratios to adjacent turns of the reference by a tenth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from harness.base.statistics import Interval, median_ci
from harness.config.sections import Sampling
from harness.measure.machine_noise import MachineMonitor
from harness.measure.sampling import (
    MIN_RACE_SAMPLES,
    SampleRun,
    Samples,
    check_clock_jumps,
    is_clearly_slower,
    read_checked,
    sample_with_retry,
)
from harness.plugins.api import Probe

MIN_REFERENCE_TURN_MS = 10.0  # short, to follow the machine's speed; but each turn needs an inference for the caches
MIN_TURN_SAMPLES = 2  # inferences of a turn, without the one that warms the caches
MAX_TURN_SAMPLES = 200
PAIRED_TIME_FACTOR = 2.0  # time limit of both engines together, in units of a candidate's limit alone


@dataclass(frozen=True, slots=True)
class ReferenceEngine:
    """Engine that candidates are timed against.

    Attributes:
        probe: Open and warmed-up engine of the float model.
        level_ms: Latency of the reference in ms to which readings are scaled, the same for a whole search.
    """

    probe: Probe
    level_ms: float


def sample_against_reference(
    probe: Probe,
    reference: ReferenceEngine,
    sampling: Sampling,
    rival: Interval | None = None,
    *,
    machine: MachineMonitor | None = None,
) -> Samples:
    """Time an engine in turns with a fixed reference.

    Every turn of the candidate is between two turns of the reference. Its latency is the median of its inferences over
    the mean of those two turns, times `level_ms`. Turns continue until the 95 % interval of their median is narrower
    than `target`, the engine is clearly slower than `rival`, or the time is up; they are repeated once if the machine
    was disturbed.

    Arguments and errors are those of `harness.measure.sampling.sample_engine`; `rival` was timed in the same way.
    """
    return sample_with_retry(lambda: _alternate_turns(probe, reference, sampling, rival), probe, sampling, machine)


def _alternate_turns(probe: Probe, reference: ReferenceEngine, sampling: Sampling, rival: Interval | None) -> SampleRun:
    """Make one attempt of `sample_against_reference`.

    Changes of speed that both engines share cancel. Another process on the same core does not cancel: it takes whole
    time slices, which interrupt long inferences more often, so the slower engine loses more than its share.
    """
    candidate, other = PairedEngine(probe), PairedEngine(reference.probe)
    reference_ms = [other.take_turn()]
    clock_ms: list[float] = []
    latency_ms: list[float] = []
    cap_ms = PAIRED_TIME_FACTOR * sampling.max_ms
    saved = 0
    while len(clock_ms) < MIN_RACE_SAMPLES or candidate.spent_ms + other.spent_ms < cap_ms:
        clock_ms.append(candidate.take_turn())
        reference_ms.append(other.take_turn())
        latency_ms.append(clock_ms[-1] * reference.level_ms / (0.5 * (reference_ms[-2] + reference_ms[-1])))
        if len(clock_ms) < MIN_RACE_SAMPLES:
            continue
        median = median_ci(latency_ms)
        if median.relative_width <= sampling.target:
            break
        if is_clearly_slower(median, rival):
            share_left = max(0.0, cap_ms / (candidate.spent_ms + other.spent_ms) - 1)
            saved = math.floor(share_left * candidate.counted)
            break
    check_clock_jumps(clock_ms)
    return SampleRun(latency_ms=latency_ms, raw_ms=clock_ms, reference_ms=reference_ms, saved=saved)


class PairedEngine:
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
        (first,) = read_checked(self._probe, 1)
        self._fastest_ms = min(self._fastest_ms, first)
        count = math.ceil(MIN_REFERENCE_TURN_MS / self._fastest_ms)
        readings = read_checked(self._probe, min(MAX_TURN_SAMPLES, max(MIN_TURN_SAMPLES, count)))
        self._fastest_ms = min(self._fastest_ms, *readings)
        self.spent_ms += first + sum(readings)
        self.counted += len(readings)
        return float(np.median(readings))
