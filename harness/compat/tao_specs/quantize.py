"""`qdq quantize`: section `quantize` of a spec file, by ModelOpt or by the built-in quantizer."""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.accuracy.calibration.ptq import modelopt
from harness.api import Array
from harness.compat.tao_specs.builtin_quantizer import LayerwiseRequest, parse_builtin_arguments, quantize_builtin
from harness.compat.tao_specs.dataset import (
    calibration_feeds,
    loader_feeds,
    open_calibration_data,
    peek_sample_shapes,
    sample_shapes,
)
from harness.compat.tao_specs.layers import PRESETS
from harness.compat.tao_specs.model_file import name_write_errors, open_onnx_file, shapes_of, static_inputs
from harness.compat.tao_specs.modelopt_arguments import make_modelopt_arguments
from harness.compat.tao_specs.spec import DatasetSection, LayerSpec, QuantizeSection, TensorDtype
from harness.errors import BuildFailed, UserError
from harness.graph.load import ModelSignature, read_signature
from harness.random_inputs import InputTypes

logger = logging.getLogger(__name__)

OUTPUT_FILE_NAME = "quantized_model.onnx"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationResult:
    """Quantized model.

    Attributes:
        layers: Number of nodes by precision ("int8", "fp8", "fp8e5m2", "native"), for each operator with a quantized
            node.
        calibrated_on: Description of the calibration data.
    """

    path: Path
    layers: Mapping[str, Mapping[str, int]]
    calibrated_on: str


def quantize(
    section: QuantizeSection, dataset: DatasetSection, base: Path, results: Path, loader: Iterable[Any] | None = None
) -> QuantizationResult:
    """Quantize a model as a spec describes and write `quantized_model.onnx`.

    Args:
        section: Section `quantize`.
        dataset: Section `dataset`, for the calibration.
        base: Folder that relative paths start from.
        results: Folder of the result, created if it is missing.
        loader: Calibration batches (arrays, tuples, mappings) instead of those of `dataset`.

    Raises:
        UserError: The section cannot be used, or ModelOpt fails.
    """
    path, declared = open_onnx_file(section.model_path, base, "quantize.model_path")
    refuse_quantized(declared, section.model_path)
    _warn_ignored_keys(section)
    section, layers = _apply_preset(section, declared)
    by_modelopt = section.backend == "modelopt.onnx"
    arguments = make_modelopt_arguments(section, layers, declared.nodes) if by_modelopt else {}
    dialect = "" if by_modelopt else parse_builtin_arguments(section.backend_kwargs)
    target = results / OUTPUT_FILE_NAME
    with name_write_errors(f"results_dir {results}"):
        results.mkdir(parents=True, exist_ok=True)
    names = tuple(declared.inputs)
    feeds: Iterable[Mapping[str, Array]]
    if loader is None:
        data = open_calibration_data(dataset, base)
        types = static_inputs(declared, dataset.shapes, dataset.dims, samples=sample_shapes(data, names))
        feeds, calibrated_on = calibration_feeds(dataset, data, types)
    else:
        samples, batches = peek_sample_shapes(loader, names)
        types = static_inputs(declared, dataset.shapes, dataset.dims, samples=samples)
        feeds, calibrated_on = loader_feeds(batches, types), "a data loader"
    if by_modelopt:
        quantize_with_modelopt(path, target, feeds, add_calibration_shapes(arguments, declared, types))
        return quantization_result(target, calibrated_on)
    request = LayerwiseRequest(
        model_path=path, source=section.model_path, shapes=shapes_of(types), layers=layers,
        skip_names=section.skip_names, method=section.algorithm, dialect=dialect,
    )  # fmt: skip
    _warn_fixed_sizes(section.model_path, declared, types)
    with tempfile.TemporaryDirectory(prefix="qdq-quantize-") as work:
        quantize_builtin(request, target, feeds, Path(work))
    return quantization_result(target, calibrated_on)


def add_calibration_shapes(
    arguments: Mapping[str, Any], declared: ModelSignature, types: InputTypes
) -> Mapping[str, Any]:
    """Return ModelOpt's arguments with input shapes if ModelOpt would set dynamic sizes other than the batch to 1."""
    per_node = arguments.get("calibrate_per_node") and not arguments.get("calibration_shapes")
    if not per_node or not any(None in dims[1:] for _, dims in declared.inputs.values()):
        return arguments
    return {**arguments, "calibration_shapes": _format_shapes(types, ":", ",")}


def quantize_with_modelopt(
    path: Path, target: Path, batches: Iterable[Mapping[str, Array]], arguments: Mapping[str, Any]
) -> None:
    """Run ModelOpt in a child process; for the arguments see `harness.accuracy.calibration.ptq.modelopt`.

    Raises:
        UserError: ModelOpt fails, or leaves the model unchanged.
    """
    try:
        modelopt(path, target, batches, arguments)
    except BuildFailed as error:
        raise UserError(f"{path.name}: ModelOpt failed: {error}") from error
    result = read_signature(target)
    if not result.precisions and not any("quantize" in op.lower() or op == "MatMulNBits" for op in result.operators):
        target.unlink()
        mode = arguments.get("quantize_mode", "int8")
        raise UserError(
            f"{path.name}: ModelOpt quantized nothing in mode {mode}: each operator of this mode is excluded, too "
            f"small or missing; the model has {', '.join(sorted(result.operators))}"
        )


def _format_shapes(types: InputTypes, sign: str, separator: str) -> str:
    return separator.join(f"{name}{sign}{'x'.join(map(str, shape))}" for name, (_, shape) in types.items())


def _warn_fixed_sizes(source: str, declared: ModelSignature, types: InputTypes) -> None:
    """Log the inputs whose dynamic sizes are fixed in the result."""
    fixed = {name: types[name] for name, (_, dims) in declared.inputs.items() if None in dims}
    if any(None in declared.inputs[name][1][1:] for name in fixed):
        text = _format_shapes(fixed, " ", ", ")
        logger.warning("%s: its dynamic sizes are fixed in the result: %s; modelopt.onnx keeps them", source, text)
    elif fixed:
        logger.warning("%s: its dynamic batch is 1 in the result; backend modelopt.onnx keeps it", source)


def refuse_quantized(declared: ModelSignature, source: str) -> None:
    """Raise `UserError`, with `source` as the name of the model, if a model already has Q/DQ pairs."""
    if declared.precisions:
        raise UserError(
            f"{source}: has Q/DQ pairs already ({', '.join(sorted(declared.precisions))}); start from the float model"
        )


def quantization_result(path: Path, calibrated_on: str) -> QuantizationResult:
    """Return the result for a Q/DQ file, with the precisions of its nodes.

    Args:
        calibrated_on: See `QuantizationResult`.

    Raises:
        UserError: The file cannot be read.
    """
    found: dict[str, Counter[str]] = {}
    for node in read_signature(path).nodes:
        found.setdefault(node.op, Counter()).update(sorted(node.precisions) or ["native"])
    layers = {op: dict(counts) for op, counts in sorted(found.items()) if set(counts) != {"native"}}
    return QuantizationResult(path=path, layers=layers, calibrated_on=calibrated_on)


def _warn_ignored_keys(section: QuantizeSection) -> None:
    for key in ("default_layer_dtype", "default_activation_dtype"):
        value = getattr(section, key)
        if value is not None:
            logger.warning("quantize.%s: %s is ignored, as documented: give dtypes layer by layer", key, value)
    if section.backend == "qdq" and section.device != "cpu":
        logger.warning("quantize.device: %s: backend qdq calibrates on the CPU", section.device)


def _apply_preset(section: QuantizeSection, declared: ModelSignature) -> tuple[QuantizeSection, tuple[LayerSpec, ...]]:
    """Return the section with the skip names of its preset added, and its layers, else those of the preset."""
    if section.preset is None:
        return section, section.layers
    preset = PRESETS[section.preset]
    if preset.expect:
        logger.warning("preset %s: %s", section.preset, preset.expect)
    with_skips = section.model_copy(update={"skip_names": (*section.skip_names, *preset.skip_names)})
    int8 = TensorDtype(dtype="int8")
    forced = [op for op in preset.op_types if op in declared.operators]
    return with_skips, section.layers or tuple(
        LayerSpec(module_name=op, weights=int8, activations=int8) for op in forced
    )
