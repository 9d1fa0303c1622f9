"""One stopwatch for the cores, and one GPU for one at a time, among all runs of a user on this machine."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from harness.errors import UserError

__all__ = ["alone", "stopwatch"]


@contextmanager
def stopwatch(folder: Path | None = None) -> Iterator[None]:
    """Hold the stopwatch of the cores and GPUs that this process may use; waits while another process has it.

    The kernel takes it back from a process that dies. Processes whose cores overlap without being the same do not
    wait for each other.

    Args:
        folder: Where the lock lies; None: the system's folder for temporary files.

    Raises:
        UserError: The lock cannot be opened, or somebody made it a link.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    shown = f"{cores} {os.environ.get('CUDA_VISIBLE_DEVICES', '')}"
    with _held(f"stopwatch-{_short(shown)}", folder):
        yield


@contextmanager
def alone(gpus: Iterable[str], folder: Path | None = None) -> Iterator[None]:
    """Hold GPUs: for timing on them, and for what would disturb that, or be disturbed by it as a build is.

    NVIDIA, "TensorRT Developer Guide": the builder times kernels; what runs on the GPU beside it perturbs its choice.

    Args:
        gpus: Their UUIDs; where there are none, nothing is held.
        folder: See `stopwatch`.

    Raises:
        UserError: See `stopwatch`.
    """
    with ExitStack() as stack:
        for gpu in sorted(gpus):  # always in one order, or two who want the same two could wait for each other
            stack.enter_context(_held(f"gpu-{_short(gpu)}", folder))
        yield


@contextmanager
def _held(name: str, folder: Path | None) -> Iterator[None]:
    path = (folder or Path(tempfile.gettempdir())) / f"qdq-{name}"
    try:
        handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; set TMPDIR to a folder that this user can write to") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _short(what: str) -> str:
    return hashlib.sha256(f"{os.getuid()} {what}".encode()).hexdigest()[:12]
