"""A results folder belongs to one experiment, and to one process at a time."""

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
from harness.run.compare import ADVICE, Changed, same
from harness.run.config import Experiment, load_experiment, to_yaml
from harness.run.rows import write_text
from harness.run.sections import put_aside

__all__ = ["claimed"]

LOCK = ".lock"
FILE = "experiment.yaml"
_OURS = {LOCK, "experiment.tmp"}
_FREE = {"description", "executor"}
"""Keys that may change at any time; what matters of the executor is in the fingerprint of a search."""
logger = logging.getLogger(__name__)


@contextmanager
def claimed(out: Path, experiment: Experiment, accept_changes: bool = False) -> Iterator[None]:
    """Hold the results folder for this experiment; made where missing.

    Args:
        accept_changes: Take the folder over from another version of the experiment, whose file is kept beside.

    Raises:
        UserError: Another process is at work there, another experiment's results are there, or it cannot be written.
    """
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file, not a folder; use another --out")
    if out.exists() and not (out / FILE).exists() and any(entry.name not in _OURS for entry in out.iterdir()):
        raise UserError(f"{out}: is not empty and holds no experiment; use another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / LOCK).open("ab+", buffering=0)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror}); use another --out") from error
    with lock:
        _hold(lock, out)
        _claim(out / FILE, experiment, accept_changes)
        yield


def _hold(lock: FileIO, out: Path) -> None:
    """Take the lock; the kernel lets go of it when this process ends, however it ends."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        owner = lock.read(1000).decode(errors="replace").strip() or "unknown"
        raise UserError(
            f"{out}: process {owner} is running this experiment; wait for it, or use another --out"
        ) from error
    except OSError as error:
        logger.warning("%s: this file system has no locks (%s); start no second run here", out, error)
        return
    with suppress(OSError):  # the name is a courtesy; a full disk shows where something is lost by it
        lock.truncate(0)
        lock.write(_owner().encode())


def _owner() -> str:
    """Who holds the lock, for whoever finds it held."""
    with suppress(KeyError, OSError):  # containers may run as users that have no name
        return f"{os.getpid()} of {getpass.getuser()} on {socket.gethostname()}, since {time.strftime('%F %T %Z')}"
    return str(os.getpid())


def _claim(file: Path, experiment: Experiment, accept_changes: bool) -> None:
    if not file.exists():
        write_text(file, to_yaml(experiment))
        return
    try:
        there = load_experiment(file)  # so that a key which is newer than these results has its default there
    except UserError as error:
        raise UserError(f"{error}; nobody knows whose results these are: use another --out") from error
    before, now = (each.model_dump(mode="json", exclude=_FREE) for each in (there, experiment))
    changed = [key for key in now if not same(before[key], now[key])]
    if changed and not accept_changes:
        raise Changed(f"{file.parent}: holds results of another experiment (different: {', '.join(changed)}); {ADVICE}")
    if changed:
        put_aside(file)
        write_text(file, to_yaml(experiment))
