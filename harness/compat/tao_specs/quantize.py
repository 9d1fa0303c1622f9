"""`qdq quantize`: the section `quantize` of a spec file, by ModelOpt or by our own engine."""

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
from harness.compat.tao_specs.calibration_feeds import (
    CalibrationFeeds,
    loader_feeds,
    open_calibration_feeds,
    peek_sample_shapes,
    sample_shapes,
)
from harness.compat.tao_specs.model_file import open_onnx_file, static_shapes, static_types
from harness.compat.tao_specs.modelopt_arguments import make_modelopt_arguments
from harness.compat.tao_specs.presets import PRESETS
from harness.compat.tao_specs.spec import DatasetSection, LayerSpec, QuantizeSection, TensorDtype
from harness.errors import BuildFailed, UserError
from harness.graph.signature import ModelSignature, read_signature

__all__ = [
    "OUTPUT_FILE_NAME", "QuantizationResult", "add_calibration_shapes", "count_precisions", "quantize",
    "quantize_with_modelopt", "refuse_quantized",
]  # fmt: skip

logger = logging.getLogger(__name__)

OUTPUT_FILE_NAME = "quantized_model.onnx"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationResult:
    """A model that was quantized.

    Attributes:
        layers: For each operator that has quantized inputs somewhere, how many of its nodes are in which precision
            ("int8", "fp8", "fp8e5m2", "native").
        calibrated_on: For people.
    """

    path: Path
    layers: Mapping[str, Mapping[str, int]]
    calibrated_on: str


def quantize(
    section: QuantizeSection, dataset: DatasetSection, base: Path, results: Path, loader: Iterable[Any] | None = None
) -> QuantizationResult:
    """Quantize as a section says and write `quantized_model.onnx`.

    Args:
        section: Section `quantize`.
        dataset: Section `dataset`, for the calibration.
        base: Folder that relative paths start from.
        results: Folder of the result, made where missing.
        loader: Calibration batches of one's own (arrays, tuples, mappings) in the place of `dataset`.

    Raises:
        UserError: Anything in it that cannot be used, and ModelOpt's own words where it fails.
    """
    path, declared = open_onnx_file(section.model_path, base, "quantize.model_path")
    refuse_quantized(declared, section.model_path)
    _warn_ignored_keys(section)
    section, layers = _apply_preset(section, declared)
    names = tuple(declared.inputs)
    samples, loader = (
        (sample_shapes(dataset, names, base), None) if loader is None else peek_sample_shapes(loader, names)
    )
    shapes = static_shapes(declared, 1, dataset.shapes, samples=samples, dims=dataset.dims)
    types = static_types(declared, shapes)
    target = _make_target(results)
    if section.backend == "modelopt.onnx":
        arguments = make_modelopt_arguments(section, layers, declared.nodes)
        feeds = _open_feeds(dataset, types, base, loader)
        quantize_with_modelopt(path, target, feeds.batches, add_calibration_shapes(arguments, declared, shapes))
    else:
        dialect = parse_builtin_arguments(section.backend_kwargs)
        order = LayerwiseRequest(
            model_path=path, source=section.model_path, shapes=shapes, layers=layers, skip_names=section.skip_names,
            method=section.algorithm, dialect=dialect,
        )  # fmt: skip
        feeds = _open_feeds(dataset, types, base, loader)
        _warn_fixed_sizes(section.model_path, declared, shapes)
        with tempfile.TemporaryDirectory(prefix="qdq-quantize-") as work:
            quantize_builtin(order, target, feeds.batches, Path(work))
    return QuantizationResult(
        path=target, layers=count_precisions(read_signature(target)), calibrated_on=feeds.description
    )


def quantize_with_modelopt(
    path: Path, target: Path, batches: Iterable[Mapping[str, Array]], arguments: Mapping[str, Any]
) -> None:
    """Run ModelOpt in a process of its own.

    Raises:
        UserError: Its own words; or it left the model as it was.
    """
    try:
        modelopt(path, target, batches, arguments)
    except BuildFailed as error:
        raise UserError(f"{path.name}: ModelOpt refuses it: {error}") from error
    made = read_signature(target)
    if not made.precisions and not any("quantize" in op.lower() or op == "MatMulNBits" for op in made.operators):
        target.unlink()
        mode = arguments.get("quantize_mode", "int8")
        raise UserError(
            f"{path.name}: ModelOpt quantized nothing in mode {mode}: every operator that it takes then is excluded, "
            f"too small or not there; the model has {', '.join(sorted(made.operators))}"
        )


def add_calibration_shapes(
    arguments: Mapping[str, Any], declared: ModelSignature, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """Return ModelOpt's arguments with the shapes of the inputs where it would take 1 for other sizes than a batch."""
    wanted = arguments.get("calibrate_per_node") and not arguments.get("calibration_shapes")
    if not wanted or not any(None in dims[1:] for _, dims in declared.inputs.values()):
        return dict(arguments)
    text = ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in shapes.items())
    return {**arguments, "calibration_shapes": text}


def _warn_fixed_sizes(source: str, declared: ModelSignature, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Name the inputs whose dynamic sizes are fixed in the result."""
    fixed = {name: shapes[name] for name, (_, dims) in declared.inputs.items() if None in dims}
    if any(None in declared.inputs[name][1][1:] for name in fixed):
        said = ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in fixed.items())
        logger.warning("%s: its dynamic sizes are fixed in the result: %s; modelopt.onnx keeps them", source, said)
    elif fixed:
        logger.warning("%s: its dynamic batch is 1 in the result; backend modelopt.onnx keeps it", source)


def refuse_quantized(declared: ModelSignature, source: str) -> None:
    """Raises UserError where a model has Q/DQ pairs already."""
    if declared.precisions:
        raise UserError(
            f"{source}: has Q/DQ pairs already ({', '.join(sorted(declared.precisions))}); start from the float model"
        )


def count_precisions(declared: ModelSignature) -> dict[str, dict[str, int]]:
    """See `QuantizationResult.layers`."""
    found: dict[str, Counter[str]] = {}
    for node in declared.nodes:
        found.setdefault(node.op, Counter()).update(sorted(node.precisions) or ["native"])
    return {op: dict(counts) for op, counts in sorted(found.items()) if set(counts) != {"native"}}


def _warn_ignored_keys(section: QuantizeSection) -> None:
    for key in ("default_layer_dtype", "default_activation_dtype"):
        value = getattr(section, key)
        if value is not None:
            logger.warning("quantize.%s: %s is ignored, as documented: say dtypes layer by layer", key, value)
    if section.backend == "qdq" and section.device != "cpu":
        logger.warning("quantize.device: %s: backend qdq calibrates on the CPU", section.device)


def _apply_preset(section: QuantizeSection, declared: ModelSignature) -> tuple[QuantizeSection, tuple[LayerSpec, ...]]:
    """The section with what its preset adds, and its layers."""
    if section.preset is None:
        return section, section.layers
    preset = PRESETS[section.preset]
    if preset.expect:
        logger.warning("preset %s: %s", section.preset, preset.expect)
    whole = section.model_copy(update={"skip_names": (*section.skip_names, *preset.skip_names)})
    int8 = TensorDtype(dtype="int8")
    forced = [op for op in preset.op_types if op in declared.operators]
    return whole, section.layers or tuple(LayerSpec(module_name=op, weights=int8, activations=int8) for op in forced)


def _open_feeds(dataset: DatasetSection, types: Any, base: Path, loader: Iterable[Any] | None) -> CalibrationFeeds:
    if loader is None:
        return open_calibration_feeds(dataset, types, base)
    return CalibrationFeeds(batches=loader_feeds(loader, types), description="a data loader")


def _make_target(results: Path) -> Path:
    try:
        results.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"results_dir {results}: cannot be made: {error.strerror or error}") from error
    return results / OUTPUT_FILE_NAME
