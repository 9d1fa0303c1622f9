"""Where engines run: on this machine, or, behind the same contract, on a cluster (`harness.cluster`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from harness import registry
from harness.api import Candidate
from harness.measure.engines import Engines, WorkerSpec
from harness.measure.executor import AttemptWith, Executor, Inline, Pool
from harness.measure.gate import Alternating, Beside, Gate
from harness.measure.provenance import environment
from harness.measure.sandbox import open_engines
from harness.run.config import Limits, Use
from harness.run.executing import ExecutorSpec
from search.space import Resolved

__all__ = ["LocalSite", "Maker", "OpenEngines", "Site", "Workers"]

OpenEngines = Callable[[WorkerSpec], AbstractContextManager[Engines]]


class Maker(Protocol):
    """Writes the model file of a placement, as `harness.graph.insert.Inserter` does."""

    def write(self, resolved: Resolved, folder: Path, *, name: str | None = None) -> Path: ...


class Workers(Protocol):
    """What searches that run at once share."""

    def lane(self, attempt: AttemptWith) -> AbstractContextManager[Executor]:
        """The way of one search to the workers, open as long as it runs."""
        ...


class Site(Protocol):
    """A place with devices that engines run on, all of one kind."""

    def environment(self, commit: str | None) -> dict[str, Any]:
        """Facts about the machine that has the devices, see `harness.measure.provenance.environment`."""
        ...

    def describe(self, backend: Use, workdir: Path) -> Mapping[str, Any]:
        """The facts of a benchmarker, from where the devices are.

        Args:
            workdir: Takes scratch files.

        Raises:
            UserError: Its runtime or its device is missing there.
        """
        ...

    def open(self, spec: WorkerSpec) -> AbstractContextManager[Engines]:
        """Engines in fresh processes on one device.

        Raises:
            UserError: A plug-in cannot be made there, or there is no device.
        """
        ...

    def workers(
        self, spec: WorkerSpec, engines: Engines, maker: Maker, baseline: Candidate
    ) -> AbstractContextManager[Workers]:
        """Workers for searches of one cell.

        Args:
            spec: What each of them needs.
            engines: Open ones of this very specification, which nobody else uses meanwhile.
            maker: Writes candidates where the driver's files cannot be seen.
            baseline: The float model, which evaluators may have to see there first.
        """
        ...


class LocalSite:
    """This machine: worker processes, of which one is timed at a time."""

    def __init__(self, executor: ExecutorSpec, limits: Limits) -> None:
        self._executor = executor
        self._limits = limits
        self._gate: Gate = Beside() if executor.timing == "beside" else Alternating()

    def environment(self, commit: str | None) -> dict[str, Any]:
        """See `Site`."""
        return environment(commit)

    def describe(self, backend: Use, workdir: Path) -> Mapping[str, Any]:
        """See `Site`."""
        facts: Mapping[str, Any] = registry.create("benchmarker", backend.use, backend.params).describe()
        return facts

    def open(self, spec: WorkerSpec) -> AbstractContextManager[Engines]:
        """See `Site`."""
        return open_engines(spec, self._limits)

    @contextmanager
    def workers(self, spec: WorkerSpec, engines: Engines, maker: Maker, baseline: Candidate) -> Iterator[Workers]:
        """See `Site`; a single worker of a single search needs no thread, nor a second process."""
        if self._executor.workers == self._executor.searches == 1:
            yield _Alone(engines)
            return
        with Pool(lambda: self.open(spec), self._executor.workers, self._gate) as pool:
            yield pool


class _Alone:
    def __init__(self, engines: Engines) -> None:
        self._engines = engines

    @contextmanager
    def lane(self, attempt: AttemptWith) -> Iterator[Executor]:
        """See `Workers`."""
        yield Inline(attempt(self._engines))
