"""A small experiment on the simulated runtime, run in a process of its own that can be ended at any moment."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from small import save_small

from harness.base.progress import NullProgress
from harness.config.experiment import Experiment, parse_experiment
from harness.run.runner import run_experiment

EXPERIMENT = """
experiment: killed
models: [{use: net.onnx, calibration: {samples: 2}}]
backends: [{use: simulated, params: {seed: 5, noise: 0.0, failure_rate: 0.1}}]
searchers: [random, evolutionary]
initial: [float, all, linear]
baselines: [all, linear]
budget: {evaluations: [20, 40]}
seeds: [0, 1]
sampling: {warmup_ms: 0, min_samples: 5, max_samples: 5}
confirmation: {builds: 3, rounds: 2, samples: 3}
"""


@dataclass(frozen=True)
class Workplace:
    """Where the experiment lies.

    Attributes:
        folder: Of the model.
        experiment: As it was parsed.
    """

    folder: Path
    experiment: Experiment

    def with_executor(self, executor: str) -> Workplace:
        """The same on another executor."""
        return Workplace(
            self.folder, parse_experiment(f"{EXPERIMENT}executor: {executor}\n", "killed.yaml", self.folder)
        )

    def with_workers(self) -> Workplace:
        """A smaller one, whose engines are in worker processes."""
        text = EXPERIMENT.replace("simulated", "'costly:Filed'").replace("[20, 40]", "[8]").replace("[0, 1]", "[0]")
        text = text.replace("[random, evolutionary]", "[evolutionary]").replace(", linear]", "]")
        text = text.replace("rounds: 2,", "rounds: 2, candidates: 1,")
        return Workplace(self.folder, parse_experiment(text, "killed.yaml", self.folder))

    def run(self, out: Path) -> None:
        """Run it, or what is left of it, in this process."""
        run_experiment(self.experiment, out=out, observer=NullProgress())

    def start(self, out: Path, work: Callable[[], None] | None = None) -> int:
        """Run it in a fork, which starts at once because everything is imported; gives the process."""
        child = os.fork()
        if child:
            return child
        code = 1
        try:  # nothing of the parent's, pytest's output least of all, may happen twice
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            (work or (lambda: self.run(out)))()
            code = 0
        finally:
            os._exit(code)

    @staticmethod
    def kill_after(child: int, seconds: float) -> bool:
        """Send SIGKILL when the time is over; whether the process was still at work."""
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                assert status == 0, "the run failed by itself"
                return False
            time.sleep(0.002)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        return os.WIFSIGNALED(status)


@pytest.fixture(scope="session")
def workplace(tmp_path_factory):
    """The experiment with its model."""
    folder = tmp_path_factory.mktemp("safety")
    save_small(folder / "net.onnx")
    return Workplace(folder, parse_experiment(EXPERIMENT, "killed.yaml"))
