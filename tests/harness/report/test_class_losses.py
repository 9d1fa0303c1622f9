"""Worst class of two scores: of classifiers, detectors and segmentation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harness.accuracy.data.decode import Detections
from harness.accuracy.metrics.average_precision import map_facts, match_boxes
from harness.accuracy.metrics.intervals import encode_evidence
from harness.plugins.api import Accuracy
from harness.report.tables.notes import worst_class


def accuracy(kind: str, facts: dict[str, Any], metric: str) -> Accuracy:
    return Accuracy(metrics={metric: 0.5}, evidence=encode_evidence(kind, facts))


def test_the_class_of_a_classifier_that_collapsed_is_named():
    classes = [0] * 20 + [1] * 12 + [2] * 3
    before = accuracy("mean", {"top1": [1.0] * 35, "classes": classes}, "top1")
    after = accuracy("mean", {"top1": [1.0] * 19 + [0.0] * 7 + [1.0] * 6 + [0.0] * 3, "classes": classes}, "top1")
    worst = worst_class(before, after, "top1")
    assert worst == (1, 12, 1.0, 0.5), "3 samples say nothing"
    without = accuracy("mean", {"top1": [1.0] * 35}, "top1")
    assert worst_class(without, without, "top1") is None
    assert worst_class(before, after, "top5") is None


def test_the_category_of_a_detector_that_is_missed_is_named():
    box = [10.0, 10.0, 50.0, 50.0]
    labels = {
        "images": [{"id": i} for i in range(12)],
        "categories": [{"id": 3, "name": "cat"}, {"id": 8, "name": "dog"}],
        "annotations": [
            {"image_id": i, "category_id": k, "bbox": box, "area": 2500.0, "iscrowd": 0}
            for i in range(12)
            for k in (3, 8)
        ],
    }

    def found(classes: tuple[int, ...]) -> Accuracy:
        corners = np.array([[10.0, 10.0, 60.0, 60.0]] * len(classes))
        boxes = [Detections(boxes=corners, scores=np.ones(len(classes)), classes=np.array(classes)) for _ in range(12)]
        return accuracy("map", map_facts(match_boxes(labels, boxes), 12), "map")

    worst = worst_class(found((0, 1)), found((0,)), "map")
    assert worst == (1, 12, pytest.approx(1.0), 0.0)


def test_the_class_of_a_segmentation_that_shrank_is_named():
    before = accuracy("miou", {"areas": [[0, 90, 90, 90, 7, 10, 10, 10]] * 10}, "miou")
    after = accuracy("miou", {"areas": [[0, 90, 90, 95, 7, 5, 10, 5]] * 10}, "miou")
    worst = worst_class(before, after, "miou")
    assert worst == (7, 10, 1.0, 0.5)


def test_damaged_evidence_is_refused():
    damaged = accuracy("mean", {"top1": [1.0], "classes": [1, 2]}, "top1")
    with pytest.raises(ValueError, match="damaged"):
        worst_class(damaged, damaged, "top1")
