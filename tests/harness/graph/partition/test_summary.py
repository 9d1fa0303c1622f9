"""What `qdq inspect regions` shows."""

import json

from harness.graph.builder import GraphBuilder
from harness.graph.load import load_proto
from harness.graph.model import Model
from harness.graph.partition.patterns import find_patterns
from harness.graph.partition.regions import Region, discover_regions
from harness.graph.partition.summary import (
    TreeOptions,
    describe_phases,
    describe_summary,
    describe_tree,
    summarize_discovery,
    to_json,
)


def inception() -> tuple[Model, Region]:
    g = GraphBuilder("inception")
    x = g.op("Tanh", g.input("x", (1, 8, 8, 8)))
    branches = [x, x, x]
    for _ in range(2):
        branches = [g.op("Relu", g.conv(y, 8, 3)) for y in branches]
    g.output(g.op("Concat", *branches, axis=1))
    model = load_proto(g.build(), source="inception", sha256="0")
    return model, discover_regions(model)


def test_summary_counts_regions_and_patterns():
    model, root = inception()
    figures = summarize_discovery(model, root, find_patterns(model, root))
    assert (figures.nodes, figures.covered, figures.coverage) == (14, 14, 1.0)
    assert (figures.top, figures.refined) == (2, 1)
    assert (figures.leaves, figures.composites) == (5, 1)
    assert (figures.patterns, figures.leaf_patterns) == (4, 3)
    assert figures.histogram == ((1, 2), (4, 3))


def test_phase_and_summary_lines():
    model, root = inception()
    figures = summarize_discovery(model, root, find_patterns(model, root))
    assert describe_phases(figures) == [
        "Phase 1 complete: 2 regions, 14/14 nodes (100.0%)",
        "Phase 2 complete: refined 1 regions, skipped 1",
    ]
    assert describe_summary(figures) == [
        "Summary: 6 regions (5 LEAF, 1 COMPOSITE), 14/14 nodes (100.0%)",
        "Patterns: 4 (3 of LEAF regions)",
        "LEAF region sizes: min=1, max=4, avg=2.8",
        "Size distribution:",
        "     1 nodes: ██ (2 regions)",
        "     4 nodes: ███ (3 regions)",
    ]


def test_tree_shows_regions_with_nodes_inputs_and_outputs():
    model, root = inception()
    patterns = find_patterns(model, root)
    lines = [
        line for line in describe_tree(root, model, patterns, TreeOptions(include_all=True)) if "Pattern" not in line
    ]
    assert lines[:5] == [
        "├─ Region 0 (Level 0, Type: LEAF)",
        "│  ├─ Direct nodes: 1",
        "│  ├─ Nodes, a sequence: Tanh",
        "│  ├─ Inputs: 1 tensors",
        "│  └─ Outputs: 1 tensors",
    ]
    assert lines[5:12] == [
        "├─ Region 1 (Level 0, Type: COMPOSITE)",
        "│  ├─ Direct nodes: 0",
        "│  ├─ Total nodes (recursive): 13",
        "│  ├─ Children: 4",
        "│  ├─ Inputs: 1 tensors",
        "│  └─ Outputs: 1 tensors",
        "│    ├─ Region 2 (Level 1, Type: LEAF)",
    ]
    assert "│    │  ├─ Nodes, a sequence: Conv, Relu, Conv, Relu" in lines


def test_tree_omits_and_counts_unquantizable_regions():
    model, root = inception()
    lines = describe_tree(root, model, find_patterns(model, root), TreeOptions())
    assert "├─ Region 0 (Level 0, Type: LEAF)" not in lines
    assert lines[-1] == "2 LEAF regions without quantizable operators are left out: --include-all-regions"


def test_verbose_tree_names_nodes_tensors_and_leaf_kind():
    g = GraphBuilder("silu")
    x = g.conv(g.input("x", (1, 3, 8, 8)), 4, 3)
    g.output(g.op("Mul", x, g.op("Sigmoid", x)), name="y")
    model = load_proto(g.build(), source="silu", sha256="0")
    root = discover_regions(model)
    lines = describe_tree(root, model, find_patterns(model, root), TreeOptions(verbose=True))
    assert any("a convergence of branches: Conv, Sigmoid, Mul" in line for line in lines)
    assert any(line.endswith("- Node 0: Conv (Conv)") for line in lines)
    assert any(line.endswith("- y") for line in lines)


def test_json_holds_summary_histogram_and_regions():
    model, root = inception()
    patterns = find_patterns(model, root)
    found = json.loads(json.dumps(to_json(model, root, patterns)))
    assert found["model"] == "inception"
    assert found["summary"]["leaves"] == 5
    assert found["histogram"] == {"1": 2, "4": 3}
    by_id = {region["id"]: region for region in found["regions"]}
    assert by_id[2]["parent"] == 1
    assert by_id[-1]["parent"] is None
    assert sorted(name for region in by_id.values() for name in region["nodes"]) == sorted(n.name for n in model.nodes)
    signatures = {pattern["signature"] for pattern in found["patterns"]}
    assert {region["pattern"] for region in by_id.values()} == signatures


def test_summary_of_a_model_without_nodes():
    empty = Model(proto=inception()[0].proto, source="empty", sha256="0", nodes=(), types={})
    figures = summarize_discovery(empty, discover_regions(empty), find_patterns(empty, discover_regions(empty)))
    assert figures.coverage == 1.0
    assert describe_phases(figures)[0] == "Phase 1 complete: 0 regions, 0/0 nodes (100.0%)"
    assert (
        describe_tree(discover_regions(empty), empty, find_patterns(empty, discover_regions(empty)), TreeOptions())
        == []
    )
