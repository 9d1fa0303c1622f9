"""A candidate on which the real runtime dies is a failed one, and the next candidate is built as ever."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from harness.api import Candidate
from harness.config.sections import Limits, PluginSpec
from harness.graph.builder import GraphBuilder
from harness.records import Failed
from harness.timing.workers.engines import BuiltEngine, WorkerSpec
from harness.timing.workers.sandbox import Sandbox
from search.space import Edge


def pair(g: GraphBuilder, tensor: str, zero: int = 120) -> str:
    grid = g.const(np.float32(0.02)), g.const(np.uint8(zero))
    return g.op("DequantizeLinear", g.op("QuantizeLinear", tensor, *grid), *grid)


def convolution(g: GraphBuilder, tensor: str, *shape: int, **attributes: Any) -> str:
    weight = np.random.default_rng(0).normal(size=shape, scale=0.2).astype(np.float32)
    output: str = g.op("Conv", tensor, g.const(weight), **attributes)
    return output


def sliced_concat(g: GraphBuilder) -> str:
    """OpenVINO 2026.4.1 dies on a Slice of all channels between the pairs of a Concat and an Add (GhostNet)."""
    x = g.input("x", (1, 16, 4, 4))
    residual, first = convolution(g, x, 16, 16, 1, 1), convolution(g, x, 8, 16, 1, 1)
    second = convolution(g, first, 8, 1, 3, 3, group=8, pads=[1, 1, 1, 1])
    joined = g.op("Concat", pair(g, first), pair(g, second), axis=1)
    part = g.op("Slice", pair(g, joined), g.const([0]), g.const([16]), g.const([1]), g.const([1]))
    return g.op("Relu", g.op("Add", pair(g, part), pair(g, residual)))


def half_quantized_where(g: GraphBuilder) -> str:
    """ONNX Runtime 1.24.4 dies on a Where of a quantized branch and a scalar input of the model."""
    x, bound = g.input("x", (2, 3)), g.input("bound", ())
    return pair(g, g.op("Where", g.op("Less", x, bound), bound, pair(g, x)))


def harmless(g: GraphBuilder) -> str:
    return g.op("Relu", pair(g, g.input("x", (2, 3))))


def candidate(make: Callable[[GraphBuilder], str], folder: Path) -> Candidate:
    g = GraphBuilder(make.__name__)
    g.output(make(g))
    path = folder / f"{make.__name__}.onnx"
    onnx.save(g.build(), path)
    return Candidate(digest=make.__name__, edges=((Edge("x", "n", 0), "int8"),), source=lambda: path)


@pytest.mark.parametrize(
    ("make", "backend", "package", "version"),
    [
        (sliced_concat, "openvino", "openvino", "2026.4.1"),
        (half_quantized_where, "onnxruntime", "onnxruntime", "1.24.4"),
    ],
)
def test_a_runtime_that_dies_fails_one_candidate(
    make: Callable[[GraphBuilder], str], backend: str, package: str, version: str, tmp_path: Path
) -> None:
    names = {package, f"{package}-gpu"}
    installed = {dist.version for dist in metadata.distributions() if dist.metadata["Name"] in names}
    if version not in installed:
        pytest.skip(f"seen with {package} {version}")
    spec = WorkerSpec(benchmarkers={"main": PluginSpec(use=backend)}, evaluators={}, workdir=tmp_path)
    with Sandbox(spec, Limits()) as sandbox:
        outcome = sandbox.build(candidate(make, tmp_path))
        assert isinstance(outcome, Failed), "fixed: drop this case"
        assert outcome.stage == "crash"
        assert "SIGSEGV" in outcome.reason
        assert isinstance(sandbox.build(candidate(harmless, tmp_path)), BuiltEngine)
