"""Cross-fitted loss of a search's choice: what the choice loses on samples that did not take part in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from harness.accuracy.metrics.intervals import Estimate, drop_estimate
from harness.api import Accuracy
from harness.records import Measured, Outcome
from harness.search_loop.objective import LOSS_ROUND_OFF

FOLDS = 5
MIN_SAMPLES = 4 * FOLDS


def choose_cross_fitted(
    latencies_ms: Sequence[float], losses: npt.NDArray[np.float64], bound: float
) -> list[int | None]:
    """Return for each fold the fastest placement whose mean loss on the other folds keeps the bound, or None.

    Sample i belongs to fold i modulo `FOLDS`.

    Args:
        losses: Of each sample: placements x samples.
        bound: Largest allowed mean loss.
    """
    fold = np.arange(losses.shape[1]) % FOLDS
    order = np.argsort(latencies_ms, kind="stable")
    means = [losses[:, fold != number].mean(axis=1) for number in range(FOLDS)]
    return [next((int(i) for i in order if mean[i] <= bound + LOSS_ROUND_OFF), None) for mean in means]


def cross_fitted_drop(
    outcomes: Iterable[Outcome], reference: Accuracy, metric: str, bound: float, *, higher_is_better: bool
) -> Estimate | None:
    """Return the loss of the choice by the bound, each sample scored with the choice of the other folds.

    This estimates the loss of the whole procedure, not of one file; no engine runs for it (Stone 1974,
    "Cross-validatory choice and assessment of statistical predictions").

    Args:
        outcomes: Of a search that scored on all samples, the float model among them or not.
        reference: Of the float model on the same samples; it is chosen where no placement keeps the bound.

    Returns:
        None without one value a sample, or for fewer than `MIN_SAMPLES` samples.
    """
    own = np.asarray(reference.per_item)
    scored = [
        (float(np.median(outcome.samples_ms)), outcome.per_item)
        for outcome in outcomes
        if isinstance(outcome, Measured) and len(outcome.per_item) == len(own) and metric in outcome.metrics
    ]
    if len(own) < MIN_SAMPLES or not scored:
        return None
    values = np.array([per_item for _, per_item in scored])
    losses = own - values if higher_is_better else values - own
    chosen = choose_cross_fitted([latency_ms for latency_ms, _ in scored], losses, bound)
    picks = [chosen[i % FOLDS] for i in range(len(own))]
    found = [own[i] if pick is None else values[pick, i] for i, pick in enumerate(picks)]
    first, second = (
        Accuracy(metrics={metric: float(np.mean(row))}, per_item=tuple(map(float, row))) for row in (own, found)
    )
    return drop_estimate(first, second, metric, higher_is_better=higher_is_better)
