"""Operators that only move values, or that runtimes remove: scales on both sides are tied where both are quantized.

ONNX Runtime's QLinearSoftmax overflows where the scale of its result is below 1/512.
"""

import numpy as np
import pytest
from fidelity_of import quantizer, scales
from onnx_models import applied, by_name, loaded, normal

from harness.graph.builder import GraphBuilder
from harness.graph.rules.dialects import ONNXRUNTIME_7BIT, OPENVINO_7BIT, TENSORRT
from harness.graph.rules.movement import find_repeated_input

DIALECTS = [OPENVINO_7BIT, ONNXRUNTIME_7BIT, TENSORRT]
FEEDS = [{"x": normal(1, 8, 16, 16, seed=i)} for i in range(2)]
LAST, MOVER = "last", "mover"


def wide(g, x):
    """One channel in 32 is a thousand times as large as the others."""
    factors = np.ones((1, 32, 1, 1), np.float32)
    factors[0, 0] = 1000
    return g.op("Mul", g.conv(x, 32, 3), g.const(factors), outputs="wide")


def split(g, x):
    return g.op("Split", x, g.const([1, 31]), outputs=["first", "rest"], axis=1, name=MOVER)[1]


def cut(g, x):
    return g.op("Slice", x, g.const([1]), g.const([32]), g.const([1]), outputs="rest", name=MOVER)


def gather(g, x):
    return g.op("Gather", x, g.const(list(range(1, 32))), outputs="rest", axis=1, name=MOVER)


def pool(g, x):
    """Nothing but the border is large, and no window has its maximum there."""
    low = g.op("Pad", applied("Slice", [1], [32], [1])(g, x), g.const([0, 0, 1, 1, 0, 0, 1, 1]),
               g.const(-5e3), outputs="padded")  # fmt: skip
    return g.op("MaxPool", low, kernel_shape=[3, 3], strides=[2, 2], outputs="rest", name=MOVER)


def chain(g, x):
    """Two operators, the first of which stays float."""
    cut_out = g.op("Slice", x, g.const([1]), g.const([32]), g.const([1]), outputs="cut", name="before")
    return g.op("Transpose", cut_out, perm=[0, 1, 3, 2], outputs="rest", name=MOVER)


def joined(g, x):
    """A Concat of which one input is wide, and what is cut out of it."""
    small = g.op("Sigmoid", g.conv(applied("Slice", [1], [32], [1])(g, x), 31, 1))
    both = g.op("Concat", g.op("Relu", x), small, axis=1, outputs="both", name="concat")
    return g.op("Slice", both, g.const([32]), g.const([63]), g.const([1]), outputs="rest", name=MOVER)


def made(move):
    g = GraphBuilder("tied")
    x = g.input("x", (1, 8, 16, 16))
    g.output(g.conv(move(g, wide(g, x)), 16, 3, name=LAST), name="y")
    return g.build()


def prepared(move, dialect, folder):
    return quantizer(made(move), dialect, FEEDS, folder)


@by_name("dialect", DIALECTS)
@pytest.mark.parametrize("move", [split, cut, gather, pool, chain, joined])
def test_tensor_behind_a_float_source_has_its_own_scale(move, dialect, tmp_path):
    made = prepared(move, dialect, tmp_path)
    path = made.write({LAST})
    low, high = made.ranges["rest"]
    assert scales(path)["rest"][0] <= max(-low, high) / 127 * 1.001
    assert made.decibels(path, FEEDS) > 25


@by_name("dialect", DIALECTS)
@pytest.mark.parametrize("move", [split, cut, gather, chain])
def test_tensor_behind_a_quantized_source_shares_its_scale(move, dialect, tmp_path):
    made = prepared(move, dialect, tmp_path)
    source = "cut" if move is chain else "wide"
    found = scales(made.write({LAST, MOVER}))
    assert found["rest"] == found[source]
    if move is chain:
        assert found["rest"][0] < scales(made.write({LAST, MOVER, "before"}))["rest"][0]


@by_name("dialect", DIALECTS)
def test_other_reader_of_the_source_does_not_tie_scales(dialect, tmp_path):
    g = GraphBuilder("readers")
    large = wide(g, g.input("x", (1, 8, 16, 16)))
    g.output(g.conv(large, 4, 1, name="other"), name="z")
    g.output(g.conv(cut(g, large), 16, 3, name=LAST), name="y")
    made = quantizer(g.build(), dialect, FEEDS, tmp_path)
    found = scales(made.write({LAST, "other"}))
    assert found["rest"][0] < found["wide"][0] / 100


@by_name("dialect", DIALECTS)
def test_concat_shares_scales_with_quantized_readers_only(dialect, tmp_path):
    made = prepared(joined, dialect, tmp_path)
    found = scales(made.write({LAST, "concat"}))
    assert found["rest"][0] < 0.01
    assert len({scale for tensor, scale in found.items() if tensor.startswith(("Relu", "Sigmoid"))}) == 1
    found = scales(made.write({LAST, "concat", MOVER}))
    assert found["rest"] == found["both"]


def test_float_concat_does_not_tie_scales(tmp_path):
    """Two Concats of one tensor: the scale that the quantized one asks for is no matter of the other."""
    g = GraphBuilder("two", seed=2)
    x = g.input("x", (1, 8, 16, 16))
    near, far = g.op("Sigmoid", g.conv(x, 8, 1)), g.op("Relu", wide(g, x))
    g.output(g.conv(g.op("Concat", near, x, axis=1, name="near"), 4, 1, name="first"), name="y")
    g.output(g.op("Concat", near, far, axis=1, name="far"), name="z")
    made = quantizer(g.build(), OPENVINO_7BIT, FEEDS, tmp_path)
    found = scales(made.write({"near", "first"}))
    assert max(scale for scale, _ in found.values()) < 0.1


def test_equal_placements_give_identical_files(tmp_path):
    first, second = (prepared(chain, ONNXRUNTIME_7BIT, tmp_path / name) for name in ("first", "second"))
    kept = {LAST, MOVER}
    expected = first.write(kept).read_bytes()
    for others in ({LAST}, None, {LAST, MOVER, "before"}):
        second.write(others)
    assert second.write(kept).read_bytes() == expected


N = 16
REMOVED = {
    "nothing": lambda g, x: x,
    "identity": applied("Identity"),
    "cast": applied("Cast", to=1),
    "wide cast": lambda g, x: g.op("Cast", g.op("Cast", x, to=11), to=1),
    "dropout": applied("Dropout"),
    "chain": lambda g, x: g.op("Dropout", g.op("Cast", g.op("Identity", x), to=1)),
    "reshape": lambda g, x: g.op("Cast", g.op("Reshape", x, g.const([4, N, N])), to=1),
    "transpose": lambda g, x: g.op("Transpose", g.op("Identity", x), perm=[0, 1, 2, 3]),
    "slice": applied("Slice", [0], [N], [3]),
    "expand": applied("Expand", [1, 4, N, N]),
    "pad": applied("Pad", [0] * 8),
    "concat": applied("Concat", axis=1),
    "sum": applied("Sum"),
    "mul": applied("Mul", [1.0]),
    "mul left": lambda g, x: g.op("Mul", g.const([1.0]), x),
    "div": applied("Div", 1.0),
    "add": applied("Add", [[[[0.0] * N]]]),
    "sub": applied("Sub", [0.0]),
    "pow": applied("Pow", [1.0]),
    "clip": applied("Clip", 0.0, 1.0),
    "relu": applied("Relu"),
    "mean": applied("ReduceMean", axes=[0], keepdims=0),
}
COMPUTES = {
    "half": lambda g, x: g.op("Cast", g.op("Cast", x, to=10), to=1),
    "mul": applied("Mul", [0.5]),
    "broadcast": lambda g, x: g.op("Mul", g.op("ReduceMax", x, axes=[3]), g.const(np.ones((1, 4, N, N), np.float32))),
    "sub from": lambda g, x: g.op("Sub", g.const([0.0]), x),
    "pad": applied("Pad", [0, 0, 0, 1, 0, 0, 0, 0]),
    "training": applied("Dropout", 0.5, True),
}


def attention(between):
    """Scores so alike that all probabilities are near 1/16."""
    g = GraphBuilder("attention")
    rng = np.random.default_rng(0)
    keys = g.const((rng.normal(size=(1, 4, 8, N)) * 0.02).astype(np.float32))
    values = g.const(rng.normal(size=(1, 4, N, 8)).astype(np.float32))
    scores = g.op("MatMul", g.input("x", (1, 4, N, 8)), keys)
    weights = between(g, g.op("Softmax", scores, axis=-1, outputs="weights"))
    g.output(g.op("Relu", g.op("MatMul", weights, values, name="product")), name="y")
    return g


@pytest.mark.parametrize("between", REMOVED)
def test_softmax_scale_is_kept_behind_removed_operators(between, tmp_path):
    feeds = [{"x": normal(1, 4, N, 8, seed=1)}]
    made = quantizer(attention(REMOVED[between]).build(), ONNXRUNTIME_7BIT, feeds, tmp_path)
    for kept in (None, {"product"}):
        path = made.write(kept)
        assert made.decibels(path, feeds, optimize=True) > 25
    reads = next(edge.tensor for edge, _ in made.resolved if edge.consumer == "product" and edge.slot == 0)
    assert scales(path)[reads] == (pytest.approx(1 / 255), 0)


@pytest.mark.parametrize("between", COMPUTES)
def test_computing_operators_are_not_removed(between):
    g = GraphBuilder("computes")
    g.output(COMPUTES[between](g, g.input("x", (1, 4, N, N))))
    model = loaded(g)
    assert any(find_repeated_input(model, node) is None for node in model.nodes)
