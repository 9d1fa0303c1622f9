"""Patterns are isomorphism classes: checked against an oracle that tries every mapping of nodes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.graph.build import GraphBuilder
from harness.graph.load import from_proto
from harness.graph.model import Model
from harness.graph.patterns import Pattern, find_patterns
from harness.graph.regions import Region, RegionType, discover
from harness.zoo import transformer

Make = Callable[..., Model]
ARITY = {"Relu": 1, "Split": 1, "Add": 2, "Concat": 3}


def nodes(last: int) -> st.SearchStrategy[tuple[str, list[int], bool]]:
    return st.sampled_from(sorted(ARITY)).flatmap(
        lambda op: st.tuples(
            st.just(op), st.lists(st.integers(0, last), min_size=ARITY[op], max_size=ARITY[op]), st.booleans()
        )
    )


specs = st.lists(nodes(30), min_size=1, max_size=30)
small_specs = st.lists(nodes(5), min_size=2, max_size=5)


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


def is_isomorphism(first: Model, second: Model, order: tuple[tuple[int, ...], tuple[int, ...]]) -> bool:
    """Whether nodes match position by position: operator, wiring of each input, constants, results that leave."""
    names: dict[str, str] = {}
    back: dict[str, str] = {}
    for i, j in zip(*order, strict=True):
        one, two = first.nodes[i], second.nodes[j]
        tensors = [*zip(one.inputs, two.inputs, strict=False), *zip(one.outputs, two.outputs, strict=False)]
        if one.op != two.op or len(one.inputs) != len(two.inputs):
            return False
        for a, b in tensors:
            if (a in first.constants) != (b in second.constants) or (a in first.outputs) != (b in second.outputs):
                return False
            if names.setdefault(a, b) != b or back.setdefault(b, a) != a:
                return False
    return all((a in first.producer) == (b in second.producer) for a, b in names.items())


def are_isomorphic(first: Model, second: Model) -> bool:
    if Counter(n.op for n in first.nodes) != Counter(n.op for n in second.nodes):
        return False
    own = tuple(range(len(first.nodes)))
    return any(is_isomorphism(first, second, (own, other)) for other in itertools.permutations(own))


@settings(deadline=None, max_examples=150)
@given(first=small_specs, second=small_specs)
def test_equal_signature_means_isomorphic_and_the_reverse(make_model: Make, first: Any, second: Any) -> None:
    one, two = make_model(first), make_model(second)
    assert (signature(one) == signature(two)) == are_isomorphic(one, two)


@settings(deadline=None, max_examples=150)
@given(spec=small_specs, place=st.integers(0, 4), change=nodes(5))
def test_one_changed_node_changes_the_signature_unless_the_graph_is_the_same(
    make_model: Make, spec: Any, place: int, change: Any
) -> None:
    other = list(spec)
    other[place % len(spec)] = change
    one, two = make_model(spec), make_model(other)
    assert (signature(one) == signature(two)) == are_isomorphic(one, two)


@settings(deadline=None)
@given(spec=specs, seed=st.integers(0, 1000))
def test_order_and_names_in_the_file_never_change_a_signature(make_model: Make, spec: Any, seed: int) -> None:
    first, second = make_model(spec), make_model(spec, seed)
    assert signature(first) == signature(second)
    found = [Counter({p.signature: len(p.regions) for p in find_patterns(m, discover(m))}) for m in (first, second)]
    assert found[0] == found[1]


@settings(deadline=None)
@given(spec=specs)
def test_a_changed_operator_always_changes_the_signature(make_model: Make, spec: Any) -> None:
    renamed = [("Neg", *rest) if op == "Relu" else (op, *rest) for op, *rest in spec]
    changed = any(op == "Relu" for op, *_ in spec)
    assert (signature(make_model(spec)) != signature(make_model(renamed))) == changed


@settings(deadline=None)
@given(spec=specs, seed=st.integers(0, 1000))
def test_the_stored_order_is_the_isomorphism(make_model: Make, spec: Any, seed: int) -> None:
    first, second = make_model(spec), make_model(spec, seed)
    orders = [find_patterns(m, whole(m))[0].order[0] for m in (first, second)]
    assert is_isomorphism(first, second, (orders[0], orders[1]))


def test_sinks_that_look_alike_are_told_apart_by_search(make_model: Make) -> None:
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
    return from_proto(g.build(), source="conv", sha256="0")


@pytest.mark.parametrize("attributes", [{"channels": 16}, {"pad": 0}, {"dilations": [1, 1]}, {"x": "other"}])
def test_what_does_not_matter(attributes: dict[str, Any]) -> None:
    assert signature(conv_model(**attributes)) == signature(conv_model())


@pytest.mark.parametrize(
    "attributes", [{"kernel": 1}, {"stride": 2}, {"groups": 2}, {"groups": -1}, {"bias": False}, {"dilations": [2, 2]}]
)
def test_what_matters(attributes: dict[str, Any]) -> None:
    assert signature(conv_model(**attributes)) != signature(conv_model())


def test_how_many_groups_does_not_matter_but_depthwise_does() -> None:
    assert signature(conv_model(groups=2)) == signature(conv_model(groups=4)) != signature(conv_model(groups=-1))


def test_a_constant_operand_is_not_an_activation(make_model: Make) -> None:
    both = make_model([("Add", [0, 1], True)])
    assert signature(both) != signature(make_model([("Add", [0, 2], True)]))
    assert signature(both) != signature(make_model([("Add", [0, 0], True)]))


def test_what_leaves_the_region_matters(make_model: Make) -> None:
    assert signature(make_model([("Relu", [0], False), ("Relu", [3], True)])) != signature(
        make_model([("Relu", [0], True), ("Relu", [3], True)])
    )


def patterns_of(layers: int) -> tuple[Model, tuple[Pattern, ...]]:
    g = transformer.encoder(layers, width=8, heads=2, tokens=4)
    model = from_proto(g.build(), source=g.name, sha256="0")
    return model, find_patterns(model, discover(model))


def test_the_number_of_patterns_does_not_grow_with_depth() -> None:
    found = {layers: patterns_of(layers)[1] for layers in (2, 6, 12)}
    assert {len(patterns) for patterns in found.values()} == {11}
    below = [{p.signature for p in patterns if p.type is not RegionType.ROOT} for patterns in found.values()]
    assert below[0] == below[1] == below[2]


def test_patterns_cover_the_tree_and_carry_matching_orders() -> None:
    model, patterns = patterns_of(3)
    root = discover(model)
    assert sorted(r.id for p in patterns for r in p.regions) == [r.id for r in root.walk()]
    for pattern in patterns:
        for region, order, children in zip(pattern.regions, pattern.order, pattern.children, strict=True):
            assert sorted(order) == list(region.members())
            assert tuple(model.nodes[index].op for index in order) == pattern.operators
            assert sorted(child.id for child in children) == [child.id for child in region.children]
            first = [[pattern.order[0].index(n) for n in child.members()] for child in pattern.children[0]]
            other = [[order.index(n) for n in child.members()] for child in children]
            assert [sorted(c) for c in first] == [sorted(c) for c in other]


def test_composites_of_other_children_differ() -> None:
    """Same nodes, cut in another way: a point in a child would mean something else."""
    model, _ = patterns_of(1)
    found = []
    for size in (4, 10):
        root = discover(model, maximum_sequence_region_size=size)
        pattern = next(p for p in find_patterns(model, root) if p.regions[0] is root.children[0])
        found.append((pattern.signature, sorted(pattern.order[0])))
    assert found[0][1] == found[1][1]
    assert found[0][0] != found[1][0]


def test_a_signature_stays_what_it_was() -> None:
    """Pattern caches refer to it; whoever changes it also changes the number in the signed text."""
    assert signature(conv_model()) == "c2dcecfaf921140b2b6536a299a75bcf5e73f0384a66aa5ba6b684ccc3f37832"
