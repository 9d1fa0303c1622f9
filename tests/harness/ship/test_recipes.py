"""Recipes for other tools: ONNX Runtime makes the same edges; hostile names stay data."""

import json
import runpy
import shutil
import subprocess
import sys
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx_models import activation_ranges, run_onnxruntime
from small import qdq, save_small

from harness.accuracy.calibration.ranges import calibrate
from harness.base.errors import UserError
from harness.base.progress import NullProgress
from harness.base.statistics import Interval
from harness.compat.tao_specs.spec import QuantizeSection, assign_layers, match_skip_names, read_spec
from harness.graph.builder import GraphBuilder
from harness.graph.load import load
from harness.graph.model import Model
from harness.graph.qdq.import_placement import import_placement
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.qdq_graph import read_qdq_graph
from harness.graph.qdq.space import build_space
from harness.graph.quantize.numeric_choices import NumericChoices, depthwise_inputs
from harness.graph.rules.dialects import ONNXRUNTIME, OPENVINO, OPENVINO_7BIT, TENSORRT, Dialect
from harness.runtimes.onnxruntime import ONNXRuntimeBenchmarker
from harness.ship.recipes import RECIPES, export_recipe, summarize_placement
from harness.ship.runtime_comparison import EdgeCost, measure_edge_costs
from search.fixed_placements import FIXED_PLACEMENTS
from search.space import Edge

needs_nncf = pytest.mark.skipif(find_spec("nncf") is None, reason="NNCF is not installed")
needs_modelopt = pytest.mark.skipif(find_spec("modelopt") is None, reason="ModelOpt is not installed")
FACTS: dict[str, Any] = {"file": "net.onnx", "runtime": {"name": "onnxruntime", "dialect": "onnxruntime"}}


def ship(folder: Path, *, without: str = "", dialect: Dialect = ONNXRUNTIME) -> tuple[Model, Path]:
    """Return a model and the folder of its placement `linear` without the inputs of one node."""
    folder.mkdir()
    model = load(save_small(folder / "float.onnx"))
    onnx.save(model.proto, folder / "float.onnx")
    feed = {"x": np.random.default_rng(0).random((1, 3, 16, 16), np.float32)}
    space = build_space(model, dialect, precisions=("int8",))
    placed = space.resolve(FIXED_PLACEMENTS["linear"](space, None))
    kept = tuple((edge, precision) for edge, precision in placed if edge.consumer != without)
    Inserter(model, dialect, activation_ranges(model, [feed])).export(kept, folder / "net.onnx")
    return model, folder


@pytest.mark.parametrize(("dialect", "quantized"), [(ONNXRUNTIME, True), (OPENVINO, False)])
def test_recipe_quantizes_biases_as_the_shipped_file(tmp_path, dialect, quantized):
    _, folder = ship(tmp_path / "shipped", dialect=dialect)
    assert summarize_placement(folder / "net.onnx").biases == quantized
    export_recipe(folder, FACTS, "ort", folder / "recipe.py")
    assert f'"QuantizeBias": {quantized}' in (folder / "recipe.py").read_text()


def test_onnxruntime_recipe_reproduces_the_edges(tmp_path):
    model, _ = ship(tmp_path / "whole")
    left_out = next(node.name for node in model.nodes if node.op == "Conv")
    model, folder = ship(tmp_path / "part", without=left_out)
    found = export_recipe(folder, FACTS, "ort", folder / "recipe.py")
    assert (found.op_types, found.excluded) == (("Conv",), (left_out,))
    np.savez(tmp_path / "calib.npz", x=np.random.default_rng(1).random((2, 3, 16, 16), np.float32))
    script = runpy.run_path(str(folder / "recipe.py"))
    script["quantize"](str(folder / "float.onnx"), str(tmp_path / "calib.npz"), str(tmp_path / "theirs.onnx"))
    whole = script["samples"](str(tmp_path / "calib.npz"))
    assert [sample["x"].shape for sample in whole] == [(1, 3, 16, 16)] * 2
    theirs, ours = (import_placement(path, model) for path in (tmp_path / "theirs.onnx", folder / "net.onnx"))
    assert theirs == ours | dict.fromkeys(found.inexpressible, "int8"), "one pair for all readers of a tensor"
    assert [edge.consumer for edge in found.inexpressible] == ["Add"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "tool", [pytest.param("nncf", marks=needs_nncf), pytest.param("modelopt", marks=needs_modelopt)]
)
def test_nncf_and_modelopt_recipes_reproduce_the_edges(tmp_path, warm_python, tool):
    model, folder = ship(tmp_path / "shipped", dialect=OPENVINO)
    found = export_recipe(folder, FACTS, tool, folder / "recipe.py")
    np.savez(tmp_path / "calib.npz", x=np.random.default_rng(1).random((2, 3, 16, 16), np.float32))
    made, file = tmp_path / "theirs.onnx", folder / "float.onnx"
    onnx.save(onnx.load(file), file, save_as_external_data=True, location="float.onnx.data", size_threshold=0)
    command = warm_python.command(tool, folder / "recipe.py", file, tmp_path / "calib.npz", made)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    theirs, ours = (import_placement(path, model) for path in (made, folder / "net.onnx"))
    assert theirs.keys() - ours.keys() <= {*found.inexpressible}
    assert theirs
    assert ours.keys() <= theirs.keys()
    if tool == "modelopt":
        assert read_qdq_graph(made).unsigned_tensors == read_qdq_graph(folder / "net.onnx").unsigned_tensors
    floats = {tensor.data_type for tensor in onnx.load(made).graph.initializer}
    assert onnx.TensorProto.FLOAT16 not in floats, "operators without pairs keep their precision"


@pytest.mark.slow
@needs_nncf
@pytest.mark.parametrize("choice", ["tensor", "channel"])
def test_nncf_recipe_keeps_the_scale_granularity(tmp_path, warm_python, choice):
    builder = GraphBuilder("depthwise", seed=0)
    x = builder.op("Relu", builder.conv(builder.input("x", (1, 3, 16, 16)), 8, 3, pad=1))
    builder.output(builder.conv(builder.conv(x, 8, 3, pad=1, groups=8), 4, 1))
    model = load(builder.save(tmp_path / "float.onnx"))
    feed = {"x": np.random.default_rng(0).random((1, 3, 16, 16), np.float32)}
    space = build_space(model, OPENVINO, precisions=("int8",))
    placed = space.resolve(FIXED_PLACEMENTS["linear"](space, None))
    tensors = {edge.tensor for edge, _ in placed if edge.tensor not in model.constants}
    ranges = calibrate(tmp_path / "float.onnx", tensors, [feed], channels=depthwise_inputs(model))
    Inserter(model, OPENVINO, ranges, NumericChoices(depthwise=choice)).export(placed, tmp_path / "net.onnx")
    found = export_recipe(tmp_path, FACTS, "nncf", tmp_path / "recipe.py")
    assert found.channel_activations == (choice == "channel")
    np.savez(tmp_path / "calib.npz", **feed)
    names = [tmp_path / name for name in ("recipe.py", "float.onnx", "calib.npz", "theirs.onnx")]
    done = subprocess.run(warm_python.command("nncf", *names), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert read_qdq_graph(tmp_path / "theirs.onnx").has_channel_activations == (choice == "channel")


@pytest.mark.parametrize("dialect", [OPENVINO, OPENVINO_7BIT])
def test_modelopt_recipe_rewrites_pairs_to_the_shipped_form(tmp_path, dialect):
    model, folder = ship(tmp_path / "shipped", dialect=dialect)
    export_recipe(folder, {**FACTS, "runtime": {"dialect": dialect.name}}, "modelopt", folder / "recipe.py")
    feed = {"x": np.random.default_rng(0).random((1, 3, 16, 16), np.float32)}
    theirs = tmp_path / "theirs.onnx"
    placed = tuple(import_placement(folder / "net.onnx", model).items())
    Inserter(model, TENSORRT, activation_ranges(model, [feed])).export(placed, theirs)
    before = run_onnxruntime(theirs, feed)
    assert not read_qdq_graph(theirs).unsigned_tensors
    runpy.run_path(str(folder / "recipe.py"))["match_form"](theirs)
    unsigned = read_qdq_graph(theirs).unsigned_tensors
    assert unsigned == read_qdq_graph(folder / "net.onnx").unsigned_tensors
    assert "x" in unsigned
    for found, given, wanted in zip(
        run_onnxruntime(theirs, feed), before, run_onnxruntime(folder / "float.onnx", feed), strict=True
    ):
        limit = 0.03 * np.abs(wanted).max()
        assert np.abs(found - wanted).max() < max(limit, np.abs(given - wanted).max())


def test_recipes_are_valid_and_escape_names(tmp_path):
    _, folder = ship(tmp_path / "net")
    proto = onnx.load(folder / "net.onnx")
    name = '"""\nimport os\nos.abort()'
    next(node for node in proto.graph.node if node.op_type == "Relu").name = name
    onnx.save(proto, folder / "net.onnx")
    for tool in RECIPES:
        out = folder / f"recipe.{tool}"
        export_recipe(folder, FACTS, tool, out)
        if tool == "olive":
            assert json.loads(out.read_text())["passes"]["qdq_bench_placement"]["op_types_to_quantize"] == ["Conv"]
        elif tool == "tao":
            assert [layer.module_name for layer in read_section(out).layers] == ["Conv"]
        else:
            assert runpy.run_path(str(out))["OP_TYPES"] == ["Conv"]
    assert name in summarize_placement(folder / "net.onnx").unquantized


def read_section(path: Path) -> QuantizeSection:
    found = read_spec(path).quantize
    assert found is not None
    return found


def test_the_spec_of_tao_selects_the_nodes_of_the_placement(tmp_path):
    model, _ = ship(tmp_path / "whole")
    left_out = next(node.name for node in model.nodes if node.op == "Conv")
    model, folder = ship(tmp_path / "part", without=left_out)
    export_recipe(folder, FACTS, "tao", folder / "spec.yaml")
    section = read_section(folder / "spec.yaml")
    layers = assign_layers(model.nodes, section.layers, ())
    skipped = match_skip_names(model.nodes, section.skip_names)
    selected = {
        node.name for node, layer in zip(model.nodes, layers, strict=True) if layer and node.name not in skipped
    }
    assert selected == {edge.consumer for edge in import_placement(folder / "net.onnx", model)}
    assert {layer.dtypes for layer in section.layers} == {("int8", "int8")}


def test_the_script_for_ultralytics_quantizes_its_export(tmp_path, monkeypatch):
    model, folder = ship(tmp_path / "net")
    export_recipe(folder, FACTS, "ultralytics", folder / "recipe.py")
    np.savez(tmp_path / "calib.npz", x=np.random.default_rng(1).random((2, 3, 16, 16), np.float32))
    exports: list[dict[str, Any]] = []

    class YOLO:
        def __init__(self, weights: str) -> None:
            self.weights = weights

        def export(self, **given: Any) -> str:
            exports.append(given)
            return str(shutil.copy(folder / "float.onnx", tmp_path / "yolo.onnx"))

    package: Any = types.ModuleType("ultralytics")
    package.YOLO = YOLO
    monkeypatch.setitem(sys.modules, "ultralytics", package)
    script = runpy.run_path(str(folder / "recipe.py"))
    script["quantize"]("yolo.pt", str(tmp_path / "calib.npz"), str(tmp_path / "theirs.onnx"))
    assert exports == [{"format": "onnx", "imgsz": (16, 16)}]
    assert set(import_placement(folder / "net.onnx", model)) <= set(import_placement(tmp_path / "theirs.onnx", model))
    script["FLOAT_NODES"].append("elsewhere")
    with pytest.raises(SystemExit, match="elsewhere"):
        script["quantize"]("yolo.pt", str(tmp_path / "calib.npz"), str(tmp_path / "theirs.onnx"))


def test_unknown_tools_and_float_models_are_refused(tmp_path):
    _, folder = ship(tmp_path / "net")
    with pytest.raises(UserError, match="olive"):
        export_recipe(folder, FACTS, "oliv", folder / "recipe.py")
    with pytest.raises(UserError, match="none"):
        summarize_placement(folder / "float.onnx")
    with pytest.raises(UserError, match="package onnxruntime"):
        export_recipe(folder, FACTS, "ort", tmp_path / "onnxruntime.py")


def test_edge_cost_is_measured_with_the_edge_quantized(tmp_path, monkeypatch):
    model, folder = ship(tmp_path / "net")
    facts = {**FACTS, "dynamic_file": None, "runtime": dict(ONNXRuntimeBenchmarker().describe())}
    (left,) = summarize_placement(folder / "net.onnx").inexpressible
    pool = next(node for node in model.nodes if node.op == "GlobalAveragePool")
    other = Edge(pool.inputs[0], pool.name, 0)  # of a tensor without a pair
    before, extra = set(import_placement(folder / "net.onnx", model)), set[Edge]()

    def run(_: str, script: Path, *arguments: str) -> dict[str, Any]:
        path = Path(arguments[-1])
        onnx.checker.check_model(path)
        ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        added = set(import_placement(path, model)) - before
        extra.update(added)
        return {"latency_ms": 1.0 + len(added)}

    monkeypatch.setattr("harness.ship.runtime_comparison.run_script", run)
    costs = measure_edge_costs(folder, facts, [left, other], NullProgress(), builds=2)
    assert extra == {left, other}
    assert [cost.edges for cost in costs] == [(left,), (other,), (left, other)]
    assert [cost.ratio.value for cost in costs] == pytest.approx([2.0, 2.0, 3.0])
    assert {cost.verdict for cost in costs} == {"slower"}
    monkeypatch.setattr("harness.ship.runtime_comparison.write_with_edges", lambda *_: False)
    assert measure_edge_costs(folder, facts, [left], NullProgress(), builds=2) == ()


@pytest.mark.parametrize("measured", [True, False])
def test_costs_are_printed_with_their_source(tmp_path, monkeypatch, capsys, measured):
    _, folder = ship(tmp_path / "net")
    (left,) = summarize_placement(folder / "net.onnx").inexpressible
    cost = EdgeCost(edges=(left,), ratio=Interval(value=1.05, low=1.04, high=1.06), verdict="slower", noise_floor=0.01)
    monkeypatch.setattr("harness.results.deploy_folder.find_bundle", lambda path: path)
    monkeypatch.setattr("harness.results.deploy_folder.read_bundle", lambda _: FACTS)
    monkeypatch.setattr("harness.ship.runtime_comparison.measure_edge_costs", lambda *_, **__: (cost,))
    command = ["apply", str(folder), "--recipe", "ort", "-o", str(folder / "recipe.py")]
    command += ["--measure"] if measured else []
    assert qdq(*command) == 0
    text = capsys.readouterr().out
    assert ("+5.0 % [+4.0, +6.0]" in text, "unknown" in text) == (measured, not measured)
    assert qdq(*command, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (len(found["costs"]), found["cost_source"] == "unknown") == (measured, not measured)
