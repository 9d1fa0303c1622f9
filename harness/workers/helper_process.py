"""Helper process for native code (onnx, ONNX Runtime, OpenVINO) on models that may be damaged or malicious.

The C++ code of onnx does not validate files: with onnx 1.21, a Conv whose weights have another rank than its input,
strides of 0 or a Slice of 2^62 steps raise no exception, but crash the process or never return. So each call has limits
of time and memory. The caller's process (the driver) repeats the log messages of the helper.

The helper is a fresh interpreter, because a fork does not work if the driver has threads: locks of other threads stay
locked in the fork, and OpenBLAS (0.3.31, `blas_thread_shutdown`) waits before a fork for threads that may be busy.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from logging.handlers import QueueHandler
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar, TypeVarTuple

import psutil

from harness.base.errors import UserError
from harness.workers.process import WorkerProcess, die_with_parent

LIMIT_S_VARIABLE = "QDQ_MODEL_LIMIT_S"
MEMORY_VARIABLE = "QDQ_MODEL_MEMORY_GB"
HELPER_CALL_LIMIT_S = 60.0  # shape inference of the largest models takes seconds
RUNTIME_FACTOR = 60.0  # for steps that build or run a model
MAX_FREE_MEMORY_SHARE = 0.8
HELPER_START_LIMIT_S = 120.0
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Report = Callable[..., object]


class HelperCallFailed(UserError):
    """Crash of the helper process in the call `what`, or a call that exceeded a limit.

    Attributes:
        how: Description of the failure without a subject, for instance "was ended by SIGSEGV".
        crashed: Whether the process crashed; False if a limit was exceeded.
    """

    def __init__(self, what: str, how: str, *, crashed: bool) -> None:
        super().__init__(f"{what} {how}; the file may be damaged or malicious: fetch or export the model again")
        self.how, self.crashed = how, crashed


def call_in_helper_process(what: str, work: Callable[[*Ts], T], *args: *Ts, factor: float = 1.0) -> T:
    """Call a function in the helper process, and return its result.

    The limits are `QDQ_MODEL_LIMIT_S`, by default 60 seconds, and `QDQ_MODEL_MEMORY_GB`, by default 80 % of the free
    memory.

    Args:
        what: Subject of the error message: the file and the step.
        work: Module-level function, whose arguments, result and exceptions can be pickled.
        args: Arguments of the function.
        factor: Factor by which the time limit is multiplied, for steps that may take longer.

    Raises:
        HelperCallFailed: The process crashed, exceeded the time limit, or used too much memory.
        UserError: A variable of a limit is not a positive number.
    """
    result: T = _process_helper(os.getpid()).call(what, (work, args), factor, None)
    return result


def call_with_reports(what: str, work: Callable[..., T], *args: Any, factor: float, on_report: Report) -> T:
    """Return `work(*args, report)`, computed in the helper process; each call of `report` there calls `on_report` here.

    Args:
        what: Subject of the error message: the file and the step.
        work: Module-level function, whose arguments, result and exceptions can be pickled.
        args: Arguments of the function, without `report`.
        factor: Factor by which the time limit is multiplied.
        on_report: Function that is called with the arguments of each report.

    Raises:
        HelperCallFailed: See `call_in_helper_process`.
        UserError: See `call_in_helper_process`.
    """
    result: T = _process_helper(os.getpid()).call(what, (work, args), factor, on_report)
    return result


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of a step on a model, with messages about them.

    Attributes:
        seconds: Time limit in seconds, already multiplied by `factor`.
        memory_gb: Memory limit in units of 10^9 bytes.
        factor: Factor by which the time limit is multiplied, for steps that may take longer.
    """

    seconds: float
    memory_gb: float
    factor: float

    @classmethod
    def read(cls, factor: float = 1.0) -> StepLimits:
        """Return the limits that the environment sets; raise `UserError` if one is not a positive number."""
        free_gb = psutil.virtual_memory().available * MAX_FREE_MEMORY_SHARE / 1e9
        seconds = _read_limit(LIMIT_S_VARIABLE, HELPER_CALL_LIMIT_S) * factor
        return cls(seconds, _read_limit(MEMORY_VARIABLE, free_gb), factor)

    @property
    def time_message(self) -> str:
        """Return the message about the time limit without its subject, the step."""
        doubled = f"{LIMIT_S_VARIABLE}={2 * self.seconds / self.factor:g}"
        return f"takes more than {self.seconds:g} s ({doubled} doubles that limit)"

    @property
    def memory_message(self) -> str:
        """Return the message about the memory limit without its subject, the step."""
        return f"takes more than {self.memory_gb:.1f} GB of memory ({MEMORY_VARIABLE} sets that limit)"


def _read_limit(variable: str, default: float) -> float:
    text = os.environ.get(variable, "")
    try:
        limit = float(text or default)
    except ValueError:
        limit = math.nan
    if not limit > 0:
        raise UserError(f"{variable}={text}: a number above 0")
    return limit


def serve(fd: int) -> None:
    """Run the helper process: execute calls until the driver closes the connection with the file descriptor `fd`."""
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection: Connection[Any, Any] = Connection(fd)
    sending = threading.Lock()

    def send(kind: str, *content: object) -> None:
        with sending:
            connection.send((kind, content))

    logging.getLogger().addHandler(_LogSender(partial(send, "log")))
    send("ready")
    with suppress(EOFError):
        while True:
            # Log level, working folder, import path and environment of the driver, which may change between calls. They
            # come first, because the call may be of a module on the driver's path alone.
            level, folder, path, environment = connection.recv()
            logging.getLogger().setLevel(level)
            os.chdir(folder)
            sys.path[:] = path
            if os.environ != environment:
                os.environ.clear()
                os.environ.update(environment)
            (work, args), reports = connection.recv()
            answer: tuple[Any, Exception | None]
            try:
                answer = (work(*args, *((partial(send, "report"),) if reports else ())), None)
            except Exception as error:  # raised again by the caller
                answer = (None, _as_picklable(error))
            send("answer", answer)


class _LogSender(QueueHandler):
    """Handler that sends records, formatted, to the driver."""

    def __init__(self, send: Callable[[logging.LogRecord], None]) -> None:
        super().__init__(SimpleQueue())  # stays empty: `enqueue` sends at once
        self._send = send

    def enqueue(self, record: logging.LogRecord) -> None:
        self._send(record)


def _as_picklable(error: Exception) -> Exception:
    if isinstance(error, UserError):
        return UserError(str(error))
    try:
        ForkingPickler.dumps(error)
        copy.copy(error)  # made again of its arguments, as by the connection
    except Exception:  # classes of any package
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class NativeCallWorker:
    """Helper process that executes one call at a time for all threads, and is restarted after a failure."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: WorkerProcess | None = None

    def call(self, what: str, call: object, factor: float, on_report: Report | None) -> Any:
        limits = StepLimits.read(factor)
        with self._lock, ExitStack() as on_failure:
            on_failure.callback(self._stop)
            worker, crashed = self._running_worker(), False
            try:
                worker.send((logging.getLogger().level, str(Path.cwd()), sys.path, dict(os.environ)))
                worker.send((call, on_report is not None))
                value, error = _receive_answer(worker, limits, on_report)
            except TimeoutError:
                how = limits.time_message
            except MemoryError:
                how = limits.memory_message
            except (EOFError, OSError):
                how, crashed = worker.describe_exit(), True
            else:
                on_failure.pop_all()
                if error is not None:
                    raise error
                return value
        raise HelperCallFailed(what, how, crashed=crashed)

    def _running_worker(self) -> WorkerProcess:
        """Return the running process; start one if there is none or the kernel killed it."""
        if self._worker is not None and self._worker.alive:
            return self._worker
        self._stop()
        try:
            with Path(os.devnull).open("wb") as null:
                self._worker = WorkerProcess(null, body=__name__)
            self._worker.receive(HELPER_START_LIMIT_S, math.inf)
        except (EOFError, OSError) as error:
            raise UserError(f"the process that reads models cannot be started: {error or 'no answer'}") from error
        return self._worker

    def _stop(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()


def _receive_answer(worker: WorkerProcess, limits: StepLimits, on_report: Report | None) -> Any:
    """Return the answer of a call, after its log messages and reports."""
    deadline_s = time.monotonic() + limits.seconds
    while True:
        kind, content = worker.receive(deadline_s - time.monotonic(), limits.memory_gb)
        if kind == "answer":
            return content[0]
        if kind == "log":
            logging.getLogger(content[0].name).handle(content[0])
        elif on_report is not None:
            on_report(*content)


@lru_cache(maxsize=1)
def _process_helper(_process: int) -> NativeCallWorker:
    """Return the helper of the process with this id, because a fork must not use the helper of its parent."""
    return NativeCallWorker()
