"""Average precision on any selection of images, from the matches of each image.

Which detection matches which box depends on one image only. So detections are matched once, and for a draw of images
only the hits and misses are counted again, in the order of their scores.

The facts are, for each range of areas, a list of categories, each a mapping with `category`, its index, and `truth`,
the image of each box that counts. The other lists have an entry for each detection, best first: `image`, and `hits` and
`misses`, with a bit for each IoU threshold at which it is a hit or a miss (at other thresholds it is ignored). Misses
after the last hit have no effect on average precision and are left out.

Facts that can be combined with those of other engines contain all detections that count, for boxes of all areas. They
also have `scores`: the best score as a 32-bit pattern, then for each detection the decrease from the one before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
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
Boxes = npt.NDArray[np.void]
"""Array of the type `_BOX`."""


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


_BOX = np.dtype(
    [
        ("category", np.int64),
        ("image", np.int64),
        ("box", np.float64, 4),  # left, top, width and height
        ("area", np.float64),
        ("score", np.float64),
        ("crowd", np.uint8),
    ]
)


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
    categories = {each: k for k, each in enumerate(sorted(category["id"] for category in labels["categories"]))}
    for detections in found:
        if (highest := int(detections.classes.max(initial=-1))) >= len(categories):
            raise UserError(f"the model finds class {highest}, but the labels have {len(categories)} categories")
    places = np.argsort(np.argsort([image["id"] for image in labels["images"]]))
    by_id = {image["id"]: place for image, place in zip(labels["images"], places.tolist(), strict=True)}
    truth = np.array(
        [
            (categories[a["category_id"]], by_id[a["image_id"]], tuple(a["bbox"]), a["area"], 0.0, a["iscrowd"])
            for a in labels["annotations"]
            if a["image_id"] in by_id
        ],
        _BOX,
    )
    boxes = np.zeros(sum(len(each.scores) for each in found), _BOX)
    corners = np.concatenate([each.boxes.reshape(-1, 4) for each in found])
    size = corners[:, 2:] - corners[:, :2]
    boxes["category"] = np.concatenate([each.classes for each in found])
    boxes["image"] = np.repeat(places, [len(each.scores) for each in found])
    boxes["box"] = np.concatenate([corners[:, :2], size], axis=1)
    boxes["area"] = size[:, 0] * size[:, 1]
    boxes["score"] = np.concatenate([each.scores for each in found])
    for each in (truth, boxes):
        each[:] = each[np.lexsort((each["category"], -each["score"], each["image"]))]
        if by_class:
            each[:] = each[np.argsort(each["category"], kind="stable")]
        else:
            each["category"] = 0
    return [
        _match_category(category, truth[truth["category"] == category], boxes[boxes["category"] == category])
        for category in np.unique(truth["category"]).tolist()
    ]


def _match_category(category: int, truth: Boxes, boxes: Boxes) -> CategoryMatches:
    starts = np.searchsorted(boxes["image"], boxes["image"])
    boxes = boxes[np.arange(len(boxes)) - starts < MAX_PER_IMAGE]
    low, high = AREA_RANGES[:, :1], AREA_RANGES[:, 1:]
    left_out = (truth["crowd"] > 0) | (truth["area"] < low) | (truth["area"] > high)
    outside = (boxes["area"] < low) | (boxes["area"] > high)
    matched = np.zeros((len(AREA_RANGES), len(IOU_THRESHOLDS), len(boxes)), np.bool_)
    ignored = np.repeat(outside[:, None], len(IOU_THRESHOLDS), axis=1)
    for image in np.intersect1d(truth["image"], boxes["image"]):
        part, own = (slice(*np.searchsorted(each["image"], [image, image + 1])) for each in (truth, boxes))
        corners = (np.ascontiguousarray(each["box"]) for each in (boxes[own], truth[part]))
        ious = mask.iou(*corners, np.ascontiguousarray(truth["crowd"][part]))
        matched[..., own], hidden = _match_image(ious, left_out[:, part], truth["crowd"][part] > 0)
        ignored[..., own] = np.where(matched[..., own], hidden, ignored[..., own])
    return CategoryMatches(
        category=category,
        truth_image=truth["image"],
        truth_counts=~left_out,
        image=boxes["image"],
        scores=boxes["score"],
        matched=matched,
        ignored=ignored,
    )


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


ALL_LEVELS = tuple(range(len(IOU_THRESHOLDS)))
MAP_METRICS: Mapping[str, tuple[int, tuple[int, ...]]] = MappingProxyType(
    {
        "map": (0, ALL_LEVELS),
        "map50": (0, (0,)),
        "map75": (0, (5,)),
        "maps": (1, ALL_LEVELS),
        "mapm": (2, ALL_LEVELS),
        "mapl": (3, ALL_LEVELS),
    }
)
"""Index of the range of areas and indices of the IoU thresholds of each metric, in the order of `COCOeval.stats`."""
DETECTION_FACTS = ("image", "hits", "misses")
MAX_BLOCK_CELLS = 4_000_000  # largest number of draws times detections that are computed at a time
Counts = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]


def map_figures(matches: Sequence[CategoryMatches]) -> dict[str, float]:
    """Return COCO's metrics (0 to 1) by name, without those of a size class that has no boxes."""
    precision = {area: interpolate_precision(matches, area) for area, _ in MAP_METRICS.values()}
    return {
        name: float(np.mean(precision[area][list(levels)].ravel()))
        for name, (area, levels) in MAP_METRICS.items()
        if precision[area].size
    }


def map_facts(matches: Sequence[CategoryMatches], images: int) -> dict[str, Any]:
    """Return the facts about each image from which `resampled_map` recomputes mAP; JSON can represent them.

    Args:
        matches: Matches of each category.
        images: Number of images.
    """
    found = [
        [{**head, **_to_lists(_drop_tail(detections))} for head, detections in _iter_categories(matches, area)]
        for area in range(len(AREA_RANGES))
    ]
    return {"images": images, "areas": found}


def mixable_map_facts(matches: Sequence[CategoryMatches], images: int) -> dict[str, Any]:
    """Return the facts for `mix_map_facts`, for boxes of all areas; see `map_facts` for the arguments."""
    found = []
    for head, detections in _iter_categories(matches, 0):
        scores = detections[-1]
        steps = np.concatenate([scores[:1], -np.diff(scores)])
        found.append({**head, **_to_lists(detections), "scores": steps.tolist()})
    return {"images": images, "areas": [found]}


def mix_map_facts(records: Sequence[Mapping[str, Any]], sources: Counts) -> dict[str, Any]:
    """Return the facts about images with detections from different engines, for boxes of all areas.

    They equal those of `map_facts` for these detections, but scores are rounded to float32, and metrics by size are
    absent.

    Args:
        records: Result of `mixable_map_facts` for each engine on the same images.
        sources: Index in `records` of the engine of each image.

    Raises:
        ValueError: The records have different boxes.
    """
    mixed = []
    for parts in zip(*(record["areas"][0] for record in records), strict=True):
        head = {name: parts[0][name] for name in ("category", "truth")}
        if any({name: part[name] for name in head} != head for part in parts):
            raise ValueError("records of different boxes")
        columns = []
        for part in parts:  # in the form of `_iter_categories`
            steps = np.array(part["scores"], np.int64)
            rows = [part[name] for name in DETECTION_FACTS]
            columns.append(np.array([*rows, 2 * steps[:1] - np.cumsum(steps)], np.int64))
        joined = np.concatenate([each[:, sources[each[0]] == k] for k, each in enumerate(columns)], axis=1)
        ranked = joined[:, np.lexsort((joined[0], -joined[-1]))]
        mixed.append({**head, **_to_lists(_drop_tail(ranked))})
    return {"images": len(sources), "areas": [mixed]}


def _iter_categories(matches: Sequence[CategoryMatches], area: int) -> Iterator[tuple[dict[str, Any], Counts]]:
    """Yield `category` and `truth` of each category with a box, and its detections that count, best first.

    The rows of the detections are image, hits, misses, and an integer in the order of the scores.
    """
    bits = 1 << np.arange(len(IOU_THRESHOLDS))
    for each in matches:
        if not each.truth_counts[area].any():
            continue
        matched, counts = each.matched[area], ~each.ignored[area]
        hits, misses = bits @ (matched & counts), bits @ (~matched & counts)
        order = np.argsort(-each.scores, kind="mergesort")
        kept = order[(hits[order] | misses[order]) > 0]
        patterns = each.scores[kept].astype(np.float32).view(np.int32).astype(np.int64)
        ranks = np.where(patterns < 0, -(patterns & np.iinfo(np.int32).max), patterns)
        head = {"category": each.category, "truth": each.truth_image[each.truth_counts[area]].tolist()}
        yield head, np.stack([each.image[kept], hits[kept], misses[kept], ranks])


def _drop_tail(detections: Counts) -> Counts:
    """Return the detections up to the last hit."""
    return detections[:, : np.flatnonzero(detections[1]).max(initial=-1) + 1]


def _to_lists(detections: Counts) -> dict[str, list[int]]:
    return {name: row.tolist() for name, row in zip(DETECTION_FACTS, detections[:-1], strict=True)}


def resampled_map(facts: Mapping[str, Any], metric: str, weights: Counts) -> Values:
    """Return a metric in each draw, shape (draws,): mean average precision over categories, NaN if a draw has no box.

    Args:
        facts: Result of `map_facts` or `mix_map_facts`.
        metric: A key of `MAP_METRICS`.
        weights: Multiplicity of each image in each draw, shape (draws, images).
    """
    area, levels = MAP_METRICS[metric]
    categories, images = facts["areas"][area], weights.shape[1]
    if any(max(each["truth"], default=0) >= images for each in categories):
        raise ValueError("a box of an image that there is not")
    image, hits, misses = (
        np.array([value for each in categories for value in each[name]], np.int64) for name in DETECTION_FACTS
    )
    sizes = np.array([len(each["image"]) for each in categories], np.int64)
    category, first = np.repeat(np.arange(len(categories)), sizes), np.cumsum(sizes) - sizes
    counts = np.array([np.bincount(each["truth"], minlength=images) for each in categories], np.float64)
    truth = counts.reshape(len(categories), images).T
    means = []
    for part in np.array_split(weights, 1 + len(weights) * len(image) // MAX_BLOCK_CELLS):
        counted, boxes, total = part.take(image, axis=1), part @ truth, np.zeros(len(part))
        passed = _cumulative_sums(counted)
        for level in levels:
            places, left_out = (np.flatnonzero(bits >> level & 1) for bits in (hits, ~(hits | misses)))
            if len(places):
                total += _average_precision(places, left_out, category[places], first, counted, passed, boxes)
        known = (boxes > 0).sum(axis=1)
        missing = np.full(len(part), np.nan)
        means.append(np.divide(total, known * len(levels), out=missing, where=known > 0))
    return np.concatenate(means)


def _average_precision(
    places: Counts, left_out: Counts, category: Counts, starts: Counts, counted: Counts, passed: Counts, boxes: Values
) -> Values:
    """Return the average precision at one threshold in each draw, over 101 recalls, summed over categories.

    As in `COCOeval.accumulate`, the precision at a recall is the highest at this or a higher recall of a category. The
    maximum is always at a hit, so only hits are evaluated. A category without a box adds 0.

    Args:
        places: Indices of the detections that are hits; detections are sorted by category, the best first.
        left_out: Indices of the detections that are neither hits nor misses.
        category: Category of each hit.
        starts: Index of the first detection of each category.
        counted: Multiplicity of each detection in each draw, shape (draws, detections).
        passed: Cumulative sums of `counted`.
        boxes: Number of boxes, shape (draws, categories).
    """
    first = starts[category]
    heads = np.flatnonzero(np.diff(category, prepend=-1))
    found, skipped = _cumulative_sums(counted.take(places, axis=1)), _cumulative_sums(counted.take(left_out, axis=1))
    right = found[:, 1:] - found.take(np.repeat(heads, np.diff(heads, append=len(places))), axis=1)
    seen = passed.take(places + 1, axis=1) - passed.take(first, axis=1)
    seen -= skipped.take(np.searchsorted(left_out, places), axis=1)
    seen += skipped.take(np.searchsorted(left_out, first), axis=1)
    best = right / np.maximum(seen, 1)
    for part in np.split(best, heads[1:], axis=1):
        part[:, ::-1] = np.maximum.accumulate(part[:, ::-1], axis=1)
    recall = right / np.maximum(boxes.take(category, axis=1), 1)
    gained = np.searchsorted(RECALL_THRESHOLDS, recall, side="right")
    before = np.concatenate([np.zeros((len(boxes), 1), np.int64), gained[:, :-1]], axis=1)
    before[:, heads] = 0
    average: Values = (best * (gained - before)).sum(axis=1) / len(RECALL_THRESHOLDS)
    return average


def _cumulative_sums(values: Counts) -> Counts:
    """Return the cumulative sums of each row, with a first column of 0."""
    sums = np.zeros((len(values), values.shape[1] + 1), np.int64)
    np.cumsum(values, axis=1, out=sums[:, 1:])
    return sums
