from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from harness.accuracy.metrics.base import evaluator_params, low_reference_warning
from harness.accuracy.metrics.intervals import metric_estimate
from harness.accuracy.metrics.labelled import Top1, Top5
from harness.base.errors import EvaluationFailed, UserError
from harness.plugins import registry
from harness.plugins.api import Infer

SUPPLIED = {"input_name": "x", "input_shape": (1, 3, 4, 4)}


def open_evaluator(use: str, params: Mapping[str, Any], supplied: Mapping[str, Any]) -> Any:
    return registry.create_plugin("evaluator", use, evaluator_params(use, params, supplied))


@pytest.fixture
def folder(tmp_path):
    """Ten images; image i is filled with i, and its class is i."""
    (tmp_path / "images").mkdir()
    for i in range(10):
        Image.fromarray(np.full((4, 4, 3), i, np.uint8)).save(tmp_path / "images" / f"{i}.png")
    (tmp_path / "labels.txt").write_text("".join(f"{i}.png {i}\n" for i in range(10)))
    return tmp_path


def top5(folder: Path, labels: str | None = "labels.txt") -> Top1:
    data = {"use": "images", "images": "images", "labels": labels}
    made: Top1 = open_evaluator("top5", {"data": data, "preprocess": "shapes"}, {**SUPPLIED, "base": folder})
    return made


def top1(folder: Path, batch: int = 1, labels: str | None = "labels.txt", **params: Any) -> Top1:
    data = {"use": "images", "images": "images", "labels": labels}
    supplied = {"input_name": "x", "input_shape": (batch, 3, 4, 4), "base": folder}
    evaluator = open_evaluator("top1", {"data": data, "preprocess": "shapes", **params}, supplied)
    assert isinstance(evaluator, Top1)
    return evaluator


def logits(feeds: Any) -> dict[str, np.ndarray]:
    """Right below 4; below 8 the right class comes fifth; else last but one of twelve."""
    rows = []
    for tensor in feeds["x"]:
        i = round(float(tensor[0, 0, 0]) * 255)
        place = 0 if i < 4 else 4 if i < 8 else 10
        order = [k for k in range(12) if k != i]
        order.insert(place, i)
        row = np.zeros(12, np.float32)
        row[order] = np.arange(12, 0, -1)
        rows.append(row)
    return {"logits": np.stack(rows)}


@pytest.mark.parametrize("batch", [1, 4])
def test_top1_and_top5_of_known_logits(folder, batch):
    accuracy = top1(folder, batch).score(logits)
    assert accuracy.metrics == {"top1": 0.4, "top5": 0.8}
    assert accuracy.per_item == (1.0,) * 4 + (0.0,) * 6


def test_ties_are_resolved_to_the_lower_class(folder):
    accuracy = top1(folder).score(lambda _: {"logits": np.zeros((1, 12, 1, 1))})
    assert accuracy.metrics == {"top1": 0.1, "top5": 0.5}


def test_metrics_have_intervals_and_top5_can_be_primary(folder):
    accuracy = top1(folder).score(logits)
    for metric in ("top1", "top5"):
        estimate = metric_estimate(accuracy, metric)
        assert estimate.interval.low < estimate.interval.value == accuracy.metrics[metric] < estimate.interval.high
        assert estimate.caveat.startswith("only 10 samples")
    assert top5(folder).score(logits).per_item == (1.0,) * 8 + (0.0,) * 2
    assert (Top5.metric, Top5.higher_is_better) == ("top5", True)
    with pytest.raises(UserError, match=r"top5: data.labels: classes are needed"):
        top5(folder, labels=None)


def shifted(feeds: Any) -> dict[str, np.ndarray]:
    """The background class comes first."""
    return {"logits": np.concatenate([np.zeros((1, 1)), perfect(feeds)["logits"]], axis=1)}


def perfect(feeds: Any) -> dict[str, np.ndarray]:
    return {"logits": np.eye(10, dtype=np.float32)[[round(float(feeds["x"][0, 0, 0, 0]) * 255)]]}


def test_labels_with_shifted_classes_are_refused(folder):
    assert top1(folder).score(perfect).metrics["top1"] == 1.0
    with pytest.raises(UserError, match=r"data.labels: 10 of 10 answers are the label \+1, so these count classes in"):
        top1(folder).score(shifted)
    stuck = top1(folder).score(lambda _: {"logits": np.eye(10)[[9]]})
    assert stuck.metrics["top1"] == 0.1
    assert "class 9" in low_reference_warning(stuck, "top1", higher_is_better=True, params={})
    assert not low_reference_warning(top1(folder).score(perfect), "top1", higher_is_better=True, params={})


def test_degraded_candidate_is_not_taken_for_shifted_labels(folder):
    """Of two classes it answers with one nearly always, which for most images is the label and one more."""
    (folder / "labels.txt").write_text("".join(f"{i}.png {int(i >= 7)}\n" for i in range(10)))
    assert top1(folder).score(first_class_below(7)).metrics["top1"] == 1.0
    assert top1(folder).score(first_class_below(1)).metrics["top1"] == 0.4


def first_class_below(image: int) -> Infer:
    """A model of two classes: the first one for the images before this, the second for the others."""
    return lambda feeds: {"logits": np.eye(2)[[int(round(float(feeds["x"][0, 0, 0, 0]) * 255) >= image)]]}


def test_output_parameter_selects_the_logits(folder):
    def two(feeds: Any) -> dict[str, np.ndarray]:
        return {"other": np.zeros((1, 3)), **logits(feeds)}

    assert top1(folder, output="logits").score(two).metrics["top1"] == 0.4
    with pytest.raises(UserError, match="output: say which of logits, other holds the logits"):
        top1(folder).score(two)
    with pytest.raises(UserError, match="the model has no output 'logit', only logits, other"):
        top1(folder, output="logit").score(two)


def test_check_outputs_validates_the_output_before_scoring(folder):
    shapes = {"boxes": (1, 2), "logits": (1, 10)}
    top1(folder, output="logits").check_outputs(shapes)
    with pytest.raises(UserError, match="output: say which of boxes, logits holds the logits"):
        top1(folder).check_outputs(shapes)
    with pytest.raises(UserError, match="the model has no output 'logit', only boxes, logits"):
        top1(folder, output="logit").check_outputs(shapes)
    with pytest.raises(UserError, match="but the model has 2 outputs"):
        top1(folder, output="boxes").check_outputs(shapes)


def test_mismatched_labels_and_outputs_are_refused(folder):
    with pytest.raises(UserError, match=r"classes are needed, from a \.txt file"):
        top1(folder, labels=None)
    with pytest.raises(UserError, match=r"class 9 of 9\.png, but the model has 3 outputs"):
        top1(folder).score(lambda _: {"logits": np.zeros((1, 3))})
    with pytest.raises(EvaluationFailed, match=r"output 'logits' is no row of logits: its shape is \(1, 3, 4\)"):
        top1(folder).score(lambda _: {"logits": np.zeros((1, 3, 4))})
    with pytest.raises(EvaluationFailed, match=r"output 'logits' has NaN or infinite values on image '0.png'"):
        top1(folder).score(lambda _: {"logits": np.full((1, 12), np.nan)})
