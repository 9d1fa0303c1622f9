"""Comparison with the float model: signal to noise, cosine and divergence of outputs, and agreement of answers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluators import make_evaluator

from harness.accuracy.data.decode import Detections
from harness.accuracy.metrics.closeness import (
    MAX_SQNR_DB,
    compare_outputs,
    output_sqnr,
    part_sqnr,
    plan_comparison,
    split_output,
)
from harness.accuracy.metrics.fidelity import matched_share
from harness.accuracy.metrics.intervals import check_consistency, metric_estimate
from harness.base.errors import EvaluationFailed, UserError
from harness.base.files import read_json
from harness.base.progress import NullProgress
from harness.graph.builder import GraphBuilder
from harness.insight.accuracy_studies import agreement_report
from harness.plugins.api import Evaluator, NeedsPreparation
from harness.run.prepare.study_task import make_study

INPUTS = {"x": ("float", (1, 5)), "mask": ("bool", (1, 5))}
SHAPES = {"use": "shapes", "split": "calibration", "count": 5}
OUT = "/head/out"
STUDY = """
experiment: small
models:
  - use: net.onnx
    calibration: {data: {use: npz, path: x.npz}, samples: 8}
    evaluator: {use: top1, params: {data: {use: npz, path: x.npz, labels: y.npy}}}
backends: [{use: onnxruntime, params: {optimization: disabled}}]
"""


def engine(feeds: Any) -> dict[str, np.ndarray]:
    return {OUT: feeds["x"] * 3 + feeds["mask"]}


def compare(reference: Any, outputs: Any) -> dict[str, float]:
    return compare_outputs([(reference, outputs)], plan_comparison([reference])).metrics


def fidelity(folder: Path, prepared: Any = None, inputs: Any = None, **params: Any) -> Any:
    supplied = {"reference": folder / "deep" / "r.npz", "inputs": inputs or INPUTS, "input_name": "x", "base": folder}
    made = make_evaluator("fidelity", params, **supplied)
    if prepared is not None:
        made.prepare(prepared)
    return made


def test_fidelity_is_highest_for_the_float_model_and_falls_with_noise(tmp_path):
    evaluator = fidelity(tmp_path, engine, samples=3)
    accuracy = evaluator.score(engine)
    assert accuracy.metrics == pytest.approx({"sqnr_db": MAX_SQNR_DB, "cosine": 1.0, "kl": 0.0})
    assert len(accuracy.per_item) == len(evaluator) == evaluator.inferences == 3
    assert all(metric_estimate(accuracy, metric, primary="sqnr_db") for metric in accuracy.metrics)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["r.npz"]
    fine, rough = (
        evaluator.score(lambda f, step=step: {OUT: np.rint(engine(f)[OUT] / step) * step}).metrics
        for step in (0.01, 0.7)
    )
    assert fine["sqnr_db"] > rough["sqnr_db"] + 20
    assert fine["cosine"] > rough["cosine"]
    assert fine["kl"] < rough["kl"]


def test_figures_of_known_outputs():
    figures = compare({"a": np.array([[3.0, 4.0]]), "n": np.array([1, 2])}, {"a": np.array([[3.0, 4.5]]), "n": [7]})
    p, q = (np.exp(v) / np.exp(v).sum() for v in (np.array([3.0, 4.0]), np.array([3.0, 4.5])))
    expected = {"sqnr_db": 20.0, "cosine": 27 / (5 * np.hypot(3, 4.5)), "kl": float((p * np.log(p / q)).sum())}
    assert figures == pytest.approx(expected)  # 25 over 0.25
    zeros, ones = {"a": np.zeros(3)}, {"a": np.ones(3)}
    assert compare(zeros, zeros) == {"sqnr_db": MAX_SQNR_DB, "cosine": 1.0, "kl": 0.0}
    assert compare(zeros, ones)["sqnr_db"] == -MAX_SQNR_DB
    assert compare(ones, zeros)["cosine"] == 0.0
    logits = np.random.default_rng(0).normal(size=(1, 3, 2, 4))  # axis 1 has the classes of an image
    as_rows = compare({"a": logits.transpose(0, 2, 3, 1).reshape(8, 3)}, {"a": np.zeros((8, 3))})
    assert compare({"a": logits}, {"a": np.zeros_like(logits)})["kl"] == pytest.approx(as_rows["kl"])


@pytest.mark.parametrize("batch", [1, 2])
def test_images_and_arrays_can_be_the_inputs(tmp_path, batch):
    np.savez(tmp_path / "f.npz", x=np.ones((4, 5)), mask=np.zeros((4, 5), bool))
    arrays = fidelity(tmp_path, data={"use": "npz", "path": "f.npz"}, samples=9)
    assert len(list(arrays.feeds())) == len(arrays) == 4
    images = {"x": ("float", (batch, 3, 128, 128))}
    pairs = fidelity(tmp_path, inputs=images, data=SHAPES, preprocess="shapes", samples=5)
    assert [feed["x"].shape for feed in pairs.feeds()] == [images["x"][1]] * len(pairs)
    assert len(pairs) == -(-5 // batch)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"data": SHAPES}, "images need 'preprocess'"),
        ({"data": SHAPES, "preprocess": "shapes"}, "'x' is 1 x 5"),
        ({"samples": 0}, "samples: a whole number from 1, but got 0"),
    ],
)
def test_mismatched_data_is_refused(tmp_path, params, message):
    with pytest.raises(UserError, match=message):
        fidelity(tmp_path, **params)


def test_invalid_candidate_outputs_are_reported(tmp_path):
    with pytest.raises(EvaluationFailed, match="score the float model before any other"):
        fidelity(tmp_path).score(engine)
    with pytest.raises(EvaluationFailed, match="output 'y' has NaN or infinite values on sample 0"):
        fidelity(tmp_path, lambda _: {"y": np.array([np.nan])})
    evaluator = fidelity(tmp_path, engine, samples=2)
    for outputs, message in (({OUT: np.full((1, 5), np.inf)}, "NaN or infinite"), ({}, r"is missing.*\(1, 5\)"),
                             ({OUT: np.zeros(2)}, r"has the shape \(2,\)")):  # fmt: skip
        with pytest.raises(EvaluationFailed, match=f"output '{OUT}' .*{message}"):
            evaluator.score(lambda _, outputs=outputs: outputs)
    with pytest.raises(EvaluationFailed, match="was made on other inputs: remove it"):
        fidelity(tmp_path, samples=1).score(engine)
    with pytest.raises(EvaluationFailed, match="no output of floating type among n"):
        compare({"n": np.array([1])}, {"n": np.array([1])})


def with_still_outputs(feeds: Any) -> dict[str, np.ndarray]:
    """Outputs besides the one that counts: one that is 0, one that is constant, and one number that changes."""
    x = feeds["x"]
    return {**engine(feeds), "off": x * 1e-12, "full": 1000 + 1e-6 * x, "mean": x.mean().reshape(1)}


def test_constant_outputs_are_excluded_and_named(tmp_path):
    evaluator = fidelity(tmp_path, with_still_outputs, samples=3)

    def rounded(feeds: Any) -> dict[str, np.ndarray]:
        return {name: array + (1e-7 if name == "off" else 0.01) for name, array in with_still_outputs(feeds).items()}

    found = evaluator.score(rounded)
    assert found.note.startswith(f"{evaluator.score(with_still_outputs).note}. worst: output 'mean'")
    assert "'off', 'full'" in found.note
    counted = fidelity(tmp_path / "plain", lambda f: {**engine(f), "mean": with_still_outputs(f)["mean"]}, samples=3)
    assert found.metrics == counted.score(rounded).metrics
    assert counted.score(with_still_outputs).note == ""
    with pytest.raises(EvaluationFailed, match="output 'off' is missing"):
        evaluator.score(engine)


def test_notes_name_what_is_not_compared(tmp_path):
    constant = fidelity(tmp_path, lambda _: {"one": np.ones((1, 1))}, samples=2).score(
        lambda _: {"one": np.ones((1, 1))}
    )
    assert constant.metrics["sqnr_db"] == MAX_SQNR_DB
    assert constant.note.startswith("fidelity is undefined")

    def many(feeds: Any) -> dict[str, np.ndarray]:
        return {**engine(feeds), "label": np.array([1]), **{f"dead{i}": np.zeros(4) for i in range(7)}}

    note = fidelity(tmp_path, many, samples=1).score(many).note
    assert "'dead4' and 2 more" in note
    assert "'label'" in note


def test_the_worst_output_decides_and_is_named(tmp_path):
    def two_heads(feeds: Any) -> dict[str, np.ndarray]:
        return {"depth": feeds["x"] + 1, "cls": feeds["x"] * 2}

    evaluator = fidelity(tmp_path, two_heads, samples=4)
    found = evaluator.score(lambda feeds: {**two_heads(feeds), "depth": np.zeros((1, 5))})
    assert (found.metrics["sqnr_db"], found.metrics["cosine"]) == pytest.approx((0, 0))
    assert "worst: output 'depth': 0.0 dB" in found.note
    assert check_consistency(found, "sqnr_db") == ""
    assert len(found.per_item) == 4
    assert evaluator.score(two_heads).note == ""
    calls = iter(range(4))  # batches without any error do not hide the others
    half_dead = evaluator.score(lambda f: {k: a * (next(calls) // 2 % 2) for k, a in two_heads(f).items()})
    assert half_dead.metrics["sqnr_db"] == pytest.approx(0)


# Parts of one output


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("cells", [8, 600])
def test_scores_that_are_all_0_are_not_hidden_by_boxes(axis, cells, rng):
    whole = np.concatenate([rng.uniform(0, 640, (2, 4, cells)), rng.uniform(0, 1, (2, 10, cells)) ** 4], axis=1)
    broken = whole.copy()
    broken[:, 4:] = 0
    turned = [a if axis == 1 else a.transpose(0, 2, 1) for a in (whole, broken)]
    assert part_sqnr(*turned) > 40
    assert str(output_sqnr(*turned)) == f"axis {axis} slices 4..13: 0.0 dB"
    assert output_sqnr(turned[0], turned[0]).sqnr_db == MAX_SQNR_DB


def slices(*samples: np.ndarray) -> list[tuple[int, ...]]:
    return [part.slices for part in split_output(samples)]


def test_slices_of_different_scale_are_split(rng):
    whole = np.ones((1, 2, 8, 8))
    whole[:, 1] *= 29
    assert slices(whole) == []
    whole[:, 1] *= 31 / 29
    assert slices(whole) == [(1,), (0,)]
    assert slices(rng.normal(size=(1, 4, 8, 8)) * 10.0 ** np.arange(4).reshape(1, 4, 1, 1)) == [(2, 3), (0, 1)]
    assert slices(*(np.array([[rng.uniform(0, 640), rng.uniform(0, 1)]]) for _ in range(16))) == [(0,), (1,)]
    scores = rng.uniform(0, 1, (1, 20, 900)) * np.geomspace(1, 5e-3, 20)[:, None]
    assert slices(scores) == [], "fading probabilities of classes"
    assert [each[0] for each in slices(np.concatenate([scores, 99 * scores[:, :2]], axis=1))] == [20, 0]


def test_slices_quiet_by_chance_are_not_split(rng):
    fading = np.exp(-((np.arange(64) - 32.0) ** 2) / 60)
    assert slices(rng.uniform(0.5, 1, (1, 17, 64, 64)) * fading * fading[:, None]) == [], "heatmaps"
    bias = rng.normal(size=10)
    bias[3] = 1e-4
    assert slices(*((bias + 0.01 * rng.normal(size=10))[None] for _ in range(16))) == [], "a logit near 0"
    assert slices(*(rng.normal(size=(1, 1000)) for _ in range(16))) == []
    absent = np.concatenate([rng.beta(0.2, 2, (1, 4, 900)), rng.uniform(0, 1e-4, (1, 76, 900))], axis=1)
    assert slices(absent) == []
    assert list(map(len, slices(np.concatenate([absent, absent[:, :4] * 640], 1)))) == [4, 80]
    odds = np.exp(rng.normal(size=(16, 1, 10)) * 0.1 + 12 * (np.arange(10) == 2))
    assert slices(*(odds / odds.sum(axis=2, keepdims=True))) == [], "confident probabilities"
    scores = rng.uniform(0, 1e-4, (16, 3, 900))
    for i in range(900):
        scores[i % 16, i % 3, i] = rng.uniform(0.3, 0.9)
    scores[:, :, 5], scores[0, 0, 5] = 1e-4, 0.005
    assert slices(scores) == [], "a position"


def test_zero_and_constant_slices_neither_cause_nor_hide_an_error(rng):
    whole = np.concatenate([100 * np.ones((1, 1, 64)), rng.normal(size=(1, 2, 64)), np.zeros((1, 1, 64))], axis=1)
    noisy = whole + 1e-7
    assert output_sqnr(whole, noisy).sqnr_db > 100
    noisy[:, 3] = 5
    assert output_sqnr(whole, noisy).sqnr_db < 0
    whole = rng.normal(size=(2, 4, 64))
    whole[:, 1] = 1e-4
    assert slices(whole) == []
    whole[:, 2:] *= 1e-3
    assert slices(whole) == [(0,), (1, 2, 3)]


def test_samples_and_batches_of_different_scale_are_compared_separately(rng):
    whole = rng.normal(size=(2, 3, 8, 8)) * np.array([1, 1000]).reshape(2, 1, 1, 1)
    broken = whole.copy()
    broken[0] = 0
    assert output_sqnr(whole, broken).sqnr_db == pytest.approx(0)
    loud, quiet = rng.normal(size=(1, 2, 64)) * 1000, rng.normal(size=(1, 2, 64))
    absent = np.concatenate([loud, np.zeros((1, 2, 64))], axis=1)
    parts = split_output([np.concatenate([loud, quiet], axis=1), absent])
    assert output_sqnr(absent, absent + 0.01, parts).sqnr_db == pytest.approx(37, abs=1), "by its usual power"


# Agreement


def boxes(*rows: tuple[float, float, float, float, int]) -> Detections:
    table = np.array(rows, np.float64).reshape(-1, 5)
    return Detections(boxes=table[:, :4], scores=np.linspace(1, 0.5, len(table)), classes=table[:, 4].astype(np.int64))


def test_boxes_match_by_class_and_overlap():
    two = boxes((0, 0, 10, 10, 1), (20, 20, 40, 40, 2))
    assert matched_share(two, two) == matched_share(boxes(), boxes()) == 1.0
    assert matched_share(two, boxes((0, 0, 10, 9, 1), (20, 20, 40, 40, 1))) == 0.5, "one of another class"
    assert matched_share(two, boxes((0, 0, 10, 10, 1), (0, 0, 10, 9, 1))) == 0.5, "a box has one partner"
    assert matched_share(two, boxes()) == matched_share(boxes(), two) == 0.0


def agreement(folder: Path, inputs: Any = None, **params: Any) -> Any:
    np.save(folder / "x.npy", np.eye(4, dtype=np.float32)[[0, 1, 2, 3, 0]])
    given = {"data": {"use": "npy", "path": "x.npy"}, **params}
    types = inputs or {"x": ("float", (1, 4))}
    return make_evaluator("agreement", given, reference=folder / "r.npz", inputs=types, base=folder)


def test_classifier_agreement_is_share_of_equal_classes(tmp_path):
    evaluator = agreement(tmp_path)
    assert isinstance(evaluator, Evaluator)
    assert isinstance(evaluator, NeedsPreparation)
    with pytest.raises(EvaluationFailed, match="no outputs of the float model"):
        evaluator.score(lambda feeds: {"y": feeds["x"]})
    with pytest.raises(EvaluationFailed, match=r"1x1x8x8 .*fidelity"):
        evaluator.prepare(lambda _: {"y": np.zeros((1, 1, 8, 8), np.float32)})
    evaluator.prepare(lambda feeds: {"y": feeds["x"]})
    found = evaluator.score(lambda feeds: {"y": feeds["x"] + np.array([0, 2, 0, 0], np.float32)})
    assert (found.metrics, found.per_item) == ({"agreement": 0.2}, (0.0, 1.0, 0.0, 0.0, 0.0))
    with pytest.raises(UserError, match="images"):
        agreement(tmp_path, decode="yolox")
    with pytest.raises(EvaluationFailed, match="other inputs"):
        agreement(tmp_path, data={"use": "npy", "path": "x.npy", "count": 3}).score(lambda feeds: {"y": feeds["x"]})


def test_detector_agreement_ignores_low_scores(tmp_path):
    def infer(score: float) -> Any:
        rows = np.array([[[64, 64, 20, 20, 0.9, 0, 0], [30, 30, 20, 20, 0, score, 0]]], np.float32)
        return lambda _: {"boxes": rows}

    inputs = {"images": ("float", (1, 3, 128, 128))}
    evaluator = agreement(tmp_path, inputs, data={**SHAPES, "count": 3}, preprocess="shapes", decode="shapes")
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
    assert [set(each) for each in facts["placements"]] == [{"top1", "agreement", "sqnr_db"}] * 4
