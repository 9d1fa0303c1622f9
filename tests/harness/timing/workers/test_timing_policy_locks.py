from __future__ import annotations

import select
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.errors import UserError
from harness.timing.workers.timing_policy import device_lock, timing_lock

HOLD = """
import sys
from pathlib import Path
from harness.timing.workers.timing_policy import timing_lock
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


def test_a_second_process_waits_until_the_first_has_finished(tmp_path: Path) -> None:
    with timing_lock(tmp_path):
        second = hold(tmp_path)
        assert second.stdout is not None
        assert not select.select([second.stdout], [], [], 1.0)[0], "it waits"
    assert line(second) == "holding"
    second.communicate("end\n", timeout=20)


def test_a_gpu_is_held_by_one_process_at_a_time(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        with device_lock({"GPU-a", "GPU-b"}, tmp_path), device_lock({"GPU-c"}, tmp_path), device_lock((), tmp_path):
            entered = pool.submit(lambda: device_lock({"GPU-b"}, tmp_path).__enter__())
            with pytest.raises(TimeoutError):
                entered.result(timeout=0.5)
        entered.result(timeout=20)


def test_a_killed_process_releases_the_lock(tmp_path: Path) -> None:
    first = hold(tmp_path)
    assert line(first) == "holding"
    first.send_signal(signal.SIGKILL)
    first.wait(timeout=20)
    with timing_lock(tmp_path):
        pass


def test_a_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    with timing_lock(tmp_path):
        lock = next(tmp_path.iterdir())
    lock.unlink()
    lock.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="TMPDIR"), timing_lock(tmp_path):
        pass
    assert not (tmp_path / "elsewhere").exists()
