"""Execution targets: this machine or, through the same interface, a cluster (`harness.workers.ray`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from harness.config.sections import ExecutorSpec, Limits, PluginSpec
from harness.measure.provenance import describe_environment
from harness.plugins import registry
from harness.plugins.api import Candidate
from harness.workers.engines import Engines, ExclusiveTiming, SerialTiming, TimingPolicy, WorkerHistory, WorkerSpec
from harness.workers.sandbox import open_engines
from harness.workers.trial_pool import Executor, SyncExecutor, ThreadedExecutor, TrialFnFactory
from search.space import Resolved

SpecEngineFactory = Callable[[WorkerSpec], AbstractContextManager[Engines]]
ListFiles = Callable[[Path], Sequence[Path]]
"""Returns the files of a model: the file itself, and those of its external data or weights."""
QueueFactory = Callable[[TrialFnFactory], AbstractContextManager[Executor]]
"""Returns the executor of one search, open while the search runs, on workers that all searches of a task share."""


class CandidateWriter(Protocol):
    """Writer of a placement's model file, see `harness.graph.qdq.insert.Inserter`."""

    def write(self, resolved: Resolved, folder: Path, *, name: str | None = None) -> Path: ...


class ExecutionTarget(ABC):
    """Devices of one kind that engines run on."""

    @abstractmethod
    def environment(self, commit: str | None) -> dict[str, Any]:
        """Return the environment of a machine with the devices, see `provenance.describe_environment`."""

    @abstractmethod
    def describe(self, backend: PluginSpec, workdir: Path) -> Mapping[str, Any]:
        """Return the facts of a benchmarker (`Benchmarker.describe`) on a machine with the devices."""

    @abstractmethod
    def open(self, spec: WorkerSpec) -> AbstractContextManager[Engines]:
        """Open engines in fresh processes on one device."""

    @abstractmethod
    def workers(
        self, spec: WorkerSpec, engines: Engines, writer: CandidateWriter, baseline: Candidate
    ) -> AbstractContextManager[QueueFactory]:
        """Open the workers that the searches of one task share, until exit, and yield the factory of their executors.

        Args:
            engines: Open engines of this specification, which the searches may use.
            writer: Writer of candidates' files, for machines that cannot read the files of this one.
            baseline: Float model, which evaluators on such machines may have to score first.
        """


class LocalTarget(ExecutionTarget):
    """This machine, with `executor.workers` processes that time one after the other, each call within `limits`."""

    def __init__(self, executor: ExecutorSpec, limits: Limits) -> None:
        self._executor = executor
        self._limits = limits
        self._policy: TimingPolicy = SerialTiming() if executor.timing == "concurrent" else ExclusiveTiming()
        self._history = WorkerHistory()  # of all workers, also after a task continues

    def environment(self, commit: str | None) -> dict[str, Any]:
        return describe_environment(commit)

    def describe(self, backend: PluginSpec, workdir: Path) -> Mapping[str, Any]:
        facts: Mapping[str, Any] = registry.create_plugin("benchmarker", backend.use, backend.params).describe()
        return facts

    def open(self, spec: WorkerSpec) -> AbstractContextManager[Engines]:
        return open_engines(spec, self._limits, self._history)

    @contextmanager
    def workers(
        self, spec: WorkerSpec, engines: Engines, writer: CandidateWriter, baseline: Candidate
    ) -> Iterator[QueueFactory]:
        """Open the workers, see `ExecutionTarget.workers`.

        With one worker and one search at a time, trials use `engines` in the caller's thread; otherwise each worker
        opens engines of its own.
        """
        if self._executor.workers == self._executor.searches == 1:

            @contextmanager
            def open_queue(make_trial: TrialFnFactory) -> Iterator[Executor]:
                yield SyncExecutor(make_trial(engines))

            yield open_queue
            return
        worker = replace(spec, concurrent_scoring=self._executor.timing == "exclusive")
        with ThreadedExecutor(lambda: self.open(worker), self._executor.workers, self._policy) as pool:
            yield pool.open_queue
