"""Session of onnxruntime-web in a child process; `harness.shipping` copies the class into generated scripts."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["MAX_LOG_BYTES", "WebSession"]

MAX_LOG_BYTES = 1000


class WebSession:
    """Run onnxruntime-web in a child process, by requests to its program.

    Args:
        program: Text of `child.mjs`.
        node: Node.js, a path or a name on PATH.
        folder: Folder from which Node.js looks up the package.
        chromium: Browser that runs the session instead of Node.js, or None.
        profile: Empty folder for the browser's profile.

    Attributes:
        facts: `version` of the package, and `engine`, which runs it.
        inputs: Type and shape by name, of the model that `load` was given.

    Raises:
        OSError: Node.js cannot be started.
        RuntimeError: It finds no package, or no browser.
    """

    def __init__(
        self, program: str, *, node: str = "node", folder: str = ".", chromium: str | None = None, profile: str = ""
    ) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        command = [shutil.which(node) or node, "--input-type=module", "--eval", program]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log)
        try:
            self.facts = self.request("start", folder=folder, chromium=chromium, profile=profile, program=program)
        except RuntimeError:
            self.close()
            raise

    def request(self, operation: str, **values: Any) -> dict[str, Any]:
        """Send a request and return its reply; raise `RuntimeError` with the program's error, or if it ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"op": operation, **values}).encode() + b"\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            self.close()
            self._log.seek(0)
            text = self._log.read()[-MAX_LOG_BYTES:].decode(errors="replace").strip()
            raise RuntimeError(f"Node.js ended with status {self.process.returncode}: {text or 'it printed nothing'}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply

    def load(self, model: bytes, options: Mapping[str, Any]) -> None:
        """Create the session from an ONNX file's content."""
        found = self.request("load", model=base64.b64encode(model).decode(), options=dict(options))
        self.inputs = {value["name"]: (value["type"], value["shape"]) for value in found["inputs"]}

    def infer(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outputs by name of one inference; `latency_ms` is then its time in the child."""
        reply = self.request("infer", inputs=self.pack(feeds))
        self.latency_ms = float(reply["time"])
        return {
            name: np.array(np.frombuffer(base64.b64decode(value["data"]), value["type"])).reshape(value["dims"])
            for name, value in reply["outputs"].items()
        }

    @staticmethod
    def pack(feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Return arrays in the form of requests."""
        return {
            name: {
                "type": array.dtype.name,
                "dims": list(array.shape),
                "data": base64.b64encode(np.ascontiguousarray(array).tobytes()).decode(),
            }
            for name, array in feeds.items()
        }

    def __del__(self) -> None:
        if hasattr(self, "process"):
            self.close()

    def close(self) -> None:
        """End the child process, by force where it does not end by itself."""
        for stream in (self.process.stdin, self.process.stdout):
            try:
                if stream is not None:
                    stream.close()
            except OSError:
                pass
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
