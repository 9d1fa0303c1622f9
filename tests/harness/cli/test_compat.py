"""The classifier example in `qdq evaluate --help` works."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from small import qdq

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = "experiments/specs/evaluate_classifier.yaml"


def test_the_help_has_an_example_for_a_classifier(capsys):
    assert qdq("evaluate", "--help") == 0
    assert EXAMPLE in capsys.readouterr().out
    assert (ROOT / EXAMPLE).exists()


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
