"""The pattern cache: what is kept, what merging does, what a similar model gets, and what a hostile file gets."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx_models import loaded

from harness.base.errors import UserError
from harness.config.yaml_loader import write_plain_yaml
from harness.graph.builder import GraphBuilder
from harness.graph.partition.patterns import find_patterns
from harness.graph.partition.regions import discover_regions
from harness.graph.pattern_cache import (
    CachedPattern,
    CachedPoint,
    CachedScheme,
    MeasurementOrigin,
    PatternCache,
    build_cache,
    describe_foreign_schemes,
    merge_caches,
    propose_placements,
    read_cache,
    write_cache,
)
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import OPENVINO
from search.api import Failure, Observation, Score

HOME = MeasurementOrigin(backend="openvino", precision="int8", device="this CPU")
AWAY = MeasurementOrigin(backend="tensorrt", precision="fp8", device="that GPU")
SIGNATURE = "ab" * 32


def scheme(*places: int, share: float | None = 0.5, origin: MeasurementOrigin = HOME) -> CachedScheme:
    points = frozenset(CachedPoint("node_input", (place, 0), "int8") for place in places)
    known = {} if share is None else {"latency_ms": 10 * share, "baseline_ms": 10.0}
    return CachedScheme(points=points, origin=origin, **known)


def cache(*schemes: CachedScheme, **limits: int) -> PatternCache:
    empty = PatternCache(**limits)
    found = {SIGNATURE: CachedPattern(signature=SIGNATURE, size=9, schemes=schemes)}
    return merge_caches(empty, PatternCache(patterns=found))


def kept(found: PatternCache) -> list[set[int]]:
    return [{point.place[0] for point in each.points} for each in found.patterns[SIGNATURE].schemes]


def test_best_of_similar_schemes_is_kept():
    found = cache(scheme(1, 2, 3, share=0.9), scheme(1, 2, 3, 4, 5, 6, share=0.5), scheme(5, 6, 7, 8, share=0.7))
    assert kept(found) == [{1, 2, 3, 4, 5, 6}, {5, 6, 7, 8}]


def test_best_schemes_are_kept_up_to_the_maximum():
    many = [scheme(*range(10 * n, 10 * n + 4), share=0.9 - n / 100) for n in range(40)]
    assert len(cache(*many).patterns[SIGNATURE].schemes) == 32
    assert kept(cache(*many, maximum_schemes=2)) == [set(range(390, 394)), set(range(380, 384))]
    assert len(cache(*many, maximum_schemes=0).patterns[SIGNATURE].schemes) == 40


def test_schemes_are_ranked_by_latency_ratio():
    small = CachedScheme(points=scheme(1).points, origin=HOME, latency_ms=1.0, baseline_ms=1.1)
    large = CachedScheme(points=scheme(2).points, origin=HOME, latency_ms=40.0, baseline_ms=100.0)
    assert kept(cache(small, large)) == [{2}]


def test_schemes_of_each_origin_are_kept():
    fast = [scheme(*range(10 * n, 10 * n + 4), share=0.1, origin=AWAY) for n in range(4)]
    found = cache(*fast, scheme(0, 1, 2, 3, share=0.8), maximum_schemes=2)
    assert {each.origin for each in found.patterns[SIGNATURE].schemes} == {HOME, AWAY}


def test_imported_scheme_is_last_until_measured():
    found = cache(scheme(1, 2, share=None), scheme(5, 6, 7, 8), scheme(1, 2, share=0.9))
    assert [each.latency_ms for each in found.patterns[SIGNATURE].schemes] == [5.0, 9.0]


schemes = st.builds(
    lambda places, share, origin: scheme(*places, share=share, origin=origin),
    st.sets(st.integers(0, 12), max_size=8), st.sampled_from([None, 0.2, 0.5, 0.9]), st.sampled_from([HOME, AWAY]),
)  # fmt: skip


@given(st.lists(schemes, max_size=12), st.lists(schemes, max_size=12))
def test_merge_is_idempotent_and_keeps_the_best(first, second):
    one, two = cache(*first), cache(*second)
    both = merge_caches(one, two)
    found = both.patterns[SIGNATURE].schemes
    assert merge_caches(both, both) == both
    assert set(found) == set(merge_caches(two, one).patterns[SIGNATURE].schemes)
    for a in found:
        assert all(len(a.points ^ b.points) >= 4 for b in found if b is not a and a.origin == b.origin)
    if first or second:
        assert min(s.latency_ratio for s in found) == min(s.latency_ratio for s in (*first, *second))


@given(st.lists(schemes, max_size=6))
def test_written_cache_is_read_back(tmp_path_factory, found):
    path = tmp_path_factory.getbasetemp() / "cache.yaml"
    write_cache(cache(*found), path)
    assert read_cache(path) == cache(*found)


def test_failed_write_keeps_the_old_cache(tmp_path, monkeypatch):
    path = tmp_path / "cache.yaml"
    write_cache(cache(), path)
    monkeypatch.setattr(Path, "write_text", lambda part, text, **_: part.write_bytes(text[:9].encode()) and 1 // 0)
    with pytest.raises(ZeroDivisionError):
        write_cache(cache(scheme(1)), path)
    assert read_cache(path) == cache()
    assert list(tmp_path.iterdir()) == [path]


def model(blocks):
    """A chain of equal convolution blocks and a classifier."""
    g = GraphBuilder("m", seed=1)
    x = g.input("x", (1, 3, 16, 16))
    x = g.op("MaxPool", g.conv(x, 8, 3, pad=1), kernel_shape=[2, 2], strides=[2, 2])
    for _ in range(blocks):
        y = g.op("Relu", g.conv(x, 8, 3, pad=1))
        x = g.op("Relu", g.op("Add", g.conv(y, 8, 3, pad=1), x))
    g.output(g.linear(g.op("Flatten", g.op("GlobalAveragePool", x)), 4))
    return loaded(g)


def space_and_sizes(blocks: int):
    found = model(blocks)
    root = discover_regions(found)
    sizes = {pattern.signature: len(pattern.operators) for pattern in find_patterns(found, root)}
    return build_space(found, OPENVINO, root=root), sizes


def observed(space, placement, latency_ms):
    outcome = Score(objective=latency_ms) if latency_ms else Failure(stage="build", reason="no")
    return Observation(placement=placement, digest=space.digest(placement), outcome=outcome)


def test_deeper_model_starts_from_a_shallow_models_cache():
    small, sizes = space_and_sizes(2)
    best = small.quantize_roles({"linear"})
    told = [(small.float_placement(), 10.0), (best, 4.0), (small.quantize_all(), 5.0)]
    learned = build_cache([observed(small, *each) for each in told], small, sizes, 10.0, HOME)
    large, _ = space_and_sizes(6)
    start = propose_placements(learned, large, HOME)[0]
    assert start == large.quantize_roles({"linear"})
    assert propose_placements(learned, small, HOME)[0] == best


def test_failures_and_unknown_patterns_give_no_proposals():
    space, sizes = space_and_sizes(2)
    assert build_cache([observed(space, space.quantize_all(), None)], space, sizes, 10.0, HOME).patterns == {}
    assert propose_placements(cache(scheme(1, 2)), space) == []


def test_unavailable_precision_is_replaced():
    space, sizes = space_and_sizes(2)
    learned = build_cache([observed(space, space.quantize_all(), 4.0)], space, sizes, 10.0, HOME)
    away = {
        signature: replace(
            pattern,
            schemes=tuple(
                replace(s, points=frozenset(p._replace(precision="fp8") for p in s.points)) for s in pattern.schemes
            ),
        )
        for signature, pattern in learned.patterns.items()
    }
    assert propose_placements(PatternCache(patterns=away), space) == [space.quantize_all()]


def test_schemes_of_other_origins_are_described():
    assert describe_foreign_schemes(cache(scheme(1)), HOME) == ()
    assert describe_foreign_schemes(cache(scheme(1)), MeasurementOrigin(backend="openvino", precision="int8")) == ()
    (said,) = describe_foreign_schemes(cache(scheme(1), scheme(2, origin=AWAY)), HOME)
    assert said == (
        "the pattern cache has schemes measured with backend 'tensorrt' instead of 'openvino', precision 'fp8' instead "
        "of 'int8', device 'that GPU' instead of 'this CPU', so they may be slow here"
    )


def test_own_schemes_precede_better_ones_of_other_origins():
    space, sizes = space_and_sizes(2)
    ours = build_cache([observed(space, space.quantize_roles({"linear"}), 9.0)], space, sizes, 10.0, HOME)
    theirs = build_cache([observed(space, space.quantize_all(), 1.0)], space, sizes, 10.0, AWAY)
    assert propose_placements(merge_caches(theirs, ours), space, HOME)[0] == space.quantize_roles({"linear"})
    assert propose_placements(merge_caches(theirs, ours), space, AWAY)[0] == space.quantize_all()


HEAD = {"kind": "qdq pattern cache", "schema": 1, "minimum_distance": 4, "maximum_schemes": 32}
SCHEME = {"backend": "b", "precision": "int8", "points": ["node_input/0.0/int8"]}
PATTERN = {"signature": SIGNATURE, "size": 3, "schemes": [SCHEME]}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("- 1", "a pattern cache is a mapping of keys, but got list"),
        ("\x00", "not valid YAML"),
        ({**HEAD, "patterns": [], "extra": 1}, "not a pattern cache of qdq-bench: extra: Unexpected"),
        ({**HEAD, "patterns": [], "schema": 2}, "schema: Input should be 1"),
        ({"patterns": []}, "kind: Field required"),
        ({"minimum_distance": 4, "pattern_schemes": []}, "a pattern cache of ModelOpt"),
        ({**HEAD, "patterns": [{**PATTERN, "signature": "../x"}]}, "patterns.0.signature: String should match pattern"),
        ({**HEAD, "patterns": [PATTERN, PATTERN]}, "pattern abababababab appears twice"),
        ({**HEAD, "patterns": [{**PATTERN, "schemes": [{**SCHEME, "latency_ms": -1.0}]}]}, "latency_ms: Input should"),
        ({**HEAD, "patterns": [{**PATTERN, "schemes": [{**SCHEME, "latency_ms": float("nan")}]}]}, "latency_ms: Input"),
        (
            {**HEAD, "patterns": [{**PATTERN, "schemes": [{**SCHEME, "points": ["node_input/-1.0/int8"]}]}]},
            "points.0: a point is KIND/PLACE.INPUT/PRECISION, such as node_input/4.0/int8, but got",
        ),
        ({**HEAD, "patterns": [{**PATTERN, "schemes": [{**SCHEME, "points": [3]}]}]}, "but got 3"),
    ],
)
def test_invalid_cache_file_is_refused_naming_the_key(tmp_path, body, says):
    path = tmp_path / "cache.yaml"
    if isinstance(body, str):
        path.write_text(body)
    else:
        write_plain_yaml(body, path)
    with pytest.raises(UserError) as caught:
        read_cache(path)
    assert str(path) in str(caught.value)
    assert says in str(caught.value)
