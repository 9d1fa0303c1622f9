"""Several attempts at once: a search gives them out by number, and takes their outcomes as they come.

An attempt is all that is done with one candidate (build, sample, score). `Inline` makes it in the caller's thread;
a `Pool` has workers, each with engines of its own, which live in this machine's processes or on a cluster.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol, Self

from harness.api import Candidate
from harness.errors import UserError
from harness.measure.engines import Engines
from harness.measure.gate import Gate, Gated
from harness.measure.stats import Interval
from harness.records import Failed, Outcome

__all__ = ["Attempt", "AttemptWith", "Executor", "Inline", "Pool", "WorkerLost", "at_once"]

Attempt = Callable[[Candidate, Interval | None], Outcome]
"""Builds, samples and scores a candidate, as far as it can beat the incumbent's latency in ms (None: nobody's)."""
AttemptWith = Callable[[Engines], Attempt]
"""What a worker does with a candidate, given its engines."""
OpenWorker = Callable[[], AbstractContextManager[Engines]]
SECOND_CHANCES = 1
"""So often a trial is given to another worker after the one that had it was lost."""
END_S = 20.0
"""Threads that do not end by then die with the process."""
_logger = logging.getLogger(__name__)


class WorkerLost(UserError):
    """A worker is gone, and not by what its candidate did: its machine left, or somebody ended it."""


class Executor(Protocol):
    """Makes attempts for one search. Whatever it is given comes back exactly once."""

    def submit(self, number: int, candidate: Candidate, incumbent: Interval | None) -> None:
        """Take an attempt on; the incumbent is the search's at this moment."""
        ...

    def collect(self) -> tuple[int, Outcome]:
        """Number and outcome of an attempt that has ended, in any order; waits for one.

        Raises:
            UserError: No attempt can be made any more.
        """
        ...


class Inline:
    """Makes each attempt in the caller's thread, when an outcome is asked for."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._given: SimpleQueue[tuple[int, Candidate, Interval | None]] = SimpleQueue()

    def submit(self, number: int, candidate: Candidate, incumbent: Interval | None) -> None:
        """See `Executor`."""
        self._given.put((number, candidate, incumbent))

    def collect(self) -> tuple[int, Outcome]:
        """See `Executor`."""
        number, candidate, incumbent = self._given.get_nowait()
        return number, self._attempt(candidate, incumbent)


@dataclass(slots=True, kw_only=True)
class _Job:
    number: int
    candidate: Candidate
    incumbent: Interval | None
    attempt: AttemptWith
    done: _Done
    lost: int = 0


_Done = SimpleQueue[tuple[int, Outcome | BaseException]]


class Pool:
    """Workers that several searches share, each with a lane and an attempt of its own.

    A worker that is lost gives its trial back, once, and opens its engines anew; where that cannot be done, those
    that are left go on.

    Args:
        open_worker: Opens the engines of one worker; called in threads.
        workers: How many.
        gate: What may run beside what.
    """

    def __init__(self, open_worker: OpenWorker, workers: int, gate: Gate) -> None:
        self._open_worker = open_worker
        self._gate = gate
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._lanes: list[_Done] = []
        self._opened: list[AbstractContextManager[Engines]] = []
        self._outstanding = 0
        self._alive = workers
        self._end: UserError | None = None
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(workers)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop(UserError("the run is being ended"))
        for _thread in self._threads:
            self._jobs.put(None)
        deadline_s = time.monotonic() + END_S
        while any(thread.is_alive() for thread in self._threads) and time.monotonic() < deadline_s:
            if self._outstanding:  # what is under way is of no use to anybody any more
                for engines in list(self._opened):
                    with suppress(UserError):
                        engines.__exit__(None, None, None)
            for thread in self._threads:
                thread.join(timeout=0.1)

    def lane(self, attempt: AttemptWith) -> _Lane:
        """The way of one search into this pool."""
        done: _Done = SimpleQueue()
        with self._lock:
            self._lanes.append(done)
            if self._end is not None:
                done.put((-1, self._end))
        return _Lane(self._submit, attempt, done, self._gate)

    def _submit(self, job: _Job) -> None:
        with self._lock:
            self._outstanding += 1
        self._jobs.put(job)

    def _settle(self, job: _Job, result: Outcome | BaseException) -> None:
        with self._lock:
            self._outstanding -= 1
        job.done.put((job.number, result))

    def _stop(self, reason: UserError) -> None:
        with self._lock:
            self._end = self._end or reason
            for done in self._lanes:
                done.put((-1, self._end))

    def _serve(self) -> None:
        """Life of a worker's thread."""
        try:
            while self._end is None and self._work():
                pass
        except UserError as error:
            with self._lock:
                self._alive -= 1
            _logger.warning("a worker less: %s", error)
            if not self._alive:
                self._stop(error)

    def _work(self) -> bool:
        """Serve with one set of engines; whether others are wanted because these are lost."""
        with ExitStack() as stack:
            opened = self._open_worker()
            engines = stack.enter_context(opened)
            self._opened.append(opened)
            stack.callback(self._opened.remove, opened)
            gated = Gated(engines, self._gate, self._making)
            while (job := self._jobs.get()) is not None:
                if self._end is None and not self._do(job, gated):
                    return True
        return False

    def _do(self, job: _Job, engines: Engines) -> bool:
        """Do one job; whether the worker is still there."""
        try:
            self._settle(job, job.attempt(engines)(job.candidate, job.incumbent))
        except WorkerLost as error:
            if self._end is not None:
                return False
            job.lost += 1
            _logger.warning("%s; its trial goes to another", error)
            if job.lost > SECOND_CHANCES:
                reason = f"{job.lost} workers were lost one after the other while they had it; the last: {error}"
                self._settle(job, Failed(stage="crash", reason=reason))
            else:
                self._jobs.put(job)
            return False
        except BaseException as error:  # a thread has nobody to raise it to; the search does
            self._settle(job, error)
        return True


class _Lane:
    """See `Executor`; open as long as its search runs. The search itself counts as something that builds:
    what it thinks about between two outcomes would disturb a timing as much.
    """

    def __init__(self, submit: Callable[[_Job], None], attempt: AttemptWith, done: _Done, gate: Gate) -> None:
        self._submit = submit
        self._attempt = attempt
        self._done = done
        self._gate = gate
        self._thinking = ExitStack()

    def __enter__(self) -> Self:
        self._thinking.enter_context(self._gate.building())
        return self

    def __exit__(self, *_: object) -> None:
        self._thinking.close()

    def submit(self, number: int, candidate: Candidate, incumbent: Interval | None) -> None:
        """See `Executor`."""
        job = _Job(number=number, candidate=candidate, incumbent=incumbent, attempt=self._attempt, done=self._done)
        self._submit(job)

    def collect(self) -> tuple[int, Outcome]:
        """See `Executor`."""
        self._thinking.close()
        number, result = self._done.get()
        self._thinking.enter_context(self._gate.building())
        if isinstance(result, BaseException):
            raise result
        return number, result


def at_once(works: Sequence[Callable[[], None]], threads: int) -> None:
    """Do all works, so many at once; where one raises, no further one is begun, and its error is raised.

    Those under way are not waited for then: close what they work with.
    """
    if threads == 1:
        for work in works:
            work()
        return
    left, ended = list(reversed(works)), SimpleQueue[BaseException | None]()

    def serve() -> None:
        error: BaseException | None = None
        try:
            while True:
                try:
                    work = left.pop()
                except IndexError:  # nothing is left
                    break
                work()
        except BaseException as caught:  # raised again where the works were given out
            error = caught
            left.clear()
        ended.put(error)

    servers = [threading.Thread(target=serve, daemon=True) for _ in range(min(threads, len(works)))]
    for server in servers:
        server.start()
    for _ in servers:
        if (error := ended.get()) is not None:
            raise error
