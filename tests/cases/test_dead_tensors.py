"""Tensors that are always 0 on calibration data say nothing about their range: they stay float, and are named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from fidelity_of import quantizer

from harness.accuracy.calibration.usable_ranges import finite_ranges, range_warnings, require_quantizable
from harness.errors import UserError
from harness.graph.builder import GraphBuilder
from harness.graph.rules.dialects import ONNXRUNTIME_7BIT, OPENVINO_7BIT, Dialect
from harness.registry import installed_plugins
from search.space import Space

TOKENS, WIDTH, HEADS = 16, 32, 4
METHODS = [plugin.name for plugin in installed_plugins("range estimator")]


def attention(largest: float = -1e4) -> onnx.ModelProto:
    """A layer of BERT over embedded tokens, with an additive mask of what is padded."""
    g = GraphBuilder("attention", seed=3)
    x, mask = g.input("x", (1, TOKENS, WIDTH)), g.input("mask", (1, TOKENS), "int64")
    kept = g.op("Unsqueeze", g.op("Cast", mask, to=1), g.const([1, 2]))
    hidden = g.op("Sub", g.const(np.float32(1)), kept, outputs=["padding"])[0]
    hidden = g.op("Mul", hidden, g.const(np.float32(largest)), outputs=["hidden"])[0]

    def heads(perm: list[int]) -> str:
        split = g.op("Reshape", g.linear(x, WIDTH), g.const([1, TOKENS, HEADS, WIDTH // HEADS]))
        return g.op("Transpose", split, perm=perm)

    scores = g.op("MatMul", heads([0, 2, 1, 3]), heads([0, 2, 3, 1]), outputs=["scores"])[0]
    weights = g.op("Softmax", g.op("Add", scores, hidden, outputs=["masked"])[0], axis=-1)
    mixed = g.op("Transpose", g.op("MatMul", weights, heads([0, 2, 1, 3])), perm=[0, 2, 1, 3])
    mixed = g.linear(g.op("Reshape", mixed, g.const([1, TOKENS, WIDTH])), WIDTH)
    g.output(g.op("ReduceMean", g.layer_norm(g.op("Add", x, mixed)), axes=[1], keepdims=0), name="y")
    return g.build()


def sentences(count: int, seed: int, *, padded: bool) -> list[Mapping[str, np.ndarray[Any, Any]]]:
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        mask = np.ones((1, TOKENS), np.int64)
        mask[0, int(rng.integers(6, 14)) if padded else TOKENS :] = 0
        found.append({"x": 2 * rng.normal(size=(1, TOKENS, WIDTH)).astype(np.float32), "mask": mask})
    return found


@pytest.mark.parametrize("dialect", [OPENVINO_7BIT, ONNXRUNTIME_7BIT], ids=lambda d: d.name)
def test_a_model_that_has_seen_no_padding_still_minds_its_mask(dialect: Dialect, tmp_path: Path) -> None:
    made = quantizer(attention(), dialect, sentences(8, 0, padded=False), tmp_path)
    assert {"padding", "hidden"}.isdisjoint(edge.tensor for edge, _ in made.resolved)
    assert {"scores", "masked"} <= {edge.tensor for edge, _ in made.resolved}
    (line,) = range_warnings(made.ranges)
    assert "'hidden'" in line
    assert "float" in line
    for padded in (True, False):
        assert made.decibels(made.write(), sentences(4, 5, padded=padded)) > 20


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e-9])
def test_next_to_nothing_is_as_dead_as_zero(value: float) -> None:
    ranges = {"dead": (-value, value), "small": (0.0, 1e-6)}
    assert set(finite_ranges(ranges)) == {"small"}
    assert "'dead'" in range_warnings(ranges)[0]


def test_a_model_with_nothing_but_dead_tensors_is_refused(tmp_path: Path) -> None:
    g = GraphBuilder("dead")
    dead = g.op("Mul", g.input("x", (1, 4, 8, 8)), g.const(np.zeros((1, 4, 8, 8), np.float32)), outputs=["dead"])[0]
    g.output(g.op("Relu", dead), name="y")
    made = quantizer(g.build(), OPENVINO_7BIT, [{"x": np.zeros((1, 4, 8, 8), np.float32)}], tmp_path)
    assert not made.resolved
    with pytest.raises(UserError, match=r"calibration leaves nothing to quantize.*'dead'"):
        require_quantizable(Space(()), made.ranges, "m.onnx")


@pytest.mark.parametrize("method", METHODS)
def test_every_method_leaves_dead_tensors_float(method: Any, tmp_path: Path) -> None:
    made = quantizer(attention(), OPENVINO_7BIT, sentences(2, 0, padded=False), tmp_path, method)
    assert "hidden" not in finite_ranges(made.ranges)
