"""Patterns are isomorphism classes: checked against another implementation of isomorphism (VF2++, of networkx)."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import networkx as nx
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.graph.builder import GraphBuilder
from harness.graph.load import load_proto
from harness.graph.model import Model, Node
from harness.graph.partition.patterns import Pattern, find_patterns
from harness.graph.partition.regions import Region, RegionType, discover_regions
from harness.graph.rules.operator_sets import LINEAR_OPS
from harness.zoo import transformer

Make = Callable[..., Model]
ARITY = {
    "Relu": 1, "Softmax.0": 1, "Softmax.1": 1, "Split.1": 1, "Add": 2, "MatMul": 2, "Concat.1": 3, "If.relu": 3,
    "If.tanh": 3,
}  # fmt: skip


def nodes(last: int) -> st.SearchStrategy[tuple[str, list[int], bool]]:
    """A node that reads what is there, an omitted input (-1), a constant of rank 1 (-2) or an integer input (-3)."""
    return st.sampled_from(sorted(ARITY)).flatmap(
        lambda op: st.tuples(
            st.just(op), st.lists(st.integers(-3, last), min_size=ARITY[op], max_size=ARITY[op]), st.booleans()
        )
    )


specs = st.lists(nodes(30), min_size=1, max_size=30)
small_specs = st.lists(nodes(5), min_size=2, max_size=5)
stacks = st.lists(st.integers(0, 99), min_size=1, max_size=6)
"""Motifs (attention, residual, inception, ...) by number."""


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
    """What is read at each input, as far as that is no matter of wiring: constants, kinds of types, nothing."""
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


@settings(max_examples=150)
@given(spec=small_specs, place=st.integers(0, 4), change=nodes(5))
def test_node_change_alters_signature_unless_isomorphic(make_model, spec, place, change):
    other = list(spec)
    other[place % len(spec)] = change
    one, two = make_model(spec), make_model(other)
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


@given(spec=specs)
def test_a_changed_operator_always_changes_the_signature(make_model, spec):
    renamed = [("Neg", *rest) if op == "Relu" else (op, *rest) for op, *rest in spec]
    changed = any(op == "Relu" for op, *_ in spec)
    assert (signature(make_model(spec)) != signature(make_model(renamed))) == changed


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
    return load_proto(g.build(), source="conv", sha256="0")


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


def patterns_of(layers: int) -> tuple[Model, tuple[Pattern, ...]]:
    g = transformer.encoder(layers, width=8, heads=2, tokens=4)
    model = load_proto(g.build(), source=g.name, sha256="0")
    return model, find_patterns(model, discover_regions(model))


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


def test_the_number_of_patterns_does_not_grow_with_depth():
    found = {layers: patterns_of(layers)[1] for layers in (2, 6, 12)}
    assert {len(patterns) for patterns in found.values()} == {11}
    below = [{p.signature for p in patterns if p.type is not RegionType.ROOT} for patterns in found.values()]
    assert below[0] == below[1] == below[2]


def test_patterns_cover_the_tree_and_carry_matching_orders():
    model, patterns = patterns_of(3)
    root = discover_regions(model)
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
    model, _ = patterns_of(1)
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
