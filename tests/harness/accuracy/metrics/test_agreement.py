from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.accuracy.data.decode import Detections
from harness.accuracy.metrics.base import evaluator_params
from harness.accuracy.metrics.fidelity import FloatAgreement, matched_share
from harness.base.errors import EvaluationFailed, UserError
from harness.base.files import read_json
from harness.base.progress import NullProgress
from harness.graph.builder import GraphBuilder
from harness.insight.agreement_study import agreement_report
from harness.plugins import registry
from harness.plugins.api import Evaluator, NeedsPreparation
from harness.run.prepare.study_task import make_study

STUDY = """
experiment: small
models:
  - use: net.onnx
    calibration: {data: {use: npz, path: x.npz}, samples: 8}
    evaluator: {use: top1, params: {data: {use: npz, path: x.npz, labels: y.npy}}}
backends: [{use: onnxruntime, params: {optimization: disabled}}]
"""


def boxes(*rows: tuple[float, float, float, float, int]) -> Detections:
    table = np.array(rows, np.float64).reshape(-1, 5)
    return Detections(boxes=table[:, :4], scores=np.linspace(1, 0.5, len(table)), classes=table[:, 4].astype(np.int64))


def test_boxes_match_by_class_and_overlap():
    two = boxes((0, 0, 10, 10, 1), (20, 20, 40, 40, 2))
    assert matched_share(two, two) == 1.0
    assert matched_share(two, boxes((0, 0, 10, 9, 1), (20, 20, 40, 40, 1))) == 0.5, "one of another class"
    assert matched_share(two, boxes((0, 0, 10, 10, 1), (0, 0, 10, 9, 1))) == 0.5, "a box has one partner"
    assert matched_share(boxes(), boxes()) == 1.0
    assert matched_share(two, boxes()) == matched_share(boxes(), two) == 0.0


def open_agreement(tmp_path: Path, data: Any, **params: Any) -> Any:
    supplied = {"reference": tmp_path / "r.npz", "inputs": {"x": ("float", (1, 4))}, "base": tmp_path}
    return registry.create_plugin(
        "evaluator", "agreement", evaluator_params("agreement", {"data": data, **params}, supplied)
    )


def test_classifier_agreement_is_share_of_equal_classes(tmp_path):
    np.save(tmp_path / "x.npy", np.eye(4, dtype=np.float32)[[0, 1, 2, 3, 0]])
    evaluator = open_agreement(tmp_path, {"use": "npy", "path": "x.npy"})
    assert isinstance(evaluator, Evaluator)
    assert isinstance(evaluator, NeedsPreparation)
    with pytest.raises(EvaluationFailed, match="no outputs of the float model"):
        evaluator.score(lambda feeds: {"y": feeds["x"]})
    evaluator.prepare(lambda feeds: {"y": feeds["x"]})
    found = evaluator.score(lambda feeds: {"y": feeds["x"] + np.array([0, 2, 0, 0], np.float32)})
    assert (found.metrics, found.per_item) == ({"agreement": 0.2}, (0.0, 1.0, 0.0, 0.0, 0.0))
    with pytest.raises(UserError, match="images"):
        open_agreement(tmp_path, {"use": "npy", "path": "x.npy"}, decode="yolox")
    other = open_agreement(tmp_path, {"use": "npy", "path": "x.npy", "count": 3})
    with pytest.raises(EvaluationFailed, match="other inputs"):
        other.score(lambda feeds: {"y": feeds["x"]})


def test_agreement_refuses_feature_map_outputs(tmp_path):
    np.save(tmp_path / "x.npy", np.eye(4, dtype=np.float32))
    evaluator = open_agreement(tmp_path, {"use": "npy", "path": "x.npy"})
    with pytest.raises(EvaluationFailed, match=r"1x1x8x8 .*fidelity"):
        evaluator.prepare(lambda feeds: {"y": np.zeros((1, 1, 8, 8), np.float32)})


def test_detector_agreement_ignores_low_scores(tmp_path):
    def infer(score: float) -> Any:
        rows = np.array([[[64, 64, 20, 20, 0.9, 0, 0], [30, 30, 20, 20, 0, score, 0]]], np.float32)
        return lambda feeds: {"boxes": rows}

    evaluator = FloatAgreement(
        {"use": "shapes", "split": "evaluation", "count": 3}, tmp_path / "r.npz",
        {"images": ("float", (1, 3, 128, 128))}, "shapes", "shapes",
    )  # fmt: skip
    evaluator.prepare(infer(0.8))
    assert evaluator.score(infer(0.6)).metrics["agreement"] == 1.0
    assert evaluator.score(infer(0.1)).metrics["agreement"] == pytest.approx(2 / 3)


def test_agreement_study_ranks_placements_by_each_metric(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net, rng = GraphBuilder("net", seed=0), np.random.default_rng(0)
    x = net.op("Relu", net.conv(net.input("x", (1, 3, 8, 8)), 4, 3))
    net.output(net.op("GlobalAveragePool", net.conv(x, 4, 1)), name="y")
    net.save(tmp_path / "net.onnx")
    np.savez(tmp_path / "x.npz", x=rng.normal(size=(30, 1, 3, 8, 8)).astype(np.float32))
    np.save(tmp_path / "y.npy", rng.integers(0, 4, 30))
    (tmp_path / "study.yaml").write_text(STUDY)
    header, rows, notes = agreement_report(make_study("study.yaml"), 4, 24, tmp_path / "out", NullProgress())
    facts = read_json(tmp_path / "out" / "agreement.json")
    assert [row[0] for row in rows] == ["agreement", "sqnr_db"]
    assert len(header) == len(rows[0])
    assert "4 random placements" in notes[0]
    assert facts["float"]["agreement"] == 1.0
    assert all(set(each) == {"top1", "agreement", "sqnr_db"} for each in facts["placements"])
