"""Regions cover a model and are the blocks that a reader would name; patterns are isomorphism classes of them.

Isomorphism is checked against another implementation (VF2++, of networkx).
"""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_models import loaded

from harness.graph.builder import GraphBuilder
from harness.graph.load import load, load_proto
from harness.graph.model import Model, Node
from harness.graph.partition.patterns import find_patterns
from harness.graph.partition.regions import BranchStructure, Region, RegionType, discover_regions
from harness.graph.rules.operator_sets import LINEAR_OPS
from harness.zoo import catalog, transformer

ARITY = {
    "Relu": 1, "Softmax.0": 1, "Softmax.1": 1, "Split.1": 1, "Add": 2, "MatMul": 2, "Concat.1": 3, "If.relu": 3,
    "If.tanh": 3,
}  # fmt: skip


def nodes(last: int) -> st.SearchStrategy[tuple[str, list[int], bool]]:
    """Strategy of a node whose inputs are earlier tensors, an omitted (-1), a constant (-2) or an integer one (-3)."""
    return st.sampled_from(sorted(ARITY)).flatmap(
        lambda op: st.tuples(
            st.just(op), st.lists(st.integers(-3, last), min_size=ARITY[op], max_size=ARITY[op]), st.booleans()
        )
    )


specs = st.lists(nodes(30), min_size=1, max_size=30)
small_specs = st.lists(nodes(5), min_size=2, max_size=5)
stacks = st.lists(st.integers(0, 99), min_size=1, max_size=6)
"""Motifs (attention, residual, inception, ...) by number."""


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
    assert len({operators(model, child) for child in root.children}) == 1
    assert "MatMul Add" in leaves(model, root)  # a projection alone
    # All three projections with the products between them are ten nodes: fewer than that stay together.
    whole = discover_regions(model, minimum_topdown_search_size=11)
    assert leaves(model, whole).count("MatMul Add Transpose MatMul Add MatMul Softmax MatMul Add MatMul") == 3


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


def test_deep_nesting_is_cut_without_recursion(make_model):
    depth = 3000  # U-shaped: result i also goes to the Add of the mirror image
    spec = [("Relu", [0 if i == 0 else 2 + i], False) for i in range(depth)]
    spec += [("Add", [2 + depth + i, 2 + depth - i], False) for i in range(depth)]
    model = make_model(spec)
    root = discover_regions(model)
    assert sum(len(leaf.nodes) for leaf in root.iter_leaves()) == 2 * depth
    assert max(region.level for region in root.walk()) <= 33


def test_omitted_outputs_and_inputs_are_not_connected():
    """An LSTM that is given no lengths and asked for its last state, and a Clip without a lower bound."""
    trees = []
    for sequence in ("", "sequence"):
        g = GraphBuilder("recurrent")
        weights = [g.const(np.full((1, 64, 16), 0.1, np.float32)) for _ in range(2)]
        bias, state = g.const(np.zeros((1, 128), np.float32)), g.const(np.zeros((1, 1, 16), np.float32))
        x = g.op("Tanh", g.input("x", (4, 1, 16)))
        _, last = g.op("LSTM", x, *weights, bias, "", state, state, hidden_size=16, outputs=["sequence", "last"])
        g.output(g.op("Clip", g.op("Relu", last), "", g.const(6.0)))
        proto = g.build()
        next(node for node in proto.graph.node if node.op_type == "LSTM").output[0] = sequence
        model = load_proto(proto, source="recurrent", sha256="0")
        for longest in (1, 10):
            root = discover_regions(model, maximum_sequence_region_size=longest)
            assert_sound(model, root)
            trees.append(leaves(model, root))
    assert trees[:2] == trees[2:]


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
    flow, whole = BranchStructure(edges), [*(found or [sink] for found in edges), []]
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


def whole(model: Model, *, children: tuple[Region, ...] = ()) -> Region:
    """One LEAF of all nodes, however many sinks it has."""
    return Region(
        id=0,
        type=RegionType.LEAF,
        level=0,
        nodes=tuple(range(len(model.nodes))),
        children=children,
        inputs=model.inputs,
        outputs=model.outputs,
    )


def signature(model: Model) -> str:
    (pattern,) = find_patterns(model, whole(model))
    return pattern.signature


def kinds(model: Model, node: Node) -> list[str]:
    """Kind of each input apart from its connection: constant, type of a tensor, omitted."""
    found = []
    for slot, name in enumerate(node.inputs):
        if name in model.constants:
            rank = len(model.constants[name].dims) if node.op in LINEAR_OPS and slot < 2 else ""
            found.append(f"constant {rank}")
        else:
            found.append(model.types[name].dtype if name else "")
    while found and not found[-1]:  # omitted at the end is the same as not there
        found.pop()
    return found


def described(model: Model, node: Node) -> str:
    return f"{node.op} {sorted(node.attributes.items())} {node.body} {kinds(model, node)} {len(node.captures)}"


def reads(model: Model, node: Node) -> list[str]:
    return [name for name in (*node.inputs, *node.captures) if name and name not in model.constants]


def is_isomorphism(first: Model, second: Model, order: tuple[tuple[int, ...], tuple[int, ...]]) -> bool:
    """Whether nodes match position by position: operator, attributes, wiring of each input, results that leave."""
    names: dict[str, str] = {}
    back: dict[str, str] = {}
    for i, j in zip(*order, strict=True):
        one, two = first.nodes[i], second.nodes[j]
        if described(first, one) != described(second, two):
            return False
        tensors = [
            *zip(reads(first, one), reads(second, two), strict=True),
            *zip(one.outputs, two.outputs, strict=True),
        ]
        for a, b in tensors:
            if (a in first.outputs) != (b in second.outputs):
                return False
            if names.setdefault(a, b) != b or back.setdefault(b, a) != a:
                return False
    return all((a in first.producer) == (b in second.producer) for a, b in names.items())


def plain_graph(model: Model) -> Any:
    """The model as a graph with labels on its vertices alone: nodes, their reads and results, activations."""
    graph = nx.DiGraph()
    for node in model.nodes:
        graph.add_node(node.index, label=described(model, node))
        for slot, name in enumerate(reads(model, node)):
            graph.add_node((node.index, "read", slot), label=f"read {slot}")
            graph.add_node(name, label="tensor")
            graph.add_edges_from([(name, (node.index, "read", slot)), ((node.index, "read", slot), node.index)])
        for place, name in enumerate(node.outputs):
            graph.add_node((node.index, "made", place), label=f"made {place} {name in model.outputs}")
            graph.add_node(name, label="tensor")
            graph.add_edges_from([(node.index, (node.index, "made", place)), ((node.index, "made", place), name)])
    return graph


def are_isomorphic(first: Model, second: Model) -> bool:
    one, two = plain_graph(first), plain_graph(second)
    counts = [Counter(nx.get_node_attributes(graph, "label").values()) for graph in (one, two)]
    return counts[0] == counts[1] and bool(nx.vf2pp_is_isomorphic(one, two, node_label="label"))


@settings(max_examples=150)
@given(first=small_specs, second=small_specs)
def test_signatures_are_equal_iff_graphs_are_isomorphic(make_model, first, second):
    one, two = make_model(first), make_model(second)
    assert (signature(one) == signature(two)) == are_isomorphic(one, two)


OTHERS = {
    "Relu": "Tanh",
    "Softmax.1": "Softmax.0",
    "If.tanh": "If.relu",
    "Split.1": "Split.0",
    "Transpose.1": "Identity",
}


@settings(max_examples=150)
@given(chosen=stacks, change=st.tuples(st.integers(0, 99), st.integers(0, 3), st.integers(0, 9)))
def test_edge_or_operator_change_alters_signature_of_networks(make_model, make_stack, motifs, chosen, change):
    spec = make_stack([motifs[number % len(motifs)] for number in chosen])
    place, slot, earlier = change
    op, references, is_output = spec[place % len(spec)]
    if earlier:  # an input reads an earlier result, a constant, or nothing
        references = list(references)
        references[slot % len(references)] = max(-3, references[slot % len(references)] - earlier)
    else:
        op = OTHERS.get(op, "Abs")
    changed = [*spec]
    changed[place % len(spec)] = (op, references, is_output)
    one, two = make_model(spec), make_model(changed, 1)
    same = are_isomorphic(one, two)
    assert earlier or not same
    assert (signature(one) == signature(two)) == same


def assert_names_and_order_do_not_matter(first: Model, second: Model) -> None:
    assert signature(first) == signature(second)
    orders = [find_patterns(m, whole(m))[0].order[0] for m in (first, second)]
    assert is_isomorphism(first, second, (orders[0], orders[1]))
    found = [
        Counter({p.signature: len(p.regions) for p in find_patterns(m, discover_regions(m))}) for m in (first, second)
    ]
    assert found[0] == found[1]


@given(spec=specs, seed=st.integers(0, 1000))
def test_order_and_names_in_the_file_never_change_a_signature(make_model, spec, seed):
    assert_names_and_order_do_not_matter(make_model(spec), make_model(spec, seed))


@given(chosen=stacks, seed=st.integers(0, 1000))
def test_signature_of_networks_ignores_node_order_and_names(make_model, make_stack, motifs, chosen, seed):
    spec = make_stack([motifs[number % len(motifs)] for number in chosen])
    assert_names_and_order_do_not_matter(make_model(spec), make_model(spec, seed))


def test_signature_separates_weisfeiler_leman_equivalent_graphs(make_model):
    """A ring of six and two rings of three: no refinement of colours tells their Adds apart (Weisfeiler, Leman)."""

    def rings(*sizes: int) -> list[tuple[str, list[int], bool]]:
        corners = sum(sizes)
        spec = [("Relu", [0], False) for _ in range(corners)]
        first = 0
        for size in sizes:
            spec += [("Add", [3 + first + i, 3 + first + (i + 1) % size], True) for i in range(size)]
            first += size
        return spec

    assert signature(make_model(rings(6))) != signature(make_model(rings(3, 3)))
    for shape in ((6, 3, 3), (3, 4, 5)):
        found = {signature(make_model(rings(*shape), seed)) for seed in (None, 1, 2, 3)}
        assert found == {signature(make_model(rings(*sorted(shape))))}


def conv_model(x: str = "x", **attributes: Any) -> Model:
    g = GraphBuilder("conv")
    given = {"kernel": 3, "groups": 1, "stride": 1, **attributes}
    y = g.conv(g.input(x, (1, 8, 8, 8)), given.pop("channels", 8), given.pop("kernel"), **given)
    g.output(g.op("Relu", y))
    return loaded(g)


@pytest.mark.parametrize("attributes", [{"channels": 16}, {"pad": 0}, {"dilations": [1, 1]}, {"x": "other"}])
def test_signature_ignores_channels_padding_and_names(attributes):
    assert signature(conv_model(**attributes)) == signature(conv_model())


def test_signature_depends_on_conv_attributes():
    changes: list[dict[str, Any]] = [
        {}, {"kernel": 1}, {"stride": 2}, {"groups": 2}, {"groups": -1}, {"bias": False}, {"dilations": [2, 2]},
    ]  # fmt: skip
    assert len({signature(conv_model(**change)) for change in changes}) == len(changes)
    assert signature(conv_model(groups=2)) == signature(conv_model(groups=4)), "the number of groups is no structure"


def test_signature_depends_on_kinds_of_operands_and_on_outputs(make_model):
    adds = {signature(make_model([("Add", [0, other], True)])) for other in (0, 1, 2)}
    assert len(adds) == 3
    chains = {signature(make_model([("Relu", [0], leaves), ("Relu", [3], True)])) for leaves in (False, True)}
    assert len(chains) == 2


BRANCH = """
   <ir_version: 8, opset_import: ["": 17]>
   m (float[4] x, float[4] y, bool flag) => (float[4] z) {
     {p} = Relu(x)
     {q} = Tanh(y)
     z = If (flag) <
       then_branch = then () => (float[4] t) { {s} = Sub({p}, {q})  t = Neg({s}) },
       else_branch = other () => (float[4] e) { {u} = Mul({p}, {q})  {v} = Abs({p})  e = Add({u}, {v}) }
     >
   }"""
NAMES = {"p": "p", "q": "q", "s": "s", "u": "u", "v": "v"}


def branching(text: str = BRANCH, **names: str) -> str:
    for name, own in {**NAMES, **names}.items():
        text = text.replace(f"{{{name}}}", own)
    return signature(load_proto(onnx.parser.parse_model(text), source="branching", sha256="0"))


def test_signature_ignores_names_and_order_in_subgraphs():
    assert branching(p="z9", q="a1", s="later", u="b", v="a") == branching()
    assert branching(BRANCH.replace("{u} = Mul({p}, {q})  {v} = Abs({p})", "{v} = Abs({p})  {u} = Mul({p}, {q})")) == (
        branching()
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Neg(", "Abs("),  # another operator
        ("Sub({p}, {q})", "Sub({q}, {p})"),  # another order of what comes from outside
        ("{v} = Abs({p})", "{v} = Abs({q})"),  # another edge from outside
        ("Add({u}, {v})", "Add({u}, {u})"),  # another edge inside
    ],
)
def test_signature_depends_on_subgraph_contents(before, after):
    assert before in BRANCH
    assert branching(BRANCH.replace(before, after)) != branching()


def encoder(layers: int) -> Model:
    return loaded(transformer.encoder(layers, width=8, heads=2, tokens=4))


def test_the_number_of_patterns_does_not_grow_with_depth():
    below = []
    for layers in (2, 6, 12):
        model = encoder(layers)
        root = discover_regions(model)
        assert len(list(root.walk())) <= 0.35 * len(model.nodes)
        patterns = find_patterns(model, root)
        assert len(patterns) == 11
        below.append({p.signature for p in patterns if p.type is not RegionType.ROOT})
    assert below[0] == below[1] == below[2]


def test_patterns_cover_the_tree_and_carry_matching_orders():
    model = encoder(3)
    root = discover_regions(model)
    patterns = find_patterns(model, root)
    assert sorted(r.id for p in patterns for r in p.regions) == [r.id for r in root.walk()]
    for pattern in patterns:
        for region, order, children in zip(pattern.regions, pattern.order, pattern.children, strict=True):
            assert sorted(order) == list(region.node_indices())
            assert tuple(model.nodes[index].op for index in order) == pattern.operators
            assert sorted(child.id for child in children) == [child.id for child in region.children]
            first = [[pattern.order[0].index(n) for n in child.node_indices()] for child in pattern.children[0]]
            other = [[order.index(n) for n in child.node_indices()] for child in children]
            assert [sorted(c) for c in first] == [sorted(c) for c in other]


def test_composites_of_other_children_differ():
    """Same nodes, cut in another way: a point in a child would mean something else."""
    model = encoder(1)
    found = []
    for size in (4, 10):
        root = discover_regions(model, maximum_sequence_region_size=size)
        pattern = next(p for p in find_patterns(model, root) if p.regions[0] is root.children[0])
        found.append((pattern.signature, sorted(pattern.order[0])))
    assert found[0][1] == found[1][1]
    assert found[0][0] != found[1][0]


def test_signature_is_stable_across_versions():
    """Pattern caches refer to it; a change of it also changes the number in the signed text."""
    assert signature(conv_model()) == "c2dcecfaf921140b2b6536a299a75bcf5e73f0384a66aa5ba6b684ccc3f37832"
