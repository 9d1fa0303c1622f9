"""Discovery, patterns and space, compared with the same steps of ModelOpt's autotuner in the same run.

Run with `pytest tests/benchmarks/test_discovery_benchmark.py --benchmark-enable -s`. Figures to reach: 0.6 s for the
decomposed encoder of about 4,200 nodes, and time in proportion to the nodes up to 20,000.
On a machine that does other things too, add `--benchmark-timer=time.process_time`: nothing here waits.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from harness.graph.load import load_proto
from harness.graph.model import Model
from harness.graph.partition.patterns import find_patterns
from harness.graph.partition.regions import RegionType, discover_regions
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import OPENVINO
from harness.zoo.transformer import encoder
from search.space import Space

pytestmark = pytest.mark.slow
LAYERS = {"300 nodes": 6, "2,400 nodes": 48, "4,200 nodes": 86, "19,600 nodes": 400}


@cache
def ready(layers: int) -> Model:
    return load_proto(encoder(layers, width=64).build(), source=f"encoder{layers}", sha256="0")


def anew(model: Model) -> Space:
    """The space, with nothing left of an earlier pass over the model."""
    fresh = Model(proto=model.proto, source=model.source, sha256="0", nodes=model.nodes, types=model.types)
    return build_space(fresh, OPENVINO)  # finds regions and patterns on its way


@pytest.mark.parametrize("size", LAYERS)
def test_discovery_patterns_and_space(benchmark, size):
    if benchmark.disabled and LAYERS[size] > 6:
        pytest.skip("long models only where time is taken; enable benchmarks")
    model = ready(LAYERS[size])
    space = benchmark.pedantic(anew, args=(model,), rounds=5)
    root = discover_regions(model)
    regions, patterns = sum(1 for _ in root.walk()) - 1, find_patterns(model, root)
    benchmark.extra_info |= {
        "nodes": len(model.nodes),
        "regions_per_node": round(regions / len(model.nodes), 3),
        "patterns": len(patterns),
        "dimensions": len(space),
    }
    if not benchmark.disabled:
        taken = benchmark.stats.stats.median
        benchmark.extra_info["microseconds_per_node"] = round(1e6 * taken / len(model.nodes), 1)
        print(f"\nours: {len(model.nodes)} nodes {taken:.3f} s, {regions} regions, {len(patterns)} patterns")


@pytest.mark.parametrize("size", ["2,400 nodes", "4,200 nodes"])
def test_modelopt_discovery_and_patterns(benchmark, size):
    if benchmark.disabled:
        pytest.skip("the peer takes seconds to start; enable benchmarks")
    autotune = pytest.importorskip("modelopt.onnx.quantization.autotune")
    proto = ready(LAYERS[size]).proto

    def peer() -> Any:
        tuner = autotune.QDQAutotuner(proto)
        tuner.initialize()  # discovers the regions
        patterns = {str(autotune.RegionPattern.from_region(r, tuner.graph).signature) for r in tuner.regions}
        return tuner, patterns

    tuner, patterns = benchmark.pedantic(peer, rounds=1)
    taken, nodes = benchmark.stats.stats.median, len(proto.graph.node)
    benchmark.extra_info |= {"nodes": nodes, "patterns": len(patterns)}
    print(f"\nModelOpt: {nodes} nodes {taken:.3f} s, {len(tuner.regions)} regions, {len(patterns)} patterns")


def test_pattern_count_is_independent_of_depth():
    """The figures of 6, 24 and 48 layers: equal, at most 25; at most 0.35 regions a node."""
    found = {}
    for layers in (6, 24, 48):
        model = ready(layers)
        root = discover_regions(model)
        patterns = [p for p in find_patterns(model, root) if p.type is not RegionType.ROOT]
        found[layers] = {pattern.signature for pattern in patterns}
        assert sum(1 for _ in root.walk()) <= 0.35 * len(model.nodes)
    assert found[6] == found[24] == found[48]
    assert len(found[6]) <= 25
