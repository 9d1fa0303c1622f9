"""The classifier example in `qdq evaluate --help` works."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from small import qdq, save_chain

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = "experiments/specs/evaluate_classifier.yaml"


def test_mistakes_of_a_command_line_are_named_together(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").touch()
    model = str(save_chain(tmp_path / "net.onnx", (8, 4)))
    start = ("autotune", "-m", model, "-o", "out")
    for command, facts in (
        (("autotune", "net.onnx"), ["did you mean --onnx_path net.onnx?"]),
        (("ptq", "net.onnx"), ["did you mean --onnx_path net.onnx?"]),
        (("ptq", "--onnx_path", model, "--calibration=gone.npy"), ["gone.npy: no such file"]),
        ((*start, "--max_evals", "5", "--calibration_data", "gone.npy"), ["gone.npy: no such file", "at least 6"]),
        (start, ["out: is a file, not a folder"]),
    ):
        assert qdq(*command) == 2
        error = capsys.readouterr().err
        assert all(fact in error for fact in facts), error


@pytest.mark.assets
@pytest.mark.skipif(not os.environ.get("QDQ_ASSETS"), reason="QDQ_ASSETS is not set")
def test_classifier_example_gives_top1_with_interval(tmp_path, capsys):
    text = (ROOT / EXAMPLE).read_text(encoding="utf-8")
    (tmp_path / "classifier.yaml").write_text(text.replace("../../out", "out"), encoding="utf-8")
    assert qdq("evaluate", str(tmp_path / "classifier.yaml")) == 0
    line = capsys.readouterr().out.splitlines()[1].split("\t")
    assert line[:3] == ["classifier", "assets:models/squeezenet1.1.onnx", "float"]
    found = re.fullmatch(r"top1 (0\.\d{4}) \[(0\.\d{4}), (0\.\d{4})\]", line[3])
    assert found is not None
    top1, low, high = map(float, found.groups())
    assert low < top1 < high
    assert 0.6 < top1 < 0.85, "0.70 on 1300 images"
    assert (tmp_path / "out/classifier.evaluation.json").exists()
