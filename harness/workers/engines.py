"""Interface by which the harness builds, times and scores engines, and policies for timings on one machine."""

from __future__ import annotations

import errno
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from harness.base.errors import CandidateError, UserError, WorkerUnusable
from harness.base.statistics import Interval
from harness.config.sections import Limits, PluginSpec, Sampling
from harness.measure.records import MAIN_BENCHMARKER, Failed
from harness.measure.sampling import Samples
from harness.plugins.api import Accuracy, Array, Benchmarker, Candidate
from search.space import Resolved

Answer = TypeVar("Answer", covariant=True)
MAX_LOG_LINES = 40


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
class Request(Generic[Answer]):
    """Request whose answer is an `Answer` or a `Failed`; a class of answers is the parameter of each subclass."""

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


@dataclass(frozen=True, slots=True)
class EngineRequest(Request[Answer]):
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
class Inference(EngineRequest[Mapping[str, Array]]):
    """Run one inference, and return its outputs by name."""

    stage = "evaluate"
    feeds: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Release(EngineRequest[None]):
    """Close an engine; an unknown handle is ignored."""


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


class WorkerLost(UserError):
    """Loss of a worker for a reason other than its candidate: its machine left the cluster, or a user stopped it."""


class WorkerKilled(WorkerLost):
    """Kill of a worker process by another process, for instance for lack of memory; a repeated call may succeed."""


class Engines(ABC):
    """Engines of one worker, which are built, timed and scored one request at a time.

    A request returns a failure as a value. Only `UserError` is raised: a plug-in that cannot be constructed fails for
    every candidate.

    Attributes:
        gpus: UUIDs of the GPUs that the engines run on, see `harness.plugins.api.UsesGpu`; empty on a CPU.
    """

    gpus: frozenset[str] = frozenset()

    @abstractmethod
    def build(self, candidate: Candidate, benchmarker: str = MAIN_BENCHMARKER) -> BuiltEngine | Failed:
        """Write the candidate's file and build its engine with the benchmarker of a name."""

    @abstractmethod
    def request(self, request: EngineRequest[T], on_progress: ScoringCallback | None = None) -> T | Failed:
        """Return the answer to a request; `on_progress` receives the progress of a scoring."""

    @abstractmethod
    def describe(self, benchmarker: str = MAIN_BENCHMARKER) -> Mapping[str, Any]:
        """Return the facts of the benchmarker with a name, see `harness.plugins.api.Benchmarker.describe`."""

    def sample(
        self, handle: int, sampling: Sampling, rival: Interval | None = None, level_ms: float | None = None
    ) -> Samples | Failed:
        """Time the engine with a handle, and return its readings.

        Args:
            rival: Latency to beat in ms; sampling stops as soon as the engine is clearly slower.
            level_ms: Latency of the reference in ms, to time the engine in turns with it
                (`harness.measure.sampling`); None: the engine is timed alone.
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
        return self.request(Inference(handle, feeds))

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

        def source() -> Path:
            with self._write_lock:
                return candidate.source()

        with self._policy.building():
            return self._engines.build(replace(candidate, source=source), benchmarker)


def as_outcome(stage: str, work: Callable[..., T], *args: Any) -> T | Failed:
    """Return the result of a plug-in call, or its exception as a `Failed`.

    Args:
        stage: Stage of the failure for exceptions other than `CandidateError`.
        work: The call.
        *args: Its arguments.

    Raises:
        UserError: The plug-in raised it, or the disk is full; neither depends on the candidate.
        WorkerUnusable: The plug-in raised it; the worker ends.
    """
    started_s = time.perf_counter()
    try:
        return work(*args)
    except (UserError, WorkerUnusable):  # neither depends on the candidate
        raise
    except (Exception, SystemExit) as error:  # plug-ins and runtimes may raise anything
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"{stage}: {error}; free disk space, then run the same command again to resume") from error
        reason, trace = f"{type(error).__name__}: {error}", last_lines(traceback.format_exc())
        if isinstance(error, CandidateError):
            stage, reason, trace = error.stage, str(error), ""
        wall_s = time.perf_counter() - started_s
        return Failed(stage=stage, reason=" ".join(reason.split())[:500], log_tail=trace, wall_s=wall_s)


def last_lines(text: str) -> str:
    """Return the last 40 lines of a log."""
    return "\n".join(text.strip().splitlines()[-MAX_LOG_LINES:])
