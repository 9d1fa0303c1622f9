"""Messages of `qdq inspect regions` on inputs without a point, and on models that are quantized already."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from small import qdq

from harness.graph.builder import GraphBuilder
from harness.graph.load import load
from harness.graph.partition.patterns import find_patterns
from harness.graph.partition.regions import discover_regions
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import OPENVINO
from harness.insight.region_report import RegionReport, inspect_regions


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


def inception(path: Path) -> RegionReport:
    g = GraphBuilder("inception")
    x = g.op("Tanh", g.input("x", (1, 8, 8, 8)), name="first")
    branches = [x, x, x]
    for _ in range(2):
        branches = [g.op("Relu", g.conv(y, 8, 3)) for y in branches]
    g.output(g.op("Concat", *branches, axis=1))
    return inspect_regions(str(g.save(path / "inception.onnx")), {})


def test_lines_have_phases_tree_and_summary(tmp_path):
    lines = [line for line in inception(tmp_path).lines(include_all=True, verbose=False) if "Pattern:" not in line]
    assert lines[1:10] == [
        "Phase 1 complete: 2 regions, 14/14 nodes (100.0%)",
        "Phase 2 complete: refined 1 regions, skipped 1",
        "",
        "├─ Region 0 (Level 0, Type: LEAF)",
        "│  ├─ Direct nodes: 1",
        "│  ├─ Nodes, a sequence: Tanh",
        "│  ├─ Inputs: 1 tensors",
        "│  └─ Outputs: 1 tensors",
        "├─ Region 1 (Level 0, Type: COMPOSITE)",
    ]
    assert lines[10:16] == [
        "│  ├─ Direct nodes: 0",
        "│  ├─ Total nodes (recursive): 13",
        "│  ├─ Children: 4",
        "│  ├─ Inputs: 1 tensors",
        "│  └─ Outputs: 1 tensors",
        "│    ├─ Region 2 (Level 1, Type: LEAF)",
    ]
    assert "│    │  ├─ Nodes, a sequence: Conv, Relu, Conv, Relu" in lines
    start = lines.index("Summary: 6 regions (5 LEAF, 1 COMPOSITE), 14/14 nodes (100.0%)")
    assert lines[start + 1 : start + 6] == [
        "Patterns: 4 (3 of LEAF regions)",
        "LEAF region sizes: min=1, max=4, avg=2.8",
        "Size distribution:",
        "     1 nodes: ██ (2 regions)",
        "     4 nodes: ███ (3 regions)",
    ]


def test_tree_omits_and_counts_unquantizable_regions(tmp_path):
    lines = list(inception(tmp_path).lines(include_all=False, verbose=False))
    assert "├─ Region 0 (Level 0, Type: LEAF)" not in lines
    assert "2 LEAF regions without quantizable operators are left out: --include-all-regions" in lines


def test_verbose_tree_names_nodes_tensors_and_leaf_kind(tmp_path):
    g = GraphBuilder("silu")
    x = g.conv(g.input("x", (1, 3, 8, 8)), 4, 3)
    g.output(g.op("Mul", x, g.op("Sigmoid", x)), name="y")
    lines = list(inspect_regions(str(g.save(tmp_path / "silu.onnx")), {}).lines(include_all=False, verbose=True))
    assert any("a convergence of branches: Conv, Sigmoid, Mul" in line for line in lines)
    assert any(line.endswith("- Node 0: Conv (Conv)") for line in lines)
    assert any(line.endswith("- y") for line in lines)


def test_json_holds_summary_histogram_and_regions(tmp_path):
    report = inception(tmp_path)
    found = json.loads(json.dumps(report.data()))
    assert found["summary"] == {
        "nodes": 14, "covered": 14, "top": 2, "refined": 1, "leaves": 5, "composites": 1, "patterns": 4,
        "leaf_patterns": 3,
    }  # fmt: skip
    assert found["histogram"] == {"1": 2, "4": 3}
    by_id = {region["id"]: region for region in found["regions"]}
    assert (by_id[2]["parent"], by_id[-1]["parent"]) == (1, None)
    assert sorted(n for region in by_id.values() for n in region["nodes"]) == sorted(n.name for n in report.model.nodes)
    assert {region["pattern"] for region in by_id.values()} == {each["signature"] for each in found["patterns"]}


def test_model_without_nodes_has_a_report(tmp_path):
    report = inception(tmp_path)
    empty = replace(report.model, nodes=(), types={})
    root = discover_regions(empty)
    lines = replace(report, model=empty, root=root, patterns=find_patterns(empty, root)).lines(
        include_all=False, verbose=False
    )
    assert list(lines)[1:5] == [
        "Phase 1 complete: 0 regions, 0/0 nodes (100.0%)",
        "Phase 2 complete: refined 0 regions, skipped 0",
        "",
        "",
    ]
