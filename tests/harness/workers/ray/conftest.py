"""A real Ray cluster on this machine, and a small experiment that is run with and without it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import save_chain
from stored import read_text

from harness.base.progress import NullProgress
from harness.config.experiment import parse_experiment
from harness.measure.records import Measured, Outcome, TrialResult
from harness.report.frames import main_frame
from harness.results.folder import load
from harness.results.journal import JournalEntry, read_journal
from harness.run.runner import run_experiment

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


class Loud(NullProgress):
    """Observer that keeps messages."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


@dataclass(frozen=True)
class Ran:
    """A run and what it left.

    Attributes:
        out: Results folder.
        said: Messages to the observer.
    """

    out: Path
    said: list[str]

    def entries(self) -> dict[str, list[JournalEntry]]:
        """By task and journal."""
        paths = sorted(self.out.glob("*/runs/*.jsonl*"))
        return {f"{path.parts[-3]}/{path.name}": list(read_journal(path)) for path in paths}

    def journals(self, evaluations: int = 20) -> dict[str, list[tuple[Any, ...]]]:
        """What was asked and what came of it; as many outcomes as there are evaluations, none twice."""
        for path in self.out.glob("*/runs/*.jsonl*"):
            assert read_text(path).count('"kind":"result"') == evaluations
        return {name: [_plain(entry) for entry in entries] for name, entries in self.entries().items()}

    def outcomes(self, task: str = "") -> list[Outcome]:
        """Of all searches, or of those of the tasks whose names begin so."""
        found = [entries for name, entries in self.entries().items() if name.startswith(task)]
        return [entry.result.outcome for entries in found for entry in entries if entry.result is not None]

    def processes(self, task: str = "") -> set[int]:
        """Which processes built."""
        return {found.info["process"] for found in self.outcomes(task) if isinstance(found, Measured)}

    def table(self) -> list[dict[str, Any]]:
        """The main table, but for how long it took."""
        return main_frame(load(self.out)).drop(columns="minutes").astype(str).to_dict("records")


def _plain(entry: JournalEntry) -> tuple[Any, ...]:
    return entry.proposal.choices, entry.proposal.duplicate_of, _said(entry.result)


def _said(told: TrialResult | None) -> Any:
    """What an outcome says, but for how long it took and where."""
    if told is None or not isinstance(told.outcome, Measured):
        return told and told.outcome.reason
    metrics = {name: value for name, value in told.outcome.metrics.items() if name != "process"}
    return told.outcome.samples_ms, metrics


@dataclass(frozen=True)
class Workplace:
    """Where models and results lie."""

    folder: Path
    text: str = EXPERIMENT

    def ran(self, name: str) -> Ran:
        """Return what other processes ran into a folder of this name."""
        return Ran(self.folder / name, [])

    def run(self, name: str, executor: str, text: str = EXPERIMENT, *, accept_changes: bool = False) -> Ran:
        """Run the experiment into a folder of this name."""
        observer = Loud()
        experiment = parse_experiment(f"{text}executor: {executor}\n", "clustered.yaml", self.folder)
        out = self.folder / name
        run_experiment(experiment, out=out, observer=observer, accept_changes=accept_changes)
        return Ran(out, observer.said)


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """Two models and data to score them on."""
    folder = tmp_path_factory.mktemp("cluster")
    for name, sizes in (("net", (8, 8, 12, 12)), ("other", (8, 12, 8))):
        save_chain(folder / f"{name}.onnx", sizes)
    rng = np.random.default_rng(0)
    for name, rows in (("calibration", 4), ("labelled", 40)):
        np.savez(folder / f"{name}.npz", x=rng.normal(size=(rows, 3, 16, 16)).astype(np.float32))
    return Workplace(folder)


@pytest.fixture(scope="session")
def cluster(place):
    """A head that the driver is connected to, without workers, and two nodes with one CPU each."""
    pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    from harness.workers.ray import RAY_ENVIRONMENT

    with pytest.MonkeyPatch.context() as patch:
        for name, value in RAY_ENVIRONMENT.items():
            patch.setenv(name, value)
        import ray
        from ray.cluster_utils import Cluster

        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        ray.init(address=made.address, log_to_driver=False)
        for _ in range(2):
            made.add_node(num_cpus=1)
        yield made
        ray.shutdown()
        made.shutdown()
