"""Spec files: valid keys and values, and messages for invalid ones."""

from pathlib import Path

import pytest
import yaml

from harness.base.errors import UserError
from harness.compat.tao_specs.spec import parse_spec, read_spec, require_section

SPECS = Path(__file__).resolve().parents[4] / "experiments/specs"
LAYER = "{module_name: Conv, weights: {dtype: int8}, activations: {dtype: int8}}"


def quantize(extra: str = "", layers: str = f"[{LAYER}]") -> str:
    return f"quantize:\n  model_path: m.onnx\n  layers: {layers}\n{extra}"


def refused(text: str) -> str:
    with pytest.raises(UserError) as error:
        parse_spec(text, "spec.yaml")
    return str(error.value)


@pytest.mark.parametrize("path", sorted(SPECS.glob("*.yaml")), ids=lambda path: path.stem)
def test_template_specs_are_valid(path):
    assert read_spec(path).model_fields_set == yaml.safe_load(path.read_text(encoding="utf-8")).keys()


def test_quantize_example_of_the_document_is_valid():
    text = """
quantize:
  model_path: "/path/to/model.onnx"
  results_dir: "/path/to/quantized_output"
  backend: "modelopt.onnx"
  mode: "static_ptq"
  algorithm: "max"
  device: "cuda"
  default_layer_dtype: "native"
  default_activation_dtype: "native"
  layers:
    - module_name: "*"
      weights:
        dtype: "fp8_e5m2"
      activations:
        dtype: "fp8_e5m2"
  skip_names:
    - "/head/*"
  backend_kwargs: {use_external_data_format: true, op_types_to_quantize: [Conv], calibrate_per_node: false}
"""
    found = require_section(parse_spec(text, "spec.yaml").quantize, "quantize", "spec.yaml")
    assert found.algorithm == "max"
    assert found.layers[0].weights.dtype == "fp8_e5m2"
    assert found.skip_names == ("/head/*",)


def test_defaults_are_those_of_the_document():
    found = require_section(parse_spec(quantize(), "s").quantize, "quantize", "s")
    assert (found.backend, found.mode, found.algorithm) == ("modelopt.onnx", "static_ptq", "minmax")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("quantise: {}", "spec.yaml: quantise: unknown key; did you mean 'quantize'"),
        (quantize(layers="[{module_name: Conv, weights: {type: int8}}]"), "unknown key; did you mean 'dtype'?"),
        ("quantize: {layers: []}", "quantize.model_path: this key is required"),
        (
            quantize(layers="[{module_name: Conv, weights: {dtype: int7}}]"),
            "quantize.layers.0.weights.dtype: Input should be 'int8', 'fp8_e4m3fn', 'fp8_e5m2' or 'native', "
            "but got 'int7'; did you mean 'int8'?",
        ),
        (quantize("  mode: weight_only_ptq"), "quantize.mode: Input should be 'static_ptq'"),
        (quantize("  backend: modelopt.pytorch"), "'modelopt.onnx' or 'qdq', but got 'modelopt.pytorch'"),
        (quantize("  device: gpu"), "quantize.device: cpu, cuda, cuda:N or trt, but got 'gpu'"),
        (quantize("  preset: rtdter"), "no preset is called 'rtdter'; did you mean 'rtdetr'"),
        (quantize(layers="[]"), "at least one entry is required, for instance {module_name: Conv"),
        (quantize("  preset: extreme_int8"), "'extreme_int8' sets the quantized operators"),
        (
            "gen_trt_engine: {onnx_file: a, trt_engine: b, tensorrt: {data_type: INT8}}",
            "FP16, BF16, TF32 or FP32, but got 'INT8': scales come with the Q/DQ pairs of the ONNX file",
        ),
        (
            "gen_trt_engine: {onnx_file: a, trt_engine: b, tensorrt: {min_batch_size: 4, opt_batch_size: 2}}",
            "min_batch_size <= opt_batch_size <= max_batch_size, but got (4, 2, 1)",
        ),
        ("evaluate: {}", "give either trt_engine or onnx_file"),
        ("evaluate: {trt_engine: a, onnx_file: b}", "give either trt_engine or onnx_file"),
        ("dataset: {test_data_sources: {image_dir: a, labels: b}}", "labels of images are given as json_file"),
        ("dataset: {test_data_sources: {arrays: a, json_file: b}}", "labels of arrays are given as labels"),
        ("a: [", "spec.yaml: not valid YAML"),
        ("dataset: {test_data_sources: {image_dir: a, arrays: b}}", "give either image_dir or arrays"),
        ("evaluate: {onnx_file: b}\ndataset: {batch_size: 0}", "dataset.batch_size: Input should be greater than or"),
        ("", "spec.yaml: a spec file is a mapping of keys, but it is empty"),
    ],
)
def test_invalid_values_are_refused_with_key_and_choices(text, message):
    assert message in refused(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("quantize:\nmodel_path: m.onnx", "model_path: unknown key; it belongs below quantize (check the indentation)"),
        ("evaluate: {onnx_file: m.onnx, dataset: {}}", "evaluate.dataset: unknown key; it belongs at the top level"),
        (
            "gen_trt_engine: {onnx_file: a, trt_engine: b, workspace_size: 1}",
            "gen_trt_engine.workspace_size: unknown key; it belongs below gen_trt_engine.tensorrt",
        ),
    ],
)
def test_misplaced_key_is_refused_naming_its_section(text, message):
    assert message in refused(text)


def test_missing_section_is_named():
    with pytest.raises(UserError, match=r"s.yaml: there is no section 'evaluate'"):
        require_section(parse_spec(quantize(), "s.yaml").evaluate, "evaluate", "s.yaml")
