"""Models with outputs that are no tensors run, are compared and deployed; types without arrays are refused by name."""

import runpy
import sys

import numpy as np
import onnx
import pytest
from onnx import helper, parser
from onnx_models import loaded

from harness.base.errors import UserError
from harness.graph.load import load, save_to_folder
from harness.plugins.api import name_arrays
from harness.run.prepare.model_loader import input_types
from harness.run.verify.dynamic_check import write_dynamic_model
from harness.runtimes.host_clock import run_session
from harness.runtimes.onnxruntime import ONNXRuntimeBenchmarker
from harness.ship.bundle import deploy_script, find_target

X = np.array([[1.0, -2.0]], np.float32)
WANTED = {"q[0]": [[1, 0]], "q[1]": [[-1, 2]], "o": [[1, 0]], "s": [["one", "two"]], "m[0]": [1, 0]}


def model(size: str = "1") -> onnx.ModelProto:
    """Return a model with a sequence, an optional, text and maps as outputs."""
    proto = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17, "ai.onnx.ml": 3]> g (float[{size},2] x)
        => (seq(float[{size},2]) q, optional(float[{size},2]) o, string[{size},2] s) {{
        r = Relu(x)  n = Neg(x)  q = SequenceConstruct(r, n)  o = Optional(r)  p = Cast<to=7>(r)
        s = ai.onnx.ml.LabelEncoder<keys_int64s=[1, 0], values_strings=["one", "two"]>(p) }}"""
    )
    proto.graph.node.append(
        helper.make_node("ZipMap", ["r"], ["m"], domain="ai.onnx.ml", classlabels_strings=["a", "b"])
    )
    element = helper.make_map_type_proto(onnx.TensorProto.STRING, helper.make_tensor_type_proto(1, []))
    proto.graph.output.append(helper.make_value_info("m", helper.make_sequence_type_proto(element)))
    return proto


def test_arrays_of_all_outputs_are_named():
    found = name_arrays({"a": [np.ones(2), [np.zeros(1)]], "none": None, "m": {"x": 0.5}, "t": np.array(["b"], object)})
    assert {name: value.tolist() for name, value in found.items()} == {
        "a[0]": [1, 1], "a[1][0]": [0], "m": [0.5], "t": ["b"]
    }  # fmt: skip
    assert found["t"].dtype.kind == "U"


def test_model_is_prepared_run_and_deployed(tmp_path, monkeypatch, capsys):
    ready = loaded(model())
    assert input_types(ready) == {"x": ("float", (1, 2))}
    path, benchmarker = save_to_folder(ready, tmp_path), ONNXRuntimeBenchmarker()
    session = benchmarker._create_session(str(path))
    assert {name: array.tolist() for name, array in run_session(session, {"x": X}).items()} == WANTED
    facts = benchmarker.describe()
    target = find_target(facts)
    assert target is not None
    (tmp_path / "deploy.py").write_text(deploy_script(path, facts, target))
    np.save(tmp_path / "x.npy", X)
    given = ["--input", f"x={tmp_path / 'x.npy'}", "--output", str(tmp_path / "y.npz"), "--repeat", "1"]
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "deploy.py"), *given])
    runpy.run_path(sys.argv[0], run_name="__main__")
    assert "q[1]: [1, 2]" in capsys.readouterr().out
    with np.load(tmp_path / "y.npz", allow_pickle=False) as written:
        assert {name: written[name].tolist() for name in written.files} == WANTED


def test_dynamic_file_is_compared(tmp_path):
    onnx.save(model("N"), tmp_path / "m.onnx")
    ready = load(tmp_path / "m.onnx")
    made = write_dynamic_model(ready, save_to_folder(ready, tmp_path / "fixed"), "onnxruntime")
    assert made.file is not None, made.remark
    assert "onnxruntime: relative difference to the float model 0" in made.remark


@pytest.mark.parametrize(
    ("inputs", "body", "outputs", "fact"),
    [
        ("float[2] x", "y = Cast<to=16>(x)", "bfloat16[2] y", "output 'y' is of type 'bfloat16'"),
        ("float[2] x", "b = Cast<to=16>(x)  y = SequenceConstruct(b)", "seq(bfloat16[2]) y", "output 'y' is of type"),
        ("seq(float[2]) x", "y = SequenceLength(x)", "int64 y", "input 'x' is of type 'sequence'"),
        ("optional(float[2]) x", "y = OptionalHasElement(x)", "bool y", "input 'x' is of type 'optional'"),
    ],
)  # fmt: skip
def test_types_without_arrays_are_refused_by_name(inputs, body, outputs, fact):
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g ({inputs}) => ({outputs}) {{ {body} }}')
    with pytest.raises(UserError, match=fact):
        input_types(loaded(proto))


@pytest.mark.parametrize("backend", ["openvino", "tensorrt"])
def test_sequence_output_is_refused_for_a_runtime_of_tensors(backend):
    with pytest.raises(UserError, match=r"output 'q' is of type 'sequence'.*'onnxruntime'"):
        input_types(loaded(model()), backend)
