"""Known boxes, written in the layouts of the exports, are found where they are."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.accuracy.data import decode
from harness.accuracy.data.decode import (
    Detections,
    box_iou,
    decode_nanodet,
    decode_rtdetr,
    decode_shapes,
    decode_ultralytics,
    decode_yolox,
    suppress_overlaps,
)
from harness.accuracy.data.preprocess import Prepared, open_preprocess
from harness.base.errors import EvaluationFailed
from harness.plugins import registry

SMALL = (32, 64)  # cells: 4 x 8, 2 x 4, 1 x 2
CELLS = 32 + 8 + 2
SIZE = (320, 640)
BOX = np.array([[8.0, 16, 40, 96]])  # left, top, right, bottom in pixels of the image


def unscaled(scale: float = 1.0, offset: tuple[float, float] = (0.0, 0.0)) -> Prepared:
    return Prepared(tensor=np.zeros((3, *SMALL), np.float32), scale=scale, offset=offset, original=(320, 640))


def prepared(use: str) -> tuple[Prepared, np.ndarray]:
    """An image as a decoder gets it, and the corners of `BOX` in the input."""
    item = open_preprocess(use).prepare(np.zeros((200, 300, 3), np.uint8), SIZE)
    return item, BOX[0] * np.tile(item.scales, 2) + np.tile(item.offset, 2)


def centred(box: np.ndarray) -> np.ndarray:
    return np.concatenate([(box[:2] + box[2:]) / 2, box[2:] - box[:2]])


def check(found: Detections, scores: list[float], classes: list[int], boxes: Any = None) -> None:
    assert found.scores == pytest.approx(scores, abs=1e-6)
    assert found.classes.tolist() == classes
    expected = np.repeat(BOX, len(scores), axis=0) if boxes is None else np.array(boxes)
    assert found.boxes == pytest.approx(expected, abs=1e-3)


def test_box_iou_of_known_boxes():
    a = np.array([[0.0, 0, 2, 2], [5, 5, 5, 9]])
    b = np.array([[1.0, 0, 3, 2], [0, 0, 2, 2], [10, 10, 11, 11], [5, 5, 5, 9]])
    assert box_iou(a, b) == pytest.approx(np.array([[1 / 3, 1, 0, 0], [0, 0, 0, 0]]))


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(0, 300), top=st.integers(1, 120))
def test_suppression_equals_the_textbook_loop(seed, count, top):
    rng = np.random.default_rng(seed)
    corners = rng.uniform(0, 30, (count, 2))
    boxes = np.concatenate([corners, corners + rng.uniform(0, 15, (count, 2))], axis=1)
    scores, classes = rng.integers(0, 20, count) / 20.0, rng.integers(0, 3, count)
    shared = box_iou(boxes, boxes)
    kept: list[int] = []
    for i in np.argsort(-scores, kind="stable").tolist():
        if not any(classes[i] == classes[k] and shared[i, k] > 0.5 for k in kept):
            kept.append(i)
    assert suppress_overlaps(boxes, scores, classes, 0.5, top).tolist() == kept[:top]


def test_suppression_considers_the_best_candidates_only(monkeypatch):
    monkeypatch.setattr(decode, "MAX_CANDIDATES", 2)
    boxes = np.array([[0.0, 0, 1, 1], [2, 2, 3, 3], [4, 4, 5, 5]])
    assert suppress_overlaps(boxes, np.array([0.1, 0.2, 0.3]), np.zeros(3, np.int64), 0.5).tolist() == [2, 1]


def test_yolox_decodes_known_boxes():
    raw = np.zeros((1, CELLS, 7), np.float32)
    # Row 1, column 2 of stride 8; 16 wide, 8 high; scores 0.5 * (0.8, 0.4).
    raw[0, 1 * 8 + 2] = [0.5, 0.25, np.log(2), 0.0, 0.5, 0.8, 0.4]
    # Column 1 of stride 32.
    raw[0, 32 + 8 + 1] = [0.0, 0.5, 0.0, 0.0, 1.0, 0.0, 0.9]
    # Centres: (32, 16) of 32 x 32; (20, 10) of 16 x 8.
    boxes = [[16, 0, 48, 32], [12, 6, 28, 14], [12, 6, 28, 14]]
    check(decode_yolox({"output": raw}, unscaled(), SMALL), [0.9, 0.4, 0.2], [1, 0, 1], boxes)
    raw[0, 1 * 8 + 2] = 0
    moved = unscaled(scale=0.5, offset=(4.0, 2.0))
    check(decode_yolox({"output": raw}, moved, SMALL), [0.9], [1], [[24, 0, 88, 60]])
    raw[..., :4], raw[..., 4:] = 1e30, 0.9
    assert np.isfinite(decode_yolox({"output": raw}, unscaled(), SMALL).boxes).all()


def test_nanodet_decodes_known_boxes():
    outputs = {}
    for stride, cells in ((32, 2), (8, 32), (16, 8)):
        outputs[f"dis_{stride}"] = np.zeros((1, cells, 32), np.float32)
        outputs[f"cls_{stride}"] = np.zeros((1, cells, 3), np.float32)
    outputs["cls_16"][0, 4 + 1] = [0.0, 0.7, 0.02]  # row 1, column 1: centre (24, 24)
    sides = outputs["dis_16"].reshape(1, 8, 4, 8)
    for side, distance in enumerate((1, 0, 2, 0)):
        sides[0, 5, side, distance] = 100.0  # the distribution is one spike
    sides[0, 5, 3] = [100, 100, 0, 0, 0, 0, 0, 0]  # half 0, half 1
    check(decode_nanodet(outputs, unscaled(), SMALL), [0.7], [1], [[8, 24, 56, 32]])


def test_shapes_decodes_known_boxes():
    raw = np.zeros((1, 3, 7), np.float32)
    raw[0, 1] = [20, 10, 8, 4, 0.0, 0.6, 0.0]
    raw[0, 2] = [20, 10, 8, 4, 0.0, 0.5, 0.0]
    check(decode_shapes({"boxes": raw}, unscaled(), SMALL), [0.6], [1], [[16, 8, 24, 12]])


def test_ultralytics_without_and_with_nms_in_the_graph():
    item, corners = prepared("ultralytics")
    raw = np.zeros((1, 84, 2100), np.float32)
    for cell, (score, index) in {7: (0.9, 3), 8: (0.8, 3), 9: (0.7, 79)}.items():  # cell 8 repeats cell 7
        raw[0, :4, cell] = centred(corners)
        raw[0, 4 + index, cell] = score
    raw[0, 4, 7] = 0.3  # cell 7 counts for a second class too
    check(decode_ultralytics({"output0": raw}, item, SIZE), [0.9, 0.7, 0.3], [3, 79, 0])
    check(decode_ultralytics({"output0": raw}, item, SIZE, score=0.5, nms=1.0), [0.9, 0.8, 0.7], [3, 3, 79])
    decoded = np.zeros((1, 300, 6), np.float32)
    decoded[0, :3] = [[*corners, 0.6, 5], [*corners, 0.9, 17], [*corners, 0.4, 5]]
    check(decode_ultralytics({"output0": decoded}, item, SIZE), [0.9, 0.6, 0.4], [17, 5, 5])


@pytest.mark.parametrize(
    ("classes", "names"),
    [
        (80, [("logits", "pred_boxes"), ("b", "a")]),
        (4, [("logits", "pred_boxes"), ("c", "pred_boxes"), ("logits", "b")]),
    ],
)
def test_rtdetr_with_logits_and_boxes(classes, names):
    item, corners = prepared("rtdetr")
    logits, boxes = np.full((1, 300, classes), -20.0, np.float32), np.zeros((1, 300, 4), np.float32)
    boxes[0, 11] = centred(corners) / np.tile([SIZE[1], SIZE[0]], 2)
    logits[0, 11, [1, 3]] = [0.0, np.log(9)]
    for first, second in names:
        check(decode_rtdetr({first: logits, second: boxes}, item, SIZE), [0.9, 0.5], [3, 1])
    outputs = {"logits": logits, "pred_boxes": boxes}
    check(decode_rtdetr(outputs, item, SIZE, top=1), [0.9], [3])
    logits[:] = 1e4  # what a broken model may give
    assert np.isfinite(decode_rtdetr(outputs, item, SIZE).scores).all()


def test_rtdetr_with_labels_boxes_and_scores():
    item, corners = prepared("rtdetr")
    labels, scores = np.zeros((1, 300), np.int64), np.zeros((1, 300), np.float32)
    boxes = np.zeros((1, 300, 4), np.float32)
    boxes[0, [3, 5]] = corners
    labels[0, [3, 5]], scores[0, [3, 5]] = [2, 7], [0.4, 0.8]
    check(decode_rtdetr({"labels": labels, "boxes": boxes, "scores": scores}, item, SIZE), [0.8, 0.4], [7, 2])


@pytest.mark.parametrize(
    ("decoder", "outputs", "message"),
    [
        (decode_yolox, {"a": (1, 7, 8)}, "'yolox' .* got 'a' of 1 x 7 x 8"),
        (decode_shapes, {"a": (1,), "b": (2, 3)}, "'shapes' .* got 'a' of 1, 'b' of 2 x 3"),
        (decode_nanodet, {"a": (1, 42, 85)}, "'nanodet' .* 1 x cells x 32"),
        (decode_ultralytics, {"a": (1, 4, 9)}, "got 'a' of 1 x 4"),
        (decode_ultralytics, {"a": (2, 84, 9)}, "got 'a' of 2 x 84 x 9"),
        (decode_ultralytics, {"a": (1, 84, 9), "b": (1,)}, "'b' of 1"),
        (decode_rtdetr, {"a": (1, 300, 80)}, "'rtdetr' .* got 'a' of 1 x 300 x 80"),
        (decode_rtdetr, {"a": (1, 300, 80), "b": (1, 9, 4)}, "'b' of 1 x 9 x 4"),
        (decode_rtdetr, {"a": (1, 300, 4), "b": (1, 300, 4)}, "by their names"),
        (decode_rtdetr, {"labels": (1, 3), "boxes": (1, 4, 4), "scores": (1, 3)}, "got 'labels' of 1 x 3"),
    ],
)
def test_unexpected_output_shapes_are_refused(decoder, outputs, message):
    with pytest.raises(EvaluationFailed, match=message):
        decoder({name: np.zeros(shape) for name, shape in outputs.items()}, prepared("rtdetr")[0], SIZE)


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
    nms = {"use": "ultralytics", "params": {"nms": 0.65}}  # that of the decoder of the zoo
    own, other = (registry.create_plugin("evaluator", "coco_map", {**params, "decode": d}) for d in ("shapes", nms))
    turned = other.score(lambda feeds: {name: a.transpose(0, 2, 1) for name, a in infer(feeds).items()}).metrics
    assert own.score(infer).metrics == pytest.approx(turned)
    assert turned["map"] > 0.7
