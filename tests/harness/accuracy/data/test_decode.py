import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.accuracy.data import decode
from harness.accuracy.data.decode import box_iou, decode_nanodet, decode_shapes, decode_yolox, suppress_overlaps
from harness.accuracy.data.preprocess import Prepared
from harness.base.errors import EvaluationFailed

SIZE = (32, 64)  # cells: 4 x 8, 2 x 4, 1 x 2
CELLS = 32 + 8 + 2


def prepared(scale: float = 1.0, offset: tuple[float, float] = (0.0, 0.0)) -> Prepared:
    return Prepared(tensor=np.zeros((3, *SIZE), np.float32), scale=scale, offset=offset, original=(320, 640))


def test_box_iou_of_known_boxes():
    a = np.array([[0.0, 0, 2, 2], [5, 5, 5, 9]])
    b = np.array([[1.0, 0, 3, 2], [0, 0, 2, 2], [10, 10, 11, 11], [5, 5, 5, 9]])
    assert box_iou(a, b) == pytest.approx(np.array([[1 / 3, 1, 0, 0], [0, 0, 0, 0]]))


def test_suppress_overlaps_of_known_boxes():
    boxes = np.array([[0.0, 0, 10, 10], [1, 0, 11, 10], [0, 0, 10, 10], [20, 20, 30, 30], [2, 0, 12, 10]])
    scores = np.array([0.8, 0.9, 0.7, 0.1, 0.6])
    classes = np.array([0, 0, 1, 0, 0])
    # 1 beats 0 (IoU 9/11) and 4 (9/11); 2 is of another class.
    assert suppress_overlaps(boxes, scores, classes, 0.65).tolist() == [1, 2, 3]
    # 4 overlaps 0 by 8/12 only, and 1 by 9/11.
    assert suppress_overlaps(boxes, scores, classes, 0.85).tolist() == [1, 0, 2, 4, 3]
    assert suppress_overlaps(boxes, scores, classes, 0.65, top=2).tolist() == [1, 2]
    assert suppress_overlaps(boxes[:0], scores[:0], classes[:0], 0.65).tolist() == []


def test_a_dropped_box_drops_no_others():
    boxes = np.array([[0.0, 0, 10, 10], [4, 0, 14, 10], [8, 0, 18, 10]])  # each overlaps the next by 6/14
    assert suppress_overlaps(boxes, np.array([0.9, 0.8, 0.7]), np.zeros(3, np.int64), 0.4).tolist() == [0, 2]


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 300), top=st.integers(1, 120))
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
    found = decode_yolox({"output": raw}, prepared(), SIZE)
    assert found.scores == pytest.approx([0.9, 0.4, 0.2])
    assert found.classes.tolist() == [1, 0, 1]
    # Centres: (32, 16) of 32 x 32; (20, 10) of 16 x 8.
    assert found.boxes == pytest.approx(np.array([[16, 0, 48, 32], [12, 6, 28, 14], [12, 6, 28, 14]]), abs=1e-4)


def test_boxes_are_in_pixels_of_the_image():
    raw = np.zeros((1, CELLS, 6), np.float32)
    raw[0, 32 + 8 + 1] = [0.0, 0.5, 0.0, 0.0, 1.0, 0.9]
    found = decode_yolox({"output": raw}, prepared(scale=0.5, offset=(4.0, 2.0)), SIZE)
    assert found.boxes == pytest.approx(np.array([[24, 0, 88, 60]]))


def test_huge_boxes_stay_finite():
    raw = np.full((1, CELLS, 6), 1e30, np.float32)
    raw[..., 4:] = 0.9
    found = decode_yolox({"output": raw}, prepared(), SIZE)
    assert np.isfinite(found.boxes).all()


def nanodet_outputs() -> dict[str, np.ndarray]:
    outputs = {}
    for stride, cells in ((32, 2), (8, 32), (16, 8)):
        outputs[f"dis_{stride}"] = np.zeros((1, cells, 32), np.float32)
        outputs[f"cls_{stride}"] = np.zeros((1, cells, 3), np.float32)
    return outputs


def test_nanodet_decodes_known_boxes():
    outputs = nanodet_outputs()
    outputs["cls_16"][0, 4 + 1] = [0.0, 0.7, 0.02]  # row 1, column 1: centre (24, 24)
    sides = outputs["dis_16"].reshape(1, 8, 4, 8)
    for side, distance in enumerate((1, 0, 2, 0)):
        sides[0, 5, side, distance] = 100.0  # the distribution is one spike
    sides[0, 5, 3] = [100, 100, 0, 0, 0, 0, 0, 0]  # half 0, half 1
    found = decode_nanodet(outputs, prepared(), SIZE)
    assert found.classes.tolist() == [1]
    assert found.scores == pytest.approx([0.7])
    assert found.boxes == pytest.approx(np.array([[8, 24, 56, 32]]))


def test_shapes_decodes_known_boxes():
    raw = np.zeros((1, 3, 7), np.float32)
    raw[0, 1] = [20, 10, 8, 4, 0.0, 0.6, 0.0]
    raw[0, 2] = [20, 10, 8, 4, 0.0, 0.5, 0.0]
    found = decode_shapes({"boxes": raw}, prepared(), SIZE)
    assert found.boxes.tolist() == [[16, 8, 24, 12]]
    assert found.scores == pytest.approx([0.6])
    assert found.classes.tolist() == [1]


def test_unexpected_output_shapes_are_refused():
    with pytest.raises(EvaluationFailed, match=r"'yolox' wants one output of 1 x 42 x .* but got 'a' of 1 x 7 x 8"):
        decode_yolox({"a": np.zeros((1, 7, 8))}, prepared(), SIZE)
    with pytest.raises(EvaluationFailed, match=r"'shapes' wants one output .* but got 'a' of 1, 'b' of 2 x 3"):
        decode_shapes({"a": np.zeros(1), "b": np.zeros((2, 3))}, prepared(), SIZE)
    with pytest.raises(EvaluationFailed, match=r"'nanodet' wants for each stride .* 1 x cells x 32, 42 cells"):
        decode_nanodet({"a": np.zeros((1, 42, 85))}, prepared(), SIZE)
