"""Medians, ratios and verdicts with their uncertainty.

Latencies are skewed, have outliers and come in blocks (a build, a round). Readings are therefore summarized
by medians, and intervals are made over blocks, of logarithms or by resampling, never of single readings.
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

MIN_CLAIMED_GAIN = 0.01  # speedup minus 1; smaller gains are ties even if the noise floor is lower
_Z95 = NormalDist().inv_cdf(0.975)

Floats = Sequence[float] | npt.NDArray[np.floating]
Verdict = Literal["faster", "tie", "slower"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Estimate with the limits of its confidence interval, all in one unit."""

    value: float
    low: float
    high: float

    @property
    def relative_width(self) -> float:
        """Return the width as a share of the absolute value; infinite if the value is 0."""
        return (self.high - self.low) / abs(self.value) if self.value else float("inf")


def median_ci(samples: Floats, confidence: float = 0.95) -> Interval:
    """Return the median with a distribution-free confidence interval from order statistics.

    The two intervals next to the nominal level are interpolated (Hettmansperger and Sheather, "Confidence intervals
    based on interpolated order statistics", Statistics & Probability Letters 4, 1986, eq. 2.1), which keeps the
    coverage near nominal for small n. With too few samples for the level (5 or fewer for 95 %) the interval is their
    whole range.

    Raises:
        ValueError: There are no samples.
    """
    ordered = np.array(samples, dtype=float)
    ordered.sort()
    values = ordered.tolist()  # arithmetic of few numbers is faster in Python
    count = len(values)
    if not count:
        raise ValueError("a median needs at least one sample")
    rank, weight = _interval_ranks(count, confidence)
    low, high = values[rank - 1], values[count - rank]
    if weight:
        low += weight * (values[rank] - low)
        high += weight * (values[count - rank - 1] - high)
    median = (values[(count - 1) // 2] + values[count // 2]) / 2  # np.median sorts again, and takes as long as all this
    return Interval(value=median, low=low, high=high)


@lru_cache(maxsize=4096)
def _interval_ranks(count: int, confidence: float) -> tuple[int, float]:
    """Return the outer rank d (from 1) of the interval, and the weight of rank d + 1.

    The interval from rank d to n - d + 1 covers the median with 1 - 2 P(B < d), B binomial (n, 1/2).
    """
    below, term, outer = 0, 1, 1.0
    for rank in range(1, count // 2 + 1):
        below += term
        term = term * (count - rank + 1) // rank
        coverage = (2**count - 2 * below) / 2**count
        if coverage < confidence:
            if rank == 1:
                break
            share = (outer - confidence) / (outer - coverage)
            rank -= 1
            return rank, (count - rank) * share / (rank + (count - 2 * rank) * share)
        outer = coverage
    return 1, 0.0


def stderr_from_interval(median: Interval) -> float:
    """Return the standard error of a median from the width of its 95 % interval, in its unit.

    McKean and Schrader, "A comparison of methods for studentizing the sample median", Communications in Statistics 13,
    1984. The standard error of one sample is 0.
    """
    return (median.high - median.low) / (2 * _Z95)


def stderr_of_median(samples: Floats) -> float:
    """Return the standard error of the median of samples, in their unit; see `stderr_from_interval`."""
    return stderr_from_interval(median_ci(samples))


def rebuilt_ci(samples: Floats, earlier: Sequence[Floats]) -> Interval:
    """Return the median of a build's samples with a 95 % interval that includes the variance between builds.

    Args:
        samples: Samples of the last build.
        earlier: Samples of each earlier build of the same model.
    """
    own = median_ci(samples)
    if not earlier:
        return own
    medians = [own.value, *(median_ci(each).value for each in earlier)]
    half = _Z95 * float(np.std(medians, ddof=1)) / math.sqrt(len(medians))
    return Interval(value=own.value, low=min(own.low, own.value - half), high=max(own.high, own.value + half))


def block_ci(builds: Sequence[Floats], confidence: float = 0.95) -> Interval:
    """Return a typical value of positive readings that come in builds, with a confidence interval.

    Readings of one build share its effect, so the build is the unit: its median counts as one reading, and the interval
    is Student's over builds, on a logarithmic scale (Kalibera and Jones, "Rigorous benchmarking in reasonable time",
    ISMM 2013: repeat and summarise at the level that varies). The standard error is that of the bootstrap over builds,
    in closed form, with the small-sample correction (Hesterberg, "What teachers should know about the bootstrap", The
    American Statistician 69, 2015, section 3.2); percentile limits from 3 builds cover 75 to 90 % only.

    Args:
        builds: Readings of each build, one per round. With a single build, its rounds are the units, and the interval
            does not include the variance between builds. The limits of a single reading are 0 and infinity.

    Raises:
        ValueError: There are no readings, or one is not positive.
    """
    from scipy.special import stdtrit  # takes 0.3 s, and workers never need it

    readings = [np.asarray(build, dtype=float) for build in builds if len(build)]
    if not readings or any(not np.all(values > 0) for values in readings):
        raise ValueError("an interval needs readings, all of them positive")
    logs = np.log(np.array([np.median(values) for values in readings]) if len(readings) > 1 else readings[0])
    if len(logs) == 1:
        return Interval(value=float(np.exp(logs[0])), low=0.0, high=float("inf"))
    half = float(stdtrit(len(logs) - 1, (1 + confidence) / 2)) * logs.std(ddof=1) / np.sqrt(len(logs))
    value, low, high = (float(np.exp(logs.mean() + shift)) for shift in (0.0, -half, half))
    return Interval(value=value, low=low, high=high)


def paired_ratio_ci(baseline: Sequence[Floats], candidate: Sequence[Floats], confidence: float = 0.95) -> Interval:
    """Return the speedup baseline / candidate from one latency per round of the same builds; see `block_ci`.

    Raises:
        ValueError: The sides have different rounds, or `block_ci` raises it.
    """
    pairs = [(np.asarray(b, dtype=float), np.asarray(c, dtype=float)) for b, c in zip(baseline, candidate, strict=True)]
    if any(len(b) != len(c) for b, c in pairs):
        raise ValueError("paired readings need the same rounds on both sides")
    return block_ci([b / c for b, c in pairs], confidence)


def noise_floor_from_ratios(aa_ratios: Floats, quantile: float = 0.95) -> float:
    """Return the noise floor as a share: a quantile of the gains (or losses) of a rebuilt baseline over itself.

    Args:
        aa_ratios: Ratio of the latencies of the two baselines, one per build; without any, the floor is 0.
        quantile: Share of the builds with at most this gain.
    """
    ratios = np.asarray(aa_ratios, dtype=float)
    if not len(ratios):
        return 0.0
    return float(np.quantile(np.maximum(ratios, 1 / ratios) - 1, quantile, method="higher"))


def speedup_verdict(speedup: Interval, noise_floor: float) -> Verdict:
    """Return "faster" or "slower" if the interval excludes 1 and the gain exceeds 1 % and the noise floor, or "tie"."""
    gain = max(speedup.value, 1 / speedup.value) - 1
    if speedup.low <= 1 <= speedup.high or gain < max(MIN_CLAIMED_GAIN, noise_floor):
        return "tie"
    return "faster" if speedup.value > 1 else "slower"
