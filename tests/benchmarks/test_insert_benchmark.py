"""Placement to a file ready to build, compared with the same step of ModelOpt's autotuner.

Run with `pytest tests/benchmarks/test_insert_benchmark.py --benchmark-enable`; figures to reach are 10 ms for
ResNet-50 and 20 ms for the decomposed encoder of about 4,200 nodes. Every round writes another random placement.
On a machine that does other things too, add `--benchmark-timer=time.process_time`.
"""

from __future__ import annotations

import itertools
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest

from harness.graph.load import load, load_proto
from harness.graph.model import Model
from harness.graph.qdq.insert import Inserter
from harness.graph.rules.dialects import ONNXRUNTIME, OPENVINO, TENSORRT, Dialect
from harness.zoo import write_model
from harness.zoo.transformer import encoder
from search.space import Edge, Resolved

pytestmark = pytest.mark.slow
DIALECTS = (OPENVINO, ONNXRUNTIME, TENSORRT)
MODELS = ("resnet18", "resnet50", "encoder86")


@cache
def ready(name: str) -> Model:
    if name == "encoder86":  # 4,223 nodes
        return load_proto(encoder(86, width=64).build(), source=name, sha256="0")
    with tempfile.TemporaryDirectory() as folder:
        return load(write_model(name, Path(folder) / f"{name}.onnx"), source=name)


def placements(model: Model, dialect: Dialect, count: int) -> list[Resolved]:
    """Random placements with seven tenths of all edges quantized."""
    rng = np.random.default_rng(0)
    edges = [
        Edge(tensor, node.name, slot)
        for node in model.nodes
        if node.op in dialect.operators
        for slot, tensor in enumerate(node.inputs[:2] if node.op in dialect.linear_ops else node.inputs)
        if tensor and model.types[tensor].dtype == "float" and not (node.op in ("Resize", "Clip") and slot)
    ]
    edges.sort()
    return [tuple((edge, "int8") for edge in edges if rng.random() < 0.7) for _ in range(count)]


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda d: d.name)
@pytest.mark.parametrize("name", MODELS)
def test_insert_placement_into_file(benchmark, name, dialect, tmp_path):
    if benchmark.disabled and name != "resnet18":
        pytest.skip("long models only where time is taken; enable benchmarks")
    model = ready(name)
    inserter = Inserter(model, dialect, {tensor: (-1.0, 1.0) for tensor in model.types})
    asked = itertools.cycle(placements(model, dialect, 20))
    inserter.write(next(asked), tmp_path)  # weights are written once
    benchmark.extra_info["nodes"] = len(model.nodes)
    # as a run does: the placement's digest is known there, and a search asks for dozens of placements of one model
    path = benchmark.pedantic(lambda: inserter.write(next(asked), tmp_path, name="asked"), rounds=40)
    if not benchmark.disabled:
        print(f"\nours: {len(model.nodes)} nodes, {1e3 * benchmark.stats.stats.median:.1f} ms")
    onnx.checker.check_model(str(path))


@pytest.mark.parametrize("name", MODELS)
def test_modelopt_insert_placement_into_file(benchmark, name, tmp_path):
    if benchmark.disabled:
        pytest.skip("the peer takes seconds to start; enable benchmarks")
    autotune = pytest.importorskip("modelopt.onnx.quantization.autotune")
    peer = autotune.QDQAutotuner(ready(name).proto)
    peer.initialize()
    peer.set_profile_region(peer.regions[0])
    peer.generate()
    benchmark.pedantic(lambda: peer.export_onnx(str(tmp_path / "peer.onnx")), rounds=3)
    print(f"\nModelOpt: {len(ready(name).nodes)} nodes, {1e3 * benchmark.stats.stats.median:.1f} ms")
