"""INT8, FP8 and mixtures in one experiment: what the device only emulates is scored, and never gets a speed."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from small import qdq, save_chain
from stored import read_records

from harness.base.files import read_json
from harness.graph.qdq.qdq_graph import read_precisions
from harness.results.artifacts import ACCURACY_ONLY_VERDICT
from harness.results.journal import read_journal

EXPERIMENT = """
experiment: precisions
models: [{use: net.onnx, calibration: {samples: 2}, evaluator: {use: fidelity, params: {samples: 2}}}]
backends: [{use: 'here:OpenVINO', label: openvino, params: {precision: f32}}]
precision: [int8, fp8, fp8e5m2, mixed]
searchers: [random]
initial: [float, all, all-fp8]
baselines: [all, linear, linear-fp8]
budget: {evaluations: [6]}
sampling: {warmup_ms: 0, min_samples: 3, max_samples: 3, max_ms: 20}
confirmation: {builds: 3, rounds: 2, samples: 3}
"""


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("precisions")
    save_chain(folder / "net.onnx", (8, 8), size=8)
    (folder / "precisions.yaml").write_text(EXPERIMENT)
    assert qdq("run", str(folder / "precisions.yaml"), "--out", str(folder / "out")) == 0
    return folder / "out"


def rows(out: Path, precision: str) -> dict[str, dict[str, str]]:
    with (out / "report" / "main.csv").open() as file:
        found = [row for row in csv.DictReader(file) if row["task"] == f"net-openvino-{precision}"]
    return {row["method"]: row for row in found}


def test_fp8_has_an_accuracy_and_never_a_speed(out):
    emulated = {"fp8": ("all", "linear", "linear-fp8"), "fp8e5m2": ("all", "linear"), "mixed": ("linear-fp8",)}
    for precision, methods in emulated.items():
        for method in methods:
            row = rows(out, precision)[method]
            assert row["verdict"] == ACCURACY_ONLY_VERDICT
            assert (row["latency_ms"], row["speedup"]) == ("", "")
            assert float(row["score"]) > 0
    assert "| accuracy only" in (out / "report" / "main.md").read_text()


def test_int8_has_latency_in_mixed_precision_experiment(out):
    for precision in ("int8", "mixed"):
        row = rows(out, precision)["all"]
        assert row["verdict"] in ("faster", "tie", "slower")
        assert float(row["latency_ms"]) > 0


def test_emulated_rows_are_not_confirmed(out):
    for precision in ("fp8", "fp8e5m2", "mixed"):
        task = out / f"net-openvino-{precision}"
        body = read_json(task / "rows.json")["rows"]
        confirmed = read_records(task / "confirmation.jsonl")[0]["rows"]
        for row in body:
            emulated = not read_precisions(task / "models" / row["file"]) <= {"int8"}
            assert row["timed"] != emulated
            assert (row["id"] in confirmed) != emulated


def test_search_at_emulated_precision_is_skipped_with_reason(out):
    assert not list((out / "net-openvino-fp8").glob("runs/*"))
    row = rows(out, "fp8")["random"]
    assert row["reason"] == "accuracy only: no search, because latency is not measured"


def test_mixed_search_proposes_only_timed_precisions(out):
    entries = list(read_journal(out / "net-openvino-mixed" / "runs" / "random-0.jsonl"))
    assert len(entries) >= 4
    assert {choice for entry in entries for choice in entry.proposal.choices} == {0, 1}
    assert [entry.proposal.origin for entry in entries[:3]] == ["initial:float", "initial:all", "searcher"]


def test_baseline_at_unavailable_precision_has_reason(out):
    assert rows(out, "int8")["linear-fp8"]["verdict"] == "no fp8 at precision int8"
