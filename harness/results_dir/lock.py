"""A folder of results belongs to one process at a time."""

from __future__ import annotations

import fcntl
import getpass
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from harness.errors import UserError

__all__ = ["LOCK_FILE", "exclusive_lock"]

LOCK_FILE = ".lock"
logger = logging.getLogger(__name__)


@contextmanager
def exclusive_lock(folder: Path, what: str) -> Iterator[None]:
    """Hold a folder, made where missing; the kernel lets go of it when this process ends, however it ends.

    Args:
        what: What another process is doing there, for whoever finds it held.

    Raises:
        UserError: Another process holds it, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK_FILE).open("ab+", buffering=0)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}); use another --out") from error
    with lock:
        _acquire_lock(lock, folder, what)
        yield


def _acquire_lock(lock: FileIO, folder: Path, what: str) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        owner = lock.read(1000).decode(errors="replace").strip() or "unknown"
        raise UserError(f"{folder}: process {owner} is {what}; wait for it, or use another --out") from error
    except OSError as error:
        logger.warning("%s: this file system has no locks (%s); start no second run here", folder, error)
        return
    with suppress(OSError):  # the name is a courtesy; a full disk shows where something is lost by it
        lock.truncate(0)
        lock.write(_describe_process().encode())


def _describe_process() -> str:
    """Who holds the lock, for whoever finds it held."""
    with suppress(KeyError, OSError):  # containers may run as users that have no name
        return f"{os.getpid()} of {getpass.getuser()} on {socket.gethostname()}, since {time.strftime('%F %T %Z')}"
    return str(os.getpid())
