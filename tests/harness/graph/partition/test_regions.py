"""Discovery: coverage, connectivity, and the blocks that a reader of the model would name."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.graph.builder import GraphBuilder
from harness.graph.load import load, load_proto
from harness.graph.model import Model
from harness.graph.partition.regions import Region, RegionType, discover_regions, find_branch_structure
from harness.zoo import catalog, transformer

ARITY = {"Relu": 1, "Conv": 1, "Split": 1, "Add": 2, "MatMul": 2, "Concat": 3}
node = st.sampled_from(sorted(ARITY)).flatmap(
    lambda op: st.tuples(
        st.just(op), st.lists(st.integers(0, 30), min_size=ARITY[op], max_size=ARITY[op]), st.booleans()
    )
)
specs = st.lists(node, min_size=1, max_size=40)


def loaded(builder: GraphBuilder) -> Model:
    return load_proto(builder.build(), source=builder.name, sha256="0")


def operators(model: Model, region: Region) -> str:
    return " ".join(model.nodes[index].op for index in region.node_indices())


def leaves(model: Model, root: Region) -> list[str]:
    return [operators(model, leaf) for leaf in root.iter_leaves()]


def assert_sound(model: Model, root: Region) -> None:
    """Every node in exactly one LEAF, leaves connected, boundaries right, ids in pre-order."""
    assert sorted(index for leaf in root.iter_leaves() for index in leaf.nodes) == list(range(len(model.nodes)))
    regions = list(root.walk())
    assert [region.id for region in regions] == list(range(-1, len(regions) - 1))
    for region in regions:
        inside = set(region.node_indices())
        assert region.nodes == tuple(sorted(region.nodes))
        assert bool(region.nodes) == (region.type is RegionType.LEAF)
        assert all(child.level == region.level + 1 for child in region.children)
        assert region.type is not RegionType.COMPOSITE or len(region.children) > 1
        read = {name for index in inside for name in (*model.nodes[index].inputs, *model.nodes[index].captures) if name}
        made = {name for index in inside for name in model.nodes[index].outputs if name}
        assert set(region.inputs) == {name for name in read - made if name not in model.constants}
        outside = {n for other in model.nodes if other.index not in inside for n in (*other.inputs, *other.captures)}
        assert set(region.outputs) == made & (outside | set(model.outputs))
    for leaf in root.iter_leaves():
        assert is_connected(model, leaf)


def is_connected(model: Model, leaf: Region) -> bool:
    inside, found, todo = set(leaf.nodes), set(), [leaf.nodes[0]]
    while todo:
        index = todo.pop()
        if index in found:
            continue
        found.add(index)
        node = model.nodes[index]
        near = [model.producer.get(name) for name in (*node.inputs, *node.captures)]
        near += [other.index for other in model.nodes if {*other.inputs, *other.captures} & set(node.outputs)]
        todo += [n for n in near if n in inside]
    return found == inside


@given(spec=specs, longest=st.integers(1, 12), smallest=st.integers(1, 12))
def test_any_model_is_covered_by_connected_leaves(make_model, spec, longest, smallest):
    model = make_model(spec)
    root = discover_regions(model, maximum_sequence_region_size=longest, minimum_topdown_search_size=smallest)
    assert_sound(model, root)
    assert root == discover_regions(model, maximum_sequence_region_size=longest, minimum_topdown_search_size=smallest)


@given(spec=specs, seed=st.integers(0, 1000))
def test_regions_ignore_node_order_and_names(make_model, spec, seed):
    found = []
    for model in (make_model(spec), make_model(spec, seed)):
        found.append(sorted(sorted(operators(model, leaf).split()) for leaf in discover_regions(model).iter_leaves()))
    assert found[0] == found[1]


def conv_relu(g: GraphBuilder, x: str, channels: int = 8, kernel: int = 3) -> str:
    return g.op("Relu", g.conv(x, channels, kernel))


def silu(g: GraphBuilder, x: str) -> str:
    return g.op("Mul", x, g.op("Sigmoid", x))


def leaves_of(g: GraphBuilder, output: str) -> list[str]:
    g.output(output)
    model = loaded(g)
    return leaves(model, discover_regions(model))


def image(name: str, channels: int = 8) -> tuple[GraphBuilder, str]:
    g = GraphBuilder(name)
    return g, g.input("x", (1, channels, 8, 8))


def test_small_blocks_are_leaves_with_their_epilogues():
    g, x = image("residual")
    for _ in range(3):
        x = g.op("Relu", g.op("Add", g.conv(conv_relu(g, x), 8, 3), x))
    assert leaves_of(g, x) == ["Conv Relu Conv Add Relu"] * 3
    g, x = image("silu")
    assert leaves_of(g, silu(g, g.conv(silu(g, g.conv(x, 8, 3)), 8, 1))) == ["Conv Sigmoid Mul Conv Sigmoid Mul"]
    g, x = image("squeeze")
    y = conv_relu(g, x)
    gate = g.op("Sigmoid", g.conv(conv_relu(g, g.op("GlobalAveragePool", y), 2, 1), 8, 1))
    expected = ["Conv Relu", "GlobalAveragePool Conv Relu Conv Sigmoid Mul", "Conv"]
    assert leaves_of(g, g.conv(g.op("Mul", y, gate), 8, 1)) == expected
    g, x = image("chain")
    for _ in range(9):
        x = conv_relu(g, g.op("Relu", g.conv(x, 8, 3, groups=8)), kernel=1)
    assert leaves_of(g, x) == ["Conv Relu Conv Relu"] * 9


def test_a_large_residual_block_is_a_composite():
    g, x = image("residual")
    for _ in range(2):
        y = x
        for _ in range(6):
            y = conv_relu(g, y)
        x = g.op("Relu", g.op("Add", y, x))
    g.output(x)
    model = loaded(g)
    root = discover_regions(model)
    assert [child.type for child in root.children] == [RegionType.COMPOSITE] * 2
    assert [operators(model, child) for child in root.children] == ["Conv Relu " * 6 + "Add Relu"] * 2
    assert_sound(model, root)


def test_inception_branches_are_children_before_the_concat():
    g, x = image("inception")
    y = conv_relu(g, x)
    branches = [conv_relu(g, y, kernel=1)]
    branches.append(conv_relu(g, conv_relu(g, y, kernel=1)))
    branches.append(conv_relu(g, conv_relu(g, conv_relu(g, y, kernel=1))))
    branches.append(conv_relu(g, g.op("MaxPool", y, kernel_shape=[1, 1]), kernel=1))
    g.output(conv_relu(g, g.op("Concat", *branches, axis=1)))
    model = loaded(g)
    root = discover_regions(model)
    composite = root.children[1]
    assert composite.type is RegionType.COMPOSITE
    assert sorted(operators(model, child) for child in composite.children) == [
        "Concat", "Conv Relu", "Conv Relu Conv Relu", "Conv Relu Conv Relu Conv Relu", "MaxPool Conv Relu",
    ]  # fmt: skip


def test_attention_has_its_projections_as_children():
    model = loaded(transformer.encoder(1, width=16, heads=2, tokens=4))
    root = discover_regions(model)
    attention, feed_forward = root.children[:2]
    assert [operators(model, child) for child in attention.children] == [
        "ReduceMean Sub Pow ReduceMean Add Sqrt Div Mul Add",
        operators(model, attention.children[1]),
        "Transpose Reshape MatMul Add Add",
    ]
    scores = attention.children[1]
    assert scores.type is RegionType.COMPOSITE
    assert "MatMul Add Reshape Transpose" in [operators(model, child) for child in scores.children]
    assert operators(model, scores.children[-1]) == "MatMul"
    gelu = "MatMul Add Div Erf Add Mul Mul MatMul Add Add"
    assert operators(model, feed_forward.children[1]) == gelu


def erf_gelu(g: GraphBuilder, x: str) -> str:
    gate = g.op("Add", g.op("Erf", g.op("Div", x, g.const(np.float32(2**0.5)))), g.const(np.float32(1)))
    return g.op("Mul", g.op("Mul", x, gate), g.const(np.float32(0.5)))


def decomposed_norm(g: GraphBuilder, x: str, width: int) -> str:
    centred = g.op("Sub", x, g.op("ReduceMean", x, axes=[-1]))
    variance = g.op("ReduceMean", g.op("Pow", centred, g.const(np.float32(2))), axes=[-1])
    scaled = g.op("Div", centred, g.op("Sqrt", g.op("Add", variance, g.const(np.float32(1e-5)))))
    return g.op("Add", g.op("Mul", scaled, g.const(np.ones(width, np.float32))), g.const(np.zeros(width, np.float32)))


GELU = "Div Erf Add Mul Mul"
NORM = "ReduceMean Sub Pow ReduceMean Add Sqrt Div Mul Add"


def test_erf_gelu_is_in_the_region_of_its_layer():
    g = GraphBuilder("gelu")
    x = g.input("x", (1, 4, 8))
    for _ in range(4):
        x = erf_gelu(g, g.linear(x, 8))
    assert leaves_of(g, x) == [f"MatMul Add {GELU}"] * 4


@pytest.mark.parametrize("decomposed", [False, True])
def test_a_layer_norm_is_never_cut_in_two(decomposed):
    g = GraphBuilder("norm")
    x = g.input("x", (1, 4, 8))
    for _ in range(4):
        y = decomposed_norm(g, x, 8) if decomposed else g.layer_norm(x)
        x = g.op("Add", x, g.linear(erf_gelu(g, g.linear(y, 16)), 8))
    g.output(x)
    model = loaded(g)
    root = discover_regions(model)
    norm = NORM if decomposed else "LayerNormalization"
    assert all(norm in text for text in leaves(model, root) if norm.partition(" ")[0] in text)
    # Each block is the same: the norm, then both layers around the activation.
    blocks = [[operators(model, leaf) for leaf in child.iter_leaves()] for child in root.children]
    assert blocks == [blocks[0]] * 4
    assert " ".join(blocks[0]) == f"{norm} MatMul Add {GELU} MatMul Add Add"


def test_attention_with_fused_layer_norm_is_a_composite():
    g = GraphBuilder("attention")
    x = g.input("x", (1, 4, 8))
    for _ in range(3):
        h = g.layer_norm(x)
        key = g.op("Transpose", g.linear(h, 8), perm=[0, 2, 1])
        weights = g.op("Softmax", g.op("MatMul", g.linear(h, 8), key), axis=-1)
        x = g.op("Add", x, g.linear(g.op("MatMul", weights, g.linear(h, 8)), 8))
    g.output(x)
    model = loaded(g)
    root = discover_regions(model)
    assert_sound(model, root)
    assert [child.type for child in root.children] == [RegionType.COMPOSITE] * 3
    found = [sorted(operators(model, leaf) for leaf in child.iter_leaves()) for child in root.children]
    assert found == [found[0]] * 3
    assert "MatMul Add" in found[0]  # a projection alone
    whole = discover_regions(model, minimum_topdown_search_size=11)
    # All three projections with the products between them are ten nodes: fewer than that stay together.
    assert sorted(operators(model, leaf) for leaf in whole.children[0].iter_leaves()) == [
        "LayerNormalization", "MatMul Add Add", "MatMul Add Transpose MatMul Add MatMul Softmax MatMul Add MatMul",
    ]  # fmt: skip


def test_attention_mask_input_does_not_change_regions():
    def masked(layers: int, with_mask: bool) -> Model:
        g = GraphBuilder("masked")
        x = g.input("x", (1, 4, 8))
        mask = g.op("Mul", g.input("mask", (1, 4, 4)), g.const(-1e4)) if with_mask else ""
        for _ in range(layers):
            scores = g.op("MatMul", g.linear(x, 8), g.op("Transpose", g.linear(x, 8), perm=[0, 2, 1]))
            scores = g.op("Add", scores, mask) if with_mask else g.op("Relu", scores)
            mixed = g.op("MatMul", g.op("Softmax", scores), g.linear(x, 8))
            x = g.op("Add", g.linear(mixed, 8), x)
        g.output(x)
        return loaded(g)

    plain, model = masked(3, False), masked(3, True)
    root = discover_regions(model)
    assert_sound(model, root)
    bare = [text.replace("Relu", "Add") for text in leaves(plain, discover_regions(plain))]
    assert leaves(model, root) == ["Mul", *bare]


def test_region_size_limits_hold():
    g, x = image("sizes")
    for _ in range(30):
        x = g.op("Tanh", x)
    g.output(x)
    model = loaded(g)
    sizes = [len(leaf.nodes) for leaf in discover_regions(model, maximum_sequence_region_size=7).iter_leaves()]
    assert max(sizes) == 7
    residual = loaded(catalog.resnet("resnet18", (2, 2, 2, 2)))
    split = discover_regions(residual, minimum_topdown_search_size=3)
    assert any(region.type is RegionType.COMPOSITE for region in split.walk())
    whole = discover_regions(residual, minimum_topdown_search_size=100)
    assert not any(region.type is RegionType.COMPOSITE for region in whole.walk())


@pytest.mark.parametrize("name", ["maximum_sequence_region_size", "minimum_topdown_search_size"])
def test_a_size_below_one_is_refused(make_model, name):
    with pytest.raises(ValueError, match=f"{name}: at least 1, but got 0"):
        discover_regions(make_model([("Relu", [0], True)]), **{name: 0})


def test_repeated_layers_are_found_at_any_depth():
    counts = {}
    for layers in (2, 6, 12):
        model = loaded(transformer.encoder(layers, width=8, heads=2, tokens=4))
        root = discover_regions(model)
        counts[layers] = {operators(model, region) for region in root.walk() if region is not root}
        assert len(list(root.walk())) <= 0.35 * len(model.nodes)
    assert counts[2] == counts[6] == counts[12]


def test_deep_nesting_is_cut_without_recursion(make_model):
    depth = 3000  # U-shaped: result i also goes to the Add of the mirror image
    spec = [("Relu", [0 if i == 0 else 2 + i], False) for i in range(depth)]
    spec += [("Add", [2 + depth + i, 2 + depth - i], False) for i in range(depth)]
    model = make_model(spec)
    root = discover_regions(model)
    assert sum(len(leaf.nodes) for leaf in root.iter_leaves()) == 2 * depth
    assert max(region.level for region in root.walk()) <= 33


def test_subgraphs_count_as_readers():
    g = GraphBuilder("loop")
    x = g.op("Relu", g.input("x", (1, 4)))
    inner = GraphBuilder("inner")
    inner.output(inner.op("Tanh", x, outputs=["inside"])[0], (1, 4))
    other = GraphBuilder("other")
    other.output(other.op("Sigmoid", x, outputs=["second"])[0], (1, 4))
    y = g.op("If", g.input("flag", (), "bool"), then_branch=inner.graph(), else_branch=other.graph(), outputs=["y"])[0]
    g.output(g.op("Relu", y), (1, 4))
    model = loaded(g)
    assert_sound(model, discover_regions(model))


def recurrent(sequence: str) -> Model:
    """An LSTM that is given no lengths and asked for its last state, and a Clip without a lower bound."""
    g = GraphBuilder("recurrent")
    weights = [g.const(np.full((1, 64, 16), 0.1, np.float32)) for _ in range(2)]
    bias, state = g.const(np.zeros((1, 128), np.float32)), g.const(np.zeros((1, 1, 16), np.float32))
    x = g.op("Tanh", g.input("x", (4, 1, 16)))
    _, last = g.op("LSTM", x, *weights, bias, "", state, state, hidden_size=16, outputs=["sequence", "last"])
    g.output(g.op("Clip", g.op("Relu", last), "", g.const(6.0)))
    proto = g.build()
    next(node for node in proto.graph.node if node.op_type == "LSTM").output[0] = sequence
    return load_proto(proto, source="recurrent", sha256="0")


@pytest.mark.parametrize("longest", [1, 10])
def test_omitted_outputs_and_inputs_are_not_connected(longest):
    model, named = recurrent(""), recurrent("sequence")
    root = discover_regions(model, maximum_sequence_region_size=longest)
    assert_sound(model, root)
    assert leaves(model, root) == leaves(named, discover_regions(named, maximum_sequence_region_size=longest))


@pytest.mark.assets
@pytest.mark.skipif(not os.environ.get("QDQ_ASSETS"), reason="QDQ_ASSETS is not set")
@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("deeplabv3_mnv2_voc_513", {}),
        ("deit_tiny_patch16_224", {"input": "1x3x224x224"}),
        ("mobilenet_v1_0.75_224", {"input": "1x3x224x224"}),
        ("nanodet_m_320", {}),
        ("squeezenet1.1", {"data": "1x3x224x224"}),
        ("yolox_nano", {}),
    ],
)
def test_real_models_have_sound_regions(name, shapes):
    model = load(Path(os.environ["QDQ_ASSETS"]) / "models" / f"{name}.onnx", shapes=shapes)
    root = discover_regions(model)
    assert_sound(model, root)
    assert len(list(root.walk())) <= 0.35 * len(model.nodes)
    assert np.mean([len(leaf.nodes) for leaf in root.iter_leaves()]) >= 3


def reached(successors: list[list[int]], start: int, without: int) -> set[int]:
    found, todo = set(), [start]
    while todo:
        vertex = todo.pop()
        if vertex not in found and vertex != without:
            found.add(vertex)
            todo += successors[vertex]
    return found


graphs = st.integers(1, 12).flatmap(
    lambda size: st.tuples(*[st.frozensets(st.integers(vertex + 1, size), max_size=4) for vertex in range(size)])
)


@given(graphs)
def test_branches_and_series_agree_with_post_dominators_by_every_path(drawn):
    sink, edges = len(drawn), [sorted(found) for found in drawn]
    flow, whole = find_branch_structure(edges), [*(found or [sink] for found in edges), []]
    parents = {}
    for vertex, before in enumerate(flow.series):
        for end in (*flow.branches[vertex], *([before] if before >= 0 else [])):
            assert end not in parents
            parents[end] = vertex
        after = reached(whole, before, vertex) if before >= 0 else set()
        for last in flow.branches[vertex] if before >= 0 else ():
            assert last in after
            assert before not in reached(whole, last, vertex)
    for vertex in range(sink):  # the nearest vertex without which the sink is not reached
        later = range(vertex + 1, sink + 1)
        assert parents[vertex] == next(v for v in later if v == sink or sink not in reached(whole, vertex, v))
