"""Sampling beside a reference: the machine's pace taken out of a candidate's readings.

Machines change their speed within a second: a sibling thread that works, a neighbour in the cloud, a clock that
follows the heat. Readings of two engines that were taken in short alternating turns share what the machine did, so
their ratio does not (a control variate; Kalibera and Jones, ISMM 2013, section 9, on ratios of paired readings). On
the machine of the committed tables turns of 50 ms differ by a third, their ratios to the turns beside them by a tenth.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from harness.api import Probe
from harness.measure.conditions import Machine
from harness.measure.sampling import FIRST_LOOK, STEADY, Readings, Samples, read, refuse_jumps, settle
from harness.measure.stats import Interval, median_ci
from harness.run.config import Sampling

__all__ = ["Reference", "take_beside"]

TURN_MS = 10.0
"""Least time of a turn: many short ones beat few long ones, and each costs an inference that only warms the caches."""
TURN = 2
"""Inferences of a turn at least, the one that warms the caches not counted."""
MOST = 200
"""Inferences of a turn at most."""
SHARE = 2.0
"""A candidate beside a reference gets so many times the time of one alone, the reference's turns included."""


@dataclass(frozen=True, slots=True)
class Reference:
    """What candidates are timed beside.

    Attributes:
        probe: Its engine, warmed up.
        level_ms: Its latency at the machine's usual pace. It only sets the scale, and is the same for a whole search.
    """

    probe: Probe
    level_ms: float


def take_beside(
    probe: Probe,
    reference: Reference,
    sampling: Sampling,
    rival: Interval | None = None,
    *,
    machine: Machine | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Samples:
    """Time an engine in turns with a reference that is always the same.

    Every turn of the candidate lies between two of the reference. Its latency is the median of its inferences over the
    mean of those two turns, times the level. Turns go on until the 95 % interval of their median is narrower than
    `target`, the race is lost, or the time is up; and start over once where something else ran on the machine.

    Args:
        rival: The incumbent's latency in milliseconds, on the same scale.
        machine: Asked for disturbances; None: readings are not of this machine's time.

    Raises:
        MeasureFailed: As `harness.measure.sampling.take`.
    """
    return settle(lambda: _turns(probe, reference, sampling, rival), probe, sampling, machine, clock)


def _turns(probe: Probe, reference: Reference, sampling: Sampling, rival: Interval | None) -> Readings:
    """One attempt.

    A pace that both engines share cancels. Another process on the same core does not: it takes whole slices of time,
    which more of the longer inferences meet, so the slower of two engines loses more than its share.
    """
    candidate, company = _Side(probe), _Side(reference.probe)
    beside = [company.turn()]
    raw: list[float] = []
    paced: list[float] = []
    cap_ms = SHARE * sampling.max_ms
    saved = 0
    while len(raw) < FIRST_LOOK or candidate.spent_ms + company.spent_ms < cap_ms:
        raw.append(candidate.turn())
        beside.append(company.turn())
        paced.append(raw[-1] * reference.level_ms / (0.5 * (beside[-2] + beside[-1])))
        if len(raw) < FIRST_LOOK:
            continue
        median = median_ci(paced)
        if median.relative_width <= sampling.target:
            break
        if rival is not None and median.low > rival.high * (1 + STEADY):
            share_left = max(0.0, cap_ms / (candidate.spent_ms + company.spent_ms) - 1)
            saved = math.floor(share_left * candidate.counted)
            break
    refuse_jumps(raw)
    return Readings(latency_ms=paced, raw_ms=raw, beside_ms=beside, saved=saved)


class _Side:
    """One of the two engines that take turns.

    Attributes:
        spent_ms: What its inferences took, those that warm the caches included.
        counted: Its inferences, without those that warm the caches.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._least_ms = math.inf
        self.spent_ms, self.counted = 0.0, 0

    def turn(self) -> float:
        """Median latency of one turn; its first inference brings the engine back into the caches.

        How many there are goes by the fastest inference so far, so that one that was interrupted does not cut its turn
        short.
        """
        (first,) = read(self._probe, 1)
        self._least_ms = min(self._least_ms, first)
        readings = read(self._probe, min(MOST, max(TURN, math.ceil(TURN_MS / self._least_ms))))
        self._least_ms = min(self._least_ms, *readings)
        self.spent_ms += first + sum(readings)
        self.counted += len(readings)
        return float(np.median(readings))
