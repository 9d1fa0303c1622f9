"""One stopwatch a device: runs that share this machine time one engine at a time, while the others may build."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.errors import UserError

__all__ = ["stopwatch"]


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
    path = (folder or Path(tempfile.gettempdir())) / f"qdq-stopwatch-{_device()}"
    try:
        handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; set TMPDIR to a folder that this user can write to") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _device() -> str:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    shown = f"{os.getuid()} {cores} {os.environ.get('CUDA_VISIBLE_DEVICES', '')}"
    return hashlib.sha256(shown.encode()).hexdigest()[:12]
