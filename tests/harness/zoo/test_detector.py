"""The trained detector: small, as laid out, right on the shapes, and hurt by plain INT8."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest

from harness.zoo.catalog import TRAINED_MODEL_PATH
from harness.zoo.shapes import CLASS_NAMES, IMAGE_SIZE_PX, draw_split

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


def blob(image: npt.NDArray[np.uint8]) -> Floats:
    return image.transpose(2, 0, 1)[None].astype(np.float32) / 255


def session(path: Path) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    engine = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda image: engine.run(["detections"], {"images": blob(image)})[0][0]


def test_detector_has_operators_sensitive_to_int8():
    operators = {node.op_type for node in onnx.load(TRAINED_MODEL_PATH).graph.node}
    assert {"Conv", "Sigmoid", "Mul", "Add", "Concat", "Resize", "Exp"} <= operators
    assert "BatchNormalization" not in operators
