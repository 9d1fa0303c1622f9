"""Average precision on any choice of images, from what pycocotools found about each of them.

Which detection hits which box is decided image by image, whatever the other images are. So it is decided once,
by pycocotools, and a draw of images only counts the hits and misses again, in the order of their scores.

The facts are, for each range of areas, a list of categories, each a mapping of lists: `truth`, the image of each box
that counts; then for each detection, best first: `image`; `hits` and `misses`, a bit for each IoU threshold at which
it is a hit or a miss (at the others it counts for nothing). Misses behind the last hit change no average precision,
and are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["METRICS", "map_facts", "resampled_map"]

RECALLS = np.linspace(0.0, 1.0, 101)  # as in pycocotools.cocoeval.Params, which has the thresholds 0.50, 0.55 to 0.95
LEVELS = 10
METRICS: Mapping[str, tuple[int, tuple[int, ...]]] = MappingProxyType(
    {
        "map": (0, tuple(range(LEVELS))),
        "map50": (0, (0,)),
        "map75": (0, (5,)),
        "maps": (1, tuple(range(LEVELS))),
        "mapm": (2, tuple(range(LEVELS))),
        "mapl": (3, tuple(range(LEVELS))),
    }
)
"""By the name of a metric, in the order of `COCOeval.stats`: range of areas, and which IoU thresholds."""
CELLS = 4_000_000  # draws x detections at a time
Counts = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]


def map_facts(evaluation: Any) -> dict[str, Any]:
    """What there is to know about each image.

    Args:
        evaluation: A `pycocotools.cocoeval.COCOeval` of boxes by category, after `evaluate()`.
    """
    images, areas = len(evaluation.params.imgIds), len(evaluation.params.areaRng)
    found: list[list[dict[str, list[int]]]] = []
    for area in range(areas):
        found.append([])
        for category in range(len(evaluation.params.catIds)):
            first = (category * areas + area) * images
            rows = [(i, row) for i, row in enumerate(evaluation.evalImgs[first : first + images]) if row is not None]
            truth = [i for i, row in rows for _ in range(int((np.asarray(row["gtIgnore"]) == 0).sum()))]
            if truth:
                found[-1].append({"truth": truth, **_detections(rows)})
    return {"images": images, "areas": found}


def _detections(rows: list[tuple[int, Mapping[str, Any]]]) -> dict[str, list[int]]:
    scores = np.concatenate([row["dtScores"] for _, row in rows])
    image = np.concatenate([np.full(len(row["dtScores"]), i) for i, row in rows])
    matched = np.concatenate([row["dtMatches"] for _, row in rows], axis=1) > 0
    counts = np.concatenate([row["dtIgnore"] for _, row in rows], axis=1) == 0
    bits = 1 << np.arange(LEVELS)
    hits, misses = bits @ (matched & counts), bits @ (~matched & counts)
    order = np.argsort(-scores, kind="mergesort")
    last = np.flatnonzero(hits[order]).max(initial=-1)
    kept = np.array([i for i in order[: last + 1] if hits[i] or misses[i]], np.int64)
    return {"image": image[kept].tolist(), "hits": hits[kept].tolist(), "misses": misses[kept].tolist()}


def resampled_map(facts: Mapping[str, Any], metric: str, weights: Counts) -> Values:
    """A metric in each draw, NaN where a draw has no box: the mean over categories of their average precision.

    Args:
        facts: See the module's text.
        metric: A key of `METRICS`.
        weights: How often each image is in each draw: draws x images.
    """
    area, levels = METRICS[metric]
    categories = facts["areas"][area]
    widest = max((len(category["image"]) for category in categories), default=0)
    parts = np.array_split(weights, 1 + len(weights) * widest // CELLS)
    return np.concatenate([_mean(categories, levels, part) for part in parts])


def _mean(categories: Iterable[Mapping[str, list[int]]], levels: tuple[int, ...], weights: Counts) -> Values:
    total, known = np.zeros(len(weights)), np.zeros(len(weights))
    for category in categories:
        boxes = weights[:, category["truth"]].sum(axis=1)
        counted = weights[:, category["image"]]
        hits, misses = (np.asarray(category[name], np.int64) for name in ("hits", "misses"))
        for level in levels:
            total += _average(counted, hits >> level & 1, misses >> level & 1, boxes) / len(levels)
        known += boxes > 0
    mean: Values = np.divide(total, known, out=np.full(len(weights), np.nan), where=known > 0)
    return mean


def _average(counted: Counts, hit: Counts, miss: Counts, boxes: Counts) -> Values:
    """Average precision of one category at one threshold in each draw, over 101 recalls; 0 where it has no box.

    As `COCOeval.accumulate` has it: the precision at a recall is the highest at this or a higher recall.
    """
    places = np.flatnonzero(hit)
    if not len(places):
        return np.zeros(len(boxes))
    right = np.cumsum(counted[:, places], axis=1)
    wrong = np.cumsum(counted * miss, axis=1)[:, places]
    precision = right / np.maximum(right + wrong, 1)
    best = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    recall = right / np.maximum(boxes, 1)[:, None]
    reached = np.searchsorted(RECALLS, recall, side="right")
    gained = np.diff(reached, axis=1, prepend=0)
    average: Values = (best * gained).sum(axis=1) / len(RECALLS)
    return average
