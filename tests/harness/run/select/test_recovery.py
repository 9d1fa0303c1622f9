"""Recovery of fast placements that miss the bound: their selection, their new contents, and the kept files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from harness.base.files import read_json
from harness.base.progress import NullProgress
from harness.base.statistics import Interval
from harness.config.experiment import parse_experiment, plan_tasks
from harness.graph.builder import GraphBuilder
from harness.graph.io.digests import digest_file
from harness.graph.qdq.qdq_graph import count_pairs
from harness.plugins.api import Accuracy
from harness.results.search_log import Evaluation, Goal, score_values
from harness.run.prepare.task import Task, compose_task
from harness.run.search.trial import AccuracyGate
from harness.run.select import recovery
from harness.run.select.recovery import Recovery, placements_to_recover, recover_placements

EXPERIMENT = """
experiment: small
models: [{use: net.onnx, calibration: {samples: 8}, evaluator: fidelity}]
backends: [{use: onnxruntime, params: {optimization: disabled}}]
searchers: [random]
initial: [float]
baselines: [linear]
budget: {evaluations: [5]}
objective: {max_drop: 0.05}
"""
GOAL = Goal(metric="top1", reference=0.8, max_drop=0.05)


@pytest.fixture
def running(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net, rng = GraphBuilder("net", seed=0), np.random.default_rng(0)
    scale = np.array([0.02, 1, 5, 9], np.float32)
    x = net.op("Mul", net.input("x", (1, 4, 8, 8)), net.const(scale.reshape(1, 4, 1, 1)))
    weight = net.const((rng.normal(0.3, 1, (4, 1, 3, 3)) / scale.reshape(4, 1, 1, 1)).astype(np.float32))
    x = net.op("Conv", x, weight, group=4, pads=[1] * 4, kernel_shape=[3, 3], name="depthwise")
    net.output(net.conv(net.op("Relu", x), 4, 1), name="y")
    net.save(tmp_path / "net.onnx")
    experiment = parse_experiment(EXPERIMENT, "small.yaml", tmp_path)
    task = compose_task(experiment, plan_tasks(experiment)[0], tmp_path / "out" / "work", NullProgress())
    return SimpleNamespace(
        experiment=experiment,
        task=task,
        searches=task.spec.runs,
        journal=lambda run: tmp_path,
        judge=AccuracyGate(goal=GOAL),
        scoring=SimpleNamespace(prepare_evaluators=lambda *_: None),
        noise_floor=0.02,
        folder=tmp_path / "out",
        observer=NullProgress(),
        checker=object(),
        limit=None,
    )


def trial(task: Task, choices: tuple[int, ...], latency_ms: float, top1: float, name: str = "") -> Evaluation:
    interval = Interval(value=latency_ms, low=latency_ms, high=latency_ms)
    return Evaluation(
        evaluations=1, elapsed_s=0.0, digest=name or f"{latency_ms}", choices=choices, origin="random",
        latency_ms=latency_ms, score=score_values(interval, {"top1": top1}, GOAL),
    )  # fmt: skip


def search(monkeypatch: pytest.MonkeyPatch, trials: list[Evaluation]) -> None:
    monkeypatch.setattr(recovery, "read_journal", lambda path: ())
    monkeypatch.setattr(recovery, "iter_evaluations", lambda entries, goal: trials)


class Book:
    """Scores in the order of the files, each of 100 images."""

    def __init__(self, *values: float) -> None:
        self.values, self.files, self.known = list(values), list[str](), dict[str, Accuracy]()

    def score_file(self, path: Path, name: str, evaluator: str) -> Accuracy:
        assert count_pairs(path) > 0
        digest = digest_file(path)
        if digest not in self.known:
            self.files.append(name)
            self.known[digest] = self._accuracy(self.values.pop(0))
        return self.known[digest]

    def require_float_score(self, path: Path, evaluator: str) -> Accuracy:
        return self._accuracy(0.8)

    def _accuracy(self, value: float) -> Accuracy:
        right = round(100 * value)
        return Accuracy(metrics={"top1": value}, per_item=(1.0,) * right + (0.0,) * (100 - right))


def recover(running: Any, book: Book) -> Recovery:
    running.store = book
    return recover_placements(running)


def test_recovery_selects_fastest_and_closest_to_bound(running):
    everything = tuple(running.task.space.quantize_all().choices)
    cases = {"within": (5.0, 0.79), "second": (6.0, 0.78), "third": (7.0, 0.8), "fastest": (2.0, 0.5),
             "closest": (3.0, 0.74), "other": (2.5, 0.6), "slower": (5.5, 0.7), "noise": (4.95, 0.745),
             "broken": (1.0, 0.1)}  # fmt: skip
    trials = [trial(running.task, everything, *values, name) for name, values in cases.items()]
    found = placements_to_recover(running, trials)
    assert [each.digest for each in found] == ["fastest", "closest", "within", "second"]


def test_a_recovered_model_within_the_bound_is_kept_with_its_steps(running, monkeypatch):
    everything = running.task.space.quantize_all()
    digest = running.task.space.digest(everything)
    search(monkeypatch, [trial(running.task, everything.choices, 2.0, 0.6, digest)])
    book = Book(0.61, 0.7, 0.77)
    late = SimpleNamespace(**{**vars(running), "limit": SimpleNamespace(allows_recovery=False)})
    assert not any(recover(late, book).models.values())
    found = recover(running, book)
    ((model,),) = found.models.values()
    (facts,) = read_json(running.folder / "recovery.json")["placements"].values()
    assert model.digest == f"recovered-{facts['sha256'][:12]}"
    assert model.path.name == facts["file"]
    assert facts["within"]
    assert "depthwise channel" in facts["label"], "the channels differ in scale"
    assert (facts["loss_before"], facts["loss"]) == (pytest.approx(0.19), pytest.approx(0.03))
    assert facts["sqnr_db_before"] < facts["sqnr_db"]
    assert len(book.files) == 3
    assert model.placement_digest == digest, "whose timing of the search is kept"
    assert found.losses.keys() == {digest, model.digest}
    assert found.losses[model.digest] < found.losses[digest]
    again = recover(running, Book())
    assert again == found, "recovered once"
    running.experiment = running.experiment.model_copy(
        update={"objective": running.experiment.objective.model_copy(update={"recover": False})}
    )
    assert recover(running, Book()) == Recovery()


def test_a_placement_within_the_bound_gets_one_more_accurate_file(running, monkeypatch):
    everything = running.task.space.quantize_all()
    space = running.task.space
    float_placement = space.float_placement()
    trials = [
        trial(running.task, everything.choices, 2.0, 0.77, space.digest(everything)),
        trial(running.task, float_placement.choices, 3.0, 0.8, space.digest(float_placement)),
    ]
    search(monkeypatch, trials)
    book = Book(0.77, 0.79)
    found = recover(running, book)
    ((model,),) = found.models.values()
    assert len(book.files) == 2, "as given, and recovered"
    assert found.losses[space.digest(float_placement)] == 0
    assert found.losses[model.digest] < found.losses[space.digest(everything)]


def test_recovery_skips_placements_slower_than_one_within_bound(running, monkeypatch):
    space = running.task.space
    placements = [space.quantize_all(), space.quantize_roles(("linear",))]
    trials = [trial(running.task, each.choices, 2.0 + i, 0.8, space.digest(each)) for i, each in enumerate(placements)]
    search(monkeypatch, trials)
    monkeypatch.setattr(recovery, "open_placer", lambda *_: pytest.fail("needs no calibration"))
    book = Book(0.8)
    assert list(recover(running, book).models.values()) == [()]
    first, second = read_json(running.folder / "recovery.json")["placements"].values()
    assert first["surely_within"]
    assert "surely within the bound as given" in first["label"]
    assert second["label"].startswith(f"not tried: {space.digest(placements[0])} is faster")
    assert book.files == ["as given"]


def test_recovery_out_of_time_is_recorded_and_resumed(running, monkeypatch):
    everything = running.task.space.quantize_all()
    search(monkeypatch, [trial(running.task, everything.choices, 2.0, 0.6, running.task.space.digest(everything))])
    with monkeypatch.context() as patch:
        patch.setattr(recovery, "MIN_RECOVERY_S", 0.0)
        assert list(recover(running, Book()).models.values()) == [()]
    (facts,) = read_json(running.folder / "recovery.json")["placements"].values()
    assert "time for recovery is over" in facts["label"]
    ((model,),) = recover(running, Book(0.61, 0.77)).models.values()
    assert count_pairs(model.path) > 0


def test_recovery_discards_placement_that_still_misses_bound(running, monkeypatch):
    everything = running.task.space.quantize_all()
    search(monkeypatch, [trial(running.task, everything.choices, 2.0, 0.6, running.task.space.digest(everything))])
    book = Book(0.6, 0.7, 0.71, 0.72, *[0.7] * 9)
    assert list(recover(running, book).models.values()) == [()]
    (facts,) = read_json(running.folder / "recovery.json")["placements"].values()
    assert (facts["within"], facts["loss"]) == (False, pytest.approx(0.8 - max(0.7, 0.71, 0.72)))


def test_placement_with_measured_loss_within_bound_is_kept(running, monkeypatch):
    everything = running.task.space.quantize_all()
    search(monkeypatch, [trial(running.task, everything.choices, 2.0, 0.6, running.task.space.digest(everything))])
    ((model,),) = recover(running, Book(0.79, *[0.7] * 9)).models.values()
    (facts,) = read_json(running.folder / "recovery.json")["placements"].values()
    assert (facts["label"], facts["within"]) == ("as given", True)
    assert count_pairs(model.path) > 0


def test_recovery_leaves_costliest_nodes_float_as_last_resort(running, monkeypatch):
    everything = running.task.space.quantize_all()
    search(monkeypatch, [trial(running.task, everything.choices, 2.0, 0.6, running.task.space.digest(everything))])
    ((model,),) = recover(running, Book(0.6, 0.7, 0.7, 0.7, 0.7, 0.78)).models.values()
    (facts,) = read_json(running.folder / "recovery.json")["placements"].values()
    (group,) = facts["left_float"]
    assert group["nodes"][0] == "Mul", "one scale for channels that differ; those at the output were tried first"
    assert group["alone_db"] < facts["sqnr_db"], "the others cost less"
    assert facts["sqnr_db"] > facts["sqnr_db_before"]
    assert 0 < count_pairs(model.path) < count_pairs(running.task.candidate(everything).source())
