"""Results folder for tests of reports, and a browser for the pages."""

import json
import os
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest
from small_results import TASK, write_folder, write_models


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path)


@pytest.fixture
def with_models(folder):
    write_models(folder / TASK / "models")
    return folder


PLOTLY = files("harness.report").joinpath("assets", "plotly-basic.min.js").read_text(encoding="utf-8")


@pytest.fixture
def outside_addresses():
    """What a page would load from elsewhere; Plotly's own text names the address of its logo, which is not shown."""

    def found(page: str) -> list[str]:
        assert PLOTLY in page
        return re.findall(r"(?:src|href)=[\"']?(?:https?:|//)[^\"' >]*", page.replace(PLOTLY, ""))

    return found


class Browser:
    """Chromium on a pipe: the DevTools protocol without a web socket."""

    def __init__(self, program: str, profile: Path) -> None:
        read_end, self._write = os.pipe()
        self._read, write_end = os.pipe()

        def connect() -> None:
            os.dup2(read_end, 13)
            os.dup2(write_end, 14)
            os.dup2(13, 3)
            os.dup2(14, 4)

        command = [
            program, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run",
            f"--user-data-dir={profile}", "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, preexec_fn=connect, close_fds=False, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        os.close(read_end)
        os.close(write_end)
        self._rest, self._number, self.errors = b"", 0, []
        target = next(t for t in self._call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self.call(f"{domain}.enable")

    def open(self, page: Path, width: int = 1200, height: int = 900, *, all_drawn: bool = True) -> None:
        """Load a file and wait until its scripts have run; `all_drawn`: and have drawn what is out of view, too."""
        self.errors.clear()
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=page.as_uri())
        while self.run("document.readyState + location.href") != f"complete{page.as_uri()}":
            pass
        if all_drawn and self.run("typeof draw") == "function":
            hosts = "[...document.querySelectorAll('[data-charts], [data-graph]')]"
            self.run(f"Promise.all({hosts}.map(draw)).then(() => true)")

    def run(self, script: str):
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def call(self, method: str, **params):
        return self._call(method, self._session, **params)

    def _call(self, method: str, session: str | None = None, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _note(self, event) -> None:
        name, facts = event.get("method"), event.get("params", {})
        bad = name == "Runtime.exceptionThrown" or (name == "Log.entryAdded" and facts["entry"]["level"] == "error")
        if bad or (name == "Runtime.consoleAPICalled" and facts["type"] in ("error", "warning")):
            self.errors.append(facts)

    def _next(self):
        while b"\0" not in self._rest:
            got = os.read(self._read, 65536)
            assert got, "the browser has gone"
            self._rest += got
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def close(self) -> None:
        os.close(self._write)
        self._process.terminate()
        self._process.wait(10)
        os.close(self._read)


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium here")
    opened = Browser(program, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()
