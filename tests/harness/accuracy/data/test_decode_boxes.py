"""Known boxes, written in the layouts of the exports, are found where they are."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from harness.accuracy.data.decode import Detections, decode_rtdetr, decode_ultralytics
from harness.accuracy.data.preprocess import Prepared, open_preprocess
from harness.base.errors import EvaluationFailed
from harness.plugins import registry

SIZE = (320, 640)
BOX = np.array([[8.0, 16, 40, 96]])  # left, top, right, bottom in pixels of the image
CELLS = 2100
NMS = {"nms": 0.65}  # that of the decoder of the zoo


def prepared(use: str) -> Prepared:
    return open_preprocess(use).prepare(np.zeros((200, 300, 3), np.uint8), SIZE)


def in_input(box: np.ndarray, item: Prepared) -> np.ndarray:
    return box * np.tile(item.scales, 2) + np.tile(item.offset, 2)


def centred(box: np.ndarray) -> np.ndarray:
    return np.concatenate([(box[:, :2] + box[:, 2:]) / 2, box[:, 2:] - box[:, :2]], axis=1)


def check(found: Detections, scores: list[float], classes: list[int]) -> None:
    assert found.scores == pytest.approx(scores, abs=1e-6)
    assert found.classes.tolist() == classes
    assert found.boxes == pytest.approx(np.repeat(BOX, len(scores), axis=0), abs=1e-3)


def test_ultralytics_without_nms():
    item = prepared("ultralytics")
    raw = np.zeros((1, 84, CELLS), np.float32)
    for cell, (score, index) in {7: (0.9, 3), 8: (0.8, 3), 9: (0.7, 79)}.items():  # cell 8 repeats cell 7
        raw[0, :4, cell] = centred(in_input(BOX, item))[0]
        raw[0, 4 + index, cell] = score
    raw[0, 4, 7] = 0.3  # cell 7 counts for a second class too
    check(decode_ultralytics({"output0": raw}, item, SIZE), [0.9, 0.7, 0.3], [3, 79, 0])
    check(decode_ultralytics({"output0": raw}, item, SIZE, score=0.5, nms=1.0), [0.9, 0.8, 0.7], [3, 3, 79])


def test_ultralytics_with_nms_in_the_graph():
    item = prepared("ultralytics")
    raw = np.zeros((1, 300, 6), np.float32)
    raw[0, 0] = [*in_input(BOX, item)[0], 0.6, 5]
    raw[0, 1] = [*in_input(BOX, item)[0], 0.9, 17]
    raw[0, 2] = [*in_input(BOX, item)[0], 0.4, 5]
    check(decode_ultralytics({"output0": raw}, item, SIZE), [0.9, 0.6, 0.4], [17, 5, 5])


def test_rtdetr_with_logits_and_boxes():
    item = prepared("rtdetr")
    logits, boxes = np.full((1, 300, 80), -20.0, np.float32), np.zeros((1, 300, 4), np.float32)
    boxes[0, 11] = (centred(in_input(BOX, item)) / [SIZE[1], SIZE[0], SIZE[1], SIZE[0]])[0]
    logits[0, 11, [4, 60]] = [0.0, np.log(9)]
    for outputs in ({"logits": logits, "pred_boxes": boxes}, {"a": boxes, "b": logits}):
        check(decode_rtdetr(outputs, item, SIZE), [0.9, 0.5], [60, 4])
    check(decode_rtdetr({"logits": logits, "pred_boxes": boxes}, item, SIZE, top=1), [0.9], [60])
    logits[:] = 1e4  # what a broken model may give
    assert np.isfinite(decode_rtdetr({"logits": logits, "pred_boxes": boxes}, item, SIZE).scores).all()


def test_rtdetr_with_four_classes_identifies_outputs_by_name():
    item = prepared("rtdetr")
    logits, boxes = np.full((1, 300, 4), -20.0, np.float32), np.zeros((1, 300, 4), np.float32)
    boxes[0, 11] = (centred(in_input(BOX, item)) / [SIZE[1], SIZE[0], SIZE[1], SIZE[0]])[0]
    logits[0, 11, 2] = np.log(9)
    for outputs in (
        {"logits": logits, "pred_boxes": boxes},
        {"pred_logits": logits, "pred_boxes": boxes},
        {"logits": logits, "b": boxes},
    ):
        check(decode_rtdetr(outputs, item, SIZE), [0.9], [2])
    with pytest.raises(EvaluationFailed, match="by their names, logits and pred_boxes"):
        decode_rtdetr({"a": logits, "b": boxes}, item, SIZE)


def test_rtdetr_with_labels_boxes_and_scores():
    item = prepared("rtdetr")
    labels, scores = np.zeros((1, 300), np.int64), np.zeros((1, 300), np.float32)
    boxes = np.zeros((1, 300, 4), np.float32)
    boxes[0, [3, 5]] = in_input(BOX, item)
    labels[0, [3, 5]], scores[0, [3, 5]] = [2, 7], [0.4, 0.8]
    check(decode_rtdetr({"labels": labels, "boxes": boxes, "scores": scores}, item, SIZE), [0.8, 0.4], [7, 2])


@pytest.mark.parametrize(
    ("decode", "outputs", "message"),
    [
        (decode_ultralytics, {"a": (1, 4, 9)}, r"one output of 1 x \(4 \+ classes\) x cells, .* but got 'a' of 1 x 4"),
        (decode_ultralytics, {"a": (2, 84, 9)}, r"wants one output .* but got 'a' of 2 x 84 x 9"),
        (decode_ultralytics, {"a": (1, 84, 9), "b": (1,)}, r"but got 'a' of 1 x 84 x 9, 'b' of 1"),
        (decode_rtdetr, {"a": (1, 300, 80)}, r"'rtdetr' wants logits .* and boxes .* but got 'a' of 1 x 300 x 80"),
        (decode_rtdetr, {"a": (1, 300, 80), "b": (1, 9, 4)}, r"but got 'a' of 1 x 300 x 80, 'b' of 1 x 9 x 4"),
        (decode_rtdetr, {"labels": (1, 3), "boxes": (1, 4, 4), "scores": (1, 3)}, r"but got 'labels' of 1 x 3"),
    ],
)
def test_unexpected_output_shapes_are_refused(decode, outputs, message):
    with pytest.raises(EvaluationFailed, match=message):
        decode({name: np.zeros(shape) for name, shape in outputs.items()}, prepared("rtdetr"), SIZE)


def test_transposed_zoo_detector_decodes_as_ultralytics(tmp_path):
    """Its 1 x cells x (4 + classes) output is that layout transposed: the same figures come out of either decoder."""
    import onnxruntime

    from harness import zoo

    path = zoo.write_model("shapes_detector", tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def infer(feeds: Mapping[str, Any]) -> dict[str, Any]:
        return {"output0": session.run(None, dict(feeds))[0]}

    data = {"use": "shapes", "split": "evaluation", "count": 8}
    params = {"data": data, "preprocess": "shapes", "input_name": "images", "input_shape": (1, 3, 128, 128)}
    own = registry.create_plugin("evaluator", "coco_map", {**params, "decode": "shapes"})
    other = registry.create_plugin("evaluator", "coco_map", {**params, "decode": {"use": "ultralytics", "params": NMS}})
    turned = other.score(lambda feeds: {name: a.transpose(0, 2, 1) for name, a in infer(feeds).items()}).metrics
    assert own.score(infer).metrics == pytest.approx(turned)
    assert turned["map"] > 0.7
