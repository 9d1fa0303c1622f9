"""Decoders that convert the raw outputs of a detector to boxes, and non-maximum suppression.

A custom decoder is a function `(outputs, prepared, size, **params) -> Detections`, registered under `qdq.decoders` or
named as `package.module:function`. It receives the outputs of one image, batch axis included, and returns boxes in
pixels of the original image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from harness.accuracy.data.preprocess import Prepared, Size
from harness.base.errors import EvaluationFailed
from harness.plugins.api import Array

STRIDES = (8, 16, 32)
MAX_DETECTIONS = 100  # number of boxes per image that COCO's metric counts
MAX_LOG_SIZE = 50.0  # its exponential is finite and larger than any image
NMS_BLOCK_BOXES = 64  # candidates compared at a time; 100 boxes are mostly found among the first few hundred
MAX_CANDIDATES = 10_000  # limits the time for a broken model, all of whose boxes overlap
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Detections:
    """Detections on one image, best first.

    Attributes:
        boxes: Shape (n, 4): left, top, right, bottom in pixels of the image.
        scores: Shape (n,), 0 to 1.
        classes: Shape (n,), class indices from 0 in the order of the model's outputs.
    """

    boxes: Floats
    scores: Floats
    classes: Integers


class DetectionDecoder(Protocol):
    """Function from a detector's outputs to boxes; an experiment sets its further parameters."""

    def __call__(self, outputs: Mapping[str, Array], prepared: Prepared, size: Size) -> Detections:
        """Return the boxes of one image, in its pixels (`prepared.to_image`); `size` is the input's (height, width).

        Raises:
            EvaluationFailed: An output has another shape than the decoder expects, or is missing.
        """
        ...


def decode_yolox(
    outputs: Mapping[str, Array], prepared: Prepared, size: Size, score: float = 0.001, nms: float = 0.65
) -> Detections:
    """Decode YOLOX as exported without its decoding step, strides 8, 16, 32.

    Ge et al. 2021, arXiv:2107.08430; `yolox/utils/demo_utils.py:demo_postprocess` of its repository.

    Args:
        outputs: One output, 1 x cells x (centre x, centre y, log width, log height, objectness, one probability per
            class).
        size: Height and width of the model's input.
        score: Score (objectness x class) above which a box counts.
        nms: Overlap (IoU) above which a box of the same class is dropped.

    Raises:
        EvaluationFailed: The output has another shape.
    """
    cells, strides = _cell_grid(size)
    values = _single_output(outputs, "yolox", len(cells))
    centre = (values[:, :2] + cells) * strides
    half = np.exp(np.minimum(values[:, 2:4], MAX_LOG_SIZE)) * strides / 2
    boxes = np.concatenate([centre - half, centre + half], axis=1)
    return select_boxes(prepared.to_image(boxes), values[:, 4:5] * values[:, 5:], score, nms)


def decode_nanodet(
    outputs: Mapping[str, Array], prepared: Prepared, size: Size, score: float = 0.025, nms: float = 0.6, bins: int = 8
) -> Detections:
    """Decode NanoDet: class probabilities, and for each side of a box a distribution of its distance from the cell.

    Generalized Focal Loss, Li et al. 2020, arXiv:2006.04388, equation 3; strides 8, 16, 32.

    Args:
        outputs: For each stride 1 x cells x classes and 1 x cells x (4 x bins), in any order.
        size: Height and width of the model's input.
        score: Score above which a box counts.
        nms: Overlap (IoU) above which a box of the same class is dropped.
        bins: Number of bins of a distribution, reg_max + 1.

    Raises:
        EvaluationFailed: The outputs have other shapes.
    """
    cells, strides = _cell_grid(size)
    per_level = sorted((a for a in outputs.values() if a.ndim == 3), key=lambda a: -a.shape[1])  # the finest first
    scores, sides = ([a[0] for a in per_level if (a.shape[2] == 4 * bins) is wanted] for wanted in (False, True))
    counts = {sum(map(len, part)) for part in (scores, sides)}
    if not len(scores) == len(sides) == len(STRIDES) or counts != {len(cells)}:
        raise EvaluationFailed(
            f"decoder 'nanodet' wants for each stride of {STRIDES} an output 1 x cells x classes and one "
            f"1 x cells x {4 * bins}, {len(cells)} cells in all, but got {format_output_shapes(outputs)}"
        )
    terms = np.concatenate(sides).astype(np.float64).reshape(len(cells), 4, bins)
    chance = np.exp(terms - terms.max(axis=2, keepdims=True))
    distance = (chance @ np.arange(bins)) / chance.sum(axis=2) * strides
    centre = (cells + 0.5) * strides
    boxes = np.concatenate([centre - distance[:, :2], centre + distance[:, 2:]], axis=1)
    return select_boxes(prepared.to_image(boxes), np.concatenate(scores).astype(np.float64), score, nms)


def decode_shapes(
    outputs: Mapping[str, Array], prepared: Prepared, size: Size, score: float = 0.001, nms: float = 0.65
) -> Detections:
    """Decode the zoo's detector: boxes decoded in the graph, in input pixels (layout: `harness.zoo.catalog`).

    Args:
        outputs: One output, 1 x cells x (centre x, centre y, width, height, one score per class).
        size: Height and width of the model's input; no effect.
        score: Score above which a box counts.
        nms: Overlap (IoU) above which a box of the same class is dropped.

    Raises:
        EvaluationFailed: The output has another shape.
    """
    values = _single_output(outputs, "shapes")
    return select_boxes(prepared.to_image(_center_to_corners(values)), values[:, 4:], score, nms)


def box_iou(a: Floats, b: Floats) -> Floats:
    """Return intersection over union of n boxes with m boxes, shape (n, m); 0 for boxes without area."""
    return _pairwise_iou(a[:, None], b[None])


def _pairwise_iou(a: Floats, b: Floats) -> Floats:
    """Return the IoU of pairs of boxes; the leading axes are broadcast."""
    width = np.minimum(a[..., 2], b[..., 2]) - np.maximum(a[..., 0], b[..., 0])
    height = np.minimum(a[..., 3], b[..., 3]) - np.maximum(a[..., 1], b[..., 1])
    shared = np.maximum(width, 0.0) * np.maximum(height, 0.0)
    first, second = ((x[..., 2] - x[..., 0]).clip(0.0) * (x[..., 3] - x[..., 1]).clip(0.0) for x in (a, b))
    union = first + second - shared
    shares: Floats = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
    return shares


def suppress_overlaps(
    boxes: Floats, scores: Floats, classes: Integers, threshold: float, top: int = MAX_DETECTIONS
) -> Integers:
    """Select boxes by greedy non-maximum suppression within each class.

    Boxes are taken best first (ties: in the order given) unless one already taken, of the same class, overlaps them by
    more than the threshold. Boxes beyond the best MAX_CANDIDATES are ignored.

    Args:
        boxes: Left, top, right and bottom, shape (n, 4).
        scores: Scores, shape (n,).
        classes: Class indices, shape (n,).
        threshold: Largest intersection over union of two boxes of a class.
        top: Largest number of boxes over all classes.

    Returns:
        Indices of the boxes taken, best first.
    """
    order = np.argsort(-scores, kind="stable")[:MAX_CANDIDATES]
    taken = np.zeros(0, np.int64)
    for start in range(0, len(order), NMS_BLOCK_BOXES):
        if len(taken) >= top:
            break
        block = order[start : start + NMS_BLOCK_BOXES]
        alive: npt.NDArray[np.bool_] = ~np.any(_overlapping_same_class(boxes, classes, block, taken, threshold), axis=1)
        weaker = np.triu(_overlapping_same_class(boxes, classes, block, block, threshold), k=1)
        for i in np.flatnonzero(weaker.any(axis=1)):
            if alive[i]:
                alive &= ~weaker[i]
        taken = np.concatenate([taken, block[alive]])
    return taken[:top]


def _overlapping_same_class(
    boxes: Floats, classes: Integers, a: Integers, b: Integers, threshold: float
) -> npt.NDArray[np.bool_]:
    overlap: npt.NDArray[np.bool_] = classes[a][:, None] == classes[b][None]
    rows, columns = np.nonzero(overlap)  # usually few pairs have the same class
    overlap[rows, columns] = _pairwise_iou(boxes[a[rows]], boxes[b[columns]]) > threshold
    return overlap


def select_boxes(boxes: Floats, scores: Floats, score: float, nms: float, top: int = MAX_DETECTIONS) -> Detections:
    """Return the boxes with a sufficient score after non-maximum suppression; each class of a cell is a candidate.

    Args:
        boxes: Corners, shape (cells, 4), in pixels of the image.
        scores: Shape (cells, classes).
        score: Score above which a box counts.
        nms: Overlap (IoU) above which a box of the same class is dropped.
        top: Largest number of boxes to return.
    """
    cells, classes = np.nonzero(scores > score)
    found = scores[cells, classes]
    kept = suppress_overlaps(boxes[cells], found, classes, nms, top)
    return Detections(boxes=boxes[cells[kept]], scores=found[kept], classes=classes[kept])


def _cell_grid(size: Size) -> tuple[Floats, Floats]:
    """Return column and row of each cell, shape (n, 2), and its stride, shape (n, 1), sorted by stride and row."""
    cells, strides = [], []
    for stride in STRIDES:
        rows, columns = np.mgrid[: -(-size[0] // stride), : -(-size[1] // stride)]
        cells.append(np.stack([columns, rows], axis=-1).reshape(-1, 2).astype(np.float64))
        strides.append(np.full((len(cells[-1]), 1), float(stride)))
    return np.concatenate(cells), np.concatenate(strides)


def _single_output(outputs: Mapping[str, Array], decoder: str, cells: int | None = None) -> Floats:
    """Return the only output without its batch axis.

    Raises:
        EvaluationFailed: There are several outputs, or the shape is not 1 x `cells` x (5 or more).
    """
    array = next(iter(outputs.values())) if len(outputs) == 1 else np.zeros(0)
    if array.ndim != 3 or len(array) != 1 or array.shape[2] < 5 or array.shape[1] != (cells or array.shape[1]):
        raise EvaluationFailed(
            f"decoder {decoder!r} wants one output of 1 x {cells or 'cells'} x (box and class terms), "
            f"but got {format_output_shapes(outputs)}"
        )
    values: Floats = array[0].astype(np.float64)
    return values


def format_output_shapes(outputs: Mapping[str, Array]) -> str:
    """Return name and shape of each output, for messages."""
    return ", ".join(f"{name!r} of {' x '.join(map(str, array.shape))}" for name, array in outputs.items())


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
    return select_boxes(prepared.to_image(_center_to_corners(values)), values[:, 4:], score, nms, MAX_BOXES)


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
    # Boxes have 4 columns; names decide if logits have 4 columns as well.
    narrow = [name for name, array in outputs.items() if array.ndim == 3 and array.shape[2] == 4]
    called = [name for name in narrow if name == BOXES or (LOGITS in narrow and name != LOGITS)]
    name = next(iter(narrow if len(narrow) == 1 else called), None)
    shapes = {array.shape[:-1] for array in outputs.values()}
    if name is None or len(outputs) != 2 or shapes != {(1, outputs[name].shape[1])}:
        raise EvaluationFailed(
            "decoder 'rtdetr' wants logits of 1 x queries x classes and boxes of 1 x queries x 4 (with 4 classes these "
            f"are distinguished by their names, {LOGITS} and {BOXES}), or outputs called labels, boxes and scores, "
            f"but got {format_output_shapes(outputs)}"
        )
    relative = outputs[name][0].astype(np.float64)
    (logits,) = (array[0].astype(np.float64) for other, array in outputs.items() if other != name)
    chances = 0.5 * (1 + np.tanh(logits / 2))  # the logistic function in a form that cannot overflow
    queries, classes = np.divmod(np.argsort(-chances, axis=None, kind="stable")[:top], chances.shape[1])
    boxes = _center_to_corners(relative) * np.tile([size[1], size[0]], 2)
    return _sort_decoded_boxes(prepared.to_image(boxes)[queries], chances[queries, classes], classes, score)


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
