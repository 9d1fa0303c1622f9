"""Executors of trials: a search submits candidates by number and collects the outcomes as they finish.

A trial is the work on one candidate (build, sample, score). `SyncExecutor` runs trials in the caller's thread;
`ThreadedExecutor` has several workers, in processes of this machine or on a cluster.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, as_completed
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol, Self

from harness.base.errors import UserError
from harness.base.statistics import Interval
from harness.config.sections import ExecutorSpec, Limits, PluginSpec
from harness.measure.provenance import describe_environment
from harness.measure.records import Failed, Outcome
from harness.plugins import registry
from harness.plugins.api import Candidate
from harness.workers.engines import (
    Engines,
    ExclusiveTiming,
    PolicedEngines,
    SerialTiming,
    TimingPolicy,
    WorkerHistory,
    WorkerLost,
    WorkerSpec,
)
from harness.workers.sandbox import open_engines
from search.space import Resolved

TrialFn = Callable[[Candidate, Interval | None], Outcome]
"""Builds, samples and scores a candidate, unless it is slower than the incumbent's latency in ms (None: none yet)."""
TrialFnFactory = Callable[[Engines], TrialFn]
"""Returns a worker's trial function, given its engines."""
WorkerFactory = Callable[[], AbstractContextManager[Engines]]
MAX_TRIAL_REASSIGNMENTS = 1  # number of times a trial is given to another worker after the loss of its worker
POOL_SHUTDOWN_LIMIT_S = 20.0  # wait for threads at the end; later ones end with the process
_logger = logging.getLogger(__name__)


class Executor(Protocol):
    """Executor of the trials of one search; every submitted trial is collected exactly once."""

    def submit(self, number: int, candidate: Candidate, incumbent: Interval | None) -> None:
        """Queue trial `number`; `incumbent` is the latency in ms of the search's present incumbent, or None."""
        ...

    def collect(self) -> tuple[int, Outcome]:
        """Wait for a trial to finish, in any order, and return its number and outcome.

        Raises:
            UserError: No trial can be run any more.
        """
        ...


class SyncExecutor:
    """Executor that runs each trial in the caller's thread when its outcome is collected."""

    def __init__(self, trial: TrialFn) -> None:
        self._trial = trial
        self._submitted: SimpleQueue[tuple[int, Candidate, Interval | None]] = SimpleQueue()

    def submit(self, number: int, candidate: Candidate, incumbent: Interval | None) -> None:
        self._submitted.put((number, candidate, incumbent))

    def collect(self) -> tuple[int, Outcome]:
        number, candidate, incumbent = self._submitted.get_nowait()
        return number, self._trial(candidate, incumbent)


@dataclass(slots=True, kw_only=True)
class _TrialJob:
    candidate: Candidate
    incumbent: Interval | None
    make_trial: TrialFnFactory
    future: Future[Outcome] = field(default_factory=Future)
    losses: int = 0

    def finish(self, outcome: Outcome) -> None:
        with suppress(InvalidStateError):  # the pool was stopped meanwhile
            self.future.set_result(outcome)

    def fail(self, error: BaseException) -> None:
        with suppress(InvalidStateError):
            self.future.set_exception(error)


class ThreadedExecutor:
    """Pool of workers that several searches share, each with its own queue and trial function.

    After the loss of a worker its trial is given to another one, once, and its engines are opened again; if that fails,
    the other workers continue.

    Args:
        open_worker: Function that opens the engines of one worker; called in threads.
        workers: Number of workers.
        policy: Policy that decides which builds and timings may overlap.
    """

    def __init__(self, open_worker: WorkerFactory, workers: int, policy: TimingPolicy) -> None:
        self._open_worker = open_worker
        self._policy = policy
        self._jobs: SimpleQueue[_TrialJob | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._unfinished: set[Future[Outcome]] = set()
        self._opened: list[AbstractContextManager[Engines]] = []
        self._alive = workers
        self._stopped: UserError | None = None
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(workers)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        running = bool(self._unfinished)
        self._stop(UserError("the run is ending"))
        deadline_s = time.monotonic() + POOL_SHUTDOWN_LIMIT_S
        while any(thread.is_alive() for thread in self._threads) and time.monotonic() < deadline_s:
            if running:  # closing its engines ends a trial, whose outcome is not needed any more
                for engines in list(self._opened):
                    with suppress(UserError):
                        engines.__exit__(None, None, None)
            for thread in self._threads:
                thread.join(timeout=0.1)

    def open_queue(self, make_trial: TrialFnFactory) -> SearchQueue:
        """Return the queue through which one search uses the pool."""
        return SearchQueue(self.submit, make_trial, self._policy)

    def submit(self, job: _TrialJob) -> None:
        """Queue a job, or fail it if the pool was stopped."""
        with self._lock:
            if self._stopped is not None:
                job.fail(self._stopped)
                return
            self._unfinished.add(job.future)
        job.future.add_done_callback(self._unfinished.discard)
        self._jobs.put(job)

    def _stop(self, reason: UserError) -> None:
        with self._lock:
            self._stopped = self._stopped or reason
            unfinished = list(self._unfinished)
        for future in unfinished:
            with suppress(InvalidStateError):
                future.set_exception(self._stopped)
        for _ in self._threads:
            self._jobs.put(None)

    def _serve(self) -> None:
        """Run a worker's thread."""
        try:
            while self._stopped is None and self._serve_until_lost():
                pass
        except UserError as error:
            with self._lock:
                self._alive -= 1
            _logger.warning("one worker fewer: %s", error)
            if not self._alive:
                self._stop(error)

    def _serve_until_lost(self) -> bool:
        """Run jobs with one set of engines; return whether they were lost and must be opened again."""
        with ExitStack() as stack:
            opened = self._open_worker()
            engines = PolicedEngines(stack.enter_context(opened), self._policy, self._write_lock)
            self._opened.append(opened)
            stack.callback(self._opened.remove, opened)
            while (job := self._jobs.get()) is not None:
                if self._stopped is not None:
                    continue
                try:
                    job.finish(job.make_trial(engines)(job.candidate, job.incumbent))
                except WorkerLost as error:
                    if self._stopped is None:
                        self._reassign(job, error)
                    return True
                except BaseException as error:  # raised again by `collect`
                    job.fail(error)
        return False

    def _reassign(self, job: _TrialJob, error: WorkerLost) -> None:
        job.losses += 1
        _logger.warning("%s; its trial is given to another worker", error)
        if job.losses > MAX_TRIAL_REASSIGNMENTS:
            reason = f"{job.losses} workers in a row were lost while they ran it; the last: {error}"
            job.finish(Failed(stage="crash", reason=reason))
        else:
            self._jobs.put(job)


class SearchQueue:
    """Executor of one search in a shared pool; a context manager that is open while the search runs.

    Computations of the search between two outcomes count as builds under the timing policy, because they disturb
    timings in the same way.
    """

    def __init__(
        self, submit_job: Callable[[_TrialJob], None], make_trial: TrialFnFactory, policy: TimingPolicy
    ) -> None:
        self._submit_job = submit_job
        self._make_trial = make_trial
        self._policy = policy
        self._numbers: dict[Future[Outcome], int] = {}
        self._finished: SimpleQueue[Future[Outcome]] = SimpleQueue()
        self._searching = ExitStack()

    def __enter__(self) -> Self:
        self._searching.enter_context(self._policy.building())
        return self

    def __exit__(self, *_: object) -> None:
        self._searching.close()

    def submit(self, number: int, candidate: Candidate, incumbent: Interval | None) -> None:
        job = _TrialJob(candidate=candidate, incumbent=incumbent, make_trial=self._make_trial)
        self._numbers[job.future] = number
        job.future.add_done_callback(self._finished.put)
        self._submit_job(job)

    def collect(self) -> tuple[int, Outcome]:
        self._searching.close()
        future = self._finished.get()
        self._searching.enter_context(self._policy.building())
        return self._numbers.pop(future), future.result()


def run_concurrently(works: Sequence[Callable[[], None]], threads: int) -> None:
    """Run all functions in `threads` threads; if one raises, start no further one and raise its error.

    It does not wait for functions that run at that time; the caller has to close the resources that they use.
    """
    if threads == 1:
        for work in works:
            work()
        return
    futures = [Future[None]() for _ in works]
    waiting = deque(zip(works, futures, strict=True))

    def run_waiting() -> None:
        with suppress(IndexError):  # nothing is left
            while True:
                work, future = waiting.popleft()
                try:
                    work()
                except BaseException as error:  # raised again by the caller
                    waiting.clear()
                    future.set_exception(error)
                else:
                    future.set_result(None)

    # An executor of `concurrent.futures` would keep the process alive until its last function returns.
    for _ in range(min(threads, len(works))):
        threading.Thread(target=run_waiting, daemon=True).start()
    for future in as_completed(futures):
        future.result()


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
