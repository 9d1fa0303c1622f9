"""The PTQ tools give models that run, under our nodes' names, and leave this process as it was."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import psutil
import pytest
from onnx_models import run_onnxruntime
from onnxruntime.quantization.calibrate import CalibraterBase, HistogramCollector, MinMaxCalibrater
from onnxruntime.quantization.registry import QDQRegistry

from harness.accuracy.calibration.histogram_calibrators import EntropyCalibrator
from harness.accuracy.calibration.ranges import calibrate
from harness.accuracy.tools import ptq
from harness.accuracy.tools.ptq import (
    TOOLS,
    MetricRequest,
    PtqTool,
    environment_python,
    install_environment,
    ptq_fingerprint,
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
from harness.graph.load import load, save_to_folder
from harness.graph.qdq.qdq_graph import count_pairs, read_precisions
from harness.graph.rules.dialects import OPENVINO
from harness.plugins.api import Candidate
from harness.run.prepare.model_loader import complete_evaluator
from harness.runtimes.openvino import OpenVINOBenchmarker


def quantized(
    tool: str, model: Path, out: Path, dialect: str = "onnxruntime", batches: Any = None, **options: Any
) -> Path:
    quantize(tool, model, out, BATCHES if batches is None else batches, dialect_name=dialect, **options)
    return out


REAL_TOOLS = True  # where no fixture says otherwise
CHANNELS = 32  # ModelOpt leaves thinner convolutions alone at FP8
needs_modelopt = pytest.mark.skipif(find_spec("modelopt") is None, reason="ModelOpt is not installed")
MODELOPT = pytest.param("modelopt_ptq", marks=needs_modelopt)
BATCHES = list(random_feeds({"images": ("float", (1, 3, 16, 16))}, 3, 0))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    builder = GraphBuilder("net")
    x = builder.op("Relu", builder.conv(builder.input("images", (1, 3, 16, 16)), CHANNELS, 3))
    x = builder.op(
        "Relu", builder.op("Add", x, builder.conv(builder.op("Relu", builder.conv(x, CHANNELS, 3)), CHANNELS, 3))
    )
    x = builder.op("Flatten", builder.op("GlobalAveragePool", x))
    builder.output(builder.gemm(x, 10), name="logits")
    return builder.save(tmp_path_factory.mktemp("float") / "net.onnx")


@pytest.fixture(scope="module")
def made(model, warm_python, tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")

    def make(tool: str) -> Path:
        path = folder / f"{tool}.onnx"
        with warm_python.tools():
            return path if path.exists() else quantized(tool, model, path)

    return make


def _run(path: Path) -> np.ndarray:
    return np.stack([run_onnxruntime(path, batch)[0] for batch in BATCHES])


@pytest.mark.parametrize("tool", [MODELOPT, "ort_static"])
def test_the_model_has_qdq_runs_and_keeps_node_names(tool, model, made):
    quantized = onnx.load(made(tool))
    operators = Counter(node.op_type for node in quantized.graph.node)
    assert operators["QuantizeLinear"] >= 4
    assert operators["DequantizeLinear"] >= operators["QuantizeLinear"]
    names = {node.name for node in quantized.graph.node}
    removed = {"Relu"} if tool == "ort_static" else set()  # zero points do its work
    assert {node.name for node in onnx.load(model).graph.node if node.op_type not in removed} <= names
    assert removed.isdisjoint(operators)
    onnx.checker.check_model(quantized)
    assert np.corrcoef(_run(made(tool)).ravel(), _run(model).ravel())[0, 1] > 0.95


@pytest.mark.usefixtures("warm_tools")
@pytest.mark.parametrize(
    ("dialect", "zero_points", "bias", "largest"),
    [("onnxruntime", "uint8", True, 127), ("openvino", "int8", False, 127), ("onnxruntime_7bit", "uint8", True, 64)],
)
def test_ort_static_follows_the_dialect(model, tmp_path, dialect, zero_points, bias, largest):
    graph = onnx.load(quantized("ort_static", model, tmp_path / "q.onnx", dialect)).graph
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    activations = [constants[node.input[2]] for node in graph.node if node.op_type == "QuantizeLinear"]
    assert {zero.dtype.name for zero in activations} == {zero_points}
    assert any(zero != 0 for zero in activations) == (zero_points == "uint8")
    weights = [n for n in graph.node if n.op_type == "DequantizeLinear" and n.input[0] in constants]
    stored = [constants[n.input[0]] for n in weights]
    assert ("int32" in {values.dtype.name for values in stored}) == bias
    assert max(constants[n.input[1]].size for n in weights) == CHANNELS
    assert max(np.abs(values.astype(int)).max() for values in stored if values.dtype == np.int8) == largest


@needs_modelopt
def test_modelopt_ptq_is_deterministic_without_side_effects(model, made, tmp_path, monkeypatch, capfd):
    """Nothing is printed, or left in the working folder, next to the model or next to the result."""
    before, registry = made("ort_static").read_bytes(), dict(QDQRegistry)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    theirs = quantized("modelopt_ptq", model, tmp_path / "theirs" / "q.onnx")
    assert theirs.read_bytes() == made("modelopt_ptq").read_bytes()
    again = quantized("ort_static", model, tmp_path / "again" / "q.onnx")
    assert again.read_bytes() == before
    patched = (CalibraterBase.__init__, HistogramCollector.collect_value, MinMaxCalibrater.collect_data)
    assert {function.__module__ for function in patched} == {"onnxruntime.quantization.calibrate"}
    assert registry == dict(QDQRegistry)
    assert capfd.readouterr() == ("", "")
    assert list(model.parent.iterdir()) == [model]
    assert list(work.iterdir()) == []
    assert [p.name for p in (tmp_path / "theirs").iterdir()] == ["q.onnx"]


@needs_modelopt
@pytest.mark.usefixtures("warm_tools")
def test_modelopt_quantizes_to_fp8(model, tmp_path):
    path = quantized("modelopt_ptq", model, tmp_path / "q.onnx", "tensorrt", precision="fp8")
    assert onnx.TensorProto.FLOAT8E4M3FN in {tensor.data_type for tensor in onnx.load(path).graph.initializer}


@pytest.mark.usefixtures("warm_tools")
@pytest.mark.parametrize("method", ["entropy", "percentile"])
def test_ort_static_accepts_entropy_and_percentile(model, tmp_path, method):
    path = quantized("ort_static", model, tmp_path / "q.onnx", method=method, percentile=99.9)
    assert np.isfinite(_run(path)).all()


@pytest.mark.usefixtures("warm_tools")
def test_ort_static_accepts_several_inputs_without_batch_axis(tmp_path):
    builder = GraphBuilder("two")
    x = builder.op("Mul", builder.conv(builder.input("x", (1, 3, 8, 8)), 4, 3), builder.input("gain/of it", ()))
    builder.output(x, name="out")
    path = builder.save(tmp_path / "two.onnx")
    batches = list(random_feeds({"x": ("float", (1, 3, 8, 8)), "gain/of it": ("float", ())}, 2, 0))
    made = quantized("ort_static", path, tmp_path / "q.onnx", batches=batches)
    assert "QuantizeLinear" in {node.op_type for node in onnx.load(made).graph.node}


@pytest.mark.parametrize(
    ("tool", "options", "words"),
    [
        ("modelopt_ptq", {"method": "percentile"}, "calibrates by minmax, max, entropy, not by percentile"),
        ("ort_static", {"precision": "fp8"}, "quantizes to int8, not to fp8"),
        ("ort_static", {"method": "mse"}, "minmax, max, entropy, percentile, not by mse"),
        ("nncf_ptq", {"precision": "fp8"}, "quantizes to int8, not to fp8"),
        ("modelopt_ptq", {"batches": []}, "modelopt_ptq: there is no calibration data"),
        ("ort_static", {"limit_s": 0.05}, "ort_static: took longer than 0.05 s"),
    ],
)
def test_unsupported_options_are_refused(tool, options, words, model, tmp_path):
    with pytest.raises(BuildFailed, match=words):
        quantized(tool, model, tmp_path / "q.onnx", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("warm_tools")
def test_tool_error_message_is_one_line(model, tmp_path):
    wrong = [{"images": np.zeros((1, 5), np.float32)}]
    with pytest.raises(BuildFailed, match=r"ort_static: InvalidArgument: .*Invalid rank for input: images") as caught:
        quantized("ort_static", model, tmp_path / "q.onnx", batches=wrong)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_tool_ends_with_its_parent_process(model, tmp_path):
    """The driver is killed while the tool, whose interpreter is replaced by one that sleeps, is at work."""
    slow = tmp_path / "slow.py"
    note = f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))"
    slow.write_text(f"import os, pathlib, time\n{note}\ntime.sleep(60)")
    driver = (
        "import numpy, pathlib, harness.accuracy.tools.ptq as ptq\n"
        f"ptq._CHILD_BOOTSTRAP = ptq._CHILD_BOOTSTRAP.replace('sys.argv[0]', repr({str(slow)!r}))\n"
        f"ptq.quantize('ort_static', pathlib.Path({str(model)!r}), pathlib.Path({str(tmp_path / 'q.onnx')!r}), "
        "[{'x': numpy.zeros(1)}], dialect_name='onnxruntime')"
    )
    process = subprocess.Popen([sys.executable, "-c", driver])
    deadline = time.monotonic() + 30
    pid = tmp_path / "pid"
    while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait()
    while (
        psutil.pid_exists(int(pid.read_text()))
        and psutil.Process(int(pid.read_text())).status() != "zombie"
        and time.monotonic() < deadline
    ):
        time.sleep(0.02)
    assert time.monotonic() < deadline


def test_tool_crash_is_reported_with_its_exit_code(model, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(BuildFailed, match="ort_static: ended with code 1 and no model; its last output: none"):
        quantized("ort_static", model, tmp_path / "q.onnx")


@needs_modelopt
@pytest.mark.usefixtures("warm_tools")
@pytest.mark.parametrize("method", ["minmax", "max", "entropy"])
def test_ranges_equal_modelopts(model, tmp_path, monkeypatch, method):
    monkeypatch.setattr(EntropyCalibrator, "bin_count", 128)
    graph = onnx.load(quantized("modelopt_ptq", model, tmp_path / "q.onnx", "tensorrt", method=method)).graph
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    pairs = [node for node in graph.node if node.op_type == "QuantizeLinear" and node.input[0] not in constants]
    scales = {node.input[0]: float(constants[node.input[1]]) for node in pairs}
    assert len(scales) >= 4
    ranges = calibrate(model, list(scales), BATCHES, method=method)
    assert {name: max(-low, high) / 127 for name, (low, high) in ranges.items()} == pytest.approx(scales, rel=1e-6)


@pytest.mark.assets
@pytest.mark.usefixtures("warm_tools")
@pytest.mark.skipif(not os.environ.get("QDQ_ASSETS"), reason="QDQ_ASSETS is not set")
@pytest.mark.parametrize(
    ("tool", "name", "shapes"),
    [
        pytest.param("modelopt_ptq", "yolox_nano", {}, marks=needs_modelopt),
        ("ort_static", "deit_tiny_patch16_224", {"input": "1x3x224x224"}),
    ],
)
def test_node_names_of_real_models_survive(tool, name, shapes, tmp_path):
    model = load(Path(os.environ["QDQ_ASSETS"]) / "models" / f"{name}.onnx", shapes=shapes)
    inputs = {i: (model.types[i].dtype, model.types[i].shape) for i in model.inputs}
    file, batches = save_to_folder(model, tmp_path), list(random_feeds(inputs, 1, 0))
    made = onnx.load(quantized(tool, file, tmp_path / "q.onnx", "openvino", batches))
    assert {node.name for node in model.nodes} <= {node.name for node in made.graph.node}


def test_fingerprint_depends_on_dialect_and_options(monkeypatch):
    seen = {ptq_fingerprint({"dialect_name": name}) for name in ("openvino", "onnxruntime")}
    seen.add(ptq_fingerprint({"dialect_name": "openvino", "method": "entropy"}))
    changed = dataclasses.replace(OPENVINO, bias="int32")
    monkeypatch.setattr("harness.plugins.registry.load_plugin", lambda *_: changed)
    seen.add(ptq_fingerprint({"dialect_name": "openvino"}))
    assert len(seen) == 4


FAKE_PROGRAM = """
import json, sys
from tool_child import UnsupportedOption, iter_batches, serve_request

def fake(request):
    assert "harness" not in sys.modules
    if request["method"] != "minmax":
        raise UnsupportedOption("calibrates by minmax")
    total = sum(float(batch["images"].sum()) for batch in iter_batches(request))
    with open(request["model"], "rb") as model, open(request["output"], "wb") as made:
        made.write(model.read())
    print(json.dumps({"total": total}))
    with open({log!r}, "w") as log:
        json.dump({"total": total, **request}, log)

def broken(request):
    raise ZeroDivisionError("by\\nzero")

serve_request({"fake": fake, "broken": broken}, sys.argv[1])
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A fake program as the tool, run by the interpreter of the tests in place of an environment of its own."""
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
    assert log["total"] == pytest.approx(float(np.sum([batch["images"].sum() for batch in BATCHES])), rel=1e-4)


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
    np.savez(
        tmp_path / "test.npz", images=np.concatenate([batch["images"] for batch in BATCHES]), y=np.zeros(3, np.int64)
    )
    data = {"use": "npz", "path": str(tmp_path / "test.npz"), "labels": "y"}
    types = {"images": ("float", (1, 3, 16, 16))}
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
