"""Matches of detections and labelled boxes by the rules of COCO, and the precision that follows from them.

The rules are those of `pycocotools.cocoeval.COCOeval` for boxes; a test compares all results with it bit by bit. All
thresholds and ranges of areas are matched at once. Categories without boxes are left out, as no metric depends on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from pycocotools import mask

from harness.accuracy.data.decode import Detections
from harness.base.errors import UserError

IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)
RECALL_THRESHOLDS = np.linspace(0.0, 1.0, 101)
AREA_RANGES = np.array([(0, 1e10), (0, 32**2), (32**2, 96**2), (96**2, 1e10)], np.float64)
"""Smallest and largest area, in square pixels, of all, small, medium and large boxes."""
MAX_PER_IMAGE = 100
"""Largest number of detections of one category and image that count."""
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Booleans = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class CategoryMatches:
    """Boxes and detections of one category, sorted by image, detections of an image by decreasing score.

    Attributes:
        category: Index of the category in ascending order of ids.
        truth_image: Index of the image of each labelled box; images are in ascending order of ids.
        truth_counts: Whether each box is evaluated in each range of `AREA_RANGES`, shape (areas, boxes).
        image: Index of the image of each detection.
        scores: Score of each detection.
        matched: Whether each detection matches a box in each range of areas at each IoU threshold, shape (areas,
            thresholds, detections).
        ignored: Whether each detection is neither a hit nor a miss, of the same shape.
    """

    category: int
    truth_image: Integers
    truth_counts: Booleans
    image: Integers
    scores: Floats
    matched: Booleans
    ignored: Booleans


@dataclass(frozen=True, slots=True, kw_only=True)
class _Boxes:
    """Boxes of all images; `box` has left, top, width and height."""

    category: Integers
    image: Integers
    box: Floats
    area: Floats
    scores: Floats
    crowd: npt.NDArray[np.uint8]

    def select(self, chosen: Integers | Booleans | slice) -> _Boxes:
        return _Boxes(**{name: getattr(self, name)[chosen] for name in self.__slots__})

    def sort(self, *, by_class: bool) -> _Boxes:
        """Return the boxes sorted by category, image and decreasing score.

        Args:
            by_class: If False, the categories are replaced by one, and boxes of equal score stay in their order.
        """
        kept = self.select(np.lexsort((self.category, -self.scores, self.image)))
        if by_class:
            return kept.select(np.argsort(kept.category, kind="stable"))
        return _Boxes(**{name: getattr(kept, name) for name in self.__slots__} | {"category": 0 * kept.category})


def match_boxes(
    labels: Mapping[str, Any], found: Sequence[Detections], *, by_class: bool = True
) -> list[CategoryMatches]:
    """Return the matches of each category that has a box, in ascending order of their ids.

    Args:
        labels: `pycocotools.coco.COCO.dataset`; not changed.
        found: Detections of each image, in the order of the labels.
        by_class: If False, all boxes and detections are treated as one category.

    Raises:
        UserError: A class index is beyond the categories of the labels.
    """
    categories = sorted(category["id"] for category in labels["categories"])
    for detections in found:
        if (highest := int(detections.classes.max(initial=-1))) >= len(categories):
            raise UserError(f"the model finds class {highest}, but the labels have {len(categories)} categories")
    places = np.argsort(np.argsort([image["id"] for image in labels["images"]]))
    truth = _truth_boxes(labels, places, categories).sort(by_class=by_class)
    boxes = _found_boxes(found, places).sort(by_class=by_class)
    return [
        _match_category(category, truth.select(truth.category == category), boxes.select(boxes.category == category))
        for category in np.unique(truth.category).tolist()
    ]


def _truth_boxes(labels: Mapping[str, Any], places: Integers, categories: Sequence[int]) -> _Boxes:
    by_id = {image["id"]: place for image, place in zip(labels["images"], places.tolist(), strict=True)}
    kept = [a for a in labels["annotations"] if a["image_id"] in by_id]
    return _Boxes(
        category=np.searchsorted(categories, [a["category_id"] for a in kept]),
        image=np.array([by_id[a["image_id"]] for a in kept], np.int64),
        box=np.array([a["bbox"] for a in kept], np.float64).reshape(-1, 4),
        area=np.array([a["area"] for a in kept], np.float64),
        scores=np.zeros(len(kept)),
        crowd=np.array([a["iscrowd"] for a in kept], np.uint8),
    )


def _found_boxes(found: Sequence[Detections], places: Integers) -> _Boxes:
    corners = np.concatenate([each.boxes.reshape(-1, 4) for each in found])
    size = corners[:, 2:] - corners[:, :2]
    return _Boxes(
        category=np.concatenate([each.classes for each in found]),
        image=np.repeat(places, [len(each.scores) for each in found]),
        box=np.concatenate([corners[:, :2], size], axis=1),
        area=size[:, 0] * size[:, 1],
        scores=np.concatenate([each.scores for each in found]).astype(np.float64),
        crowd=np.zeros(len(corners), np.uint8),
    )


def _match_category(category: int, truth: _Boxes, boxes: _Boxes) -> CategoryMatches:
    starts = np.searchsorted(boxes.image, boxes.image)
    boxes = boxes.select(np.arange(len(boxes.image)) - starts < MAX_PER_IMAGE)
    low, high = AREA_RANGES[:, :1], AREA_RANGES[:, 1:]
    left_out = (truth.crowd > 0) | (truth.area < low) | (truth.area > high)
    outside = (boxes.area < low) | (boxes.area > high)
    matched = np.zeros((len(AREA_RANGES), len(IOU_THRESHOLDS), len(boxes.image)), np.bool_)
    ignored = np.repeat(outside[:, None], len(IOU_THRESHOLDS), axis=1)
    for part, own in _iter_shared_images(truth.image, boxes.image):
        ious = mask.iou(boxes.box[own], truth.box[part], truth.crowd[part])
        matched[..., own], hidden = _match_image(ious, left_out[:, part], truth.crowd[part] > 0)
        ignored[..., own] = np.where(matched[..., own], hidden, ignored[..., own])
    return CategoryMatches(
        category=category,
        truth_image=truth.image,
        truth_counts=~left_out,
        image=boxes.image,
        scores=boxes.scores,
        matched=matched,
        ignored=ignored,
    )


def _iter_shared_images(truth: Integers, found: Integers) -> Iterator[tuple[slice, slice]]:
    """Yield the slices of the boxes and of the detections of each image that has both."""
    for image in np.intersect1d(truth, found):
        first, last = ((np.searchsorted(each, image), np.searchsorted(each, image, "right")) for each in (truth, found))
        yield slice(*first), slice(*last)


def _match_image(ious: Floats, left_out: Booleans, crowd: Booleans) -> tuple[Booleans, Booleans]:
    """Return which detections match a box, and whether that box is left out, shape (areas, thresholds, detections).

    Detections are matched in the order of their scores. Each takes the free box with the largest sufficient overlap
    (the last of equal ones); a box that is left out only if there is no other. A crowd can be matched several times.

    Args:
        ious: IoU, shape (detections, boxes).
        left_out: Whether each box does not count, shape (areas, boxes).
        crowd: Whether each box is a crowd.
    """
    areas, count = left_out.shape
    free = np.ones((areas, len(IOU_THRESHOLDS), count), np.bool_)
    matched = np.zeros((areas, len(IOU_THRESHOLDS), len(ious)), np.bool_)
    hidden = np.zeros_like(matched)
    rows, columns = np.ogrid[:areas, : len(IOU_THRESHOLDS)]
    for k in np.flatnonzero(ious.max(axis=1) >= IOU_THRESHOLDS[0]):
        rank = np.empty(count, np.int64)
        rank[np.argsort(ious[k], kind="stable")] = np.arange(1, count + 1)
        taken = np.where(free & (ious[k] >= IOU_THRESHOLDS[:, None]), (rank + count * ~left_out)[:, None], 0)
        best = taken.argmax(axis=2)
        matched[..., k] = taken.max(axis=2) > 0
        hidden[..., k] = left_out[rows, best]
        free[rows, columns, best] &= crowd[best] | ~matched[..., k]
    return matched, hidden


def interpolate_precision(matches: Sequence[CategoryMatches], area: int) -> Floats:
    """Return the precision at each IoU threshold and recall, of the categories with a box that counts.

    Args:
        matches: Matches of each category.
        area: Index into `AREA_RANGES`.

    Returns:
        Array of shape (thresholds, recalls, categories).
    """
    counted = [each for each in matches if each.truth_counts[area].any()]
    values = np.zeros((len(IOU_THRESHOLDS), len(RECALL_THRESHOLDS), len(counted)))
    for k, each in enumerate(counted):
        order = np.argsort(-each.scores, kind="stable")
        matched, ignored = each.matched[area][:, order], each.ignored[area][:, order]
        hits = np.cumsum(matched & ~ignored, axis=1).astype(np.float64)
        misses = np.cumsum(~matched & ~ignored, axis=1).astype(np.float64)
        recall = hits / np.count_nonzero(each.truth_counts[area])
        precision = hits / (misses + hits + np.spacing(1))
        precision = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
        for level in range(len(IOU_THRESHOLDS)):
            places = np.searchsorted(recall[level], RECALL_THRESHOLDS, side="left")
            known = places < len(order)
            values[level, known, k] = precision[level, places[known]]
    return values
