"""Policies for builds and timings that share one machine: which of them may overlap."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.api import Candidate
from harness.errors import UserError
from harness.records import MAIN_BENCHMARKER, Failed
from harness.timing.workers.engines import BuiltEngine, Engines, ScoringCallback

__all__ = ["ExclusiveTiming", "PolicedEngines", "SerialTiming", "TimingPolicy", "device_lock", "timing_lock"]


class TimingPolicy:
    """Policy without restrictions, for workers that have a machine, or at least a device, each."""

    def building(self) -> AbstractContextManager[None]:
        """Return a context for work that uses a processor and is not timed: builds, evaluators, the searcher itself."""
        return nullcontext()

    def timing(self) -> AbstractContextManager[None]:
        """Return a context for a timing."""
        return nullcontext()


class SerialTiming(TimingPolicy):
    """Policy with one timing at a time, which builds may overlap."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def timing(self) -> Iterator[None]:
        with self._lock:
            yield


class ExclusiveTiming(TimingPolicy):
    """Policy with either several builds or a single timing; a waiting timing goes first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._building = 0
        self._waiting = 0
        self._timing = False

    @contextmanager
    def building(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._timing and not self._waiting)
            self._building += 1
        try:
            yield
        finally:
            with self._changed:
                self._building -= 1
                self._changed.notify_all()

    @contextmanager
    def timing(self) -> Iterator[None]:
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: not self._timing and not self._building)
            self._waiting -= 1
            self._timing = True
        try:
            yield
        finally:
            with self._changed:
                self._timing = False
                self._changed.notify_all()


class PolicedEngines(Engines):
    """Engines of one worker under a timing policy.

    Args:
        engines: The worker's engines.
        policy: Policy of the machine.
        write_lock: Held while a candidate's file is written, which is not thread-safe.
    """

    def __init__(self, engines: Engines, policy: TimingPolicy, write_lock: threading.Lock) -> None:
        self._engines = engines
        self._policy = policy
        self._write_lock = write_lock

    def _call(self, method: str, *args: Any, on_progress: ScoringCallback | None = None) -> Any:
        if method == "release":
            return self._engines.release(*args)
        extra = () if on_progress is None else (on_progress,)
        with self._policy.timing() if method == "sample" else self._policy.building():
            return getattr(self._engines, method)(*args, *extra)

    def describe(self, benchmarker: str = MAIN_BENCHMARKER) -> Mapping[str, Any]:
        return self._engines.describe(benchmarker)

    def build(self, candidate: Candidate, benchmarker: str = MAIN_BENCHMARKER) -> BuiltEngine | Failed:
        """Write the candidate's file under the lock and build its engine."""

        def source() -> Path:
            with self._write_lock:
                return candidate.source()

        return super().build(replace(candidate, source=source), benchmarker)


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
