"""Intervals over images: what is computed again is what pycocotools would find, and pairs are compared with pairs."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from harness.accuracy.data.decode import Detections
from harness.accuracy.metrics import intervals
from harness.accuracy.metrics.average_precision import (
    MAP_METRICS,
    map_facts,
    map_figures,
    match_boxes,
    mixable_map_facts,
    resampled_map,
)
from harness.accuracy.metrics.intervals import (
    check_consistency,
    decode_accuracy,
    drop_estimate,
    encode_evidence,
    metric_estimate,
    probability_within,
    surely_within,
)
from harness.plugins.api import Accuracy


def scene(seed: int, images: int = 8, classes: int = 3) -> tuple[dict[str, Any], list[Detections]]:
    """Labels with boxes of all sizes and crowds, and detections of every quality.

    Scores repeat from image to image, not within one: how its ties stand among its copies in a draw is arbitrary.
    """
    rng = np.random.default_rng(seed)
    annotations, found = [], []
    for image in range(1, images + 1):
        count = int(rng.integers(0, 5))
        corner, size = rng.uniform(0, 300, (count, 2)), rng.choice([12.0, 60.0, 150.0], (count, 1)) * np.ones((1, 2))
        kinds = rng.integers(0, classes, count)
        annotations += [
            {
                "id": len(annotations) + 1 + k, "image_id": image, "category_id": int(kinds[k]) + 1,
                "bbox": [*corner[k].tolist(), *size[k].tolist()], "area": float(size[k].prod()),
                "iscrowd": int(rng.random() < 0.15),
            }
            for k in range(count)
        ]  # fmt: skip
        repeats = rng.integers(0, count, 3 * count) if count else np.zeros(0, np.int64)
        near = corner[repeats] + rng.normal(0, 6, (len(repeats), 2))
        boxes = np.concatenate([near, near + size[repeats]], axis=1)
        scores = rng.choice(1000, len(repeats), replace=False) / 1000
        kinds = np.where(rng.random(len(repeats)) < 0.8, kinds[repeats], 0) if count else repeats
        order = np.argsort(-scores)
        found.append(Detections(boxes=boxes[order], scores=scores[order], classes=kinds[order].astype(np.int64)))
    categories = [{"id": k + 1} for k in range(classes)]
    return {
        "images": [{"id": i + 1} for i in range(images)],
        "annotations": annotations,
        "categories": categories,
    }, found


def repeated(labels: dict[str, Any], found: list[Detections], weights: np.ndarray) -> dict[str, float]:
    """Result of pycocotools for a draw: each image as often as it was drawn, under a number of its own."""
    copies = [i for i, weight in enumerate(weights) for _ in range(weight)]
    annotations = [
        {**a, "id": 1000 * k + a["id"], "image_id": k + 1}
        for k, i in enumerate(copies)
        for a in labels["annotations"]
        if a["image_id"] == i + 1
    ]
    images = [{"id": k + 1} for k in range(len(copies))]
    return map_figures(
        match_boxes({**labels, "images": images, "annotations": annotations}, [found[i] for i in copies])
    )


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32 - 1))
def test_map_equals_pycocotools_exactly(seed):
    labels, found = scene(seed)
    coarse = [dataclasses.replace(f, scores=np.round(f.scores, 1)) for f in found]  # many equal scores
    for each in (found, coarse):
        answers = [
            {"image_id": image["id"], "category_id": int(index) + 1, "score": float(score),
             "bbox": [box[0], box[1], box[2] - box[0], box[3] - box[1]]}
            for image, f in zip(labels["images"], each, strict=True)
            for box, score, index in zip(f.boxes.tolist(), f.scores, f.classes, strict=True)
        ]  # fmt: skip
        truth = COCO()
        truth.dataset = labels | {"annotations": [dict(a) for a in labels["annotations"]], "info": {}}
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(answers), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
        expected = {name: value for name, value in zip(MAP_METRICS, evaluation.stats[:6], strict=True) if value >= 0}
        assert map_figures(match_boxes(labels, each)) == expected


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32 - 1))
def test_resampled_map_equals_pycocotools(seed):
    labels, found = scene(seed)
    facts = json.loads(json.dumps(map_facts(match_boxes(labels, found), len(found))))
    rng = np.random.default_rng(seed)
    draws = np.vstack([np.ones(8, np.int64), rng.multinomial(8, [1 / 8] * 8, size=2)])
    ours = {metric: resampled_map(facts, metric, draws) for metric in MAP_METRICS}
    for k, weights in enumerate(draws):
        expected = repeated(labels, found, weights)
        for metric, values in ours.items():
            if metric in expected:
                assert values[k] == pytest.approx(expected[metric], abs=1e-9), (metric, k)
            else:
                assert np.isnan(values[k])


def test_resampling_in_blocks_gives_equal_results(monkeypatch):
    labels, found = scene(3)
    facts = map_facts(match_boxes(labels, found), len(found))
    draws = np.random.default_rng(0).multinomial(8, [1 / 8] * 8, size=20)
    whole = resampled_map(facts, "map", draws)
    monkeypatch.setattr("harness.accuracy.metrics.average_precision.MAX_BLOCK_CELLS", 50)
    assert resampled_map(facts, "map", draws) == pytest.approx(whole, nan_ok=True)


def detector(seed: int, *, noise: float = 0.0) -> Accuracy:
    labels, found = scene(seed, images=40)
    rng = np.random.default_rng(9)
    moved = [dataclasses.replace(f, boxes=f.boxes + rng.normal(0, noise, f.boxes.shape)) for f in found]
    matches = match_boxes(labels, moved)
    evidence, mixable = (encode_evidence("map", f(matches, len(moved))) for f in (map_facts, mixable_map_facts))
    return Accuracy(metrics=map_figures(match_boxes(labels, moved)), evidence=evidence, mixable=mixable)


def test_the_drop_of_map_has_a_paired_interval_from_stored_records():
    reference, worse = (
        decode_accuracy(json.loads(json.dumps({"metrics": a.metrics, "per_item": [], "evidence": a.evidence})))
        for a in (detector(5), detector(5, noise=6.0))
    )
    drop = drop_estimate(reference, worse, "map")
    own = metric_estimate(reference, "map")
    assert drop.interval.value == pytest.approx(reference.metrics["map"] - worse.metrics["map"])
    assert 0 < drop.interval.low < drop.interval.value < drop.interval.high
    assert own.interval.low < own.interval.value < own.interval.high
    assert own.images == drop.images == 40
    assert drop.caveat == ""
    same = drop_estimate(reference, reference, "map")
    assert (same.interval.low, same.interval.value, same.interval.high) == (0.0, 0.0, 0.0)
    assert all(drop_estimate(reference, worse, metric) for metric in MAP_METRICS)


def hits(values: np.ndarray) -> Accuracy:
    return Accuracy(metrics={"top1": float(values.mean())}, per_item=tuple(values.tolist()))


def test_pairing_makes_the_interval_of_a_drop_narrow():
    rng = np.random.default_rng(1)
    first = (rng.random(400) < 0.7).astype(float)
    second = np.where(rng.random(400) < 0.03, 1 - first, first)
    drop, own = drop_estimate(hits(first), hits(second), "top1"), metric_estimate(hits(first), "top1")
    assert drop is not None
    assert drop.interval.high - drop.interval.low < 0.5 * (own.interval.high - own.interval.low)
    with pytest.raises(ValueError, match="the same images, but there are 400 and 31"):
        drop_estimate(hits(first), hits(np.ones(31)), "top1")
    other_way = drop_estimate(hits(first), hits(second), "top1", higher_is_better=False)
    assert other_way.interval.value == -drop.interval.value


def test_the_interval_of_a_mean_is_that_of_theory():
    values = np.random.default_rng(2).normal(3.0, 2.0, 500)
    estimate = metric_estimate(Accuracy(metrics={"m": float(values.mean())}, per_item=tuple(values.tolist())), "m")
    assert estimate is not None
    half = 1.96 * values.std() / np.sqrt(500)
    assert estimate.interval.low == pytest.approx(values.mean() - half, abs=0.03)
    assert estimate.interval.high == pytest.approx(values.mean() + half, abs=0.03)


def test_probability_within_agrees_with_the_drop_interval():
    rng = np.random.default_rng(3)
    hits = (rng.random((2, 400)) < [[0.8], [0.75]]).astype(float)
    reference, found = (Accuracy(metrics={"top1": float(row.mean())}, per_item=tuple(row)) for row in hits)
    estimate = drop_estimate(reference, found, "top1")
    interval = estimate.interval
    bounds = (interval.low, interval.value, interval.high)
    shares = [probability_within(reference, found, "top1", bound) for bound in bounds]
    assert shares == pytest.approx([0.025, 0.5, 0.975], abs=0.03)
    assert probability_within(reference, found, "top1", 1.0) == pytest.approx(1.0, abs=0.01)
    assert probability_within(reference, found, "top1", 0.0, higher_is_better=False) > 0.9
    assert probability_within(reference, dataclasses.replace(found, per_item=()), "top1", 0.1) is None


@pytest.mark.parametrize(
    ("images", "lost", "sure"), [(100, 0, False), (1000, 0, True), (1000, 4, False), (4000, 4, True)]
)
def test_surely_within_needs_enough_images(images, lost, sure):
    reference = hits(np.ones(images))
    found = hits(np.array([0.0] * lost + [1.0] * (images - lost)))
    assert surely_within(reference, found, "top1", 0.005) == sure
    assert surely_within(found, reference, "top1", 0.005, higher_is_better=False) == sure
    assert not surely_within(reference, dataclasses.replace(found, per_item=()), "top1", 0.1), "no interval"


LARGE = encode_evidence("mean", {"top1": [0] * 100_000})


@pytest.mark.parametrize("evidence", ["damaged", "Wc$|", encode_evidence("mean", {"top1": [1]})[:-4], LARGE])
def test_damaged_or_oversized_evidence_is_refused(evidence, monkeypatch):
    monkeypatch.setattr(intervals, "MAX_RESAMPLING_BYTES", 1000)
    with pytest.raises(ValueError, match="the evidence of a score is damaged"):
        metric_estimate(Accuracy(metrics={"top1": 1.0}, evidence=evidence), "top1")


def test_consistency_check_finds_a_forged_metric():
    found = detector(5)
    for metric in MAP_METRICS:
        assert check_consistency(found, metric) == ""
    forged = dataclasses.replace(found, metrics={**found.metrics, "map": found.metrics["map"] + 0.01})
    assert check_consistency(forged, "map").startswith(
        f"map is {forged.metrics['map']:.6g}, but by its own evidence it is "
    )
    unknown = dataclasses.replace(forged, evidence="", mixable="")
    assert check_consistency(unknown, "map") == "", "nothing is known of single images"
    assert check_consistency(hits(np.array([1.0, 0.0])), "top1") == ""
    both = {"sqnr_db": [10.0, 20.0], "cosine": [0.9, 0.7]}
    metrics = {name: float(np.mean(values)) for name, values in both.items()}
    full = Accuracy(metrics=metrics, per_item=(10.0, 20.0), evidence=encode_evidence("mean", both))
    assert check_consistency(full, "cosine") == "", "`per_item` is that of the primary metric"
    assert check_consistency(dataclasses.replace(full, per_item=(10.0, 30.0)), "cosine").endswith("per_item it is 20")
    assert metric_estimate(full, "cosine", primary="sqnr_db") is not None
    assert metric_estimate(full, "map") is None
    old = dataclasses.replace(full, evidence="")
    assert metric_estimate(old, "sqnr_db", primary="sqnr_db") is not None
    assert drop_estimate(old, full, "cosine", primary="sqnr_db") is None


@pytest.mark.parametrize(
    "facts",
    [
        {"images": 2, "areas": [[{"truth": [2], "image": [], "hits": [], "misses": []}]]},
        {"images": 2, "areas": [[{"truth": [0], "image": [7], "hits": [1], "misses": [0]}]]},
        {"images": 10**15, "areas": [[]]},
        {"images": 2},
    ],
)
def test_inconsistent_evidence_is_refused(facts):
    forged = Accuracy(metrics={"map": 0.5}, evidence=encode_evidence("map", facts))
    with pytest.raises(ValueError, match="the evidence of a score is damaged"):
        check_consistency(forged, "map")
