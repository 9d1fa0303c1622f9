"""A candidate on which a runtime dies fails, one that it computes wrongly is reported, and the next one is built."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from checks_of import checks
from fidelity_of import write_quantized
from machine import CPU_FLAGS, exact_int8
from onnx_models import loaded, pair

from harness.base.random_inputs import random_feeds
from harness.config.sections import Limits, PluginSpec
from harness.graph.builder import GraphBuilder
from harness.graph.load import save_to_folder
from harness.graph.rules.dialects import OPENVINO
from harness.measure.provenance import describe_installed
from harness.measure.records import MAIN_BENCHMARKER, Failed
from harness.plugins.api import Candidate
from harness.workers.engines import BuiltEngine, WorkerSpec
from harness.workers.sandbox import Sandbox, open_engines
from search.space import Edge

GRID = 0.02, np.uint8(120)


def convolution(g: GraphBuilder, tensor: str, *shape: int, **attributes: Any) -> str:
    weight = np.random.default_rng(0).normal(size=shape, scale=0.2).astype(np.float32)
    output: str = g.op("Conv", tensor, g.const(weight), **attributes)
    return output


def sliced_concat(g: GraphBuilder) -> str:
    """OpenVINO 2026.4.1 dies on a Slice of all channels between the pairs of a Concat and an Add (GhostNet)."""
    x = g.input("x", (1, 16, 4, 4))
    residual, first = convolution(g, x, 16, 16, 1, 1), convolution(g, x, 8, 16, 1, 1)
    second = convolution(g, first, 8, 1, 3, 3, group=8, pads=[1, 1, 1, 1])
    joined = g.op("Concat", pair(g, first, *GRID), pair(g, second, *GRID), axis=1)
    part = g.op("Slice", pair(g, joined, *GRID), g.const([0]), g.const([16]), g.const([1]), g.const([1]))
    return g.op("Relu", g.op("Add", pair(g, part, *GRID), pair(g, residual, *GRID)))


def half_quantized_where(g: GraphBuilder) -> str:
    """ONNX Runtime 1.24.4 dies on a Where of a quantized branch and a scalar input of the model."""
    x, bound = g.input("x", (2, 3)), g.input("bound", ())
    return pair(g, g.op("Where", g.op("Less", x, bound), bound, pair(g, x, *GRID)), *GRID)


def harmless(g: GraphBuilder) -> str:
    return g.op("Relu", pair(g, g.input("x", (2, 3)), *GRID))


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
def test_runtime_crash_fails_one_candidate(make, backend, package, version, tmp_path):
    if describe_installed(package).get("version") != version:
        pytest.skip(f"seen with {package} {version}")
    spec = WorkerSpec(benchmarkers={"main": PluginSpec(use=backend)}, evaluators={}, workdir=tmp_path)
    with Sandbox(spec, Limits()) as sandbox:
        outcome = sandbox.build(candidate(make, tmp_path))
        assert isinstance(outcome, Failed), "fixed: drop this case"
        assert outcome.stage == "crash"
        assert "SIGSEGV" in outcome.reason
        assert isinstance(sandbox.build(candidate(harmless, tmp_path)), BuiltEngine)


SHAPES = {"tokens": (2, 49, 32), "concat": (1, 8, 16, 16)}
without_amx = pytest.mark.skipif("amx_int8" in CPU_FLAGS, reason="with AMX these convolutions are right")
OPERATORS = {"tokens": "ReduceMean", "concat": "Conv"}


def tokens(folder):
    """The mean over the tokens of a batch of two, float and with quantized data."""
    for name in ("float", "quantized"):
        g = GraphBuilder("tokens")
        x = g.op("Relu", g.input("x", SHAPES["tokens"]))
        x = pair(g, x, 4 / 255, np.uint8(0)) if name == "quantized" else x
        g.output(g.op("Tanh", g.op("ReduceMean", x, axes=[1], keepdims=0)))
        g.save(folder / f"{name}.onnx")
    return folder / "float.onnx", folder / "quantized.onnx"


def concat(folder):
    """Convolutions with symmetric INT8 data, as other tools write them, one of them behind a Concat."""
    g = GraphBuilder("convolutions")
    x = g.input("x", SHAPES["concat"])
    g.output(g.conv(g.op("Concat", g.conv(x, 16, 3), g.conv(x, 16, 3), axis=1), 16, 3))
    model, feeds = loaded(g), random_feeds({"x": ("float", SHAPES["concat"])}, 4)
    dialect = dataclasses.replace(OPENVINO, affine_ops=frozenset(), unsigned_positive=False)
    return save_to_folder(model, folder / "float"), write_quantized(model, dialect, feeds, folder, {"linear"})


def checked(kind, folder, backend):
    floating, quantized = {"tokens": tokens, "concat": concat}[kind](folder)
    feeds = random_feeds({"x": ("float", SHAPES[kind])}, 4)
    worker = WorkerSpec(benchmarkers={MAIN_BENCHMARKER: backend}, workdir=folder / "engines")
    with open_engines(worker, Limits()) as engines:
        return checks(engines, floating, feeds, folder, {"imported": quantized})[0]


@exact_int8
@pytest.mark.parametrize("kind", ["tokens", pytest.param("concat", marks=without_amx)])
def test_wrong_result_names_operator_and_minimal_model(kind, tmp_path):
    found = checked(kind, tmp_path, PluginSpec(use="openvino", params={"precision": "f32"}))
    assert found.label == "wrong result in openvino"
    assert found.engine_db < 15 < found.file_db - 6
    assert found.operator.startswith(OPERATORS[kind])
    small = onnx.load(tmp_path / found.model)
    assert OPERATORS[kind] in {node.op_type for node in small.graph.node}
    assert "Tanh" not in {node.op_type for node in small.graph.node}


@pytest.mark.parametrize("kind", SHAPES)
def test_correct_runtime_gets_verdict_right(kind, tmp_path):
    assert checked(kind, tmp_path, PluginSpec(use="onnxruntime")).verdict == "right"
