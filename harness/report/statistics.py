"""Searchers against each other over many problems: ranks, tests, sizes of effects, scores against random search.

A block is one problem (a model on a backend), never a seed: seeds of one block share the problem (Demšar 2006,
"Statistical comparisons of classifiers over multiple data sets", JMLR 7). Larger values are better throughout.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from harness.report.report_table import pluralize
from harness.statistics import MIN_CLAIMED_GAIN, Interval, block_ci

__all__ = [
    "MIN_BLOCKS",
    "MIN_BLOCKS_FOR_WILCOXON",
    "FriedmanRanks",
    "compare_pairs",
    "compare_with",
    "compute_ranks",
    "effect_size",
    "geometric_mean",
    "mean_ratio_over_blocks",
    "quartiles",
    "score_against_random",
    "smallest_p_value",
]  # fmt: skip

MIN_BLOCKS = 3
"""Blocks that a mean's interval and Friedman's test need here: fewer say nothing of others, however well they agree."""
MIN_BLOCKS_FOR_WILCOXON = 6
"""Blocks from which Wilcoxon's test can be significant at 5 % without correction; see `smallest_p_value`."""
MANY_BLOCKS, MANY_METHODS = 10, 5
"""With more of both Friedman's statistic is close to chi-squared (Demšar 2006, section 3.2.2)."""
PERMUTATION_RESAMPLES = 19_999
"""Permutations drawn where there are more; the smallest p is their reciprocal."""
SCORE_END_SHARE = 0.95
"""Share of what there is to find at which random search has caught up and a score ends."""
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class FriedmanRanks:
    """Mean ranks of methods over blocks.

    Attributes:
        mean: By method, best first; rank 1 is the best of a block, ties share their ranks.
        blocks: Number of blocks.
        p_value: Of Friedman's test that all methods are alike; None with fewer than `MIN_BLOCKS` blocks or three
            methods.
        critical_difference: Mean ranks that differ by more are different at 5 % (Nemenyi); None as above.
        unit: What people call a block.
    """

    mean: Mapping[str, float]
    blocks: int
    p_value: float | None
    critical_difference: float | None
    unit: str = "cell"

    @property
    def untested_reason(self) -> str:
        """Return why there is no test, or "" if there is one."""
        if self.critical_difference is not None:
            return ""
        if self.blocks < MIN_BLOCKS:
            few = f"{pluralize(self.blocks, self.unit)} {'is' if self.blocks == 1 else 'are'} too few"
            return f"no test: {few} to say anything of others ({MIN_BLOCKS} are needed)"
        return f"no test of ranks: {len(self.mean)} searchers are a pair"

    @property
    def cliques(self) -> tuple[tuple[str, ...], ...]:
        """Largest groups of methods that the test cannot tell apart, in order of their ranks."""
        if self.critical_difference is None:
            return ()
        names = list(self.mean)
        found: list[tuple[str, ...]] = []
        for start, first in enumerate(names):
            group = [n for n in names[start:] if self.mean[n] - self.mean[first] <= self.critical_difference]
            if len(group) > 1 and not any(set(group) <= set(known) for known in found):
                found.append(tuple(group))
        return tuple(found)


def compute_ranks(values: pd.DataFrame, unit: str = "cell") -> FriedmanRanks:
    """Friedman's test and Nemenyi's critical difference (Demšar 2006, sections 3.2.2 and 3.2.3).

    Args:
        values: One row a block, one column a method, nothing missing; larger is better.
        unit: What people call a block.

    Raises:
        ValueError: No block or no method.
    """
    from scipy.stats import rankdata, studentized_range

    blocks, methods = values.shape
    if not blocks or not methods:
        raise ValueError(f"ranks need blocks and methods, but got {blocks} and {methods}")
    ranks = rankdata(-values.to_numpy(dtype=float), axis=1)
    means = zip(map(str, values.columns), ranks.mean(axis=0).tolist(), strict=True)
    mean = dict(sorted(means, key=lambda pair: pair[1]))
    p_value = critical = None
    if blocks >= MIN_BLOCKS and methods > 2:
        p_value = _friedman_p_value(ranks)
        q = float(studentized_range.ppf(0.95, methods, np.inf)) / math.sqrt(2)
        critical = q * math.sqrt(methods * (methods + 1) / (6 * blocks))
    return FriedmanRanks(mean=mean, blocks=blocks, p_value=p_value, critical_difference=critical, unit=unit)


def _friedman_p_value(ranks: Floats) -> float:
    """p of Friedman's test: by permutations within blocks, all of them where they are few, or by chi-squared.

    Args:
        ranks: Shape (blocks, methods).
    """
    from scipy.stats import friedmanchisquare, permutation_test

    blocks, methods = ranks.shape
    if blocks > MANY_BLOCKS and methods > MANY_METHODS:
        with np.errstate(invalid="ignore"):  # all methods equal in every block
            found = float(friedmanchisquare(*ranks.T).pvalue)
        return 1.0 if math.isnan(found) else found
    result = permutation_test(
        tuple(ranks.T), _rank_sum_of_squares, permutation_type="samples", vectorized=True,
        n_resamples=PERMUTATION_RESAMPLES, batch=1_000,
        alternative="greater", rng=0,
    )  # fmt: skip
    return float(result.pvalue)


def _rank_sum_of_squares(*ranks: Floats, axis: int) -> Floats:
    """What Friedman's statistic grows with where blocks and their ties are given: the sum of squared rank sums."""
    sums: Floats = np.square(np.stack([method.sum(axis=axis) for method in ranks])).sum(axis=0)
    return sums


def effect_size(first: Sequence[float], second: Sequence[float]) -> float:
    """Chance that one draw of the first is larger than one of the second, ties counted half.

    Vargha and Delaney, "A critique and improvement of the CL common language effect size statistics", Journal of
    Educational and Behavioral Statistics 25, 2000: 0.5 is no effect, 1 always better.
    """
    one, two = np.asarray(first, dtype=float)[:, None], np.asarray(second, dtype=float)[None, :]
    return float(((one > two) + 0.5 * (one == two)).mean())


def compare_pairs(seeds: Mapping[str, Mapping[str, Sequence[float]]]) -> pd.DataFrame:
    """Every pair of methods: ratio with its interval, size of effect, Wilcoxon's signed ranks with Holm's correction.

    The ratio goes over blocks as `harness.statistics.block_ci` has it: the median over seeds stands for a block, the
    interval is Student's over blocks on a logarithmic scale; fewer than `MIN_BLOCKS` give none. The chance to be better
    is the mean over blocks of the effect size over seeds (Agarwal et al. 2021, "Deep reinforcement learning at the edge
    of the statistical precipice", probability of improvement).

    Args:
        seeds: By method, by block, one positive value a seed; a pair is compared on the blocks that both have.

    Returns:
        Columns first, second, blocks, ratio, low, high, chance, p_value, p_holm; `smallest_p_value` limits the last.
    """
    return _compare_all(itertools.combinations(seeds, 2), seeds, np.median)


def compare_with(control: str, seeds: Mapping[str, Mapping[str, Sequence[float]]]) -> pd.DataFrame:
    """One method with each of the others, as `compare_pairs`; `first` is the control throughout.

    It is for blocks of many seeds: their means are compared, for the medians of many are one and the same best.
    With k methods the correction is for k - 1 comparisons and not for k (k - 1) / 2, which so few blocks as recorded
    tables can never pay for (Demšar 2006, section 3.2.2: all against a control).

    Raises:
        KeyError: No such method.
    """
    return _compare_all([(control, other) for other in seeds if other != control], seeds, np.mean)


def _compare_all(
    pairs: Iterable[tuple[str, str]],
    seeds: Mapping[str, Mapping[str, Sequence[float]]],
    middle: Callable[[Sequence[float]], Any],
) -> pd.DataFrame:
    lines = [_compare_pair(one, two, seeds[one], seeds[two], middle) for one, two in pairs]
    columns = ["first", "second", "blocks", "ratio", "low", "high", "chance", "p_value"]
    frame = pd.DataFrame([line for line in lines if line["blocks"]], columns=columns)
    return frame.assign(p_holm=_holm_adjust(frame["p_value"].to_numpy(dtype=float)))


def _compare_pair(
    one: str,
    two: str,
    first: Mapping[str, Sequence[float]],
    second: Mapping[str, Sequence[float]],
    middle: Callable[[Sequence[float]], Any],
) -> dict[str, object]:
    blocks = [block for block in first if block in second and len(first[block]) and len(second[block])]
    ratios = [float(middle(first[block]) / middle(second[block])) for block in blocks]
    mean = mean_ratio_over_blocks(ratios) if blocks else Interval(value=1.0, low=0.0, high=math.inf)
    return {
        "first": one,
        "second": two,
        "blocks": len(blocks),
        "ratio": mean.value,
        "low": mean.low,
        "high": mean.high,
        "chance": float(np.mean([effect_size(first[b], second[b]) for b in blocks])) if blocks else math.nan,
        "p_value": _wilcoxon_p_value(np.log(ratios)) if blocks else math.nan,
    }


def mean_ratio_over_blocks(ratios: Sequence[float]) -> Interval:
    """Geometric mean of the ratios of several blocks with Student's interval over them; with fewer than `MIN_BLOCKS`
    none.

    Raises:
        ValueError: No ratio, or one that is not positive.
    """
    middle = block_ci([[ratio] for ratio in ratios])
    return middle if len(ratios) >= MIN_BLOCKS else replace(middle, low=0.0, high=math.inf)


def smallest_p_value(blocks: int, comparisons: int) -> float:
    """Return the smallest p that Wilcoxon's two-sided signed-rank test can give after Holm's correction.

    All differences of one sign give 2 / 2^blocks (Wilcoxon 1945); Holm multiplies the smallest p of several by their
    number.
    """
    return min(1.0, comparisons * 2.0 ** (1 - blocks))


def _wilcoxon_p_value(differences: Floats) -> float:
    from scipy.stats import wilcoxon

    if not np.any(differences):
        return 1.0
    return float(wilcoxon(differences, zero_method="pratt").pvalue)


def _holm_adjust(p_values: Floats) -> Floats:
    """Holm's step-down correction (Scandinavian Journal of Statistics 6, 1979); NaN stays NaN."""
    known = np.flatnonzero(~np.isnan(p_values))
    order = known[np.argsort(p_values[known], kind="stable")]
    corrected = np.full(len(p_values), np.nan)
    steps = p_values[order] * np.arange(len(order), 0, -1)
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(steps)) if len(order) else steps
    return corrected


def score_against_random(latency_ms: Floats, random_ms: Floats, best_ms: float, first: int = 0) -> Floats:
    """How much of what random search leaves a searcher has found, on average over its evaluations; one value a seed.

    P(t) = (random(t) - searcher(t)) / (random(t) - best): 0 is random search, 1 the best placement at once, negative is
    worse than random. The average goes over the evaluations until random search itself has found 95 % of what there was
    to find (Willemsen et al. 2024, "A methodology for comparing optimization algorithms for auto-tuning", Future
    Generation Computer Systems 159, section 3): from its first evaluation on, or from the last that all searches share.

    Args:
        latency_ms: Of the incumbent, [seed, evaluation].
        random_ms: Of random search, expected after each evaluation; it shares the first ones.
        best_ms: The best known latency.
        first: Evaluations that all searches share and that are left out: the initial placements.

    Returns:
        NaN where those that all share leave less than 1 % of latency, which nobody claims.
    """
    rest = random_ms - best_ms
    start = rest[max(first - 1, 0)]
    reached = rest[first:] <= (1 - SCORE_END_SHARE) * start
    span = slice(first, first + int(np.argmax(reached)) if reached.any() else len(rest))
    if start <= MIN_CLAIMED_GAIN * best_ms or span.stop <= span.start or not np.all(rest[span] > 0):
        return np.full(len(latency_ms), np.nan)
    scores: Floats = ((random_ms[span] - latency_ms[:, span]) / rest[span]).mean(axis=1)
    return scores


def geometric_mean(parts: Sequence[Interval]) -> Interval:
    """Mean of independent estimates on a logarithmic scale; its limits are of these, not of others like them.

    Distances to the limits combine as sqrt(sum d^2) / n, above and below apart. Where a part has none, the mean has
    none: NaN.
    """
    mean = math.exp(sum(math.log(part.value) for part in parts) / len(parts))
    if not all(0 < part.low <= part.high < math.inf for part in parts):
        return Interval(value=mean, low=math.nan, high=math.nan)
    below = math.hypot(*(math.log(part.value / part.low) for part in parts)) / len(parts)
    above = math.hypot(*(math.log(part.high / part.value) for part in parts)) / len(parts)
    return Interval(value=mean, low=mean * math.exp(-below), high=mean * math.exp(above))


def quartiles(values: Floats) -> tuple[float, float | None, float | None]:
    """Median with the lower and the upper quartile; a single value has none.

    What searches reach is skewed: most are near the optimum, and a few far off move a mean and widen its interval.
    """
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return (middle, low, high) if len(values) > 1 else (middle, None, None)
