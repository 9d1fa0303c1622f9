"""`qdq quantize`: section `quantize` of a spec file, by ModelOpt or by `qdq`, each layer in its own precision."""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from harness.accuracy.calibration.range_estimators import finite_ranges, range_warnings
from harness.accuracy.calibration.ranges import calibrate
from harness.accuracy.tools.ptq import modelopt
from harness.base.errors import BuildFailed, UserError, suggest_names
from harness.base.random_inputs import InputTypes
from harness.compat.tao_specs.dataset import (
    loader_feeds,
    name_write_errors,
    open_feeds,
    open_onnx_file,
    peek_sample_shapes,
    shapes_of,
    static_inputs,
    write_static_copy,
)
from harness.compat.tao_specs.modelopt_arguments import make_modelopt_arguments
from harness.compat.tao_specs.spec import (
    PRESETS,
    DatasetSection,
    Dtype,
    LayerSpec,
    QuantizeSection,
    TensorDtype,
    assign_layers,
    match_skip_names,
)
from harness.config.sections import PluginSpec
from harness.graph.io.files import set_model_aside
from harness.graph.load import ModelSignature, load, read_signature, save_to_folder
from harness.graph.model import Model
from harness.graph.qdq.insert import Inserter
from harness.graph.rules.dialects import ONNXRUNTIME_UNFUSED, Dialect, load_dialect
from harness.graph.rules.operator_sets import LINEAR_OPS
from harness.graph.rules.placement_rules import first_violated_rule
from harness.graph.rules.points import QuantizationPoint, add_required_edges, find_points
from harness.plugins import registry
from harness.plugins.api import Array
from harness.results.output_check import OutputCheck, not_checked
from harness.run.verify.runtime_checker import CHECK_SAMPLE_COUNT, check_file
from search.space import Edge

logger = logging.getLogger(__name__)

OUTPUT_FILE_NAME = "quantized_model.onnx"
MIN_OPSET = 17
DEFAULT_DIALECT = "tensorrt"
#: Precision of `harness.graph` by dtype of a spec.
DTYPE_PRECISIONS: Mapping[Dtype, str] = {"int8": "int8", "fp8_e4m3fn": "fp8", "fp8_e5m2": "fp8e5m2", "native": "float"}
EMULATED_PRECISION = "fp8e5m2"  # in ONNX and OpenVINO; in no dialect, because no kernel of TensorRT takes it


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
    """
    path, declared = open_onnx_file(section.model_path, base, "quantize.model_path")
    refuse_quantized(declared, section.model_path)
    for key in ("default_layer_dtype", "default_activation_dtype"):
        if (value := getattr(section, key)) is not None:
            logger.warning("quantize.%s: %s is ignored, as documented: give dtypes layer by layer", key, value)
    if section.backend == "qdq" and section.device != "cpu":
        logger.warning("quantize.device: %s: backend qdq calibrates on the CPU", section.device)
    section, layers = _apply_preset(section, declared)
    by_modelopt = section.backend == "modelopt.onnx"
    arguments = make_modelopt_arguments(section, layers, declared.nodes) if by_modelopt else {}
    dialect, precisions = (None, ()) if by_modelopt else _load_dialect(section, layers)
    target = results / OUTPUT_FILE_NAME
    with name_write_errors(f"results_dir {results}"):
        results.mkdir(parents=True, exist_ok=True)
    feeds: Iterable[Mapping[str, Array]]
    if loader is None:
        types, feeds, calibrated_on = open_feeds(dataset, base, declared)
    else:
        samples, batches = peek_sample_shapes(loader, tuple(declared.inputs))
        types = static_inputs(declared, dataset.shapes, dataset.dims, samples=samples)
        feeds, calibrated_on = loader_feeds(batches, types), "a data loader"
    compared = tuple(islice(feeds, CHECK_SAMPLE_COUNT)) if run else ()
    if isinstance(feeds, Iterator):
        feeds = chain(compared, feeds)
    if dialect is None:
        quantize_with_modelopt(path, target, feeds, add_calibration_shapes(arguments, declared, types))
        return checked_result(target, calibrated_on, path, types, compared)
    fixed = {name: types[name] for name, (_, dims) in declared.inputs.items() if None in dims}
    if any(None in declared.inputs[name][1][1:] for name in fixed):
        logger.warning(
            "%s: its dynamic sizes are fixed in the result: %s; modelopt.onnx keeps them", section.model_path,
            _format_shapes(fixed, " ", ", "),
        )  # fmt: skip
    elif fixed:
        logger.warning("%s: its dynamic batch is 1 in the result; backend modelopt.onnx keeps it", section.model_path)
    min_opset = max(MIN_OPSET, dialect.opset(precisions))
    model = load(path, source=section.model_path, shapes=shapes_of(types), min_opset=min_opset)
    skipped = match_skip_names(model.nodes, section.skip_names)
    selected = _select_edges(model, dialect, precisions, layers, skipped)
    _export(model, selected, feeds, section.algorithm, dialect, target)
    return checked_result(target, calibrated_on, path, types, compared, dialect.name)


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
    """Run ModelOpt in a child process; for the arguments see `harness.accuracy.tools.ptq.modelopt`."""
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
    """
    result = read_signature(target)
    found: dict[str, Counter[str]] = {}
    for node in result.nodes:
        found.setdefault(node.op, Counter()).update(sorted(node.precisions) or ["native"])
    layers = {op: dict(counts) for op, counts in sorted(found.items()) if set(counts) != {"native"}}
    # The benchmarker has the name of the dialect, or of the start of it.
    installed = {plugin.name for plugin in registry.installed_plugins("benchmarker")}
    parts = dialect.split("_")
    names = ("_".join(parts[:count]) for count in range(len(parts), 0, -1))
    use = next((name for name in names if name in installed), None)
    check, path = not_checked("the run is switched off"), target
    if samples and use is None:
        check = not_checked(f"no backend runs the dialect {dialect!r}")
    elif samples and use is not None:
        params = {"optimization": "disabled"} if dialect == ONNXRUNTIME_UNFUSED.name else {}
        with tempfile.TemporaryDirectory(prefix="qdq-check-") as scratch:
            work = Path(scratch)
            files = (
                write_static_copy(target, result, types, work / "quantized.onnx"),
                write_static_copy(float_file, read_signature(float_file), types, work / "float.onnx"),
            )
            check = check_file(*files, samples, PluginSpec(use=use, params=params))
    if not check.is_usable:
        path = set_model_aside(target, target)
    return QuantizationResult(path=path, layers=layers, calibrated_on=calibrated_on, check=check)


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


def _load_dialect(section: QuantizeSection, layers: Sequence[LayerSpec]) -> tuple[Dialect, tuple[str, ...]]:
    """Return the dialect in `backend_kwargs` with the precisions of the layers, and these in order of appearance."""
    for key in section.backend_kwargs:
        if key != "dialect":
            raise UserError(
                f"backend_kwargs.{key}: backend 'qdq' takes only 'dialect'; {suggest_names(key, ('dialect',))} "
                "(for ModelOpt's arguments set backend: modelopt.onnx)"
            )
    dialect = load_dialect(str(section.backend_kwargs.get("dialect", DEFAULT_DIALECT)))
    dtypes: dict[str, Dtype] = {}
    for i, layer in enumerate(layers):
        if len(set(layer.dtypes)) > 1:
            weights, activations = layer.dtypes
            raise UserError(
                f"layers.{i}: weights in {weights} and activations in {activations}: no runtime multiplies the two; "
                "use one dtype for both, or native for one"
            )
        dtypes |= {DTYPE_PRECISIONS[dtype]: dtype for dtype in layer.dtypes}
    if not dtypes:
        raise UserError("quantize.layers: every dtype is native, so there is nothing to quantize")
    for precision, dtype in dtypes.items():
        if ("fp8" if precision == EMULATED_PRECISION else precision) not in dialect.precisions:
            known = sorted(DTYPE_PRECISIONS.items(), key=lambda each: each[1])
            offered = ", ".join(name for name, each in known if each in dialect.precisions)
            raise UserError(f"layers: dialect {dialect.name!r} has {offered}, but got {dtype}")
    if EMULATED_PRECISION in dtypes:
        if dialect.name == DEFAULT_DIALECT:
            logger.warning("layers: TensorRT takes FP8 only as E4M3: it rejects models with fp8_e5m2")
        dialect = replace(dialect, precisions=dialect.precisions | {EMULATED_PRECISION})
    return dialect, tuple(dtypes)


def _export(
    model: Model,
    selected: Mapping[Edge, str],
    batches: Iterable[Mapping[str, Array]],
    method: str,
    dialect: Dialect,
    target: Path,
) -> None:
    """Calibrate the tensors of edges, and write a model that is quantized at these edges to `target`."""
    if not selected:
        raise UserError(f"{model.source}: nothing is left to quantize; check layers and skip_names")
    tensors = {edge.tensor for edge in selected if edge.tensor not in model.constants}
    with tempfile.TemporaryDirectory(prefix="qdq-quantize-") as work:
        float_file = save_to_folder(model, Path(work))
        ranges = calibrate(float_file, tensors, batches, method=method, source=model.source)
    for remark in range_warnings(ranges):
        logger.warning("%s: %s", model.source, remark)
    usable = finite_ranges(ranges)
    float_nodes = {e.consumer for e in selected if e.tensor not in model.constants and e.tensor not in usable}
    edges = {e: p for e, p in selected.items() if e.consumer not in float_nodes or e.tensor in usable}
    Inserter(model, dialect, usable).export(tuple(sorted(edges.items())), target)


def _select_edges(
    model: Model, dialect: Dialect, precisions: Sequence[str], layers: Sequence[LayerSpec], skipped: frozenset[str]
) -> dict[Edge, str]:
    """Return the precision of each edge that the entries of `layers` quantize, without those of skipped nodes."""
    points, nodes = find_points(model, dialect, precisions), model.nodes
    entries = assign_layers(nodes, layers, LINEAR_OPS)
    assigned = {n.index: layer for n, layer in zip(nodes, entries, strict=True) if layer and n.name not in skipped}

    def point_edges(point: QuantizationPoint, layer: LayerSpec) -> Iterator[tuple[Edge, str]]:
        linear = nodes[point.node].op in dialect.linear_ops
        for edge in point.edges:
            tensor = layer.weights if linear and edge.tensor in model.constants else layer.activations
            if DTYPE_PRECISIONS[tensor.dtype] in point.precisions:
                yield edge, DTYPE_PRECISIONS[tensor.dtype]

    selected = {
        edge: precision
        for index, layer in assigned.items()
        for point in points[index]
        for edge, precision in point_edges(point, layer)
    }
    quantized = {edge.consumer for edge in selected}
    for index, layer in assigned.items() if dialect.quantize_outputs else ():
        node = nodes[index]
        if node.op not in dialect.linear_ops or node.name not in quantized:
            continue
        for reader, slot in model.consumers.get(node.outputs[0], ()):
            read = [point for point in points[reader] if any(edge.slot == slot for edge in point.edges)]
            for point in read if nodes[reader].name not in skipped else ():
                for edge, precision in point_edges(point, layer):
                    selected.setdefault(edge, precision)
    required = add_required_edges(model, dialect, points, selected)
    selected |= dict.fromkeys(required - selected.keys(), "int8")
    quantized = {edge.consumer for edge in selected}
    for i, layer in enumerate(layers):
        own = [nodes[index] for index, entry in assigned.items() if entry is layer]
        if not layer.dtypes or not own or any(node.name in quantized for node in own):
            continue
        precision = DTYPE_PRECISIONS[layer.dtypes[-1]]
        rules = (first_violated_rule(model, dialect, node, 0, precision) for node in own)
        causes = Counter(rule.text for rule in rules if rule is not None)
        logger.warning(
            "layers.%d: none of the %d nodes of %r may be quantized for %s; %s", i, len(own), layer.module_name,
            dialect.name, " ".join(text for text, _ in causes.most_common(1))
            or "their only quantizable inputs are constants",
        )  # fmt: skip
    return selected
