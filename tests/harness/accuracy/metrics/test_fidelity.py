from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.accuracy.metrics.base import evaluator_params
from harness.accuracy.metrics.closeness import MAX_SQNR_DB, compare_outputs, plan_comparison
from harness.accuracy.metrics.fidelity import Fidelity
from harness.accuracy.metrics.intervals import check_consistency, metric_estimate
from harness.base.errors import EvaluationFailed, UserError
from harness.plugins import registry

INPUTS = {"x": ("float", (1, 5)), "mask": ("bool", (1, 5))}


def open_evaluator(use: str, params: Mapping[str, Any], supplied: Mapping[str, Any]) -> Any:
    return registry.create_plugin("evaluator", use, evaluator_params(use, params, supplied))


def engine(feeds: Any) -> dict[str, np.ndarray]:
    return {"/head/out": feeds["x"] * 3 + feeds["mask"]}


def compare(reference: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> dict[str, float]:
    return compare_outputs([(reference, outputs)], plan_comparison([reference])).metrics


def fidelity(folder: Path, **params: Any) -> Fidelity:
    supplied = {"reference": folder / "deep" / "r.npz", "inputs": INPUTS, "input_name": "x", "base": folder}
    made = open_evaluator("fidelity", params, supplied)
    assert isinstance(made, Fidelity)
    return made


def test_float_model_has_maximum_fidelity(tmp_path):
    evaluator = fidelity(tmp_path, samples=3)
    evaluator.prepare(engine)
    accuracy = evaluator.score(engine)
    assert accuracy.metrics == pytest.approx({"sqnr_db": MAX_SQNR_DB, "cosine": 1.0, "kl": 0.0})
    assert len(accuracy.per_item) == len(evaluator) == 3
    assert all(metric_estimate(accuracy, metric, primary="sqnr_db") for metric in accuracy.metrics)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["r.npz"]


def test_more_noise_lowers_fidelity(tmp_path):
    evaluator = fidelity(tmp_path, samples=2)
    evaluator.prepare(engine)

    def coarse(step: float) -> dict[str, float]:
        return dict(evaluator.score(lambda f: {k: np.rint(v / step) * step for k, v in engine(f).items()}).metrics)

    fine, rough = coarse(0.01), coarse(0.7)
    assert fine["sqnr_db"] > rough["sqnr_db"] + 20
    assert fine["cosine"] > rough["cosine"]
    assert fine["kl"] < rough["kl"]


def test_sqnr_cosine_and_kl_of_known_outputs():
    reference = {"a": np.array([[3.0, 4.0]]), "n": np.array([1, 2])}
    figures = compare(reference, {"a": np.array([[3.0, 4.5]]), "n": np.array([7, 7])})
    assert figures["sqnr_db"] == pytest.approx(20.0)  # 25 over 0.25
    assert figures["cosine"] == pytest.approx(27 / (5 * np.hypot(3, 4.5)))
    p, q = (np.exp(v) / np.exp(v).sum() for v in (np.array([3.0, 4.0]), np.array([3.0, 4.5])))
    assert figures["kl"] == pytest.approx(float((p * np.log(p / q)).sum()))


def test_kl_uses_axis_1_as_class_axis_of_images():
    logits = np.random.default_rng(0).normal(size=(1, 3, 2, 4))
    as_rows = compare({"a": logits.transpose(0, 2, 3, 1).reshape(8, 3)}, {"a": np.zeros((8, 3))})
    assert compare({"a": logits}, {"a": np.zeros_like(logits)})["kl"] == pytest.approx(as_rows["kl"])


def test_zero_outputs_have_finite_metrics():
    zeros, ones = {"a": np.zeros(3)}, {"a": np.ones(3)}
    assert compare(zeros, zeros) == {"sqnr_db": MAX_SQNR_DB, "cosine": 1.0, "kl": 0.0}
    assert compare(zeros, ones)["sqnr_db"] == -MAX_SQNR_DB
    assert compare(ones, zeros)["cosine"] == 0.0


def test_images_and_arrays_can_be_the_inputs(tmp_path):
    np.savez(tmp_path / "f.npz", x=np.ones((4, 5)), mask=np.zeros((4, 5), bool))
    arrays = fidelity(tmp_path, data={"use": "npz", "path": "f.npz"}, samples=9)
    assert len(list(arrays.feeds())) == len(arrays) == 4
    supplied = {"reference": tmp_path / "r.npz", "inputs": {"x": ("float", (1, 3, 128, 128))}}
    params = {"data": {"use": "shapes", "split": "calibration"}, "preprocess": "shapes", "samples": 2}
    images = open_evaluator("fidelity", params, supplied)
    assert isinstance(images, Fidelity)
    assert [feed["x"].shape for feed in images.feeds()] == [(1, 3, 128, 128)] * 2
    params["samples"] = 5
    pairs = open_evaluator("fidelity", params, {**supplied, "inputs": {"x": ("float", (2, 3, 128, 128))}})
    assert [feed["x"].shape for feed in pairs.feeds()] == [(2, 3, 128, 128)] * len(pairs)
    assert len(pairs) == 3


def test_mismatched_data_is_refused(tmp_path):
    shapes = {"use": "shapes", "split": "calibration", "count": 2}
    with pytest.raises(UserError, match="images need 'preprocess', the name of what turns an image into an input"):
        fidelity(tmp_path, data=shapes)
    with pytest.raises(UserError, match=r"images need an input of batch x 3 x height x width or .*, but 'x' is 1 x 5"):
        fidelity(tmp_path, data=shapes, preprocess="shapes")
    with pytest.raises(UserError, match=r"images feed only 'y'; use: npz for the others as well \('x'\)"):
        Fidelity(tmp_path / "r", {"x": ("bool", (4,)), "y": ("float", (4, 3, 128, 128))}, shapes, "shapes")
    with pytest.raises(UserError, match="samples: a whole number from 1, but got 0"):
        fidelity(tmp_path, samples=0)


def test_invalid_candidate_outputs_are_reported(tmp_path):
    evaluator = fidelity(tmp_path, samples=2)
    with pytest.raises(
        EvaluationFailed, match=r"no outputs of the float model in .*score the float model before any other"
    ):
        evaluator.score(engine)
    with pytest.raises(EvaluationFailed, match="output 'y' has NaN or infinite values on sample 0"):
        evaluator.prepare(lambda _: {"y": np.array([np.nan])})
    evaluator.prepare(engine)
    with pytest.raises(EvaluationFailed, match="output '/head/out' has NaN or infinite values on sample 0"):
        evaluator.score(lambda f: {"/head/out": engine(f)["/head/out"] * np.inf})
    with pytest.raises(EvaluationFailed, match=r"output '/head/out' is missing, the float model's has \(1, 5\)"):
        evaluator.score(lambda _: {})
    with pytest.raises(EvaluationFailed, match=r"output '/head/out' has the shape \(2,\)"):
        evaluator.score(lambda _: {"/head/out": np.zeros(2)})
    with pytest.raises(EvaluationFailed, match="was made on other inputs: remove it"):
        fidelity(tmp_path, samples=1).score(engine)
    with pytest.raises(EvaluationFailed, match="no output of floating type among n: nothing to compare"):
        compare({"n": np.array([1])}, {"n": np.array([1])})


def with_still_outputs(feeds: Any) -> dict[str, np.ndarray]:
    """Outputs besides the one that counts: one that is 0, one that is constant, and one number that changes."""
    x = feeds["x"]
    return {**engine(feeds), "off": x * 1e-12, "full": 1000 + 1e-6 * x, "mean": x.mean().reshape(1)}


def test_constant_outputs_are_excluded_and_named(tmp_path):
    evaluator = fidelity(tmp_path, samples=3)
    evaluator.prepare(with_still_outputs)

    def rounded(feeds: Any) -> dict[str, np.ndarray]:
        exact = with_still_outputs(feeds)
        return {name: array + (1e-7 if name == "off" else 0.01) for name, array in exact.items()}

    found = evaluator.score(rounded)
    left_out = "fidelity leaves out what is the same all over, on all inputs: 'off', 'full'"
    assert found.note.startswith(f"{left_out}. worst: output 'mean'")
    assert evaluator.score(with_still_outputs).note == left_out
    plain = fidelity(tmp_path / "plain", samples=3)
    plain.prepare(lambda f: {k: v for k, v in with_still_outputs(f).items() if k not in ("off", "full")})
    assert found.metrics == plain.score(rounded).metrics
    assert plain.score(with_still_outputs).note == ""


def test_scalar_output_per_sample_is_compared(tmp_path):
    evaluator = fidelity(tmp_path, samples=3)
    evaluator.prepare(lambda f: {"mean": f["x"].mean().reshape(1)})
    assert evaluator.score(lambda f: {"mean": f["x"].mean().reshape(1) * 1.1}).metrics["sqnr_db"] == pytest.approx(
        20, abs=0.01
    )


def test_constant_model_has_undefined_fidelity(tmp_path):
    evaluator = fidelity(tmp_path, samples=2)
    evaluator.prepare(lambda _: {"one": np.ones((1, 1))})
    found = evaluator.score(lambda _: {"one": np.ones((1, 1))})
    assert found.metrics["sqnr_db"] == MAX_SQNR_DB
    assert found.note == "fidelity is undefined: every output is constant on all inputs ('one')"


def test_excluded_output_must_still_exist(tmp_path):
    evaluator = fidelity(tmp_path, samples=1)
    evaluator.prepare(with_still_outputs)
    with pytest.raises(EvaluationFailed, match="output 'off' is missing"):
        evaluator.score(engine)


def test_long_list_of_excluded_outputs_is_shortened(tmp_path):
    evaluator = fidelity(tmp_path, samples=1)

    def many(feeds: Any) -> dict[str, np.ndarray]:
        return {**engine(feeds), **{f"dead{i}": np.zeros(4) for i in range(7)}}

    evaluator.prepare(many)
    assert evaluator.score(many).note.endswith("'dead0', 'dead1', 'dead2', 'dead3', 'dead4' and 2 more")


def two_heads(feeds: Any) -> dict[str, np.ndarray]:
    return {"depth": feeds["x"] + 1, "cls": feeds["x"] * 2}


def test_the_worst_output_decides_and_is_named(tmp_path):
    evaluator = fidelity(tmp_path, samples=4)
    evaluator.prepare(two_heads)
    found = evaluator.score(lambda feeds: {**two_heads(feeds), "depth": np.zeros((1, 5))})
    assert found.metrics["sqnr_db"] == pytest.approx(0)
    assert found.metrics["cosine"] == 0
    assert "worst: output 'depth': 0.0 dB" in found.note
    assert check_consistency(found, "sqnr_db") == ""
    assert len(found.per_item) == 4
    assert evaluator.score(two_heads).note == ""


def test_batches_without_any_error_do_not_hide_the_others(tmp_path):
    evaluator = fidelity(tmp_path, samples=4)
    evaluator.prepare(engine)
    calls = iter(range(4))

    def half_dead(feeds: Any) -> dict[str, np.ndarray]:
        exact = engine(feeds)
        return exact if next(calls) % 2 else {name: array * 0 for name, array in exact.items()}

    assert evaluator.score(half_dead).metrics["sqnr_db"] == pytest.approx(0)


def test_integer_outputs_are_named_as_not_compared(tmp_path):
    def ranked(feeds: Any) -> dict[str, np.ndarray]:
        return {**engine(feeds), "label": np.array([1])}

    evaluator = fidelity(tmp_path, samples=2)
    evaluator.prepare(ranked)
    assert "'label'" in evaluator.score(ranked).note
