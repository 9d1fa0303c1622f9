"""Python programs in forks of a process that has imported their packages: ModelOpt and NNCF take seconds to import."""

from __future__ import annotations

import ast
import atexit
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from harness.accuracy.tools import ptq
from harness.accuracy.tools.ptq import TOOLS

__all__ = ["WARM_PYTHON", "WarmPython", "warm_python", "warm_tools"]

MODULES = {"modelopt": "modelopt.onnx.quantization", "nncf": "nncf"}
SERVER = """
import atexit, contextlib, importlib, json, os, runpy, socket, sys, tempfile
import harness.accuracy.tools.programs.ptq_child
from harness.workers.process import die_with_parent

def run(request, descriptors):
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv, tempfile.tempdir = request["command"], None
    sys.path.append(os.path.dirname(sys.argv[0]))
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
    return 0

die_with_parent()
listener = socket.socket(fileno=int(sys.argv[1]))
while True:
    connection, _ = listener.accept()
    text, descriptors, *_ = socket.recv_fds(connection, 1 << 20, 3)
    request = json.loads(text)
    with contextlib.suppress(ImportError):  # the program names the missing package
        importlib.import_module(request["module"])
    child = os.fork()
    if not child:
        connection.sendall(bytes([run(request, descriptors)]))
        os._exit(0)
    connection.close()
    for descriptor in descriptors:
        os.close(descriptor)
    os.waitpid(child, 0)
"""
CLIENT = """
import json, os, socket, sys
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(sys.argv[1])
request = {"module": sys.argv[2], "command": sys.argv[3:], "folder": os.getcwd(), "environment": dict(os.environ)}
socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
sys.exit((connection.recv(1) or b"\\1")[0])
"""


class WarmPython:
    """Process that imports packages once and runs programs in forks of itself."""

    @cached_property
    def _address(self) -> str:
        address = str(Path(tempfile.mkdtemp(prefix="warm-"), "socket"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(address)
            listener.listen()
            command = [sys.executable, "-Pc", SERVER, str(listener.fileno())]
            environment = os.environ | {"PYTHONHASHSEED": "0"}
            process = subprocess.Popen(command, env=environment, pass_fds=[listener.fileno()])
        atexit.register(process.wait)
        atexit.register(process.kill)
        return address

    def command(self, package: str, program: Path | str, *arguments: Path | str) -> list[str]:
        """Return the command that runs a program whose package is imported first."""
        module = MODULES.get(package, "onnxruntime.quantization")
        return [sys.executable, "-ISc", CLIENT, self._address, module, str(program), *map(str, arguments)]

    def evaluate(self, package: str, folder: Path, code: str, *arguments: Path | str) -> Any:
        """Run code and return the literal that it prints."""
        program = folder / "program.py"
        program.write_text(code)
        command = self.command(package, program, *arguments)
        return ast.literal_eval(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    def tool_command(self, tool: str, request: Path) -> list[str]:
        """Return the command of a PTQ tool, as `ptq._child_command` does."""
        program = TOOLS[tool].program if tool in TOOLS else ptq._PTQ_CHILD
        return self.command(tool.partition("_")[0], program, request)

    @contextmanager
    def tools(self) -> Iterator[None]:
        """Run PTQ tools in such forks."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ptq, "_child_command", self.tool_command)
            yield


WARM_PYTHON = WarmPython()


@pytest.fixture(scope="session")
def warm_python() -> WarmPython:
    """See `WarmPython`; the process starts with the first program, and serves all modules of tests."""
    return WARM_PYTHON


@pytest.fixture
def warm_tools(warm_python: WarmPython) -> Iterator[None]:
    """PTQ tools run in forks."""
    with warm_python.tools():
        yield
