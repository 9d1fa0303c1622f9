"""Cross-fitting of a choice: means over samples, and mAP and mIoU of images that several engines share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import zoo
from harness.accuracy.metrics.intervals import drop_estimate, encode_evidence
from harness.accuracy.metrics.labelled import CocoMAP
from harness.measure.records import Measured
from harness.plugins.api import Accuracy, Infer
from harness.results.cross_fitting import FOLDS, choose_cross_fitted, cross_fitted_drop, losses_on_other_folds

SAMPLES = 40


def measured(latency_ms: float, found: Accuracy) -> Measured:
    return Measured(
        samples_ms=(latency_ms,) * 3,
        build_s=1.0,
        measure_s=1.0,
        metrics=found.metrics,
        per_item=found.per_item,
        mixable=found.mixable,
    )


def placement(latency_ms: float, wrong: list[int]) -> Measured:
    per_item = tuple(float(i not in wrong) for i in range(SAMPLES))
    return measured(latency_ms, Accuracy(metrics={"top1": float(np.mean(per_item))}, per_item=per_item))


REFERENCE = Accuracy(metrics={"top1": 1.0}, per_item=(1.0,) * SAMPLES)


def test_each_fold_chooses_fastest_within_bound_on_other_folds():
    lucky = Accuracy(metrics={"top1": 0.8}, per_item=tuple(float(i % FOLDS > 0) for i in range(SAMPLES)))
    losses = losses_on_other_folds(replace(REFERENCE), lucky, "top1", higher_is_better=True)
    assert losses == pytest.approx([0, 0.25, 0.25, 0.25, 0.25]), "all its errors are in the first fold"
    both = np.array([losses, np.zeros(FOLDS)])
    assert choose_cross_fitted([1.0, 2.0], both, 0.1) == [0, 1, 1, 1, 1]
    assert choose_cross_fitted([1.0], both[:1], 0.1) == [0, None, None, None, None]


def test_cross_fitted_drop_exceeds_drop_of_lucky_choice():
    steady = placement(2.0, [])
    lucky = placement(1.0, list(range(0, SAMPLES, FOLDS)))
    found = cross_fitted_drop([lucky, steady], REFERENCE, "top1", 0.1, higher_is_better=True)
    assert found is not None
    assert found.interval.value == pytest.approx(8 / SAMPLES)
    assert found.interval.low < found.interval.value < found.interval.high
    always = cross_fitted_drop([placement(1.0, [3]), steady], REFERENCE, "top1", 0.1, higher_is_better=True)
    assert always is not None
    assert always.interval.value == pytest.approx(1 / SAMPLES)
    loss = cross_fitted_drop([placement(1.0, [3]), steady], REFERENCE, "top1", 0.1, higher_is_better=False)
    assert loss is not None
    assert loss.interval.value == pytest.approx(-1 / SAMPLES)


def test_cross_fitted_drop_needs_enough_samples_and_placements():
    few = Accuracy(metrics={"top1": 1.0}, per_item=(1.0,) * 10)
    assert cross_fitted_drop([placement(1.0, [])], few, "top1", 0.1, higher_is_better=True) is None
    assert cross_fitted_drop([], REFERENCE, "top1", 0.1, higher_is_better=True) is None


@pytest.fixture(scope="module")
def detector(tmp_path_factory):
    """The zoo's detector on drawn shapes: its evaluator, and engines that see images with fewer and fewer levels."""
    import onnxruntime

    file = zoo.write_model("shapes_detector", Path(tmp_path_factory.mktemp("zoo")) / "model.onnx")
    session = onnxruntime.InferenceSession(str(file))
    (output,) = (value.name for value in session.get_outputs())
    data = {"use": "shapes", "split": "evaluation", "count": SAMPLES}
    evaluator = CocoMAP(data, "shapes", "shapes", "images", (1, 3, 128, 128))

    def engine(step: float) -> Infer:
        def infer(feeds: Mapping[str, Any]) -> dict[str, Any]:
            image = feeds["images"]
            return {output: session.run(None, {"images": np.round(image / step) * step if step else image})[0]}

        return infer

    return evaluator, [engine(step) for step in (0.0, 0.3, 0.6)]


def test_cross_fitted_map_equals_map_of_mixed_outputs(detector):
    evaluator, engines = detector
    reference, *others = (evaluator.score(engine) for engine in engines)
    outcomes = [measured(2.0 - k, found) for k, found in enumerate(others)]
    losses = np.array([losses_on_other_folds(reference, each, "map", higher_is_better=True) for each in others])
    bound = float(np.median(losses[1]))  # the second and faster one keeps it without some folds
    picks = choose_cross_fitted([2.0, 1.0], losses, bound)
    assert set(picks) == {0, 1}
    images = iter(range(SAMPLES))

    def of_other_folds(feeds: Any) -> Any:
        pick = picks[next(images) % FOLDS]
        return engines[0 if pick is None else pick + 1](feeds)

    found = cross_fitted_drop(outcomes, reference, "map", bound, higher_is_better=True)
    expected = drop_estimate(reference, evaluator.score(of_other_folds), "map")
    assert found is not None
    assert expected is not None
    assert expected.interval.value != 0
    assert found.interval.value == pytest.approx(expected.interval.value, abs=1e-12)
    assert (found.interval.low, found.interval.high, found.images) == pytest.approx(
        (expected.interval.low, expected.interval.high, SAMPLES), abs=1e-12
    )


def test_cross_fitted_drop_is_none_if_record_is_missing(detector):
    evaluator, engines = detector
    reference, found = (evaluator.score(engine) for engine in engines[:2])
    unknown = replace(measured(1.0, found), mixable="")
    same = replace(measured(2.0, reference), mixable="")  # the float model, whose record is not kept twice
    lost = reference.metrics["map"] - found.metrics["map"]

    def drop(*outcomes: Measured, bound: float) -> Any:
        return cross_fitted_drop(outcomes, reference, "map", bound, higher_is_better=True)

    assert drop(unknown, same, bound=lost + 0.01) is None
    assert drop(same, bound=0.1).interval.value == 0
    assert cross_fitted_drop([same], replace(reference, mixable=""), "map", 0.1, higher_is_better=True) is None


@pytest.mark.parametrize("scores", [[10**30, 0], [1, 2, 3], ["x", "y"]])
def test_damaged_evidence_is_rejected(detector, scores):
    evaluator, engines = detector
    reference = evaluator.score(engines[0])
    part = {"category": 0, "truth": [0], "image": [0, 1], "hits": [1, 1], "misses": [0, 0], "scores": scores}
    forged = encode_evidence("map", {"images": SAMPLES, "areas": [[part]]})
    outcome = replace(measured(1.0, reference), mixable=forged)
    with pytest.raises(ValueError, match="damaged"):
        cross_fitted_drop([outcome], reference, "map", 1.0, higher_is_better=True)


def test_cross_fitted_mean_iou_is_over_all_pixels():
    right = np.random.default_rng(0).integers(60, 90, (2, SAMPLES))
    reference, found = (
        Accuracy(metrics={"miou": float(np.sum(each) / np.sum(210 - each))}, mixable=text)
        for each in right
        for text in [encode_evidence("miou", {"areas": [[0, int(n), 100, 110] for n in each]})]
    )
    drop = cross_fitted_drop([measured(1.0, found)], reference, "miou", 1.0, higher_is_better=True)
    assert drop is not None
    assert drop.interval.value == pytest.approx(reference.metrics["miou"] - found.metrics["miou"])
