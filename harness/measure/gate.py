"""Compile in parallel, time alone: what may run beside what, where several workers share one machine."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from harness.api import Accuracy, Array, Candidate
from harness.measure.engines import MAIN, Built, Engines, Watch
from harness.measure.sampling import Samples
from harness.measure.stats import Interval
from harness.records import Failed
from harness.run.config import Sampling

__all__ = ["Alternating", "Beside", "Gate", "Gated", "Open"]


class Gate(Protocol):
    """Lets through what may run now, and keeps the rest waiting."""

    def building(self) -> AbstractContextManager[None]:
        """For whatever takes a processor and is not timed: builds, evaluators, the searcher itself."""
        ...

    def timing(self) -> AbstractContextManager[None]:
        """For what is timed; nobody else is timed meanwhile."""
        ...


class Open:
    """Keeps nobody waiting: each worker has a machine, or at least a device, to itself."""

    def building(self) -> AbstractContextManager[None]:
        """See `Gate`."""
        return nullcontext()

    def timing(self) -> AbstractContextManager[None]:
        """See `Gate`."""
        return nullcontext()


class Beside:
    """One timing at once, and builds beside it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def building(self) -> AbstractContextManager[None]:
        """See `Gate`."""
        return nullcontext()

    @contextmanager
    def timing(self) -> Iterator[None]:
        """See `Gate`."""
        with self._lock:
            yield


class Alternating:
    """Either builds, several of them, or one timing and nothing else; who waits to be timed goes first."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._building = 0
        self._waiting = 0
        self._timing = False

    @contextmanager
    def building(self) -> Iterator[None]:
        """See `Gate`."""
        with self._turn:
            self._turn.wait_for(lambda: not self._timing and not self._waiting)
            self._building += 1
        try:
            yield
        finally:
            with self._turn:
                self._building -= 1
                self._turn.notify_all()

    @contextmanager
    def timing(self) -> Iterator[None]:
        """See `Gate`."""
        with self._turn:
            self._waiting += 1
            self._turn.wait_for(lambda: not self._timing and not self._building)
            self._waiting -= 1
            self._timing = True
        try:
            yield
        finally:
            with self._turn:
                self._timing = False
                self._turn.notify_all()


class Gated:
    """Engines behind a gate; see `harness.measure.engines.Engines`.

    Args:
        engines: Of one worker.
        gate: Of the machine.
        making: Held while a candidate's file is made, which is not for several threads at once.
    """

    def __init__(self, engines: Engines, gate: Gate, making: threading.Lock) -> None:
        self._engines = engines
        self._gate = gate
        self._making = making

    def build(self, candidate: Candidate, benchmarker: str = MAIN) -> Built | Failed:
        """See `Engines`."""

        def source() -> Path:
            with self._making:
                return candidate.source()

        with self._gate.building():
            return self._engines.build(replace(candidate, source=source), benchmarker)

    def sample(
        self, handle: int, sampling: Sampling, rival: Interval | None = None, level_ms: float | None = None
    ) -> Samples | Failed:
        """See `Engines`."""
        with self._gate.timing():
            return self._engines.sample(handle, sampling, rival, level_ms)

    def evaluate(self, handle: int, evaluator: str = MAIN, watch: Watch | None = None) -> Accuracy | Failed:
        """See `Engines`."""
        with self._gate.building():
            return self._engines.evaluate(handle, evaluator, watch)

    def prepare(self, handle: int, evaluator: str = MAIN, watch: Watch | None = None) -> Failed | None:
        """See `Engines`."""
        with self._gate.building():
            return self._engines.prepare(handle, evaluator, watch)

    def infer(self, handle: int, feeds: Mapping[str, Array]) -> Mapping[str, Array] | Failed:
        """See `Engines`."""
        with self._gate.building():
            return self._engines.infer(handle, feeds)

    def release(self, handle: int) -> None:
        """See `Engines`."""
        self._engines.release(handle)

    def describe(self, benchmarker: str = MAIN) -> Mapping[str, Any]:
        """See `Engines`."""
        return self._engines.describe(benchmarker)
