"""A real Ray cluster of two nodes on this machine: the same run as on one, also when a node leaves in the middle."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.errors import UserError
from harness.graph.build import GraphBuilder
from harness.measure.provenance import environment
from harness.records import Measured
from harness.report.frames import main_frame
from harness.report.results import load
from harness.run.config import parse_experiment
from harness.run.experiment import run_experiment
from harness.run.journal import read_journal
from harness.run.observe import Silent

pytest.importorskip("ray", reason="the extra 'ray' is not installed")
pytestmark = pytest.mark.slow

EXPERIMENT = """
experiment: clustered
models: [{use: net.onnx, calibration: {samples: 2}}]
backends: [{use: 'costly:Costly', params: {seed: 5, noise: 0.0, cost_s: 0.02, failure_rate: 0.1}}]
searchers: [random, evolutionary]
initial: [float, all, linear]
baselines: [all, linear]
budget: {evaluations: [10, 20]}
sampling: {warmup_ms: 0, min_samples: 5, max_samples: 5}
confirmation: {builds: 3, rounds: 2, samples: 3}
"""


class Loud(Silent):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cluster")
    builder = GraphBuilder("net", seed=1)
    x = builder.input("x", (1, 3, 16, 16))
    for channels in (8, 8, 12, 12):
        x = builder.op("Relu", builder.conv(x, channels, 3, pad=1))
    builder.output(builder.op("GlobalAveragePool", x))
    builder.save(folder / "net.onnx")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        yield folder


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Any]:
    """A head that the driver is connected to, without workers, and two nodes with one CPU each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")
        import ray
        from ray.cluster_utils import Cluster

        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        ray.init(address=made.address, log_to_driver=False)
        for _ in range(2):
            made.add_node(num_cpus=1)
        yield made
        ray.shutdown()
        made.shutdown()


def run(folder: Path, out: str, executor: str) -> tuple[Path, list[str]]:
    observer = Loud()
    experiment = parse_experiment(f"{EXPERIMENT}executor: {executor}\n", "clustered.yaml")
    run_experiment(experiment, base=folder, out=folder / out, observer=observer)
    return folder / out, observer.said


def journals(out: Path) -> dict[str, list[tuple[Any, ...]]]:
    """What was asked and what came of it; numbers of outcomes show whether one is missing or there twice."""
    found = {}
    for path in sorted(out.glob("*/runs/*.jsonl")):
        entries = list(read_journal(path))
        found[path.name] = [
            (
                e.asked.choices,
                e.asked.duplicate_of,
                e.told
                and (e.told.outcome.samples_ms if isinstance(e.told.outcome, Measured) else e.told.outcome.reason),
            )
            for e in entries
        ]
        numbers = [line.count('"kind":"told"') for line in path.read_text().splitlines()]
        assert sum(numbers) == sum(e.told is not None for e in entries) == 20
    return found


def table(out: Path) -> list[dict[str, Any]]:
    return main_frame(load(out)).drop(columns="minutes").astype(str).to_dict("records")


@pytest.fixture(scope="module")
def local(folder: Path) -> Path:
    return run(folder, "local", "{use: local, workers: 2}")[0]


def test_a_cluster_runs_what_one_machine_runs(cluster: Any, folder: Path, local: Path) -> None:
    out, said = run(folder, "ray", "{use: ray, workers: 2}")
    assert journals(out) == journals(local)
    assert table(out) == table(local)
    assert not [text for text in said if "refused" in text or "lost" in text or "yields" in text]


def test_searches_share_the_workers_and_each_asks_as_if_it_were_alone(cluster: Any, folder: Path) -> None:
    alone, _ = run(folder, "alone", "{use: local}")
    out, _ = run(folder, "shared", "{use: ray, workers: 2, searches: 2, window: 1}")
    assert journals(out) == journals(alone)
    assert table(out) == table(alone)


def test_a_node_that_leaves_in_the_middle_costs_nothing(cluster: Any, folder: Path, local: Path) -> None:
    node = cluster.add_node(num_cpus=1)
    out = folder / "left"

    def leave() -> None:
        while sum(path.read_text().count('"told"') for path in out.glob("*/runs/*.jsonl")) < 8:
            time.sleep(0.005)
        cluster.remove_node(node, allow_graceful=False)

    threading.Thread(target=leave, daemon=True).start()
    _, said = run(folder, "left", "{use: ray, workers: 3, window: 3}")
    assert journals(out) == journals(local)
    assert table(out) == table(local)
    assert [text for text in said if "was lost" in text and "2 left" in text]


def test_a_worker_of_another_kind_is_refused_with_the_difference(
    cluster: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from harness.cluster import fleet

    monkeypatch.setattr(fleet, "START_S", 15.0)
    known = environment()
    known["cpu"]["model"], known["packages"]["numpy"] = "i486", "1.0"
    observer = Loud()
    other = fleet.Fleet(1, {}, known, observer)
    with pytest.raises(
        UserError, match=r"(?s)no worker can be used: each asks for 1 CPU, the cluster has 2 CPU.*refused"
    ):
        other.start()
    other.close()
    assert "is refused, for it differs from the baseline's:\n  cpu: 'i486' -> " in observer.said[0]
    assert "packages.numpy: '1.0' -> " in observer.said[0]


def test_a_cluster_without_such_devices_says_what_it_has(
    cluster: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from harness.cluster import fleet

    monkeypatch.setattr(fleet, "START_S", 2.0)
    with pytest.raises(
        UserError, match="each asks for 1 GPU, the cluster has 0 GPU in all; everything measured before is"
    ):
        run(folder, "gpu", "{use: ray, workers: 1, resources: {GPU: 1}}")


def test_usage_reporting_is_off(cluster: Any) -> None:
    from ray._common.usage.usage_lib import usage_stats_enabled

    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert not usage_stats_enabled()
