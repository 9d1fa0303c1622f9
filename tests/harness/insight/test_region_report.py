"""Messages of `qdq inspect regions` on inputs without a point, and on models that are quantized already."""

from __future__ import annotations

import json
from pathlib import Path

from small import qdq

from harness.graph.builder import GraphBuilder
from harness.graph.load import load
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import OPENVINO
from harness.insight.region_report import inspect_regions


def test_every_input_has_a_point_or_a_rule(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    g = GraphBuilder("net")
    x = g.op("Relu", g.conv(g.input("x", (1, 4, 8, 8)), 8, 3, name="first"), name="relu")
    y = g.op("Reshape", g.conv(x, 8, 1, name="second"), g.const([1, -1]), name="flat")
    g.output(g.op("Add", y, g.const(2.0), name="shift"))
    g.save(Path("net.onnx"))
    found = inspect_regions("net.onnx", {}, dialect="tensorrt")
    rules = {(edge.consumer, edge.slot): rule for edge, rule in found.refused}
    assert rules == {
        ("first", 2): "bias", ("second", 2): "bias", ("relu", 0): "fusion", ("flat", 1): "constant",
        ("shift", 1): "constant",
    }  # fmt: skip
    points = {(edge.consumer, edge.slot) for dimension in found.space.dimensions for edge in dimension.edges}
    slots = {(n.name, slot) for n in found.model.nodes for slot, name in enumerate(n.inputs) if name}
    assert points | rules.keys() == slots
    assert not points & rules.keys()
    assert found.data()["stay_float"][0] == {"node": "first", "input": 2, "tensor": "first_bias", "rule": "bias"}
    json.dumps(found.data())


def test_quantized_model_is_refused_with_remedy(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    g = GraphBuilder("net")
    g.output(g.conv(g.input("x", (1, 4, 8, 8)), 8, 3, name="first"))
    model = load(g.save(Path("net.onnx")))
    space = build_space(model, OPENVINO)
    Inserter(model, OPENVINO, {"x": (-1.0, 1.0)}).export(space.resolve(space.quantize_all()), Path("quantized.onnx"))
    for command in (
        ("inspect", "regions", "quantized.onnx"),
        ("autotune", "-m", "quantized.onnx", "--backend", "simulated"),
    ):
        assert qdq(*command) == 2
        text = capsys.readouterr().err
        assert "shows that this model is already quantized; give the float model" in text
        assert "--start FILE" in text
