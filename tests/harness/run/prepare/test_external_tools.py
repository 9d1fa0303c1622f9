"""Models of PTQ tools: each in its form, made once."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import numpy_helper

from harness.accuracy.tools.ptq import MetricRequest
from harness.base.progress import NullProgress
from harness.base.random_inputs import random_feeds
from harness.config.experiment import parse_experiment
from harness.config.sections import PluginSpec
from harness.graph.builder import GraphBuilder
from harness.graph.load import load
from harness.graph.qdq.import_placement import import_placement
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import ONNXRUNTIME
from harness.plugins.registry import register_object
from harness.run.prepare import initial_design as foreign
from harness.run.prepare.initial_design import QuantizationRequest, run_external_tool, tool_remarks


@pytest.fixture
def order(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    builder = GraphBuilder("net", seed=1)
    x = builder.op("Relu", builder.conv(builder.input("x", (1, 3, 8, 8)), 8, 3))
    x = builder.op("Relu", builder.op("Add", builder.conv(x, 8, 3), x))
    builder.output(builder.op("GlobalAveragePool", x))
    return QuantizationRequest(
        model_file=builder.save(tmp_path / "net.onnx"),
        source="net",
        data=list(random_feeds({"x": ("float", (1, 3, 8, 8))}, 2, 0)),
        data_key="random",
        options={"dialect_name": "onnxruntime"},
    )


def activations(path: Path) -> set[str]:
    graph = onnx.load(path).graph
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    return {values[node.input[2]].dtype.name for node in graph.node if node.op_type == "QuantizeLinear"}


def test_quantize_static_supports_uint8_and_int8_activations(order):
    made = {name: run_external_tool(name, order, NullProgress()) for name in ("ort_static", "ort_static_s8")}
    paths = {name: foreign.path for name, foreign in made.items() if foreign.path is not None}
    assert {name: activations(path) for name, path in paths.items()} == {
        "ort_static": {"uint8"},
        "ort_static_s8": {"int8"},
    }
    assert made["ort_static"].pairs == made["ort_static_s8"].pairs > 0
    written = {path: path.stat().st_mtime_ns for path in paths.values()}
    assert {name: run_external_tool(name, order, NullProgress()) for name in made} == made
    assert {path: path.stat().st_mtime_ns for path in paths.values()} == written, "each is made once and kept"


def test_placement_of_quantize_static_is_quantize_all(order):
    path = run_external_tool("ort_static", order, NullProgress()).path
    assert path is not None
    assert "Relu" not in {node.op_type for node in onnx.load(path).graph.node}
    model = load(order.model_file, source="net")
    space = build_space(model, ONNXRUNTIME)
    assert space.nearest(import_placement(path, model)) == space.quantize_all()


@pytest.mark.parametrize(("name", "method", "used"), [
    ("modelopt_ptq", "mse", "entropy"),
    ("modelopt_ptq", "percentile", "entropy"),
    ("modelopt_ptq", "minmax", "minmax"),
    ("ort_static", "mse", "entropy"),
    ("ort_static_s8", "mse", "entropy"),
    ("ort_static", "percentile", "percentile"),
])  # fmt: skip
def test_a_tool_without_the_calibration_method_uses_its_nearest(order, monkeypatch, name, method, used):
    """One that no tool has left the rows of all of them empty."""
    seen: list[str] = []

    def record(model: Path, output: Path, batches: Any, **options: Any) -> float:
        seen.append(options["method"])
        output.write_bytes(model.read_bytes())
        return 1.0

    monkeypatch.setitem(foreign.PTQ_FUNCTIONS, name, record)
    made = run_external_tool(name, replace(order, options={**order.options, "method": method}), NullProgress())
    assert seen == [used]
    assert made.path is not None
    assert made.method == ("" if used == method else used)
    again = run_external_tool(name, replace(order, options={**order.options, "method": method}), NullProgress())
    assert again == made
    assert len(seen) == 1


def test_unavailable_tool_gives_reason_before_start(order, monkeypatch):
    made = run_external_tool(
        "ort_static", replace(order, options={**order.options, "precision": "fp8"}), NullProgress()
    )
    assert (made.path, made.reason) == (None, "quantizes to int8, not to fp8")
    monkeypatch.setitem(sys.modules, "modelopt", None)
    made = run_external_tool("modelopt_ptq", order, NullProgress())
    assert made.path is None
    assert "modelopt not installed: pip install" in made.reason
    evaluator = PluginSpec(use="metric", params={"function": register_object(activations)})
    monkeypatch.setattr(foreign, "unavailable_reason", lambda *_: "")
    order = replace(order, metric=MetricRequest(evaluator=evaluator, max_drop=0.01))
    assert "module:NAME" in run_external_tool("nncf_accuracy_control", order, NullProgress()).reason


def remarks(**changes: Any) -> list[str]:
    calibration = {"method": changes.pop("method", "minmax")}
    body: Any = {"experiment": "e", "models": [{"use": "zoo:mlp", "calibration": calibration}], **changes}
    return list(tool_remarks(parse_experiment(str(body).replace("'", '"'), "e.yaml")))


def test_check_remarks_on_unsupported_tool_settings(monkeypatch):
    assert remarks() == remarks(initial=["float"], baselines=["all"], method="mse") == []
    assert [line.partition(" ")[0] for line in remarks(method="mse")] == ["modelopt_ptq", "ort_static"]
    (line,) = remarks(method="percentile")
    assert "modelopt_ptq has no calibration method percentile and calibrates by entropy" in line
    (line,) = remarks(precision=["int8", "fp8"])
    assert "ort_static: cannot run at precision fp8" in line
    assert len(remarks(precision=["mixed"])) == 2
    monkeypatch.setitem(sys.modules, "torch", None)
    (line,) = remarks()
    assert "modelopt_ptq: cannot run at precision int8" in line
    assert "torch not installed" in line
