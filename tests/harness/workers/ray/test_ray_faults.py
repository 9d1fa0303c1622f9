"""Faults on a real Ray cluster of two nodes: a killed driver, workers that hang, a node of another kind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from stored import read_text

from harness.measure.records import Failed
from harness.results.journal import JournalEntry

pytestmark = pytest.mark.slow

HANGING = """
experiment: hanging
models: [{use: net.onnx, calibration: {samples: 2}}]
backends: [{use: 'costly:Hangs', params: {seed: 5, noise: 0.0%s}}]
searchers: [random]
initial: [float, all]
baselines: [all]
budget: {evaluations: [12]}
limits: {build_s: 3, measure_s: 2}
sampling: {warmup_ms: 0, min_samples: 5, max_samples: 5}
confirmation: {builds: 3, rounds: 2, samples: 3}
"""
RAY = "{use: ray, workers: 2, window: 2}"


def results(out: Path) -> int:
    return sum(read_text(path).count('"result"') for path in out.glob("*/runs/*.jsonl*"))


def confirming(out: Path) -> bool:
    return any(out.glob("*/confirmation.jsonl*"))


def reported(ran: Any) -> dict[str, dict[int, Any]]:
    """Return the results on the disk by journal and number."""
    return {
        name.removesuffix(".gz"): {entry.proposal.number: entry.result for entry in entries if entry.result is not None}
        for name, entries in ran.entries().items()
    }


def call_soon(condition: Callable[[], bool], action: Callable[[], object]) -> None:
    """Call an action in a thread as soon as a condition holds."""

    def wait() -> None:
        while not condition():
            time.sleep(0.005)
        action()

    threading.Thread(target=wait, daemon=True).start()


def test_killed_driver_resumes_without_loss(cluster, place):
    local = place.run("unkilled", "{use: local, workers: 2, window: 3}")
    out, path = place.folder / "killed", place.folder / "killed.yaml"
    path.write_text(f"{place.text}executor: {{use: ray, workers: 2, window: 3, address: '{cluster.address}'}}\n")
    command = [sys.executable, "-m", "harness.cli.main", "run", str(path), "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    moments = (lambda: results(out) > 3, lambda: results(out) > 25, lambda: confirming(out), lambda: False)
    ran, killed = place.ran("killed"), 0
    seen: dict[str, dict[int, Any]] = {}
    for moment in moments:
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as driver:
            while driver.poll() is None and not moment():
                time.sleep(0.005)
            killed += driver.poll() is None
            driver.kill()
            assert driver.wait() in (0, -9), driver.communicate()[1].decode()
        now = reported(ran)
        assert all(now[name].items() >= found.items() for name, found in seen.items()), "a result is gone"
        seen = now
    assert killed == 3
    assert ran.journals() == local.journals()
    assert ran.table() == local.table()


def hanging_digest(entries: list[JournalEntry]) -> str:
    """Return a placement in the middle of a search, which is no initial one."""
    return entries[5].proposal.digest


@pytest.fixture
def short_limits(monkeypatch):
    from harness.workers.ray import ray_pool

    monkeypatch.setattr(ray_pool, "RAY_ANSWER_LIMIT_S", 2.0)


@pytest.mark.parametrize("once", [True, False])
def test_hanging_placement_is_retried_once_and_then_fails(cluster, place, short_limits, once):
    local = place.run("hangs-alone", "{use: local, workers: 2, window: 2}", HANGING % "")
    ((name, entries),) = local.entries().items()
    digest = hanging_digest(entries)
    mark = place.folder / "hung" if once else ""
    ran = place.run(f"hangs-{once}", RAY, HANGING % f", digest: '{digest}', once: '{mark}'")
    assert len([said for said in ran.said if "was lost (build took longer than" in said]) == (1 if once else 2)
    found = ran.entries()[name]
    assert [entry.proposal.choices for entry in found] == [entry.proposal.choices for entry in entries]
    failed = [entry for entry in found if entry.result and isinstance(entry.result.outcome, Failed)]
    if once:
        assert not failed
        assert ran.journals(12) == local.journals(12)
    else:
        assert [entry.proposal.digest for entry in failed] == [digest]
        outcome = failed[0].result.outcome  # type: ignore[union-attr]
        assert "2 workers in a row" in outcome.reason  # type: ignore[union-attr]
        assert "build took longer than" in outcome.reason  # type: ignore[union-attr]


def test_a_worker_that_is_stopped_is_replaced(cluster, place, short_limits):
    local = place.run("stopped-alone", "{use: local, workers: 2, window: 2}", HANGING % "")
    out = place.folder / "stopped"
    stopped: list[psutil.Process] = []

    def stop() -> None:
        stopped.append(next(each for each in psutil.process_iter() if "ray::RayWorker" in " ".join(each.cmdline())))
        stopped[0].suspend()

    call_soon(lambda: results(out) > 3, stop)
    ran = place.run("stopped", RAY, HANGING % "")
    assert ran.journals(12) == local.journals(12)
    assert ran.table() == local.table()
    assert [said for said in ran.said if "was lost" in said]
    stopped[0].wait(timeout=60)  # Ray kills what does not end by itself, so that it holds no lock


def test_node_with_another_label_is_refused(cluster, place):
    local = place.run("labelled-alone", "{use: local, workers: 2, window: 3}")
    shorter = place.text.replace("[10, 20]", "[10]")
    place.run("labelled", "{use: ray, workers: 2, window: 3}", shorter)
    node = cluster.add_node(num_cpus=1, labels={"qdq-device": "i486"})
    try:
        ran = place.run("labelled", "{use: ray, workers: 3, window: 3}")
    finally:
        cluster.remove_node(node)
    (said,) = [said for said in ran.said if "is refused" in said]
    assert "node_label: None -> 'i486'" in said
    assert ran.journals() == local.journals()
    assert ran.table() == local.table()
    assert len(ran.processes()) <= 4, "two workers each time"
