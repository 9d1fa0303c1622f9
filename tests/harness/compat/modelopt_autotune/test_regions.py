"""Regions, points and patterns under ModelOpt's names, compared with those of `harness.graph`."""

import io
import itertools

import numpy as np
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
from harness.compat.modelopt_autotune.insertion_points import (
    get_tensor_consumer_node_indices,
    has_quantizable_operations,
    merge_resolved_insertion_points,
    resolve_region_io_insertion_points,
    skip_invalid_insertion_points,
)
from harness.compat.modelopt_autotune.region_inspect import inspect_region_search
from harness.compat.modelopt_autotune.region_inspect import main as inspect
from harness.compat.modelopt_autotune.region_search import RegionPartitioner, TopDownRegionBuilder


@pytest.fixture(scope="module")
def autotuner(model):
    made = QDQAutotuner(model)
    made.initialize(Config())
    return made


def test_region_search_accepts_all_graph_types(model, autotuner):
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


def test_linear_operator_has_one_point_for_data_and_weight(autotuner):
    graph = autotuner.graph
    region = next(r for r in autotuner.regions if any(graph.nodes[n].op == "Conv" for n in r.nodes))
    order = graph.order(region)
    place = next(i for i, node in enumerate(order) if graph.nodes[node].op == "Conv")
    conv = graph.nodes[order[place]]
    resolved = NodeInputInsertionPoint(place, 0).resolve(region, graph)
    assert resolved == {ResolvedInsertionPoint(conv.inputs[slot], conv.index, slot) for slot in (0, 1)}
    assert NodeInputInsertionPoint(place, 1).resolve(region, graph) == set()
    assert NodeInputInsertionPoint(place, 0) in NodeInputInsertionPoint.collect_from_region(region, graph)


def test_region_children_have_one_parent_and_no_cycles():
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


def test_region_inspect_accepts_modelopts_flags(folder, capsys):
    assert inspect(["--model", "model.onnx", "--include-all-regions", "--max-sequence-size", "4"]) == 0
    assert "LEAF" in capsys.readouterr().out
    assert inspect(["--model", "none.onnx"]) == 1
    assert "region_inspect: none.onnx: no such file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        inspect(["--model", "model.onnx", "--max-sequence-size", "0"])
    assert "--max-sequence-size is at least 1, " in capsys.readouterr().err
    found = inspect_region_search("model.onnx")
    assert 0 < len(found) <= len(inspect_region_search("model.onnx", include_all_regions=True))
    assert "LEAF" in capsys.readouterr().out


@pytest.fixture(scope="module")
def surgeon(model):
    """The small model as a graph of onnx-graphsurgeon."""
    return gs.import_onnx(model)


def test_leaf_regions_come_first_and_hold_every_node_once(surgeon):
    made = QDQAutotuner(surgeon)
    made.initialize(Config(maximum_sequence_region_size=2, minimum_topdown_search_size=2))
    kinds = [region.type for region in made.regions]
    assert RegionType.COMPOSITE in kinds
    assert kinds == sorted(kinds, key=lambda kind: kind is not RegionType.LEAF)
    assert sorted(n for region in made.regions for n in region.nodes) == list(range(len(made.graph.nodes)))


def leaf(*nodes, inputs=(), outputs=()):
    made = Region(0, 0, RegionType.LEAF)
    made.nodes, made.inputs, made.outputs = set(nodes), list(inputs), list(outputs)
    return made


def test_every_search_of_a_graph_has_each_node_once(surgeon):
    everything = list(range(len(surgeon.nodes)))
    leaves = RegionPartitioner(surgeon).partition_graph()
    assert sorted(node for region in leaves for node in region.nodes) == everything
    assert all(region.type is RegionType.LEAF and region.parent is None for region in leaves)
    search = CombinedRegionSearch(surgeon, maximum_sequence_region_size=2, minimum_topdown_search_size=2)
    built = TopDownRegionBuilder(surgeon, search.root, 100, 2, 2).build_composite_region()
    assert built.type is RegionType.COMPOSITE
    assert sorted(built.get_region_nodes_and_descendants()) == everything
    assert all(region.id >= 100 for region in built.walk())
    assert [t.name for t in surgeon.outputs] == built.outputs
    part = leaves[0]
    assert TopDownRegionBuilder(surgeon, part).build_composite_region().get_region_nodes_and_descendants() == part.nodes
    search.compute_region_boundaries(part, include_constant=True)
    assert len(part.inputs) > len(leaves[1].inputs)
    shown = io.StringIO()
    search.print_tree(built, max_items=0, file=shown)
    assert f"Region {built.id} (Level 0, Type: COMPOSITE)" in shown.getvalue()
    assert "and 1 more" in shown.getvalue()


def test_graph_patterns_depend_on_operators_and_wiring(surgeon):
    convs = [index for index, node in enumerate(surgeon.nodes) if node.op == "Conv"]
    one, two = leaf(convs[1], convs[1] + 1), leaf(convs[3], convs[3] + 1)
    pattern = RegionPattern.from_region(one, surgeon)
    assert pattern == RegionPattern.from_region(two, surgeon) != RegionPattern.from_region(leaf(convs[0]), surgeon)
    assert (str(pattern)[:5], pattern.size) == ("Conv(", 2)
    assert (pattern.is_leaf, pattern.is_composite, pattern.is_empty) == (True, False, False)
    assert pattern.matches(RegionPattern(pattern.signature, 0))
    assert len({pattern, RegionPattern(pattern.signature, 2)}) == 1
    assert pattern.get_short_signature(10) == f"{pattern.signature[:7]}..."
    assert pattern.format_tree(one, surgeon).startswith(f"Region 0: {pattern.signature}")
    with pytest.raises(ValueError, match="within a graph"):
        pattern.matches(one)
    scheme = pattern.get_full_insertion_scheme(one, surgeon)
    assert scheme.node_inputs == [NodeInputInsertionPoint(0, 0)], "the operator after it is computed within"
    assert {p.input_index for p in pattern.matches(two, surgeon, scheme)} == {0, 1}
    parent = Region(9, 1, RegionType.COMPOSITE)
    parent.add_child(one)
    assert RegionPattern.from_region(parent, surgeon).is_composite
    assert RegionPattern.from_region(parent, surgeon).matches(parent, surgeon) == [convs[1], convs[1] + 1]
    assert RegionPattern.from_region(leaf(), surgeon).is_empty
    with pytest.raises(ValueError, match="has"):
        RegionPattern.from_region(leaf(10_000), surgeon)


def test_points_of_a_graph_resolve_to_the_readers_of_a_tensor(surgeon):
    add = next(index for index, node in enumerate(surgeon.nodes) if node.op == "Add")
    residual = surgeon.nodes[add].inputs[1].name
    readers = get_tensor_consumer_node_indices(surgeon)[residual]
    found = resolve_region_io_insertion_points(None, surgeon, residual)
    assert {point.node_index for point in found} == set(readers)
    assert merge_resolved_insertion_points(surgeon, found) == {ResolvedInsertionPoint(residual)}
    assert merge_resolved_insertion_points(surgeon, set(list(found)[:1])) == set(list(found)[:1])
    parent = Region(1, 1, RegionType.COMPOSITE)
    child = leaf(add, inputs=[residual], outputs=[surgeon.nodes[add].outputs[0].name])
    parent.add_child(child)
    parent.outputs = child.outputs
    (point,) = ChildRegionInputInsertionPoint.collect_from_region(parent, surgeon)
    assert point.resolve(parent, surgeon) == found
    assert point.resolve(child, surgeon) == set()
    (out,) = ChildRegionOutputInsertionPoint.collect_from_region(parent, surgeon)
    (same,) = ChildRegionOutputInsertionPoint.collect_from_region(child, surgeon)
    assert out.resolve(parent, surgeon) == same.resolve(child, surgeon) != set()
    assert NodeInputInsertionPoint(0, 1).resolve(child, surgeon) == {ResolvedInsertionPoint(residual, add, 1)}


@pytest.mark.parametrize(
    ("op", "dtype", "shape", "slot", "skipped"),
    [
        ("MatMul", np.float32, (1, 64), 0, False), ("MatMul", np.float32, (1, 64), 1, True),
        ("Add", np.float32, (1,), 0, True), ("Add", np.int32, (1, 64), 0, True),
        ("BatchNormalization", np.float32, (64,), 1, True), ("Resize", np.float32, (64,), 2, True),
        ("Equal", np.float32, (1, 64), 0, True), ("Shape", np.float32, (1, 64), 0, True),
    ],
)  # fmt: skip
def test_skip_invalid_insertion_points_of_operators(op, dtype, shape, slot, skipped):
    inputs = [gs.Variable(f"other{n}", np.float32, (1, 64)) for n in range(3)]
    inputs[slot] = gs.Variable("x", dtype, shape)
    node = gs.Node(op, inputs=inputs, outputs=[gs.Variable("y")])
    graph = gs.Graph([node])
    assert skip_invalid_insertion_points(graph, "x", node) is skipped
    assert skip_invalid_insertion_points(graph, "x", leaf(0)) is skipped
    assert has_quantizable_operations(leaf(0), graph) is (op in ("Add", "MatMul", "Resize"))
