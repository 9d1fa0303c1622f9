"""Arguments of ModelOpt for a spec or a command line, and (slow tests) their effect."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from small import qdq
from spec_runs import E4M3, E5M2, INT8, NATIVE, layer, quantize_spec

from harness.base.errors import UserError
from harness.base.paths import TRUST_VARIABLE
from harness.compat.tao_specs import modelopt_arguments
from harness.compat.tao_specs import ptq as command
from harness.compat.tao_specs.dataset import sample_shape
from harness.compat.tao_specs.spec import DEFAULT_OPERATORS, FLOAT_BY_DEFAULT, PRESETS, parse_spec, require_section
from harness.graph.builder import GraphBuilder
from harness.graph.load import read_signature
from harness.graph.qdq.qdq_graph import QDQGraph


def arguments(model: Path, layers: str, extra: str = "") -> dict[str, Any]:
    spec = parse_spec(f"quantize:\n  model_path: {model}\n  layers: [{layers}]\n{extra}", "s")
    found = require_section(spec.quantize, "quantize", "s")
    return modelopt_arguments.make_modelopt_arguments(found, found.layers, read_signature(model).nodes)


MODELOPT = """
import inspect
from modelopt.onnx.quantization import quantize
parameters = inspect.signature(quantize).parameters.values()
named = {p.name: None if p.default is p.empty else p.default for p in parameters if p.kind is not p.VAR_KEYWORD}
print((named, inspect.getmodule(quantize).__doc__))
"""


def test_parameters_and_defaults_equal_modelopts(warm_python, tmp_path):
    parameters, description = warm_python.evaluate("modelopt", tmp_path, MODELOPT)
    assert dict(modelopt_arguments.modelopt_parameters()) == parameters, "read without importing it"
    text = " ".join(description.split())
    for mode, ops in DEFAULT_OPERATORS.items():
        assert f"{mode.upper()} mode: {', '.join(ops)}" in text
    assert not {op for kind in ("activations", "structure") for op in FLOAT_BY_DEFAULT[kind]} & set(
        DEFAULT_OPERATORS["int8"]
    )


def test_arguments_of_a_quantize_section(small):
    found = arguments(
        small,
        f"{layer('Conv')}, {layer('Gemm')}, {layer('Add', NATIVE)}",
        "  algorithm: entropy\n  skip_names: [/head]\n"
        "  backend_kwargs: {use_external_data_format: true, calibrate_per_node: true, high_precision_dtype: fp32}\n",
    )
    assert found == {
        "quantize_mode": "int8",
        "calibration_method": "entropy",
        "calibration_eps": ["cpu"],
        "log_level": "WARNING",
        "op_types_to_quantize": ["Conv", "Gemm"],
        "op_types_to_exclude": ["Add"],
        "nodes_to_exclude": [r"/head/fc/Gemm$", r"/head/flatten/Flatten$", r"/head/pool/GlobalAveragePool$"],
        "use_external_data_format": True,
        "calibrate_per_node": True,
        "high_precision_dtype": "fp32",
    }


def test_native_layers_add_to_op_types_to_exclude(small):
    extra = "  backend_kwargs: {op_types_to_exclude: [Relu]}\n"
    found = arguments(small, f"{layer('Add', NATIVE)}, {layer('*')}", extra)
    assert found["op_types_to_exclude"] == ["Add", "Relu"]


@pytest.mark.parametrize(("algorithm", "method"), [("minmax", "max"), ("max", "max"), ("entropy", "entropy")])
def test_algorithm_sets_calibration_method(algorithm, method, small):
    found = arguments(small, layer("*"), f"  algorithm: {algorithm}\n")
    assert found["calibration_method"] == method
    assert "op_types_to_quantize" not in found  # "*": its own defaults


def test_node_names_become_exact_expressions(small):
    found = arguments(small, layer("/backbone/conv1/*"))
    assert found["op_types_to_quantize"] == ["Conv"]
    assert found["nodes_to_quantize"] == ["/backbone/conv1/Conv$"]


@pytest.mark.parametrize(
    ("layers", "mode", "message"),
    [
        (f"{layer('Conv')}, {layer('Gemm', E4M3)}", "int8", "it applies the first, int8, to all"),
        (layer("Conv", E5M2), "fp8", "ModelOpt writes FP8 only as E4M3"),
        ("{module_name: Conv, weights: {dtype: int8}}", "int8", "quantizes weights and activations alike"),
    ],
)
def test_unsupported_layer_settings_are_warned_about(layers, mode, message, small, caplog):
    caplog.set_level(logging.WARNING)
    assert arguments(small, layers)["quantize_mode"] == mode
    assert message in caplog.text


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("{use_external_data: true}", "has no such argument; did you mean 'use_external_data_format'"),
        ("{quantize_mode: fp8}", r"backend_kwargs.quantize_mode: set by layers \(their dtype\) here"),
        ("{calibrate_per_node: 'yes'}", "backend_kwargs.calibrate_per_node: expected the type of False, but got 'yes'"),
        ("{high_precision_dtype: 16}", "expected the type of 'fp16', but got 16"),
        ("{awqlite_alpha_step: x}", "expected the type of 0.0, but got 'x'"),
    ],
)
def test_invalid_backend_kwargs_are_refused(extra, message, small):
    with pytest.raises(UserError, match=message):
        arguments(small, layer("Conv"), f"  backend_kwargs: {extra}\n")


@pytest.mark.parametrize("extra", ["{trt_plugins: [evil.so]}", "{trust_remote_code: true}"])
def test_backend_kwargs_that_name_code_need_trust(extra, small, monkeypatch):
    monkeypatch.delenv(TRUST_VARIABLE)
    with pytest.raises(UserError, match=f"would run code.*{TRUST_VARIABLE}"):
        arguments(small, layer("Conv"), f"  backend_kwargs: {extra}\n")


def test_layers_without_matching_nodes_are_refused(small):
    with pytest.raises(UserError, match=r"no entry matches any node of the model"):
        arguments(small, layer("LSTM"))


@pytest.mark.parametrize(
    ("device", "gpus", "eps"),
    [
        ("cpu", [], ["cpu"]), ("cuda", [], ["cpu"]), ("trt", [], ["cpu"]), ("cuda", ["one"], ["cuda:0", "cpu"]),
        ("cuda:1", ["two"], ["cuda:1", "cpu"]), ("trt", ["one"], ["trt", "cuda:0", "cpu"]),
    ],
)  # fmt: skip
def test_execution_providers_by_device(device, gpus, eps, monkeypatch, caplog):
    monkeypatch.setattr(modelopt_arguments, "describe_environment", lambda: {"gpus": gpus})
    assert modelopt_arguments.execution_providers(device) == eps
    missing = device != "cpu" and not gpus
    assert (f"device: {device}: there is no NVIDIA GPU here" in caplog.text) == missing


@pytest.fixture
def given(monkeypatch):
    """What reaches ModelOpt."""
    found: list[dict[str, Any]] = []

    def record(path: Path, target: Path, batches: Any, arguments: dict[str, Any]) -> None:
        found.append({"target": target, "batches": len(list(batches)), **arguments})
        target.write_bytes(path.read_bytes())

    monkeypatch.setattr(command, "quantize_with_modelopt", record)
    return found


def test_ptq_command_of_the_docs(small, noise, tmp_path, given):
    (tmp_path / "plugin.so").touch()
    command.run_ptq([
        f"--onnx_path={small}", "--quantize_mode=int8", f"--calibration_data={noise}", "--calibration_method=max",
        f"--output_path={tmp_path}/out.onnx", "--calibration_eps", "trt", "cuda:0", "cpu",
        f"--trt_plugins={tmp_path}/plugin.so", "--op_types_to_exclude=Add,Relu",
        "--nodes_to_exclude", "/head.*", "/neck.*",
        "--op_types_to_quantize", "Conv", "Gemm",
        "--calibrate_per_node",
    ])  # fmt: skip
    assert given == [
        {
            "target": tmp_path / "out.onnx",
            "batches": 4,
            "quantize_mode": "int8",
            "calibration_method": "max",
            "calibration_eps": ["trt", "cuda:0", "cpu"],
            "log_level": "WARNING",
            "calibrate_per_node": True,
            "high_precision_dtype": "fp16",
            "op_types_to_exclude": ["Add", "Relu"],
            "nodes_to_exclude": ["/head.*", "/neck.*"],
            "op_types_to_quantize": ["Conv", "Gemm"],
            "trt_plugins": [str(tmp_path / "plugin.so")],
        }
    ]


def test_preset_sets_nodes_and_operators(small, noise, tmp_path, given, caplog):
    base = ["--onnx_path", str(small), "--calibration_data", str(noise), "--output_path", str(tmp_path / "o.onnx")]
    command.run_ptq([*base, "--preset", "rtdetr"])
    assert given[-1]["nodes_to_exclude"][0] == "/head/fc/Gemm$"
    assert "preset rtdetr: '/decoder/*' matches no node" in caplog.text
    command.run_ptq([*base, "--preset", "extreme_int8"])
    assert given[-1]["op_types_to_quantize"] == ["Conv", "Add"]
    assert "on YOLO11n mAP fell from 0.42 to 0.12" in caplog.text
    with pytest.raises(UserError, match=r"--preset extreme_int8 is for --quantize_mode int8, but got fp8"):
        command.run_ptq([*base, "--preset", "extreme_int8", "--quantize_mode", "fp8"])
    assert PRESETS["classifier"].skip_names == ("/classifier/*", "/fc")


def test_show_defaults_lists_operators_and_presets():
    lines = command.run_ptq(["--show-defaults"])
    assert "  activations: Softmax, Sigmoid, Tanh" in lines
    assert any("extreme_int8" in line for line in lines)


def test_default_output_is_in_the_models_folder(small, noise, tmp_path, given):
    model = tmp_path / "net.onnx"
    model.write_bytes(small.read_bytes())
    command.run_ptq(["--onnx_path", str(model), "--calibration_data_path", str(noise)])
    assert given[0]["target"] == tmp_path / "net.quant.onnx"
    assert (given[0]["quantize_mode"], given[0]["calibration_method"]) == ("int8", "entropy")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--onnx_path: the float model is needed"),
        (["--onnx_path", "m.pt"], "m.pt is a PyTorch file"),
        (["--calibration_method", "awq_clip"], "entropy or max for int8, but got 'awq_clip'"),
        (["--quantize_mode", "int4", "--calibration_method", "max"], "awq_clip or rtn_dq for int4, but got 'max'"),
        (
            ["--calibration_eps", "gpu"],
            "--calibration_eps: expected any of NvTensorRtRtx, trt, cuda:x, dml:x, cpu, but got 'gpu'",
        ),
        (["--calibration_data", "."], "is a folder; 'qdq calib-data . -o calib.npy --preprocess NAME' writes one"),
        (["--trt_plugins", "none.so"], "none.so: no such file"),
        (["--output_path", "o.trt"], "--output_path: a name that ends in .onnx, but got o.trt"),
        (["--calibration_shapes", "image:1x3x8x8"], "--calibration_shapes image: .* no such input; did you mean"),
        (["--calibration_shapes", "1x3x8x8"], "--calibration_shapes 1x3x8x8: NAME:SHAPE, .*x256,input1"),
    ],
)
def test_invalid_options_are_refused(options, message, small):
    whole = options if "--onnx_path" in options or not options else ["--onnx_path", str(small), *options]
    with pytest.raises(UserError, match=message):
        command.run_ptq(whole)


def test_operators_absent_from_the_model_are_reported(small, noise, tmp_path, given, caplog):
    base = ["--onnx_path", str(small), "--calibration_data", str(noise), "--output_path", str(tmp_path / "o.onnx")]
    command.run_ptq([*base, "--op_types_to_exclude", "Con"])
    assert "--op_types_to_exclude: the model has no 'Con'; did you mean 'Conv'" in caplog.text
    with pytest.raises(UserError, match=r"is the float model itself"):
        command.run_ptq([*base[:4], "--output_path", str(small)])


def test_all_samples_of_a_file_are_used(small, tmp_path, given):
    np.save(tmp_path / "many.npy", np.zeros((520, 3, 8, 8), np.float32))
    asked = ["--onnx_path", str(small), "--calibration_data", str(tmp_path / "many.npy")]
    made = command.run_ptq([*asked, "--output_path", str(tmp_path / "o.onnx")])
    assert made.calibrated_on.startswith("520 samples")


def test_shapes_are_asked_for_by_the_name_of_the_option(tmp_path):
    g = GraphBuilder("wide", seed=1)
    g.output(g.conv(g.input("images", ("N", 3, "H", "W")), 32, 3), name="y")
    model = str(g.save(tmp_path / "wide.onnx"))
    with pytest.raises(UserError, match=r"--dim H=640 --dim W=640, or --calibration_shapes images:1x3x640x640"):
        command.run_ptq(["--onnx_path", model])
    with pytest.raises(UserError, match="--size 640x640"):
        sample_shape("array", None, model)


def test_the_first_dtype_is_applied_to_all_and_warned(noise, tmp_path, caplog):
    g = GraphBuilder("few", opset=19, seed=5)
    x = g.conv(g.input("images", (1, 3, 8, 8)), 32, 3, name="/backbone/conv1/Conv")
    x = g.op("Flatten", g.conv(x, 32, 3, name="/backbone/conv2/Conv"))
    g.output(g.gemm(x, 32, name="/head/fc/Gemm"), name="logits")
    text = f"""
quantize:
  model_path: {g.save(tmp_path / "few.onnx")}
  backend: modelopt.onnx
  layers: [{layer("Conv", INT8)}, {layer("Gemm", E4M3)}]
  skip_names: [/backbone/conv2]
  backend_kwargs: {{high_precision_dtype: fp32}}
dataset: {{calibration_data: {noise}, samples: 1}}
results_dir: out
"""
    found = quantize_spec(text, tmp_path)
    precisions = {edge.consumer: p for edge, p in QDQGraph(onnx.load(found.path)).edges.items()}
    assert found.path == tmp_path / "results/quantized_model.onnx"
    assert precisions["/backbone/conv1/Conv"] == "int8"
    assert "/backbone/conv2/Conv" not in precisions
    assert set(precisions.values()) == {"int8"}
    assert "it applies the first, int8, to all" in caplog.text


def test_result_without_quantization_is_refused(tmp_path):
    g = GraphBuilder("convolution", opset=19, seed=1)
    g.output(g.conv(g.input("x", (1, 3, 8, 8)), 8, 3), name="y")
    model = g.save(tmp_path / "conv.onnx")
    np.save(tmp_path / "calib.npy", np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float32))
    with pytest.raises(UserError, match=r"quantized nothing in mode int4: .*; the model has Conv"):
        command.run_ptq([
            "--onnx_path", str(model), "--quantize_mode", "int4", "--calibration_data", str(tmp_path / "calib.npy"),
            "--output_path", str(tmp_path / "int4.onnx"),
        ])  # fmt: skip
    assert not (tmp_path / "int4.onnx").exists()


def test_int4_quantizes_a_matmul(tmp_path, capsys):
    g = GraphBuilder("linear", opset=19, seed=1)
    g.output(g.linear(g.input("x", (1, 8, 256)), 256, bias=False), name="y")
    model = g.save(tmp_path / "linear.onnx")
    np.save(tmp_path / "calib.npy", np.random.default_rng(0).normal(size=(2, 8, 256)).astype(np.float32))
    assert not qdq(
        "ptq", "--onnx_path", str(model), "--quantize_mode", "int4", "--calibration_method", "rtn_dq",
        "--calibration_data", str(tmp_path / "calib.npy"), "--output_path", str(tmp_path / "int4.onnx"),
    )  # fmt: skip
    assert "1 int4" in capsys.readouterr().out
