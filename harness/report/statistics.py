"""Comparison of searchers over several tasks: ranks, tests, effect sizes, scores against random search.

A block is one task (a model on a backend), never a seed, since the seeds of a block are not independent (Demšar 2006,
"Statistical comparisons of classifiers over multiple data sets", JMLR 7). Larger values are better.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from harness.base.statistics import MIN_CLAIMED_GAIN, Interval, block_ci
from harness.base.text import pluralize

MIN_BLOCKS = 3  # for the interval of a mean and for Friedman's test
MIN_BLOCKS_FOR_WILCOXON = 6  # Wilcoxon's test can then be significant at 5 %, see `smallest_p_value`
#: With more blocks and more methods, Friedman's statistic is close to chi-squared (Demšar 2006, section 3.2.2).
MANY_BLOCKS, MANY_METHODS = 10, 5
PERMUTATION_RESAMPLES = 19_999
SCORE_END_SHARE = 0.95  # of the possible improvement; scores are averaged until random search has found this share
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class FriedmanRanks:
    """Mean ranks of methods over blocks.

    Attributes:
        mean: Mean rank by method, best first; rank 1 is the best of a block, ties share their ranks.
        p_value: p of Friedman's test that all methods are equal; None below `MIN_BLOCKS` blocks or three methods.
        critical_difference: Difference of mean ranks that is significant at 5 % (Nemenyi); None if `p_value` is.
    """

    mean: Mapping[str, float]
    blocks: int
    p_value: float | None
    critical_difference: float | None
    unit: str = "task"

    @property
    def untested_reason(self) -> str:
        """Return why there is no test, or "" if there is one."""
        if self.critical_difference is not None:
            return ""
        if self.blocks < MIN_BLOCKS:
            few = f"{pluralize(self.blocks, self.unit)} {'is' if self.blocks == 1 else 'are'} too few"
            return f"no test: {few} ({MIN_BLOCKS} are needed)"
        return f"no test of ranks, which needs three searchers: there are {len(self.mean)}"

    @property
    def cliques(self) -> tuple[tuple[str, ...], ...]:
        """Maximal groups of methods that the test does not distinguish, in order of their ranks."""
        if self.critical_difference is None:
            return ()
        names = list(self.mean)
        groups: list[tuple[str, ...]] = []
        for start, first in enumerate(names):
            group = [n for n in names[start:] if self.mean[n] - self.mean[first] <= self.critical_difference]
            if len(group) > 1 and not any(set(group) <= set(clique) for clique in groups):
                groups.append(tuple(group))
        return tuple(groups)


def compute_ranks(values: pd.DataFrame, unit: str = "task") -> FriedmanRanks:
    """Return mean ranks, Friedman's test and Nemenyi's critical difference (Demšar 2006, sections 3.2.2 and 3.2.3).

    Args:
        values: A row per block, a column per method, without missing values; larger is better.
        unit: Noun for a block in messages.

    Raises:
        ValueError: There is no block or no method.
    """
    blocks, methods = values.shape
    if not blocks or not methods:
        raise ValueError(f"ranks need blocks and methods, but got {blocks} and {methods}")
    ranks = np.apply_along_axis(rank_values, 1, -values.to_numpy(dtype=float))
    means = zip(map(str, values.columns), ranks.mean(axis=0).tolist(), strict=True)
    mean = dict(sorted(means, key=lambda pair: pair[1]))
    p_value = critical = None
    if blocks >= MIN_BLOCKS and methods > 2:
        from scipy.stats import studentized_range  # SciPy's statistics take 46 MiB

        p_value = _friedman_p_value(ranks)
        q = float(studentized_range.ppf(0.95, methods, np.inf)) / math.sqrt(2)
        critical = q * math.sqrt(methods * (methods + 1) / (6 * blocks))
    return FriedmanRanks(mean=mean, blocks=blocks, p_value=p_value, critical_difference=critical, unit=unit)


def rank_values(values: Floats) -> Floats:
    """Return ranks from 1, the smallest value first; ties have the mean of their ranks."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Floats = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return ranks


def _friedman_p_value(ranks: Floats) -> float:
    """Return p of Friedman's test by permutations within blocks, or by chi-squared for many blocks and methods.

    Args:
        ranks: Shape (blocks, methods).
    """
    from scipy.stats import friedmanchisquare, permutation_test

    blocks, methods = ranks.shape
    if blocks > MANY_BLOCKS and methods > MANY_METHODS:
        with np.errstate(invalid="ignore"):  # all methods equal in every block
            p_value = float(friedmanchisquare(*ranks.T).pvalue)
        return 1.0 if math.isnan(p_value) else p_value

    def sum_of_squares(*columns: Floats, axis: int) -> Floats:
        # Friedman's statistic increases with this sum for given blocks and ties.
        return np.asarray(np.square(np.stack([column.sum(axis=axis) for column in columns])).sum(axis=0))

    result = permutation_test(
        tuple(ranks.T), sum_of_squares, permutation_type="samples", vectorized=True, batch=1_000,
        n_resamples=PERMUTATION_RESAMPLES, alternative="greater", rng=0,
    )  # fmt: skip
    return float(result.pvalue)


def effect_size(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the probability (0 to 1) that a value of the first sample exceeds one of the second; ties count half.

    Vargha and Delaney, "A critique and improvement of the CL common language effect size statistics", Journal of
    Educational and Behavioral Statistics 25, 2000: 0.5 is no effect, 1 always better.
    """
    one, two = np.asarray(first, dtype=float)[:, None], np.asarray(second, dtype=float)[None, :]
    return float(((one > two) + 0.5 * (one == two)).mean())


def compare_pairs(seeds: Mapping[str, Mapping[str, Sequence[float]]], control: str | None = None) -> pd.DataFrame:
    """Return ratio, effect size and Holm-corrected p of Wilcoxon's signed-rank test for pairs of methods.

    The ratio of a block is that of the medians over seeds; see `mean_ratio_over_blocks`. `chance` is the mean over
    blocks of `effect_size` over seeds (probability of improvement: Agarwal et al. 2021, "Deep reinforcement learning at
    the edge of the statistical precipice").

    Args:
        seeds: Positive values of the seeds by method and block; a pair is compared on its common blocks.
        control: Method that is `first` in each pair, whose means over seeds are compared: with many seeds the medians
            are all the same best value. Holm's correction is then for k - 1 comparisons of k methods, not for
            k (k - 1) / 2, for which the recorded tables are too few blocks (Demšar 2006, section 3.2.2: all against a
            control). None compares every pair.

    Returns:
        Columns first, second, blocks, ratio, low, high, chance, p_value, p_holm.

    Raises:
        KeyError: There is no method `control`.
    """
    pairs = itertools.combinations(seeds, 2) if control is None else ((control, n) for n in seeds if n != control)
    middle: Callable[[Sequence[float]], Any] = np.median if control is None else np.mean
    lines = []
    for one, two in pairs:
        first, second = seeds[one], seeds[two]
        blocks = [block for block in first if block in second and len(first[block]) and len(second[block])]
        if blocks:
            ratios = [float(middle(first[block]) / middle(second[block])) for block in blocks]
            mean = mean_ratio_over_blocks(ratios)
            chance = float(np.mean([effect_size(first[block], second[block]) for block in blocks]))
            p_value = _wilcoxon_p_value(np.log(ratios))
            lines.append((one, two, len(blocks), mean.value, mean.low, mean.high, chance, p_value))
    columns = ["first", "second", "blocks", "ratio", "low", "high", "chance", "p_value"]
    frame = pd.DataFrame(lines, columns=columns)
    # Holm's step-down correction (Scandinavian Journal of Statistics 6, 1979).
    p_values = frame["p_value"].to_numpy(dtype=float)
    order = np.argsort(p_values, kind="stable")
    corrected = np.empty(len(p_values))
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(p_values[order] * np.arange(len(order), 0, -1)))
    return frame.assign(p_holm=corrected)


def mean_ratio_over_blocks(ratios: Sequence[float]) -> Interval:
    """Return the geometric mean of ratios with Student's interval over blocks; NaN limits below `MIN_BLOCKS` blocks.

    Raises:
        ValueError: There is no ratio, or one is not positive.
    """
    middle = block_ci([[ratio] for ratio in ratios])
    return middle if len(ratios) >= MIN_BLOCKS else replace(middle, low=0.0, high=math.inf)


def smallest_p_value(blocks: int, comparisons: int) -> float:
    """Return the smallest p that Wilcoxon's two-sided signed-rank test can give after Holm's correction.

    If all differences have one sign, p is 2 / 2^blocks (Wilcoxon 1945); Holm multiplies the smallest of several p by
    the number of comparisons.
    """
    return min(1.0, comparisons * 2.0 ** (1 - blocks))


def _wilcoxon_p_value(differences: Floats) -> float:
    if not np.any(differences):
        return 1.0
    from scipy.stats import wilcoxon

    return float(wilcoxon(differences, zero_method="pratt").pvalue)


def score_against_random(latency_ms: Floats, random_ms: Floats, best_ms: float, first: int = 0) -> Floats:
    """Return for each seed the share of random search's remaining improvement that the searcher has found.

    P(t) = (random(t) - searcher(t)) / (random(t) - best): 0 is random search, 1 the best placement at once, negative is
    worse than random. It is averaged over the evaluations after the common ones until random search has found 95 % of
    the possible improvement (Willemsen et al. 2024, "A methodology for comparing optimization algorithms for
    auto-tuning", Future Generation Computer Systems 159, section 3).

    Args:
        latency_ms: Latency of the incumbent, of shape (seeds, evaluations).
        random_ms: Expected latency of random search after each evaluation.
        best_ms: The best known latency.
        first: Number of evaluations that all searches have in common (initial placements), which are left out.

    Returns:
        Score by seed; NaN if the common evaluations leave an improvement below 1 %, the smallest gain that is claimed.
    """
    remaining = random_ms - best_ms
    start = remaining[max(first - 1, 0)]
    reached = remaining[first:] <= (1 - SCORE_END_SHARE) * start
    span = slice(first, first + int(np.argmax(reached)) if reached.any() else len(remaining))
    if start <= MIN_CLAIMED_GAIN * best_ms or span.stop <= span.start or not np.all(remaining[span] > 0):
        return np.full(len(latency_ms), np.nan)
    scores: Floats = ((random_ms[span] - latency_ms[:, span]) / remaining[span]).mean(axis=1)
    return scores


def geometric_mean(parts: Sequence[Interval]) -> Interval:
    """Return the geometric mean of independent estimates; its limits apply to these, not to a larger population.

    Logarithmic distances to the limits combine as sqrt(sum d^2) / n, above and below separately. If a part has no
    limits, those of the mean are NaN.
    """
    mean = math.exp(sum(math.log(part.value) for part in parts) / len(parts))
    if not all(0 < part.low <= part.high < math.inf for part in parts):
        return Interval(value=mean, low=math.nan, high=math.nan)
    below = math.hypot(*(math.log(part.value / part.low) for part in parts)) / len(parts)
    above = math.hypot(*(math.log(part.high / part.value) for part in parts)) / len(parts)
    return Interval(value=mean, low=mean * math.exp(-below), high=mean * math.exp(above))


def quartiles(values: Floats) -> tuple[float, float | None, float | None]:
    """Return median, lower and upper quartile, for skewed results; a single value has no quartiles."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return (middle, low, high) if len(values) > 1 else (middle, None, None)
