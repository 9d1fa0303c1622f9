"""Medians, ratios and verdicts with their uncertainty.

Latencies are skewed, have outliers and come in blocks (a build, a round), so everything here is about
medians and resampled blocks, never about means and normal distributions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Literal

import numpy as np
import numpy.typing as npt

__all__ = [
    "CLAIM_FLOOR", "Floats", "Interval", "Verdict", "block_ci", "floor_from", "median_ci", "paired_ratio_ci",
    "rebuilt_ci", "stderr_of", "stderr_of_median", "verdict",
]  # fmt: skip

CLAIM_FLOOR = 0.01
"""No gain below 1 % is claimed, however quiet the machine."""
_Z95 = NormalDist().inv_cdf(0.975)

Floats = Sequence[float] | npt.NDArray[np.floating]
Verdict = Literal["faster", "tie", "slower"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate with the limits of its confidence interval, all in one unit."""

    value: float
    low: float
    high: float

    @property
    def relative_width(self) -> float:
        """Width as a share of the value."""
        return (self.high - self.low) / abs(self.value) if self.value else float("inf")


def median_ci(samples: Floats, confidence: float = 0.95) -> Interval:
    """Median with a distribution-free confidence interval from order statistics.

    The two intervals next to the nominal level are interpolated (Hettmansperger and Sheather,
    "Confidence intervals based on interpolated order statistics", Statistics & Probability Letters 4,
    1986, eq. 2.1), which keeps the coverage near nominal for small n. With too few samples for the
    level (5 or fewer for 95 %) the interval is their whole range.

    Raises:
        ValueError: No samples.
    """
    values = np.sort(np.asarray(samples, dtype=float))
    count = len(values)
    if not count:
        raise ValueError("a median needs at least one sample")
    rank, weight = _ranks(count, confidence)
    low, high = values[rank - 1], values[count - rank]
    if weight:
        low += weight * (values[rank] - low)
        high += weight * (values[count - rank - 1] - high)
    middle = (values[(count - 1) // 2] + values[count // 2]) / 2  # np.median sorts anew, and takes as long as all this
    return Interval(value=float(middle), low=float(low), high=float(high))


@lru_cache(maxsize=4096)
def _ranks(count: int, confidence: float) -> tuple[int, float]:
    """Outer rank d (from 1) of the interval, and how far to go from there to rank d + 1.

    The interval from rank d to n - d + 1 covers the median with 1 - 2 P(B < d), B binomial (n, 1/2).
    """
    below, term, outer = 0, 1, 1.0
    for rank in range(1, count // 2 + 1):
        below += term
        term = term * (count - rank + 1) // rank
        covers = (2**count - 2 * below) / 2**count
        if covers < confidence:
            if rank == 1:
                break
            share = (outer - confidence) / (outer - covers)
            rank -= 1
            return rank, (count - rank) * share / (rank + (count - 2 * rank) * share)
        outer = covers
    return 1, 0.0


def stderr_of(median: Interval) -> float:
    """Standard error of a median from the width of its 95 % interval, in its unit.

    McKean and Schrader, "A comparison of methods for studentizing the sample median", Communications
    in Statistics 13, 1984. One sample has none: 0.
    """
    return (median.high - median.low) / (2 * _Z95)


def rebuilt_ci(samples: Floats, earlier: Sequence[Floats]) -> Interval:
    """Median of the samples that count, whose 95 % interval knows what rebuilding the engine changed.

    Args:
        earlier: Samples of the engine's other builds; none: the interval is that of `median_ci`.
    """
    own = median_ci(samples)
    if not earlier:
        return own
    medians = [own.value, *(median_ci(each).value for each in earlier)]
    wide = _Z95 * float(np.std(medians, ddof=1)) / math.sqrt(len(medians))
    return Interval(value=own.value, low=min(own.low, own.value - wide), high=max(own.high, own.value + wide))


def stderr_of_median(samples: Floats) -> float:
    """Standard error of the median of these samples; see `stderr_of`."""
    return stderr_of(median_ci(samples))


def block_ci(builds: Sequence[Floats], confidence: float = 0.95) -> Interval:
    """Typical value of positive readings that come in builds, with a confidence interval.

    Readings of one build share whatever the build did to them, so the build is the unit: its median
    counts as one reading, and the interval is Student's over builds, on a logarithmic scale (Kalibera and
    Jones, "Rigorous benchmarking in reasonable time", ISMM 2013: repeat and summarise at the level that
    varies). The standard error is that of the bootstrap over builds, whose closed form this is, with
    the small-sample correction (Hesterberg, "What teachers should know about the bootstrap", The
    American Statistician 69, 2015, section 3.2); percentile limits from 3 builds cover 75 to 90 % only.

    Args:
        builds: For each build its readings, one a round. A single build: its rounds are the units, and
            what varies between builds is not in the interval.

    Raises:
        ValueError: No readings, or one that is not positive.
    """
    from scipy.special import stdtrit  # 0.3 s, and the worker never needs it

    readings = [np.asarray(build, dtype=float) for build in builds if len(build)]
    if not readings or any(not np.all(values > 0) for values in readings):
        raise ValueError("an interval needs readings, all of them positive")
    logs = np.log(np.array([np.median(values) for values in readings]) if len(readings) > 1 else readings[0])
    if len(logs) == 1:
        value = float(np.exp(logs[0]))
        return Interval(value=value, low=0.0, high=float("inf"))
    half = float(stdtrit(len(logs) - 1, (1 + confidence) / 2)) * logs.std(ddof=1) / np.sqrt(len(logs))
    value, low, high = (float(np.exp(logs.mean() + shift)) for shift in (0.0, -half, half))
    return Interval(value=value, low=low, high=high)


def paired_ratio_ci(baseline: Sequence[Floats], candidate: Sequence[Floats], confidence: float = 0.95) -> Interval:
    """Speedup baseline / candidate from readings that were taken side by side; see `block_ci`.

    Args:
        baseline: For each build, one latency a round.
        candidate: The same builds and rounds.

    Raises:
        ValueError: Builds or rounds do not match, or a reading is not positive.
    """
    pairs = [(np.asarray(b, dtype=float), np.asarray(c, dtype=float)) for b, c in zip(baseline, candidate, strict=True)]
    if any(len(b) != len(c) for b, c in pairs):
        raise ValueError("paired readings need the same rounds on both sides")
    return block_ci([b / c for b, c in pairs], confidence)


def floor_from(aa_ratios: Floats, quantile: float = 0.95) -> float:
    """Noise floor: the gain that the baseline shows over itself, at this quantile of its A/A ratios.

    Args:
        aa_ratios: Latency of the baseline over that of its twin, one a build; none gives the floor 0.
    """
    ratios = np.asarray(aa_ratios, dtype=float)
    if not len(ratios):
        return 0.0
    return float(np.quantile(np.maximum(ratios, 1 / ratios) - 1, quantile, method="higher"))


def verdict(speedup: Interval, floor: float) -> Verdict:
    """Faster or slower where the interval excludes 1 and the gain exceeds 1 % and the noise floor; else a tie."""
    gain = max(speedup.value, 1 / speedup.value) - 1
    if speedup.low <= 1 <= speedup.high or gain < max(CLAIM_FLOOR, floor):
        return "tie"
    return "faster" if speedup.value > 1 else "slower"
