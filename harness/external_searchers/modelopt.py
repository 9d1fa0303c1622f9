"""NVIDIA ModelOpt's ONNX autotuner as an external searcher: its workflow in a child process, with our benchmarker."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from harness.api import ExternalSearchTask
from harness.errors import BuildFailed, install_hint

_CHILD = Path(__file__).with_name("modelopt_child.py")
_BOOT = (
    "import runpy, sys; from harness.timing.workers.process import die_with_parent; die_with_parent(); "
    "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


class ModelOptAutotune:
    """Run NVIDIA ModelOpt's own ONNX autotuner, in its regions, points, mutations and Q/DQ form.

    `ask` returns every model that ModelOpt wants to time, its baseline and final model included; `tell` answers its
    benchmark. No part of its search is reimplemented. All its Q/DQ pairs have the scale 0.1 (user guide "Autotune
    (ONNX)"), so its models have a latency but no accuracy.

    Args:
        task: See `ExternalSearchTask`.
        schemes_per_region: Schemes that it tries for each pattern, its flag of this name. Its workflow's default, 30,
            is that of its mode "quick"; 50 is its command's default.
        qdq_baseline: Its flag of this name: the Q/DQ model whose placement it starts from ("modelopt_ptq", or a file);
            None: the cold start.
        limit_s: Longest time that it may take from one model to the next.
    """

    def __init__(
        self,
        task: ExternalSearchTask,
        *,
        schemes_per_region: int = 30,
        qdq_baseline: str | None = None,
        limit_s: float = 900.0,
    ) -> None:
        if schemes_per_region < 1:
            raise ValueError(f"schemes_per_region is at least 1, but got {schemes_per_region}")
        if limit_s <= 0:
            raise ValueError(f"limit_s is above 0, but got {limit_s}")
        if find_spec("modelopt") is None:
            raise ValueError(f"modelopt is not installed: {install_hint('modelopt')}")
        self._task = task
        self._schemes = schemes_per_region
        self._baseline = None if qdq_baseline is None else task.find(qdq_baseline)
        self._limit_s = limit_s

    def __enter__(self) -> Self:
        folder = self._task.workdir
        shutil.rmtree(folder, ignore_errors=True)  # ModelOpt would resume from the state of an earlier search
        folder.mkdir(parents=True)
        (folder / "request.json").write_text(json.dumps(self._request()), encoding="utf-8")
        ours, theirs = socket.socketpair()
        self._log = folder / "autotune.log"
        with theirs, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, str(_CHILD), "request.json", str(theirs.fileno())],
                cwd=folder, env=os.environ | {"PYTHONHASHSEED": "0", "TMPDIR": str(folder)},
                stdin=subprocess.PIPE,  # never written to: see `die_with_parent`
                stdout=log, stderr=subprocess.STDOUT, pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        ours.settimeout(self._limit_s)
        with ours:  # the file keeps it open
            self._connection = ours.makefile("rw", encoding="utf-8", newline="\n")
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with suppress(OSError):
            self._connection.close()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def ask(self) -> Path | None:
        """Return the next model that ModelOpt wants to time, or None once its workflow has ended.

        Raises:
            BuildFailed: It failed, with its own message, or took too long.
        """
        try:
            line = self._connection.readline()
        except TimeoutError as error:
            raise BuildFailed(f"modelopt: no model within {self._limit_s:g} s") from error
        except OSError:
            line = ""
        message: dict[str, Any] = json.loads(line) if line else {"failed": self._stderr_tail()}
        if "failed" in message:
            raise BuildFailed(f"modelopt: {message['failed']}")
        return None if message.get("through") else self._task.workdir / message["model"]

    def tell(self, latency_ms: float | None) -> None:
        """Answer ModelOpt's benchmark; a failure is reported as its infinity."""
        with suppress(OSError):  # a child that is gone shows in `ask`
            self._connection.write(json.dumps({"latency_ms": latency_ms}) + "\n")
            self._connection.flush()

    def _request(self) -> dict[str, Any]:
        return {
            "model": str(self._task.model.resolve()),
            "precision": self._task.precision,
            "seed": self._task.seed,
            "schemes_per_region": self._schemes,
            "qdq_baseline": None if self._baseline is None else str(self._baseline.resolve()),
        }

    def _stderr_tail(self) -> str:
        status = self._process.wait()
        said = self._log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2][:500]
        return f"ended with status {status}; its last output: {said or 'none'}"
