"""Policies for builds and timings that share one machine: which of them may overlap."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.api import Candidate
from harness.records import MAIN_BENCHMARKER, Failed
from harness.timing.workers.engines import BuiltEngine, Engines, ScoringCallback, T


class TimingPolicy:
    """Policy without restrictions, for workers that have a machine, or at least a device, each."""

    def building(self) -> AbstractContextManager[None]:
        """Return a context for work that uses a processor and is not timed: builds, evaluators, the searcher itself."""
        return nullcontext()

    def timing(self) -> AbstractContextManager[None]:
        """Return a context for a timing."""
        return nullcontext()


class SerialTiming(TimingPolicy):
    """Policy with one timing at a time, which builds may overlap."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def timing(self) -> Iterator[None]:
        with self._lock:
            yield


class ExclusiveTiming(TimingPolicy):
    """Policy with either several builds or a single timing; a waiting timing goes first."""

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
        write_lock: Held while a candidate's file is written, which is not thread-safe.
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
        """Write the candidate's file under the lock and build its engine."""
        return super().build(self._with_write_lock(candidate), benchmarker)

    def examine(self, candidate: Candidate, look: Callable[[Path], T]) -> T:
        with self._policy.building():
            return super().examine(self._with_write_lock(candidate), look)

    def _with_write_lock(self, candidate: Candidate) -> Candidate:
        def source() -> Path:
            with self._write_lock:
                return candidate.source()

        return replace(candidate, source=source)
