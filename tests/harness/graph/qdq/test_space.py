"""The space of a model: which dimensions there are, and what each acts on."""

import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_models import by_name, loaded

from harness.graph.builder import GraphBuilder
from harness.graph.load import load
from harness.graph.model import Model
from harness.graph.partition.regions import discover_regions
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import ONNXRUNTIME, OPENVINO, TENSORRT
from harness.graph.rules.points import add_required_edges, find_points
from harness.zoo import transformer
from search.space import Edge, Space

ALL_KINDS = ("node_input", "child_input", "output")
DIALECTS = [TENSORRT, OPENVINO, ONNXRUNTIME]
ARITY = {"Relu": 1, "Sigmoid": 1, "Add": 2, "MatMul": 2, "Concat": 3}
node = st.sampled_from(sorted(ARITY)).flatmap(
    lambda op: st.tuples(
        st.just(op), st.lists(st.integers(0, 30), min_size=ARITY[op], max_size=ARITY[op]), st.booleans()
    )
)


def encoder(layers: int) -> Model:
    g = transformer.encoder(layers, width=8, heads=2, tokens=4)
    return loaded(g, g.name)


def residuals(count: int) -> Model:
    g = GraphBuilder("residuals")
    x = g.op("Relu", g.conv(g.input("x", (1, 3, 8, 8)), 8, 3))
    for _ in range(count):
        x = g.op("Relu", g.op("Add", g.conv(g.op("Relu", g.conv(x, 8, 3)), 8, 3), x))
    g.output(g.gemm(g.op("Flatten", g.op("GlobalAveragePool", x)), 10), name="logits")
    return loaded(g, "residuals")


def edges_of(space: Space) -> set[Edge]:
    return {edge for dimension in space.dimensions for edge in dimension.edges}


@settings(max_examples=60)
@given(spec=st.lists(node, min_size=1, max_size=25), dialect=st.sampled_from(DIALECTS))
def test_node_inputs_partition_the_legal_edges(make_model, spec, dialect):
    """Each edge belongs to one dimension, except those that a fault of the runtime adds to others (`both_sides`)."""
    model = make_model(spec)
    points = find_points(model, dialect)
    legal = [edge for found in points for point in found for edge in point.edges]
    for sharing in ("pattern", "region"):
        space = build_space(model, dialect, sharing=sharing, kinds=("node_input",))
        acted = Counter(edge for dimension in space.dimensions for edge in dimension.edges)
        assert sorted(acted) == sorted(legal)
        required = {edge for each in legal for edge in add_required_edges(model, dialect, points, [each]) - {each}}
        assert {edge for edge, count in acted.items() if count > 1} <= required
    space = build_space(model, dialect, kinds=ALL_KINDS)
    assert len({frozenset(d.edges) for d in space.dimensions}) == len(space)
    assert {edge for edge in edges_of(space) if edge.consumer} == set(legal)


def meaning(model: Model, size: int = 2) -> list[tuple[object, ...]]:
    """Every dimension by name with what it acts on, said without names of the file."""
    root = discover_regions(model, maximum_sequence_region_size=size, minimum_topdown_search_size=size)
    op = {node.name: node.op for node in model.nodes}
    return sorted(
        (d.name, d.role, d.choices, sorted((op.get(edge.consumer, ""), edge.slot) for edge in d.edges))
        for d in build_space(model, OPENVINO, root=root, kinds=ALL_KINDS).dimensions
    )


@settings(max_examples=60)
@given(spec=st.lists(node, min_size=1, max_size=25), seed=st.integers(0, 1000))
def test_dimension_names_ignore_node_order_and_names(make_model, spec, seed):
    assert meaning(make_model(spec)) == meaning(make_model(spec, seed))


def gates(first: str) -> Model:
    """Blocks that begin with a Tanh and a Sigmoid of two tensors, one of which stands first in the file."""
    g = GraphBuilder("gates")
    x = g.input("x", (1, 4, 8))
    side = g.op("Relu", x)
    for _ in range(3):
        read = {"Tanh": x, "Sigmoid": side}
        made = {op: g.op(op, read[op]) for op in sorted(read, key=first.__ne__)}
        y = g.op("Sub", made["Tanh"], made["Sigmoid"])
        for _ in range(6):
            y = g.linear(y, 8)
        x = g.op("Add", y, x)
    g.output(x)
    return loaded(g, "gates")


def test_child_inputs_are_numbered_by_the_pattern():
    models = [gates("Tanh"), gates("Sigmoid")]
    assert [next(n.op for n in m.nodes if n.op in ("Tanh", "Sigmoid")) for m in models] == ["Tanh", "Sigmoid"]
    assert meaning(models[0], size=10) == meaning(models[1], size=10)


def test_sharing_by_pattern_or_region():
    model = residuals(3)
    shared, apart = build_space(model, OPENVINO), build_space(model, OPENVINO, sharing="region")
    blocks = [d for d in shared.dimensions if d.role == "linear" and len(d.edges) == 6]
    assert len(blocks) == 2  # two convolutions of the block, in three blocks with data and weight
    assert len({d.group for d in blocks}) == 1
    assert len([d for d in apart.dimensions if d.role == "linear"]) == 1 + 2 * 3 + 1
    assert edges_of(shared) == edges_of(apart)
    assert shared.digest(shared.quantize_all()) == apart.digest(apart.quantize_all())
    assert len(apart.groups) == len(list(discover_regions(model).iter_leaves()))


def test_dimension_names_groups_and_order():
    model = residuals(2)
    space = build_space(model, OPENVINO)
    first = space.dimensions[0]
    assert first.name == f"{first.group}/node_input/0.0"
    assert len(first.group) == 8
    assert "x" in {edge.tensor for edge in first.edges}
    position = {node.name: node.index for node in model.nodes}
    starts = [min(position[edge.consumer] for edge in d.edges) for d in space.dimensions]
    groups = [starts[indices[0]] for indices in space.groups.values()]
    assert groups == sorted(groups)


def test_costs_are_shares_of_the_work():
    for model in (residuals(2), encoder(2)):
        space = build_space(model, TENSORRT)
        assert sum(d.cost for d in space.dimensions) == pytest.approx(1.0)
        assert all((d.cost > 0) == (d.role == "linear") for d in space.dimensions)


def test_output_points_reach_all_consumers_and_model_outputs():
    model = residuals(2)
    plain = build_space(model, ONNXRUNTIME, kinds=("node_input",))
    space = build_space(model, ONNXRUNTIME)
    added = [d for d in space.dimensions if d.kind == "output"]
    assert Edge("logits", "", 0) in edges_of(space) - edges_of(plain)
    block = next(d for d in added if d.role == "other")
    consumers = {model.nodes[i].op for e in block.edges for i, _ in model.consumers[e.tensor]}
    assert {"Conv", "Add"} <= consumers
    for edge in block.edges:  # data of a linear operator never comes without its weight
        if model.nodes[[n.name for n in model.nodes].index(edge.consumer)].op in ONNXRUNTIME.linear_ops:
            assert {e.slot for e in block.edges if e.consumer == edge.consumer} == {0, 1}


def test_model_outputs_stay_float_by_dialect():
    consumers = {edge.consumer for edge in edges_of(build_space(residuals(2), TENSORRT, kinds=ALL_KINDS))}
    assert consumers
    assert "" not in consumers  # the consumer of an output of the model


def test_output_read_by_a_subgraph_stays_float():
    g = GraphBuilder("captured")
    x = g.output(g.gemm(g.input("x", (1, 4)), 4), name="shared")
    inner = GraphBuilder("inner")
    inner.output(inner.op("Tanh", x), (1, 4))
    g.output(g.op("If", g.input("flag", (), "bool"), then_branch=inner.graph(), else_branch=inner.graph()), (1, 4))
    model = loaded(g)
    assert "shared" in model.captured
    assert Edge("shared", "", 0) not in edges_of(build_space(model, ONNXRUNTIME))


def test_child_inputs_join_edges_of_several_tensors():
    model = encoder(2)
    space = build_space(model, OPENVINO, kinds=("node_input", "child_input"))
    children = [d for d in space.dimensions if d.kind == "child_input"]
    assert children
    assert any(d.role == "linear" and len({e.tensor for e in d.edges}) > 1 for d in children)


def test_precisions_of_a_point_are_the_legal_ones():
    g = GraphBuilder("grouped")
    g.output(g.conv(g.conv(g.input("x", (1, 8, 4, 4)), 8, 3, groups=8), 8, 1))
    model = loaded(g)
    space = build_space(model, TENSORRT, precisions=("fp8", "int8"))
    assert [d.choices for d in space.dimensions] == [("float", "int8"), ("float", "fp8", "int8")]
    assert [len(build_space(model, each, precisions=("fp8",))) for each in (TENSORRT, ONNXRUNTIME)] == [1, 0]
    integers = GraphBuilder("integers")
    integers.output(integers.op("Neg", integers.input("x", (4,), "int64")))
    assert len(build_space(loaded(integers), OPENVINO)) == 0


def test_invalid_kinds_and_sharing_are_refused():
    model = residuals(1)
    with pytest.raises(ValueError, match="kinds: among node_input, child_input, output, but got edge"):
        build_space(model, OPENVINO, kinds=("edge",))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sharing: 'pattern' or 'region', but got 'none'"):
        build_space(model, OPENVINO, sharing="none")  # type: ignore[arg-type]


@pytest.mark.assets
@pytest.mark.skipif(not os.environ.get("QDQ_ASSETS"), reason="QDQ_ASSETS is not set")
@pytest.mark.parametrize(("name", "shapes"), [("yolox_nano", {}), ("squeezenet1.1", {"data": "1x3x224x224"})])
@by_name("dialect", DIALECTS)
def test_real_models_have_points_at_all_linear_operators(name, shapes, dialect):
    model = load(Path(os.environ["QDQ_ASSETS"]) / "models" / f"{name}.onnx", shapes=shapes)
    space = build_space(model, dialect)
    linear = [n.name for n in model.nodes if n.op in dialect.linear_ops]
    assert {e.consumer for e in edges_of(space)} >= set(linear)
    assert sum(d.cost for d in space.dimensions if d.kind == "node_input") == pytest.approx(1.0)
