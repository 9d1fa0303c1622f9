"""What the rest of the harness sees of building and running engines, wherever they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from harness.api import Accuracy, Array, Candidate
from harness.measure.sampling import Samples
from harness.measure.stats import Interval
from harness.records import Failed
from harness.run.config import Sampling, Use

__all__ = ["MAIN", "Built", "Engines", "OwnEngines", "Watch", "WorkerSpec"]

MAIN = "main"
"""The benchmarker or evaluator that is meant where none is named."""
Watch = Callable[[int, int], None]
"""Told now and then how many inferences of a scoring are done, and how many it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """An engine that was built and waits to be sampled.

    Attributes:
        handle: Names it until it is released or its worker dies.
        build_s: Wall-clock of the build, without making the model's file.
        info: Facts of the engine from `Artifact.info`.
    """

    handle: int
    build_s: float
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What a worker needs to build, time and score engines: plug-ins by name with their parameters.

    Attributes:
        benchmarkers: By name; `MAIN` is required, another may be the same runtime at FP32.
        evaluators: By name; made when first asked for.
        reference: Model that candidates may be timed beside: the float model.
        workdir: Folder for scratch files and the worker's log.
    """

    benchmarkers: Mapping[str, Use]
    workdir: Path
    evaluators: Mapping[str, Use] = field(default_factory=dict)
    reference: Path | None = None


class Engines(Protocol):
    """Builds, times and scores candidates, one call at a time; failures come back as values.

    `UserError` alone is raised: a plug-in that cannot be made at all fails for every candidate.
    """

    def build(self, candidate: Candidate, benchmarker: str = MAIN) -> Built | Failed:
        """Make the candidate's file and build its engine."""
        ...

    def sample(
        self, handle: int, sampling: Sampling, rival: Interval | None = None, level_ms: float | None = None
    ) -> Samples | Failed:
        """Time an engine; against a rival's latency in milliseconds, no longer than it takes to lose.

        Args:
            level_ms: The reference's latency, for engines that have one: see `harness.measure.paired`. None: alone.
        """
        ...

    def evaluate(self, handle: int, evaluator: str = MAIN, watch: Watch | None = None) -> Accuracy | Failed:
        """Score an engine.

        Args:
            watch: Told how far it is, where the evaluator has `inferences` and runs on this machine.
        """
        ...

    def prepare(self, handle: int, evaluator: str = MAIN, watch: Watch | None = None) -> Failed | None:
        """Let an evaluator that wants it see the float engine first; None where that went well or is not wanted."""
        ...

    def infer(self, handle: int, feeds: Mapping[str, Array]) -> Mapping[str, Array] | Failed:
        """Return the outputs of one inference by name."""
        ...

    def release(self, handle: int) -> None:
        """Let go of an engine; one that is gone already is no error."""
        ...

    def describe(self, benchmarker: str = MAIN) -> Mapping[str, Any]:
        """The benchmarker's own facts."""
        ...


class OwnEngines(Engines, Protocol):
    """Engines of this very machine."""

    @property
    def gpus(self) -> frozenset[str]:
        """The GPUs that they run on, see `gpu` of `harness.api.Benchmarker`."""
        ...
