"""The estimate of `--check` is compared with the time of a run."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.config.experiment import parse_experiment
from harness.graph.builder import GraphBuilder
from harness.pipeline.runner import run_experiment
from harness.progress import NullProgress
from harness.task_setup.model_loader import describe_workload, estimate_time_s
from harness.task_setup.preflight import check_and_time

COUNT = 64
FACTOR = 3
"""Factor by which a run may leave the printed range, on a machine that is busy or fast."""


def described(**changes: Any) -> dict[str, Any]:
    evaluator = {"use": "top1", "params": {"data": {"use": "npz", "path": "data.npz", "labels": "labels"}}}
    body = {
        "experiment": "e",
        "models": [{"use": "net.onnx", "evaluator": evaluator, "calibration": {"samples": 8}}],
        "backends": ["onnxruntime"],
        "searchers": ["random"],
        "initial": ["float", "all"],
        "baselines": [],
        "budget": {"evaluations": [4]},
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


def test_a_run_takes_about_as_long_as_estimated(folder, tmp_path):
    experiment = parse_experiment(json.dumps(described()), "e.yaml", folder)
    _, score_s = check_and_time(experiment)
    said = describe_workload(experiment, score_s)
    found = re.search(r"(?:roughly (\d+)|up) to (\d+) minutes$", said)
    assert found, said
    started_s = time.monotonic()
    run_experiment(experiment, out=tmp_path / "out", observer=NullProgress())
    spent_s = time.monotonic() - started_s
    low, high = (60 * int(minutes or 0) for minutes in found.groups())
    assert low / FACTOR <= spent_s <= high * FACTOR


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
