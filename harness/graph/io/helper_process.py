"""Helper process for C++ code of onnx on files that may be damaged or malicious.

The C++ of onnx trusts files: it indexes, divides and counts by their contents. With onnx 1.21, a Conv whose weights
have another rank than its input, strides of 0 or a Slice of 2^62 steps raise no exception: the process crashes or never
returns.

The helper is a fresh interpreter. A fork does not work if the driver has threads: locks of other threads stay locked in
the fork, and before a fork OpenBLAS (0.3.31, `blas_thread_shutdown`) waits for its threads, which a working one never
answers.
"""

from __future__ import annotations

import math
import os
import resource
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

from harness.errors import UserError
from harness.timing.workers.process import WorkerProcess, die_with_parent

__all__ = ["HelperCallFailed", "call_in_helper_process", "serve"]

HELPER_CALL_LIMIT_S = 60.0  # shape inference of the largest models takes seconds
HELPER_START_LIMIT_S = 120.0
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class HelperCallFailed(UserError):
    """The helper process crashed, or exceeded a limit.

    Attributes:
        how: The failure as the predicate of a sentence.
        crashed: False if a limit was exceeded.
    """

    def __init__(self, what: str, how: str, *, crashed: bool) -> None:
        super().__init__(f"{what} {how}: the file is damaged or malicious; fetch or export the model again")
        self.how, self.crashed = how, crashed


def call_in_helper_process(what: str, work: Callable[[*Ts], T], *args: *Ts, memory_gb: float = math.inf) -> T:
    """Return the result of a function that runs in the helper process, whose first start takes a tenth of a second.

    Args:
        what: Subject of the message on failure: the file and the operation.
        work: A module-level function; its arguments, result and exceptions can be pickled.
        args: Its arguments.
        memory_gb: Memory that the process may use.

    Raises:
        HelperCallFailed: The process crashed, exceeded the time limit, or used too much memory.
    """
    result: T = _process_helper(os.getpid()).call(what, (work, args), memory_gb)
    return result


def serve(fd: int) -> None:
    """Run the helper process: execute calls until the driver closes the connection."""
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection: Connection[Any, Any] = Connection(fd)
    connection.send("ready")
    with suppress(EOFError):
        while True:
            connection.send(_run_call(*connection.recv()))


def _run_call(work: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Exception | None]:
    try:
        return work(*args), None
    except Exception as error:  # raised again by the caller
        return None, error


class NativeCallWorker:
    """Helper process that executes one call at a time, from any thread; it is restarted after a failure."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: WorkerProcess | None = None

    def call(self, what: str, message: object, memory_gb: float) -> Any:
        with self._lock:
            value, error = self._call_worker(what, message, memory_gb)
        if error is not None:
            raise error
        return value

    def _call_worker(self, what: str, message: object, memory_gb: float) -> tuple[Any, Exception | None]:
        with ExitStack() as on_failure:
            on_failure.callback(self._stop)
            worker, crashed = self._running_worker(), False
            try:
                worker.send(message)
                value, error = worker.receive(HELPER_CALL_LIMIT_S, memory_gb)
            except TimeoutError:
                how = f"takes more than {HELPER_CALL_LIMIT_S:g} s"
            except MemoryError:
                how = f"takes more than {memory_gb:.1f} GB of memory"
            except (EOFError, OSError):
                how, crashed = worker.describe_exit(), True
            else:
                on_failure.pop_all()
                return value, error
        raise HelperCallFailed(what, how, crashed=crashed)

    def _running_worker(self) -> WorkerProcess:
        """Return the process; start a new one if it ended meanwhile, for instance because the kernel needed memory."""
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


@lru_cache(maxsize=1)
def _process_helper(_process: int) -> NativeCallWorker:
    """Return the helper of a process, by its id: a fork must not use its parent's."""
    return NativeCallWorker()
