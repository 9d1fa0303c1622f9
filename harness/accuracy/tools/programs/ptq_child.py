"""Program of the child process of `harness.accuracy.tools.ptq`: one PTQ tool on one model.

A process of its own, because ModelOpt replaces methods of ONNX Runtime's calibraters and quantizers and deletes
operators from their registries (`modelopt.onnx.quantization.ort_patching.patch_ort_modules`, `ort_utils.configure_ort`)
and never puts them back; because both tools print, and set up logging; and because both go through Python sets of
strings, so that only a fixed PYTHONHASHSEED gives the same file twice.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import onnx

from harness.accuracy.tools.programs.tool_child import UnsupportedOption, iter_batches, serve_request
from harness.plugins.registry import without_module

with without_module("torch"):  # `onnxruntime.tools` imports PyTorch where it is installed, which takes 3 s
    from onnxruntime.quantization.calibrate import CalibrationDataReader, CalibrationMethod

_EXTERNAL_BYTES = 1 << 30
_DYNAMIC_OPS = ("MatMul", "Gemm")


class _NpzBatchReader(CalibrationDataReader):  # type: ignore[misc]
    """The batches of a .npz file, loaded one at a time, again and again if asked."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._request = request
        self.rewind()

    def get_next(self) -> dict[str, Any] | None:
        return next(self._batches, None)

    def get_first(self) -> dict[str, Any]:
        return next(iter_batches(self._request))

    def rewind(self) -> None:
        self.set_range(0, len(self))

    def set_range(self, start_index: int, end_index: int) -> None:
        self._batches = iter_batches(self._request, start_index, end_index)

    def __len__(self) -> int:
        return int(self._request["count"])


def modelopt_ptq(request: dict[str, Any], reader: _NpzBatchReader) -> None:
    """Run ModelOpt's post-training quantization as its guide does, but with FP32 instead of FP16.

    Source: `modelopt.onnx.quantization.quantize` 0.47; "max" is its word for minmax, and its Q/DQ are symmetric, so
    both are the same.
    """
    methods = {"minmax": "max", "max": "max", "entropy": "entropy"}
    from modelopt.onnx.quantization import quantize

    quantize(
        request["model"],
        quantize_mode=request["precision"],
        calibration_data_reader=reader,
        calibration_method=methods[request["method"]],
        calibration_eps=["cpu"],
        high_precision_dtype="fp32",
        use_external_data_format=_needs_external_data(request["model"]),
        output_path=request["output"],
        log_level="WARNING",
    )


def ort_static(request: dict[str, Any], reader: _NpzBatchReader) -> None:
    """Run ONNX Runtime's `quantize_static` in Q/DQ form, in the dialect of the runtime that will time the model.

    Activations as the dialect has them, weights symmetric int8 per channel and stored as int8, of 7 bits by
    `reduce_range` where the dialect's are. Where zero points are free it removes Relu and Clip, as its users get it.
    `CalibStridedMinMax` makes every method, not only minmax, read one batch at a time; without it the entropy method
    holds all activations of all batches. Source: `onnxruntime.quantization.quantize` 1.24.
    """
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    methods = {
        "minmax": CalibrationMethod.MinMax,
        "max": CalibrationMethod.MinMax,
        "entropy": CalibrationMethod.Entropy,
        "percentile": CalibrationMethod.Percentile,
    }
    quantize_static(
        request["model"],
        request["output"],
        reader,
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QUInt8 if request["activation"] == "uint8" else QuantType.QInt8,
        weight_type=QuantType.QInt8,
        calibrate_method=methods[request["method"]],
        use_external_data_format=_needs_external_data(request["model"]),
        reduce_range=request.get("reduce_range", False),
        extra_options={
            "ActivationSymmetric": request["symmetric"],
            "WeightSymmetric": True,
            "QuantizeBias": request["bias"] == "int32",
            "CalibStridedMinMax": 1,
            "CalibPercentile": request["percentile"],
            "CalibTensorRangeSymmetric": request["symmetric"] or request["method"] == "max",
        },
    )


def modelopt(request: dict[str, Any], reader: _NpzBatchReader) -> None:
    """Run ModelOpt's post-training quantization with the user's arguments."""
    from modelopt.onnx.quantization import quantize

    quantize(
        request["model"], output_path=request["output"], calibration_data_reader=reader, **request["arguments"]
    )  # fmt: skip


def ort_dynamic(request: dict[str, Any], reader: _NpzBatchReader) -> None:
    """Run ONNX Runtime's `quantize_dynamic` on products with constant weights, as its guide advises for transformers.

    It needs no calibration data: each inference takes the ranges of its own activations.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(
        request["model"],
        request["output"],
        op_types_to_quantize=list(_DYNAMIC_OPS),
        per_channel=True,
        reduce_range=request.get("reduce_range", False),
        weight_type=QuantType.QInt8,
        use_external_data_format=_needs_external_data(request["model"]),
    )
    if not any(node.op_type == "MatMulInteger" for node in onnx.load(request["output"]).graph.node):
        raise UnsupportedOption(f"no {' or '.join(_DYNAMIC_OPS)} with constant weights, so nothing is quantized")


def main(request_path: str) -> None:
    """Execute a request file, see `tool_child`."""

    def run(tool: Callable[[dict[str, Any], _NpzBatchReader], None], request: dict[str, Any]) -> None:
        tool(request, _NpzBatchReader(request))

    tools = {
        "modelopt_ptq": modelopt_ptq,
        "ort_static": ort_static,
        "ort_static_s8": ort_static,
        "ort_dynamic": ort_dynamic,
        "modelopt": modelopt,
    }
    serve_request({name: partial(run, tool) for name, tool in tools.items()}, request_path)


def _needs_external_data(model: str) -> bool:
    """Return whether weights must stay outside of the model file (protobuf's limit is 2 GiB)."""
    return sum(file.stat().st_size for file in Path(model).parent.iterdir()) > _EXTERNAL_BYTES


if __name__ == "__main__":
    main(sys.argv[1])
