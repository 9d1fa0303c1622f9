"""Confidence intervals of accuracy by a paired bootstrap over images, for every metric and for drops.

Images are drawn with replacement, the same ones for both engines of a drop (Efron and Tibshirani 1993, "An introduction
to the bootstrap", chapters 8 and 13; the paired form is that of Koehn 2004, "Statistical significance tests for machine
translation evaluation", section 4). Each record of accuracy contains the data for it: one value per image if the metric
is a mean, else `evidence`, from which the metric is recomputed for every draw.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.accuracy.metrics.average_precision import MAP_METRICS, resampled_map
from harness.base.statistics import Interval
from harness.plugins.api import Accuracy

MIN_IMAGES = 20
"""Smallest number of images for a reliable interval; with fewer, its limits come from very few values."""
SURELY_WITHIN = 0.95
"""Smallest probability that a loss keeps a bound for it to count as surely within the bound."""
RESAMPLES = 1000
"""Number of bootstrap draws."""
CONFIDENCE_LEVEL = 0.95
NEGLIGIBLE_SCORE = 0.01
"""Score, of at most 1, below which labels or preprocessing probably do not fit the float model."""
MAX_RESAMPLING_BYTES = 256 * 2**20
MAX_IMAGES = 1_000_000
MAX_MIXABLE_IMAGES = 1000
"""Largest number of images for which `Accuracy.mixable` is kept; it takes 500 bytes per image and placement."""
ROUNDING_TOLERANCE = 1e-6
"""Largest relative or absolute difference of a recorded and a recomputed value, for instance by the order of a sum."""
ROUND_OFF = 1e-9
"""Difference up to which a loss above a bound still keeps it."""
Values = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Value of a metric with its 95 % interval over images.

    Attributes:
        interval: Value and limits in the metric's unit; infinite limits if no draw has a value.
        images: Number of images, or of batches for a metric over batches.
    """

    interval: Interval
    images: int

    @property
    def caveat(self) -> str:
        """Return a caveat about an interval over less than 20 images; else ""."""
        return few_images_note(self.images)


def few_images_note(images: int) -> str:
    """Return a caveat about an accuracy on less than 20 images; else ""."""
    return (
        f"only {images} samples: the interval is too wide to say much; score more of them"
        if images < MIN_IMAGES
        else ""
    )


def encode_evidence(kind: str, facts: Mapping[str, Any]) -> str:
    """Return the evidence of an `Accuracy`: facts about each image as compressed text, see `decode_evidence`.

    Args:
        kind: "mean": one list of values for each metric, and `classes`, the class of each image, if there are classes.
            "map": the facts of `harness.accuracy.metrics.average_precision`. "miou": for each image a list with four
            numbers for each class: the class, and its pixels found correctly, labelled and found.
        facts: Facts that JSON can represent.
    """
    packed = zlib.compress(json.dumps({"kind": kind, **facts}, separators=(",", ":")).encode(), 9)
    return base64.b85encode(packed).decode("ascii")


def decode_accuracy(score: Mapping[str, Any]) -> Accuracy:
    """Return an entry of `accuracy.json` as `Accuracy`; only `metrics` is required."""
    return Accuracy(
        metrics=dict(score["metrics"]),
        per_item=tuple(score.get("per_item", ())),
        evidence=score.get("evidence", ""),
        mixable=score.get("mixable", ""),
        note=score.get("note", ""),
    )


def metric_estimate(accuracy: Accuracy, metric: str, *, primary: str | None = None) -> Estimate | None:
    """Return a metric with its confidence interval, or None if the record lacks the metric or allows no interval.

    Args:
        accuracy: Record of an engine.
        metric: Name of the metric.
        primary: The evaluator's `metric`, to which `per_item` belongs; None: `metric` itself.

    Raises:
        ValueError: The evidence is damaged.
    """
    draws = _metric_draws(accuracy, metric, primary)
    return None if draws is None else _estimate(accuracy.metrics[metric], *draws)


def drop_estimate(
    reference: Accuracy, found: Accuracy, metric: str, *, higher_is_better: bool = True, primary: str | None = None
) -> Estimate | None:
    """Return the loss of a metric against a reference, positive if `found` is worse, with its paired interval.

    Args:
        reference: Record of the float model.
        found: Record of another engine, by the same evaluator on the same images.
        metric: Name of the metric.
        higher_is_better: Direction of the metric.
        primary: The evaluator's `metric`, to which `per_item` belongs; None: `metric` itself.

    Returns:
        The loss, or None if one of the records lacks the metric or what an interval needs (`evidence`, or `per_item` of
        the evaluator's own metric).

    Raises:
        ValueError: The records have different numbers of images, or their `evidence` is damaged.
    """
    first, second = (_metric_draws(accuracy, metric, primary) for accuracy in (reference, found))
    if first is None or second is None:
        return None
    if first[1] != second[1]:
        raise ValueError(f"a paired interval needs the same images, but there are {first[1]} and {second[1]}")
    sign = 1.0 if higher_is_better else -1.0
    value = sign * (reference.metrics[metric] - found.metrics[metric])
    return _estimate(value, sign * (first[0] - second[0]), first[1])


def probability_within(
    reference: Accuracy, found: Accuracy, metric: str, bound: float, *, higher_is_better: bool = True
) -> float | None:
    """Return the probability (0 to 1) that the loss of a metric is at most a bound, by the draws of `drop_estimate`.

    It agrees with the interval: at its upper limit the probability is 97.5 %. None without an interval, or if the
    records have different numbers of images.
    """
    first, second = (_metric_draws(accuracy, metric, None) for accuracy in (reference, found))
    if first is None or second is None or first[1] != second[1]:
        return None
    sign = 1.0 if higher_is_better else -1.0
    losses = sign * (first[0] - second[0])
    known = losses[np.isfinite(losses)]
    if not len(known):
        return None
    value = sign * (reference.metrics[metric] - found.metrics[metric])
    bias, within = (_normal_score(known, edge) for edge in (value, bound + ROUND_OFF))
    return NormalDist().cdf(within - 2 * bias)


def surely_within(
    reference: Accuracy, found: Accuracy, metric: str, bound: float, *, higher_is_better: bool = True
) -> bool:
    """Return whether the loss of a metric is at most `bound` with a probability of at least 95 %; False if unknown.

    If both engines give the same answers, all draws are equal and the interval has no width. Therefore the standard
    error of a mean over images is taken as at least that of three changed answers: if no change is observed, the true
    number is up to three with a probability of 95 % (the rule of three).
    """
    probability = probability_within(reference, found, metric, bound, higher_is_better=higher_is_better)
    if probability is None or probability < SURELY_WITHIN:
        return False
    loss = (1 if higher_is_better else -1) * (reference.metrics[metric] - found.metrics[metric])
    images = len(found.per_item)
    if not images:  # a metric over all images together, which hardly varies if there are few of them
        draws = _metric_draws(found, metric, None)
        return draws is not None and draws[1] >= MIN_IMAGES
    return NormalDist(loss, math.sqrt(3) / images).cdf(bound + ROUND_OFF) >= SURELY_WITHIN


def unseen_loss(reference: Accuracy, found: Accuracy) -> float | None:
    """Return the loss of a share of right answers that the samples do not exclude at 95 %, if none lost its answer.

    The bootstrap interval of equal answers has no width. If none of n samples has a change, its probability may be up
    to 3/n (Hanley and Lippman-Hand 1983, "If nothing goes wrong, is everything all right?", JAMA 249, 1743-1745).

    Returns:
        The loss, or None if a sample lost its answer or samples are not scored 0 or 1.
    """
    before, after = reference.per_item, found.per_item
    if not after or len(before) != len(after) or not {*before, *after} <= {0, 1}:
        return None
    lost = any(one > other for one, other in zip(before, after, strict=True))
    return None if lost else min(1.0, 3 / len(after))


def _normal_score(draws: Values, value: float) -> float:
    """Return the standard normal quantile of the share of draws below a value, where equal draws count half."""
    edge = 0.5 / len(draws)
    below = float(np.mean(draws < value) + np.mean(draws == value) / 2)
    return NormalDist().inv_cdf(min(max(below, edge), 1 - edge))


def check_consistency(accuracy: Accuracy, metric: str) -> str:
    """Return a message if the value of a metric contradicts `evidence` or `per_item` of its record; "" if not.

    Args:
        accuracy: Record of an engine.
        metric: The evaluator's `metric`.

    Raises:
        ValueError: The evidence is damaged.
    """
    stated = accuracy.metrics[metric]
    recomputed = recompute_metric(accuracy.evidence, metric, _unit_weights)
    facts = decode_mixable(accuracy.mixable, metric)
    for known in (recomputed, resample_metric(facts, metric, _unit_weights)):
        again = stated if known is None or math.isnan(known[0][0]) else float(known[0][0])
        if not _nearly_equal(stated, again):
            return f"{metric} is {stated:.6g}, but by its own evidence it is {again:.6g}"
    if accuracy.per_item:
        # An evaluator that wraps another one may keep the values per image of the other's metric.
        figures = accuracy.metrics.values() if recomputed is not None else (stated,)
        mean = float(_weighted_means(accuracy.per_item, _unit_weights)[0][0])
        if not any(_nearly_equal(mean, figure) for figure in figures):
            return f"{metric} is {stated:.6g}, but by its own per_item it is {mean:.6g}"
    return ""


def _nearly_equal(one: float, two: float) -> bool:
    return math.isclose(one, two, rel_tol=ROUNDING_TOLERANCE, abs_tol=ROUNDING_TOLERANCE)


def _estimate(value: float, draws: Values, images: int) -> Estimate:
    """Return bias-corrected percentile limits (Efron and Tibshirani 1993, section 14.3, without acceleration).

    The correction is needed because repeated images increase mAP, for 128 images of COCO by half a standard deviation.
    Draws without a value (no box of any class) are left out.
    """
    known = draws[np.isfinite(draws)]
    if not len(known):
        return Estimate(interval=Interval(value=value, low=float("-inf"), high=float("inf")), images=images)
    normal, bias = NormalDist(), _normal_score(known, value)
    reach = normal.inv_cdf((1 + CONFIDENCE_LEVEL) / 2)
    low, high = np.quantile(known, [normal.cdf(2 * bias + way * reach) for way in (-1, 1)]).tolist()
    return Estimate(interval=Interval(value=value, low=low, high=high), images=images)


@lru_cache(maxsize=4)
def _bootstrap_weights(images: int) -> Counts:
    """Return the multiplicity of each image in each draw, shape (draws, images); the same at every call."""
    rng = np.random.default_rng([images, RESAMPLES])
    drawn = rng.multinomial(images, np.full(images, 1 / images), size=RESAMPLES)
    drawn.flags.writeable = False
    return drawn


def _unit_weights(images: int) -> Counts:
    """Return a multiplicity of one for each image."""
    return np.ones((1, images), np.int64)


Draws = tuple[Values, int]
"""A metric in each draw, and the number of images."""
WeightsFactory = Callable[[int], Counts]


def _metric_draws(accuracy: Accuracy, metric: str, primary: str | None) -> Draws | None:
    if metric not in accuracy.metrics:
        return None
    found = _cached_metric_draws(accuracy.evidence, metric)
    if found is None and accuracy.per_item and metric == (primary or metric):
        found = _weighted_means(accuracy.per_item, _bootstrap_weights)
    return found


@lru_cache(maxsize=1024)
def _cached_metric_draws(evidence: str, metric: str) -> Draws | None:
    """Return the draws of a metric; cached because a report needs those of the float model for every drop."""
    return recompute_metric(evidence, metric, _bootstrap_weights)


def recompute_metric(evidence: str, metric: str, drawing: WeightsFactory) -> Draws | None:
    """Return a metric for each draw of images and the number of images, or None if it is not in the evidence.

    Args:
        evidence: `Accuracy.evidence`.
        metric: Name of the metric.
        drawing: Function of a number of images that returns the multiplicity of each image in each draw, shape (draws,
            images).

    Raises:
        ValueError: The evidence is damaged.
    """
    return resample_metric(decode_evidence(evidence), metric, drawing)


def resample_metric(facts: Mapping[str, Any], metric: str, drawing: WeightsFactory) -> Draws | None:
    """Return the result of `recompute_metric` from facts that `decode_evidence` returned; same errors."""
    kind = facts.get("kind")
    try:
        if kind == "map" and metric in MAP_METRICS:
            images = facts["images"]
            if not 0 < images <= MAX_IMAGES:
                raise ValueError(f"{images} images")
            return resampled_map(facts, metric, drawing(images)), images
        if kind == "miou" and metric == "miou":
            return _miou(facts["areas"], drawing(len(facts["areas"]))), len(facts["areas"])
        return _weighted_means(facts[metric], drawing) if kind == "mean" and facts.get(metric) else None
    except (ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
        raise ValueError(f"the evidence of a score is damaged: {error!r}") from error


def _weighted_means(values: Sequence[float], drawing: WeightsFactory) -> Draws:
    weights, each = drawing(len(values)), np.asarray(values, np.float64)
    if each.ndim != 1:
        raise ValueError(f"one value per image is needed, but got an array with {each.ndim} axes")
    return weights @ each / weights.sum(axis=1), len(values)


def decode_mixable(mixable: str, metric: str) -> dict[str, Any]:
    """Return the facts of `Accuracy.mixable`; empty if it is "" or has no facts for the metric (mAP by size of boxes).

    Raises:
        ValueError: The text is damaged.
    """
    facts = decode_evidence(mixable)
    area, _ = MAP_METRICS.get(metric, (0, ()))
    return {} if facts.get("kind") == "map" and area else facts


def decode_evidence(evidence: str) -> dict[str, Any]:
    """Return the facts given to `encode_evidence`, and the kind by the key "kind"; {} for "".

    Raises:
        ValueError: The evidence is damaged.
    """
    if not evidence:
        return {}
    try:
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(base64.b85decode(evidence), MAX_RESAMPLING_BYTES)
        if not unpacker.eof:
            raise ValueError(f"it is cut off, or longer than {MAX_RESAMPLING_BYTES} bytes")
        facts: dict[str, Any] = json.loads(text)
        if not isinstance(facts, dict):
            raise ValueError("it is no mapping")
    except (ValueError, zlib.error) as error:
        raise ValueError(f"the evidence of a score is damaged: {error}") from error
    return facts


def _miou(areas: list[list[int]], weights: Counts) -> Values:
    """Return the mean IoU over the classes that occur in a draw's labels, for each draw."""
    classes = 1 + max((max(row[::4]) for row in areas if row), default=0)
    pixels = np.zeros((len(areas), 3, classes))
    for image, row in enumerate(areas):
        for place in range(3):
            pixels[image, place, row[::4]] = row[place + 1 :: 4]
    right, labelled, found = np.moveaxis(np.tensordot(weights, pixels, 1), 1, 0)
    union = labelled + found - right
    shares = np.divide(right, union, out=np.zeros_like(right), where=union > 0)
    present = labelled > 0
    count = present.sum(axis=1)
    mean: Values = np.divide((shares * present).sum(axis=1), count, out=np.full(len(count), np.nan), where=count > 0)
    return mean
