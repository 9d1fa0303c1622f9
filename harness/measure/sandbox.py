"""Engines behind a process boundary: what crashes, hangs or eats the memory is a worker, never the search.

`Sandbox` keeps one worker and gives it one call at a time; it is replaced when a call kills it or runs
out of time. `InProcess` does the work itself, in the worker or, for benchmarkers that touch no runtime,
in the driver.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from harness import registry
from harness.api import Accuracy, Array, Candidate
from harness.errors import UserError
from harness.measure.engines import MAIN, Built, OwnEngines, Watch, WorkerSpec
from harness.measure.local import InProcess, attempt, tail
from harness.measure.sampling import Samples
from harness.measure.stats import Interval
from harness.measure.stopwatch import alone, stopwatch
from harness.measure.worker import Worker, end_with_driver
from harness.records import Failed
from harness.run.config import Limits, Sampling
from harness.run.journal import writing
from search.space import Resolved

__all__ = ["InProcess", "Sandbox", "open_engines", "serve"]

START_S = 120.0
PROGRESS = "progress"
"""Kind of the messages that come before an answer: how far a scoring is."""
_logger = logging.getLogger(__name__)


def open_engines(spec: WorkerSpec, limits: Limits) -> AbstractContextManager[OwnEngines]:
    """Engines of these plug-ins: in a worker, or here where the main benchmarker says `in_process = True`.

    Raises:
        UserError: A benchmarker cannot be made.
    """
    use = spec.benchmarkers[MAIN]
    here = getattr(registry.load("benchmarker", use.use), "in_process", False)
    return InProcess(spec) if here else Sandbox(spec, limits)


class Sandbox:
    """Engines in a worker process; see `harness.measure.engines.Engines`.

    A call that outlasts its limit or takes too much memory, or a worker that dies, gives `Failed` with the end
    of the worker's log, and the next call finds a fresh worker. Engines that died with theirs give `Failed` too.

    Raises:
        UserError: The worker cannot make its plug-ins, or the scratch folder cannot be written.
    """

    def __init__(self, spec: WorkerSpec, limits: Limits) -> None:
        self._spec = spec
        self._limits = limits
        self._facts: Mapping[str, Mapping[str, Any]] = {}
        self.gpus: frozenset[str] = frozenset()
        self._worker: Worker | None = None
        self._next_handle = 0
        self._ready: set[tuple[int, bool]] = set()
        """Engines that are open, and whether by themselves or with the reference beside them."""

    def __enter__(self) -> Sandbox:
        with writing(self._spec.workdir):
            self._spec.workdir.mkdir(parents=True, exist_ok=True)
            self._scratch = Path(tempfile.mkdtemp(prefix="worker-", dir=self._spec.workdir))
        self._log = self._scratch / "worker.log"
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def build(self, candidate: Candidate, benchmarker: str = MAIN) -> Built | Failed:
        """See `Engines`; the file is made here, by the driver, and only its path goes to the worker."""
        path = attempt("build", candidate.source)
        if isinstance(path, Failed):
            return path
        with writing(self._log), suppress(FileNotFoundError):
            os.truncate(self._log, 0)
        with alone(self.gpus):
            built = self._call("build", self._limits.build_s, candidate.digest, candidate.edges, path, benchmarker)
        if isinstance(built, Built):
            self._next_handle = built.handle + 1
        return built  # type: ignore[no-any-return]

    def sample(
        self, handle: int, sampling: Sampling, rival: Interval | None = None, level_ms: float | None = None
    ) -> Samples | Failed:
        """See `Engines`; the first engine that is timed beside the reference waits for that to be built."""
        if failed := self._lost(handle, "measure") or self._opened(handle, level_ms):
            return failed
        with stopwatch(), alone(self.gpus):  # held here, so that no limit counts how long another run has them
            limit_s = self._limits.measure_s
            return self._call("sample", limit_s, handle, sampling, rival, level_ms)  # type: ignore[no-any-return]

    def _opened(self, handle: int, level_ms: float | None) -> Failed | None:
        """Open an engine before it is timed first: others may time theirs meanwhile."""
        if (handle, level_ms is None) in self._ready:
            return None
        limit_s = self._limits.measure_s + (self._limits.build_s if level_ms else 0.0)
        with alone(self.gpus):
            failed: Failed | None = self._call("open", limit_s, handle, level_ms)
        if failed is None:
            self._ready.add((handle, level_ms is None))
        return failed

    def evaluate(self, handle: int, evaluator: str = MAIN, watch: Watch | None = None) -> Accuracy | Failed:
        """See `Engines`."""
        limit_s = self._limits.evaluate_s
        with alone(self.gpus):
            return self._lost(handle, "evaluate") or self._call("evaluate", limit_s, handle, evaluator, watch=watch)

    def prepare(self, handle: int, evaluator: str = MAIN, watch: Watch | None = None) -> Failed | None:
        """See `Engines`."""
        limit_s = self._limits.evaluate_s
        with alone(self.gpus):
            return self._lost(handle, "evaluate") or self._call("prepare", limit_s, handle, evaluator, watch=watch)

    def infer(self, handle: int, feeds: Mapping[str, Array]) -> Mapping[str, Array] | Failed:
        """See `Engines`."""
        with alone(self.gpus):
            return self._lost(handle, "infer") or self._call("infer", self._limits.evaluate_s, handle, feeds)

    def release(self, handle: int) -> None:
        """See `Engines`."""
        self._ready -= {(handle, True), (handle, False)}
        if self._lost(handle, "release") is None:
            self._call("release", self._limits.measure_s, handle)

    def describe(self, benchmarker: str = MAIN) -> Mapping[str, Any]:
        """See `Engines`."""
        return self._facts[benchmarker]

    def _lost(self, handle: int, during: str) -> Failed | None:
        if self._worker is not None and handle >= self._worker.first_handle:
            return None
        return Failed(stage="crash", reason=f"{during}: the engine died with an earlier worker; build it again")

    def _call(self, method: str, limit_s: float, *args: Any, watch: Watch | None = None) -> Any:
        """One round trip; every way in which it can end is a value, apart from mistakes of the user."""
        started_s = time.perf_counter()
        worker = self._worker or self._start()
        try:
            worker.send((method, args))
            answer = self._receive(worker, limit_s, method, watch)
        except BaseException:
            self._stop()
            raise
        if isinstance(answer, Failed):
            log_tail = tail(f"{self._read_log()}\n{answer.log_tail}")
            return replace(answer, log_tail=log_tail, wall_s=time.perf_counter() - started_s)
        return answer

    def _receive(self, worker: Worker, limit_s: float, method: str, watch: Watch | None = None) -> Any:
        """The worker's answer, or a `Failed` that says how it died; then there is no worker any more."""
        deadline_s = time.monotonic() + limit_s
        try:
            kind, answer = worker.receive(limit_s, self._limits.memory_gb)
            while kind == PROGRESS:
                if watch is not None:
                    watch(*answer)
                kind, answer = worker.receive(deadline_s - time.monotonic(), self._limits.memory_gb)
        except TimeoutError:
            self._stop()
            return Failed(stage="timeout", reason=f"{method} took longer than {limit_s:g} s")
        except MemoryError:
            self._stop()
            memory_gb = self._limits.memory_gb
            return Failed(
                stage="crash",
                reason=f"{method} used more than {memory_gb:g} GB of memory (limits.memory_gb, which all engines of a "
                "worker share)",
            )
        except (EOFError, OSError):
            reason = f"the worker {worker.ending()} during {method}"
            _logger.warning("%s; a fresh one takes over", reason)
            self._stop()
            return Failed(stage="crash", reason=reason)
        if kind == "user_error":
            raise UserError(answer)
        return answer

    def _start(self) -> Worker:
        with writing(self._log):
            output = self._log.open("ab")
        try:
            with output:
                worker = self._worker = Worker(output, self._next_handle)
        except OSError as error:
            raise UserError(f"no worker could be started: {error}") from error
        worker.send((replace(self._spec, workdir=self._scratch), self._next_handle))
        told = self._receive(worker, START_S, "start")
        if isinstance(told, Failed):
            raise UserError(f"no worker could be started: {told.reason}\n{tail(self._read_log())}")
        self._facts, self.gpus = told
        return worker

    def _stop(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()

    def _read_log(self) -> str:
        with suppress(OSError):
            return self._log.read_bytes()[-65536:].decode(errors="replace")
        return ""


def serve(fd: int) -> None:
    """Body of a worker: make the plug-ins, then answer calls until the driver hangs up."""
    end_with_driver()
    connection: Connection[Any, Any] = Connection(fd)
    spec, first_handle = connection.recv()

    def tell(done: int, total: int) -> None:
        connection.send((PROGRESS, (done, total)))

    try:
        with InProcess(spec, first_handle) as engines:
            facts = {name: engines.describe(name) for name in spec.benchmarkers}
            connection.send(("answer", (facts, engines.gpus)))
            while True:
                connection.send_bytes(_answer(engines, tell, *connection.recv()))
    except UserError as error:
        connection.send(("user_error", str(error)))
    except EOFError:
        return


def _answer(engines: InProcess, tell: Watch, method: str, args: tuple[Any, ...]) -> bytes:
    def work() -> bytes:
        if method == "build":
            return pickle.dumps(("answer", engines.build(_candidate(*args[:3]), args[3])))
        told = {"watch": tell} if method in ("evaluate", "prepare") else {}
        return pickle.dumps(("answer", getattr(engines, method)(*args, **told)))

    try:
        answer = attempt(method, work)
    except UserError as error:
        return pickle.dumps(("user_error", str(error)))
    return answer if isinstance(answer, bytes) else pickle.dumps(("answer", answer))


def _candidate(digest: str, edges: Resolved, path: Path) -> Candidate:
    return Candidate(digest=digest, edges=edges, source=lambda: path)
