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

from harness.accuracy.metrics.box_matching import AREA_RANGES, IOU_THRESHOLDS, RECALL_THRESHOLDS, CategoryMatches

MAP_METRICS: Mapping[str, tuple[int, tuple[int, ...]]] = MappingProxyType(
    {
        "map": (0, tuple(range(len(IOU_THRESHOLDS)))),
        "map50": (0, (0,)),
        "map75": (0, (5,)),
        "maps": (1, tuple(range(len(IOU_THRESHOLDS)))),
        "mapm": (2, tuple(range(len(IOU_THRESHOLDS)))),
        "mapl": (3, tuple(range(len(IOU_THRESHOLDS)))),
    }
)
"""Index of the range of areas and indices of the IoU thresholds of each metric, in the order of `COCOeval.stats`."""
DETECTION_FACTS = ("image", "hits", "misses")
MAX_BLOCK_CELLS = 4_000_000  # largest number of draws times detections that are computed at a time
Counts = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]


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
        columns = [_from_lists(part) for part in parts]
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


def _from_lists(facts: Mapping[str, Any]) -> Counts:
    """Return the detections of a category of `mixable_map_facts`, in the form of `_iter_categories`."""
    steps = np.array(facts["scores"], np.int64)
    return np.array([*(facts[name] for name in DETECTION_FACTS), 2 * steps[:1] - np.cumsum(steps)], np.int64)


def resampled_map(facts: Mapping[str, Any], metric: str, weights: Counts) -> Values:
    """Return a metric in each draw, shape (draws,): mean average precision over categories, NaN if a draw has no box.

    Args:
        facts: Result of `map_facts` or `mix_map_facts`.
        metric: A key of `MAP_METRICS`.
        weights: Multiplicity of each image in each draw, shape (draws, images).
    """
    area, levels = MAP_METRICS[metric]
    ranking = _rank_detections(facts["areas"][area], weights.shape[1])
    parts = np.array_split(weights, 1 + len(weights) * len(ranking.image) // MAX_BLOCK_CELLS)
    return np.concatenate([_mean_over_categories(ranking, levels, part) for part in parts])


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankedDetections:
    """Detections of all categories, one category after the other, and the best first within a category.

    Attributes:
        image: Image of each detection.
        category: Category of each detection.
        hits: For each detection, a bit for each IoU threshold at which it is a hit.
        counts: For each detection, a bit for each IoU threshold at which it is a hit or a miss.
        first: Index of each category's first detection.
        truth: Number of boxes that count, shape (images, categories).
    """

    image: Counts
    category: Counts
    hits: Counts
    counts: Counts
    first: Counts
    truth: Values


def _rank_detections(categories: Sequence[Mapping[str, Any]], images: int) -> _RankedDetections:
    def joined(name: str) -> Counts:
        return np.array([value for category in categories for value in category[name]], np.int64)

    sizes = np.array([len(category["image"]) for category in categories], np.int64)
    if any(max(category["truth"], default=0) >= images for category in categories):
        raise ValueError("a box of an image that there is not")
    truth = [np.bincount(category["truth"], minlength=images) for category in categories]
    return _RankedDetections(
        image=joined("image"),
        category=np.repeat(np.arange(len(categories)), sizes),
        hits=joined("hits"),
        counts=joined("hits") | joined("misses"),
        first=np.cumsum(sizes) - sizes,
        truth=np.array(truth, np.float64).reshape(len(categories), images).T,
    )


def _mean_over_categories(ranking: _RankedDetections, levels: Sequence[int], weights: Counts) -> Values:
    counted = weights.take(ranking.image, axis=1)
    passed, boxes = _cumulative_sums(counted), weights @ ranking.truth
    total = np.zeros(len(weights))
    for level in levels:
        total += _average_precision(ranking, level, (counted, passed), boxes)
    known = (boxes > 0).sum(axis=1)
    mean: Values = np.divide(total, known * len(levels), out=np.full(len(weights), np.nan), where=known > 0)
    return mean


def _average_precision(
    ranking: _RankedDetections, level: int, detections: tuple[Counts, Counts], boxes: Values
) -> Values:
    """Return the average precision at one threshold in each draw, over 101 recalls, summed over categories.

    As in `COCOeval.accumulate`, the precision at a recall is the highest at this or a higher recall of a category. The
    maximum is always at a hit, so only hits are evaluated. A category without a box adds 0.

    Args:
        ranking: Detections of all categories.
        level: Index of the IoU threshold.
        detections: Multiplicity of each detection in each draw, shape (draws, detections), and its `_cumulative_sums`.
        boxes: Number of boxes, shape (draws, categories).
    """
    counted, passed = detections
    places = np.flatnonzero(ranking.hits >> level & 1)
    if not len(places):
        return np.zeros(len(boxes))
    left_out = np.flatnonzero(~ranking.counts >> level & 1)
    category = ranking.category[places]
    first = ranking.first[category]
    starts = np.flatnonzero(np.diff(category, prepend=-1))
    found, skipped = _cumulative_sums(counted.take(places, axis=1)), _cumulative_sums(counted.take(left_out, axis=1))
    right = found[:, 1:] - found.take(np.repeat(starts, np.diff(starts, append=len(places))), axis=1)
    seen = passed.take(places + 1, axis=1) - passed.take(first, axis=1)
    seen -= skipped.take(np.searchsorted(left_out, places), axis=1)
    seen += skipped.take(np.searchsorted(left_out, first), axis=1)
    best = right / np.maximum(seen, 1)
    for part in np.split(best, starts[1:], axis=1):
        part[:, ::-1] = np.maximum.accumulate(part[:, ::-1], axis=1)
    recall = right / np.maximum(boxes.take(category, axis=1), 1)
    gained = np.searchsorted(RECALL_THRESHOLDS, recall, side="right")
    before = np.concatenate([np.zeros((len(boxes), 1), np.int64), gained[:, :-1]], axis=1)
    before[:, starts] = 0
    average: Values = (best * (gained - before)).sum(axis=1) / len(RECALL_THRESHOLDS)
    return average


def _cumulative_sums(values: Counts) -> Counts:
    """Return the cumulative sums of each row, with a first column of 0."""
    sums = np.zeros((len(values), values.shape[1] + 1), np.int64)
    np.cumsum(values, axis=1, out=sums[:, 1:])
    return sums
