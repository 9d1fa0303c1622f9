"""Session of onnxruntime-web in a child process; `harness.ship` copies the class into generated scripts."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


class WebSession:
    """Session of onnxruntime-web in a child process, which executes requests.

    Args:
        program: Text of `child.mjs`.
        node: Path of Node.js, or its name on PATH.
        folder: Folder from which Node.js looks up the package; None: the one that the environment variable
            QDQ_ONNXRUNTIME_WEB names. The working folder is not used, because it may be untrusted; NODE_PATH always is.
        chromium: Browser that runs the session instead of Node.js, or None.
        scratch: Folder for the browser's profile; None: the system's folder for temporary files.

    Attributes:
        facts: `version` of the package, and `engine`, the program that runs it.
        inputs: Type and shape of the inputs of the loaded model by name.
        latency_ms: Time in ms of the last inference by a call of this object, by the clock of the child process.
        pid: Id of the process that runs the session; 0 for a browser, whose id is unknown.

    Raises:
        OSError: Node.js cannot be started.
        RuntimeError: Node.js does not find the package or the browser; also in methods, if the program reports an error
            or has ended.
    """

    def __init__(
        self,
        program: str,
        *,
        node: str = "node",
        folder: str | None = None,
        chromium: str | None = None,
        scratch: Path | None = None,
    ) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        command = [shutil.which(node) or node, "--input-type=module", "--eval", program]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log)
        self.pid = 0 if chromium else self._process.pid
        self._profile = tempfile.TemporaryDirectory(dir=scratch, ignore_cleanup_errors=True)
        place = str(Path(folder or os.environ.get("QDQ_ONNXRUNTIME_WEB") or "/").resolve())
        try:
            self.facts = self.request(
                "start", folder=place, chromium=chromium, profile=self._profile.name, program=program
            )
        except RuntimeError:
            self.close()
            raise

    def request(self, operation: str, **values: Any) -> dict[str, Any]:
        """Send a request and return its reply; raise `RuntimeError` if the program reports an error or has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = b""
        try:
            self._process.stdin.write(json.dumps({"op": operation, **values}).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except (OSError, ValueError):  # the process ended, or was closed
            pass
        if not line.endswith(b"\n"):
            self.close()
            self._log.seek(0)
            text = self._log.read()[-1000:].decode(errors="replace").strip()
            raise RuntimeError(f"Node.js ended with status {self._process.returncode}: {text or 'it printed nothing'}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply

    def load(self, model: bytes, options: Mapping[str, Any]) -> None:
        """Create the session from an ONNX file's content and onnxruntime-web's session options, and set `inputs`."""
        found = self.request("load", model=base64.b64encode(model).decode(), options=dict(options))
        self.inputs = {value["name"]: (value["type"], value["shape"]) for value in found["inputs"]}

    def warm_up(self, feeds: Mapping[str, Any]) -> None:
        """Set the inputs of `sample`, and run them until the latency no longer falls by 5 %, but at most 60 times."""
        self.request("bind", inputs=self.pack(feeds))
        last_ms, fastest_ms, blocks = float("inf"), min(self.sample(3)), 1
        while fastest_ms < 0.95 * last_ms and blocks < 20:
            last_ms, fastest_ms, blocks = fastest_ms, min(self.sample(3)), blocks + 1

    def sample(self, n: int) -> list[float]:
        """Return the latency in ms of n inferences on the inputs of `warm_up`, by the clock of the child process."""
        times: list[float] = self.request("sample", n=n)["times"]
        return times

    def __call__(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outputs by name of one inference on arrays by name."""
        reply = self.request("infer", inputs=self.pack(feeds))
        self.latency_ms = float(reply["time"])
        return {
            name: np.array(np.frombuffer(base64.b64decode(value["data"]), value["type"])).reshape(value["dims"])
            for name, value in reply["outputs"].items()
        }

    @staticmethod
    def pack(feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Return arrays by name as JSON values for a request: type, shape and base64 of the bytes."""
        return {
            name: {"type": array.dtype.name, "dims": array.shape, "data": base64.b64encode(array.tobytes()).decode()}
            for name, array in feeds.items()
        }

    def __del__(self) -> None:
        if hasattr(self, "_process"):
            self.close()

    def close(self) -> None:
        """End the child process; kill it if it does not end within 5 seconds."""
        for stream in (self._process.stdin, self._process.stdout):
            try:
                if stream is not None:
                    stream.close()
            except OSError:
                pass
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
