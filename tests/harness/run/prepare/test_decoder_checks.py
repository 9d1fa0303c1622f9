"""Decoders and preprocessings that do not fit are found before anything is calibrated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.base.errors import UserError
from harness.compat.tao_specs.evaluate import evaluate
from harness.compat.tao_specs.spec import parse_spec
from harness.config.experiment import parse_experiment
from harness.graph.builder import GraphBuilder
from harness.run.prepare.preflight import check_experiment

EXPERIMENT = """
experiment: fit
models:
  - use: net.onnx
    preprocess: {use: PREPROCESS}
    calibration: {data: {use: shapes, split: calibration, count: 2}}
    evaluator: EVALUATOR
backends: [onnxruntime]
searchers: [random]
budget: {evaluations: [9]}
"""
PLUGINS = """
import numpy as np
from harness.accuracy.data.preprocess import Prepared

class Half:
    '''Half of the height: only the evaluator's images go through it.'''

    def prepare(self, image, size):
        tensor = np.zeros((3, size[0] // 2, size[1]), np.float32)
        return Prepared(tensor=tensor, scale=1.0, offset=(0.0, 0.0), original=image.shape[:2])

class Strange:
    metric, higher_is_better = "strange", True

    def __init__(self, data):
        pass

    def score(self, infer):
        outputs = infer({"x": np.zeros((1, 3, 64, 64), np.float32)})
        return outputs["no such output"]
"""
MAP = "{use: coco_map, params: {data: {use: shapes, split: evaluation, count: 12}, decode: DECODE}}"


def net(folder: Path, *shape: int) -> Path:
    """A model that gives an output of this shape for images of 64 x 64 pixels: 84 cells."""
    b = GraphBuilder("net", seed=1)
    x = b.input("x", (1, 3, 64, 64))
    x = b.op("Flatten", b.op("GlobalAveragePool", b.op("Relu", b.conv(x, 4, 3))))
    b.output(b.op("Reshape", b.gemm(x, int(np.prod(shape))), b.const(np.array(shape))), name="output0")
    (folder / "fitting_plugins.py").write_text(PLUGINS)
    return b.save(folder / "net.onnx")


def experiment(evaluator: str, folder: Path, preprocess: str = "ultralytics") -> Any:
    text = EXPERIMENT.replace("EVALUATOR", evaluator).replace("PREPROCESS", preprocess)
    return parse_experiment(text, "fit.yaml", folder)


@pytest.mark.parametrize(
    ("shape", "decode", "found", "fitting"),
    [
        ((1, 84, 85), "ultralytics", "1 x 84 x 85", "yolox"),
        ((1, 300, 6), "yolox", "1 x 300 x 6", "ultralytics"),
        ((1, 116, 84), "yolox", "1 x 116 x 84", "ultralytics"),
        ((1, 84, 336), "yolox", "1 x 84 x 336", None),
        ((1, 20, 84), "nanodet", "1 x 20 x 84", "ultralytics"),
        ((1, 300, 6), "rtdetr", "1 x 300 x 6", "ultralytics"),
    ],
)
def test_decoder_must_match_output_shapes(shape, decode, found, fitting, tmp_path):
    net(tmp_path, *shape)
    config = experiment(MAP.replace("DECODE", decode), tmp_path)
    if fitting is None:  # a detector of 331 classes, which the decoder accepts
        with pytest.raises(UserError, match="finds class 330, but the labels have 3 categories"):
            check_experiment(config)
        return
    with pytest.raises(UserError, match=f"decode: .*{decode}.*{found}; decode: {fitting} fits"):
        check_experiment(config)
    spec = f"""
evaluate: {{onnx_file: net.onnx, decode: {decode}, evaluator: {{use: coco_map, params: {{data: {{use: shapes, split: evaluation, count: 2}}}}}}}}
dataset: {{test_data_sources: {{image_dir: ., json_file: net.onnx}}, preprocess: ultralytics}}
"""  # noqa: E501
    with pytest.raises(UserError, match=f"decode: .*{found}; decode: {fitting} fits"):
        evaluate(parse_spec(spec, "spec.yaml"), tmp_path / "spec.yaml")


@pytest.mark.parametrize(
    ("evaluator", "words"),
    [
        (MAP.replace("DECODE", "yolox, preprocess: 'fitting_plugins:Half'"), r"preprocess gives float32 \(3, 32, 64\)"),
        (
            "{use: 'fitting_plugins:Strange', params: {data: {use: shapes, split: evaluation, count: 4}}}",
            "KeyError: 'no such output'",
        ),
    ],
)
def test_the_check_scores_the_float_model_on_a_few_samples(evaluator, words, tmp_path, monkeypatch):
    net(tmp_path, 1, 84, 85)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=words):
        check_experiment(experiment(evaluator, tmp_path))


def test_zero_float_score_fails_the_check(tmp_path):
    net(tmp_path, 1, 84, 7)
    with pytest.raises(UserError, match="mAP 0 on 12 of 12 samples") as caught:
        check_experiment(experiment(MAP.replace("DECODE", "shapes"), tmp_path))
    assert "want decode: yolox and preprocess: yolox" in str(caught.value)
    assert "expect" in str(caught.value)
