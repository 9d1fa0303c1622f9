"""Locks on cores and GPUs, so that processes of this machine do not disturb each other's timings."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import math
import os
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from harness.base.errors import UserError
from harness.base.paths import WAIT_VARIABLE, describe_process

LOCK_REPORT_S = 5.0  # a longer wait is reported
MAX_OWNER_BYTES = 1_000
_logger = logging.getLogger(__name__)


@contextmanager
def timing_lock(folder: Path | None = None, waits: list[float] | None = None) -> Iterator[None]:
    """Hold the lock for timing on the cores and GPUs that this process may use; wait for other processes that hold it.

    The kernel releases the lock of a process that dies. Processes with different but overlapping sets of cores do not
    exclude each other.

    Args:
        folder: Folder of the lock file; None: the system's folder for temporary files.
        waits: List to which the seconds of waits for other processes are appended, in steps of up to `LOCK_REPORT_S`.

    Raises:
        UserError: The limit of `--wait` is over, or the lock file cannot be written.
    """
    with _hold_lock(_timing_lock_name(), folder, waits):
        yield


def is_timing(folder: Path | None = None) -> bool:
    """Return whether any process, also this one, holds `timing_lock` for the same cores and GPUs."""
    path = (folder or Path(tempfile.gettempdir())) / f"qdq-{_timing_lock_name()}"
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # nothing was timed since the machine started
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


@contextmanager
def device_lock(gpus: Iterable[str], folder: Path | None = None, waits: list[float] | None = None) -> Iterator[None]:
    """Hold the locks of GPUs, given by UUID, for timing, and for work such as builds that would disturb it.

    NVIDIA, "TensorRT Developer Guide": the builder times kernels, so other work on the GPU perturbs its choice. For
    `folder` and `waits` see `timing_lock`.

    Raises:
        UserError: See `timing_lock`.
    """
    with ExitStack() as stack:
        for gpu in sorted(gpus):  # in one order, so that two processes with the same GPUs never wait for each other
            stack.enter_context(_hold_lock(f"gpu-{_digest(gpu)}", folder, waits))
        yield


@contextmanager
def _hold_lock(name: str, folder: Path | None, waits: list[float] | None) -> Iterator[None]:
    path = (folder or Path(tempfile.gettempdir())) / f"qdq-{name}"
    try:
        handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; set TMPDIR to a folder that this user can write to") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _wait_for_lock(handle, [] if waits is None else waits)
        with suppress(OSError):  # a full disk
            os.ftruncate(handle, 0)
            os.pwrite(handle, describe_process(with_host=True).encode(), 0)
        yield
    finally:
        os.close(handle)


def _wait_for_lock(handle: int, waits: list[float]) -> None:
    """Lock an open file that another process has locked; report its owner after some seconds.

    A thread waits in the kernel's queue, because a process that polls may never find the lock free. Time for which
    another thread of this process has the lock does not count.

    Raises:
        UserError: The limit of `--wait` is over.
    """
    text, waited_s, reported = os.environ.get(WAIT_VARIABLE) or "inf", 0.0, False
    try:
        limit_s = float(text)
    except ValueError:
        limit_s = math.nan
    if not limit_s >= 0:
        raise UserError(f"{WAIT_VARIABLE}: a number of seconds from 0, but got {text!r}")
    queued, acquired = os.dup(handle), threading.Event()

    def acquire() -> None:
        fcntl.flock(queued, fcntl.LOCK_EX)
        acquired.set()
        os.close(queued)  # frees the lock if the caller has given up and closed its handle

    threading.Thread(target=acquire, daemon=True).start()
    while not acquired.wait(step_s := max(0.01, min(LOCK_REPORT_S, limit_s - waited_s))):
        owner = os.pread(handle, MAX_OWNER_BYTES, 0).decode(errors="replace") or "unknown"
        if owner.startswith((f"{os.getpid()} ", f"{os.getpid()},")):
            continue
        waited_s += step_s
        waits.append(step_s)
        waiting = f"another qdq run is timing; waiting (pid {owner})"
        if waited_s >= limit_s:
            raise UserError(
                f"{waiting}: longer than --wait {limit_s:g} (seconds); run the command again later, or with a larger "
                "--wait; finished measurements are saved"
            )
        if not reported:
            _logger.warning("%s; --wait SECONDS limits the wait", waiting)
            reported = True


def _timing_lock_name() -> str:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    devices = f"{cores} {os.environ.get('CUDA_VISIBLE_DEVICES', '')}"
    return f"stopwatch-{_digest(devices)}"


def _digest(text: str) -> str:
    return hashlib.sha256(f"{os.getuid()} {text}".encode()).hexdigest()[:12]
