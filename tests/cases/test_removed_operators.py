"""Operators that runtimes remove, between a Softmax and its reader: the scale of probabilities is the same as without.

ONNX Runtime's QLinearSoftmax overflows where the scale of its result is below 1/512.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fidelity_of import quantizer, scales

from harness.graph.builder import GraphBuilder
from harness.graph.load import load_proto
from harness.graph.rules.dialects import ONNXRUNTIME_7BIT
from harness.graph.rules.movement import find_repeated_input

N = 16
Between = Callable[[GraphBuilder, str], str]


def const(value: float, *shape: int) -> Callable[[GraphBuilder], str]:
    return lambda g: g.const(np.full(shape, value, np.float32))


def stairs(g: GraphBuilder, x: str) -> str:
    return g.op("Cast", g.op("Cast", x, to=11), to=1)


REMOVED: dict[str, Between] = {
    "nothing": lambda g, x: x,
    "identity": lambda g, x: g.op("Identity", x),
    "cast": lambda g, x: g.op("Cast", x, to=1),
    "wide cast": stairs,
    "dropout": lambda g, x: g.op("Dropout", x),
    "chain": lambda g, x: g.op("Dropout", g.op("Cast", g.op("Identity", x), to=1)),
    "reshape": lambda g, x: g.op("Cast", g.op("Reshape", x, g.const([4, N, N])), to=1),
    "transpose": lambda g, x: g.op("Transpose", g.op("Identity", x), perm=[0, 1, 2, 3]),
    "slice": lambda g, x: g.op("Slice", x, g.const([0]), g.const([N]), g.const([3])),
    "expand": lambda g, x: g.op("Expand", x, g.const([1, 4, N, N])),
    "pad": lambda g, x: g.op("Pad", x, g.const([0] * 8)),
    "concat": lambda g, x: g.op("Concat", x, axis=1),
    "sum": lambda g, x: g.op("Sum", x),
    "mul": lambda g, x: g.op("Mul", x, const(1.0, 1)(g)),
    "mul left": lambda g, x: g.op("Mul", const(1.0, 1)(g), x),
    "div": lambda g, x: g.op("Div", x, const(1.0)(g)),
    "add": lambda g, x: g.op("Add", x, const(0.0, 1, 1, 1, N)(g)),
    "sub": lambda g, x: g.op("Sub", x, const(0.0, 1)(g)),
    "pow": lambda g, x: g.op("Pow", x, const(1.0, 1)(g)),
    "clip": lambda g, x: g.op("Clip", x, const(0.0)(g), const(1.0)(g)),
    "relu": lambda g, x: g.op("Relu", x),
    "mean": lambda g, x: g.op("ReduceMean", x, axes=[0], keepdims=0),
}
COMPUTES: dict[str, Between] = {
    "half": lambda g, x: g.op("Cast", g.op("Cast", x, to=10), to=1),
    "mul": lambda g, x: g.op("Mul", x, const(0.5, 1)(g)),
    "broadcast": lambda g, x: g.op("Mul", g.op("ReduceMax", x, axes=[3]), const(1.0, 1, 4, N, N)(g)),
    "sub from": lambda g, x: g.op("Sub", const(0.0, 1)(g), x),
    "pad": lambda g, x: g.op("Pad", x, g.const([0, 0, 0, 1, 0, 0, 0, 0])),
    "training": lambda g, x: g.op("Dropout", x, const(0.5)(g), g.const(np.array(True))),
}


def attention(between: Between) -> GraphBuilder:
    """Scores so alike that all probabilities are near 1/16."""
    g = GraphBuilder("attention")
    rng = np.random.default_rng(0)
    keys = g.const((rng.normal(size=(1, 4, 8, N)) * 0.02).astype(np.float32))
    values = g.const(rng.normal(size=(1, 4, N, 8)).astype(np.float32))
    scores = g.op("MatMul", g.input("x", (1, 4, N, 8)), keys)
    weights = between(g, g.op("Softmax", scores, axis=-1, outputs=["weights"])[0])
    g.output(g.op("Relu", g.op("MatMul", weights, values, name="product")), name="y")
    return g


@pytest.mark.parametrize("between", REMOVED)
def test_probabilities_have_the_whole_scale(between: str, tmp_path: Path) -> None:
    feeds = [{"x": np.random.default_rng(1).normal(size=(1, 4, N, 8)).astype(np.float32)}]
    made = quantizer(attention(REMOVED[between]).build(), ONNXRUNTIME_7BIT, feeds, tmp_path)
    for kept in (None, {"product"}):
        path = made.write(kept)
        assert made.decibels(path, feeds, optimize=True) > 25
    reads = next(edge.tensor for edge, _ in made.resolved if edge.consumer == "product" and edge.slot == 0)
    assert scales(path)[reads] == (pytest.approx(1 / 255), 0)


@pytest.mark.parametrize("between", COMPUTES)
def test_an_operator_that_computes_is_none_of_them(between: str) -> None:
    g = GraphBuilder("computes")
    g.output(COMPUTES[between](g, g.input("x", (1, 4, N, N))))
    model = load_proto(g.build(), source="m", sha256="0")
    assert any(find_repeated_input(model, node) is None for node in model.nodes)
