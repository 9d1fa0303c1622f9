"""Requests to the engines of a worker: one frozen class for each, with its time limit and its stage in failures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from harness.base.statistics import Interval
from harness.config.sections import Limits, Sampling
from harness.measure.sampling import Samples
from harness.plugins.api import Accuracy, Array, Candidate
from search.space import Resolved

T = TypeVar("T", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEngine:
    """Engine that was built and can be sampled.

    Attributes:
        handle: Number of the engine until it is released or its worker dies.
        build_s: Wall-clock seconds of the build, without writing the model file.
        info: Facts about the engine from `Artifact.info`.
    """

    handle: int
    build_s: float
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request(Generic[T]):
    """Request whose answer is a `T` or a `Failed`; a class of answers is the parameter of each subclass."""

    stage: ClassVar[str] = "measure"
    """Stage of a failure that is not the candidate's."""

    def limit_s(self, limits: Limits) -> float:
        """Return the seconds after which the worker is ended."""
        return limits.evaluate_s


@dataclass(frozen=True, slots=True)
class Build(Request[BuiltEngine]):
    """Build the engine of a written file by the benchmarker of a name."""

    stage = "build"
    digest: str
    edges: Resolved
    path: Path
    benchmarker: str

    def limit_s(self, limits: Limits) -> float:
        return limits.build_s

    @property
    def candidate(self) -> Candidate:
        """Return the candidate of the file."""
        return Candidate(digest=self.digest, edges=self.edges, source=lambda: self.path)


@dataclass(frozen=True, slots=True)
class EngineRequest(Request[T]):
    """Request to an engine that was built."""

    handle: int


@dataclass(frozen=True, slots=True)
class Open(EngineRequest[None]):
    """Open an engine for timing, and the engine of the reference too if its latency `level_ms` is given."""

    level_ms: float | None = None

    def limit_s(self, limits: Limits) -> float:
        # The first engine that is timed against the reference waits for its build.
        return limits.measure_s + (0.0 if self.level_ms is None else limits.build_s)


@dataclass(frozen=True, slots=True)
class Sample(EngineRequest[Samples]):
    """Time an engine; for the fields see `Engines.sample`."""

    sampling: Sampling
    rival: Interval | None = None
    level_ms: float | None = None

    def limit_s(self, limits: Limits) -> float:
        return limits.measure_s


@dataclass(frozen=True, slots=True)
class Evaluate(EngineRequest[Accuracy]):
    """Score an engine by the evaluator of a name."""

    stage = "evaluate"
    evaluator: str


@dataclass(frozen=True, slots=True)
class Prepare(EngineRequest[None]):
    """Prepare the evaluator of a name, if it has `prepare`, with the engine of the float model."""

    stage = "evaluate"
    evaluator: str


@dataclass(frozen=True, slots=True)
class Infer(EngineRequest[Mapping[str, Array]]):
    """Run one inference, and return its outputs by name."""

    stage = "evaluate"
    feeds: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Release(EngineRequest[None]):
    """Close an engine; an unknown handle is ignored."""
