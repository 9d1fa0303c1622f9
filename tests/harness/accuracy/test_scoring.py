"""Scoring in workers: its progress, its limit of time, and an evaluator that raises in the middle of a search."""

import sys
import tempfile
import threading
import time
import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.base.files import read_json
from harness.cli.main import main
from harness.config.sections import Limits, PluginSpec
from harness.graph.builder import GraphBuilder
from harness.measure.records import Failed, Measured
from harness.plugins.api import Accuracy, Artifact, Candidate
from harness.plugins.registry import register_object
from harness.results.journal import read_journal
from harness.workers import inference
from harness.workers.engines import BuiltEngine, WorkerSpec
from harness.workers.locks import timing_lock
from harness.workers.sandbox import InProcess, Sandbox

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
from harness.plugins.api import Accuracy

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


def test_evaluator_exception_fails_one_trial_only(tmp_path, monkeypatch):
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


PLUGINS = """
import time
from contextlib import contextmanager
from harness.plugins.api import Accuracy, Artifact

class Bench:
    def __init__(self, infer_s=0.2):
        self.infer_s = infer_s

    def build(self, candidate, workdir):
        return Artifact(engine=None)

    @contextmanager
    def open(self, artifact):
        yield self

    def infer(self, feeds):
        time.sleep(self.infer_s)
        return {}

    def describe(self):
        return {"name": "bench"}

class Patient:
    metric, higher_is_better = "score", True

    def __init__(self, inferences=4):
        self.inferences = inferences

    def score(self, infer):
        for _ in range(self.inferences):
            infer({})
        return Accuracy(metrics={"score": 0.5}, note="a guess")

    prepare = score

class Mute(Patient):
    def __init__(self):
        super().__init__()
        self.count, self.inferences = 4, None

    def score(self, infer):
        for _ in range(self.count):
            infer({})
        return Accuracy(metrics={"score": 0.5})
"""


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    (tmp_path / "patient_plugins.py").write_text(PLUGINS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("patient_plugins", None)


def spec(folder: Path, infer_s: float = 0.2, inferences: int = 4) -> WorkerSpec:
    return WorkerSpec(
        benchmarkers={"main": PluginSpec(use="patient_plugins:Bench", params={"infer_s": infer_s})},
        evaluators={
            "main": PluginSpec(use="patient_plugins:Patient", params={"inferences": inferences}),
            "mute": PluginSpec(use="patient_plugins:Mute"),
        },
        workdir=folder / "work",
    )


def candidate(folder: Path) -> Candidate:
    return Candidate(digest="x", edges=(), source=lambda: folder)


@pytest.mark.usefixtures("plugins")
def test_worker_reports_evaluation_progress(tmp_path):
    told: list[tuple[int, int]] = []
    with Sandbox(spec(tmp_path), Limits()) as engines:
        built = engines.build(candidate(tmp_path))
        assert isinstance(built, BuiltEngine)
        found = engines.evaluate(built.handle, watch=lambda done, total: told.append((done, total)))
        assert found == Accuracy(metrics={"score": 0.5}, note="a guess")
        assert told == sorted(told)
        assert told, "0.8 s are long enough for a word"
        assert {total for _, total in told} == {4}
        assert engines.evaluate(built.handle) == found, "progress is optional"
        assert engines.prepare(built.handle, watch=lambda done, total: told.append((done, total))) is None


@pytest.mark.usefixtures("plugins")
def test_progress_reports_do_not_extend_the_time_limit(tmp_path):
    told: list[int] = []
    with Sandbox(spec(tmp_path, inferences=1000), Limits(evaluate_s=1.5)) as engines:
        built = engines.build(candidate(tmp_path))
        assert isinstance(built, BuiltEngine)
        found = engines.evaluate(built.handle, watch=lambda done, _: told.append(done))
    assert isinstance(found, Failed)
    assert (found.stage, found.reason) == ("timeout", "evaluate took longer than 1.5 s")
    assert told


@pytest.mark.usefixtures("plugins")
def test_evaluator_without_inference_count_reports_no_progress(tmp_path, monkeypatch):
    monkeypatch.setattr(inference, "PROGRESS_INTERVAL_S", 0.0)
    told: list[tuple[int, int]] = []
    with InProcess(spec(tmp_path, infer_s=0.0)) as engines:
        built = engines.build(candidate(tmp_path))
        assert isinstance(built, BuiltEngine)
        engines.evaluate(built.handle, "mute", lambda done, total: told.append((done, total)))
        assert told == []
        engines.evaluate(built.handle, "main", lambda done, total: told.append((done, total)))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


class Busy:
    """Benchmarker that counts how many inferences run at the same time."""

    concurrency, running, most, lock = 4, 0, 0, threading.Lock()

    def build(self, candidate: Candidate, workdir: Path) -> Artifact:
        return Artifact(engine=None)

    def open(self, artifact: Artifact) -> Any:
        return nullcontext(self)

    def sample(self, n: int) -> list[float]:
        return [1e6] * n

    def concurrently(self, count: int) -> Any:
        return nullcontext(self.infer)

    def infer(self, feeds: Any) -> Any:
        with Busy.lock:
            Busy.running += 1
            Busy.most = max(Busy.most, Busy.running)
        time.sleep(0.02)  # long enough for a second inference to begin
        with Busy.lock:
            Busy.running -= 1
        return {"y": feeds["x"] * 2}

    def describe(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("concurrent", [True, False])
def test_concurrent_scoring_only_without_timing(concurrent, tmp_path):
    Busy.most = 0
    x = np.random.default_rng(0).normal(size=(12, 2)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=x.argmax(axis=1))
    data = {"use": "npz", "path": str(tmp_path / "data.npz"), "labels": "y"}
    params = {"data": data, "inputs": {"x": ("float", (1, 2))}}
    worker = WorkerSpec(
        benchmarkers={"main": PluginSpec(use=register_object(Busy))},
        evaluators={"main": PluginSpec(use="top1", params=params)},
        workdir=tmp_path,
        concurrent_scoring=concurrent,
    )
    reported: list[int] = []
    with InProcess(worker) as engines:
        built = engines.build(candidate(tmp_path))
        assert isinstance(built, BuiltEngine)
        found = engines.evaluate(built.handle, watch=lambda done, _: reported.append(done))
    assert isinstance(found, Accuracy)
    assert found.metrics["top1"] == 1.0
    assert (Busy.most > 1) == concurrent
    assert reported == sorted(reported)


class Differing(Busy):
    """Benchmarker with a copy of its engine that computes something else."""

    def concurrently(self, count: int) -> Any:
        return nullcontext(lambda feeds: {"y": -feeds["x"]})


def test_scoring_is_serial_while_another_run_measures(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    evaluator: Any = types.SimpleNamespace(inferences=6)
    samples = [{"x": np.full((1, 2), i, np.float32)} for i in range(6)]
    Busy.most = 0
    with inference.open_infer(Busy(), evaluator, 0.0) as infer:
        with timing_lock():
            found = list(inference.infer_all(infer, samples))
        assert Busy.most == 1
        assert [outputs["y"][0, 0] for outputs in found] == [0, 2, 4, 6, 8, 10]


def test_a_copy_that_differs_from_the_timed_engine_is_not_scored():
    samples = np.random.default_rng(0).normal(size=(12, 1, 2)).astype(np.float32)
    evaluator: Any = types.SimpleNamespace(inferences=len(samples))
    with inference.open_infer(Differing(), evaluator, 0.0) as infer:
        found = [outputs["y"] for outputs in inference.infer_all(infer, ({"x": each} for each in samples))]
    np.testing.assert_array_equal(found, 2 * samples)
