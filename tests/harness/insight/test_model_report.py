"""What OpenVINO and ONNX Runtime make of Q/DQ models, for real; and reasons, on layers made up."""

import json
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from small import qdq
from small_results import seal_bundle

from harness.base.errors import UserError
from harness.base.files import write_json
from harness.cli.main import main
from harness.config.sections import PluginSpec
from harness.graph.builder import GraphBuilder
from harness.graph.load import load
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.qdq_graph import read_qdq_graph
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import load_dialect
from harness.insight import model_report
from harness.insight.model_report import (
    FusionReport,
    choose_backend,
    compare_precisions,
    explain_layers,
    explain_model,
    report_lines,
    time_layers,
)
from harness.plugins.api import Layer

OPENVINO_F32 = PluginSpec(use="openvino", params={"precision": "f32"})


def net(path: Path) -> Path:
    builder = GraphBuilder("net", seed=1)
    x = builder.op("Relu", builder.conv(builder.input("x", (1, 8, 16, 16)), 16, 3, pad=1))
    x = builder.op("Add", x, builder.conv(x, 16, 3, pad=1))
    builder.output(builder.op("GlobalAveragePool", builder.conv(x, 16, 3, pad=1)), name="y")
    return builder.save(path)


def quantized(folder: Path, dialect_name: str, roles: list[str] | None = None) -> Path:
    """The net with pairs where these roles are, by default everywhere."""
    dialect, model = load_dialect(dialect_name), load(net(folder / "net.onnx"))
    space = build_space(model, dialect)
    ranges = {edge.tensor: (0.0, 4.0) for d in space.dimensions for edge in d.edges}
    placement = space.quantize_all() if roles is None else space.quantize_roles(roles)
    name = f"{dialect_name}-{'-'.join(roles or ['all'])}.onnx"
    return Inserter(model, dialect, ranges).export(space.resolve(placement), folder / name)


def explained(layers: list[Layer], path: Path) -> FusionReport:
    return explain_layers(layers, read_qdq_graph(path), runtime="r", quantize_outputs=False, whole_ms=1.0)


@pytest.mark.parametrize("use", [OPENVINO_F32, PluginSpec(use="onnxruntime")], ids=lambda use: use.use)
def test_quantized_operators_are_counted_and_compared(use, tmp_path):
    plain = explain_model(str(net(tmp_path / "net.onnx")), use, runs=3)
    full = explain_model(str(quantized(tmp_path, use.use)), use, runs=3)
    assert (plain.quantized_in_file, plain.low) == (0, 0)
    assert (full.quantized_in_file, full.low) == (3, 3)
    assert not [finding for finding in plain.findings if finding.kind in ("float operator", "unfused node")]
    assert {name for name, *_ in compare_precisions(plain.precision, full.precision)} == set(full.precision)
    assert compare_precisions(full.precision, full.precision) == []
    assert sum(layer.time_ms or 0 for layer in full.layers) > 0
    text = "\n".join(report_lines(full, 3))
    assert re.search(r"Linear operators: 3\b.*\bfile 3\b.*\bengine 3\b", text)
    assert all(layer.name in text for layer in sorted(full.layers, key=lambda layer: -(layer.time_ms or 0))[:1])
    if use.use == "openvino":  # ONNX Runtime does not say what a node was made of
        assert sum(full.fused.values()) > 0
        assert plain.fused == {}


@pytest.mark.parametrize("behind", [("Mul",), ("Add",), ("Mul", "Add"), ()])
def test_openvino_layers_named_after_folded_operators_are_found(behind, tmp_path):
    builder = GraphBuilder("scaled", seed=1)
    x = builder.input("x", (1, 64, 64))
    for place in range(2):
        x = builder.linear(x, 64, bias=False)
        for op in behind:
            x = builder.op(op, x, builder.const(np.full(64, 0.5, np.float32)))
        x = builder.op("Relu", x) if place == 0 else x
    builder.output(x, name="y")
    found = explain_model(str(builder.save(tmp_path / "net.onnx")), OPENVINO_F32)
    assert list(found.precision.values()) == ["f32"] * 2
    assert "2 f32" in "\n".join(report_lines(found, 3))


def test_constant_layers_count_no_inference_time(tmp_path):
    """At BF16 OpenVINO has its weights reordered in its graph, and keeps the time of that single run."""
    builder = GraphBuilder("wide", seed=1)
    x = builder.input("x", (1, 64, 512))
    for _ in range(3):
        x = builder.op("Relu", builder.linear(x, 512))
    builder.output(x, name="y")
    found = explain_model(str(builder.save(tmp_path / "net.onnx")), OPENVINO_F32)
    assert all(layer.time_ms is None for layer in found.layers if "transpose_b" in layer.name)
    assert sum(layer.time_ms or 0.0 for layer in found.layers) < 1.5 * found.whole_ms


def test_a_dynamic_model_is_explained_at_the_shape_that_is_given(tmp_path, capsys):
    builder = GraphBuilder("dynamic")
    builder.output(builder.conv(builder.input("x", ("N", 3, 16, "width")), 8, 3))
    path = str(builder.save(tmp_path / "net.onnx"))
    assert qdq("explain", path, "--runs", "1") == 2
    assert "--dim width=224" in capsys.readouterr().err
    assert qdq("explain", path, "--dim", "width=16", "--runs", "1") == 0
    assert re.search(r"Linear operators: 1\b.*\bfile 0\b", capsys.readouterr().out)


def named(name: str, precision: str, *origin: str) -> Layer:
    return Layer(name=name, kind="FullyConnected", precision=precision, time_ms=1.0, origin=origin or (name,))


def test_layers_before_an_add_are_ambiguous_and_those_named_after_a_quantizer_are_found(tmp_path):
    """As in DeiT-Tiny with every point quantized: its layer has a name of OpenVINO's own, and came of the Q behind."""
    builder = GraphBuilder("summed", seed=1)
    x = builder.input("x", (1, 64, 64))
    builder.output(builder.op("Add", *(builder.linear(x, 64, bias=False) for _ in range(2))), name="y")
    found = explained([named("y", "f32")], builder.save(tmp_path / "net.onnx"))
    assert set(found.precision.values()) == {""}
    assert "2 of unnamed precision" in "\n".join(report_lines(found, 3))
    builder = GraphBuilder("net", seed=1)
    x = builder.linear(builder.input("x", (1, 64, 64)), 64)
    scale, zero = builder.const(np.float32(0.1)), builder.const(np.uint8(0))
    pair = builder.op("QuantizeLinear", x, scale, zero, name="pair")
    builder.output(builder.op("DequantizeLinear", pair, scale, zero), name="y")
    found = explained([named("Multiply_7", "i8", "Multiply_7", "pair")], builder.save(tmp_path / "net.onnx"))
    assert list(found.precision.values()) == ["i8"]


def test_onnxruntime_findings_name_an_unquantized_output(tmp_path):
    found = explain_model(str(quantized(tmp_path, "onnxruntime", ["linear"])), PluginSpec(use="onnxruntime"), runs=3)
    reasons = [finding.reason for finding in found.findings if finding.kind == "float operator"]
    assert found.low < 3
    assert any("its output is not quantized (read by Add)" in reason for reason in reasons)
    pairs = [finding.reason for finding in found.findings if finding.kind == "unfused node"]
    assert any(reason.startswith("its consumer ") and reason.endswith(" runs in float") for reason in pairs)


def test_different_scales_of_a_pair_are_the_reason(tmp_path):
    path = quantized(tmp_path, "openvino", ["linear"])
    model = onnx.load(path)
    pair = next(
        node for node in model.graph.node if node.op_type == "DequantizeLinear" and node.input[0].endswith(".q")
    )
    other = numpy_helper.from_array(np.array(0.5, np.float32), "other_scale")
    model.graph.initializer.append(other)
    pair.input[1] = "other_scale"
    onnx.save(model, path)
    asked = read_qdq_graph(path)
    ((name, reason),) = asked.unfusable_reasons.items()
    assert name == pair.name
    assert re.search("scale differs.*QuantizeLinear", reason)
    reader = next(node.name for node in model.graph.node if pair.output[0] in node.input)
    found = explained([named(reader, "f32")], path)
    assert found.findings[0].reason == f"{pair.name}: {reason}"


def test_incomplete_pairs_and_unmatched_patterns_are_findings(tmp_path):
    path = quantized(tmp_path, "openvino", ["linear"])
    names = [node.name for node in onnx.load(path).graph.node if node.op_type == "Conv"]
    layers = [named(name, "u8" if name == names[0] else "f32") for name in names]
    found = explained(layers, path)
    (reason,) = {finding.reason for finding in found.findings}
    assert "no fusion pattern" in reason
    assert "1 other Conv" in reason
    model = onnx.load(path)
    conv = next(node for node in model.graph.node if node.name == names[1])
    conv.input[0] = conv.input[0].partition("@qdq")[0]
    onnx.save(model, path)
    found = explained(layers, path)
    reasons = {finding.name: finding.reason for finding in found.findings}
    assert "only its weight" in reasons[names[1]]


def test_explain_command_writes_text_and_json(tmp_path, capsys):
    plain, full = net(tmp_path / "net.onnx"), quantized(tmp_path, "openvino")
    for arguments, pattern in (((), r"\bfile 3\b.*\bengine 3\b"), (("--against", str(plain)), "3 -> 0")):
        main(["explain", str(full), *arguments, "--runs", "3", "--param", "precision=f32"])
        assert re.search(pattern, capsys.readouterr().out)
    main(["explain", str(plain), "--against", str(full), "--runs", "2", "--json"])
    assert len(json.loads(capsys.readouterr().out)["changes"]) == 3


@pytest.mark.parametrize(
    ("model", "backend", "message"),
    [
        ("gone.onnx", "openvino", "no such file"),
        ("README.md", "openvino", "README.md on openvino: OpenVINO refuses"),
        ("zoo:shapes_detector", "simulated", "does not report the layers of a model"),
        ("zoo:shapes_detector", "missing", "no benchmarker is called 'missing'"),
    ],
)
def test_invalid_models_and_backends_are_refused(model, backend, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("no model")
    with pytest.raises(UserError, match=message):
        explain_model(model, PluginSpec(use=backend), runs=2)


def test_results_folder_without_row_is_refused(tmp_path, capsys):
    assert qdq("explain", str(tmp_path)) == 2
    assert "a results folder needs a row" in capsys.readouterr().err


CALM, HELD_UP, WORSE = (1.0, 1.0, 1.05, 1.0), (1.0, 1.0, 2.0, 1.0), (1.0, 1.0, 9.0, 1.0)


@pytest.mark.parametrize(
    ("engines", "built", "kept"),
    [((CALM,), 1, "engine 0"), ((HELD_UP, CALM), 2, "engine 1"), ((WORSE, HELD_UP, WORSE), 3, "engine 1")],
)
def test_layer_times_disturbed_by_a_pause_are_repeated(engines, built, kept, tmp_path):
    folders = []

    def build(candidate, workdir):
        folders.append(workdir)
        return len(folders) - 1

    runtime = SimpleNamespace(
        build=build,
        open=lambda number: nullcontext(SimpleNamespace(sample=lambda n: engines[number][:n])),
        layers=lambda number: [Layer(name=f"engine {number}", kind="Convolution", precision="f32", origin=())],
    )
    layers, whole_ms = time_layers(runtime, None, tmp_path, 4)
    assert [layer.name for layer in layers] == [kept]
    assert len({folder for folder in folders if folder.is_dir()}) == built
    assert whole_ms == 1.0


@pytest.mark.parametrize(("record", "file"), [("ship.json", "a.onnx"), ("task.json", "models/a.onnx")])
def test_delivered_file_is_explained_with_its_measured_options(tmp_path, monkeypatch, record, file):
    monkeypatch.setattr(model_report, "count_cores", lambda: 2)
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.touch()

    def write(runtime: Any) -> None:
        if record == "ship.json":
            seal_bundle(tmp_path, file=file, runtime=runtime)
        else:
            write_json(tmp_path / record, {"backend": runtime})

    openvino, onnxruntime = "openvino", "onnxruntime"
    larger = {"name": openvino, "options": {"threads": 64, "streams": 4}}
    own = {"name": onnxruntime, "options": {"threads": 2, "provider": "a library"}}
    web = {"name": "onnxruntime_web", "options": {"threads": 1}}
    for runtime, use, params, expected in (
        (None, None, {"threads": 3}, (openvino, {"threads": 3})),
        (own, None, {}, (onnxruntime, {"threads": 2})),
        (own, onnxruntime, {"threads": 1}, (onnxruntime, {"threads": 1})),
        (own, openvino, {}, (openvino, {})),
        (larger, None, {}, (openvino, {"threads": 2, "streams": 2})),
        (larger, None, {"threads": 1}, (openvino, {"threads": 1, "streams": 1})),
        (web, None, {}, ("onnxruntime_web", {})),  # it has no such parameter
        ({"name": "another"}, None, {}, (openvino, {})),  # no plug-in has this name
    ):
        if runtime is not None:
            write(runtime)
        found = choose_backend(path, use, params)
        assert (found.use, found.params) == expected
    assert choose_backend(Path("zoo:resnet18"), None, {}) == PluginSpec(use=openvino)
    write("onnxruntime")
    if record == "task.json":
        assert choose_backend(path, "openvino", {}) == PluginSpec(use="openvino")
    with pytest.raises(UserError, match=record):
        choose_backend(path, None, {})
