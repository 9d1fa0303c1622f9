"""Whole experiments on a real Ray cluster: several tasks at once, evaluators on the workers, accepted changes."""

from __future__ import annotations

import os
import re
import threading
import time

import pytest
from stored import forget_task, read_text

from harness.base.errors import UserError
from harness.base.files import read_json, write_json
from harness.results.search_log import PROXY

pytestmark = pytest.mark.slow

SHARDED = """
experiment: sharded
models: [{use: net.onnx, calibration: {samples: 2}}, {use: other.onnx, calibration: {samples: 2}}]
backends: [{use: 'costly:Costly', params: {seed: 5, noise: 0.0, cost_s: 0.02, failure_rate: 0.1}}]
searchers: [random, evolutionary]
seeds: [0, 1]
initial: [float, all]
baselines: [all]
budget: {evaluations: [10]}
sampling: {warmup_ms: 0, min_samples: 5, max_samples: 5}
confirmation: {builds: 3, rounds: 2, samples: 3}
"""
ONE_TASK = re.sub(r"models: \[(\{.*?\}\}),.*", r"models: [\1]", SHARDED).replace("seeds: [0, 1]", "seeds: [0]")
SCORED = """
experiment: scored
models:
  - use: net.onnx
    calibration: {data: {use: npz, path: calibration.npz}, samples: 4}
    evaluator: {use: 'costly:Where', params: {data: {use: npz, path: labelled.npz}, samples: 40}}
backends: [{use: 'costly:Scored', params: {seed: 5, noise: 0.0, wanted_share: 1.0, cost_s: 0.02}}]
objective: {minimize: pareto, halves: true, proxy: 2}
searchers: [random]
initial: [float, all]
baselines: [all]
budget: {evaluations: [12]}
sampling: {warmup_ms: 0, min_samples: 3, max_samples: 3}
confirmation: {builds: 3, rounds: 2, samples: 3}
"""


@pytest.fixture(scope="module")
def alone(place):
    return place.run("sharded-alone", "{use: local}", SHARDED)


def test_tasks_are_distributed_over_the_cluster(cluster, place, alone):
    ran = place.run("sharded", "{use: ray, workers: 2, tasks: 2, searches: 2, window: 1}", SHARDED)
    assert len(ran.entries()) == 8, "2 models x 2 searchers x 2 seeds"
    assert ran.journals(10) == alone.journals(10)
    assert ran.table() == alone.table()
    assert len(ran.processes()) == 2
    assert os.getpid() not in ran.processes()
    assert alone.processes() == {os.getpid()}


def test_node_loss_with_parallel_tasks_keeps_results(cluster, place, alone):
    node = cluster.add_node(num_cpus=1)
    out = place.folder / "sharded-left"

    def leave() -> None:
        while sum(read_text(path).count('"result"') for path in out.glob("*/runs/*.jsonl*")) < 20:
            time.sleep(0.005)
        cluster.remove_node(node, allow_graceful=False)

    threading.Thread(target=leave, daemon=True).start()
    ran = place.run("sharded-left", "{use: ray, workers: 3, tasks: 2, searches: 2, window: 1}", SHARDED)
    assert ran.journals(10) == alone.journals(10)
    assert ran.table() == alone.table()
    assert [text for text in ran.said if "was lost" in text]


def test_evaluators_run_on_the_workers(cluster, place):
    here = place.run("scored-alone", "{use: local, window: 3}", SCORED)
    there = place.run("scored", "{use: ray, workers: 2}", SCORED)
    assert there.journals(12) == here.journals(12)
    scorers = {int(found.metrics["process"]) for found in there.outcomes() if "process" in found.metrics}
    assert scorers <= there.processes(), "an engine is scored where it was built"
    assert os.getpid() not in scorers
    assert all(PROXY in found.metrics for found in there.outcomes())
    assert there.table() == here.table()
    (path,) = there.out.glob("*/accuracy.json")
    finalists = [score["metrics"] for score in read_json(path).values()]
    assert all(int(metrics.get("process", 0)) != os.getpid() for metrics in finalists)


def test_results_of_another_machine_resume_if_accepted(cluster, place, monkeypatch):
    from harness.workers.ray import ray_pool

    executor = "{use: ray, workers: 1, window: 1}"
    first = place.run("moved", executor, ONE_TASK)
    (path,) = first.out.glob("*/env.json")
    forget_task(path.parent)
    facts = read_json(path)
    write_json(path, {**facts, "packages": {**facts["packages"], "numpy": "1.0"}})
    monkeypatch.setattr(ray_pool, "RAY_START_LIMIT_S", 5.0)
    with pytest.raises(UserError, match="no worker can be used"):
        place.run("moved", executor, ONE_TASK)
    monkeypatch.undo()
    again = place.run("moved", executor, ONE_TASK, accept_changes=True)
    assert [said for said in again.said if "accepted: the earlier results are in" in said and ".1" in said]
    assert len(again.entries()) == 4, "two searches, before and after"


def test_the_driver_needs_no_device_of_its_own(cluster, place):
    text = ONE_TASK.replace("costly:Costly", "costly:Elsewhere")
    with pytest.raises(UserError, match="there is no such device here"):
        place.run("elsewhere-local", "{use: local}", text)
    ran = place.run("elsewhere", "{use: ray, workers: 2}", text)
    assert len(ran.journals(10)) == 2
    assert {line["verdict"] for line in ran.table()} >= {"baseline"}
