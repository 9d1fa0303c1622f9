"""An evaluator that raises in the middle of a search fails the trial, and the search goes on to the table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from harness.cli.main import main
from harness.graph.builder import GraphBuilder
from harness.records import Failed, Measured
from harness.results_dir.io import read_json
from harness.results_dir.journal import read_journal

EXPERIMENT = """
experiment: moody
models: [{use: net.onnx, calibration: {samples: 2}, evaluator: 'moody_evaluator:Moody'}]
backends: [{use: simulated, params: {seed: 5, noise: 0.0}}]
objective: {max_drop: 0.5}
searchers: [random]
initial: [float, all]
baselines: [all]
budget: {evaluations: [10]}
confirmation: {builds: 3, rounds: 2, samples: 3}
"""

EVALUATOR = """
from harness.api import Accuracy

class Moody:
    metric, higher_is_better = "mood", True

    def __init__(self) -> None:
        self.calls = 0

    def score(self, infer):
        self.calls += 1
        if self.calls % 3 == 0:
            raise ZeroDivisionError("a bad day")
        return Accuracy(metrics={"mood": 0.9})
"""


def test_the_trial_fails_and_the_search_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = GraphBuilder("net", seed=1)
    x = builder.input("x", (1, 3, 8, 8))
    for _ in range(3):
        x = builder.op("Relu", builder.conv(x, 8, 3, pad=1))
    builder.output(builder.op("GlobalAveragePool", x))
    builder.save(tmp_path / "net.onnx")
    (tmp_path / "moody_evaluator.py").write_text(EVALUATOR)
    (tmp_path / "moody.yaml").write_text(EXPERIMENT)
    monkeypatch.syspath_prepend(tmp_path)
    assert run(tmp_path / "moody.yaml", tmp_path / "out") == 0
    sys.modules.pop("moody_evaluator", None)
    task = tmp_path / "out" / "net-simulated-int8"
    outcomes: list[Any] = [
        e.result.outcome for e in read_journal(task / "runs" / "random-0.jsonl") if e.result is not None
    ]
    failed = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
    assert len(outcomes) == 10
    assert {(f.stage, f.reason) for f in failed} == {("evaluate", "ZeroDivisionError: a bad day")}
    assert sum(isinstance(outcome, Measured) and "mood" in outcome.metrics for outcome in outcomes) >= 1
    scores = read_json(task / "accuracy.json")
    assert any("metrics" in score for score in scores.values())
    assert "| random" in (tmp_path / "out" / "report" / "main.md").read_text().replace("|random", "| random")


def run(experiment: Path, out: Path) -> int:
    try:
        main(["run", str(experiment), "--out", str(out)])
    except SystemExit as end:
        return int(end.code or 0)
    return 0
