"""A made-up runtime whose builds cost processor time, and that says who built; one form of it has outputs to score."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from harness.accuracy.metrics.fidelity import Fidelity
from harness.base.errors import UserError
from harness.plugins.api import Accuracy, Array, Artifact, Candidate, Capabilities, Infer
from harness.runtimes.simulated import SimulatedBenchmarker

__all__ = ["Costly", "Elsewhere", "Filed", "Hangs", "Scored", "Where"]


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
        built = SimulatedBenchmarker.build(self, candidate, workdir)
        return replace(built, info={**built.info, "process": os.getpid()})

    def describe(self) -> Mapping[str, Any]:
        """As the simulated runtime does."""
        return {**SimulatedBenchmarker.describe(self), "name": "costly"}


class Scored(Costly):
    """One whose engines answer: the faster, the further away from the float model."""

    @contextmanager
    def open(self, artifact: Artifact) -> Iterator[Any]:
        """A probe that infers too."""
        with SimulatedBenchmarker.open(self, artifact) as probe:
            yield _Talking(probe.sample, artifact.info["truth_ms"])


@dataclass(frozen=True, slots=True)
class _Talking:
    sample: Any
    truth_ms: float

    def infer(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """The same whatever it is asked."""
        return {"y": np.array([[1.0, 10.0 - self.truth_ms]], np.float32)}


class Where(Fidelity):
    """Fidelity, and the process that it was found in."""

    metric = "cosine"

    def score(self, infer: Infer) -> Accuracy:
        """See `Fidelity`."""
        found = super().score(infer)
        return replace(found, metrics={**found.metrics, "process": float(os.getpid())})


class Elsewhere(Costly):
    """One whose device the driver's machine has not."""

    def describe(self) -> Mapping[str, Any]:
        """Facts for processes other than the driver."""
        if "pytest" in sys.modules:
            raise UserError("costly: there is no such device here")
        return Costly.describe(self)


class Filed(SimulatedBenchmarker):
    """One that lives in a worker process and reads the model's file, as real runtimes do."""

    capabilities = Capabilities(dialect="openvino")

    def build(self, candidate: Candidate, workdir: Path) -> Artifact:
        """The truth of the placement, and how large its file is."""
        built = SimulatedBenchmarker.build(self, candidate, workdir)
        size = candidate.source().stat().st_size
        return replace(built, info={**built.info, "process": os.getppid(), "bytes": size})

    def describe(self) -> Mapping[str, Any]:
        """As the simulated runtime does."""
        return {**SimulatedBenchmarker.describe(self), "name": "filed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hangs(Costly):
    """One that hangs in the process that holds the engines.

    Args:
        digest: Placement that hangs.
        once: File that is made by a hang, after which there is none.
    """

    digest: str = ""
    once: str = ""

    def build(self, candidate: Candidate, workdir: Path) -> Artifact:
        """Hang or build."""
        if candidate.digest == self.digest and not (self.once and Path(self.once).exists()):
            if self.once:
                Path(self.once).touch()
            time.sleep(3600)
        return Costly.build(self, candidate, workdir)
