"""How far one scoring is comes out of the worker that does it, and a scoring that takes too long still ends."""

from __future__ import annotations

import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from harness.accuracy.metrics.classification import Top1
from harness.accuracy.metrics.fidelity import Fidelity
from harness.api import Accuracy, Artifact, Candidate
from harness.config.sections import Limits, PluginSpec
from harness.records import Failed
from harness.registry import register_object
from harness.timing.workers import inference
from harness.timing.workers.engines import BuiltEngine, WorkerSpec
from harness.timing.workers.in_process import InProcess
from harness.timing.workers.locks import timing_lock
from harness.timing.workers.sandbox import Sandbox

PLUGINS = """
import time
from contextlib import contextmanager
from harness.api import Accuracy, Artifact

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
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
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
def test_a_worker_tells_how_far_it_is(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    with Sandbox(spec(tmp_path), Limits()) as engines:
        built = engines.build(candidate(tmp_path))
        assert isinstance(built, BuiltEngine)
        found = engines.evaluate(built.handle, watch=lambda done, total: told.append((done, total)))
        assert found == Accuracy(metrics={"score": 0.5}, note="a guess")
        assert told == sorted(told)
        assert told, "0.8 s are long enough for a word"
        assert {total for _, total in told} == {4}
        assert engines.evaluate(built.handle) == found, "nobody has to watch"
        assert engines.prepare(built.handle, watch=lambda done, total: told.append((done, total))) is None


@pytest.mark.usefixtures("plugins")
def test_words_on_the_way_do_not_put_off_the_end(tmp_path: Path) -> None:
    told: list[int] = []
    with Sandbox(spec(tmp_path, inferences=1000), Limits(evaluate_s=1.5)) as engines:
        built = engines.build(candidate(tmp_path))
        assert isinstance(built, BuiltEngine)
        found = engines.evaluate(built.handle, watch=lambda done, _: told.append(done))
    assert isinstance(found, Failed)
    assert (found.stage, found.reason) == ("timeout", "evaluate took longer than 1.5 s")
    assert told


@pytest.mark.usefixtures("plugins")
def test_an_evaluator_that_does_not_say_how_long_it_takes_works_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference, "PROGRESS_INTERVAL_S", 0.0)
    told: list[tuple[int, int]] = []
    with InProcess(spec(tmp_path, infer_s=0.0)) as engines:
        built = engines.build(candidate(tmp_path))
        assert isinstance(built, BuiltEngine)
        engines.evaluate(built.handle, "mute", lambda done, total: told.append((done, total)))
        assert told == []
        engines.evaluate(built.handle, "main", lambda done, total: told.append((done, total)))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_the_evaluators_here_say_how_often_they_run_the_engine(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("".join(f"{i}.png 0\n" for i in range(5)))
    (tmp_path / "images").mkdir()
    for i in range(5):
        Image.new("RGB", (4, 4)).save(tmp_path / "images" / f"{i}.png")
    data = {"use": "images", "images": "images", "labels": "labels.txt"}
    pairs = Top1(data, "shapes", "x", (2, 3, 4, 4), base=tmp_path)
    assert (len(pairs), pairs.inferences) == (5, 3)
    assert Fidelity(tmp_path / "r.npz", {"x": ("float", (1, 5))}, samples=6).inferences == 6


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
def test_images_are_scored_at_the_same_time_only_where_nothing_is_timed(concurrent: bool, tmp_path: Path) -> None:
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


def test_images_are_scored_one_after_the_other_while_another_run_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    evaluator: Any = types.SimpleNamespace(inferences=6)
    samples = [{"x": np.full((1, 2), i, np.float32)} for i in range(6)]
    Busy.most = 0
    with inference.open_infer(Busy(), evaluator, 0.0) as infer:
        with timing_lock():
            found = list(inference.infer_all(infer, samples))
        assert Busy.most == 1
        assert [outputs["y"][0, 0] for outputs in found] == [0, 2, 4, 6, 8, 10]


def test_a_copy_that_differs_from_the_timed_engine_is_not_scored() -> None:
    samples = np.random.default_rng(0).normal(size=(12, 1, 2)).astype(np.float32)
    evaluator: Any = types.SimpleNamespace(inferences=len(samples))
    with inference.open_infer(Differing(), evaluator, 0.0) as infer:
        found = [outputs["y"] for outputs in inference.infer_all(infer, ({"x": each} for each in samples))]
    np.testing.assert_array_equal(found, 2 * samples)
