"""Construction of a task: model, space, scales, initial placements and baselines."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from harness.accuracy.calibration.range_estimators import (
    EMPTY_RANGE,
    Ranges,
    finite_ranges,
    range_warnings,
    require_quantizable,
    restrict_space,
)
from harness.accuracy.calibration.ranges import CalibrationBatches, cached_ranges
from harness.accuracy.tools.ptq import MetricRequest, ptq_options
from harness.base.errors import UserError
from harness.base.files import explain_write_errors
from harness.base.progress import Observer
from harness.config.experiment import FULLY_QUANTIZED, Experiment, TaskSpec
from harness.config.sections import ModelSpec, PluginSpec, Sampling
from harness.graph.io.digests import digest_file
from harness.graph.load import load, save_to_folder
from harness.graph.model import Model
from harness.graph.qdq.import_placement import ImportedPlacement, read_placement
from harness.graph.qdq.insert import CastInserter, Inserter, require_all_nodes
from harness.graph.qdq.space import build_space
from harness.graph.quantize.numeric_choices import DEFAULT_CHOICES, NumericChoices, channel_tensor, depthwise_inputs
from harness.graph.rules.dialects import Dialect
from harness.graph.rules.points import explain_no_points
from harness.measure.records import MAIN_BENCHMARKER, Failed
from harness.plugins import registry
from harness.plugins.api import Array, Candidate
from harness.results.journal import read_matching_record
from harness.results.manifest import write_record
from harness.run.prepare.float_baseline import (
    CAST_FOLDER_NAME,
    BackendProperties,
    read_runtime,
    runtime_input_file,
)
from harness.run.prepare.initial_design import (
    PTQ_FUNCTIONS,
    ExternalModel,
    InitialDesign,
    QuantizationRequest,
    fix_imported_inputs,
    fully_quantized_symmetric,
    load_imported_models,
    load_imported_ranges,
    run_external_tool,
)
from harness.run.prepare.model_loader import (
    MIN_OPSET,
    evaluator_spec,
    input_types,
    need_own_sizes,
    open_model,
    require_own_sizes,
)
from harness.run.search.loop import InitialPlacement
from harness.runtimes.shape_set import SampleSizes, ShapeSet, TimedShape, make_sample_sizes
from harness.workers.engines import WorkerSpec
from harness.workers.trial_pool import SpecEngineFactory
from search.space import Placement, Resolved, Space, edges_digest

Facts = Mapping[str, Any]
UNCALIBRATED_ABS_MAX = 12.7
"""Limit of every range if plug-in operators prevent a calibration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Inputs that all searches of one task share.

    Attributes:
        spec: Model, backend and precision as the experiment names them.
        model: The prepared float model, whose insertion points form the space.
        float_file: File of `model`, which is calibrated and which other tools quantize.
        model_file: File of the baseline: `float_file`, or its cast copy, see `with_benchmarkers`.
        space: All points that have a range; searches use `searched_space`.
        dialect: Dialect of the runtime.
        inserter: Writer of files with a placement's Q/DQ pairs.
        initial_design: Placements that every search evaluates first.
        ranges: Smallest and largest value of each activation, from the calibration.
        choices: Choices of range estimators and scales.
        placements: Placements of the initial design and the baselines, by name.
        calibrated_on: Description of the calibration data, for the tables.
        remarks: Remarks on the ranges, for the tables.
        cache_remarks: Remarks on initial placements, for the tables: schemes of pattern caches that were measured on
            another machine, and files of other tools that are expressed in another form.
        external_models: Models of the PTQ tools and imported models, by name.
        work: Scratch folder for candidates.
        accuracy_only: Precisions that the device only emulates.
        benchmarkers: Backend at each float precision, with that of the baseline as `MAIN_BENCHMARKER`; empty before
            `with_benchmarkers`.
        cast: Model of `model_file` if it differs from `model`, or None.
        facts: Versions, device and options of the backend: the result of the benchmarker's `describe`.
        feeds: Calibration batches.
        sizes: Form of the float model with dynamic axes, on which samples of other sizes run; None: all have those of
            the inputs.
    """

    spec: TaskSpec
    model: Model
    float_file: Path
    model_file: Path
    space: Space
    dialect: Dialect
    ranges: Mapping[str, tuple[float, float]]
    inserter: Inserter
    calibrated_on: str
    remarks: tuple[str, ...]
    work: Path
    initial_design: tuple[InitialPlacement, ...] = ()
    placements: Mapping[str, Placement] = field(default_factory=dict)
    external_models: Mapping[str, ExternalModel] = field(default_factory=dict)
    accuracy_only: frozenset[str] = frozenset()
    cache_remarks: tuple[str, ...] = ()
    benchmarkers: Mapping[str, PluginSpec] = field(default_factory=dict)
    cast: Model | None = None
    facts: Facts = field(default_factory=dict)
    feeds: Iterable[Mapping[str, Array]] = ()
    choices: NumericChoices = DEFAULT_CHOICES
    sizes: SampleSizes | None = None

    def with_benchmarkers(self, benchmarkers: Mapping[str, PluginSpec]) -> Task:
        """Return the task with the backend at its float precisions, the result of `select_float_baseline`.

        If the backend reads files of another type than float32 (see `harness.plugins.api.SupportsCast`), the float
        model is cast once and Q/DQ pairs are inserted into the cast model, so that the searched, delivered and measured
        file is the same.

        Raises:
            UserError: The cast model lacks a node whose input may be quantized.
        """
        task = replace(self, benchmarkers=benchmarkers)
        file = task.runtime_input_file(self.float_file)
        if file == self.float_file:
            return task
        cast = load(file, source=self.model.source, min_opset=MIN_OPSET)
        require_all_nodes((edge for dimension in self.space.dimensions for edge in dimension.edges), cast)
        inserter = CastInserter(cast, self.dialect, self.ranges, self.model, self.choices)
        return replace(task, model_file=file, cast=cast, inserter=inserter)

    def runtime_input_file(self, path: Path, benchmarker: str = MAIN_BENCHMARKER) -> Path:
        """Return the file that a benchmarker (a key of `benchmarkers`) builds for a model: a cast copy, or `path`."""
        use = self.benchmarkers.get(benchmarker)
        return path if use is None else runtime_input_file(use, path, self.work / CAST_FOLDER_NAME)

    def edges_in_file(self, resolved: Resolved) -> Resolved:
        """Return quantized edges of `space` as edges of `model_file`; they differ only if that is a cast copy.

        Raises:
            UserError: The cast copy lacks a node.
        """
        return self.inserter.map_edges(resolved)

    @property
    def searched_space(self) -> Space:
        """Return the space without precisions that the device emulates; its placements are valid in `space`.

        The space is empty if no other precision is left, because latency is not measured at emulated precisions.
        """
        if not self.accuracy_only:
            return self.space
        kept = [tuple(c for c in d.choices if c not in self.accuracy_only) for d in self.space.dimensions]
        if any(len(choices) < 2 for choices in kept):
            return Space(())
        return self.space.with_dimensions(
            tuple(replace(d, choices=c) for d, c in zip(self.space.dimensions, kept, strict=True))
        )

    def candidate(self, placement: Placement) -> Candidate:
        """Return the candidate of a placement; its file is written when it is built.

        If the disk is full, writing raises UserError, which is not a failure of the candidate.
        """
        resolved, digest = self.space.resolve(placement), self.space.digest(placement)
        if not resolved:
            return Candidate(digest=digest, edges=(), source=lambda: self.model_file)
        folder = self.work / "candidates"

        def source() -> Path:
            with explain_write_errors(folder):
                return self.inserter.write(resolved, folder, name=digest)

        return Candidate(digest=digest, edges=resolved, source=source)


def compose_task(
    experiment: Experiment, spec: TaskSpec, work: Path, observer: Observer, facts: Facts | None = None
) -> Task:
    """Load and calibrate the model of a task; return its space, initial placements and baselines as a `Task`.

    Args:
        experiment: Settings that all tasks share: initial placements, baselines, objective, limits.
        spec: Model, backend and precision of the task.
        work: Scratch folder of the task; created if it is missing.
        observer: Receiver of progress and remarks on the data.
        facts: Description of the benchmarker on the machine that measures; None: read on this machine.

    Raises:
        UserError: The model, its data, a plug-in or a precision cannot be used; the message names it.
    """
    with explain_write_errors(work):
        work.mkdir(parents=True, exist_ok=True)
    runtime = read_runtime(spec.backend, facts)
    dialect, facts = runtime.dialect, runtime.facts
    if not dialect.precisions.issuperset(spec.precisions):
        raise UserError(
            f"precision {spec.precision!r}: backend {spec.backend.use!r} runs {', '.join(sorted(dialect.precisions))}"
        )
    model = open_model(spec.model, work, max(MIN_OPSET, dialect.opset(spec.precisions)))
    if facts.get("model_sha256", model.sha256) != model.sha256:
        raise UserError(
            f"backend {spec.backend.use!r} has recordings of another model than {model.source}: see 'qdq bench record'"
        )
    with explain_write_errors(work):
        model_file = save_to_folder(model, work)
    space = build_space(model, dialect, precisions=spec.precisions, sharing=experiment.sharing)
    if not len(space):
        raise UserError(explain_no_points(model, dialect, spec.precisions[0]))
    feeds = CalibrationBatches(spec.model, model, input_types(model, spec.backend.use))
    require_own_sizes(spec.model, model, spec.backend, experiment.executor.use)
    read_import = cache(partial(read_placement, model=model))
    imported_ranges = load_imported_ranges(experiment.initial, read_import)
    if feeds.is_random:
        others = " for tensors that no imported file has a range of" if imported_ranges else ""
        observer.say(
            f"{model.source}: no calibration data given, random data is used{others}: do not trust any accuracy"
        )
    task = calibrate_task(
        spec, model, model_file, space, runtime=runtime, feeds=feeds, observer=observer, known_ranges=imported_ranges
    )
    return _add_placements(task, experiment, feeds, read_import, observer)


def _add_placements(
    task: Task,
    experiment: Experiment,
    feeds: CalibrationBatches,
    read: Callable[[Path], ImportedPlacement],
    observer: Observer,
) -> Task:
    """Return a calibrated task with its initial placements and baselines, and the models of other tools."""
    spec, model, work, dialect = task.spec, task.model, task.work, task.dialect
    named = {start.name: start for start in experiment.initial}
    entries = [*named.values(), *(PluginSpec(use=name) for name in experiment.baselines if name not in named)]
    objective, metric = experiment.objective, None
    if objective.max_drop is not None:
        half = "search" if objective.halves else None
        if (evaluator := evaluator_spec(spec.model, model, work / "tools", half)) is not None:
            metric = MetricRequest(evaluator=evaluator, max_drop=objective.max_drop)
    request = QuantizationRequest(
        model_file=task.model_file,
        source=model.source,
        data=feeds,
        data_key=repr(feeds.cache_key),
        own_sizes=feeds.own_sizes,
        options={**ptq_options(feeds.settings, dialect, spec.precisions[0]), "limit_s": experiment.limits.evaluate_s},
        metric=metric,
    )
    external = {
        start.name: run_external_tool(start.name, request, observer) for start in entries if start.use in PTQ_FUNCTIONS
    }
    external |= fix_imported_inputs(load_imported_models(entries), model, work / "imported")
    if any(start.use == FULLY_QUANTIZED for start in entries):
        external[FULLY_QUANTIZED] = fully_quantized_symmetric(model, dialect, task.ranges, work, task.space)
    design = InitialDesign(
        spec=spec,
        space=task.space,
        model=model,
        external_models=external,
        read=read,
        observer=observer,
        facts=task.facts,
    )
    placements = design.placements(entries)
    notes = tuple(design.import_notes(entries, placements, task.inserter, dialect))
    for note in notes:
        observer.say(f"{model.source}: {note}")
    return replace(
        task,
        initial_design=tuple(
            InitialPlacement(name=n, placement=p)
            for start in experiment.initial
            for n, p in placements[start.name].items()
        ),
        placements={name: placement for each in placements.values() for name, placement in each.items()},
        external_models=external,
        sizes=task.sizes if experiment.executor.use == "local" else None,
        cache_remarks=(*design.foreign_origin_notes(entries), *notes),
    )


def calibrate_task(
    spec: TaskSpec,
    model: Model,
    model_file: Path,
    space: Space,
    *,
    runtime: BackendProperties,
    feeds: CalibrationBatches,
    observer: Observer,
    uncalibrated_abs_max: float = UNCALIBRATED_ABS_MAX,
    known_ranges: Ranges | None = None,
) -> Task:
    """Calibrate a model and return its task without initial placements and baselines.

    Args:
        spec: Model, backend and precision of the task.
        model_file: File of the model; its folder is the scratch folder of the task.
        space: Space of the model; the space of the task lacks points without a usable range.
        feeds: Calibration samples.
        observer: Receiver of progress and remarks on the data.
        uncalibrated_abs_max: Limit of every range if plug-in operators prevent a calibration on random data.
        known_ranges: Ranges from files, which replace those of the calibration.

    Raises:
        UserError: The calibration fails, or leaves no point of the space.
    """
    choices = feeds.numeric_choices
    choices.adapt_dialect(runtime.dialect)  # raises before minutes of calibration
    sizes = _make_sample_sizes(spec.model, model, model_file, feeds)
    calibrated = _calibrate_ranges(space, model, model_file, feeds, observer, uncalibrated_abs_max, sizes)
    used = {name: pair for name, pair in (known_ranges or {}).items() if name in calibrated}
    known = sum(not channel_tensor(name) for name in used)
    whole = used.keys() - set(map(channel_tensor, used))  # these have one scale in the file
    observed = {name: pair for name, pair in {**calibrated, **used}.items() if channel_tensor(name) not in whole}
    left, ranges = restrict_space(space, observed), finite_ranges(observed)
    if len(space):
        require_quantizable(left, observed, model.source)
    return Task(
        spec=spec,
        model=model,
        float_file=model_file,
        model_file=model_file,
        space=left,
        dialect=runtime.dialect,
        ranges=ranges,
        inserter=Inserter(model, runtime.dialect, ranges, choices),
        calibrated_on=feeds.description + (f", {known} ranges of files" if known else ""),
        remarks=range_warnings(observed),
        work=model_file.parent,
        accuracy_only=runtime.emulated.intersection(spec.precisions),
        facts=runtime.facts,
        feeds=feeds,
        choices=choices,
        sizes=sizes,
    )


def _make_sample_sizes(
    spec: ModelSpec, model: Model, model_file: Path, feeds: CalibrationBatches
) -> SampleSizes | None:
    """Return the model with dynamic axes if samples need it, or may need it because a metric has data of its own.

    Raises:
        UserError: Samples need it, and the model cannot be prepared with dynamic axes.
    """
    needed = feeds.own_sizes or need_own_sizes(spec, model)
    own_data = spec.evaluator is not None and "data" not in registry.plugin_signature(
        "evaluator", spec.evaluator.use
    ).parameters  # fmt: skip
    if model.origin is None or not (needed or own_data):
        return None
    try:
        return make_sample_sizes(model, model_file)
    except UserError as error:
        if not needed:
            return None
        raise UserError(
            f"samples of other sizes need the dynamic axes of the model; pad or cut them: {error}"
        ) from error


def _calibrate_ranges(
    space: Space,
    model: Model,
    model_file: Path,
    feeds: CalibrationBatches,
    observer: Observer,
    uncalibrated_abs_max: float,
    sizes: SampleSizes | None,
) -> Ranges:
    tensors = {e.tensor for d in space.dimensions for e in d.edges if e.tensor not in model.constants}
    absent = tensors - sizes.tensors if sizes is not None and feeds.own_sizes else set()
    tensors -= absent
    if not tensors:
        return dict.fromkeys(absent, EMPTY_RANGE)
    try:
        with observer.work(f"calibrate {model.source}", feeds.count) as step:
            ranges = cached_ranges(
                feeds.cache_key,
                sizes.dynamic if sizes is not None and feeds.own_sizes else model_file,
                sorted(tensors),
                feeds,
                channels=depthwise_inputs(model) if feeds.numeric_choices.depthwise == "channel" else None,
                progress=lambda _: step.advance(),
                source=model.source,
            )
    except UserError as error:
        if not feeds.is_random or not any(node.opaque for node in model.nodes):
            raise
        observer.say(
            f"{model.source}: every scale is {uncalibrated_abs_max / 127:g}, for the calibration cannot run it: {error}"
        )
        return dict.fromkeys(tensors, (-uncalibrated_abs_max, uncalibrated_abs_max))
    ranges = {**ranges, **dict.fromkeys(absent, EMPTY_RANGE)}
    for remark in range_warnings(ranges):
        observer.say(f"{model.source}: {remark}")
    return ranges


SHAPES_FILE_NAME = "shapes.json"
"""Latencies of the float model at each shape, in the folder of a task."""
FLOAT_ROUNDS = 5
T = TypeVar("T")


def make_shape_set(task: Task, folder: Path, open_engines: SpecEngineFactory, observer: Observer) -> ShapeSet | None:
    """Return the shapes at which the placements of a task are timed, or None for the shape of the search.

    The float model at each shape is written to the scratch folder. For the objective "worst" it is timed once at all
    shapes in turns. The medians are stored in `shapes.json`, so that a resumed run has the same scale.

    Raises:
        UserError: The model cannot be loaded at a shape, or fails there, or the latencies are those of another model.
    """
    spec = task.spec.model
    if spec.shape_set is None:
        return None
    entries, searched = spec.shape_set.shapes, {name: task.model.types[name].shape for name in task.model.inputs}
    shapes = []
    for number, entry in enumerate(entries):
        work = task.work / "shapes" / str(number)
        work.mkdir(parents=True, exist_ok=True)
        model = open_model(spec.at(entry), work, max(MIN_OPSET, task.dialect.opset(task.spec.precisions)))
        inputs = {name: model.types[name].shape for name in model.inputs}
        shapes.append(
            TimedShape(
                label=entry.label,
                share=entry.weight / sum(each.weight for each in entries),
                inputs=inputs,
                file=None if inputs == searched else save_to_folder(model, work),
            )
        )
    if spec.shape_set.objective == "worst":
        shapes = _with_float_latencies(shapes, task, folder, open_engines, observer)
    return ShapeSet(objective=spec.shape_set.objective, float_file=task.float_file, shapes=tuple(shapes))


def _with_float_latencies(
    shapes: list[TimedShape], task: Task, folder: Path, open_engines: SpecEngineFactory, observer: Observer
) -> list[TimedShape]:
    worker = WorkerSpec(benchmarkers=task.benchmarkers, workdir=task.work)
    path = folder / SHAPES_FILE_NAME
    with open_engines(worker) as engines:
        basis = {
            "model_sha256": digest_file(task.float_file),
            "backend": dict(engines.describe()),
            "inputs": {shape.label: {name: list(sizes) for name, sizes in shape.inputs.items()} for shape in shapes},
        }
        record = read_matching_record(path, basis)
        if record is None:
            handles: dict[str, int] = {}
            readings: dict[str, list[float]] = {shape.label: [] for shape in shapes}
            with observer.work(f"float at {len(shapes)} shapes", FLOAT_ROUNDS * len(shapes)) as step:
                for shape in shapes:
                    source = partial(Path, shape.file or task.float_file)
                    candidate = Candidate(digest=edges_digest(()), edges=(), source=source, shape=shape.label)
                    handles[shape.label] = _require(engines.build(candidate), shape.label).handle
                for _ in range(FLOAT_ROUNDS):  # in turns
                    for label, handle in handles.items():
                        readings[label] += _require(engines.sample(handle, Sampling(max_ms=100.0)), label).latency_ms
                        step.advance()
                for handle in handles.values():
                    engines.release(handle)
            float_ms = {label: statistics.median(known) for label, known in readings.items()}
            observer.say("float model: " + ", ".join(f"{label} {value:.3f} ms" for label, value in float_ms.items()))
            record = {**basis, "float_ms": float_ms}
            write_record(path, record)
    return [replace(shape, float_ms=float(record["float_ms"][shape.label])) for shape in shapes]


def _require(outcome: T | Failed, label: str) -> T:
    if isinstance(outcome, Failed):
        raise UserError(f"shape_set: {label}: the float model fails; {outcome.stage}: {outcome.reason}")
    return outcome
