"""`qdq quantize`: section `quantize` of a spec file, by ModelOpt or by the built-in quantizer."""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from harness.accuracy.calibration.ptq import modelopt
from harness.base.errors import BuildFailed, UserError
from harness.base.random_inputs import InputTypes
from harness.compat.tao_specs.builtin_quantizer import (
    DEFAULT_DIALECT,
    LayerwiseRequest,
    parse_builtin_arguments,
    quantize_builtin,
)
from harness.compat.tao_specs.dataset import (
    calibration_feeds,
    loader_feeds,
    open_calibration_data,
    peek_sample_shapes,
    sample_shapes,
)
from harness.compat.tao_specs.layers import PRESETS
from harness.compat.tao_specs.model_file import (
    name_write_errors,
    open_onnx_file,
    shapes_of,
    static_inputs,
    write_static_copy,
)
from harness.compat.tao_specs.modelopt_arguments import make_modelopt_arguments
from harness.compat.tao_specs.spec import DatasetSection, LayerSpec, QuantizeSection, TensorDtype
from harness.config.sections import PluginSpec
from harness.graph.io.files import set_model_aside
from harness.graph.load import ModelSignature, read_signature
from harness.graph.rules.dialects import ONNXRUNTIME_UNFUSED
from harness.plugins import registry
from harness.plugins.api import Array
from harness.results.output_check import OutputCheck, not_checked
from harness.run.verify.runtime_checker import CHECK_SAMPLE_COUNT, check_file

logger = logging.getLogger(__name__)

OUTPUT_FILE_NAME = "quantized_model.onnx"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationResult:
    """Quantized model.

    Attributes:
        layers: Number of nodes by precision ("int8", "fp8", "fp8e5m2", "native"), for each operator with a quantized
            node.
        calibrated_on: Description of the calibration data.
        check: Comparison of the file in the runtime of its dialect with its own meaning. If it failed, the name of the
            file ends in `.wrong.onnx`.
    """

    path: Path
    layers: Mapping[str, Mapping[str, int]]
    calibrated_on: str
    check: OutputCheck


def quantize(
    section: QuantizeSection,
    dataset: DatasetSection,
    base: Path,
    results: Path,
    loader: Iterable[Any] | None = None,
    *,
    run: bool = True,
) -> QuantizationResult:
    """Quantize a model as a spec describes and write `quantized_model.onnx`.

    Args:
        section: Section `quantize`.
        dataset: Section `dataset`, for the calibration.
        base: Folder that relative paths start from.
        results: Folder of the result, created if it is missing.
        loader: Calibration batches (arrays, tuples, mappings) instead of those of `dataset`.
        run: Whether the file is run, if the runtime of its dialect is installed.

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
    compared = tuple(islice(feeds, CHECK_SAMPLE_COUNT)) if run else ()
    if isinstance(feeds, Iterator):
        feeds = chain(compared, feeds)
    if by_modelopt:
        quantize_with_modelopt(path, target, feeds, add_calibration_shapes(arguments, declared, types))
        return checked_result(target, calibrated_on, path, types, compared)
    request = LayerwiseRequest(
        model_path=path, source=section.model_path, shapes=shapes_of(types), layers=layers,
        skip_names=section.skip_names, method=section.algorithm, dialect=dialect,
    )  # fmt: skip
    _warn_fixed_sizes(section.model_path, declared, types)
    with tempfile.TemporaryDirectory(prefix="qdq-quantize-") as work:
        quantize_builtin(request, target, feeds, Path(work))
    return checked_result(target, calibrated_on, path, types, compared, dialect)


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


def checked_result(
    target: Path,
    calibrated_on: str,
    float_file: Path,
    types: InputTypes,
    samples: Sequence[Mapping[str, Array]],
    dialect: str = DEFAULT_DIALECT,
) -> QuantizationResult:
    """Compare a quantized file with its own meaning in the runtime of its dialect, and return the result.

    A file with a wrong result, or one that the runtime refuses, is renamed to NAME.wrong.onnx.

    Args:
        target: The quantized file.
        calibrated_on: See `QuantizationResult`.
        float_file: The float model.
        types: Element type and static shape of each input.
        samples: Inputs of the comparison; empty: the file is not run.
        dialect: Name of the dialect of the file.

    Raises:
        UserError: The file cannot be read.
    """
    result = read_signature(target)
    found: dict[str, Counter[str]] = {}
    for node in result.nodes:
        found.setdefault(node.op, Counter()).update(sorted(node.precisions) or ["native"])
    layers = {op: dict(counts) for op, counts in sorted(found.items()) if set(counts) != {"native"}}
    check, path = not_checked("the run is switched off"), target
    if samples:
        with tempfile.TemporaryDirectory(prefix="qdq-check-") as scratch:
            work = Path(scratch)
            files = (
                write_static_copy(target, result, types, work / "quantized.onnx"),
                write_static_copy(float_file, read_signature(float_file), types, work / "float.onnx"),
            )
            check = _check_in_runtime(*files, samples, dialect)
    if not check.is_usable:
        path = set_model_aside(target, target)
    return QuantizationResult(path=path, layers=layers, calibrated_on=calibrated_on, check=check)


def _check_in_runtime(
    file: Path, float_file: Path, samples: Sequence[Mapping[str, Array]], dialect: str
) -> OutputCheck:
    """Return the check of a file in the benchmarker with the name of the dialect, or with the start of it."""
    parts = dialect.split("_")
    names = ["_".join(parts[:count]) for count in range(len(parts), 0, -1)]
    installed = {plugin.name for plugin in registry.installed_plugins("benchmarker")}
    use = next((name for name in names if name in installed), None)
    if use is None:
        return not_checked(f"no backend runs the dialect {dialect!r}")
    params = {"optimization": "disabled"} if dialect == ONNXRUNTIME_UNFUSED.name else {}
    return check_file(file, float_file, samples, PluginSpec(use=use, params=params))


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
