"""The float model is scored on a few images before a run: mistakes of data and preprocessing end it at once."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from harness.base.errors import UserError
from harness.base.files import write_json
from harness.base.progress import NullProgress
from harness.cli.main import app
from harness.config.experiment import Experiment, parse_experiment, plan_tasks, to_yaml
from harness.graph.builder import GraphBuilder
from harness.results.ownership import check_ownership, owned_results_dir
from harness.results.scores import ACCURACY_FILE_NAME
from harness.run.prepare.accuracy import Scoring, make_scoring
from harness.run.prepare.model_loader import open_model
from harness.run.prepare.preflight import check_and_time, check_experiment
from harness.run.prepare.study_task import make_study

COUNT = 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Images of one colour, red or green, and models that answer 1 for red, with the channels first and last."""
    for name, shape, axes in (("first", (1, 3, 8, 8), [2, 3]), ("last", (1, 8, 8, 3), [1, 2])):
        b = GraphBuilder(name)
        x = b.op("ReduceMean", b.input("x", shape), axes=axes, keepdims=0)
        b.output(b.op("MatMul", x, b.const(np.array([[0, 1], [1, 0], [0, 0]], np.float32))), name="logits")
        b.save(tmp_path / f"{name}.onnx")
    (tmp_path / "images").mkdir()
    for i in range(COUNT):
        Image.new("RGB", (8, 8), (200, 0, 0) if i % 2 else (0, 200, 0)).save(tmp_path / "images" / f"{i}.png")
    write_labels(tmp_path, 0)
    return tmp_path


def write_labels(folder: Path, wrong: int) -> None:
    """Write the labels of the images, the first ones wrong."""
    classes = [i % 2 if i >= wrong else 1 - i % 2 for i in range(COUNT)]
    (folder / "labels.txt").write_text("".join(f"{i}.png {label}\n" for i, label in enumerate(classes)))


def experiment(folder: Path, net: str = "first", **model: Any) -> Experiment:
    data = {"use": "images", "images": "images", "labels": "labels.txt"}
    evaluator = {"use": "top1", "params": {"data": data}}
    described = {"use": f"{net}.onnx", "preprocess": "array", "evaluator": evaluator, **model}
    body = {"experiment": "e", "models": [described], "backends": ["onnxruntime"]}
    return parse_experiment(json.dumps(body), "e.yaml", folder)


@pytest.mark.parametrize("net", ["first", "last"])
def test_a_model_with_either_layout_is_scored(folder, net):
    _, score_s = check_and_time(experiment(folder, net))
    assert score_s[net] > 0


@pytest.mark.parametrize(
    ("wrong", "expect", "is_refused"),
    [(COUNT, None, True), (COUNT, 0.9, True), (COUNT, 0.1, False), (COUNT, 0, False), (COUNT // 2, 0.9, False)],
)
def test_a_score_of_0_is_refused_unless_it_is_plausible(folder, wrong, expect, is_refused):
    write_labels(folder, wrong)
    with (
        pytest.raises(UserError, match=r"evaluator .*top-1 0 on \d+ of 40.*preprocess") if is_refused else nullcontext()
    ):
        check_experiment(experiment(folder, **({} if expect is None else {"expect": expect})))


def test_a_run_that_continues_does_not_repeat_the_trial(folder, monkeypatch):
    """The score of the float model is in the results folder, where its task was stopped later."""
    write_labels(folder, COUNT)  # a trial refuses them
    config, out = experiment(folder), folder / "out"
    (folder / "e.yaml").write_text(to_yaml(config))
    monkeypatch.chdir(folder)
    monkeypatch.setattr("harness.cli.run.run_and_report", lambda *_, **__: None)
    command = ["run", "e.yaml", "--out", "out"]
    refused = CliRunner().invoke(app, command)
    assert "top-1 0 on" in str(refused.exception)
    score = {"evaluator": "", "metrics": {"top1": 0.0}, "per_item": [], "evidence": ""}
    write_json(out / plan_tasks(config)[0].name / ACCURACY_FILE_NAME, {"float": score})
    assert CliRunner().invoke(app, command, catch_exceptions=False).exit_code == 0
    for repeated in (["--check"], ["--accept-changes"]):
        assert CliRunner().invoke(app, [*command, *repeated]).exit_code != 0


def test_a_study_keeps_the_remarks_of_the_check(folder):
    (folder / "study.yaml").write_text(to_yaml(experiment(folder)))
    assert any("random data is used" in remark for remark in make_study(str(folder / "study.yaml")).remarks)


@pytest.mark.parametrize("key", ["evaluator", "calibration"])
def test_images_that_the_preprocessing_does_not_fit_are_refused(folder, key):
    for i in range(COUNT):
        Image.new("RGB", (9, 8)).save(folder / "images" / f"{i}.png")
    calibration = {"data": {"use": "images", "images": "images"}}
    changes = {"calibration": calibration, "evaluator": None} if key == "calibration" else {}
    with pytest.raises(UserError, match=rf"models\.0\.{key} .*8x9.*8x8"):
        check_experiment(experiment(folder, **changes))


@pytest.mark.parametrize(("expect", "evaluator", "words"), [(78, True, "0.78"), (0.5, False, "evaluator")])
def test_an_expected_score_that_cannot_be_one_is_refused(folder, expect, evaluator, words):
    with pytest.raises(UserError, match=words):
        check_experiment(experiment(folder, expect=expect, **({} if evaluator else {"evaluator": None})))


def scoring(folder: Path, **model: Any) -> Scoring:
    config = experiment(folder, **model)
    return make_scoring(config.objective, config.models[0], open_model(config.models[0], folder), folder)


class Scored:
    """Store with a score of the float model: 30 of 40 images are right."""

    observer = NullProgress()

    def known_float_score(self, path: Path, evaluator: str) -> Any:
        from harness.plugins.api import Accuracy

        return Accuracy(metrics={"top1": 0.75}, per_item=(1.0,) * 30 + (0.0,) * 10)


@pytest.mark.parametrize(
    ("expect", "is_refused"), [(None, False), (0.75, False), (0.65, False), (0.0, False), (0.5, True), (0.95, True)]
)
def test_a_float_model_with_another_score_than_expected_ends_the_task(folder, expect, is_refused):
    given = {} if expect is None else {"expect": expect}
    with pytest.raises(UserError) if is_refused else nullcontext() as caught:
        scoring(folder, **given).goal(Scored(), folder / "first.onnx", folder)  # type: ignore[arg-type]
    if is_refused:
        assert all(word in str(caught.value) for word in ("0.75", f"{expect:g}", "preprocess", "labels"))


def test_an_expected_score_may_be_changed_in_a_results_folder(folder):
    """A run that stopped because of it is continued after its correction."""
    with owned_results_dir(folder / "out", experiment(folder, expect=0.5)):
        pass
    assert check_ownership(folder / "out", experiment(folder, expect=0.75)) == ""
    assert not re.search("expect", to_yaml(experiment(folder)))
