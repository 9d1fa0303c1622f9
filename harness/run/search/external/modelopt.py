"""NVIDIA ModelOpt's ONNX autotuner as an external searcher: its workflow in a child process, with our benchmarker."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from harness.base.errors import BuildFailed, install_hint
from harness.plugins.api import ExternalSearchTask
from harness.workers.process import python_command

_CHILD = Path(__file__).with_name("modelopt_child.py")
_BOOT = (
    "import runpy; from harness.workers.process import die_with_parent; die_with_parent(); "
    "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


class ModelOptAutotune:
    """Run NVIDIA ModelOpt's own ONNX autotuner, in its regions, points, mutations and Q/DQ form.

    `ask` returns each model that ModelOpt times, including its baseline and final model; `tell` returns the latency to
    ModelOpt. No part of its search is reimplemented. All its Q/DQ pairs have the scale 0.1 (user guide "Autotune
    (ONNX)"), so its models have a latency but no useful accuracy.

    Args:
        task: See `ExternalSearchTask`.
        schemes_per_region: Number of schemes for each pattern, ModelOpt's flag of this name. The default is that of
            its workflow and of mode "quick"; the default of its command is 50.
        qdq_baseline: Q/DQ model that the search starts from ("modelopt_ptq", or a file), ModelOpt's flag of this name;
            None: the cold start.
        limit_s: Time limit in seconds from one model to the next.

    Raises:
        ValueError: A number is too small, or ModelOpt is not installed.
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
        connection, child_end = socket.socketpair()
        self._log = folder / "autotune.log"
        with child_end, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                python_command(_BOOT, str(_CHILD), "request.json", str(child_end.fileno())),
                cwd=folder, env=os.environ | {"PYTHONHASHSEED": "0", "TMPDIR": str(folder)},
                stdin=subprocess.PIPE,  # never written to: see `die_with_parent`
                stdout=log, stderr=subprocess.STDOUT, pass_fds=[child_end.fileno()], start_new_session=True,
            )  # fmt: skip
        connection.settimeout(self._limit_s)
        with connection:  # the file keeps it open
            self._connection = connection.makefile("rw", encoding="utf-8", newline="\n")
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
        """Return the next model to time, or None once ModelOpt's workflow has ended.

        Raises:
            BuildFailed: ModelOpt failed (the message is its own) or exceeded `limit_s`.
        """
        try:
            line = self._connection.readline()
        except TimeoutError as error:
            raise BuildFailed(f"modelopt: no model within {self._limit_s:g} s") from error
        except OSError:
            line = ""
        message: dict[str, Any] = json.loads(line) if line else {}
        if not line:
            status = self._process.wait()
            last_line = self._log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2][:500]
            message["failed"] = f"ended with status {status}; its last output: {last_line or 'none'}"
        if "failed" in message:
            raise BuildFailed(f"modelopt: {message['failed']}")
        return None if message.get("through") else self._task.workdir / message["model"]

    def tell(self, latency_ms: float | None) -> None:
        """Send the latency of the last model to ModelOpt; None (a failure) becomes infinity there."""
        with suppress(OSError):  # `ask` reports a child process that has ended
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
