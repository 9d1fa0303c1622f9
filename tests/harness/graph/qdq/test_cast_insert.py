"""Placements of a float model go to the same inputs of its cast form, with scales of the cast tensors' type."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from onnx_models import loaded

from harness.base.errors import UserError
from harness.graph.builder import GraphBuilder
from harness.graph.load import load
from harness.graph.model import Model
from harness.graph.qdq.import_placement import import_placement
from harness.graph.qdq.insert import CastInserter, Inserter, map_edges_to_cast_model
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import TENSORRT
from harness.plugins import registry
from harness.plugins.api import Candidate
from harness.runtimes.tensorrt.options import cast_model, dominant_float_type, read_structure
from search.space import Edge, edges_digest

FEEDS = {"x": np.random.default_rng(0).standard_normal((1, 3, 8, 8)).astype(np.float32)}


def net(path: Path) -> Model:
    builder = GraphBuilder("net", seed=1)
    x = builder.input("x", (1, 3, 8, 8))
    one = builder.op("Relu", builder.conv(x, 4, 3, pad=1))
    two = builder.conv(x, 4, 1)
    builder.output(builder.conv(builder.op("Add", one, two), 2, 1), name="y")
    return load(builder.save(path), min_opset=19)


def answer(path: Path) -> Any:
    made: Any = registry.create_plugin("benchmarker", "onnxruntime", {})
    artifact = made.build(Candidate(digest="x", edges=(), source=lambda: path), path.parent)
    with made.open(artifact) as probe:
        return probe.infer(FEEDS)["y"]


@pytest.mark.parametrize(("precision", "kind"), [("f16", TensorProto.FLOAT16), ("bf16", TensorProto.BFLOAT16)])
def test_placement_maps_to_the_cast_model(precision, kind, tmp_path):
    model = net(tmp_path / "net.onnx")
    space = build_space(model, TENSORRT)
    resolved = space.resolve(space.quantize_all())
    ranges = {edge.tensor: (-4.0, 4.0) for d in space.dimensions for edge in d.edges}
    cast = load(cast_model(tmp_path / "net.onnx", precision, tmp_path), min_opset=19)
    plain, inserter = Inserter(model, TENSORRT, ranges), CastInserter(cast, TENSORRT, ranges, model)
    path = inserter.export(resolved, tmp_path / "cast.onnx")
    proto = onnx.load(path)
    kinds = {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
    pairs = [node for node in proto.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert {kinds[node.input[1]] for node in pairs} == {kind}
    assert import_placement(path, model) == dict(resolved)
    assert inserter.count_pairs(resolved) == plain.count_pairs(resolved)
    assert inserter.write(resolved, tmp_path / "out").name == f"{edges_digest(resolved)}.onnx"
    # All its weights are INT8, and it is not cast again.
    assert dominant_float_type(read_structure(path)) == precision
    assert cast_model(path, precision, tmp_path / "again") == path
    if precision == "f16":  # ONNX Runtime's CPU runs no BF16
        expected = answer(plain.export(resolved, tmp_path / "plain.onnx"))
        np.testing.assert_allclose(answer(path), expected, atol=0.1 * np.abs(expected).max())


def test_a_node_that_casting_took_away_is_named(tmp_path):
    model = net(tmp_path / "net.onnx")
    kept = loaded(model.proto, "net")
    with pytest.raises(UserError, match=r"net: the cast removed node 'gone'; use precision: f32"):
        map_edges_to_cast_model(((Edge("x", "gone", 0), "int8"),), kept)


def test_cast_model_is_cached(tmp_path, monkeypatch):
    net(tmp_path / "net.onnx")
    first = cast_model(tmp_path / "net.onnx", "f16", tmp_path / "cast")
    assert [path.name for path in first.parent.iterdir()] == [first.name]
    monkeypatch.setattr("harness.runtimes.tensorrt.options.call_in_helper_process", None)
    assert cast_model(tmp_path / "net.onnx", "f16", tmp_path / "cast") == first
