"""Scoring in stages: the error of the sequential test, the images of the first stage, and outputs that are reused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harness.accuracy.metrics.intervals import encode_evidence
from harness.plugins.api import Accuracy
from harness.results.search_log import Goal
from harness.run.prepare.accuracy import mixable_record, rejected_loss
from harness.workers.inference import remember_outputs


def accuracies(losses: float, images: int, seed: int) -> tuple[Accuracy, Accuracy]:
    """Float model and candidate that loses a share of the images, and gains a few."""
    rng = np.random.default_rng(seed)
    base = rng.random(images) < 0.8
    lost, gained = rng.random(images) < losses + 0.02, rng.random(images) < 0.02 * 4
    found = np.where(base, ~lost, gained)
    return tuple(Accuracy(metrics={"top1": float(x.mean())}, per_item=tuple(x.astype(float))) for x in (base, found))  # type: ignore[return-value]


@pytest.mark.parametrize(("losses", "least", "most"), [(0.0, 0.0, 0.02), (0.01, 0.0, 0.03), (0.3, 0.9, 1.0)])
def test_first_stage_rejects_few_good_and_most_bad_candidates(losses, least, most):
    goal = Goal(metric="top1", reference=0.8, max_drop=0.01)
    rejected = []
    for seed in range(200):
        reference, found = accuracies(losses, 120, seed)
        loss = rejected_loss(goal, reference, found)
        rejected.append(loss is not None)
        if loss is not None:
            assert loss == pytest.approx(reference.metrics["top1"] - found.metrics["top1"])
    assert least <= np.mean(rejected) <= most


def test_rejected_loss_of_lower_is_better_metric():
    goal = Goal(metric="loss", reference=0.1, max_drop=0.01, higher_is_better=False)
    reference = Accuracy(metrics={"loss": 0.1}, per_item=(0.1,) * 40)
    found = Accuracy(metrics={"loss": 0.5}, per_item=(0.5,) * 40)
    assert rejected_loss(goal, reference, found) == pytest.approx(0.4)
    assert rejected_loss(goal, reference, reference) is None
    assert rejected_loss(Goal(metric="loss", max_drop=None), reference, found) is None


@pytest.mark.parametrize("writeable", [True, False])
def test_outputs_of_the_first_stage_are_reused_for_the_same_inputs(writeable):
    calls: list[float] = []

    def infer(feeds: Any) -> Any:
        calls.append(float(feeds["x"][0]))
        return {"y": feeds["x"] + 1}

    known: dict[Any, Any] = {}
    images = [{"x": np.full(4, value, np.float32)} for value in range(8)]
    for feeds in images:
        feeds["x"].flags.writeable = writeable  # evaluators keep what cannot change
    first = [remember_outputs(infer, known, keep=True)(feeds) for feeds in images[::4]]
    whole = [remember_outputs(infer, known, keep=False)(feeds) for feeds in images]
    assert calls == [0, 4, 1, 2, 3, 5, 6, 7]
    np.testing.assert_array_equal(first[1]["y"], whole[4]["y"])
    assert len(known) == 2


def test_remembered_outputs_distinguish_views_of_reused_buffer():
    known: dict[Any, Any] = {}
    remembering = remember_outputs(lambda feeds: {"y": feeds["x"] + 1}, known, keep=True)
    buffer = np.zeros((2, 2), np.float32)
    for value in (0, 1):
        buffer[:] = [[value, 2], [3, 4]]
        for view in (buffer.view(), buffer.T):
            view.flags.writeable = False
            np.testing.assert_array_equal(remembering({"x": view})["y"], view + 1)


def test_mixable_record_is_kept_if_some_fold_is_within_bound():
    def scored(right: list[int]) -> Accuracy:
        text = encode_evidence("miou", {"areas": [[0, n, 100, n] for n in right]})
        return Accuracy(metrics={"miou": sum(right) / len(right) / 100}, evidence=text, mixable=text)

    reference, lucky, worse = scored([80] * 20), scored([40, 80, 80, 80, 80] * 4), scored([70] * 20)
    goal = Goal(metric="miou", reference=0.8, max_drop=0.01)
    kept = [mixable_record(goal, reference, each) for each in (reference, lucky, worse)]
    assert kept == ["", lucky.mixable, ""]
    assert mixable_record(goal, reference, scored([80] * 10)) == "", "other images than those of the float model"
