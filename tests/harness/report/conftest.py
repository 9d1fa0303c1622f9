"""A small results folder, written by the harness's own encoders and never timed; and a browser for the pages."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path

import pytest

from harness.config.experiment import parse_experiment, to_yaml
from harness.graph.builder import GraphBuilder
from harness.graph.io.files import write_model
from harness.graph.load import load_proto
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import OPENVINO
from harness.records import Failed, Measured, Proposal, TrialResult
from harness.results_dir.artifacts import Choice, ExportedModel
from harness.results_dir.io import write_json
from harness.results_dir.journal import Journal
from harness.search_loop.loop import Goal
from harness.timing.turn_log import TWIN, RowFailure, Turn, encode_turn_event

EXPERIMENT = """
experiment: small
models: [{use: net.onnx, label: net}, {use: other.onnx, label: other}]
backends: [{use: openvino, params: {precision: f32, threads: 2}}]
searchers: [random, tpe]
initial: [float, all]
baselines: [all, linear]
budget: {evaluations: [2, 3]}
seeds: [0, 1]
confirmation: {builds: 3, rounds: 2, samples: 3, top_k: 2}
"""
CELL = "net-openvino-int8"
FACTS = {
    "schema": 1,
    "cell": CELL,
    "model": "net",
    "calibrated_on": "8 samples",
    "precision": "int8",
    "metric": "top1",
    "higher_is_better": True,
    "backend": {
        "name": "openvino", "device": "A CPU", "options": {"threads": 2}, "float_precision": "f32",
        "float_open": False, "float_params": {"f32": {}, "bf16": {}},
    },
    "goal": asdict(Goal(metric="top1", reference=0.8, max_drop=0.02)),
}  # fmt: skip
LATENCY_MS = {TWIN: 8.0, "float": 8.0, "float-bf16": 10.0, "all": 2.0, "aa": 4.0, "bb": 5.0}
SCORES = {"float": 0.8, "float-bf16": 0.8, "all": 0.7, "aa": 0.79, "bb": 0.8}


def write_cell(folder: Path, cell_name: str = CELL, **changes) -> Path:
    """A finished cell: two seeds of random, a tpe that found nothing, and a baseline that does not build."""
    cell = folder / cell_name
    (cell / "runs").mkdir(parents=True)
    write_json(cell / "cell.json", {**FACTS, "cell": cell_name, **changes})
    scores = {f"sha of {row} main": {"metrics": {"top1": v}, "per_item": []} for row, v in SCORES.items()}
    write_json(cell / "accuracy.json", scores)
    for seed in (0, 1):
        write_journal(cell / "runs" / f"random-{seed}.jsonl")
    placed = {"aa": (1, 1), "bb": (1, 0)}
    ids = {"float": 0, "float-bf16": 0, "all": 9, "linear": 4, "aa": 5, "bb": 3}
    rows = [
        ExportedModel(
            id=name,
            file=f"{name.removesuffix('-bf16')}.onnx",
            sha256=f"sha of {name}",
            pairs=pairs,
            choices=placed.get(name),
        )
        for name, pairs in ids.items()
    ]
    write_json(cell / "rows.json", {"rows": [asdict(r) for r in rows], "picks": [asdict(p) for p in picks()]})
    write_confirmation(cell, LATENCY_MS)
    return cell


def write_confirmation(cell: Path, latency_ms: dict[str, float], paces=(1.0, 1.0, 1.0), disturbed: str = "") -> None:
    events = [
        Turn(build=build, group=0, round=turn, row=row, samples_ms=(ms * pace,) * 3, disturbed=disturbed)
        for build, pace in enumerate(paces)
        for turn in range(2)
        for row, ms in latency_ms.items()
    ]
    lost = Failed(stage="build", reason="unsupported operator", wall_s=1.0)
    events += [RowFailure(build=build, group=0, row="linear", failed=lost) for build in range(3)]
    header = json.dumps({"kind": "header", "plan": {"builds": 3, "rounds": 2}})
    (cell / "confirm.jsonl").write_text("".join(f"{line}\n" for line in (header, *map(encode_turn_event, events))))


def picks() -> list[Choice]:
    found = {"method": "random", "kind": "search", "minutes": 0.5}
    return [
        Choice(method="float", kind="float", row="float"),
        Choice(method="float", kind="float", row="float-bf16"),
        Choice(method="all", kind="baseline", row="all"),
        Choice(method="linear", kind="baseline", row="linear"),
        Choice(method="ort_static", kind="baseline", row="", reason="it said\nthat " + "this will never work " * 9),
        Choice(**found, row="bb", seed=0, budget=2, search_ms=5.0),
        Choice(**found, row="aa", seed=0, budget=3, search_ms=4.0),
        Choice(**found, row="bb", seed=0, budget=3, search_ms=5.0, rank=1),
        Choice(**found, row="bb", seed=1, budget=2, search_ms=5.0),
        Choice(**found, row="bb", seed=1, budget=3, search_ms=5.0),
        Choice(method="tpe", kind="search", row="", seed=0, budget=3, reason="nothing measured"),
    ]


def write_journal(path: Path) -> None:
    good = {"build_s": 4.0, "measure_s": 4.0, "evaluate_s": 1.5}
    outcomes = (
        Measured(samples_ms=(8.0,) * 7, metrics={"top1": 0.8}, **good),
        Measured(samples_ms=(4.0,) * 7, metrics={"top1": 0.79}, **good),
        Failed(stage="build", reason="no", wall_s=9.5),
    )
    with Journal(path, {}) as journal:
        for number, outcome in enumerate(outcomes):
            journal.append(Proposal(number=number, choices=(number,), digest=str(number), origin="searcher"))
            journal.append(TrialResult(number=number, outcome=outcome, elapsed_s=10.0 * (number + 1)))


def write_models(models: Path) -> None:
    """Exported models for the rows that have Q/DQ pairs: everything, and the linear operators alone."""
    g = GraphBuilder("net")
    x = g.op("Relu", g.conv(g.input("x", (1, 3, 8, 8)), 4, 3))
    y = g.op("Add", g.conv(x, 4, 3), x)
    g.output(g.op("GlobalAveragePool", y, name="</script><script>document.title='owned'</script>"))
    model = load_proto(g.build(), source="net", sha256="0")
    write_model(model.proto, models / "float.onnx")
    space = build_space(model, OPENVINO)
    ranges = {edge.tensor: (-1.0, 1.0) for d in space.dimensions for edge in d.edges}
    inserter = Inserter(model, OPENVINO, ranges)
    for name, placement in (
        ("all", space.quantize_all()),
        ("aa", space.quantize_roles({"linear"})),
        ("bb", space.quantize_roles({"add"})),
    ):
        inserter.export(space.resolve(placement), models / f"{name}.onnx")


@pytest.fixture
def cell_maker():
    """Writes another finished cell into a folder."""
    return write_cell


@pytest.fixture
def confirmation_maker():
    """Replaces a cell's confirmation by one with these latencies."""
    return write_confirmation


@pytest.fixture
def choices_maker(tmp_path):
    """Writes a cell whose searchers chose these rows, one a seed: by searcher and budget."""

    def written(cell_name, fixed, choices, latency_ms, **changes) -> Path:
        cell = write_cell(tmp_path, cell_name, **changes)
        shutil.rmtree(cell / "runs")
        chosen = [Choice(method="float", kind="float", row="float")]
        chosen += [Choice(method=name, kind="baseline", row=row) for name, row in fixed.items()]
        chosen += [
            Choice(method=searcher, kind="search", row=row, seed=seed, budget=budget, search_ms=5.0)
            for (searcher, budget), rows in choices.items()
            for seed, row in enumerate(rows)
        ]
        rows = json.loads((cell / "rows.json").read_text())["rows"]
        write_json(cell / "rows.json", {"rows": rows, "picks": [asdict(pick) for pick in chosen]})
        write_confirmation(cell, {TWIN: 8.0, "float": 8.0, **latency_ms})
        return cell

    return written


@pytest.fixture
def with_models(folder):
    write_models(folder / CELL / "models")
    return folder


@pytest.fixture
def folder(tmp_path):
    only = EXPERIMENT.replace(", {use: other.onnx, label: other}", "")
    (tmp_path / "experiment.yaml").write_text(to_yaml(parse_experiment(only, "small")))
    write_cell(tmp_path)
    return tmp_path


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

    def open(self, page: Path, width: int = 1200, height: int = 900) -> None:
        """Load a file and wait until its scripts have run."""
        self.errors.clear()
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=page.as_uri())
        while self.run("document.readyState + location.href") != f"complete{page.as_uri()}":
            pass

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
