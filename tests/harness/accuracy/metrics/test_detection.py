from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from harness.accuracy.data import batching
from harness.accuracy.data.datasets import open_data
from harness.accuracy.data.decode import Detections
from harness.accuracy.data.preprocess import Shapes
from harness.accuracy.metrics import base
from harness.accuracy.metrics.average_precision import map_figures, match_boxes
from harness.accuracy.metrics.base import evaluator_params
from harness.accuracy.metrics.intervals import metric_estimate
from harness.accuracy.metrics.labelled import CocoMAP
from harness.base.errors import EvaluationFailed, UserError
from harness.plugins import registry
from harness.plugins.api import Evaluator, Infer

DATA = {"use": "shapes", "split": "evaluation", "count": 6}
PARAMS = {"data": DATA, "preprocess": "shapes", "decode": "shapes"}
SUPPLIED = {"input_name": "images", "input_shape": (1, 3, 128, 128), "reference": "unused.npz"}


def open_evaluator(use: str, params: Mapping[str, Any], supplied: Mapping[str, Any]) -> Any:
    return registry.create_plugin("evaluator", use, evaluator_params(use, params, supplied))


def oracle(coco: Any, *, shift: float = 0.0) -> Infer:
    """An engine that knows the labels: finds the image by its pixels and answers in the zoo detector's layout."""
    data = open_data(DATA)
    known = [Shapes().prepare(data.image(i), (128, 128)).tensor for i in range(len(data))]

    def infer(feeds: Any) -> dict[str, np.ndarray]:
        answers = []
        for tensor in feeds["images"]:
            image = next(i for i, other in enumerate(known) if np.array_equal(other, tensor))
            rows = np.zeros((8, 7), np.float32)
            boxes = [a for a in coco["annotations"] if a["image_id"] == coco["images"][image]["id"]]
            for row, box in zip(rows, boxes, strict=False):
                left, top, width, height = box["bbox"]
                row[:4] = left + width / 2 + shift, top + height / 2, width, height
                row[3 + box["category_id"]] = 0.9
            answers.append(rows)
        return {"boxes": np.stack(answers)}

    return infer


@pytest.fixture(scope="module")
def coco():
    return open_data(DATA).coco


@pytest.mark.parametrize("batch", [1, 4])
def test_perfect_predictions_have_a_map_of_one(coco, batch):
    evaluator = open_evaluator("coco_map", PARAMS, {**SUPPLIED, "input_shape": (batch, 3, 128, 128)})
    assert isinstance(evaluator, Evaluator)
    metrics = evaluator.score(oracle(coco)).metrics
    assert metrics["map"] == pytest.approx(1.0)
    assert metrics["map50"] == pytest.approx(1.0)
    assert evaluator.metric in metrics
    assert evaluator.higher_is_better


def test_float_model_with_permuted_classes_is_refused(coco):
    evaluator = open_evaluator("coco_map", PARAMS, SUPPLIED)
    evaluator.prepare(oracle(coco))
    turned = {**coco, "annotations": [{**a, "category_id": a["category_id"] % 3 + 1} for a in coco["annotations"]]}
    with pytest.raises(UserError, match=r"finds the boxes \(AP50 1.000 .*list these by name in data.classes"):
        evaluator.prepare(oracle(turned))
    evaluator.prepare(lambda _: {"boxes": np.zeros((1, 8, 7), np.float32)})  # a model that finds nothing


def test_evidence_reproduces_the_metric(coco):
    accuracy = open_evaluator("coco_map", PARAMS, SUPPLIED).score(oracle(coco, shift=3.0))
    estimate = metric_estimate(accuracy, "map")
    assert estimate.interval.low <= accuracy.metrics["map"] <= estimate.interval.high
    assert estimate.caveat == "only 6 samples: the interval is too wide to say much; score more of them"


def test_shifted_boxes_lower_map_and_no_boxes_give_zero(coco, capsys):
    evaluator = open_evaluator("coco_map", PARAMS, SUPPLIED)
    assert 0 < evaluator.score(oracle(coco, shift=3.0)).metrics["map"] < 0.9
    assert evaluator.score(lambda _: {"boxes": np.zeros((1, 8, 7), np.float32)}).metrics["map"] == 0.0
    assert capsys.readouterr().out == ""


def test_images_are_preprocessed_once(coco, monkeypatch):
    calls: list[int] = []
    original = Shapes.prepare
    monkeypatch.setattr(Shapes, "prepare", lambda *args: (calls.append(1), original(*args))[1])
    empty = np.zeros((1, 8, 7), np.float32)
    evaluator = open_evaluator("coco_map", PARAMS, SUPPLIED)
    for _ in range(2):
        evaluator.score(lambda _: {"boxes": empty})
    assert len(calls) == 6
    caches: dict[object, Any] = {}
    evaluator.share_inputs(caches)
    other = open_evaluator("coco_map", {**PARAMS, "data": {**DATA, "every": 2}}, SUPPLIED)
    other.share_inputs(caches)
    other.score(lambda _: {"boxes": empty})
    assert len(calls) == 6
    # Room for two images of 3 x 128 x 128 float32: the others are made each time.
    monkeypatch.setattr(base, "MAX_CACHE_BYTES", 2 * 3 * 128 * 128 * 4)
    evaluator = open_evaluator("coco_map", PARAMS, SUPPLIED)
    calls.clear()
    for _ in range(2):
        evaluator.score(lambda _: {"boxes": empty})
    assert len(calls) == 6 + 4


def labels(**changes: Any) -> dict[str, Any]:
    box = {"id": 1, "image_id": 1, "category_id": 30, "bbox": [10, 10, 20, 20], "area": 400, "iscrowd": 0}
    categories = [{"id": 30}, {"id": 4}]  # not in ascending order
    return {"images": [{"id": 1}], "annotations": [box], "categories": categories, **changes}


def found(index: int) -> list[Detections]:
    return [Detections(boxes=np.array([[10.0, 10, 30, 30]]), scores=np.ones(1), classes=np.array([index]))]


def test_classes_are_the_category_ids_in_ascending_order():
    assert map_figures(match_boxes(labels(), found(1)))["map"] == pytest.approx(1.0)
    assert map_figures(match_boxes(labels(), found(0)))["map"] == 0.0


def test_size_class_without_boxes_has_no_metric():
    assert set(map_figures(match_boxes(labels(), found(1)))) == {"map", "map50", "map75", "maps"}


def test_the_labels_are_left_as_they_are():
    before = labels()
    map_figures(match_boxes(before, found(1)))
    assert before == labels()


def test_a_class_beyond_the_labels_is_explained():
    with pytest.raises(UserError, match="the model finds class 2, but the labels have 2 categories"):
        map_figures(match_boxes(labels(), found(2)))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_outputs_that_are_not_finite_fail_the_candidate(value):
    evaluator = open_evaluator("coco_map", PARAMS, SUPPLIED)
    with pytest.raises(EvaluationFailed, match=r"output 'boxes' has NaN or infinite values on image 'evaluation_00000"):
        evaluator.score(lambda _: {"boxes": np.full((1, 8, 7), value, np.float32)})


def test_labels_without_boxes_are_explained(tmp_path):
    from PIL import Image

    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    shape = {"input_name": "x", "input_shape": (1, 3, 8, 8), "base": tmp_path}
    data = {"use": "images", "images": "."}
    with pytest.raises(UserError, match=r"boxes are needed, from a \.json file"):
        open_evaluator("coco_map", {**PARAMS, "data": data}, shape)
    (tmp_path / "l.json").write_text(
        '{"images": [{"id": 1, "file_name": "a.png"}], "annotations": [], "categories": []}'
    )
    with pytest.raises(UserError, match="there is no box on any of the images"):
        open_evaluator("coco_map", {**PARAMS, "data": {**data, "labels": "l.json"}}, shape)


@pytest.mark.parametrize(
    ("params", "supplied", "message"),
    [
        ({"decode": "yolo"}, {}, "no decoder is called 'yolo'; did you mean 'yolox'"),
        ({"decode": {"use": "yolox", "params": {"scores": 1}}}, {}, "decoder 'yolox' has no parameter 'scores'"),
        ({"batch": 3}, {}, "evaluator 'coco_map' has no parameter 'batch'"),
        ({"input_name": "x"}, {}, "'input_name' is set by the harness, not by the experiment"),
        ({}, {"input_shape": (1, 1, 8, 8)}, "batch x 3 x height x width or .*, but 'images' is 1 x 1 x 8 x 8"),
        ({"data": {"use": "shape"}}, {}, "no kind of data is called 'shape'"),
        ({"data": {"use": "npz", "path": "a.npz"}}, {}, "images are needed here"),
    ],
)
def test_invalid_parameters_are_refused(params, supplied, message):
    with pytest.raises(UserError, match=message):
        open_evaluator("coco_map", {**PARAMS, **params}, {**SUPPLIED, **supplied})


class Grey:
    """A preprocessing that breaks its promise."""

    def prepare(self, image: np.ndarray, size: tuple[int, int]) -> Any:
        good = Shapes().prepare(image, size)
        return type(good)(tensor=good.tensor[:1], scale=1.0, offset=(0, 0), original=size)


def test_preprocessed_tensor_of_wrong_shape_is_refused(monkeypatch):
    monkeypatch.setattr(batching.registry, "create_plugin", lambda *_: Grey())
    evaluator = CocoMAP(DATA, "shapes", "shapes", "images", (1, 3, 128, 128))
    with pytest.raises(
        UserError, match=r"preprocess gives float32 \(1, 128, 128\) for image .* wants float32 \(3, 128"
    ):
        evaluator.score(lambda _: {})
