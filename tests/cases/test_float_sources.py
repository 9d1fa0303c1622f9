"""Scales behind operators that only move values: tied to the source of the values where that is quantized, else not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from fidelity_of import Quantizer, quantizer, scales

from harness.graph.builder import GraphBuilder
from harness.graph.rules.dialects import ONNXRUNTIME_7BIT, OPENVINO_7BIT, TENSORRT, Dialect

DIALECTS = [OPENVINO_7BIT, ONNXRUNTIME_7BIT, TENSORRT]
FEEDS = [{"x": np.random.default_rng(i).normal(size=(1, 8, 16, 16)).astype(np.float32)} for i in range(2)]
LAST, MOVER = "last", "mover"


def wide(g: GraphBuilder, x: str) -> str:
    """One channel in 32 is a thousand times as large as the others."""
    factors = np.ones((1, 32, 1, 1), np.float32)
    factors[0, 0] = 1000
    return g.op("Mul", g.conv(x, 32, 3), g.const(factors), outputs=["wide"])[0]


def split(g: GraphBuilder, x: str) -> str:
    return g.op("Split", x, g.const([1, 31]), outputs=["first", "rest"], axis=1, name=MOVER)[1]


def cut(g: GraphBuilder, x: str) -> str:
    return g.op("Slice", x, g.const([1]), g.const([32]), g.const([1]), outputs=["rest"], name=MOVER)[0]


def gather(g: GraphBuilder, x: str) -> str:
    return g.op("Gather", x, g.const(list(range(1, 32))), outputs=["rest"], axis=1, name=MOVER)[0]


def pool(g: GraphBuilder, x: str) -> str:
    """Nothing but the border is large, and no window has its maximum there."""
    low = g.op("Pad", g.op("Slice", x, g.const([1]), g.const([32]), g.const([1])), g.const([0, 0, 1, 1, 0, 0, 1, 1]),
               g.const(np.float32(-5e3)), outputs=["padded"])[0]  # fmt: skip
    return g.op("MaxPool", low, kernel_shape=[3, 3], strides=[2, 2], outputs=["rest"], name=MOVER)[0]


def chain(g: GraphBuilder, x: str) -> str:
    """Two operators, the first of which stays float."""
    cut_out = g.op("Slice", x, g.const([1]), g.const([32]), g.const([1]), outputs=["cut"], name="before")[0]
    return g.op("Transpose", cut_out, perm=[0, 1, 3, 2], outputs=["rest"], name=MOVER)[0]


def joined(g: GraphBuilder, x: str) -> str:
    """A Concat of which one input is wide, and what is cut out of it."""
    small = g.op("Sigmoid", g.conv(g.op("Slice", x, g.const([1]), g.const([32]), g.const([1])), 31, 1))
    both = g.op("Concat", g.op("Relu", x), small, axis=1, outputs=["both"], name="concat")[0]
    return g.op("Slice", both, g.const([32]), g.const([63]), g.const([1]), outputs=["rest"], name=MOVER)[0]


def made(move: Callable[[GraphBuilder, str], str]) -> onnx.ModelProto:
    g = GraphBuilder("tied")
    x = g.input("x", (1, 8, 16, 16))
    g.output(g.conv(move(g, wide(g, x)), 16, 3, name=LAST), name="y")
    return g.build()


def prepared(move: Callable[[GraphBuilder, str], str], dialect: Dialect, folder: Path) -> Quantizer:
    return quantizer(made(move), dialect, FEEDS, folder)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda d: d.name)
@pytest.mark.parametrize("move", [split, cut, gather, pool, chain, joined])
def test_behind_a_float_source_a_tensor_keeps_the_scale_of_its_own_range(
    move: Callable[[GraphBuilder, str], str], dialect: Dialect, tmp_path: Path
) -> None:
    made = prepared(move, dialect, tmp_path)
    path = made.write({LAST})
    low, high = made.ranges["rest"]
    assert scales(path)["rest"][0] <= max(-low, high) / 127 * 1.001
    assert made.decibels(path, FEEDS) > 25


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda d: d.name)
@pytest.mark.parametrize("move", [split, cut, gather, chain])
def test_behind_a_quantized_source_both_sides_have_one_scale(
    move: Callable[[GraphBuilder, str], str], dialect: Dialect, tmp_path: Path
) -> None:
    made = prepared(move, dialect, tmp_path)
    source = "cut" if move is chain else "wide"
    found = scales(made.write({LAST, MOVER}))
    assert found["rest"] == found[source]
    if move is chain:
        assert found["rest"][0] < scales(made.write({LAST, MOVER, "before"}))["rest"][0]


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda d: d.name)
def test_another_reader_of_the_source_ties_nothing(dialect: Dialect, tmp_path: Path) -> None:
    g = GraphBuilder("readers")
    large = wide(g, g.input("x", (1, 8, 16, 16)))
    g.output(g.conv(large, 4, 1, name="other"), name="z")
    g.output(g.conv(cut(g, large), 16, 3, name=LAST), name="y")
    made = quantizer(g.build(), dialect, FEEDS, tmp_path)
    found = scales(made.write({LAST, "other"}))
    assert found["rest"][0] < found["wide"][0] / 100


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda d: d.name)
def test_a_concat_shares_a_scale_with_what_is_quantized_behind_it_alone(dialect: Dialect, tmp_path: Path) -> None:
    made = prepared(joined, dialect, tmp_path)
    found = scales(made.write({LAST, "concat"}))
    assert found["rest"][0] < 0.01
    assert len({scale for tensor, scale in found.items() if tensor.startswith(("Relu", "Sigmoid"))}) == 1
    found = scales(made.write({LAST, "concat", MOVER}))
    assert found["rest"] == found["both"]


def test_a_concat_that_stays_float_ties_nothing(tmp_path: Path) -> None:
    """Two Concats of one tensor: the scale that the quantized one asks for is no matter of the other."""
    g = GraphBuilder("two", seed=2)
    x = g.input("x", (1, 8, 16, 16))
    near, far = g.op("Sigmoid", g.conv(x, 8, 1)), g.op("Relu", wide(g, x))
    g.output(g.conv(g.op("Concat", near, x, axis=1, name="near"), 4, 1, name="first"), name="y")
    g.output(g.op("Concat", near, far, axis=1, name="far"), name="z")
    made = quantizer(g.build(), OPENVINO_7BIT, FEEDS, tmp_path)
    found = scales(made.write({"near", "first"}))
    assert max(scale for scale, _ in found.values()) < 0.1


def test_equal_placements_give_equal_files_whatever_was_written_before(tmp_path: Path) -> None:
    first, second = (prepared(chain, ONNXRUNTIME_7BIT, tmp_path / name) for name in ("first", "second"))
    kept = {LAST, MOVER}
    expected = first.write(kept).read_bytes()
    for others in ({LAST}, None, {LAST, MOVER, "before"}):
        second.write(others)
    assert second.write(kept).read_bytes() == expected
