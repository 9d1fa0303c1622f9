"""The PTQ tools give models that run, under our nodes' names, and leave this process as it was."""

import dataclasses
import hashlib
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
import pytest
from onnx_models import run_onnxruntime
from onnxruntime.quantization.calibrate import CalibraterBase, HistogramCollector, MinMaxCalibrater
from onnxruntime.quantization.registry import QDQRegistry

from harness.accuracy.tools.ptq import ptq_fingerprint, quantize
from harness.base.errors import BuildFailed
from harness.base.random_inputs import random_feeds
from harness.graph.builder import GraphBuilder
from harness.graph.load import load, save_to_folder
from harness.graph.rules.dialects import OPENVINO


def modelopt_ptq(model: Path, out: Path, batches: Iterable[Mapping[str, Any]], **options: Any) -> Path:
    quantize("modelopt_ptq", model, out, batches, **options)
    return out


def ort_static(model: Path, out: Path, batches: Iterable[Mapping[str, Any]], **options: Any) -> Path:
    quantize("ort_static", model, out, batches, **options)
    return out


REAL_TOOLS = True  # where no fixture says otherwise
CHANNELS = 32  # ModelOpt leaves thinner convolutions alone at FP8
TOOLS = [modelopt_ptq, ort_static]
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

    def make(tool: Callable[..., Path]) -> Path:
        path = folder / f"{tool.__name__}.onnx"
        with warm_python.tools():
            return path if path.exists() else tool(model, path, BATCHES, dialect_name="onnxruntime")

    return make


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _run(path: Path) -> np.ndarray:
    return np.stack([run_onnxruntime(path, batch)[0] for batch in BATCHES])


@pytest.mark.parametrize("tool", TOOLS)
def test_the_model_has_qdq_runs_and_keeps_node_names(tool, model, made):
    quantized = onnx.load(made(tool))
    operators = Counter(node.op_type for node in quantized.graph.node)
    assert operators["QuantizeLinear"] >= 4
    assert operators["DequantizeLinear"] >= operators["QuantizeLinear"]
    names = {node.name for node in quantized.graph.node}
    removed = {"Relu"} if tool is ort_static else set()  # zero points do its work
    assert {node.name for node in onnx.load(model).graph.node if node.op_type not in removed} <= names
    assert removed.isdisjoint(operators)
    onnx.checker.check_model(quantized)
    assert np.corrcoef(_run(made(tool)).ravel(), _run(model).ravel())[0, 1] > 0.95


@pytest.mark.usefixtures("warm_tools")
@pytest.mark.parametrize(
    ("dialect", "zero_points", "bias"), [("onnxruntime", "uint8", True), ("openvino", "int8", False)]
)
def test_ort_static_follows_the_dialect(model, made, tmp_path, dialect, zero_points, bias):
    path = made(ort_static)
    if dialect != "onnxruntime":
        path = ort_static(model, tmp_path / "q.onnx", BATCHES, dialect_name=dialect)
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

    reduced = ort_static(model, tmp_path / "q.onnx", BATCHES, dialect_name="onnxruntime_7bit")
    assert (largest(made(ort_static)), largest(reduced)) == (127, 64)


def test_modelopt_ptq_is_deterministic_without_side_effects(model, made, tmp_path, monkeypatch, capfd):
    """Nothing is printed, or left in the working folder, next to the model or next to the result."""
    before, registry = _digest(made(ort_static)), dict(QDQRegistry)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    theirs = modelopt_ptq(model, tmp_path / "theirs" / "q.onnx", BATCHES, dialect_name="onnxruntime")
    assert _digest(theirs) == _digest(made(modelopt_ptq))
    again = ort_static(model, tmp_path / "again" / "q.onnx", BATCHES, dialect_name="onnxruntime")
    assert _digest(again) == before
    patched = (CalibraterBase.__init__, HistogramCollector.collect_value, MinMaxCalibrater.collect_data)
    assert {function.__module__ for function in patched} == {"onnxruntime.quantization.calibrate"}
    assert registry == dict(QDQRegistry)
    assert capfd.readouterr() == ("", "")
    assert list(model.parent.iterdir()) == [model]
    assert list(work.iterdir()) == []
    assert [p.name for p in (tmp_path / "theirs").iterdir()] == ["q.onnx"]


@pytest.mark.usefixtures("warm_tools")
def test_modelopt_quantizes_to_fp8(model, tmp_path):
    path = modelopt_ptq(model, tmp_path / "q.onnx", BATCHES, dialect_name="tensorrt", precision="fp8")
    assert onnx.TensorProto.FLOAT8E4M3FN in {tensor.data_type for tensor in onnx.load(path).graph.initializer}


@pytest.mark.usefixtures("warm_tools")
@pytest.mark.parametrize("method", ["entropy", "percentile"])
def test_ort_static_accepts_entropy_and_percentile(model, tmp_path, method):
    options: Any = {"dialect_name": "onnxruntime", "method": method, "percentile": 99.9}
    assert np.isfinite(_run(ort_static(model, tmp_path / "q.onnx", BATCHES, **options))).all()


@pytest.mark.usefixtures("warm_tools")
def test_ort_static_accepts_several_inputs_without_batch_axis(tmp_path):
    builder = GraphBuilder("two")
    x = builder.op("Mul", builder.conv(builder.input("x", (1, 3, 8, 8)), 4, 3), builder.input("gain/of it", ()))
    builder.output(x, name="out")
    path = builder.save(tmp_path / "two.onnx")
    batches = list(random_feeds({"x": ("float", (1, 3, 8, 8)), "gain/of it": ("float", ())}, 2, 0))
    made = ort_static(path, tmp_path / "q.onnx", batches, dialect_name="onnxruntime")
    assert "QuantizeLinear" in {node.op_type for node in onnx.load(made).graph.node}


def test_missing_calibration_data_is_refused(model, tmp_path):
    with pytest.raises(BuildFailed, match="modelopt_ptq: there is no calibration data"):
        modelopt_ptq(model, tmp_path / "q.onnx", [], dialect_name="onnxruntime")


@pytest.mark.parametrize(
    ("tool", "options", "words"),
    [
        ("modelopt_ptq", {"method": "percentile"}, "calibrates by minmax, max, entropy, not by percentile"),
        ("ort_static", {"precision": "fp8"}, "quantizes to int8, not to fp8"),
        ("ort_static", {"method": "mse"}, "minmax, max, entropy, percentile, not by mse"),
        ("nncf_ptq", {"precision": "fp8"}, "quantizes to int8, not to fp8"),
    ],
)
def test_unsupported_options_are_refused(tool, options, words, model, tmp_path):
    with pytest.raises(BuildFailed, match=words):
        quantize(tool, model, tmp_path / "q.onnx", BATCHES, dialect_name="onnxruntime", **options)


@pytest.mark.usefixtures("warm_tools")
def test_tool_error_message_is_one_line(model, tmp_path):
    wrong = [{"images": np.zeros((1, 5), np.float32)}]
    with pytest.raises(BuildFailed, match=r"ort_static: InvalidArgument: .*Invalid rank for input: images") as caught:
        ort_static(model, tmp_path / "q.onnx", wrong, dialect_name="onnxruntime")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_tool_that_takes_too_long_is_ended(model, tmp_path):
    with pytest.raises(BuildFailed, match=r"ort_static: took longer than 0.05 s"):
        ort_static(model, tmp_path / "q.onnx", BATCHES, dialect_name="onnxruntime", limit_s=0.05)
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
    while not (pid := _text(tmp_path / "pid")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait()
    while psutil.pid_exists(int(pid)) and psutil.Process(int(pid)).status() != "zombie" and time.monotonic() < deadline:
        time.sleep(0.02)
    assert time.monotonic() < deadline


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_tool_crash_is_reported_with_its_exit_code(model, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(BuildFailed, match="ort_static: ended with code 1 and no model; its last output: none"):
        ort_static(model, tmp_path / "q.onnx", BATCHES, dialect_name="onnxruntime")


@pytest.mark.assets
@pytest.mark.usefixtures("warm_tools")
@pytest.mark.skipif(not os.environ.get("QDQ_ASSETS"), reason="QDQ_ASSETS is not set")
@pytest.mark.parametrize(
    ("tool", "name", "shapes"),
    [(modelopt_ptq, "yolox_nano", {}), (ort_static, "deit_tiny_patch16_224", {"input": "1x3x224x224"})],
)
def test_node_names_of_real_models_survive(tool, name, shapes, tmp_path):
    model = load(Path(os.environ["QDQ_ASSETS"]) / "models" / f"{name}.onnx", shapes=shapes)
    inputs = {i: (model.types[i].dtype, model.types[i].shape) for i in model.inputs}
    path = tool(
        save_to_folder(model, tmp_path), tmp_path / "q.onnx", list(random_feeds(inputs, 1, 0)), dialect_name="openvino"
    )
    assert {node.name for node in model.nodes} <= {node.name for node in onnx.load(path).graph.node}


def test_fingerprint_depends_on_dialect_and_options(monkeypatch):
    seen = {ptq_fingerprint({"dialect_name": name}) for name in ("openvino", "onnxruntime")}
    seen.add(ptq_fingerprint({"dialect_name": "openvino", "method": "entropy"}))
    changed = dataclasses.replace(OPENVINO, bias="int32")
    monkeypatch.setattr("harness.plugins.registry.load_plugin", lambda *_: changed)
    seen.add(ptq_fingerprint({"dialect_name": "openvino"}))
    assert len(seen) == 4
