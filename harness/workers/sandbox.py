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
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from harness.base.errors import EvaluationFailed, UserError
from harness.base.files import explain_write_errors
from harness.base.statistics import Interval
from harness.config.sections import Limits, Sampling
from harness.measure.records import MAIN_BENCHMARKER, Failed
from harness.measure.sampling import Samples
from harness.plugins import registry
from harness.plugins.api import Accuracy, Array, Candidate, Infer, capabilities_of
from harness.workers.engines import BuiltEngine, Engines, ScoringCallback, WorkerSpec
from harness.workers.in_process import InProcess, Scorer, as_outcome, last_lines
from harness.workers.locks import device_lock, timing_lock
from harness.workers.process import WorkerProcess, die_with_parent
from harness.workers.trial_pool import WorkerKilled
from search.space import Resolved

SANDBOX_START_LIMIT_S = 120.0
PROGRESS_MESSAGE = "progress"  # kind of messages with the progress of scoring, which precede an answer
MAX_LOG_BYTES = 65_536
MAX_STARTS = 3  # number of attempts to start a worker that other processes kill
_logger = logging.getLogger(__name__)


def open_engines(spec: WorkerSpec, limits: Limits) -> AbstractContextManager[Engines]:
    """Return engines in a worker, or in this process if the main benchmarker is `in_process`.

    Args:
        limits: Limits of each call: seconds and memory; no effect in this process.

    Raises:
        UserError: A benchmarker cannot be constructed.
    """
    plugin = spec.benchmarkers[MAIN_BENCHMARKER]
    in_process = capabilities_of(registry.load_plugin("benchmarker", plugin.use)).in_process
    return InProcess(spec) if in_process else Sandbox(spec, limits)


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

    def __init__(self, spec: WorkerSpec, limits: Limits) -> None:
        self._spec = spec
        self._limits = limits
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
        with device_lock(self.gpus, waits=self._spec.lock_waits):
            args = (candidate.digest, candidate.edges, path, benchmarker)
            try:
                built: BuiltEngine | Failed = self._request("build", self._limits.build_s, *args)
            except _Killed:
                built = self._request_or_failure("build", self._limits.build_s, *args)
        if isinstance(built, BuiltEngine):
            self._next_handle = built.handle + 1
            self._digests[built.handle] = candidate.digest
        return built

    def sample(
        self, handle: int, sampling: Sampling, rival: Interval | None = None, level_ms: float | None = None
    ) -> Samples | Failed:
        """Time an engine while no other run times on the same cores and GPUs; see `Engines.sample`."""
        if failed := self._open(handle, level_ms):
            return failed
        # Acquired here, so that waiting for another run counts against no limit.
        with timing_lock(waits=self._spec.lock_waits):
            return super().sample(handle, sampling, rival, level_ms)

    def _open(self, handle: int, level_ms: float | None) -> Failed | None:
        """Open an engine before its first timing; this needs no timing lock."""
        key = (handle, level_ms is None)
        if key in self._opened and self._is_alive(handle):
            return None
        failed: Failed | None = self._call("open", handle, level_ms)
        if failed is None:
            self._opened.add(key)
        return failed

    def evaluate(
        self, handle: int, evaluator: str = MAIN_BENCHMARKER, watch: ScoringCallback | None = None
    ) -> Accuracy | Failed:
        """Score an engine in the worker, or in this process if the evaluator is a registered object of it."""
        if not self._is_local(evaluator):
            return super().evaluate(handle, evaluator, watch)
        return as_outcome("evaluate", lambda: self._scorer.evaluate(self._infer_with(handle), evaluator, watch))

    def prepare(
        self, handle: int, evaluator: str = MAIN_BENCHMARKER, watch: ScoringCallback | None = None
    ) -> Failed | None:
        """Run an evaluator's `prepare`; see `evaluate`."""
        if not self._is_local(evaluator):
            return super().prepare(handle, evaluator, watch)
        return as_outcome("evaluate", lambda: self._scorer.prepare(self._infer_with(handle), evaluator, watch))

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

    def release(self, handle: int) -> None:
        """Close an engine if its worker is alive."""
        self._opened -= {(handle, True), (handle, False)}
        self._digests.pop(handle, None)
        if self._is_alive(handle):
            self._request_or_failure("release", self._limits.measure_s, handle)

    def _is_alive(self, handle: int) -> bool:
        self._forget_dead_worker()
        return self._worker is not None and handle >= self._worker.first_handle

    def _call(self, method: str, *args: Any, on_progress: ScoringCallback | None = None) -> Any:
        handle = args[0]
        if not self._is_alive(handle):
            stage = "measure" if method in ("open", "sample") else method
            reason = f"{stage}: the engine ended with an earlier worker; build it again"
            if handle < self._first_kept_handle:
                raise WorkerKilled(reason)
            return Failed(stage="crash", reason=reason)
        limit_s = self._limits.evaluate_s
        if method == "sample":
            limit_s = self._limits.measure_s
        elif method == "open":  # the first engine that is timed against the reference waits for its build
            limit_s = self._limits.measure_s + (self._limits.build_s if args[1] else 0.0)
        kills, key = self._spec.kills, (self._digests.get(handle, ""), method)
        with device_lock(self.gpus, waits=self._spec.lock_waits):
            try:
                answer = self._request(method, limit_s, *args, on_progress=on_progress)
            except _Killed as error:
                kills[key] += 1
                if kills[key] > 1:
                    return error.failed
                raise WorkerKilled(error.failed.reason) from error
        del kills[key]
        return answer

    def _request_or_failure(self, method: str, limit_s: float, *args: Any) -> Any:
        try:
            return self._request(method, limit_s, *args)
        except _Killed as error:
            return error.failed

    def _request(self, method: str, limit_s: float, *args: Any, on_progress: ScoringCallback | None = None) -> Any:
        """Send a call to the worker, and return its answer, or a `Failed` if the worker died or exceeded a limit.

        Raises:
            _Killed: Another process killed the worker.
        """
        started_s = time.perf_counter()
        self._forget_dead_worker()
        worker = self._worker or self._start()
        try:
            worker.send((method, args))
            answer = self._receive(worker, limit_s, method, on_progress)
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
        self, worker: WorkerProcess, limit_s: float, method: str, on_progress: ScoringCallback | None = None
    ) -> Any:
        """Return the worker's answer, or stop the worker and return a `Failed`."""
        deadline_s = time.monotonic() + limit_s
        memory_gb = self._limits.memory_gb
        try:
            kind, answer = worker.receive(limit_s, memory_gb)
            while kind == PROGRESS_MESSAGE:
                if on_progress is not None:
                    on_progress(*answer)
                kind, answer = worker.receive(deadline_s - time.monotonic(), memory_gb)
        except TimeoutError:
            failed = Failed(stage="timeout", reason=f"{method} took longer than {limit_s:g} s")
        except MemoryError:
            cause = f"{method} used more than {memory_gb:g} GB of memory"
            failed = Failed(stage="crash", reason=f"{cause} (limits.memory_gb, which all engines of a worker share)")
        except (EOFError, OSError):
            failed = Failed(stage="crash", reason=f"the worker {worker.describe_exit()} during {method}")
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
                connection.send_bytes(_answer_call(engines, report, *connection.recv()))
    except UserError as error:
        connection.send(("user_error", str(error)))
    except EOFError:
        return


def _answer_call(engines: InProcess, report: ScoringCallback, method: str, args: tuple[Any, ...]) -> bytes:
    def work() -> bytes:
        if method == "build":
            return pickle.dumps(("answer", engines.build(_candidate(*args[:3]), args[3])))
        extra = (report,) if method in ("evaluate", "prepare") else ()
        return pickle.dumps(("answer", getattr(engines, method)(*args, *extra)))

    try:
        answer = as_outcome(method, work)  # also for a result that cannot be pickled
    except UserError as error:
        return pickle.dumps(("user_error", str(error)))
    return answer if isinstance(answer, bytes) else pickle.dumps(("answer", answer))


def _candidate(digest: str, edges: Resolved, path: Path) -> Candidate:
    return Candidate(digest=digest, edges=edges, source=lambda: path)
