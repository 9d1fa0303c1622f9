"""The PTQ tools give models that run, under our nodes' names, and leave this process as it was."""

import dataclasses
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
import pytest
from onnx_models import run_onnxruntime
from onnxruntime.quantization.calibrate import CalibraterBase, HistogramCollector, MinMaxCalibrater
from onnxruntime.quantization.registry import QDQRegistry

from harness.accuracy.calibration.ranges import calibrate
from harness.accuracy.tools.ptq import ptq_fingerprint, quantize
from harness.base.errors import BuildFailed
from harness.base.random_inputs import random_feeds
from harness.graph.builder import GraphBuilder
from harness.graph.rules.dialects import OPENVINO


def quantized(
    tool: str, model: Path, out: Path, dialect: str = "onnxruntime", batches: Any = None, **options: Any
) -> Path:
    quantize(tool, model, out, BATCHES if batches is None else batches, dialect_name=dialect, **options)
    return out


REAL_TOOLS = True  # where no fixture says otherwise
CHANNELS = 32  # ModelOpt leaves thinner convolutions alone at FP8
TOOLS = ["modelopt_ptq", "ort_static"]
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


@pytest.mark.parametrize("tool", TOOLS)
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
    ("dialect", "zero_points", "bias"), [("onnxruntime", "uint8", True), ("openvino", "int8", False)]
)
def test_ort_static_follows_the_dialect(model, made, tmp_path, dialect, zero_points, bias):
    path = made("ort_static")
    if dialect != "onnxruntime":
        path = quantized("ort_static", model, tmp_path / "q.onnx", dialect)
    graph = onnx.load(path).graph
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    activations = [constants[node.input[2]] for node in graph.node if node.op_type == "QuantizeLinear"]
    assert {zero.dtype.name for zero in activations} == {zero_points}
    assert any(zero != 0 for zero in activations) == (zero_points == "uint8")
    weights = [n for n in graph.node if n.op_type == "DequantizeLinear" and n.input[0] in constants]
    assert ("int32" in {constants[n.input[0]].dtype.name for n in weights}) == bias
    assert max(constants[n.input[1]].size for n in weights) == CHANNELS


@pytest.mark.usefixtures("warm_tools")
def test_ort_static_follows_the_weight_limit_of_the_dialect(model, made, tmp_path):
    def largest(path: Path) -> int:
        constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}
        stored = [constants[n.input[0]] for n in onnx.load(path).graph.node if n.input and n.input[0] in constants]
        return max(int(np.abs(values.astype(int)).max()) for values in stored if values.dtype == np.int8)

    reduced = quantized("ort_static", model, tmp_path / "q.onnx", "onnxruntime_7bit")
    assert (largest(made("ort_static")), largest(reduced)) == (127, 64)


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


@pytest.mark.usefixtures("warm_tools")
@pytest.mark.parametrize("method", ["minmax", "max"])
def test_minmax_and_max_equal_modelopts_ranges(model, tmp_path, method):
    graph = onnx.load(quantized("modelopt_ptq", model, tmp_path / "q.onnx", "tensorrt", method=method)).graph
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    pairs = [node for node in graph.node if node.op_type == "QuantizeLinear" and node.input[0] not in constants]
    scales = {node.input[0]: float(constants[node.input[1]]) for node in pairs}
    assert len(scales) >= 4
    ranges = calibrate(model, list(scales), BATCHES, method=method)
    assert {name: max(-low, high) / 127 for name, (low, high) in ranges.items()} == pytest.approx(scales, rel=1e-6)


def test_fingerprint_depends_on_dialect_and_options(monkeypatch):
    seen = {ptq_fingerprint({"dialect_name": name}) for name in ("openvino", "onnxruntime")}
    seen.add(ptq_fingerprint({"dialect_name": "openvino", "method": "entropy"}))
    changed = dataclasses.replace(OPENVINO, bias="int32")
    monkeypatch.setattr("harness.plugins.registry.load_plugin", lambda *_: changed)
    seen.add(ptq_fingerprint({"dialect_name": "openvino"}))
    assert len(seen) == 4
