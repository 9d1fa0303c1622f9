"""What may fall over a hostile file is done in a process of its own.

The C++ below onnx believes files: it indexes, divides and counts by what they say. With onnx 1.21 a Conv whose weights
have another rank than its input, strides of 0 or a Slice of 2^62 steps raise nothing: the process ends, or never does.

The process is a fresh interpreter. A fork will not do where the driver has threads: what another one has locked stays
locked in the fork, and before a fork OpenBLAS (0.3.31, `blas_thread_shutdown`) waits for its threads to end, which one
that is at work never does.
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
from harness.measure.worker import Worker, end_with_driver

__all__ = ["Fallen", "serve", "sturdy"]

LIMIT_S = 60.0
"""Shape inference of the largest models takes seconds."""
START_S = 120.0
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Fallen(UserError):
    """The helper process crashed, or exceeded a limit.

    Attributes:
        how: What happened, as the predicate of a sentence.
        crashed: False if a limit was exceeded.
    """

    def __init__(self, what: str, how: str, *, crashed: bool) -> None:
        super().__init__(f"{what} {how}: damaged, or made to do so; fetch or export the model again")
        self.how, self.crashed = how, crashed


def sturdy(what: str, work: Callable[[*Ts], T], *args: *Ts, memory_gb: float = math.inf) -> T:
    """Return what `work` returns in the helper process, whose start takes a tenth of a second at the first call.

    Args:
        what: Begins the message: which file, and what is done with it.
        work: A function that can be found by its name; what it takes, gives and raises can be pickled.
        memory_gb: Memory that the process may have in use.

    Raises:
        Fallen: The process crashed, did not end in time, or took too much memory.
    """
    result: T = _helper(os.getpid()).call(what, (work, args), memory_gb)
    return result


def serve(fd: int) -> None:
    """Body of that process: do what it is told until the driver hangs up."""
    end_with_driver()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection: Connection[Any, Any] = Connection(fd)
    connection.send("ready")
    with suppress(EOFError):
        while True:
            connection.send(_outcome(*connection.recv()))


def _outcome(work: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Exception | None]:
    try:
        return work(*args), None
    except Exception as error:  # raised again where the work was asked for
        return None, error


class _Helper:
    """One process that is given one call at a time, by whatever thread; after a fall the next call starts another."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._worker: Worker | None = None

    def call(self, what: str, order: object, memory_gb: float) -> Any:
        with self._turn:
            value, error = self._answer(what, order, memory_gb)
        if error is not None:
            raise error
        return value

    def _answer(self, what: str, order: object, memory_gb: float) -> tuple[Any, Exception | None]:
        with ExitStack() as fallen:
            fallen.callback(self._stop)
            worker, crashed = self._ready(), False
            try:
                worker.send(order)
                value, error = worker.receive(LIMIT_S, memory_gb)
            except TimeoutError:
                how = f"takes more than {LIMIT_S:g} s"
            except MemoryError:
                how = f"takes more than {memory_gb:.1f} GB of memory"
            except (EOFError, OSError):
                how, crashed = worker.ending(), True
            else:
                fallen.pop_all()
                return value, error
        raise Fallen(what, how, crashed=crashed)

    def _ready(self) -> Worker:
        """The process; a fresh one where that has ended meanwhile, as when the kernel needs its memory."""
        if self._worker is not None and self._worker.alive:
            return self._worker
        self._stop()
        try:
            with Path(os.devnull).open("wb") as nowhere:
                self._worker = Worker(nowhere, body=__name__)
            self._worker.receive(START_S, math.inf)
        except (EOFError, OSError) as error:
            raise UserError(f"no process could be started to read models in: {error or 'it gave no sign'}") from error
        return self._worker

    def _stop(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()


@lru_cache(maxsize=1)
def _helper(_process: int) -> _Helper:
    """That of this process, by its id: a fork may not talk to its parent's."""
    return _Helper()
