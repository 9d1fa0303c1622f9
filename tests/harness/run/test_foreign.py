"""Models of PTQ tools: each in its form, made once."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import numpy_helper

from harness.feeds import random_feeds
from harness.graph.build import GraphBuilder
from harness.graph.dialects import ONNXRUNTIME
from harness.graph.importer import import_qdq
from harness.graph.load import load
from harness.graph.space import build_space
from harness.run.foreign import Order, quantize_with
from harness.run.observe import Silent


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Order:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    builder = GraphBuilder("net", seed=1)
    x = builder.op("Relu", builder.conv(builder.input("x", (1, 3, 8, 8)), 8, 3))
    x = builder.op("Relu", builder.op("Add", builder.conv(x, 8, 3), x))
    builder.output(builder.op("GlobalAveragePool", x))
    return Order(
        model_file=builder.save(tmp_path / "net.onnx"),
        source="net",
        data=list(random_feeds({"x": ("float", (1, 3, 8, 8))}, 2, 0)),
        data_key="random",
        options={"dialect_name": "onnxruntime"},
    )


def activations(path: Path) -> set[str]:
    graph = onnx.load(path).graph
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    return {values[node.input[2]].dtype.name for node in graph.node if node.op_type == "QuantizeLinear"}


def test_quantize_static_has_a_row_with_uint8_and_one_with_int8_activations(order: Order) -> None:
    made = {name: quantize_with(name, order, Silent()) for name in ("ort_static", "ort_static_s8")}
    paths = {name: foreign.path for name, foreign in made.items() if foreign.path is not None}
    assert {name: activations(path) for name, path in paths.items()} == {
        "ort_static": {"uint8"},
        "ort_static_s8": {"int8"},
    }
    assert made["ort_static"].pairs == made["ort_static_s8"].pairs > 0
    written = {path: path.stat().st_mtime_ns for path in paths.values()}
    assert {name: quantize_with(name, order, Silent()) for name in made} == made
    assert {path: path.stat().st_mtime_ns for path in paths.values()} == written, "each is made once and kept"


def test_the_placement_of_quantize_static_is_that_of_everything_though_it_removes_activations(order: Order) -> None:
    path = quantize_with("ort_static", order, Silent()).path
    assert path is not None
    assert "Relu" not in {node.op_type for node in onnx.load(path).graph.node}
    model = load(order.model_file, source="net")
    space = build_space(model, ONNXRUNTIME)
    assert space.nearest(import_qdq(path, model)) == space.everywhere()
