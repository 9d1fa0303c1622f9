"""Worker process: a fresh interpreter that answers requests over a socket, and ends when the driver ends.

The driver is the process that started the worker. The worker imports one module (`harness.workers.sandbox` by
default), so unlike with multiprocessing it never runs the driver's `__main__`, and loads only the plug-ins it needs.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import psutil

from harness.measure.machine_noise import process_tree

EXIT_LIMIT_S = 5.0  # wait for the end of a process that closed its connection
_KILLING_SIGNALS = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM})  # a crash has others
POLL_INTERVAL_S = 0.25  # interval of the readings of a worker's memory
_BOOT_CODE = (
    "import faulthandler, gc; faulthandler.enable(); gc.set_threshold(50_000, 20, 20); "
    "from importlib import import_module; import_module(sys.argv[2]).serve(int(sys.argv[1]))"
)


def python_command(code: str, *arguments: str) -> list[str]:
    """Return the command of a child process of this interpreter, which finds the same modules as this process.

    The child has the import path of this process, and by the environment its trust in plug-ins. Option -P keeps the
    working folder out of the path from the start, because modules in it would replace those of Python.
    """
    entries = (os.path.abspath(entry) if not entry or os.path.exists(entry) else entry for entry in sys.path)
    path = json.dumps(list(entries))  # entries that do not exist may be marks of finders
    start = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    return [sys.executable, "-P", "-u", "-c", start + code, path, *arguments]


class WorkerProcess:
    """Worker process, for the driver that starts it and exchanges messages with it.

    Args:
        output: File for the standard output and error of the worker and its runtimes.
        first_handle: First handle of this worker; lower ones belong to earlier workers.
        body: Module whose function `serve(fd)` the worker runs with its end of the socket.

    Raises:
        OSError: No process can be started.
    """

    def __init__(self, output: IO[bytes], first_handle: int = 0, *, body: str = "harness.workers.sandbox") -> None:
        self.first_handle = first_handle
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._process = subprocess.Popen(
                python_command(_BOOT_CODE, str(theirs.fileno()), body),
                stdin=subprocess.PIPE,  # never written to: see `die_with_parent`
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
            self._connection: Connection[Any, Any] = Connection(ours.detach())

    def send(self, message: Any) -> None:
        """Send a message; a dead worker is reported by `receive`."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send(message)

    def receive(self, limit_s: float, memory_gb: float) -> Any:
        """Return the next message; 1 GB is 10^9 bytes.

        The limit is on the memory in use by the worker and its children, read while they work. The kernel's own limit
        (RLIMIT_AS) counts address space, of which CUDA and memory maps reserve far more than they use.

        Raises:
            TimeoutError: No message within the limit.
            MemoryError: The worker uses more memory than allowed.
            EOFError, OSError: The worker died.
        """
        deadline_s = time.monotonic() + limit_s
        while not self._connection.poll(max(0.0, min(POLL_INTERVAL_S, deadline_s - time.monotonic()))):
            if time.monotonic() >= deadline_s:
                raise TimeoutError
            if used_memory_gb(self._process.pid) > memory_gb:
                raise MemoryError
        return self._connection.recv()

    @property
    def alive(self) -> bool:
        """Return whether the process is running."""
        return self._process.poll() is None

    @property
    def was_killed(self) -> bool:
        """Return whether SIGHUP, SIGINT, SIGKILL or SIGTERM ended the worker; wait up to 5 s for its end."""
        with suppress(subprocess.TimeoutExpired):
            return -self._process.wait(timeout=EXIT_LIMIT_S) in _KILLING_SIGNALS
        return False

    def describe_exit(self) -> str:
        """Return how a worker that closed its connection ended, as a predicate: "exited with status 1"."""
        try:
            status = self._process.wait(timeout=EXIT_LIMIT_S)
        except subprocess.TimeoutExpired:
            return "hung up"
        if status >= 0:
            return f"exited with status {status}"
        if status == -signal.SIGKILL:
            return "was ended by SIGKILL (the kernel does so when memory runs out)"
        with suppress(ValueError):
            return f"was ended by {signal.Signals(-status).name}"
        return f"was ended by signal {-status}"

    def kill(self) -> None:
        """Kill the worker and all processes that it started, and wait for it."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()
        if self._process.stdin is not None:
            self._process.stdin.close()


def wait_for_output(process: subprocess.Popen[str], limit_s: float, memory_gb: float) -> tuple[str, str]:
    """Wait for the end of a process, and return what it printed on stdout and on stderr.

    Raises:
        TimeoutError: The process takes longer than `limit_s`.
        MemoryError: The process and its children use more than `memory_gb` (1 GB is 10^9 bytes).
    """
    deadline_s = time.monotonic() + limit_s
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=max(0.0, min(POLL_INTERVAL_S, deadline_s - time.monotonic())))
        if time.monotonic() >= deadline_s:
            raise TimeoutError
        if used_memory_gb(process.pid) > memory_gb:
            raise MemoryError


def used_memory_gb(pid: int) -> float:
    """Return the memory in use by a process and its descendants in GB (10^9 bytes); 0 for an ended process."""
    used = 0
    for each in process_tree(pid):
        with suppress(psutil.Error):
            used += psutil.Process(each).memory_info().rss
    return used / 1e9


def die_with_parent() -> None:
    """Let the kernel end this worker when the driver ends, and leave Ctrl-C to the driver.

    The kernel signals this worker and its children when the driver's end of stdin closes, so also after kill -9. A
    thread that waits for this would not run while a runtime hangs with the interpreter's lock, and Linux' parent-death
    signal would also be sent when only the *thread* that started the worker ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(0, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)
    with suppress(OSError):  # when memory runs out, the kernel should end the worker before the driver
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
