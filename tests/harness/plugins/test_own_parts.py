"""One file adds a runtime, a fixed placement, a metric, a recovery step and a table."""

from __future__ import annotations

import sys

import pandas as pd
import pytest
from small import qdq, save_chain

PARTS = """
import pandas as pd

from harness.accuracy.recovery.steps import FastBiasCorrection
from harness.plugins.api import Accuracy
from harness.report.report_table import TableSpec, number_column, text_column
from harness.runtimes.example import PlainBenchmarker


class Runtime(PlainBenchmarker):
    def describe(self):
        return {**super().describe(), "name": "own"}


def first_pattern(space, precision):
    return space.quantize_dimensions([0], precision)


class Score:
    metric = "own_score"
    higher_is_better = True

    def score(self, infer):
        return Accuracy(metrics={"own_score": 0.5})


class Step(FastBiasCorrection):
    pass


def seeds(results):
    return pd.DataFrame([{"task": task.folder.name, "searches": len(task.searches)} for task in results.tasks])


own_table = TableSpec(
    name="own_table", title="Own", columns=(text_column("task"), number_column("searches")), frame=seeds
)
"""
REGISTRY_LINE = "[qdq.tables]\nown_table = parts:own_table\n"
EXPERIMENT = """
experiment: own
models: [{use: net.onnx, calibration: {samples: 8}, evaluator: {use: "parts:Score"}}]
backends: [{use: "parts:Runtime"}]
searchers: [random]
initial: ["parts:first_pattern"]
baselines: [first_pattern]
budget: {evaluations: [2]}
sampling: {warmup_ms: 0, min_samples: 3, max_samples: 3}
confirmation: {builds: 3, rounds: 2, samples: 3}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    save_chain(tmp_path / "net.onnx", (4, 6, 8), size=8)
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "own.yaml").write_text(EXPERIMENT)
    info = tmp_path / "own_parts-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-parts\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(REGISTRY_LINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "parts", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_run_uses_runtime_placement_metric_and_table_of_a_plugin_file(folder):
    assert qdq("run", "own.yaml", "--out", "out", "--trust-plugins", "--wait", "0") == 0
    main = pd.read_csv(folder / "out/report/main.csv")
    assert {"float", "first_pattern"} <= set(main["method"])
    assert set(main["backend"]) == {"Runtime"}
    assert "own_score" in (folder / "out/report/main.md").read_text()
    assert pd.read_csv(folder / "out/report/own_table.csv")["searches"].tolist() == [1]


def test_recovery_uses_a_step_of_a_plugin_file(folder, capsys):
    assert qdq("inspect", "recover", "own.yaml", "--step", "parts:Step", "--out", "rows", "--trust-plugins") == 0
    assert "parts:Step" in capsys.readouterr().out
