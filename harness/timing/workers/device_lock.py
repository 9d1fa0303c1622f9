"""Locks shared by all runs of a user on this machine: one timing at a time on the cores, one use at a time of a GPU.

`flock` waits in the kernel. A lock library polls, which would wake this process while another one is being timed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from harness.errors import UserError

__all__ = ["device_lock", "timing_lock"]


@contextmanager
def timing_lock(folder: Path | None = None) -> Iterator[None]:
    """Hold the lock for timing on the cores and GPUs that this process may use; wait until another process frees it.

    The kernel releases the lock of a process that dies. Processes whose cores overlap without being equal do not
    exclude each other. The lock file is in the system's folder for temporary files by default.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    devices = f"{cores} {os.environ.get('CUDA_VISIBLE_DEVICES', '')}"
    with _hold_lock(f"stopwatch-{_digest(devices)}", folder):
        yield


@contextmanager
def device_lock(gpus: Iterable[str], folder: Path | None = None) -> Iterator[None]:
    """Hold GPUs, given by UUID, for timing and for work that disturbs timing or is disturbed by it, such as builds.

    NVIDIA, "TensorRT Developer Guide": the builder times kernels, so other work on the GPU perturbs its choice.
    """
    with ExitStack() as stack:
        for gpu in sorted(gpus):  # in one order: two processes that want the same two must not wait for each other
            stack.enter_context(_hold_lock(f"gpu-{_digest(gpu)}", folder))
        yield


@contextmanager
def _hold_lock(name: str, folder: Path | None) -> Iterator[None]:
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


def _digest(text: str) -> str:
    return hashlib.sha256(f"{os.getuid()} {text}".encode()).hexdigest()[:12]
