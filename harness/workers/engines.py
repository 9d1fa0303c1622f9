"""Interface by which the harness builds, times and scores engines, and policies for timings on one machine."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from harness.base.statistics import Interval
from harness.config.sections import PluginSpec, Sampling
from harness.measure.records import MAIN_BENCHMARKER, Failed
from harness.measure.sampling import Samples
from harness.plugins.api import Accuracy, Array, Benchmarker, Candidate
from harness.workers.requests import BuiltEngine, EngineRequest, Evaluate, Infer, Prepare, Release, Sample

T = TypeVar("T")
FIRST_STAGE_EVALUATOR = "first stage"
"""Name of the evaluator on some of the images of the search's evaluator, if candidates are scored in stages."""
ScoringCallback = Callable[[int, int], None]
"""Receives the number of finished inferences of a scoring and their total, at intervals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Plug-ins that a worker needs to build, time and score engines.

    Attributes:
        benchmarkers: Benchmarkers by name, with `MAIN_BENCHMARKER`; others may be the same runtime at other precisions.
        workdir: Folder for scratch files and the worker's log.
        evaluators: Evaluators by name, constructed at the first use.
        reference: File of the float model, if candidates may be timed in turns with it; None: without a reference.
        adapt: Function that replaces each benchmarker, for instance by one for several shapes; it can be pickled.
        sizes: Function that replaces each benchmarker, before `adapt`, by one that runs samples at their own sizes.
        concurrent_scoring: Whether evaluators may use all cores, because nothing is timed at the same time.
    """

    benchmarkers: Mapping[str, PluginSpec]
    workdir: Path
    evaluators: Mapping[str, PluginSpec] = field(default_factory=dict)
    reference: Path | None = None
    adapt: Callable[[Benchmarker], Benchmarker] | None = None
    sizes: Callable[[Benchmarker], Benchmarker] | None = None
    concurrent_scoring: bool = True


class WorkerHistory:
    """Kills and waits of the workers of one machine, which outlive each of them.

    Attributes:
        kills: Number of consecutive requests during which a worker was killed, by digest of the candidate and request.
        lock_waits_s: Seconds of waits for locks of other processes, in steps as `timing_lock` reports them.
    """

    def __init__(self) -> None:
        self.kills: Counter[tuple[str, type]] = Counter()
        self.lock_waits_s: list[float] = []


class Engines(ABC):
    """Engines of one worker, which are built, timed and scored one request at a time.

    A request returns a failure as a value. Only `UserError` is raised: a plug-in that cannot be constructed fails for
    every candidate.
    """

    @abstractmethod
    def build(self, candidate: Candidate, benchmarker: str = MAIN_BENCHMARKER) -> BuiltEngine | Failed:
        """Write the candidate's file and build its engine with the benchmarker of a name."""

    @abstractmethod
    def request(self, request: EngineRequest[T], on_progress: ScoringCallback | None = None) -> T | Failed:
        """Return the answer to a request; `on_progress` receives the progress of a scoring."""

    @abstractmethod
    def describe(self, benchmarker: str = MAIN_BENCHMARKER) -> Mapping[str, Any]:
        """Return the facts of the benchmarker with a name, see `harness.plugins.api.Benchmarker.describe`."""

    @property
    def gpus(self) -> frozenset[str]:
        """Return the UUIDs of the GPUs that the engines run on, see `harness.plugins.api.UsesGpu`; empty on a CPU."""
        return frozenset()

    def sample(
        self, handle: int, sampling: Sampling, rival: Interval | None = None, level_ms: float | None = None
    ) -> Samples | Failed:
        """Time the engine with a handle, and return its readings.

        Args:
            rival: Latency to beat in ms; sampling stops as soon as the engine is clearly slower.
            level_ms: Latency of the reference in ms, to time the engine in turns with it
                (`harness.measure.reference_sampling`); None: the engine is timed alone.
        """
        return self.request(Sample(handle, sampling, rival, level_ms))

    def evaluate(
        self, handle: int, evaluator: str = MAIN_BENCHMARKER, watch: ScoringCallback | None = None
    ) -> Accuracy | Failed:
        """Score an engine by the evaluator of a name; `watch` receives progress if the evaluator has `inferences`."""
        return self.request(Evaluate(handle, evaluator), watch)

    def prepare(
        self, handle: int, evaluator: str = MAIN_BENCHMARKER, watch: ScoringCallback | None = None
    ) -> Failed | None:
        """Call `prepare` of an evaluator, if it exists, with the engine of the float model; None, or the failure."""
        return self.request(Prepare(handle, evaluator), watch)

    def infer(self, handle: int, feeds: Mapping[str, Array]) -> Mapping[str, Array] | Failed:
        """Return the outputs of one inference by name."""
        return self.request(Infer(handle, feeds))

    def release(self, handle: int) -> None:
        """Close an engine; an unknown handle is ignored."""
        self.request(Release(handle))


class TimingPolicy:
    """Policy without restrictions, for workers on separate machines or devices."""

    def building(self) -> AbstractContextManager[None]:
        """Return a context for work that is not timed, but uses the processor: builds, evaluators, searchers."""
        return nullcontext()

    def timing(self) -> AbstractContextManager[None]:
        """Return a context for a timing."""
        return nullcontext()


class SerialTiming(TimingPolicy):
    """Policy that allows one timing at a time, and any number of builds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def timing(self) -> Iterator[None]:
        with self._lock:
            yield


class ExclusiveTiming(TimingPolicy):
    """Policy that allows several builds or a single timing at a time; a waiting timing precedes new builds."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._building = 0
        self._waiting = 0
        self._timing = False

    @contextmanager
    def building(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._timing and not self._waiting)
            self._building += 1
        try:
            yield
        finally:
            with self._changed:
                self._building -= 1
                self._changed.notify_all()

    @contextmanager
    def timing(self) -> Iterator[None]:
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: not self._timing and not self._building)
            self._waiting -= 1
            self._timing = True
        try:
            yield
        finally:
            with self._changed:
                self._timing = False
                self._changed.notify_all()


class PolicedEngines(Engines):
    """Engines of one worker under a timing policy.

    Args:
        write_lock: Lock around the writing of candidates' files, which is not thread-safe.
    """

    def __init__(self, engines: Engines, policy: TimingPolicy, write_lock: threading.Lock) -> None:
        self._engines = engines
        self._policy = policy
        self._write_lock = write_lock

    def request(self, request: EngineRequest[Any], on_progress: ScoringCallback | None = None) -> Any:
        if isinstance(request, Release):
            return self._engines.request(request)
        with self._policy.timing() if isinstance(request, Sample) else self._policy.building():
            return self._engines.request(request, on_progress)

    def describe(self, benchmarker: str = MAIN_BENCHMARKER) -> Mapping[str, Any]:
        return self._engines.describe(benchmarker)

    def build(self, candidate: Candidate, benchmarker: str = MAIN_BENCHMARKER) -> BuiltEngine | Failed:
        """Build as `Engines.build`; the candidate's file, if it is missing, is written under the write lock."""
        with self._policy.building():
            return self._engines.build(self._with_write_lock(candidate), benchmarker)

    def _with_write_lock(self, candidate: Candidate) -> Candidate:
        def source() -> Path:
            with self._write_lock:
                return candidate.source()

        return replace(candidate, source=source)
