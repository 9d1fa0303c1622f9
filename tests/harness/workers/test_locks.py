from __future__ import annotations

import getpass
import logging
import select
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.base.errors import UserError
from harness.base.paths import WAIT_VARIABLE
from harness.workers import locks
from harness.workers.locks import device_lock, timing_lock

HOLD = """
import sys
from pathlib import Path
from harness.workers.locks import timing_lock
with timing_lock(Path(sys.argv[1])):
    print("holding", flush=True)
    sys.stdin.readline()
print("done", flush=True)
"""


def hold(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD, str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_second_process_waits_until_the_first_has_finished(tmp_path):
    with timing_lock(tmp_path):
        second = hold(tmp_path)
        assert second.stdout is not None
        assert not select.select([second.stdout], [], [], 1.0)[0], "it waits"
    assert line(second) == "holding"
    second.communicate("end\n", timeout=20)


def test_a_gpu_is_held_by_one_process_at_a_time(tmp_path):
    with ThreadPoolExecutor(1) as pool:
        with device_lock({"GPU-a", "GPU-b"}, tmp_path), device_lock({"GPU-c"}, tmp_path), device_lock((), tmp_path):
            entered = pool.submit(lambda: device_lock({"GPU-b"}, tmp_path).__enter__())
            with pytest.raises(TimeoutError):
                entered.result(timeout=0.5)
        entered.result(timeout=20)


def test_a_killed_process_releases_the_lock(tmp_path):
    first = hold(tmp_path)
    assert line(first) == "holding"
    first.send_signal(signal.SIGKILL)
    first.wait(timeout=20)
    with timing_lock(tmp_path):
        pass


def test_a_lock_that_is_a_link_is_refused(tmp_path):
    with timing_lock(tmp_path):
        lock = next(tmp_path.iterdir())
    lock.unlink()
    lock.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="TMPDIR"), timing_lock(tmp_path):
        pass
    assert not (tmp_path / "elsewhere").exists()


@pytest.fixture
def held(tmp_path):
    """A process that holds the lock of `tmp_path`."""
    process = hold(tmp_path)
    assert line(process) == "holding"
    yield process
    process.kill()
    process.communicate()


def test_a_long_wait_is_reported_with_the_owner(tmp_path, held, monkeypatch, caplog):
    monkeypatch.setattr(locks, "LOCK_REPORT_S", 0.05)
    waits: list[float] = []
    with ThreadPoolExecutor(1) as pool, caplog.at_level(logging.WARNING):
        entered = pool.submit(timing_lock(tmp_path, waits).__enter__)
        while not caplog.messages:
            assert not entered.done()
        held.communicate("end\n", timeout=20)
        entered.result(timeout=20)
    assert sum(waits) >= 0.05
    owner = f"pid {held.pid} of {getpass.getuser()} on {socket.gethostname()}, since 2"
    assert [owner in message for message in caplog.messages] == [True]


def test_wait_limit_raises_and_frees_lock(tmp_path, held, monkeypatch):
    monkeypatch.setenv(WAIT_VARIABLE, "0.1")
    with pytest.raises(UserError, match=rf"pid {held.pid} .*longer than --wait 0\.1"), timing_lock(tmp_path):
        pass
    held.communicate("end\n", timeout=20)
    monkeypatch.setenv(WAIT_VARIABLE, "20")  # the thread of the first wait may have the lock for a moment
    with timing_lock(tmp_path):
        pass


def test_threads_of_one_process_wait_for_each_other_without_limit(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(locks, "LOCK_REPORT_S", 0.02)
    monkeypatch.setenv(WAIT_VARIABLE, "0.05")
    with ThreadPoolExecutor(1) as pool:
        with timing_lock(tmp_path):
            entered = pool.submit(timing_lock(tmp_path).__enter__)
            with pytest.raises(TimeoutError):
                entered.result(timeout=0.5)
        entered.result(timeout=20)
    assert not caplog.messages


@pytest.mark.parametrize("limit", ["soon", "-1", "nan"])
def test_a_limit_that_is_no_time_is_refused(tmp_path, held, monkeypatch, limit):
    monkeypatch.setenv(WAIT_VARIABLE, limit)
    with pytest.raises(UserError, match=WAIT_VARIABLE), timing_lock(tmp_path):
        pass
