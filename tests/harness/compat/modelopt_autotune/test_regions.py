"""Regions, points and patterns with the handles that ModelOpt's users know, held against what the engine finds."""

import itertools

import onnx_graphsurgeon as gs
import pytest

from harness.compat.modelopt_autotune import (
    ChildRegionInputInsertionPoint,
    ChildRegionOutputInsertionPoint,
    CombinedRegionSearch,
    Config,
    NodeInputInsertionPoint,
    QDQAutotuner,
    Region,
    RegionPattern,
    RegionType,
    ResolvedInsertionPoint,
)
from harness.compat.modelopt_autotune.region_inspect import main as inspect
from harness.compat.modelopt_autotune.regions import from_graph, to_graph
from harness.graph.partition.patterns import find_patterns
from harness.graph.partition.regions import discover_regions


@pytest.fixture(scope="module")
def autotuner(model):
    made = QDQAutotuner(model)
    made.initialize(Config())
    return made


def test_regions_go_to_the_engine_and_back_with_the_same_patterns(autotuner):
    model = autotuner.graph.model
    root = discover_regions(model)
    again, _ = to_graph(model, [from_graph(child) for child in root.children])
    expected = [(p.signature, p.order) for p in find_patterns(model, root)]
    assert [(p.signature, p.order) for p in find_patterns(model, again)] == expected


def test_leaf_regions_come_first_and_hold_every_node_once(autotuner):
    kinds = [region.type for region in autotuner.regions]
    assert kinds == sorted(kinds, key=lambda kind: kind is not RegionType.LEAF)
    nodes = sorted(node for region in autotuner.regions for node in region.nodes)
    assert nodes == list(range(len(autotuner.graph.nodes)))
    assert len({region.id for region in autotuner.regions}) == len(autotuner.regions)


def test_the_search_takes_any_kind_of_graph(model, autotuner):
    sizes = [
        [region.get_size_of_region_and_descendants() for region in CombinedRegionSearch(graph).search_regions()]
        for graph in (model, gs.import_onnx(model), autotuner.graph)
    ]
    assert sizes[0] == sizes[1] == sizes[2]
    small = CombinedRegionSearch(model, maximum_sequence_region_size=1, minimum_topdown_search_size=1).search_regions()
    leaves = [region for top in small for region in top.walk() if not region.children]
    assert len(leaves) >= len(sizes[0])


def test_a_pattern_matches_its_regions_node_by_node(autotuner):
    graph = autotuner.graph
    leaves = [region for region in autotuner.regions if region.type is RegionType.LEAF]
    seen = 0
    for first, second in itertools.combinations(leaves, 2):
        pattern = RegionPattern.from_region(first, graph)
        if pattern == RegionPattern.from_region(second, graph):
            seen += 1
            ops = [[graph.nodes[node].op for node in pattern.matches(region, graph)] for region in (first, second)]
            assert ops[0] == ops[1]
            scheme = pattern.get_full_insertion_scheme(first, graph)
            scheme.region_outputs = []  # who reads them is outside of the pattern
            resolved = [pattern.matches(region, graph, scheme) for region in (first, second)]
            assert len(resolved[0]) == len(resolved[1]) > 0 or not scheme.node_inputs
        else:
            assert pattern.matches(second, graph) is None
            assert pattern.matches(second, graph, pattern.get_full_insertion_scheme(first, graph)) == set()
            with pytest.raises(ValueError, match="has another pattern than"):
                pattern.get_full_insertion_scheme(second, graph)
    assert seen


def test_patterns_say_what_they_are(autotuner):
    region = autotuner.regions[0]
    pattern = RegionPattern.from_region(region, autotuner.graph)
    assert pattern.is_leaf
    assert not pattern.is_composite
    assert not pattern.is_empty
    assert pattern.size == len(region.nodes)
    assert pattern.matches(RegionPattern(pattern.signature, 0))
    assert pattern.get_short_signature(10) == f"{pattern.signature[:7]}..."
    assert len({pattern, RegionPattern(pattern.signature, pattern.size)}) == 1
    assert pattern.format_tree(region, autotuner.graph).startswith(f"Region {region.id}: {pattern.signature}")
    with pytest.raises(ValueError, match="a region matches within a graph"):
        pattern.matches(region)


def test_a_linear_operator_takes_data_and_weight_at_one_point(autotuner):
    graph = autotuner.graph
    region = next(r for r in autotuner.regions if any(graph.nodes[n].op == "Conv" for n in r.nodes))
    order = graph.order(region)
    place = next(i for i, node in enumerate(order) if graph.nodes[node].op == "Conv")
    conv = graph.nodes[order[place]]
    resolved = NodeInputInsertionPoint(place, 0).resolve(region, graph)
    assert resolved == {ResolvedInsertionPoint(conv.inputs[slot], conv.index, slot) for slot in (0, 1)}
    assert NodeInputInsertionPoint(place, 1).resolve(region, graph) == set()
    assert NodeInputInsertionPoint(place, 0) in NodeInputInsertionPoint.collect_from_region(region, graph)


def test_points_go_through_plain_values():
    for point in (
        NodeInputInsertionPoint(1, 0),
        ChildRegionInputInsertionPoint(2, 1),
        ChildRegionOutputInsertionPoint(None, 3, 0),
        ResolvedInsertionPoint("x", 1, 0),
    ):
        assert type(point).from_dict(point.to_dict()) == point
    assert ChildRegionOutputInsertionPoint(0, None, 0).address is None


def test_children_have_one_parent_and_never_contain_themselves():
    one, two, three = (Region(number, 0, RegionType.COMPOSITE) for number in range(3))
    one.add_child(two)
    two.add_child(three)
    three.add_child(one)
    assert three.children == []
    one.add_child(three)
    assert (two.children, three.parent) == ([], one)
    three.nodes, two.nodes = {4}, {1, 2}
    assert one.get_region_nodes_and_descendants() == {1, 2, 4}
    assert one.contains_node_within_region_and_descendants(4)
    assert not one.contains_node(4)
    assert one.get_children(sort=True) == [three, two]
    assert one.remove_child(two)
    assert not one.remove_child(two)
    one.merge(two)
    assert one.get_nodes(sort=True) == [1, 2]
    assert "nodes=2" in repr(one)


def test_inspection_under_the_known_flags(folder, capsys):
    assert inspect(["--model", "model.onnx", "--include-all-regions", "--max-sequence-size", "4"]) == 0
    assert "LEAF" in capsys.readouterr().out
    assert inspect(["--model", "none.onnx"]) == 2
    assert "region_inspect: none.onnx: no such file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        inspect(["--model", "model.onnx", "--max-sequence-size", "0"])
    assert "--max-sequence-size is at least 1, " in capsys.readouterr().err
