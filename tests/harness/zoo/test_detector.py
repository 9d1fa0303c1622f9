"""The trained detector: small, as laid out, right on the shapes, and hurt by plain INT8."""

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from harness.zoo.catalog import TRAINED_MODEL_PATH
from harness.zoo.shapes import CLASS_NAMES, IMAGE_SIZE_PX, ShapesSplit, draw_split

Floats = npt.NDArray[np.float32]
FEWEST = 0.01
OVERLAP = 0.65


def test_the_committed_file_is_below_one_megabyte():
    assert TRAINED_MODEL_PATH.stat().st_size < 1_000_000
    assert len(list(TRAINED_MODEL_PATH.parent.glob("*.onnx"))) == 1


def test_output_rows_are_cells_with_boxes_and_scores():
    infer = session(TRAINED_MODEL_PATH)
    centres = [((np.arange(side * side) % side + 0.5) * stride, (np.arange(side * side) // side + 0.5) * stride)
               for side, stride in ((16, 8), (8, 16))]  # fmt: skip
    x, y = (np.concatenate([centre[axis] for centre in centres]) for axis in (0, 1))
    for image in draw_split("evaluation", 10).images:
        found = infer(image)
        assert found.shape == (320, 4 + len(CLASS_NAMES))
        assert found[:, 4:].min() >= 0
        assert found[:, 4:].max() <= 1
        sure = found[:, 4:].max(1) > 0.5
        assert sure.any()
        assert np.abs(found[sure, 0] - x[sure]).max() < 40
        assert np.abs(found[sure, 1] - y[sure]).max() < 40
        assert found[sure, 2:4].min() > 8
        assert found[sure, 2:4].max() < IMAGE_SIZE_PX


def test_openvino_agrees_with_onnx_runtime():
    openvino = pytest.importorskip("openvino")
    compiled = openvino.Core().compile_model(str(TRAINED_MODEL_PATH), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    image = draw_split("evaluation", 1).images[0]
    np.testing.assert_allclose(compiled(blob(image))[0][0], session(TRAINED_MODEL_PATH)(image), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_float_detector_is_accurate_and_plain_int8_loses_map(tmp_path):
    shapes = draw_split("evaluation", 60)
    path = tmp_path / "int8.onnx"
    quantize_static(
        TRAINED_MODEL_PATH, path, Calibration(draw_split("calibration", 16)), quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QInt8, weight_type=QuantType.QInt8,
        extra_options={"ActivationSymmetric": True, "WeightSymmetric": True},
    )  # fmt: skip
    exact, plain = mean_average_precision(TRAINED_MODEL_PATH, shapes), mean_average_precision(path, shapes)
    assert exact > 0.8
    assert plain < exact - 0.03


class Calibration(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, shapes: ShapesSplit) -> None:
        self.images: Iterator[npt.NDArray[np.uint8]] = iter(shapes.images)

    def get_next(self) -> dict[str, Floats] | None:
        image = next(self.images, None)
        return None if image is None else {"images": blob(image)}


def blob(image: npt.NDArray[np.uint8]) -> Floats:
    return image.transpose(2, 0, 1)[None].astype(np.float32) / 255


def session(path: Path) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    engine = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda image: engine.run(["detections"], {"images": blob(image)})[0][0]


def mean_average_precision(path: Path, shapes: ShapesSplit) -> float:
    """COCO's mAP, with a decoder written apart from the one in harness.accuracy."""
    infer, found = session(path), []
    for index, image in enumerate(shapes.images):
        rows = infer(image)
        corners = np.concatenate([rows[:, :2] - rows[:, 2:4] / 2, rows[:, 2:4]], 1)
        for category in range(len(CLASS_NAMES)):
            for kept in suppress(corners, rows[:, 4 + category]):
                found.append([index + 1, *corners[kept], rows[kept, 4 + category], category + 1])
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = shapes.coco
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(np.array(found)), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return float(evaluation.stats[0])


def suppress(boxes: Floats, scores: Floats) -> list[int]:
    """Indices of boxes (left, top, width, height) that no better one overlaps by more than OVERLAP."""
    left = [index for index in np.argsort(-scores, kind="stable") if scores[index] > FEWEST]
    kept: list[int] = []
    while left:
        best, *left = left
        kept.append(best)
        low = np.maximum(boxes[best, :2], boxes[left, :2])
        high = np.minimum(boxes[best, :2] + boxes[best, 2:], boxes[left, :2] + boxes[left, 2:])
        shared = np.clip(high - low, 0, None).prod(1)
        union = boxes[best, 2:].prod() + boxes[left, 2:].prod(1) - shared
        left = [index for index, overlap in zip(left, shared / union, strict=True) if overlap <= OVERLAP]
    return kept


def test_detector_has_operators_sensitive_to_int8():
    operators = {node.op_type for node in onnx.load(TRAINED_MODEL_PATH).graph.node}
    assert {"Conv", "Sigmoid", "Mul", "Add", "Concat", "Resize", "Exp"} <= operators
    assert "BatchNormalization" not in operators
