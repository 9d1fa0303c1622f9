"""The benchmarker of ONNX Runtime Web, against a stand-in for Node.js, and where they are installed the real ones."""

import gc
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from harness.base.errors import BuildFailed, MeasureFailed, UserError
from harness.config.sections import Limits, PluginSpec, Sampling
from harness.graph.builder import GraphBuilder
from harness.measure.records import Failed
from harness.plugins.api import Candidate, Layer
from harness.runtimes.onnxruntime_web.benchmarker import ONNXRuntimeWebBenchmarker
from harness.workers.engines import WorkerSpec
from harness.workers.sandbox import Sandbox

FAKE = Path(__file__).parents[3] / "fakes" / "fake_node.py"
CHROMIUM = next((name for name in ("chromium", "chromium-browser", "google-chrome") if shutil.which(name)), None)


@pytest.fixture
def node(monkeypatch, tmp_path):
    """The stand-in, as a program."""
    program = tmp_path / "bin" / "node"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "$@"\n')
    program.chmod(0o755)
    monkeypatch.delenv("FAKE_NODE", raising=False)
    return str(program)


@pytest.fixture
def candidate(tmp_path):
    builder = GraphBuilder("net")
    builder.output(builder.op("Relu", builder.input("x", (1, 2))), name="y")
    path = builder.save(tmp_path / "m.onnx")
    return Candidate(digest="x", edges=(), source=lambda: path)


def test_readings_outputs_and_layers_come_from_node(node, candidate, tmp_path):
    made = ONNXRuntimeWebBenchmarker(node=node, profile=True)
    artifact = made.build(candidate, tmp_path)
    feeds = {"x": np.array([[1.5, -2.0]], np.float32)}
    with made.open(artifact) as probe:
        assert probe.sample(3) == [2.5] * 3
        np.testing.assert_array_equal(probe.infer(feeds)["y"], feeds["x"])
        with pytest.raises(MeasureFailed, match="inputs are x, but got z"):
            probe.infer({"z": feeds["x"]})
    assert made.layers(artifact) == (
        Layer(name="conv", kind="QLinearConv", precision="uint8", time_ms=1.5, origin=("conv",), kernel="CPU"),
    )
    with pytest.raises(MeasureFailed, match="profile: true"):
        ONNXRuntimeWebBenchmarker(node=node).layers(artifact)


def test_description_names_package_and_engine(node):
    facts = ONNXRuntimeWebBenchmarker(node=node).describe()
    assert (facts["name"], facts["version"], facts["float_precision"]) == ("onnxruntime_web", "1.30.0", "f32")
    assert facts["options"] == {"threads": 1, "simd": True, "engine": "Node.js 20.1.0"}
    assert "Node.js 20.1.0" in facts["device"]
    facts = ONNXRuntimeWebBenchmarker(node=node, chromium="/opt/chromium").describe()
    assert facts["options"]["engine"] == "Chromium 156.0"


def test_missing_node_or_package_names_the_remedy(node, monkeypatch, tmp_path):
    with pytest.raises(UserError, match=r"'onnxruntime_web': Node\.js .*https://nodejs\.org"):
        ONNXRuntimeWebBenchmarker(node=str(tmp_path / "gone")).describe()
    monkeypatch.setenv("FAKE_NODE", "missing")
    monkeypatch.setenv("QDQ_ONNXRUNTIME_WEB", "/elsewhere")
    with pytest.raises(UserError, match=r"npm install onnxruntime-web.*QDQ_ONNXRUNTIME_WEB.*module_dir"):
        ONNXRuntimeWebBenchmarker(node=node).describe()


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_package_in_the_working_folder_is_not_run(tmp_path, monkeypatch):
    package = tmp_path / "node_modules" / "onnxruntime-web"
    package.mkdir(parents=True)
    (package / "index.js").write_text("require('node:fs').writeFileSync('marker', '')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("QDQ_ONNXRUNTIME_WEB", raising=False)
    monkeypatch.delenv("NODE_PATH", raising=False)
    with suppress(UserError):  # the machine may have the package elsewhere
        ONNXRuntimeWebBenchmarker().describe()
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("refuses", BuildFailed, r"refuses m\.onnx: .*Frobnicate"),
        ("dynamic", BuildFailed, r"m\.onnx: input 'x' has the dynamic shape \[1, N\]"),
        ("string", MeasureFailed, "no fixed input can be made for type string"),
        ("dies", MeasureFailed, r"ended with status 7: .*could not allocate"),
    ],
)
def test_node_failures_are_failures_of_the_candidate(fault, error, message, node, candidate, monkeypatch):
    monkeypatch.setenv("FAKE_NODE", fault)
    made = ONNXRuntimeWebBenchmarker(node=node)
    with pytest.raises(error, match=message), made.open(made.build(candidate, Path())):
        pass


def test_node_process_ends_with_its_engine(node, candidate, tmp_path):
    artifact = ONNXRuntimeWebBenchmarker(node=node).build(candidate, tmp_path)
    pid = artifact.engine.pid
    del artifact
    gc.collect()
    assert not psutil.pid_exists(pid)


def test_hanging_node_process_is_ended_with_its_worker(node, candidate, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_NODE", "hangs")
    spec = WorkerSpec(
        benchmarkers={"main": PluginSpec(use="onnxruntime_web", params={"node": node})}, workdir=tmp_path / "work"
    )
    children = psutil.Process().children
    before = {child.pid for child in children(recursive=True)}
    with Sandbox(spec, Limits(measure_s=0.5)) as sandbox:
        built = sandbox.build(candidate)
        assert not isinstance(built, Failed)
        found = sandbox.sample(built.handle, Sampling())
    assert isinstance(found, Failed)
    assert "0.5 s" in found.reason
    assert {child.pid for child in children(recursive=True)} <= before
