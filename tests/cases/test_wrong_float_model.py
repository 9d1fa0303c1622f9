"""A runtime that computes the float model wrongly is named before the search, and its float model is not advised."""

import json

import numpy as np
import pytest
from cheap_runs import cheap_runs
from qdq import load_result
from small import qdq

from harness.base.errors import UserError
from harness.graph.builder import GraphBuilder

__all__ = ["cheap_runs"]

PLUGINS = """
import numpy as np
import onnx
import onnxruntime
from onnx import helper

from harness.plugins.api import Capabilities
from harness.runtimes.simulated import SimulatedBenchmarker


class WrongRuntime(SimulatedBenchmarker):
    '''Computes the result of the last Relu with another sign, in every model.'''

    capabilities = Capabilities(dialect="openvino")

    def build(self, candidate, workdir):
        built = super().build(candidate, workdir)
        proto = onnx.load(candidate.source())
        index, last = [(i, node) for i, node in enumerate(proto.graph.node) if node.op_type == "Relu"][-1]
        output, last.output[0] = last.output[0], "right"
        proto.graph.node.insert(index + 1, helper.make_node("Neg", ["right"], [output]))
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
        names = [value.name for value in session.get_outputs()]
        built.engine.infer = lambda feeds: dict(zip(names, session.run(names, feeds)))
        return built

    def describe(self):
        precisions = {"float_precision": "bf16", "float_params": {"f32": {}, "bf16": {}}}
        return {**super().describe(), "name": "wrong", **precisions}


def share(outputs, labels):
    return (outputs.reshape(len(labels), -1) > 0).mean(axis=1)


def total(outputs, labels):
    return float((outputs > 0).mean())
"""
EXPERIMENT = """
experiment: wrong
models: [{{use: net.onnx, calibration: {{samples: 2}}{evaluator}}}]
backends: [{{use: 'wrong_runtime:WrongRuntime', label: wrong, params: {{noise: 0.0}}}}]
objective: {objective}
searchers: [random]
initial: [float, all]
baselines: [all]
budget: {{evaluations: [4]}}
confirmation: {{builds: 3, rounds: 2, samples: 3}}
"""
EVALUATOR = """, evaluator: {{use: metric, params: {{data: {{use: npz, path: test.npz, labels: labels}}, \
function: 'wrong_runtime:{function}'}}}}"""


@pytest.fixture
def save(tmp_path, monkeypatch):
    """Return a function that writes a model, whose output may be integers, which are not compared."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong_runtime.py").write_text(PLUGINS)

    def write(*, integers: bool) -> None:
        builder = GraphBuilder("net", seed=1)
        x = builder.op("Relu", builder.conv(builder.input("x", (1, 3, 8, 8)), 8, 3))
        x = builder.op("Relu", builder.conv(x, 8, 3))
        builder.output(builder.op("Cast", builder.op("Ceil", x), to=7) if integers else x)
        builder.save(tmp_path / "net.onnx")

    return write


def test_autotune_by_regions_advises_no_wrong_float_model(save, tmp_path, capsys):
    save(integers=False)
    flags = ("--max_evals", "3", "--timing_runs", "3", "--searcher", "random", "--mode", "quick")
    assert qdq("autotune", "-m", "net.onnx", "-o", "out", "--backend", "wrong_runtime:WrongRuntime", *flags) == 0
    text = (tmp_path / "out" / "logs" / "final.log").read_text()
    assert "deploy no file, not even the float model, because wrong computes it wrongly" in text


@pytest.mark.parametrize("function", ["", "share", "total"], ids=["outputs", "metric by sample", "one metric"])
def test_wrong_float_model_is_named_before_the_search(save, tmp_path, capsys, function):
    save(integers=bool(function))
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "test.npz", x=rng.standard_normal((8, 3, 8, 8)).astype(np.float32), labels=np.zeros(8))
    evaluator = EVALUATOR.format(function=function) if function else ""
    objective = "{minimize: latency, max_drop: 0.1}" if function else "{minimize: latency}"
    (tmp_path / "wrong.yaml").write_text(EXPERIMENT.format(evaluator=evaluator, objective=objective))
    assert qdq("run", "wrong.yaml", "--out", "out", "--json", "--events") == 0
    said = capsys.readouterr()
    first = said.err.index("wrong computes the float model wrongly")
    assert first < said.err.index("random-0"), "before the search"
    assert "precision: f32" in said.err[first:]
    if function:
        assert "metric is 0.0000 by the runtime" in said.err[first:]
    (answer,) = json.loads(said.out)["answers"]
    assert answer.startswith("deploy no file, not even the float model, because wrong computes the float model wrongly")
    steps = "\n".join(json.loads(said.out)["next_steps"])
    assert all(remedy in steps for remedy in ("precision: f32", "another export"))
    with pytest.raises(UserError, match="not even the float model"):
        _ = load_result("out").best
