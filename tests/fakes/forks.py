"""Work in a fork, for files that may end the process or fill its memory."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Callable


def in_fork(work: Callable[[], str], limit_s: float = 20.0) -> str:
    """What `work` says, or how its process ended."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        gc.freeze()  # finalizers of the parent's objects may wait for threads that a fork lacks
        said = "broken"
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s), int(limit_s) + 1))
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            said = work()
        except BaseException as error:  # all that is no UserError is a finding
            said = f"broken: {type(error).__name__}: {str(error)[:200]}"
        finally:
            os.write(write, said.encode(errors="replace")[:4000])
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    return said if os.WIFEXITED(status) and said else f"crash: signal {os.WTERMSIG(status)}"
