"""Calls in the helper process: results, failures, and threads of the driver."""

import importlib
import logging
import os
import posix
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from harness.base.errors import UserError
from harness.graph.builder import GraphBuilder
from harness.graph.load import load
from harness.graph.passes.dimension_sizes import parse_shape
from harness.workers.helper_process import call_in_helper_process, call_with_reports


def test_results_and_exceptions_are_returned():
    assert call_in_helper_process("m.onnx", divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        call_in_helper_process("m.onnx", divmod, 1, 0)
    with pytest.raises(UserError, match=r"shapes\.x: a shape looks like"):
        call_in_helper_process("m.onnx", parse_shape, "big", "shapes.x")


def test_call_beyond_the_memory_limit_is_refused(monkeypatch):
    monkeypatch.setenv("QDQ_MODEL_MEMORY_GB", "0.5")
    with pytest.raises(UserError, match=r"^m\.onnx: the check takes more than 0\.5 GB .*QDQ_MODEL_MEMORY_GB sets"):
        call_in_helper_process("m.onnx: the check", fill_memory)


def fill_memory() -> None:
    filled = []
    while True:
        filled.append(b"x" * 10_000_000)
        time.sleep(0.01)


def warn_and_report(report: Callable[[int], None]) -> str:
    logging.getLogger("harness.some").warning("about %s", "it")
    report(7)
    return str(Path.cwd())


def test_helper_shares_logs_reports_and_environment(caplog, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parent)
    reports: list[int] = []
    assert call_with_reports("it", warn_and_report, factor=1.0, on_report=reports.append) == str(tmp_path)
    assert (reports, caplog.messages) == ([7], ["about it"])


def test_a_call_of_a_module_on_a_new_path_works_after_the_old_working_folder_was_removed(tmp_path, monkeypatch):
    (old := tmp_path / "old").mkdir()
    (new := tmp_path / "new").mkdir()
    (new / "later_plugin.py").write_text("from pathlib import Path\n\ndef where():\n    return Path.cwd().name\n")
    monkeypatch.chdir(old)
    assert call_in_helper_process("m.onnx", divmod, 7, 2) == (3, 1)
    monkeypatch.chdir(new)
    old.rmdir()
    monkeypatch.syspath_prepend(new)
    assert call_in_helper_process("m.onnx", importlib.import_module("later_plugin").where) == "new"


def test_calls_share_one_helper_process():
    assert len({os.getpid(), *(call_in_helper_process("m.onnx", os.getpid) for _ in range(3))}) == 2


def test_a_call_that_does_not_return_is_ended(monkeypatch):
    call_in_helper_process("m.onnx", abs, -1)
    monkeypatch.setenv("QDQ_MODEL_LIMIT_S", "0.2")
    with pytest.raises(UserError, match=r"^m\.onnx: shape inference takes more than 0\.2 s .*QDQ_MODEL_LIMIT_S=0\.4 "):
        call_in_helper_process("m.onnx: shape inference", signal.pause)
    monkeypatch.setenv("QDQ_MODEL_LIMIT_S", "none")
    with pytest.raises(UserError, match="QDQ_MODEL_LIMIT_S=none: a number"):
        call_in_helper_process("m.onnx: shape inference", signal.pause)
    monkeypatch.undo()
    assert call_in_helper_process("m.onnx", abs, -2) == 2, "the next call starts another process"


@pytest.mark.parametrize(
    ("crash", "arguments", "how"),
    [
        (os.abort, (), "was ended by SIGABRT"),
        (posix._exit, (3,), "exited with status 3"),  # coverage replaces that of os by one that cannot be pickled
    ],
)
def test_crash_gives_one_message_and_a_new_process(crash, arguments, how):
    before = call_in_helper_process("m.onnx", os.getpid)
    with pytest.raises(UserError, match=rf"^m\.onnx: the upgrade {how}; .* damaged"):
        call_in_helper_process("m.onnx: the upgrade", crash, *arguments)  # type: ignore[arg-type, misc]
    assert call_in_helper_process("m.onnx", os.getpid) not in (before, os.getpid())


def test_a_process_that_ended_between_calls_is_replaced():
    process = call_in_helper_process("m.onnx", os.getpid)
    os.kill(process, signal.SIGKILL)
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    assert call_in_helper_process("m.onnx", abs, -1) == 1


def test_forked_driver_gets_its_own_helper():
    ours = call_in_helper_process("m.onnx", os.getpid)
    child = os.fork()
    if not child:
        code = 1
        with suppress(BaseException):
            code = 0 if call_in_helper_process("m.onnx", os.getpid) not in (ours, os.getpid()) else 2
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert call_in_helper_process("m.onnx", os.getpid) == ours


DRIVER = """
import os, signal
import harness.workers.helper_process as helper_process
from harness.workers.helper_process import call_in_helper_process
print(call_in_helper_process("m.onnx", os.getpid), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_helper_ends_with_the_driver():
    done = subprocess.run([sys.executable, "-c", DRIVER], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    deadline_s = time.monotonic() + 30
    while psutil.pid_exists(int(done.stdout)) and psutil.Process(int(done.stdout)).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s, "it is still running"
        time.sleep(0.02)


THREADS = """
import importlib, logging, sys, threading
from pathlib import Path

import numpy as np

import harness.workers.helper_process as helper_process
from harness.workers.helper_process import call_in_helper_process, call_with_reports
from harness.graph.load import load

def multiply():
    square = np.ones((600, 600))  # large enough for several threads of OpenBLAS
    while True:
        square @ square

def allocate():
    while True:
        [bytes(size) for size in range(0, 300_000, 1000)]

def log():
    logging.basicConfig(stream=open("/dev/null", "w"), level=logging.DEBUG)
    while True:
        logging.getLogger("busy").info("%s", "x" * 100)

def load_module():
    while True:
        sys.modules.pop("this_and_that", None)
        importlib.import_module("this_and_that")

sys.setswitchinterval(1e-4)
for work in (multiply, allocate, log, load_module) * 2:
    threading.Thread(target=work, daemon=True).start()
assert [call_in_helper_process("m.onnx", abs, -number) for number in range(50)] == list(range(50))
print(len(load(Path(sys.argv[1])).nodes))
sys.stdout.flush()
__import__("os")._exit(0)
"""


def test_a_model_is_read_without_a_fork(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("the driver forked"))
    builder = GraphBuilder("net", seed=1)
    half = builder.op("Sqrt", builder.const([0.25]))  # folded by ONNX Runtime
    builder.output(builder.op("Mul", builder.input("x", (1, 8)), half))
    assert [node.op for node in load(builder.save(tmp_path / "net.onnx")).nodes] == ["Mul"]


def test_busy_threads_do_not_block_the_helper(tmp_path):
    """They would block a fork: before one, OpenBLAS waits for its threads to end, which working ones never do."""
    builder = GraphBuilder("net", seed=1)
    builder.output(builder.op("Relu", builder.conv(builder.input("x", (1, 3, 8, 8)), 4, 3)))
    builder.save(tmp_path / "net.onnx")
    (tmp_path / "this_and_that.py").write_text("import json\nVALUES = json.loads('[1, 2]')\n")
    command = [sys.executable, "-c", THREADS, str(tmp_path / "net.onnx")]
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
