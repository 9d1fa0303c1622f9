"""Outputs, or slices of one, that quantization kills: the fidelity of the model is theirs, whatever else is exact."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from harness.accuracy.metrics.fidelity import Fidelity
from harness.base.progress import NullProgress
from harness.compat.tao_specs.evaluate import rank_layers
from harness.graph.builder import GraphBuilder
from harness.plugins import registry
from harness.plugins.api import Accuracy, Candidate, Infer

SIZE = 16


class Builder(GraphBuilder):
    """Adds Q/DQ pairs where they are asked for."""

    def __init__(self, quantized: bool) -> None:
        super().__init__("net", opset=17)
        self.rng, self._quantized = np.random.default_rng(0), quantized

    def head(self, x: str, channels: int) -> str:
        weights = self.rng.normal(size=(channels, 3, 1, 1)).astype(np.float32)
        return self.op("Conv", x, self.const(weights), name="head")

    def pair(self, x: str, amax: float) -> str:
        """Symmetric INT8 with one scale, where the model is quantized."""
        if not self._quantized:
            return x
        scale, zero = self.const(np.float32(amax / 127)), self.const(np.int8(0))
        return self.op("DequantizeLinear", self.op("QuantizeLinear", x, scale, zero), scale, zero)


def boxes_and_scores(quantized: bool, axis: int) -> onnx.ModelProto:
    """As detectors are exported: boxes in pixels and scores joined along `axis`, one scale for both."""
    b = Builder(quantized)
    x = b.input("x", (1, 3, SIZE, SIZE))
    boxes = b.op("Mul", b.op("Sigmoid", b.head(x, 4)), b.const(640.0))
    scores = b.op("Sigmoid", b.op("Sub", b.head(x, 6), b.const(3.0)))
    joined = b.op("Concat", boxes, scores, axis=1)
    rows = b.op("Reshape", joined, b.const(np.array([1, 10, SIZE * SIZE])))
    rows = rows if axis == 1 else b.op("Transpose", rows, perm=[0, 2, 1])
    b.output(b.op("Relu", b.pair(rows, 640)), name="output0")
    return b.build()


def two_heads(quantized: bool, _: int = 0) -> onnx.ModelProto:
    """One head dies of an outlier that it does not read; the other is not quantized at all."""
    b = Builder(quantized)
    x = b.input("x", (1, 3, SIZE, SIZE))
    loud = b.op("Mul", x, b.const(np.array([1e5, 1, 1], np.float32).reshape(1, 3, 1, 1)))
    weights = b.rng.normal(size=(8, 3, 1, 1)).astype(np.float32)
    weights[:, 0] = 0
    b.output(b.op("Conv", b.pair(loud, 4e5), b.const(weights), name="depth_conv"), name="depth")
    b.output(b.linear(b.op("Flatten", b.op("GlobalAveragePool", x)), 10), name="cls")
    return b.build()


@contextmanager
def running(model: onnx.ModelProto, folder: Path) -> Iterator[Infer]:
    path = folder / "net.onnx"
    onnx.save(model, path)
    runtime: Any = registry.create_plugin("benchmarker", "onnxruntime", {"optimization": "disabled"})
    with runtime.open(runtime.build(Candidate(digest="net", edges=(), source=lambda: path), folder)) as probe:
        yield probe.infer


def scored(plain: onnx.ModelProto, quantized: onnx.ModelProto, folder: Path) -> Accuracy:
    evaluator = Fidelity(folder / "reference.npz", {"x": ("float", (1, 3, SIZE, SIZE))}, samples=4)
    with running(plain, folder) as infer:
        evaluator.prepare(infer)
        assert evaluator.score(infer).metrics["sqnr_db"] == 120
    with running(quantized, folder) as infer:
        return evaluator.score(infer)


@pytest.mark.parametrize(
    ("build", "axis", "worst"),
    [
        (boxes_and_scores, 1, "output 'output0', axis 1 slices 4..9"),
        (boxes_and_scores, 2, "output 'output0', axis 2 slices 4..9"),
        (two_heads, 0, "output 'depth'"),
    ],
)
def test_worst_output_slice_decides_fidelity_and_is_named(build, axis, worst, tmp_path):
    found = scored(build(False, axis), build(True, axis), tmp_path)
    assert found.metrics["sqnr_db"] < 3
    assert worst in found.note


def test_rank_layers_uses_the_worst_output(tmp_path):
    path = tmp_path / "two.onnx"
    onnx.save(two_heads(True), path)
    feeds = [{"x": np.random.default_rng(i).normal(size=(1, 3, SIZE, SIZE)).astype(np.float32)} for i in range(4)]
    ranked = rank_layers(path, feeds, NullProgress())
    assert ranked[0][1] < 3
