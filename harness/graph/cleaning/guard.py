"""What may fall over a hostile file is tried in a process of its own first.

The C++ below onnx believes files: it indexes, divides and counts by what they say. With onnx 1.21 a Conv whose weights
have another rank than its input, strides of 0 or a Slice of 2^62 steps raise nothing: the process ends, or never does.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import resource
import select
import signal
from collections.abc import Callable
from typing import NoReturn, TypeVar

from harness.errors import UserError

__all__ = ["sturdy"]

LIMIT_S = 60.0
"""Shape inference of the largest models takes seconds."""
T = TypeVar("T")


def sturdy(work: Callable[[], T], what: str) -> T:
    """What `work` gives, after a fork has survived it; that takes some milliseconds, and the work once more.

    Args:
        what: Begins the message: which file, and what is done with it.

    Raises:
        UserError: The fork fell, or had not ended in time.
    """
    read, write = os.pipe()
    child = os.fork()
    if not child:
        _try(work)
    os.close(write)
    ended = _closes(read)
    os.close(read)
    if not ended:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        how = f"ends by {signal.Signals(os.WTERMSIG(status)).name}" if ended else f"takes more than {LIMIT_S:g} s"
        raise UserError(f"{what} {how}: damaged, or made to do so; fetch or export the model again")
    return work()


def _closes(read: int) -> bool:
    """Whether a pipe is closed at its other end in time."""
    poller = select.poll()  # `select.select` takes no descriptor above 1023
    poller.register(read, select.POLLIN)
    return bool(poller.poll(1e3 * LIMIT_S))


def _try(work: Callable[[], object]) -> NoReturn:
    """Life of the fork, which says nothing to anybody; what it raises is raised again where the work is done."""
    try:
        faulthandler.disable()
        logging.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(math.ceil(LIMIT_S) + 5)  # it holds the locks of a driver that has gone before it could end it
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        work()
    finally:
        os._exit(0)
