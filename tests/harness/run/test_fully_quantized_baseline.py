"""The stress test: everything quantized in the plainest form, whatever the dialect would do to be accurate or fast."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import numpy_helper

from harness.graph.builder import GraphBuilder
from harness.graph.load import load_proto
from harness.graph.model import Model
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.qdq_graph import QDQGraph
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import ONNXRUNTIME, OPENVINO
from harness.run.prepare.initial_design import fully_quantized_symmetric


def net() -> Model:
    builder = GraphBuilder("net", opset=17, seed=1)
    x = builder.op("Relu", builder.conv(builder.input("x", (1, 3, 8, 8)), 8, 3, pad=1))
    x = builder.op("Mul", x, builder.op("Sigmoid", builder.conv(x, 8, 1)))
    builder.output(builder.op("GlobalAveragePool", x))
    return load_proto(builder.build(), source="net", sha256="0" * 64)


def zero_points(path: Path) -> set[tuple[str, float]]:
    proto = onnx.load(path)
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    found = (values[node.input[2]] for node in proto.graph.node if node.op_type == "QuantizeLinear")
    return {(str(zero.dtype), float(zero)) for zero in found}


@pytest.mark.parametrize("dialect", [OPENVINO, ONNXRUNTIME], ids=lambda dialect: dialect.name)
def test_fully_quantized_baseline_has_symmetric_int8_edges(dialect, tmp_path):
    model = net()
    space = build_space(model, dialect)
    ranges = {name: (0.0, 6.0) for name in ("x", *(name for node in model.nodes for name in node.outputs))}
    found = fully_quantized_symmetric(model, dialect, ranges, tmp_path, space)
    assert found.path is not None
    asked = space.resolve(space.quantize_all())
    assert QDQGraph(onnx.load(found.path)).edges == dict(asked)
    assert zero_points(found.path) == {("int8", 0.0)}
    own = Inserter(model, dialect, ranges).write(asked, tmp_path / "own")
    assert ("int8", 0.0) not in zero_points(own), "the dialect itself stores positive data unsigned"
    assert found.pairs > 0
