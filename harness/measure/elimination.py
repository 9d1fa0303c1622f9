"""Statistical test of a race: elimination of candidates that are slower than the best by more than noise.

After each round, candidates are eliminated whose distance to the best exceeds noise and the differences between builds;
the others get more turns (López-Ibáñez et al., "The irace package", Operations Research Perspectives 3, 2016, section
2: races with Student's t-test, uncorrected, because a correction keeps too many candidates). Turns of one build share
its effect, so the test subtracts the differences between builds of one model first (`build_variance_slack`).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from harness.base.statistics import MIN_CLAIMED_GAIN

TURNS_PER_RACING_ROUND = (8, 8, 16)  # each round doubles the number of turns, which reduces the noise by a third
RACING_CONFIDENCE = 0.95  # of a one-sided test between two candidates that were not selected by their readings

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


def build_variance_slack(rounds: int, noise_floor: float = 0.0) -> float:
    """Return the difference of mean natural log latencies that builds of equal models may have.

    Args:
        rounds: Number of rounds, each with fresh builds.
        noise_floor: Share by which builds of the float model differ; raised to the smallest gain that a verdict claims.
    """
    return math.log1p(max(MIN_CLAIMED_GAIN, noise_floor)) / math.sqrt(rounds)


def surviving(log_ms: FloatArray, best: int = 1, slack: float = 0.0) -> BoolArray:
    """Return a mask of the candidates that may still be among the best.

    A candidate is eliminated if its turns are slower than those of the `best`-th candidate (by the median over all
    turns) by more than the slack, and beyond the limit of a paired one-sided t-test. Effects of a turn on all
    candidates cancel.

    Args:
        log_ms: Natural logarithms of latencies with shape [..., candidate, turn]; NaN for turns that a candidate did
            not have. A candidate without a finite turn is eliminated.
        best: Smallest number of candidates that survive.
        slack: Difference of log latencies that is ignored, see `build_variance_slack`.

    Returns:
        Mask with shape [..., candidate].
    """
    timed = np.isfinite(log_ms)
    takes_part = timed.any(axis=-1)
    ordered, count = np.sort(np.where(timed, log_ms, np.inf), axis=-1), timed.sum(axis=-1, keepdims=True)
    low, high = (
        np.take_along_axis(ordered, np.maximum(rank, 0), axis=-1)[..., 0] for rank in ((count - 1) // 2, count // 2)
    )
    with np.errstate(invalid="ignore"):
        median = np.where(takes_part, (low + high) / 2, np.inf)
    order = np.argsort(median, axis=-1, kind="stable")
    last = order[..., min(best, median.shape[-1]) - 1, None]
    last_ms = np.take_along_axis(log_ms, last[..., None], axis=-2)
    both = timed & np.isfinite(last_ms)
    gap = np.where(both, log_ms, 0.0) - np.where(both, last_ms, 0.0)
    turns = both.sum(axis=-1)
    mean = gap.sum(axis=-1) / np.maximum(turns, 1)
    spread = np.sqrt(np.where(both, (gap - mean[..., None]) ** 2, 0.0).sum(axis=-1) / np.maximum(turns - 1, 1))
    with np.errstate(invalid="ignore"):  # one turn has no spread and an infinite quantile
        slower = mean - slack > _student_quantiles(log_ms.shape[-1])[turns] * spread / np.sqrt(np.maximum(turns, 1))
    is_behind = median > np.take_along_axis(median, last, axis=-1)
    survives: BoolArray = takes_part & ~(slower & is_behind)
    return survives


def race_winner(log_ms: FloatArray) -> npt.NDArray[np.intp]:
    """Return the winner of a race over all its rounds.

    Args:
        log_ms: Logarithms of the latencies in all rounds, with shape [..., candidate, turn]; infinite for candidates
            that do not take part.

    Returns:
        Indices of the candidates with shape [...]; the first of equal ones, also if none takes part.
    """
    remaining = np.array(log_ms)
    for rounds, turns in enumerate(np.cumsum(TURNS_PER_RACING_ROUND), 1):
        eliminated = ~surviving(remaining[..., :turns], slack=build_variance_slack(rounds))
        remaining[eliminated] = np.inf
    winner: npt.NDArray[np.intp] = np.median(remaining, axis=-1).argmin(axis=-1)
    return winner


@lru_cache
def _student_quantiles(most: int) -> FloatArray:
    """Return Student's quantile at each number of turns from 0 to `most`; infinite below two turns."""
    from scipy.special import stdtrit  # takes 0.3 s, and workers never need it

    return np.array([np.inf, np.inf, *stdtrit(np.arange(1, most), RACING_CONFIDENCE)][: most + 1])
