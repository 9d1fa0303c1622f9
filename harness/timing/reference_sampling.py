"""Sampling against a reference engine, which removes changes of the machine's speed from a candidate's readings.

Machines change their speed within a second: a sibling thread that works, another cloud guest, a clock that follows the
temperature. Readings of two engines in short alternating turns share these changes, so their ratio does not contain
them (a control variate; Kalibera and Jones, ISMM 2013, section 9, on ratios of paired readings). On the machine of the
committed tables turns of 50 ms differ by a third, their ratios to adjacent turns of the reference by a tenth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from harness.api import Probe
from harness.config.sections import Sampling
from harness.statistics import Interval, median_ci
from harness.timing.machine_noise import MachineMonitor
from harness.timing.sampling import (
    MIN_RACE_SAMPLES,
    SampleRun,
    Samples,
    check_clock_jumps,
    is_clearly_slower,
    read_checked,
    sample_with_retry,
)

MIN_REFERENCE_TURN_MS = 10.0  # many short turns beat few long ones, but each needs an inference to warm the caches
MIN_TURN_SAMPLES = 2  # inferences of a turn, without the one that warms the caches
MAX_TURN_SAMPLES = 200
PAIRED_TIME_FACTOR = 2.0  # time limit of both engines together, in units of a candidate's limit alone


@dataclass(frozen=True, slots=True)
class ReferenceEngine:
    """Engine that candidates are timed against.

    Attributes:
        probe: Its probe, warmed up.
        level_ms: Its latency at the machine's usual speed, which sets the scale and is the same for a whole search.
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

    Every turn of the candidate lies between two of the reference. Its latency is the median of its inferences over the
    mean of those two turns, times the reference's latency. Turns continue until the 95 % interval of their median is
    narrower than `target`, the race is lost, or the time is up; they start over once if the machine was disturbed.

    Arguments and errors are those of `harness.timing.sampling.sample_engine`, with `rival` on the reference's scale.
    """
    return sample_with_retry(lambda: _alternate_turns(probe, reference, sampling, rival), probe, sampling, machine)


def _alternate_turns(probe: Probe, reference: ReferenceEngine, sampling: Sampling, rival: Interval | None) -> SampleRun:
    """Make one attempt.

    A speed that both engines share cancels. Another process on the same core does not: it takes whole time slices,
    which more of the longer inferences meet, so the slower of two engines loses more than its share.
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
        spent_ms: Time of its inferences, including those that warm the caches.
        counted: Number of its inferences, without those that warm the caches.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._fastest_ms = math.inf
        self.spent_ms, self.counted = 0.0, 0

    def take_turn(self) -> float:
        """Return the median latency of one turn, whose first inference only warms the caches.

        The number of inferences depends on the fastest one up to now, so that an interrupted one does not cut the turn
        short.
        """
        (first,) = read_checked(self._probe, 1)
        self._fastest_ms = min(self._fastest_ms, first)
        count = math.ceil(MIN_REFERENCE_TURN_MS / self._fastest_ms)
        readings = read_checked(self._probe, min(MAX_TURN_SAMPLES, max(MIN_TURN_SAMPLES, count)))
        self._fastest_ms = min(self._fastest_ms, *readings)
        self.spent_ms += first + sum(readings)
        self.counted += len(readings)
        return float(np.median(readings))
