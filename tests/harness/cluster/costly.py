"""A made-up runtime whose builds cost processor time and whose devices can be told to differ."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.api import Artifact, Candidate
from harness.benchmarkers.simulated import SimulatedBenchmarker


@dataclass(frozen=True, slots=True, kw_only=True)
class Costly(SimulatedBenchmarker):
    """A simulated runtime with a price.

    Args:
        cost_s: Processor time of a build.
    """

    cost_s: float = 0.05

    def build(self, candidate: Candidate, workdir: Path) -> Artifact:
        """Burn the time, then answer."""
        end_s = time.thread_time() + self.cost_s
        while time.thread_time() < end_s:
            pass
        return SimulatedBenchmarker.build(self, candidate, workdir)

    def describe(self) -> Mapping[str, Any]:
        """As the simulated runtime does."""
        return {**SimulatedBenchmarker.describe(self), "name": "costly"}
