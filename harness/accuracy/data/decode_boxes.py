"""Decoders of detectors whose graph already decodes boxes, and the choice of a decoder by the shapes of outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from harness.accuracy.data.decode import Detections, Floats, format_output_shapes, select_boxes
from harness.accuracy.data.preprocess import Prepared, Size
from harness.base.errors import EvaluationFailed
from harness.plugins.api import Array

STRIDES = (8, 16, 32)


def suggest_decoder(outputs: Mapping[str, Sequence[int | None]], size: tuple[int, int]) -> str | None:
    """Return the name of the decoder and of its preprocessing, or None if the shapes fit none or several.

    Args:
        outputs: Shape of each output, with the batch axis first.
        size: Height and width of the model's input.
    """
    shapes = [tuple(each or 0 for each in dims) for dims in outputs.values()]
    if {"labels", "boxes", "scores"} <= outputs.keys():
        return "rtdetr"
    if len(shapes) == 2 and all(len(shape) == 3 for shape in shapes):
        (_, queries, width), (_, others, second) = sorted(shapes, key=lambda shape: shape[2] != 4)
        return "rtdetr" if queries == others and width == 4 and second != 4 else None
    cells = count_cells(size)
    if len(shapes) == 2 * len(STRIDES) and all(len(shape) == 3 for shape in shapes):
        return "nanodet" if sum(shape[1] for shape in shapes) == 2 * cells else None
    if len(shapes) != 1 or len(shapes[0]) != 3:
        return None
    _, rows, columns = shapes[0]
    if rows == cells and columns > 5:
        return "yolox"
    return "ultralytics" if columns == 6 or (rows > 4 and (columns == cells or rows < columns)) else None


def count_cells(size: tuple[int, int]) -> int:
    """Return the number of cells of a detector with strides 8, 16 and 32 for an input of this height and width."""
    return sum(-(-size[0] // stride) * -(-size[1] // stride) for stride in STRIDES)


DECODED_COLUMNS = 6  # left, top, right, bottom, score, class
MAX_BOXES = 300  # number of boxes per image that both projects keep
LOGITS, BOXES = "logits", "pred_boxes"  # names of RT-DETR's outputs when Hugging Face exports it


def decode_ultralytics(
    outputs: Mapping[str, Array], prepared: Prepared, size: Size, score: float = 0.001, nms: float = 0.7
) -> Detections:
    """Decode YOLOv8, YOLO11 and similar models as Ultralytics exports them, without or with NMS in the graph.

    https://github.com/ultralytics/ultralytics, `ultralytics/utils/nms.py:non_max_suppression` and
    `ultralytics/engine/exporter.py:NMSModel`; thresholds are those of its validation.

    Args:
        outputs: One output. Without NMS 1 x (4 + classes) x cells: centre x, centre y, width, height in input pixels,
            then the classes' probabilities. With NMS 1 x boxes x 6: left, top, right, bottom in input pixels, score,
            class; unused rows have score 0.
        size: Height and width of the model's input, which determine the number of cells.
        score: Score above which a box counts.
        nms: Overlap (IoU) above which a box of the same class is dropped; no effect if the graph has NMS.

    Raises:
        EvaluationFailed: The output has another shape.
    """
    array = next(iter(outputs.values())) if len(outputs) == 1 else np.zeros(0)
    cells = count_cells(size)
    turned = array.ndim == 3 and array.shape[1] == cells != array.shape[2] != DECODED_COLUMNS
    if array.ndim != 3 or len(array) != 1 or (array.shape[1] < 5 and array.shape[2] != DECODED_COLUMNS) or turned:
        raise EvaluationFailed(
            "decoder 'ultralytics' wants one output of 1 x (4 + classes) x cells, or of 1 x boxes x 6 where NMS is in "
            f"the graph, but got {format_output_shapes(outputs)}"
        )
    values: Floats = array[0].astype(np.float64)
    if array.shape[2] == DECODED_COLUMNS:
        return _sort_decoded_boxes(prepared.to_image(values[:, :4]), values[:, 4], values[:, 5], score)
    values = values.T
    return select_boxes(prepared.to_image(_center_to_corners(values[:, :4])), values[:, 4:], score, nms, MAX_BOXES)


def decode_rtdetr(
    outputs: Mapping[str, Array], prepared: Prepared, size: Size, score: float = 0.001, top: int = MAX_BOXES
) -> Detections:
    """Decode RT-DETR, whose queries need no suppression (Zhao et al. 2023, arXiv:2304.08069).

    Args:
        outputs: Either two: 1 x queries x classes logits, and 1 x queries x 4 boxes as centre x, centre y, width,
            height in shares of the input (as Hugging Face exports it; several classes of one query may count, as in
            `RTDetrImageProcessor.post_process_object_detection`). Or three, called labels, boxes and scores: classes,
            left, top, right, bottom in input pixels, and scores of 1 x boxes (as github.com/lyuwenyu/RT-DETR exports
            it, where `orig_target_sizes` was made a constant, the input's size).
        size: Height and width of the model's input.
        score: Score above which a box counts.
        top: Number of boxes to keep.

    Raises:
        EvaluationFailed: The outputs have other shapes, or there are 4 classes and other names than those of Hugging
            Face.
    """
    if {"labels", "boxes", "scores"} <= outputs.keys():
        labels, boxes, scores = (outputs[name] for name in ("labels", "boxes", "scores"))
        if boxes.ndim == 3 and boxes.shape[::2] == (1, 4) and labels.shape == scores.shape == boxes.shape[:2]:
            return _sort_decoded_boxes(prepared.to_image(boxes[0]), scores[0], labels[0], score)
    relative, logits = (array[0].astype(np.float64) for array in _boxes_and_logits(outputs))
    chances = 0.5 * (1 + np.tanh(logits / 2))  # the logistic function in a form that cannot overflow
    queries, classes = np.divmod(np.argsort(-chances, axis=None, kind="stable")[:top], chances.shape[1])
    boxes = _center_to_corners(relative) * np.tile([size[1], size[0]], 2)
    return _sort_decoded_boxes(prepared.to_image(boxes)[queries], chances[queries, classes], classes, score)


def _boxes_and_logits(outputs: Mapping[str, Array]) -> tuple[Array, Array]:
    """Return boxes and logits of two outputs: boxes have 4 columns; names decide if logits have 4 columns as well.

    Raises:
        EvaluationFailed: The outputs have other shapes or cannot be distinguished.
    """
    narrow = [name for name, array in outputs.items() if array.ndim == 3 and array.shape[2] == 4]
    called = [name for name in narrow if name == BOXES or (LOGITS in narrow and name != LOGITS)]
    boxes = next(iter(narrow if len(narrow) == 1 else called), None)
    shapes = {array.shape[:-1] for array in outputs.values()}
    if boxes is None or len(outputs) != 2 or shapes != {(1, outputs[boxes].shape[1])}:
        raise EvaluationFailed(
            "decoder 'rtdetr' wants logits of 1 x queries x classes and boxes of 1 x queries x 4 (with 4 classes these "
            f"are distinguished by their names, {LOGITS} and {BOXES}), or outputs called labels, boxes and scores, "
            f"but got {format_output_shapes(outputs)}"
        )
    (logits,) = (array for name, array in outputs.items() if name != boxes)
    return outputs[boxes], logits


def _center_to_corners(values: Floats) -> Floats:
    """Convert centre x, centre y, width, height to left, top, right, bottom."""
    half = values[:, 2:4] / 2
    corners: Floats = np.concatenate([values[:, :2] - half, values[:, :2] + half], axis=1)
    return corners


def _sort_decoded_boxes(boxes: Floats, scores: Array, classes: Array, score: float) -> Detections:
    """Return decoded boxes above the score threshold, best first."""
    order = np.argsort(-scores, kind="stable")
    kept = order[scores[order] > score]
    return Detections(
        boxes=boxes[kept], scores=scores[kept].astype(np.float64), classes=np.rint(classes[kept]).astype(np.int64)
    )
