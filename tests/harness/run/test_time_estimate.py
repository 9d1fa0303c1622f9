"""The estimate of `--check` is compared with the steps of a run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.base.files import read_json
from harness.base.progress import NullProgress
from harness.config.experiment import Experiment, parse_experiment, plan_tasks
from harness.graph.builder import GraphBuilder
from harness.measure.turn_log import decode_turn_event
from harness.results.journal import read_journal
from harness.results.turns import read_comparison
from harness.run.prepare.model_loader import describe_workload, estimate_time_s
from harness.run.runner import run_experiment

COUNT = 64
EVALUATIONS = 4
SHORTEST_S, LONGEST_S = (1.0, 0.1, 0.03, 0.5), (60.0, 2.0, 0.3, 2.0)
"""Durations that the estimate assumes: of the set-up, a build, a turn, and a score relative to the known one."""
FACTOR = 3
"""Most that a run has more or fewer steps than the smallest estimate; the estimate cannot know which are scored."""


def described(**changes: Any) -> dict[str, Any]:
    evaluator = {"use": "top1", "params": {"data": {"use": "npz", "path": "data.npz", "labels": "labels"}}}
    body = {
        "experiment": "e",
        "models": [{"use": "net.onnx", "evaluator": evaluator, "calibration": {"samples": 8}}],
        "backends": ["onnxruntime"],
        "searchers": ["random"],
        "initial": ["float", "all"],
        "baselines": [],
        "budget": {"evaluations": [EVALUATIONS]},
        "objective": {"top1_drop": 0.1},
        "sampling": {"warmup_ms": 1, "max_ms": 20, "interleave": "never"},
        "confirmation": {"builds": 3, "rounds": 2},
    }
    return body | changes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers are the labels of its data."""
    folder = tmp_path_factory.mktemp("estimate")
    b = GraphBuilder("net", seed=1)
    x = b.op("Relu", b.conv(b.input("x", (1, 3, 16, 16)), 8, 3))
    b.output(b.gemm(b.op("Flatten", b.op("GlobalAveragePool", x)), 4), name="logits")
    path = b.save(folder / "net.onnx")
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    images = np.random.default_rng(0).normal(size=(COUNT, 3, 16, 16)).astype(np.float32)
    labels = [int(session.run(None, {"x": image[None]})[0].argmax()) for image in images]
    np.savez(folder / "data.npz", x=images, labels=np.array(labels))
    return folder


@pytest.fixture(scope="module")
def finished(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Experiment, Path]:
    """An experiment, and the folder of its finished task."""
    experiment, out = parse_experiment(json.dumps(described()), "e.yaml", folder), tmp_path_factory.mktemp("run")
    run_experiment(experiment, out=out, observer=NullProgress())
    return experiment, out / plan_tasks(experiment)[0].name


def clock_s(task: Path, known_s: float, durations_s: tuple[float, ...]) -> float:
    """Return the seconds of a run's steps on a clock of given durations, which does not depend on the machine."""
    set_up_s, build_s, turn_s, share = durations_s
    noise = tuple(decode_turn_event(json.dumps(each)) for each in read_json(task / "noise_floor.json")["events"])
    logs = [noise, *(read_comparison(task / f"{name}.jsonl") for name in ("final_selection", "confirmation"))]
    turns = [(number, turn) for number, log in enumerate(logs) for turn in log]
    assert {number for number, _ in turns} >= {0, 2}
    trials = [each.result for each in read_journal(task / "runs" / "random-0.jsonl") if each.result is not None]
    assert len(trials) == EVALUATIONS
    builds = len({(number, turn.build, turn.row) for number, turn in turns}) + len(trials)
    scores = len(read_json(task / "accuracy.json")) + sum(bool(each.outcome.metrics) for each in trials)
    return set_up_s + builds * build_s + len(turns) * turn_s + scores * share * known_s


@pytest.mark.parametrize("score_s", [0.0, 1.0, 1000.0])
def test_the_steps_of_a_run_are_those_of_the_estimate(finished, score_s):
    experiment, folder = finished
    low, high = estimate_time_s(experiment, {"net": score_s})
    assert low / FACTOR <= clock_s(folder, score_s, SHORTEST_S) <= low * FACTOR
    assert low <= clock_s(folder, score_s, LONGEST_S) <= high
    assert re.search(r"(roughly|up to) .*(minutes|hours)$", describe_workload(experiment, {"net": score_s}))


def test_scores_and_recovery_are_part_of_the_estimate(folder):
    def high_s(score_s: float, **changes: Any) -> float:
        experiment = parse_experiment(json.dumps(described(**changes)), "e.yaml", folder)
        return estimate_time_s(experiment, {"net": score_s})[1]

    unbounded = {"objective": {}}
    finalists_s = high_s(100.0, **unbounded) - high_s(0.0, **unbounded)
    assert finalists_s > 2 * 100, "of the float model and a finalist"
    assert high_s(100.0) - high_s(0.0) > finalists_s + 4 * 100, "of all candidates"
    assert high_s(0.0) > high_s(0.0, **unbounded), "recovery"
    said = describe_workload(parse_experiment(json.dumps(described()), "e.yaml", folder), {"net": 100.0})
    assert re.search(r"roughly \d+ to \d+ minutes$", said)
