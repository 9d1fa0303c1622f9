"""Decoders and preprocessings that do not fit are found before anything is calibrated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.compat.tao_specs.evaluate import evaluate
from harness.compat.tao_specs.spec import parse_spec
from harness.config.experiment import parse_experiment
from harness.errors import UserError
from harness.graph.builder import GraphBuilder
from harness.pipeline.runner import run_experiment
from harness.progress import NullProgress
from harness.task_setup.preflight import check_experiment

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


class Told(NullProgress):
    """Keeps the titles of what was worked on, and what was said."""

    def __init__(self) -> None:
        self.titles: list[str] = []
        self.said: list[str] = []

    def work(self, title: str, total: int) -> Any:
        self.titles.append(title)
        return super().work(title, total)

    def say(self, text: str) -> None:
        self.said.append(text)


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
    if fitting is None:  # a detector of 331 classes
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
def test_the_float_model_is_scored_on_a_few_samples_before_the_calibration(evaluator, words, tmp_path, monkeypatch):
    net(tmp_path, 1, 84, 85)
    monkeypatch.syspath_prepend(str(tmp_path))
    observer = Told()
    with pytest.raises(UserError, match=words):
        run_experiment(experiment(evaluator, tmp_path), out=tmp_path / "out", observer=observer)
    assert any("a few samples" in title for title in observer.titles)
    assert not any("calibrate" in title for title in observer.titles)


def test_zero_float_score_is_reported_before_calibration(tmp_path):
    net(tmp_path, 1, 84, 7)
    observer = Told()

    class Stop(Exception):
        pass

    def work(title: str, total: int) -> Any:
        if "calibrate" in title:
            raise Stop
        return NullProgress.work(observer, title, total)

    observer.work = work  # type: ignore[method-assign]
    with pytest.raises(Stop):
        run_experiment(experiment(MAP.replace("DECODE", "shapes"), tmp_path), out=tmp_path / "out", observer=observer)
    (said,) = [line for line in observer.said if "float model itself" in line]
    assert "want decode: yolox and preprocess: yolox" in said
