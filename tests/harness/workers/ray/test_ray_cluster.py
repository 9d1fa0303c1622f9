"""A real Ray cluster of two nodes on this machine: the same run as on one, also when a node leaves in the middle."""

from __future__ import annotations

import os
import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from stored import read_records

from harness.base.errors import UserError
from harness.base.progress import NullProgress
from harness.graph.io.files import model_files
from harness.measure.records import Measured

pytestmark = pytest.mark.slow

FILED = """
experiment: filed
models: [{use: net.onnx, calibration: {samples: 2}}]
backends: [{use: 'costly:Filed', params: {seed: 5, noise: 0.0}}]
searchers: [random]
initial: [float, all]
baselines: [all]
budget: {evaluations: [8]}
sampling: {warmup_ms: 0, min_samples: 5, max_samples: 5}
confirmation: {builds: 3, rounds: 2, samples: 3}
"""


@pytest.fixture(scope="module")
def local(place):
    return place.run("local", "{use: local, workers: 2}")


def test_cluster_results_equal_local_results(cluster, place, local):
    ran = place.run("ray", "{use: ray, workers: 2}")
    assert ran.journals() == local.journals()
    assert ran.table() == local.table()
    assert len(ran.processes()) == 2, "both workers built"
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert not [text for text in ran.said if "refused" in text or "lost" in text or "yields" in text]


def test_models_are_sent_once_and_candidates_written_on_workers(cluster, place, monkeypatch):
    import ray

    sent: list[Any] = []

    def put(value: Any, *, put: Any = ray.put) -> Any:
        sent.append(value)
        return put(value)

    here = place.run("filed-alone", "{use: local, workers: 2}", FILED)
    monkeypatch.setattr(ray, "put", put)
    there = place.run("filed", "{use: ray, workers: 2}", FILED)
    assert there.journals(8) == here.journals(8)
    assert there.table() == here.table()
    assert os.getpid() not in there.processes()
    makers = [value for value in sent if hasattr(value, "write")]
    files = [tuple(value) for value in sent if isinstance(value, dict)]
    rows = {path.name for path in there.out.glob("*/models/*.onnx")}
    assert len(makers) == 1, "model, scales and weights, for all trials of the task"
    met = {row for path in there.out.glob("*/final_selection.jsonl*") for row in read_records(path)[0]["rows"]}
    assert len(files) == len(set(files)) <= len(rows) + len(met) + 1, (
        "float model, final selection and finalists, each once"
    )
    assert len({found.info["bytes"] for found in there.outcomes() if isinstance(found, Measured)}) > 2


def test_missing_cluster_resources_are_reported(cluster, place, monkeypatch):
    from harness.workers.ray import ray_pool as fleet

    monkeypatch.setattr(fleet, "RAY_START_LIMIT_S", 2.0)
    with pytest.raises(UserError, match="each requests 1 GPU, the cluster has 0 GPU in all; all results are saved"):
        place.run("gpu", "{use: ray, workers: 1, resources: {GPU: 1}}")


def test_worker_with_different_benchmarkers_is_refused(monkeypatch):
    pytest.importorskip("ray")
    from harness.workers.ray.ray_pool import RayPool, RayWorkerHandle

    said: list[str] = []
    fleet = RayPool(2, {}, None, SimpleNamespace(say=said.append), model_files)  # type: ignore[arg-type]
    monkeypatch.setattr(fleet, "_request_worker", lambda: said.append("another one"))
    one, two = (RayWorkerHandle(actor=object(), node=node, environment={}) for node in ("one", "two"))
    fleet._workers = [one, two]
    facts = {"main": {"name": "trtexec", "version": "10.16"}}
    assert fleet.check_alike(one, "trtexec", facts)
    assert fleet.check_alike(two, "trtexec", dict(facts))
    assert not fleet.check_alike(two, "trtexec", {"main": {"name": "trtexec", "version": "11.1"}})
    assert fleet._workers == [one]
    assert re.search(r"the worker on two is refused.*\n  main\.version: '10\.16' -> '11\.1'", said[0])
    assert said[1:] == ["another one"]


def test_engines_on_a_gpu_need_workers_that_reserve_one():
    pytest.importorskip("ray")
    from harness.workers.ray.ray_pool import RayPool

    for resources, refused in (({}, True), ({"GPU": 0.25}, True), ({"GPU": 1}, False), ({"CPU": 4, "GPU": 2}, False)):
        fleet = RayPool(1, resources, None, NullProgress(), model_files)
        fleet.check_reserved(frozenset())
        said = r"each worker needs one to itself: resources: \{GPU: 1\}"
        with pytest.raises(UserError, match=said) if refused else nullcontext():
            fleet.check_reserved(frozenset({"GPU-a"}))
