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

T = TypeVar("T")
FIRST_STAGE_EVALUATOR = "first stage"
"""Name of the evaluator on some of the images of the search's evaluator, if candidates are scored in stages."""
ScoringCallback = Callable[[int, int], None]
"""Receives the number of finished inferences of a scoring and their total, at intervals."""


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
        kills: Number of consecutive calls during which a worker was killed, by digest of the candidate and method, for
            all workers of this specification.
        lock_waits: Seconds of waits for locks of other processes, in steps as `timing_lock` reports them.
    """

    benchmarkers: Mapping[str, PluginSpec]
    workdir: Path
    evaluators: Mapping[str, PluginSpec] = field(default_factory=dict)
    reference: Path | None = None
    adapt: Callable[[Benchmarker], Benchmarker] | None = None
    sizes: Callable[[Benchmarker], Benchmarker] | None = None
    concurrent_scoring: bool = True
    kills: Counter[tuple[str, str]] = field(default_factory=Counter, compare=False, repr=False)
    lock_waits: list[float] = field(default_factory=list, compare=False, repr=False)


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
        """Return the facts of the benchmarker with a name, see `harness.plugins.api.Benchmarker.describe`."""

    @property
    def gpus(self) -> frozenset[str]:
        """Return the UUIDs of the GPUs that the engines run on, see `harness.plugins.api.UsesGpu`; empty on a CPU."""
        return frozenset()

    def build(self, candidate: Candidate, benchmarker: str = MAIN_BENCHMARKER) -> BuiltEngine | Failed:
        """Write the candidate's file and build its engine with the benchmarker of a name."""
        return self._call("build", candidate, benchmarker)  # type: ignore[no-any-return]

    def examine(self, candidate: Candidate, look: Callable[[Path], T]) -> T:
        """Return the result of `look` on the candidate's written file, under the timing policy of a build."""
        return look(candidate.source())

    def sample(
        self, handle: int, sampling: Sampling, rival: Interval | None = None, level_ms: float | None = None
    ) -> Samples | Failed:
        """Time the engine with a handle, and return its readings.

        Args:
            rival: Latency to beat in ms; sampling stops as soon as the engine is clearly slower.
            level_ms: Latency of the reference in ms, to time the engine in turns with it
                (`harness.measure.reference_sampling`); None: the engine is timed alone.
        """
        return self._call("sample", handle, sampling, rival, level_ms)  # type: ignore[no-any-return]

    def evaluate(
        self, handle: int, evaluator: str = MAIN_BENCHMARKER, watch: ScoringCallback | None = None
    ) -> Accuracy | Failed:
        """Score an engine by the evaluator of a name; `watch` receives progress if the evaluator has `inferences`."""
        return self._call("evaluate", handle, evaluator, on_progress=watch)  # type: ignore[no-any-return]

    def prepare(
        self, handle: int, evaluator: str = MAIN_BENCHMARKER, watch: ScoringCallback | None = None
    ) -> Failed | None:
        """Call `prepare` of an evaluator, if it exists, with the engine of the float model; None, or the failure."""
        return self._call("prepare", handle, evaluator, on_progress=watch)  # type: ignore[no-any-return]

    def infer(self, handle: int, feeds: Mapping[str, Array]) -> Mapping[str, Array] | Failed:
        """Return the outputs of one inference by name."""
        return self._call("infer", handle, feeds)  # type: ignore[no-any-return]

    def release(self, handle: int) -> None:
        """Close an engine; an unknown handle is ignored."""
        self._call("release", handle)


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

    def _call(self, method: str, *args: Any, on_progress: ScoringCallback | None = None) -> Any:
        if method == "release":
            return self._engines.release(*args)
        extra = () if on_progress is None else (on_progress,)
        with self._policy.timing() if method == "sample" else self._policy.building():
            return getattr(self._engines, method)(*args, *extra)

    def describe(self, benchmarker: str = MAIN_BENCHMARKER) -> Mapping[str, Any]:
        return self._engines.describe(benchmarker)

    def build(self, candidate: Candidate, benchmarker: str = MAIN_BENCHMARKER) -> BuiltEngine | Failed:
        """Build as `Engines.build`; the candidate's file, if it is missing, is written under the write lock."""
        return super().build(self._with_write_lock(candidate), benchmarker)

    def examine(self, candidate: Candidate, look: Callable[[Path], T]) -> T:
        with self._policy.building():
            return super().examine(self._with_write_lock(candidate), look)

    def _with_write_lock(self, candidate: Candidate) -> Candidate:
        def source() -> Path:
            with self._write_lock:
                return candidate.source()

        return replace(candidate, source=source)
