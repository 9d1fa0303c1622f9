"""Interface through which the harness builds, times and scores engines, wherever they run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from harness.api import Accuracy, Array, Benchmarker, Candidate
from harness.config.sections import PluginSpec, Sampling
from harness.records import MAIN_BENCHMARKER, Failed
from harness.statistics import Interval
from harness.timing.sampling import Samples

T = TypeVar("T")
FIRST_STAGE_EVALUATOR = "first stage"
"""Name of the evaluator on some of the images of the search's evaluator, if candidates are scored in stages."""
ScoringCallback = Callable[[int, int], None]
"""Receives the number of finished inferences of a scoring and their total, at intervals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEngine:
    """Engine that was built and can be sampled.

    Attributes:
        handle: Identifies the engine until it is released or its worker dies.
        build_s: Wall-clock time of the build, without writing the model file.
        info: Facts about the engine from `Artifact.info`.
    """

    handle: int
    build_s: float
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Plug-ins that a worker needs to build, time and score engines.

    Attributes:
        benchmarkers: By name; `MAIN_BENCHMARKER` is required, another may be the same runtime at FP32.
        evaluators: By name; constructed on first use.
        reference: Float model against which candidates may be timed.
        workdir: Folder for scratch files and the worker's log.
        adapt: Returns a benchmarker to use in place of each, such as one of several shapes; it is sent to processes.
        concurrent_scoring: Evaluators may use all cores, because nothing of this machine is timed at the same time.
    """

    benchmarkers: Mapping[str, PluginSpec]
    workdir: Path
    evaluators: Mapping[str, PluginSpec] = field(default_factory=dict)
    reference: Path | None = None
    adapt: Callable[[Benchmarker], Benchmarker] | None = None
    concurrent_scoring: bool = True


class Engines(ABC):
    """Engines of one worker, which are built, timed and scored one call at a time.

    A call returns a failure as a value. Only `UserError` is raised: a plug-in that cannot be constructed fails for
    every candidate. Subclasses implement `_call`, which carries a method's name and arguments to the engines.
    """

    @abstractmethod
    def _call(self, method: str, *args: Any, on_progress: ScoringCallback | None = None) -> Any:
        """Run a method and return its result or a `Failed`."""

    @abstractmethod
    def describe(self, benchmarker: str = MAIN_BENCHMARKER) -> Mapping[str, Any]:
        """Return the facts that a benchmarker gives about itself."""

    @property
    def gpus(self) -> frozenset[str]:
        """Return the UUIDs of the GPUs that the engines run on, see `harness.api.Benchmarker`."""
        return frozenset()

    def build(self, candidate: Candidate, benchmarker: str = MAIN_BENCHMARKER) -> BuiltEngine | Failed:
        """Write the candidate's file and build its engine."""
        return self._call("build", candidate, benchmarker)  # type: ignore[no-any-return]

    def examine(self, candidate: Candidate, look: Callable[[Path], T]) -> T:
        """Write the candidate's file and return what `look` makes of it; counts as a build, but uses no engine."""
        return look(candidate.source())

    def sample(
        self, handle: int, sampling: Sampling, rival: Interval | None = None, level_ms: float | None = None
    ) -> Samples | Failed:
        """Time an engine.

        Args:
            rival: Latency to beat in ms; sampling stops as soon as the engine is clearly slower.
            level_ms: Latency of the reference, to time the engine against it (`harness.timing.reference_sampling`);
                None: the engine is timed alone.
        """
        return self._call("sample", handle, sampling, rival, level_ms)  # type: ignore[no-any-return]

    def evaluate(
        self, handle: int, evaluator: str = MAIN_BENCHMARKER, watch: ScoringCallback | None = None
    ) -> Accuracy | Failed:
        """Score an engine; `watch` receives progress if the evaluator has `inferences` and runs on this machine."""
        return self._call("evaluate", handle, evaluator, on_progress=watch)  # type: ignore[no-any-return]

    def prepare(
        self, handle: int, evaluator: str = MAIN_BENCHMARKER, watch: ScoringCallback | None = None
    ) -> Failed | None:
        """Run an evaluator's `prepare`, if it has one, on the float engine."""
        return self._call("prepare", handle, evaluator, on_progress=watch)  # type: ignore[no-any-return]

    def infer(self, handle: int, feeds: Mapping[str, Array]) -> Mapping[str, Array] | Failed:
        """Return the outputs of one inference by name."""
        return self._call("infer", handle, feeds)  # type: ignore[no-any-return]

    def release(self, handle: int) -> None:
        """Close an engine; an unknown handle is ignored."""
        self._call("release", handle)
