"""Proposals of the latency predictor: different, quantized, and none where it was not trained."""

import numpy as np
import pytest

from harness.graph.builder import GraphBuilder
from harness.graph.load import load
from harness.graph.qdq.latency_predictor import COLUMNS, PlacementFeatures, choose_portfolio, propose_fast_placements
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import ONNXRUNTIME, OPENVINO, TENSORRT
from search.heuristics import HEURISTIC_RULES
from search.space import Placement

XEON = "Intel(R) Xeon(R) Processor (AVX512-VNNI)"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    builder = GraphBuilder("net", seed=1)
    x = builder.op("Relu", builder.conv(builder.input("x", (1, 3, 16, 16)), 8, 3, pad=1))
    x = builder.op("Relu", builder.op("Add", builder.conv(x, 8, 3, pad=1), x))
    builder.output(builder.op("GlobalAveragePool", x))
    path = tmp_path_factory.mktemp("model") / "net.onnx"
    builder.save(path)
    return load(path, source="net")


def named(row):
    return {name: value for name, value in zip(COLUMNS, row, strict=True) if value}


def test_features_are_relative_to_the_float_placement(model):
    space = build_space(model, ONNXRUNTIME)
    features = PlacementFeatures(model, space).encode([space.float_placement(), space.quantize_all()])
    assert not features[0].any()
    changed = named(features[1])
    assert changed["conv/all+result/macs"] == pytest.approx(1)
    assert changed["conv/none/macs"] == pytest.approx(-1)
    assert changed["linear/all+result/nodes"] == -changed["linear/none/nodes"]


def test_conv_result_includes_its_fused_activation(model):
    space = build_space(model, ONNXRUNTIME)
    first = [d.role == "linear" and any(e.tensor == "x" for e in d.edges) for d in space.dimensions]
    changed = named(PlacementFeatures(model, space).encode([Placement(tuple(map(int, first)))])[0])
    assert {"conv/all/nodes", "conv/none/nodes"} <= set(changed)
    assert "conv/all+result/nodes" not in changed


@pytest.mark.parametrize(("runtime", "dialect"), [("openvino", OPENVINO), ("onnxruntime", ONNXRUNTIME)])
def test_proposals_are_distinct_and_exclude_float_and_all(model, runtime, dialect):
    space = build_space(model, dialect)
    facts = {"name": runtime, "device": XEON, "float_precision": "f32"}
    found = [space.digest(each) for each in propose_fast_placements(model, space, facts, 4)]
    plain = {space.digest(space.float_placement()), space.digest(space.quantize_all())}
    assert 1 <= len(found) == len(set(found)) <= 4
    assert plain.isdisjoint(found)
    if runtime == "openvino":
        assert found[0] == space.digest(HEURISTIC_RULES["movers"](space, None)), "the optimum of most tables"


def test_model_without_rule_placements_has_proposals(tmp_path):
    builder = GraphBuilder("gates", seed=1)
    x, y = (builder.input(name, (1, 4, 8, 8)) for name in "xy")
    builder.output(builder.op("Mul", builder.op("Sigmoid", x), builder.op("Mul", x, y)))
    model = load(builder.save(tmp_path / "gates.onnx"), source="gates")
    space = build_space(model, OPENVINO)
    facts = {"name": "openvino", "device": XEON, "float_precision": "f32"}
    plain = space.digest(space.float_placement())
    assert space.digest(HEURISTIC_RULES["movers"](space, None)) == plain
    assert plain not in [space.digest(each) for each in propose_fast_placements(model, space, facts, 4)]


@pytest.mark.parametrize(
    ("facts", "dialect", "precisions"),
    [
        ({"name": "tensorrt", "device": "NVIDIA L4"}, TENSORRT, ("int8",)),
        ({"name": "openvino", "device": "Apple M2"}, OPENVINO, ("int8",)),
        ({"name": "openvino", "device": XEON}, OPENVINO, ("fp8",)),
    ],
)
def test_unknown_runtime_processor_or_precision_has_no_proposals(model, facts, dialect, precisions):
    assert propose_fast_placements(model, build_space(model, dialect, precisions=precisions), facts, 4) == []


def test_portfolio_complements_already_chosen_placements():
    predicted = np.array([[-1.0, -1.1, 0.0, -0.2], [0.0, -0.1, -1.0, -0.2]])
    assert choose_portfolio(predicted, 2) == [1, 2]
    assert choose_portfolio(predicted, 1, chosen=[1]) == [2]
