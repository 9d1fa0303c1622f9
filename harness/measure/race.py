"""A race: the best of a few contenders, timed in turns for as long as noise could still decide between them.

After each heat whoever is slower than the best by more than noise and fresh builds explain drops out, and the others
go on, so that turns go where they tell something (López-Ibáñez et al., "The irace package", Operations Research
Perspectives 3, 2016, section 2: races with Student's t-test, uncorrected, because a correction keeps too many in a
race). Turns of one build share what that build did to them, so the test, which is over turns, is of a gap beyond what
builds of one model differ by (`by_builds`).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.stats import t as student

from harness.measure.stats import CLAIM_FLOOR

__all__ = ["HEATS", "by_builds", "unbeaten", "winner"]

HEATS = (8, 8, 16)
"""Turns of each heat: each is as long as all before it, so that what is still close has its noise cut by a third."""
SURE = 0.95
"""Of one test, one-sided, between two that were not chosen for their readings."""

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


def by_builds(heats: int, floor: float = 0.0) -> float:
    """How far apart the mean log latencies of equals may be for their builds alone.

    Args:
        heats: Held so far, each with fresh builds.
        floor: A/A noise floor, as a share: what the float model's builds differ by. One below the least gain that a
            verdict believes counts as that.
    """
    return math.log1p(max(CLAIM_FLOOR, floor)) / math.sqrt(heats)


def unbeaten(log_ms: Floats, best: int = 1, slack: float = 0.0) -> Flags:
    """Which contenders noise may still put among the best.

    A contender is beaten where its turns are slower than those of the `best`-th (by the median over all turns) by more
    than the slack, and beyond what a paired one-sided t-test allows. What a turn does to all contenders cancels.

    Args:
        log_ms: Logarithm of the latency, [..., contender, turn]; NaN where it had no such turn. One without any finite
            turn takes no part, and is beaten.
        best: How many are wanted.
        slack: See `by_builds`.

    Returns:
        [..., contender].
    """
    timed = np.isfinite(log_ms)
    takes_part = timed.any(axis=-1)
    middle = np.where(takes_part, _median(log_ms, timed), np.inf)
    order = np.argsort(middle, axis=-1, kind="stable")
    last = order[..., min(best, middle.shape[-1]) - 1, None]
    paced = np.take_along_axis(log_ms, last[..., None], axis=-2)
    both = timed & np.isfinite(paced)
    behind = np.where(both, log_ms, 0.0) - np.where(both, paced, 0.0)
    turns = both.sum(axis=-1)
    mean = behind.sum(axis=-1) / np.maximum(turns, 1)
    spread = np.sqrt(np.where(both, (behind - mean[..., None]) ** 2, 0.0).sum(axis=-1) / np.maximum(turns - 1, 1))
    with np.errstate(invalid="ignore"):  # no spread of one turn, and no limit
        slower = mean - slack > _limits(log_ms.shape[-1])[turns] * spread / np.sqrt(np.maximum(turns, 1))
    behind_last = middle > np.take_along_axis(middle, last, axis=-1)
    kept: Flags = takes_part & ~(slower & behind_last)
    return kept


def winner(log_ms: Floats) -> npt.NDArray[np.intp]:
    """Who wins a whole race.

    Args:
        log_ms: [..., contender, turn], with the turns of all heats; infinite for one that takes no part.

    Returns:
        [...]: the contender; the first of equals, and where nobody takes part.
    """
    left = np.array(log_ms)
    for heats, turns in enumerate(np.cumsum(HEATS), 1):
        beaten = ~unbeaten(left[..., :turns], slack=by_builds(heats))
        left[beaten] = np.inf
    found: npt.NDArray[np.intp] = np.median(left, axis=-1).argmin(axis=-1)
    return found


def _median(values: Floats, there: Flags) -> Floats:
    """Over the last axis, of what is there; infinite where nothing is."""
    ordered = np.sort(np.where(there, values, np.inf), axis=-1)
    count = np.maximum(there.sum(axis=-1, keepdims=True), 1)
    low, high = (np.take_along_axis(ordered, place, axis=-1)[..., 0] for place in ((count - 1) // 2, count // 2))
    with np.errstate(invalid="ignore"):
        middle: Floats = (low + high) / 2
    return middle


@lru_cache
def _limits(most: int) -> Floats:
    """Student's quantile by the number of turns; infinite below two, which tell no spread."""
    return np.array([np.inf, np.inf, *student.ppf(SURE, np.arange(1, most))][: most + 1])
