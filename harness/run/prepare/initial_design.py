"""Initial placements of the searches and placements of baselines, by name, with the Q/DQ models of PTQ tools."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple

from harness.accuracy.tools.ptq import (
    TOOLS,
    MetricRequest,
    PtqOptions,
    method_substitute,
    ptq_fingerprint,
    quantize,
    unavailable_reason,
)
from harness.base.errors import BuildFailed, UserError
from harness.base.files import explain_write_errors, read_json
from harness.base.paths import cache_dir, resolve_path
from harness.base.progress import Observer
from harness.config.experiment import (
    BASELINE_TOOLS,
    FIXED_NAMES,
    FULLY_QUANTIZED,
    PTQ_TOOLS,
    TENSORRT_GUIDE,
    Experiment,
    TaskSpec,
    initial_count,
    is_placement_plugin,
    quantized_precisions,
    split_precision,
)
from harness.config.sections import PluginSpec
from harness.graph.io.digests import IR_SUFFIX
from harness.graph.load import read_signature
from harness.graph.model import Model
from harness.graph.passes.dimension_sizes import InputSizes
from harness.graph.passes.static_shapes import copy_with_static_inputs
from harness.graph.pattern_cache import (
    MeasurementOrigin,
    PatternCache,
    describe_foreign_schemes,
    propose_placements,
    read_cache,
)
from harness.graph.qdq.import_placement import (
    ImportedPlacement,
    find_differences,
    require_pairs,
    summarize_differences,
    transfer_placement,
)
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.qdq_graph import QDQ_OPS, QDQGraph, count_pairs, read_qdq_graph
from harness.graph.quantize.protobuf_wire import NAME_PREFIX
from harness.graph.rules.dialects import ONNXRUNTIME_S8, ONNXRUNTIME_S8_7BIT, Dialect, load_dialect
from harness.measure.records import SCHEMA_VERSION
from harness.plugins.api import Array
from harness.plugins.registry import call_plugin, load_plugin, uses_objects
from harness.results.deploy_folder import bundle_model
from search.fixed_placements import FIXED_PLACEMENTS
from search.space import Edge, Placement, Space

SIGNED_ORT_TOOL = "ort_static_s8"
PTQ_FUNCTIONS = {name: partial(quantize, name) for name in TOOLS}
PTQ_PACKAGES = ("nvidia-modelopt", "onnxruntime", "nncf", "openvino")
_IR_TOOLS = frozenset({"nncf_ptq", "nncf_accuracy_control"})
"""Tools that write an OpenVINO IR for OpenVINO, as their guides recommend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalModel:
    """Q/DQ model of another tool, or the reason for its failure.

    Attributes:
        path: File of the model; None if the tool failed.
        pairs: Number of Q/DQ pairs.
        reason: Reason for the failure, or "".
        method: Calibration method of the tool if it lacks that of the experiment; otherwise "".
        seconds: Wall-clock seconds of the tool; None for an imported model.
    """

    name: str
    path: Path | None
    pairs: int = 0
    reason: str = ""
    method: str = ""
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationRequest:
    """Model, data and options for PTQ tools.

    Attributes:
        source: Name of the model in messages.
        data: Calibration batches, which are read only if no cached model exists.
        data_key: Text that differs if the model, the data or the preprocessing differ; part of the key of the cache.
        options: Keyword arguments of the tool besides `metric`.
        own_sizes: Whether batches differ in shape from the inputs of the model, which no tool accepts.
        metric: Evaluator and bound of the search, for tools that keep a bound; None without a bound.
    """

    model_file: Path
    source: str
    data: Iterable[Mapping[str, Array]]
    data_key: str
    options: PtqOptions
    own_sizes: bool = False
    metric: MetricRequest | None = None


def run_external_tool(name: str, request: QuantizationRequest, observer: Observer) -> ExternalModel:
    """Quantize with another tool, or return its cached result for the same model, data and options.

    A tool without the calibration method of the experiment uses its nearest method. If the tool cannot run or fails,
    the observer receives the reason, which is also `reason` of the result.

    Args:
        name: Name of the tool in `harness.accuracy.tools.ptq`.
        request: Model, data and options.
        observer: Receiver of progress and failures.

    Raises:
        UserError: The disk is full.
    """
    options, tool = request.options, TOOLS[name]
    metric = request.metric if tool.controls_accuracy else None
    reason = unavailable_reason(name, options.get("precision", "int8"))
    if request.own_sizes:
        reason = reason or "it takes samples of one size; pad or cut the calibration samples, or leave the tool out"
    if tool.controls_accuracy and metric is None:
        reason = reason or "keeps a bound on accuracy, but the objective has none"
    elif metric is not None and uses_objects(metric.evaluator.use, metric.evaluator.params):
        reason = reason or "its process cannot call a metric of this program; put it into a module, named module:NAME"
    if reason:
        observer.say(f"{request.source}: {name} cannot run: {reason}")
        return ExternalModel(name=name, path=None, reason=reason)
    requested = options.get("method", "minmax")
    method = tool.nearest_method(requested)
    options = {**options, "method": method}
    if name == SIGNED_ORT_TOOL:
        limit = load_dialect(options["dialect_name"]).weight_limit
        signed = ONNXRUNTIME_S8_7BIT if limit == ONNXRUNTIME_S8_7BIT.weight_limit else ONNXRUNTIME_S8
        options = {**options, "dialect_name": signed.name}
    substitute = method if (remark := method_substitute(name, requested)) else ""
    if remark:
        observer.say(f"{request.source}: {remark}")
    is_ir = name in _IR_TOOLS and options["dialect_name"].startswith("openvino")
    data_key = f"{request.data_key}{metric or ''}"
    text = json.dumps([name, ptq_fingerprint(options, name), data_key, _installed_tools(tuple(sys.path))])
    key = hashlib.sha256(text.encode()).hexdigest()[:24]
    path = cache_dir() / "ptq" / key / f"{name}{IR_SUFFIX if is_ir else '.onnx'}"
    seconds_file = path.with_suffix(".seconds")
    if not path.exists():
        with observer.work(f"{request.source}: quantize with {name}", 1) as step, explain_write_errors(path):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                seconds = PTQ_FUNCTIONS[name](request.model_file, path, request.data, metric=metric, **options)
            except BuildFailed as error:
                observer.say(f"{request.source}: {name} failed: {error}")
                return ExternalModel(name=name, path=None, reason=str(error), method=substitute)
            seconds_file.write_text(f"{seconds:.2f}", encoding="ascii")
            step.advance()
    taken_s = float(seconds_file.read_text(encoding="ascii")) if seconds_file.exists() else None
    return ExternalModel(name=name, path=path, pairs=count_pairs(path), method=substitute, seconds=taken_s)


def tool_remarks(experiment: Experiment) -> Iterator[str]:
    """Yield a line for each setting that a PTQ tool in the experiment's `initial` or `baselines` does not support."""
    named = (*(start.use for start in experiment.initial), *experiment.baselines)
    for name in dict.fromkeys(each for each in named if each in PTQ_FUNCTIONS):
        for setting in experiment.precision:
            if reason := unavailable_reason(name, quantized_precisions(setting)[0]):
                yield f"{name}: cannot run at precision {setting}, so its row will be empty: {reason}"
            elif setting == "mixed":
                yield f"{name}: at precision mixed it quantizes to {quantized_precisions(setting)[0]} alone"
        for method in dict.fromkeys(model.calibration.method for model in experiment.models):
            if note := method_substitute(name, method):
                yield note


def fully_quantized_symmetric(
    model: Model, dialect: Dialect, ranges: Mapping[str, tuple[float, float]], work: Path, space: Space
) -> ExternalModel:
    """Write the model with every point quantized in symmetric INT8, as the simplest tools do, and return it.

    The features of a dialect for accuracy or speed (UINT8 data, zero points) are not used. If the model keeps its
    accuracy even so, a bound on accuracy excludes no placement.

    Args:
        model: The float model.
        dialect: Dialect of the runtime.
        ranges: Smallest and largest value of each activation of `space` by tensor name.
        work: Existing folder for the new file, `extreme.onnx`.
        space: Space of the model without points that lack a range.

    Raises:
        UserError: The disk is full.
    """
    plain = replace(
        dialect, activation="int8", symmetric_activation=True, unsigned_positive=False, affine_ops=frozenset()
    )
    resolved, path = space.resolve(space.quantize_all()), work / "extreme.onnx"
    inserter = Inserter(model, plain, ranges)
    with explain_write_errors(path):
        inserter.export(resolved, path)
    return ExternalModel(name=FULLY_QUANTIZED, path=path, pairs=inserter.count_pairs(resolved))


@functools.cache  # reading the name of everything on the path takes about 30 ms
def _installed_tools(path: tuple[str, ...]) -> tuple[str, ...]:
    found = (dist for dist in distributions(path=list(path)) if dist.name and dist.name.startswith(PTQ_PACKAGES))
    return tuple(sorted(f"{dist.name} {dist.version}" for dist in found))


def load_imported_models(starts: Sequence[PluginSpec]) -> dict[str, ExternalModel]:
    """Load the Q/DQ models of the entries `import` of an experiment's key `initial`, by label.

    Raises:
        UserError: A file does not exist or cannot be read.
    """
    paths = {start.name: initial_file(start) for start in starts if start.use == "import"}
    return {name: ExternalModel(name=name, path=path, pairs=count_pairs(path)) for name, path in paths.items()}


def fix_imported_inputs(found: Mapping[str, ExternalModel], model: Model, folder: Path) -> dict[str, ExternalModel]:
    """Return imported models with the input shapes of the float model, as copies of models with dynamic inputs.

    Args:
        found: Result of `load_imported_models`.
        model: The float model at the shape of the search.
        folder: Folder of the copies.

    Raises:
        UserError: An input of an imported model cannot have the shape.
    """
    fixed = {}
    for name, external in found.items():
        path = external.path
        inputs = {} if path is None else read_signature(path).inputs
        if path is not None and any(None in shape for _, shape in inputs.values()):
            shapes = {each: model.types[each].shape for each in model.inputs if each in inputs}
            with explain_write_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
                path = copy_with_static_inputs(path, InputSizes(shapes=shapes), folder / f"{name}.onnx")
        fixed[name] = replace(external, path=path)
    return fixed


def initial_file(start: PluginSpec) -> Path:
    """Return the Q/DQ file that an entry of an experiment's key `initial` names.

    Args:
        start: Entry with the path of a file, of a folder to deploy, or of results with exactly one such folder.

    Raises:
        UserError: There is no such file, it cannot be read, or there are several folders to deploy.
    """
    path = resolve_path(start.params["path"], start.base_dir)
    return find_qdq_file(path) if start.use == "placement" else bundle_model(path)


def find_qdq_file(path: Path) -> Path:
    """Return the Q/DQ file for the path of a file, a folder to deploy, or results with exactly one such folder.

    Raises:
        UserError: There is no such file, it cannot be read, has no Q/DQ pair, or there are several folders to deploy.
    """
    file = bundle_model(path)
    if not file.is_file():
        raise UserError(f"{file}: no such Q/DQ file or folder to deploy")
    require_pairs(read_qdq_graph(file), str(file))
    return file


def is_exported(path: Path) -> bool:
    """Return whether any Q/DQ pair of an ONNX file has a name that qdq-bench gives; False without pairs.

    Raises:
        UserError: The file cannot be read.
    """
    nodes = read_qdq_graph(path).proto.graph.node
    return any(NAME_PREFIX in node.output[0] for node in nodes if node.op_type in QDQ_OPS)


def load_imported_ranges(
    starts: Sequence[PluginSpec], read: Callable[[Path], ImportedPlacement]
) -> dict[str, tuple[float, float]]:
    """Return the ranges (lowest, highest) by tensor of the files of entries of `initial` with `ranges: true`.

    Args:
        starts: Entries of the experiment's key `initial`.
        read: Reader of the placement of a file.

    Raises:
        UserError: A file does not exist or cannot be read.
    """
    found: dict[str, tuple[float, float]] = {}
    for start in starts:
        if start.params.get("ranges"):
            found |= read(initial_file(start)).ranges
    return found


def check_files(starts: Sequence[PluginSpec]) -> None:
    """Check every file and plug-in that the entries of an experiment's key `initial` name.

    Raises:
        UserError: A file or plug-in does not exist, or is not of the expected kind.
    """
    load_imported_models(starts)
    for start in starts:
        if start.use == "placement":
            initial_file(start)
        elif start.use == "sensitivity":
            read_prior(resolve_path(start.params["path"], start.base_dir))
        elif start.use == "pattern_cache":
            _read_pattern_cache(start)
        elif is_placement_plugin(start):
            load_plugin("fixed placement", start.use)


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialDesign:
    """Model, space and Q/DQ models from which initial placements are created.

    Attributes:
        external_models: Models of PTQ tools and imported models, by name.
        read: Reader of the placement of a file, which keeps what it has read.
        facts: Description of the benchmarker.
    """

    spec: TaskSpec
    space: Space
    model: Model
    external_models: Mapping[str, ExternalModel]
    read: Callable[[Path], ImportedPlacement]
    observer: Observer
    facts: Mapping[str, Any]

    def placements(self, starts: Sequence[PluginSpec]) -> dict[str, dict[str, Placement]]:
        """Return the placements by name for each entry; a failed tool or a cache without common patterns gives none.

        Raises:
            UserError: A file cannot be read, or its placement does not exist in the space.
        """
        found = {}
        for start in starts:
            source = _plugin_placement if is_placement_plugin(start) else SOURCES[start.use]
            placements = enumerate(source(self, start), start=1)
            found[start.name] = {start.name if rank == 1 else f"{start.name}-{rank}": each for rank, each in placements}
        return found

    def read_placement(self, path: Path) -> Placement:
        """Return the placement of an exported file, or the nearest placement of the space for a file of another tool.

        Raises:
            UserError: The structures of file and model differ, or the space lacks an edge of an exported file.
        """
        if not is_exported(path):
            return self.space.nearest(self.read(path).edges)
        edges = transfer_placement(path, self.model)
        placement = self.space.nearest(edges)
        missing = set(edges.items()).symmetric_difference(self.space.resolve(placement))
        if missing:
            edge, precision = min(missing)
            raise UserError(
                f"{path}: its placement is none of this space: {precision} at input {edge.slot} of {edge.consumer!r}; "
                "use the backend, the precision and `sharing` that it was searched with"
            )
        return placement

    def import_notes(
        self,
        starts: Sequence[PluginSpec],
        placements: Mapping[str, Mapping[str, Placement]],
        inserter: Inserter,
        dialect: Dialect,
    ) -> Iterator[str]:
        """Yield a note for each file of another tool whose placement the space expresses in another form.

        Args:
            starts: Entries of the experiment's key `initial`, and baselines.
            placements: Result of `placements`.
            inserter: Writer of placements of the space.
            dialect: Dialect of the space.
        """
        for start in starts:
            placed = placements[start.name].get(start.name)
            if start.use not in ("import", "placement") or placed is None or is_exported(initial_file(start)):
                continue
            theirs = self.read(initial_file(start))
            resolved, ranges = self.space.resolve(placed), bool(start.params.get("ranges"))
            written = QDQGraph(inserter.insert(resolved) if resolved else self.model.proto)
            found = find_differences(theirs, self.space, dialect, resolved, written, ranges=ranges)
            if text := summarize_differences(theirs, found, start.params["path"]):
                yield f"{start.name}: {text}"

    def foreign_origin_notes(self, starts: Sequence[PluginSpec]) -> tuple[str, ...]:
        """Return notes about entries with pattern-cache schemes that were measured on another machine.

        Raises:
            UserError: A pattern cache cannot be read.
        """
        caches = {start.name: _read_pattern_cache(start) for start in starts if start.use == "pattern_cache"}
        return tuple(
            f"{name}: {text}"
            for name, cache in caches.items()
            for text in describe_foreign_schemes(cache, self.origin())
        )

    def origin(self) -> MeasurementOrigin:
        """Return the origin of measurements in this task."""
        return MeasurementOrigin.of_backend(self.facts, self.spec.precision)


def _read_pattern_cache(start: PluginSpec) -> PatternCache:
    return read_cache(resolve_path(start.params["path"], start.base_dir))


def _fixed_placement(design: InitialDesign, start: PluginSpec) -> Iterator[Placement]:
    name, precision = split_precision(start.use)
    yield FIXED_PLACEMENTS[name](design.space, precision)


def _plugin_placement(design: InitialDesign, start: PluginSpec) -> Iterator[Placement]:
    place = load_plugin("fixed placement", start.use)
    yield call_plugin(
        f"fixed placement {start.use!r}", lambda: design.space.validate(place(space=design.space, precision=None))
    )


def _external_model(design: InitialDesign, start: PluginSpec) -> Iterator[Placement]:
    """Yield the placement that is nearest to that of a tool's or a user's Q/DQ model, if there is such a model."""
    model = design.external_models.get(start.name)
    if model is None or model.path is None:
        return
    try:
        yield design.space.nearest(design.read(model.path).edges)
    except UserError as error:
        design.observer.say(f"{design.model.source}: the placement of {start.name} cannot be read back: {error}")


def _cached_schemes(design: InitialDesign, start: PluginSpec) -> Iterator[Placement]:
    for sentence in design.foreign_origin_notes((start,)):
        design.observer.say(f"{design.model.source}: {sentence}")
    cache, count = _read_pattern_cache(start), initial_count(start)
    if not (found := propose_placements(cache, design.space, design.origin(), count)):
        design.observer.say(f"{design.model.source}: {start.name}: the pattern cache contains none of its patterns")
    yield from found


def _sensitive_units(design: InitialDesign, start: PluginSpec) -> Iterator[Placement]:
    units = read_prior(resolve_path(start.params["path"], start.base_dir))
    if not (found := nested_prior_placements(units, design.space, initial_count(start))):
        design.observer.say(f"{design.model.source}: {start.name}: no unit with a gain exists in this model")
    yield from found


PlacementSource = Callable[[InitialDesign, PluginSpec], Iterator[Placement]]
SOURCES: Mapping[str, PlacementSource] = {
    **dict.fromkeys(FIXED_NAMES, _fixed_placement),
    TENSORRT_GUIDE: lambda design, _: iter([tensorrt_guide_placement(design.space, design.model)]),
    **dict.fromkeys((FULLY_QUANTIZED, *PTQ_TOOLS, "import"), _external_model),
    "placement": lambda design, start: iter([design.read_placement(initial_file(start))]),
    "pattern_cache": _cached_schemes,
    "sensitivity": _sensitive_units,
    **dict.fromkeys(BASELINE_TOOLS, lambda design, start: iter(())),
}
"""Functions that yield the placements of an entry, by its name in `initial` and `baselines`."""


def tensorrt_guide_placement(space: Space, model: Model) -> Placement:
    """Return the placement that TensorRT's guide recommends ("Working with Quantized Types", Q/DQ placement).

    It quantizes all inputs of linear operators, inputs of pooling, and the skip connection of a residual Add, but not
    the operand whose convolution is fused with the Add. If both operands can be quantized, the one that is computed
    first counts as the skip connection.
    """
    operands: dict[str, list[Edge]] = defaultdict(list)
    for dimension in space.dimensions:
        for edge in dimension.edges if dimension.role == "add" else ():
            operands[edge.consumer].append(edge)
    skips = {min(edges, key=lambda edge: model.producer.get(edge.tensor, -1)) for edges in operands.values()}
    choices = []
    for dimension in space.dimensions:
        residual = dimension.role == "add" and 2 * len(skips.intersection(dimension.edges)) > len(dimension.edges)
        choices.append(int(residual or dimension.role in ("linear", "pool")))
    return Placement(tuple(choices))


class ScreenedUnit(NamedTuple):
    """Dimensions that reduce the latency if only they are quantized to `precision`, see `qdq inspect sensitivity`."""

    dimensions: tuple[str, ...]
    precision: str


def read_prior(path: Path) -> tuple[ScreenedUnit, ...]:
    """Return the groups of dimensions in a file of sensitivities that reduced the latency, in the file's order.

    The file has the most beneficial group first. The result is empty if no group reduced the latency.

    Raises:
        UserError: The file is damaged, or of another kind.
    """
    try:
        body = read_json(path)
        if (body.get("kind"), body.get("schema")) != ("sensitivity", SCHEMA_VERSION):
            raise ValueError(f"no sensitivities of schema {SCHEMA_VERSION}")
        found = []
        for unit in body["units"]:
            gain_us = unit["alone"].get("gain_us")
            if isinstance(gain_us, int | float) and gain_us > 0:
                names = tuple(map(str, unit["dimensions"]))
                found.append(ScreenedUnit(dimensions=names, precision=str(unit["precision"])))
        return tuple(found)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not a file of 'qdq inspect sensitivity' that can be read: {error}") from error


def nested_prior_placements(units: Sequence[ScreenedUnit], space: Space, count: int) -> list[Placement]:
    """Return at most `count` different placements that quantize increasing shares of the units, best units first.

    Args:
        units: Units in the order in which they are quantized; those that the space lacks are skipped. Without others
            the result is empty.
        space: Space of the task.
        count: Number of shares; 4 means a quarter, half, three quarters and all of the units.
    """
    places = {dimension.name: index for index, dimension in enumerate(space.dimensions)}
    known = [unit for unit in units if any(name in places for name in unit.dimensions)]
    found: dict[str, Placement] = {}
    for step in range(count if known else 0):
        choices = [0] * len(space)
        for unit in known[: math.ceil(len(known) * (step + 1) / count)]:
            for index in (places[name] for name in unit.dimensions if name in places):
                offered = space.dimensions[index].choices
                if not choices[index] and unit.precision in offered:
                    choices[index] = offered.index(unit.precision)
        placement = Placement(tuple(choices))
        found.setdefault(space.digest(placement), placement)
    return list(found.values())
