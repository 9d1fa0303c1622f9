"""The engine inspector's answer in the spelling of both majors."""

import json

import pytest

from harness.base.errors import MeasureFailed
from harness.insight.model_report import classify_layer, is_low_precision
from harness.runtimes.tensorrt.library import read_layers

CONV = "Conv_0 + Relu_0"
REFORMAT = "Reformatting CopyNode for Input Tensor 0 to Conv_0 + Relu_0"
INT8 = "Thirty-two wide channel vectorized row major Int8 format."
META = "[ONNX Layer: x_quantize]\x1e[ONNX Layer: x_dequantize]\x1e[ONNX Layer: Conv_0]\x1e[ONNX Layer: Relu_0]"
TEN = {
    "Layers": [
        {
            "Name": REFORMAT, "LayerType": "Reformat", "ParameterType": "Reformat", "Origin": "REFORMAT",
            "Metadata": "",
            "Inputs": [{"Name": "x", "Dimensions": [1, 3, 8, 8], "Format/Datatype": "Row major linear FP32"}],
            "Outputs": [{"Name": "r", "Dimensions": [1, 3, 8, 8], "Format/Datatype": INT8}],
            "TacticValue": "0x00000000000003ea", "StreamId": 0,
        },
        {
            "Name": CONV, "LayerType": "CaskConvolution", "ParameterType": "Convolution", "Metadata": META,
            "Inputs": [{"Name": "r", "Dimensions": [1, 3, 8, 8], "Format/Datatype": INT8}],
            "Outputs": [{"Name": "y", "Dimensions": [1, 4, 8, 8], "Format/Datatype": "Row major linear FP16 format"}],
            "TacticName": "sm80_xmma_fprop_implicit_gemm_interleaved_i8i8_i8i32_f32", "Weights": {"Type": "Int8"},
        },
    ],
    "Bindings": ["x", "y"],
}  # fmt: skip
ELEVEN = {
    "Layers": [
        {**TEN["Layers"][0], "Inputs": [{"Name": "x", "Format": "LINEAR", "Datatype": "FP32"}]},  # type: ignore[dict-item]
        {
            **TEN["Layers"][1],  # type: ignore[dict-item]
            "Inputs": [{"Name": "r", "Format": "CHW32", "DataType": "INT8"}],
            "Outputs": [{"Name": "y", "Format": "LINEAR", "Datatype": "FP16"}],
        },
    ],
    "I/O Tensors": [{"Name": "x", "IOMode": "INPUT", "DataType": "FP32", "Dimensions": [1, 3, 8, 8]}],
}


@pytest.mark.parametrize("answer", [TEN, ELEVEN])
def test_layers_of_both_majors_are_parsed_equally(answer):
    reformat, convolution = read_layers(json.dumps(answer), {CONV: 0.2, REFORMAT: 0.05})
    assert (reformat.kind, reformat.precision, reformat.time_ms) == ("Reformat", "f32", 0.05)
    assert (convolution.kind, convolution.precision, convolution.time_ms) == ("Convolution", "int8", 0.2)
    assert convolution.origin == ("x_quantize", "x_dequantize", "Conv_0", "Relu_0")
    assert convolution.kernel.startswith("sm80_xmma")
    assert is_low_precision(convolution.precision)
    pairs, nodes = {"x_quantize", "x_dequantize"}, {"x_quantize", "x_dequantize", "Conv_0", "Relu_0"}
    assert [classify_layer(layer, pairs, nodes) for layer in (reformat, convolution)] == ["reformat", "compute"]


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("Row major linear BFloat16 format", "bf16"),
        ("Channel major FP16 format where channel % 4 == 0", "f16"),
        ("Half", "f16"),
        ("Float", "f32"),
        ("FP8", "fp8"),
        ("Row major UInt8", "uint8"),
        ("Int64", "int64"),
        ("N/A due to dynamic shapes", ""),
    ],
)
def test_precision_of_layer_type_texts(text, precision):
    answer = {"Layers": [{"Name": "a", "LayerType": "b", "Inputs": [{"Format/Datatype": text}]}]}
    assert read_layers(json.dumps(answer), {})[0].precision == precision


def test_an_engine_built_without_details_gives_names():
    (layer,) = read_layers(json.dumps({"Layers": ["Conv_0"], "Bindings": []}), {"Conv_0": 1.0})
    assert (layer.name, layer.kind, layer.time_ms) == ("Conv_0", "", 1.0)


@pytest.mark.parametrize("text", ["nonsense", "{}", '{"Layers": [1]}', '{"Layers": 3}'])
def test_invalid_inspector_output_is_refused(text):
    with pytest.raises(MeasureFailed, match=r"the engine inspector's answer cannot be read"):
        read_layers(text, {})
