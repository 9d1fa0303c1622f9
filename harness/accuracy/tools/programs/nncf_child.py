"""Program of NNCF's child process: `quantize`, and `quantize_with_accuracy_control` by the metric of the task.

For OpenVINO the model is converted first and the result is an IR file, as in NNCF's guide; otherwise it is an ONNX
file with Q/DQ pairs. Source: NNCF 3.4, "Post-training quantization" and "Quantizing with accuracy control".
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import chdir
from pathlib import Path
from typing import Any

import onnx
from tool_child import iter_batches, serve_request  # type: ignore[import-not-found]

TRANSFORMER_OPS = frozenset({"LayerNormalization", "Softmax", "Erf"})
"""Operators that a transformer block has before it is quantized: both norm and attention, or GELU."""


def nncf_ptq(request: dict[str, Any]) -> None:
    """Run NNCF's post-training quantization with asymmetric activations (preset "mixed")."""
    nncf, model = _open(request)
    _save(nncf.quantize(model, _dataset(nncf, request), **_options(nncf, request)), request)


def nncf_accuracy_control(request: dict[str, Any]) -> None:
    """Run NNCF's quantization that returns operators to float until the metric is within the bound."""
    nncf, model = _open(request)
    with chdir(request["folder"]):  # of the program, from which a plug-in may read files
        evaluator = _open_evaluator(request)

    def validate(compiled: Any, items: Iterable[Any]) -> float:
        list(items)  # NNCF counts them; the evaluator always scores all of its own data
        with chdir(request["folder"]):
            found = float(evaluator.score(_infer_function(compiled)).metrics[evaluator.metric])
        return found if evaluator.higher_is_better else -found

    relative = request["relative_drop"]
    result = nncf.quantize_with_accuracy_control(
        model,
        calibration_dataset=_dataset(nncf, request),
        validation_dataset=nncf.Dataset([0]),
        validation_fn=validate,
        max_drop=request["max_drop"],
        drop_type=nncf.DropType.RELATIVE if relative else nncf.DropType.ABSOLUTE,
        **_options(nncf, request),
    )
    _save(result, request)


def _open(request: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the module `nncf` and the model in the form that it quantizes."""
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]  # else it reports to a server
    sys.modules["torch"] = None  # type: ignore[assignment]  # imported where it is installed, which takes seconds
    import nncf

    if not _is_openvino(request):
        return nncf, onnx.load(request["model"])
    import openvino

    return nncf, openvino.Core().read_model(request["model"])


def _is_openvino(request: Mapping[str, Any]) -> bool:
    return str(request["output"]).endswith(".xml")


def _options(nncf: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    ops = {node.op_type for node in onnx.load(request["model"], load_external_data=False).graph.node}
    return {
        "preset": nncf.QuantizationPreset.MIXED,
        "target_device": nncf.TargetDevice.CPU if _is_openvino(request) else nncf.TargetDevice.ANY,
        "subset_size": request["count"],
        "model_type": nncf.ModelType.TRANSFORMER if len(ops & TRANSFORMER_OPS) > 1 else None,
    }


def _dataset(nncf: Any, request: Mapping[str, Any]) -> Any:
    class Batches:
        """Batches that can be gone through several times."""

        def __iter__(self) -> Iterator[dict[str, Any]]:
            yield from iter_batches(request)

    return nncf.Dataset(Batches())


def _open_evaluator(request: Mapping[str, Any]) -> Any:
    from harness.plugins import registry

    use = request["evaluator"]
    params = dict(use["params"])  # those that the harness supplies get the types that JSON lacks
    for name in ("base", "reference"):
        if params.get(name) is not None:
            params[name] = Path(params[name])
    if "inputs" in params:
        params["inputs"] = {name: (kind, tuple(shape)) for name, (kind, shape) in params["inputs"].items()}
    if params.get("input_shape") is not None:
        params["input_shape"] = tuple(params["input_shape"])
    return registry.create_plugin("evaluator", use["use"], params)


def _infer_function(model: Any) -> Any:
    """Return the inference of a model that NNCF hands over: compiled by OpenVINO, or an ONNX model."""
    if isinstance(model, onnx.ModelProto):
        import onnxruntime

        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        return lambda feeds: dict(zip(names, session.run(None, dict(feeds)), strict=True))
    return lambda feeds: {
        name: results[port] for results in [model(dict(feeds))] for port in model.outputs for name in port.names
    }


def _save(model: Any, request: Mapping[str, Any]) -> None:
    if not _is_openvino(request):
        onnx.save(model, request["output"])
        return
    import openvino

    openvino.save_model(model, request["output"], compress_to_fp16=False)


if __name__ == "__main__":
    serve_request(
        {"nncf_ptq": nncf_ptq, "nncf_ptq_onnx": nncf_ptq, "nncf_accuracy_control": nncf_accuracy_control}, sys.argv[1]
    )
