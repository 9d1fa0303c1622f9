"""A Q/DQ file that a command writes is run; one that is wrong in its runtime does not get the name asked for."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from small import qdq, save_small

from harness.compat.tao_specs import quantize as spec_file
from harness.graph.builder import GraphBuilder
from harness.graph.io.files import model_files, set_model_aside
from harness.results.output_check import OutputCheck, not_checked

program = importlib.import_module("qdq")  # `qdq` is the command here

PLUGIN = """
from contextlib import contextmanager

import onnx
import onnxruntime
from onnx import helper

from harness.plugins.api import Artifact, Capabilities
from harness.base.errors import BuildFailed, MeasureFailed, UserError


class Probe:
    def __init__(self, session):
        self.session = session

    def sample(self, n):
        return [1.0] * n

    def infer(self, feeds):
        if self.session is None:
            raise MeasureFailed("outputs of this kind cannot be read")
        names = [value.name for value in self.session.get_outputs()]
        return dict(zip(names, self.session.run(names, feeds)))


class Runtime:  # runs a file as it is, but for a fault: a result of another sign, a refusal, a missing device
    capabilities = Capabilities(dialect="openvino")

    def __init__(self, fault="none"):
        self.fault = fault

    def build(self, candidate, workdir):
        proto = onnx.load(candidate.source())
        quantized = any(node.op_type == "DequantizeLinear" for node in proto.graph.node)
        if self.fault == "refusal" and quantized:
            raise BuildFailed("no kernel for this pair")
        if (self.fault == "sign" and quantized) or self.fault == "float":
            last = proto.graph.node[-1]
            output, last.output[0] = last.output[0], "right"
            proto.graph.node.append(helper.make_node("Neg", ["right"], [output]))
        if self.fault == "outputs":
            return Artifact(engine=None)
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        return Artifact(engine=onnxruntime.InferenceSession(proto.SerializeToString(), options))

    @contextmanager
    def open(self, artifact):
        yield Probe(artifact.engine)

    def describe(self):
        if self.fault == "device":
            raise UserError("no device of this kind")
        return {"name": "faulty", "version": "2.1-abc", "device": "cpu", "options": {}, "float_precision": "f32"}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "runtime_of_files.py").write_text(PLUGIN)
    save_small(tmp_path / "net.onnx")
    (tmp_path / "q.onnx").write_text("an older file")
    return tmp_path


def insert(fault: str, *more: str) -> int:
    use = ("--backend", "runtime_of_files:Runtime", "--param", f"fault={fault}")
    return qdq("insert", "net.onnx", "-o", "q.onnx", "--samples", "2", *use, *more)


def test_insert_runs_the_file_and_prints_both_distances(folder, capsys):
    assert insert("none", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    check = OutputCheck(**found["check"])
    assert check.verdict == "right"
    assert check.summary.startswith(f"checked in faulty 2.1: {check.file_db:.0f} dB from float, 120 dB from the file")
    assert onnx.load(found["path"]).graph.node


@pytest.mark.parametrize(
    ("fault", "facts"),
    [
        ("sign", ("wrong result", "faulty 2.1", "-6.0 dB", "at output", "another --placement", "--no-run")),
        ("refusal", ("refused", "no kernel for this pair", "another --placement")),
        ("float", ("wrong result", "fails for the float model, too (wrong result)")),
    ],
)
def test_unusable_file_is_set_aside_with_exit_status_1(folder, capsys, fault, facts):
    assert insert(fault) == 1
    said = capsys.readouterr()
    assert "q.wrong.onnx: " in said.out
    assert all(fact in said.err for fact in facts)
    assert ("another --placement" in said.err) == (fault != "float")
    assert not Path("q.onnx").exists(), "not the older file either"
    assert any(node.op_type == "DequantizeLinear" for node in onnx.load("q.wrong.onnx").graph.node)


@pytest.mark.parametrize(("fault", "more"), [("device", ()), ("outputs", ()), ("sign", ("--no-run",))])
def test_file_that_is_not_run_is_written_with_the_reason(folder, capsys, fault, more):
    assert insert(fault, *more) == 0
    assert "not checked: " in capsys.readouterr().out
    assert onnx.load("q.onnx").graph.node


def test_insert_for_a_runtime_that_is_not_installed(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    assert qdq("insert", "net.onnx", "-o", "q.onnx", "--samples", "2") == 0
    assert "not checked: benchmarker 'openvino'" in capsys.readouterr().out
    assert qdq("insert", "net.onnx", "-o", "q.onnx", "--param", "thread=1") == 2


def test_float_placement_and_python_call_are_checked(folder):
    use = {"use": "runtime_of_files:Runtime", "params": {"fault": "float"}}
    made = program.insert("net.onnx", "f.onnx", placement="float", backend=use, calibration=None)
    assert made.path == Path("f.wrong.onnx")
    assert made.check.verdict == "wrong result"
    assert not made.check.is_usable
    again = program.insert("net.onnx", "f.onnx", placement="float", backend=use, run=False)
    assert (again.path, again.check.verdict) == (Path("f.onnx"), "not checked")


def test_set_aside_model_keeps_its_external_data(tmp_path):
    g = GraphBuilder("g")
    g.output(g.op("MatMul", g.input("x", (1, 64)), g.const(np.ones((64, 64), np.float32))), name="y")
    path = tmp_path / "big.onnx"
    onnx.save(g.build(), path, save_as_external_data=True, location="big.onnx.data", size_threshold=0)
    aside = set_model_aside(path, path)
    assert {file.name for file in model_files(aside)} == {"big.wrong.onnx", "big.wrong.onnx.data"}
    assert {file.name for file in tmp_path.iterdir()} == {"big.wrong.onnx", "big.wrong.onnx.data"}
    assert onnx.load(aside).graph.initializer[0].dims == [64, 64]


def test_quantize_and_ptq_set_an_unusable_file_aside(tmp_path, monkeypatch, capsys):
    g = GraphBuilder("net", seed=1)
    g.output(g.conv(g.input("x", ("N", 3, 8, 8)), 32, 3), name="y")
    monkeypatch.chdir(tmp_path)
    model, seen = g.save(tmp_path / "net.onnx"), []

    def check(file: Path, float_file: Path, feeds: list[dict[str, np.ndarray]], use: object) -> OutputCheck:
        shapes = [onnx.load(each).graph.input[0].type.tensor_type.shape.dim[0].dim_value for each in (file, float_file)]
        seen.append((use.use, shapes, len(feeds)))
        return OutputCheck(verdict="refused", runtime="openvino 1", reason="it refuses the file")

    monkeypatch.setattr(spec_file, "check_file", check)
    monkeypatch.setattr(
        "harness.compat.tao_specs.ptq.quantize_with_modelopt",
        lambda path, target, *_: target.write_bytes(path.read_bytes()),
    )
    layers = "[{module_name: Conv, weights: {dtype: int8}, activations: {dtype: int8}}]"
    section = f"{{model_path: {model}, backend: qdq, layers: {layers}, backend_kwargs: {{dialect: openvino_7bit}}}}"
    (tmp_path / "s.yaml").write_text(f"quantize: {section}\nresults_dir: out")
    assert qdq("quantize", "s.yaml") == 1
    assert "refused: it refuses the file" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["quantized_model.wrong.onnx"]
    ptq = ("ptq", "--onnx_path", "net.onnx", "--output_path", "p.onnx")
    assert qdq(*ptq, "--json") == 1
    assert json.loads(capsys.readouterr().out)["check"]["verdict"] == "refused"
    assert Path("p.wrong.onnx").exists()
    assert not Path("p.onnx").exists()
    assert qdq(*ptq, "--no-run") == 0
    assert Path("p.onnx").exists()
    assert seen == [("openvino", [1, 1], 4), ("tensorrt", [1, 1], 4)]


def test_dialect_without_a_backend_is_not_checked(tmp_path):
    save_small(tmp_path / "net.onnx")
    made = spec_file.checked_result(tmp_path / "net.onnx", "", tmp_path / "net.onnx", {}, [{}], "mine")
    assert made.check == not_checked("no backend runs the dialect 'mine'")
