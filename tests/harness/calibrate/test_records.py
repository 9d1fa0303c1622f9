"""What a reader of results finds about the calibration of a cell."""

from __future__ import annotations

import json
from pathlib import Path

from harness.calibrate.ranges import narrowed
from harness.graph.build import GraphBuilder
from harness.run.config import parse_experiment
from harness.run.experiment import run_experiment
from harness.run.observe import Silent
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


def test_broken_and_dead_activations_are_recorded_and_the_broken_ones_stay_float(tmp_path: Path) -> None:
    builder = GraphBuilder("odd", seed=1)
    x = builder.op("Relu", builder.conv(builder.input("x", (1, 3, 8, 8)), 4, 3, pad=1))
    log = builder.op("Log", x, outputs=["log"])[0]  # of 0 is minus infinity
    dead = builder.op("Mul", builder.conv(x, 4, 3, pad=1), builder.const(0.0), outputs=["dead"])[0]
    tail = builder.op("Add", builder.conv(dead, 4, 3, pad=1), builder.op("Exp", builder.op("MaxPool", log, **POOL)))
    builder.output(builder.op("GlobalAveragePool", tail))
    builder.save(tmp_path / "odd.onnx")
    said: list[str] = []

    class Ears(Silent):
        def say(self, text: str) -> None:
            said.append(text)

    experiment = parse_experiment(EXPERIMENT, "odd.yaml")
    run_experiment(experiment, base=tmp_path, out=tmp_path / "out", observer=Ears())
    facts = json.loads((tmp_path / "out" / "odd-simulated-int8" / "cell.json").read_text())
    assert facts["calibrated_on"] == "random data"
    broken, quiet = facts["calibration_remarks"]
    assert broken.startswith("NaN, infinite or huge on calibration data, so they stay float: ")
    assert "'log'" in broken
    assert quiet.startswith("always 0 on calibration data (dead): ")
    assert "'dead'" in quiet
    assert [line for line in said if "'log'" in line] == [f"odd.onnx: {broken}"]


def test_a_space_loses_the_edges_of_broken_tensors_alone() -> None:
    def dimension(name: str, *tensors: str) -> Dimension:
        edges = tuple(Edge(tensor, f"/{tensor}", 0) for tensor in tensors)
        return Dimension(name=name, group="g", kind="node_input", choices=("float", "int8"), edges=edges)

    space = Space((dimension("both", "a", "b"), dimension("one", "b"), dimension("constant", "w")))
    kept = narrowed(space, {"a": (0.0, 1.0), "b": (float("-inf"), 1.0)})
    assert [(d.name, [e.tensor for e in d.edges]) for d in kept.dimensions] == [("both", ["a"]), ("constant", ["w"])]
