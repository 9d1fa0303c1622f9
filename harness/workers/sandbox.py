"""Engines in a worker process, so that a crash, a hang or excessive memory use ends a worker and not the search.

`Sandbox` has one worker, to which it sends one call at a time. It replaces a worker that crashed or exceeded a limit.
`InProcess` handles the calls in the worker.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from harness.base.errors import EvaluationFailed, UserError
from harness.base.files import explain_write_errors
from harness.config.sections import Limits
from harness.measure.records import MAIN_BENCHMARKER, Failed
from harness.plugins import registry
from harness.plugins.api import Array, Candidate, Infer, capabilities_of
from harness.workers.engines import Engines, ScoringCallback, WorkerHistory, WorkerSpec
from harness.workers.in_process import InProcess, Scorer, as_outcome, last_lines
from harness.workers.locks import device_lock, timing_lock
from harness.workers.process import WorkerProcess, die_with_parent
from harness.workers.requests import (
    Build,
    BuiltEngine,
    EngineRequest,
    Evaluate,
    Open,
    Prepare,
    Release,
    Request,
    Sample,
)
from harness.workers.trial_pool import WorkerKilled

SANDBOX_START_LIMIT_S = 120.0
PROGRESS_MESSAGE = "progress"  # kind of messages with the progress of scoring, which precede an answer
MAX_LOG_BYTES = 65_536
MAX_STARTS = 3  # number of attempts to start a worker that other processes kill
_logger = logging.getLogger(__name__)


def open_engines(
    spec: WorkerSpec, limits: Limits, history: WorkerHistory | None = None
) -> AbstractContextManager[Engines]:
    """Return engines in a worker, or in this process if the main benchmarker is `in_process`.

    Args:
        limits: Limits of each request: seconds and memory; no effect in this process.
        history: Kills and waits of earlier workers, to which those of this one are added; None: none.

    Raises:
        UserError: A benchmarker cannot be constructed.
    """
    plugin = spec.benchmarkers[MAIN_BENCHMARKER]
    in_process = capabilities_of(registry.load_plugin("benchmarker", plugin.use)).in_process
    return InProcess(spec) if in_process else Sandbox(spec, limits, history)


class _Killed(Exception):
    """The worker was killed during a call; `failed` describes it."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.reason)
        self.failed = failed


class Sandbox(Engines):
    """Engines in a worker process.

    A call that exceeds its time or memory limit, or whose worker dies, returns `Failed` with the end of the worker's
    log, and the next call gets a fresh worker. Calls for engines of a dead worker return `Failed` too. If another
    process killed the worker, a start or a build is repeated, and other calls raise `WorkerKilled`. If this happens
    twice in a row, it counts as the candidate's failure, because the kernel kills processes that use too much memory.

    Raises:
        UserError: The worker cannot construct its plug-ins, or the scratch folder cannot be written.
        WorkerKilled: The worker was killed, and its engines are lost; build them again.
    """

    def __init__(self, spec: WorkerSpec, limits: Limits, history: WorkerHistory | None = None) -> None:
        self._spec = spec
        self._limits = limits
        self._history = history or WorkerHistory()
        self._scorer = Scorer(spec.evaluators)
        self._facts: Mapping[str, Mapping[str, Any]] = {}
        self._gpus: frozenset[str] = frozenset()
        self._worker: WorkerProcess | None = None
        self._next_handle = 0
        self._opened: set[tuple[int, bool]] = set()  # handle, and whether it is timed alone
        self._digests: dict[int, str] = {}  # of the candidates by handle
        self._first_kept_handle = 0  # engines with lower handles were lost with a worker that was killed

    def __enter__(self) -> Sandbox:
        with explain_write_errors(self._spec.workdir):
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

    @property
    def gpus(self) -> frozenset[str]:
        return self._gpus

    def describe(self, benchmarker: str = MAIN_BENCHMARKER) -> Mapping[str, Any]:
        return self._facts[benchmarker]

    def build(self, candidate: Candidate, benchmarker: str = MAIN_BENCHMARKER) -> BuiltEngine | Failed:
        """Write the candidate's file in the driver, and build its engine in the worker."""
        path = as_outcome("build", candidate.source)
        if isinstance(path, Failed):
            return path
        with explain_write_errors(self._log), suppress(FileNotFoundError):
            os.truncate(self._log, 0)
        request = Build(candidate.digest, candidate.edges, path, benchmarker)
        with device_lock(self.gpus, waits=self._history.lock_waits_s):
            try:
                built: BuiltEngine | Failed = self._send(request)
            except _Killed:
                built = self._send_once_more(request)
        if isinstance(built, BuiltEngine):
            self._next_handle = built.handle + 1
            self._digests[built.handle] = candidate.digest
        return built

    def request(self, request: EngineRequest[Any], on_progress: ScoringCallback | None = None) -> Any:
        """Return the worker's answer; an evaluator that is a registered object of this process scores here."""
        handle = request.handle
        if isinstance(request, Release):
            self._opened -= {(handle, True), (handle, False)}
            self._digests.pop(handle, None)
            return self._send_once_more(request) if self._is_alive(handle) else None
        if isinstance(request, Evaluate | Prepare) and self._is_local(request.evaluator):
            score: Callable[..., Any] = self._scorer.evaluate if isinstance(request, Evaluate) else self._scorer.prepare
            return as_outcome(request.stage, score, self._infer_with(handle), request.evaluator, on_progress)
        if not isinstance(request, Sample):
            return self._send_to_engine(request, on_progress)
        key = (handle, request.level_ms is None)
        if key not in self._opened or not self._is_alive(handle):
            failed = self._send_to_engine(Open(handle, request.level_ms))  # needs no timing lock
            if isinstance(failed, Failed):
                return failed
            self._opened.add(key)
        # Acquired here, so that waiting for another run counts against no limit.
        with timing_lock(waits=self._history.lock_waits_s):
            return self._send_to_engine(request)

    def _is_local(self, evaluator: str) -> bool:
        plugin = self._spec.evaluators[evaluator]
        return registry.uses_objects(plugin.use, plugin.params)

    def _infer_with(self, handle: int) -> Infer:
        def infer(feeds: Mapping[str, Array]) -> Mapping[str, Array]:
            outputs = self.infer(handle, feeds)
            if isinstance(outputs, Failed):
                raise EvaluationFailed(outputs.reason)
            return outputs

        return infer

    def _is_alive(self, handle: int) -> bool:
        self._forget_dead_worker()
        return self._worker is not None and handle >= self._worker.first_handle

    def _send_to_engine(self, request: EngineRequest[Any], on_progress: ScoringCallback | None = None) -> Any:
        """Send a request to an engine; a second kill in a row is the candidate's failure."""
        if not self._is_alive(request.handle):
            reason = f"{request.stage}: the engine ended with an earlier worker; build it again"
            if request.handle < self._first_kept_handle:
                raise WorkerKilled(reason)
            return Failed(stage="crash", reason=reason)
        kills, key = self._history.kills, (self._digests.get(request.handle, ""), type(request))
        with device_lock(self.gpus, waits=self._history.lock_waits_s):
            try:
                answer = self._send(request, on_progress)
            except _Killed as error:
                kills[key] += 1
                if kills[key] > 1:
                    return error.failed
                raise WorkerKilled(error.failed.reason) from error
        del kills[key]
        return answer

    def _send_once_more(self, request: Request[Any]) -> Any:
        try:
            return self._send(request)
        except _Killed as error:
            return error.failed

    def _send(self, request: Request[Any], on_progress: ScoringCallback | None = None) -> Any:
        """Send a request to the worker, and return its answer, or a `Failed` if the worker died or exceeded a limit.

        Raises:
            _Killed: Another process killed the worker.
        """
        started_s = time.perf_counter()
        self._forget_dead_worker()
        worker = self._worker or self._start()
        try:
            worker.send(request)
            answer = self._receive(worker, request.limit_s(self._limits), type(request).__name__.lower(), on_progress)
        except _Killed as error:
            self._stop()
            error.failed = replace(error.failed, wall_s=time.perf_counter() - started_s)
            raise
        except BaseException:
            self._stop()
            raise
        if isinstance(answer, Failed):
            log_tail = last_lines(f"{self._read_log()}\n{answer.log_tail}")
            return replace(answer, log_tail=log_tail, wall_s=time.perf_counter() - started_s)
        return answer

    def _receive(
        self, worker: WorkerProcess, limit_s: float, what: str, on_progress: ScoringCallback | None = None
    ) -> Any:
        """Return the worker's answer, or stop the worker and return a `Failed`; `what` names the request."""
        deadline_s = time.monotonic() + limit_s
        memory_gb = self._limits.memory_gb
        try:
            kind, answer = worker.receive(limit_s, memory_gb)
            while kind == PROGRESS_MESSAGE:
                if on_progress is not None:
                    on_progress(*answer)
                kind, answer = worker.receive(deadline_s - time.monotonic(), memory_gb)
        except TimeoutError:
            failed = Failed(stage="timeout", reason=f"{what} took longer than {limit_s:g} s")
        except MemoryError:
            cause = f"{what} used more than {memory_gb:g} GB of memory"
            failed = Failed(stage="crash", reason=f"{cause} (limits.memory_gb, which all engines of a worker share)")
        except (EOFError, OSError):
            failed = Failed(stage="crash", reason=f"the worker {worker.describe_exit()} during {what}")
            _logger.warning("%s; starting a new worker", failed.reason)
            if worker.was_killed and self._worker is worker:  # otherwise `__exit__` did it, in another thread
                self._first_kept_handle = self._next_handle
                raise _Killed(replace(failed, log_tail=last_lines(self._read_log()))) from None
        else:
            if kind == "user_error":
                raise UserError(answer)
            return answer
        self._stop()
        return failed

    def _forget_dead_worker(self) -> None:
        """Forget a worker that ended between two calls."""
        if self._worker is not None and not self._worker.alive:
            if self._worker.was_killed:
                self._first_kept_handle = self._next_handle
            self._stop()

    def _start(self) -> WorkerProcess:
        """Start a worker, and another one if it is killed while it starts."""
        for _ in range(MAX_STARTS - 1):
            try:
                return self._start_once()
            except _Killed:
                self._stop()
        try:
            return self._start_once()
        except _Killed as error:
            raise WorkerKilled(f"no worker could be started: {error.failed.reason}") from error

    def _start_once(self) -> WorkerProcess:
        with explain_write_errors(self._log):
            output = self._log.open("ab")
        try:
            with output:
                worker = self._worker = WorkerProcess(output, self._next_handle)
        except OSError as error:
            raise UserError(f"no worker could be started: {error}") from error
        worker.send((replace(self._spec, workdir=self._scratch), self._next_handle))
        answer = self._receive(worker, SANDBOX_START_LIMIT_S, "start")
        if isinstance(answer, Failed):
            raise UserError(f"no worker could be started: {answer.reason}\n{last_lines(self._read_log())}")
        self._facts, self._gpus = answer
        return worker

    def _stop(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()

    def _read_log(self) -> str:
        with suppress(OSError):
            return self._log.read_bytes()[-MAX_LOG_BYTES:].decode(errors="replace")
        return ""


def serve(fd: int) -> None:
    """Run a worker: construct the plug-ins, then answer calls until the driver closes the connection `fd`."""
    die_with_parent()
    connection: Connection[Any, Any] = Connection(fd)
    spec, first_handle = connection.recv()

    def report(done: int, total: int) -> None:
        connection.send((PROGRESS_MESSAGE, (done, total)))

    try:
        with InProcess(spec, first_handle) as engines:
            facts = {name: engines.describe(name) for name in spec.benchmarkers}
            connection.send(("answer", (facts, engines.gpus)))
            while True:
                connection.send_bytes(_answer(engines, report, connection.recv()))
    except UserError as error:
        connection.send(("user_error", str(error)))
    except EOFError:
        return


def _answer(engines: InProcess, report: ScoringCallback, request: Build | EngineRequest[Any]) -> bytes:
    def work() -> bytes:
        if isinstance(request, Build):
            return pickle.dumps(("answer", engines.build(request.candidate, request.benchmarker)))
        return pickle.dumps(("answer", engines.request(request, report)))

    try:
        answer = as_outcome(request.stage, work)  # also for a result that cannot be pickled
    except UserError as error:
        return pickle.dumps(("user_error", str(error)))
    return answer if isinstance(answer, bytes) else pickle.dumps(("answer", answer))
