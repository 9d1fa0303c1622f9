"""Loss of single classes: which class lost most, next to the mean over all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.accuracy.metrics.average_precision import resampled_map
from harness.accuracy.metrics.intervals import decode_evidence
from harness.api import Accuracy

MIN_CLASS_SAMPLES = 10
"""Images of a class, for boxes their number, from which its figure is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassLoss:
    """Figures of one class, each the metric on its own samples.

    Attributes:
        label: Index of the class.
        samples: Number of its samples.
        reference: Figure of the float model.
        found: Figure of the other engine.
    """

    label: int
    samples: int
    reference: float
    found: float


def worst_class(reference: Accuracy, found: Accuracy, metric: str) -> ClassLoss | None:
    """Return the class with the largest loss of those with `MIN_CLASS_SAMPLES` samples, or None if there are none.

    Args:
        reference: Of the float model.
        found: Of another engine on the same images.
        metric: `top1`, `top5`, `map` or `miou`; None is returned for others, and for records without classes.

    Raises:
        ValueError: The evidence is damaged.
    """
    before, after = (_class_figures(decode_evidence(each.evidence), metric) for each in (reference, found))
    losses = [
        ClassLoss(label=label, samples=samples, reference=figure, found=after[label][0])
        for label, (figure, samples) in before.items()
        if samples >= MIN_CLASS_SAMPLES and label in after
    ]
    return max(losses, key=lambda each: each.reference - each.found, default=None)


def _class_figures(facts: Mapping[str, Any], metric: str) -> dict[int, tuple[float, int]]:
    """Return the figure of each class and the number of its samples."""
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
    return {label: (float(np.mean(found)), len(found)) for label, found in by_class.items()}


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
