"""Where engines run: on this machine or, through the same interface, on a cluster (`harness.cluster`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from harness import registry
from harness.api import Candidate
from harness.timing.workers.engines import Engines, WorkerSpec
from harness.timing.workers.trial_pool import AttemptWith, Executor, Inline, Pool
from harness.timing.workers.timing_policy import Alternating, Beside, Gate
from harness.timing.provenance import environment
from harness.timing.workers.sandbox import open_engines
from harness.config.experiment import Limits, Use
from harness.config.executor import ExecutorSpec
from search.space import Resolved

__all__ = ["LocalSite", "Maker", "OpenEngines", "QueueFactory", "Site"]

OpenEngines = Callable[[WorkerSpec], AbstractContextManager[Engines]]
QueueFactory = Callable[[AttemptWith], AbstractContextManager[Executor]]
"""Returns the executor of one search, open while the search runs, on workers that all searches of a task share."""


class Maker(Protocol):
    """Writer of a placement's model file, see `harness.graph.qdq.insert.Inserter`."""

    def write(self, resolved: Resolved, folder: Path, *, name: str | None = None) -> Path: ...


class Site(ABC):
    """Devices of one kind that engines run on."""

    @abstractmethod
    def environment(self, commit: str | None) -> dict[str, Any]:
        """Return the environment of the machine that has the devices, see `environment`."""

    @abstractmethod
    def describe(self, backend: Use, workdir: Path) -> Mapping[str, Any]:
        """Return the facts that a benchmarker gives about itself on a machine with the devices."""

    @abstractmethod
    def open(self, spec: WorkerSpec) -> AbstractContextManager[Engines]:
        """Open engines in fresh processes on one device."""

    @abstractmethod
    def workers(
        self, spec: WorkerSpec, engines: Engines, writer: Maker, baseline: Candidate
    ) -> AbstractContextManager[QueueFactory]:
        """Open the workers that the searches of one task share.

        Args:
            engines: Open engines of this specification, which are otherwise idle.
            writer: Writes candidates on machines that cannot see the driver's files.
            baseline: Float model, which evaluators on such machines may need to see first.
        """


class LocalSite(Site):
    """This machine, with worker processes of which one is timed at a time."""

    def __init__(self, executor: ExecutorSpec, limits: Limits) -> None:
        self._executor = executor
        self._limits = limits
        self._policy: Gate = Beside() if executor.timing == "beside" else Alternating()

    def environment(self, commit: str | None) -> dict[str, Any]:
        return environment(commit)

    def describe(self, backend: Use, workdir: Path) -> Mapping[str, Any]:
        facts: Mapping[str, Any] = registry.create("benchmarker", backend.use, backend.params).describe()
        return facts

    def open(self, spec: WorkerSpec) -> AbstractContextManager[Engines]:
        return open_engines(spec, self._limits)

    @contextmanager
    def workers(self, spec: WorkerSpec, engines: Engines, writer: Maker, baseline: Candidate) -> Iterator[QueueFactory]:
        """Open the workers; a single worker of a single search needs no thread and no second process."""
        if self._executor.workers == self._executor.searches == 1:

            @contextmanager
            def lane(make_trial: AttemptWith) -> Iterator[Executor]:
                yield Inline(make_trial(engines))

            yield lane
            return
        with Pool(lambda: self.open(spec), self._executor.workers, self._policy) as pool:
            yield pool.lane
