"""Notes of the main table on accuracy: recovered files, losses on samples that took no part in the choice, classes."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from harness.accuracy.metrics.average_precision import resampled_map
from harness.accuracy.metrics.intervals import decode_accuracy, decode_evidence
from harness.plugins.api import Accuracy
from harness.report.report_table import MISSING_CELL, format_interval
from harness.results.artifacts import FLOAT_ROW, NOT_TRIED, RECOVERED_PREFIX, recovered_row
from harness.results.cross_fitting import FOLDS, cross_fitted_drop
from harness.results.display_names import metric_name
from harness.results.folder import TaskResults
from harness.results.journal import read_journal

logger = logging.getLogger(__name__)


def accuracy_notes(task: TaskResults, rows: Mapping[str, str]) -> Iterator[str]:
    """Yield the notes of a task on cross-fitted drops and worst classes.

    Args:
        rows: Row id of each label in the main table.
    """
    yield from chain(recovery_notes(task), _cross_fitting_notes(task), _class_notes(task, rows))


def _cross_fitting_notes(task: TaskResults) -> Iterator[str]:
    """Yield a note for each search that chose on all samples: the cross-fitted drop of its choice.

    A search whose row is a recovered model has none: the journal has no scores of the models that recovery made.
    """
    score = task.scores.get(FLOAT_ROW, {})
    if task.allowed is None or task.facts.get("halves") or task.score(FLOAT_ROW) is None or task.metric is None:
        return
    reference = decode_accuracy(score)
    recovered = {f"{pick.method}-{pick.seed}" for pick in task.picks if pick.row.startswith(RECOVERED_PREFIX)}
    for search in task.searches:
        if search.name in recovered:
            continue
        outcomes = (entry.result.outcome for entry in read_journal(search.path) if entry.result is not None)
        try:
            estimate = cross_fitted_drop(
                outcomes, reference, task.metric, task.allowed, higher_is_better=task.higher_is_better
            )
        except ValueError as error:
            logger.warning("%s: no cross-fitted drop of %s: %s", task.folder, search.name, error)
            continue
        if estimate is not None:
            interval = estimate.interval
            yield (
                f"Cross-fitted over {FOLDS} folds of {estimate.images} samples, {task.name}: the choice of "
                f"{search.name} loses {format_interval(interval.value, interval.low, interval.high, 4)} of "
                f"{metric_name(task.metric)} on samples that did not take part in the choice."
            )


def _class_notes(task: TaskResults, rows: Mapping[str, str]) -> Iterator[str]:
    """Yield a note for each choice of a search with the class that lost most accuracy."""
    searched = {pick.row for pick in task.picks if pick.kind == "search"}
    for label, row in rows.items():
        scores = [task.scores.get(name, {}) for name in (FLOAT_ROW, row)]
        if task.metric is None or row not in searched or not all("metrics" in score for score in scores):
            continue
        reference, row_accuracy = map(decode_accuracy, scores)
        worst = worst_class(reference, row_accuracy, task.metric)
        if worst is not None and worst.quantized < worst.reference:
            yield (
                f"Worst class of {label}, {task.name}: class {worst.label} ({worst.samples} samples), "
                f"{metric_name(task.metric)} {worst.reference:.3f} to {worst.quantized:.3f}."
            )


def recovery_notes(task: TaskResults) -> Iterator[str]:
    """Yield a note for each placement near the bound: its recovered file, or that recovery gained nothing."""
    for digest, facts in task.recovery.items():
        if "loss" not in facts:
            if facts.get("label", "").startswith(NOT_TRIED):
                yield f"Recovery in {task.name}: placement {digest}: {facts['label']}."
            continue
        gains = [
            f"{step['step']} {step['before_db']:.1f} to {step['after_db']:.1f} dB"
            for step in facts["steps"]
            if step["kept"]
        ]
        gains += map(_format_left_float, facts.get("left_float", ()))
        steps = f" ({'; '.join(gains)})" if gains else ""
        result = f"is {recovered_row(facts['sha256'])}" if facts["within"] else "still misses the bound"
        before, after = (_format_loss(facts, suffix) for suffix in ("_before", ""))
        yield (
            f"Recovery in {task.name}: placement {digest} with {facts['label']}{steps} {result}; drop of "
            f"{metric_name(task.metric)} on the images of the search {before} before, {after} after."
        )


def _format_left_float(facts: Mapping[str, Any]) -> str:
    """Return text such as "Conv_1 and 2 after it left float, 3.3 dB if quantized" for a record of float nodes."""
    if "node" in facts:  # a record before groups of nodes were left float
        return f"{facts['node']} left float {facts['gain_db']:+.1f} dB"
    first, *others = (name or "the outputs" for name in facts["nodes"])
    return f"{first}{f' and {len(others)} after it' * bool(others)} left float, {facts['alone_db']:.1f} dB if quantized"


def _format_loss(facts: Mapping[str, Any], suffix: str) -> str:
    """Return a measured loss with the estimated one as text, "0.0054 (estimated 0.0062)"."""
    loss, estimate = facts.get(f"loss{suffix}"), facts.get(f"estimate{suffix}")
    text = MISSING_CELL if loss is None else f"{loss:.4f}"
    return text if estimate is None else f"{text} (estimated {estimate:.4f})"


MIN_CLASS_SAMPLES = 10
"""Smallest number of images of a class, for detection of its boxes, with which the class is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassLoss:
    """Metric of the float model and of a quantized model on the samples of one class.

    Attributes:
        label: Index of the class.
        samples: Number of its images; for detection, of its boxes.
        reference: Metric of the float model.
        quantized: Metric of the quantized model.
    """

    label: int
    samples: int
    reference: float
    quantized: float


def worst_class(reference: Accuracy, quantized: Accuracy, metric: str) -> ClassLoss | None:
    """Return the class with the largest loss (maybe a gain) among those with at least `MIN_CLASS_SAMPLES` samples.

    Args:
        metric: `top1`, `top5`, `map` or `miou`; others have no figures by class.

    Returns:
        The class; None if no class has enough samples, or the records have no figures by class.

    Raises:
        ValueError: The evidence is damaged.
    """
    before, after = (_class_figures(decode_evidence(each.evidence), metric) for each in (reference, quantized))
    losses = [
        ClassLoss(label=label, samples=samples, reference=figure, quantized=after[label][0])
        for label, (figure, samples) in before.items()
        if samples >= MIN_CLASS_SAMPLES and label in after
    ]
    return max(losses, key=lambda each: each.reference - each.quantized, default=None)


def _class_figures(facts: Mapping[str, Any], metric: str) -> dict[int, tuple[float, int]]:
    """Return the metric of each class and the number of its samples, by index of the class."""
    kind = facts.get("kind")
    try:
        if kind == "mean" and "classes" in facts and metric in facts:
            return _mean_by_class(facts["classes"], facts[metric])
        if kind == "map" and metric == "map":
            return {
                each["category"]: (_average_precision(facts["images"], each), len(each["truth"]))
                for each in facts["areas"][0]
                if "category" in each
            }
        return _iou_by_class(facts["areas"]) if kind == "miou" and metric == "miou" else {}
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ValueError(f"the evidence of a score is damaged: {error!r}") from error


def _mean_by_class(classes: list[int], values: list[float]) -> dict[int, tuple[float, int]]:
    by_class: dict[int, list[float]] = defaultdict(list)
    for label, value in zip(classes, values, strict=True):
        by_class[label].append(value)
    return {label: (float(np.mean(figures)), len(figures)) for label, figures in by_class.items()}


def _average_precision(images: int, category: Mapping[str, Any]) -> float:
    everything = np.ones((1, images), np.int64)
    return float(resampled_map({"images": images, "areas": [[category]]}, "map", everything)[0])


def _iou_by_class(areas: list[list[int]]) -> dict[int, tuple[float, int]]:
    """Return the IoU of each labelled class over all images, and the number of images with it."""
    totals: dict[int, Any] = defaultdict(lambda: np.zeros(4, np.int64))
    for row in areas:
        for label, right, labelled, answered in zip(*(row[place::4] for place in range(4)), strict=True):
            totals[label] += (right, labelled, answered, labelled > 0)
    return {
        label: (float(right / (labelled + answered - right)), int(images))
        for label, (right, labelled, answered, images) in totals.items()
        if labelled
    }
