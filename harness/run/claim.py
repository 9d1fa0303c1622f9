"""A results folder belongs to one experiment, and to one process at a time."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

import yaml

from harness.errors import UserError
from harness.run.config import Experiment, to_yaml
from harness.run.rows import write_text

__all__ = ["claimed"]

LOCK = ".lock"
FILE = "experiment.yaml"
_OURS = {LOCK, "experiment.tmp"}
logger = logging.getLogger(__name__)


@contextmanager
def claimed(out: Path, experiment: Experiment) -> Iterator[None]:
    """Hold the results folder for this experiment; made where missing.

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
        _claim(out / FILE, experiment)
        yield


def _hold(lock: FileIO, out: Path) -> None:
    """Take the lock; the kernel lets go of it when this process ends, however it ends."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        raise UserError(
            f"{out}: process {lock.read().decode().strip() or 'unknown'} is running this experiment; wait for it, "
            "or use another --out"
        ) from error
    except OSError as error:
        logger.warning("%s: this file system has no locks (%s); start no second run here", out, error)
        return
    with suppress(OSError):  # the name is a courtesy; a full disk shows where something is lost by it
        lock.truncate(0)
        lock.write(str(os.getpid()).encode())


def _claim(file: Path, experiment: Experiment) -> None:
    if not file.exists():
        write_text(file, to_yaml(experiment))
        return
    try:
        there = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{file}: cannot be read ({error}); use another --out") from error
    if not isinstance(there, dict):
        raise UserError(f"{file}: is damaged, so nobody knows whose results these are; use another --out")
    here = experiment.model_dump(mode="json", exclude={"description"})
    changed = [key for key in here if there.get(key) != here[key]]
    if changed:
        raise UserError(
            f"{file.parent}: holds results of another experiment (different: {', '.join(changed)}); use another --out"
        )
