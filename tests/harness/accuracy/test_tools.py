"""PTQ tools in child processes: the protocol with a fake tool, NNCF where it is installed, and the files of an IR."""

import json
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from harness.accuracy.tools import ptq
from harness.accuracy.tools.ptq import (
    TOOLS,
    MetricRequest,
    PtqTool,
    environment_python,
    install_environment,
    quantize,
    unavailable_reason,
)
from harness.base.errors import BuildFailed, UserError
from harness.base.paths import TRUST_VARIABLE
from harness.base.random_inputs import random_feeds
from harness.cli.common import add_to_sys_path
from harness.config.sections import PluginSpec
from harness.graph.builder import GraphBuilder
from harness.graph.io.digests import digest_file
from harness.graph.io.files import copy_model, model_files, move_model
from harness.graph.qdq.qdq_graph import count_pairs, read_precisions
from harness.plugins.api import Candidate
from harness.run.prepare.model_loader import complete_evaluator
from harness.runtimes.openvino import OpenVINOBenchmarker

REAL_TOOLS = True  # where no fixture says otherwise
BATCHES = list(random_feeds({"x": ("float", (1, 3, 16, 16))}, 3, 0))
FAKE_PROGRAM = """
import json, sys
from tool_child import UnsupportedOption, iter_batches, serve_request

def fake(request):
    assert "harness" not in sys.modules
    if request["method"] != "minmax":
        raise UnsupportedOption("calibrates by minmax")
    total = sum(float(batch["x"].sum()) for batch in iter_batches(request))
    with open(request["model"], "rb") as model, open(request["output"], "wb") as made:
        made.write(model.read())
    print(json.dumps({"total": total}))
    with open({log!r}, "w") as log:
        json.dump({"total": total, **request}, log)

def broken(request):
    raise ZeroDivisionError("by\\nzero")

serve_request({"fake": fake, "broken": broken}, sys.argv[1])
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    builder = GraphBuilder("net", seed=1)
    x = builder.op("Relu", builder.conv(builder.input("x", (1, 3, 16, 16)), 8, 3))
    x = builder.op("Flatten", builder.op("GlobalAveragePool", builder.conv(x, 8, 3)))
    builder.output(builder.gemm(x, 10), name="logits")
    return builder.save(tmp_path_factory.mktemp("float") / "net.onnx")


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Tools of a fake program in an environment of their own, which the tests' interpreter stands for."""
    log = tmp_path / "log.json"
    programs = ptq._PROGRAMS
    (tmp_path / "tool_child.py").write_bytes((programs / "tool_child.py").read_bytes())
    program = tmp_path / "fake_child.py"
    program.write_text(FAKE_PROGRAM.replace("{log!r}", repr(str(log))))
    tool = PtqTool(modules=("fake",), methods=("minmax",), program=program, environment="fake")
    monkeypatch.setattr(ptq, "TOOLS", {"fake": tool, "broken": tool})
    python = tmp_path / "python"  # another path, so that it is called without the harness
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(ptq, "tool_python", lambda _: python)
    return log


@pytest.mark.parametrize(("drop", "relative"), [(0.01, False), ("1 %", True)])
def test_external_tool_receives_batches_and_bound_and_returns_a_file(fake, model, tmp_path, drop, relative):
    made, metric = tmp_path / "made.onnx", MetricRequest(evaluator=PluginSpec(use="top1"), max_drop=drop)
    seconds = quantize("fake", model, made, BATCHES, metric=metric, dialect_name="openvino")
    assert 0 <= seconds < 30
    assert made.read_bytes() == model.read_bytes()
    log = json.loads(fake.read_text())
    assert (log["count"], log["max_drop"], log["relative_drop"]) == (len(BATCHES), 0.01, relative)
    assert log["total"] == pytest.approx(float(np.sum([batch["x"].sum() for batch in BATCHES])), rel=1e-4)


@pytest.mark.parametrize(
    ("tool", "method", "message"),
    [("fake", "mse", "fake: calibrates by minmax"), ("broken", "minmax", "broken: ZeroDivisionError: by zero")],
)
def test_failing_tool_gives_its_reason_and_no_file(fake, model, tmp_path, tool, method, message):
    with pytest.raises(BuildFailed) as caught:
        quantize(tool, model, tmp_path / "made.onnx", BATCHES, dialect_name="openvino", method=method)
    assert str(caught.value) == message
    assert not (tmp_path / "made.onnx").exists()


def test_tool_environment_is_created_once_and_removed_on_error(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    called: list[Any] = []
    status = 1

    def run(command: list[Any], check: bool) -> SimpleNamespace:
        called.append([str(part) for part in command])
        return SimpleNamespace(returncode=status)

    monkeypatch.setattr(ptq, "venv", SimpleNamespace(create=lambda folder, with_pip: folder.mkdir(parents=True)))
    monkeypatch.setattr(ptq, "subprocess", SimpleNamespace(run=run))
    with pytest.raises(UserError, match="pip"):
        install_environment("quark", "https://example.org/whl")
    assert environment_python("quark") is None
    assert unavailable_reason("quark_ptq", "int8") == "quark not installed: qdq tools install quark"
    status = 0
    python = install_environment("quark")
    assert python == environment_python("quark") == install_environment("quark")
    assert len(called) == 2
    assert "--extra-index-url" in called[0]
    assert all("==" in requirement for requirement in called[1][5:])
    assert unavailable_reason("quark_ptq", "int8") == ""
    with pytest.raises(UserError, match="quark"):
        install_environment("quart")


def test_unsupported_method_is_replaced_by_the_nearest():
    assert TOOLS["nncf_ptq"].nearest_method("mse") == "mean"
    assert ptq.method_substitute("ort_dynamic", "mse") == ""


needs_nncf = pytest.mark.skipif(find_spec("nncf") is None, reason="NNCF is not installed")


@pytest.fixture(scope="module")
def ir(model, warm_python, tmp_path_factory):
    path = tmp_path_factory.mktemp("nncf") / "q.xml"
    with warm_python.tools():
        quantize("nncf_ptq", model, path, BATCHES, dialect_name="openvino")
    return path


@needs_nncf
def test_nncf_ir_is_copied_moved_and_hashed_with_weights(ir, tmp_path):
    assert count_pairs(ir) >= 4
    assert read_precisions(ir) == {"int8"}
    assert [path.suffix for path in model_files(ir)] == [".xml", ".bin"]
    copy = copy_model(ir, tmp_path, "c.xml")
    assert digest_file(copy) == digest_file(ir)
    move_model(copy, tmp_path / "d" / "m.xml")
    assert digest_file(tmp_path / "d" / "m.xml") == digest_file(ir)
    weights = tmp_path / "d" / "m.bin"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    assert digest_file(tmp_path / "d" / "m.xml") != digest_file(ir)


@needs_nncf
def test_openvino_runs_an_ir_with_and_without_integer_kernels(ir, model, tmp_path):
    found = []
    for path, options in ((model, {}), (ir, {}), (ir, {"integer_kernels": False})):
        runtime = OpenVINOBenchmarker(precision="f32", **options)
        artifact = runtime.build(Candidate(digest="", edges=(), source=lambda path=path: path), tmp_path)
        with runtime.open(artifact) as probe:
            found.append(probe.infer(BATCHES[0])["logits"])
    reference, integers, described = found
    scale = float(np.abs(reference).max())
    np.testing.assert_allclose(described, reference, atol=0.1 * scale)
    np.testing.assert_allclose(integers, described, atol=0.1 * scale)


@needs_nncf
@pytest.mark.usefixtures("warm_tools")
def test_nncf_accuracy_control_uses_the_task_evaluator(model, tmp_path):
    np.savez(tmp_path / "test.npz", x=np.concatenate([batch["x"] for batch in BATCHES]), y=np.zeros(3, np.int64))
    data = {"use": "npz", "path": str(tmp_path / "test.npz"), "labels": "y"}
    types = {"x": ("float", (1, 3, 16, 16))}
    evaluator = complete_evaluator(PluginSpec(use="top1", params={"data": data}), types, tmp_path, None)
    made = tmp_path / "q.onnx"
    metric = MetricRequest(evaluator=evaluator, max_drop=0.5)
    quantize("nncf_accuracy_control", model, made, BATCHES, metric=metric, dialect_name="onnxruntime")
    assert "QuantizeLinear" in {node.op_type for node in onnx.load(made).graph.node}
    assert count_pairs(made) > 0


PLUGIN = """
from pathlib import Path
Path(__file__).with_suffix(".imported").touch()

class Score:
    metric, higher_is_better = "score", True

    def __init__(self):
        self.offset = float(Path("offset.txt").read_text())

    def score(self, infer):
        return infer({})
"""
EVALUATING_PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, {programs!r})
from nncf_child import _open_evaluator, chdir
from tool_child import serve_request

def scoring(request):
    with chdir(request["folder"]):
        Path(request["output"]).write_text(str(_open_evaluator(request).offset))

serve_request({"scoring": scoring}, sys.argv[1])
"""


@pytest.mark.parametrize("trusted", [True, False])
def test_a_tool_finds_the_plugins_of_the_experiment_only_if_they_are_trusted(model, tmp_path, monkeypatch, trusted):
    program, folder, working = (tmp_path / name for name in ("program.py", "experiment", "working"))
    program.write_text(EVALUATING_PROGRAM.replace("{programs!r}", repr(str(ptq._PROGRAMS))))
    folder.mkdir()
    working.mkdir()  # another folder, so that only the import path of the child finds the plug-in
    (folder / "own_metric.py").write_text(PLUGIN)
    (working / "offset.txt").write_text("0.25")
    for each in (folder, working):
        (each / "json.py").write_text("raise SystemExit('imported in place of a standard module')")
    monkeypatch.chdir(working)
    monkeypatch.setattr(ptq, "TOOLS", {"scoring": PtqTool(modules=(), methods=("minmax",), program=program)})
    monkeypatch.delenv(TRUST_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    if trusted:
        monkeypatch.setenv(TRUST_VARIABLE, "1")
    add_to_sys_path(folder)
    made = tmp_path / "made.onnx"
    metric = MetricRequest(evaluator=PluginSpec(use="own_metric:Score"), max_drop=0.01)
    if trusted:
        quantize("scoring", model, made, BATCHES, metric=metric, dialect_name="openvino")
        assert made.read_text() == "0.25"
    else:
        with pytest.raises(BuildFailed, match="--trust-plugins"):
            quantize("scoring", model, made, BATCHES, metric=metric, dialect_name="openvino")
    assert (folder / "own_metric.imported").exists() is trusted


@pytest.mark.usefixtures("warm_tools")
def test_ort_dynamic_counts_integer_operators_as_pairs(model, tmp_path):
    made = tmp_path / "d.onnx"
    quantize("ort_dynamic", model, made, BATCHES, dialect_name="onnxruntime")
    assert count_pairs(made) == 1
    builder = GraphBuilder("conv", seed=1)
    builder.output(builder.conv(builder.input("x", (1, 3, 16, 16)), 8, 3))
    with pytest.raises(BuildFailed, match="MatMul"):
        quantize("ort_dynamic", builder.save(tmp_path / "conv.onnx"), made, BATCHES, dialect_name="onnxruntime")
