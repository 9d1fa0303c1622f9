"""Estimates of the loss of accuracy of a selected placement: cross-fitted, and jointly for several files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.accuracy.metrics.average_precision import mix_map_facts
from harness.accuracy.metrics.intervals import (
    MAX_MIXABLE_IMAGES,
    Draws,
    Estimate,
    decode_mixable,
    drop_estimate,
    encode_evidence,
    recompute_metric,
    resample_metric,
)
from harness.measure.records import Measured, Outcome
from harness.plugins.api import Accuracy
from harness.results.artifacts import recovered_row
from harness.results.search_log import LOSS_ROUND_OFF

FOLDS = 5
MIN_SAMPLES = 4 * FOLDS
Values = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
_Facts = Mapping[str, Any]


def choose_cross_fitted(latencies_ms: Sequence[float], losses: Values, bound: float) -> list[int | None]:
    """Return for each fold the index of the fastest placement whose loss on the other folds keeps the bound, or None.

    Args:
        latencies_ms: Latency of each placement.
        losses: Loss on all folds except one, with shape [placements, folds].
        bound: Largest allowed loss.
    """
    order = np.argsort(latencies_ms, kind="stable")
    kept = losses <= bound + LOSS_ROUND_OFF
    return [next((int(i) for i in order if kept[i, fold]), None) for fold in range(losses.shape[1])]


def losses_on_other_folds(
    reference: Accuracy, found: Accuracy, metric: str, *, higher_is_better: bool
) -> Values | None:
    """Return the loss of a metric on the samples outside of each fold.

    Sample i belongs to fold i modulo `FOLDS`.

    Returns:
        One loss per fold; None without records of single samples, or if there are fewer than `MIN_SAMPLES` or more than
        `MAX_MIXABLE_IMAGES` samples.

    Raises:
        ValueError: A record is damaged.
    """
    expected, values = (_other_folds(_read_facts(each, metric), metric) for each in (reference, found))
    if expected is not None and expected[1] > MAX_MIXABLE_IMAGES:
        return None
    return _losses(expected, values, higher_is_better=higher_is_better)


def cross_fitted_drop(
    outcomes: Iterable[Outcome], reference: Accuracy, metric: str, bound: float, *, higher_is_better: bool
) -> Estimate | None:
    """Estimate the loss of the fastest placement within a bound by cross-fitting.

    Each fold of the samples is scored with the placement that the other folds select. This estimates the loss of the
    whole procedure, not of one file, from recorded scores alone (Stone 1974, "Cross-validatory choice and assessment of
    statistical predictions").

    Args:
        outcomes: Outcomes of a search that scored on all samples.
        reference: Accuracy of the float model on the same samples; it is selected if no placement keeps the bound.
        metric: Name of the metric.
        bound: Largest allowed loss.
        higher_is_better: Direction of the metric.

    Returns:
        The loss with its interval; None without records of single samples, with fewer than `MIN_SAMPLES` samples, or if
        a placement within the bound has no record.

    Raises:
        ValueError: A record is damaged.
    """
    own = _read_facts(reference, metric)
    expected = _other_folds(own, metric)
    if expected is None:
        return None
    latencies_ms, losses, records = list[float](), list[Values](), [own]
    for outcome in outcomes:
        if not isinstance(outcome, Measured) or metric not in outcome.metrics:
            continue
        same = not outcome.per_item and outcome.metrics[metric] == reference.metrics[metric]
        facts = _read_facts(outcome, metric) or (own if same else {})
        lost = _losses(expected, _other_folds(facts, metric), higher_is_better=higher_is_better)
        if lost is not None:
            latencies_ms.append(float(np.median(outcome.samples_ms)))
            losses.append(lost)
            records.append(facts)
        elif (reference.metrics[metric] - outcome.metrics[metric]) * (1 if higher_is_better else -1) <= (
            bound + LOSS_ROUND_OFF
        ):
            return None  # a fold may select this placement, which has no record
    if not losses:
        return None
    chosen = choose_cross_fitted(latencies_ms, np.array(losses), bound)
    picks = np.array([0 if pick is None else pick + 1 for pick in chosen])
    sources = picks[np.arange(expected[1]) % FOLDS]
    first, second = (_mixed_score(records, each, metric) for each in (np.zeros_like(sources), sources))
    return drop_estimate(first, second, metric, higher_is_better=higher_is_better)


def _read_facts(record: Accuracy | Measured, metric: str) -> _Facts:
    """Return the record of single samples from which scores of several engines can be combined, or an empty one."""
    if record.per_item:
        return {"kind": "mean", metric: record.per_item}
    return decode_mixable(record.mixable, metric)


def _other_folds(facts: _Facts, metric: str) -> Draws | None:
    """Return the metric outside of each fold, and the number of samples; None if there are too few."""

    def weights(samples: int) -> Counts:
        rows: Counts = (np.arange(samples) % FOLDS != np.arange(FOLDS)[:, None]).astype(np.int64)
        return rows

    found = resample_metric(facts, metric, weights)
    return None if found is None or found[1] < MIN_SAMPLES else found


def _losses(expected: Draws | None, found: Draws | None, *, higher_is_better: bool) -> Values | None:
    if expected is None or found is None or expected[1] != found[1]:
        return None
    return expected[0] - found[0] if higher_is_better else found[0] - expected[0]


def _mixed_score(records: Sequence[_Facts], sources: Counts, metric: str) -> Accuracy:
    """Return the accuracy if sample i is scored with the record at index `sources[i]`."""
    used, places = np.unique(sources, return_inverse=True)
    parts = [records[i] for i in used]
    kind = parts[0]["kind"]
    try:
        if kind == "map":
            facts: _Facts = mix_map_facts(parts, places)
        else:
            name = "areas" if kind == "miou" else metric
            facts = {name: [parts[part][name][i] for i, part in enumerate(places)]}
    except (KeyError, TypeError, IndexError, ValueError, OverflowError) as error:
        raise ValueError(f"the record of a score is damaged: {error!r}") from error
    evidence = encode_evidence(kind, facts)
    found = recompute_metric(evidence, metric, lambda samples: np.ones((1, samples), np.int64))
    return Accuracy(metrics={} if found is None else {metric: float(found[0][0])}, evidence=evidence)


MIN_VARIANCE_SHARE = 0.25
"""Smallest variance of a loss relative to the mean variance: zero changed answers on few images prove nothing."""


def estimate_losses(files: Sequence[tuple[float, float, float]]) -> list[float]:
    """Return the estimated loss of each file of one model, all scored on the same images, in the unit of the losses.

    The loss of a file on few images is uncertain by about a point, and the fastest of the files that seem to be within
    a bound is often one whose measured loss is too small by chance. The error of a file's outputs is much less
    uncertain, and the loss of a metric grows with it. So the measured loss of each file is averaged with the loss that
    its output error predicts, each weighted by its precision (Fay and Herriot 1979, "Estimates of income for small
    places", section 2; the variance between files by moments as in DerSimonian and Laird 1986). On many images the
    estimate is the measured loss.

    Args:
        files: Loss of the metric of each file relative to the float model, positive if it is worse; its standard error
            over images; and the SQNR of the outputs in dB, on calibration samples that no range or weight of the file
            was fitted to. The SQNR is slightly too large, because recovery selects files by it.
    """
    if not files:
        return []
    loss, stderr, sqnr_db = np.array(files).T
    error = 10.0 ** (-sqnr_db / 20)  # relative amplitude
    variance = stderr**2
    if not variance.any():
        return [found for found, _, _ in files]
    variance = np.maximum(variance, MIN_VARIANCE_SHARE * variance.mean())
    weight = 1 / variance
    information = float(weight @ error**2)
    rate = max(0.0, float(weight @ (error * loss)) / information)
    residual = loss - rate * error
    freedom = float(weight.sum() - (weight**2) @ error**2 / information)
    excess = float(weight @ residual**2) - (len(files) - 1)
    between = max(0.0, excess / freedom) if freedom > 0 else 0.0
    estimated: list[float] = (rate * error + between / (between + variance) * residual).tolist()
    return estimated


def estimate_recorded_losses(known: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the estimated losses of recovered models and of their placements without recovery, by row.

    Args:
        known: Records of `recovery.json` by the digest of the placement.
    """
    files: dict[str, tuple[float, float, float]] = {}
    for digest, facts in known.items():
        rows = {digest: "_before", **({recovered_row(facts["sha256"]): ""} if "sha256" in facts else {})}
        for row, suffix in rows.items():
            loss, stderr, sqnr_db = (facts.get(f"{name}{suffix}", math.inf) for name in ("loss", "stderr", "sqnr_db"))
            if all(map(math.isfinite, (loss, stderr, sqnr_db))):
                files[row] = (loss, stderr, sqnr_db)
    return dict(zip(files, estimate_losses([*files.values()]), strict=True))
