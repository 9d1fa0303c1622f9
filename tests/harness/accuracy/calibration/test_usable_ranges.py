"""What a reader of results finds about the calibration of a task."""

import json

import numpy as np
import pytest

from harness.accuracy.calibration.range_estimators import restrict_space
from harness.base.progress import NullProgress
from harness.config.experiment import parse_experiment
from harness.graph.builder import GraphBuilder
from harness.graph.load import load_proto
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import ONNXRUNTIME, OPENVINO, TENSORRT
from harness.run.runner import run_experiment
from search.space import Dimension, Edge, Space

POOL = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}

EXPERIMENT = """
experiment: odd
models: [{use: odd.onnx, calibration: {samples: 2}}]
backends: [{use: simulated, params: {seed: 5, noise: 0.0}}]
searchers: [random]
initial: [float, all]
baselines: [all]
budget: {evaluations: [4]}
confirmation: {builds: 3, rounds: 2, samples: 3}
"""


def test_unusable_and_dead_activations_are_recorded(tmp_path):
    builder = GraphBuilder("odd", seed=1)
    x = builder.op("Relu", builder.conv(builder.input("x", (1, 3, 8, 8)), 4, 3, pad=1))
    log = builder.op("Log", x, outputs=["log"])[0]  # of 0 is minus infinity
    dead = builder.op("Mul", builder.conv(x, 4, 3, pad=1), builder.const(0.0), outputs=["dead"])[0]
    tail = builder.op("Add", builder.conv(dead, 4, 3, pad=1), builder.op("Exp", builder.op("MaxPool", log, **POOL)))
    builder.output(builder.op("GlobalAveragePool", tail))
    builder.save(tmp_path / "odd.onnx")
    said: list[str] = []

    class Ears(NullProgress):
        def say(self, text: str) -> None:
            said.append(text)

    experiment = parse_experiment(EXPERIMENT, "odd.yaml", tmp_path)
    run_experiment(experiment, out=tmp_path / "out", observer=Ears())
    facts = json.loads((tmp_path / "out" / "odd-simulated-int8" / "task.json").read_text())
    assert facts["calibrated_on"] == "random data"
    broken, quiet = facts["calibration_remarks"]
    assert broken.startswith("NaN, infinite or huge on calibration data, so they stay float: ")
    assert "'log'" in broken
    assert quiet.startswith("always 0, or without values, on calibration data (dead): ")
    assert "'dead'" in quiet
    assert [line for line in said if "'log'" in line] == [f"odd.onnx: {broken}"]


def test_restrict_space_removes_edges_of_unusable_tensors():
    def dimension(name: str, *tensors: str) -> Dimension:
        edges = tuple(Edge(tensor, f"/{tensor}", 0) for tensor in tensors)
        return Dimension(name=name, group="g", kind="node_input", choices=("float", "int8"), edges=edges)

    space = Space((dimension("both", "a", "b"), dimension("one", "b"), dimension("constant", "w")))
    kept = restrict_space(space, {"a": (0.0, 1.0), "b": (float("-inf"), 1.0)})
    assert [(d.name, [e.tensor for e in d.edges]) for d in kept.dimensions] == [("both", ["a"]), ("constant", ["w"])]


@pytest.mark.parametrize("dialect", [OPENVINO, ONNXRUNTIME, TENSORRT], ids=lambda d: d.name)
def test_operands_of_an_unusable_tensor_stay_float(dialect):
    """The weight of a convolution, a constant factor, the other side of a product; but not the rest of a Concat."""
    builder = GraphBuilder("odd", opset=19)
    x = builder.input("x", (1, 4, 8, 8))
    log = builder.op("Log", x, outputs=["log"])[0]
    builder.output(builder.conv(log, 4, 3, name="conv"), name="convolved")
    builder.output(builder.op("Mul", log, builder.const(np.ones((1, 4, 1, 1), np.float32)), name="mul"), name="scaled")
    builder.output(builder.op("MatMul", x, log, name="product"), name="multiplied")
    builder.output(builder.op("Concat", log, x, axis=1, name="concat"), name="joined")
    model = load_proto(builder.build(), source="odd", sha256="0")
    activations = model.types.keys() - model.constants.keys()
    ranges = {name: (-1.0, 1.0) for name in activations} | {"log": (float("-inf"), 1.0)}
    kept = restrict_space(build_space(model, dialect), ranges)
    read = {(edge.consumer, edge.slot) for edge, _ in kept.resolve(kept.quantize_all())}
    assert {place for place in read if place[0] in ("conv", "mul", "product", "concat")} == {("concat", 1)}
