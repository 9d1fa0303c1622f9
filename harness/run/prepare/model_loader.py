"""Loading of an experiment's models, completion of their evaluators, and estimate of a run's duration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import zoo
from harness.accuracy.data.arrays import UNNAMED_ARRAY, is_array_data, read_sample_shapes
from harness.accuracy.data.batching import InputBatches, make_batches
from harness.accuracy.data.datasets import DatasetCache
from harness.accuracy.metrics.base import evaluator_params, image_input_params
from harness.base.errors import UserError, prefix_key
from harness.base.paths import resolve_path
from harness.base.random_inputs import InputTypes, check_types
from harness.base.text import safe_file_name
from harness.config.experiment import Experiment, TaskSpec, plan_tasks
from harness.config.sections import ModelSpec, PluginSpec
from harness.graph.equivalence.compare import READABLE_TYPES
from harness.graph.load import load
from harness.graph.model import Model
from harness.graph.passes.dimension_sizes import Axes
from harness.graph.protos import dtype_name, element_type, find_random_outputs
from harness.plugins import registry
from harness.plugins.api import Capabilities, capabilities_of

MIN_OPSET = 17
"""Smallest opset of a loaded model: per-channel Q/DQ needs 13, runtimes support 17 best; a dialect may need more."""


def open_model(spec: ModelSpec, work: Path, min_opset: int = MIN_OPSET) -> Model:
    """Load the model of an experiment's entry (`zoo:NAME`, `assets:PATH` or a path).

    Dynamic dimensions without a size get the sizes of the calibration arrays.

    Args:
        spec: Entry of the model in the experiment.
        work: Scratch folder for models of the zoo.
        min_opset: Opset that an older model is upgraded to.

    Raises:
        UserError: The name is not in the zoo, the file does not exist, or it is not a supported model.
    """
    if spec.use.startswith("zoo:"):
        name = spec.use.removeprefix("zoo:")
        path = zoo.write_model(name, work / f"{safe_file_name(name)}.onnx")
    else:
        path = resolve_path(spec.use, spec.base_dir)
    data = spec.calibration.data
    samples = read_sample_shapes(data, spec.base_dir) if isinstance(data, Mapping) and is_array_data(data) else {}
    return load(path, source=spec.use, shapes=spec.shapes, dims=spec.dims, samples=samples, min_opset=min_opset)


def evaluator_spec(spec: ModelSpec, model: Model, work: Path, half: str | None = None) -> PluginSpec | None:
    """Return the evaluator of a model with the parameters that the harness supplies, or None without an evaluator.

    Args:
        spec: Entry of the model in the experiment.
        model: The loaded model.
        work: Scratch folder for outputs of the float model.
        half: "search" or "report" for one half of the evaluator's data; None: all data.

    Raises:
        UserError: A parameter is unknown or missing, or the data cannot be halved.
    """
    if spec.evaluator is None:
        return None
    params = dict(spec.evaluator.params)
    if half is not None:
        if not isinstance(params.get("data"), Mapping):
            raise UserError(f"evaluator {spec.evaluator.use!r} has no 'data' of which one half could be set aside")
        params["data"] = {**params["data"], "half": half}
    reference = work / f"reference{'' if half is None else f'-{half}'}.npz"
    evaluator = spec.evaluator.model_copy(update={"params": params})
    random = find_random_outputs(model.proto)
    axes = None if model.origin is None else model.origin.axes
    return complete_evaluator(evaluator, input_types(model), spec.base_dir, spec.preprocess, reference, random, axes)


def complete_evaluator(
    evaluator: PluginSpec,
    inputs: InputTypes,
    base: Path | None,
    preprocess: PluginSpec | None,
    reference: Path | None = None,
    random_outputs: Sequence[str] = (),
    axes: Mapping[str, Axes | None] | None = None,
) -> PluginSpec:
    """Return an evaluator with the parameters that the harness supplies, such as the inputs of the model.

    Args:
        evaluator: Entry of the evaluator in the experiment.
        inputs: Element type and shape of each input of the model.
        base: Folder from which relative paths start.
        preprocess: Preprocessing of the model, used if the evaluator has none.
        reference: File for outputs of the float model.
        random_outputs: Outputs that change from run to run.
        axes: Declared dimensions of each input of a model with dynamic axes.

    Raises:
        UserError: A parameter is unknown or missing, or the data do not fit the inputs.
    """
    use, params = evaluator.use, dict(evaluator.params)
    supplied: dict[str, Any] = {"inputs": inputs, "reference": reference, "base": base}
    if axes:
        supplied["axes"] = dict(axes)
    if random_outputs:
        supplied["random_outputs"] = list(random_outputs)
    parameters = registry.plugin_signature("evaluator", use).parameters
    if parameters.keys() & {"input_name", "input_shape"}:
        supplied |= image_input_params(params.get("data"), inputs)
    if preprocess is not None and "preprocess" in parameters:
        params.setdefault("preprocess", preprocess.mapping)
    return PluginSpec(use=use, params=evaluator_params(use, params, supplied), label=evaluator.label)


def input_types(model: Model, backend: str = "") -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return element type and shape of each input of a model, by name.

    Raises:
        UserError: An input is no tensor of numbers, or an output is of a type that NumPy or the runtime lacks.
    """
    for value in model.proto.graph.input:
        if value.name in model.inputs and value.name not in model.types:
            kind = str(value.type.WhichOneof("value")).removesuffix("_type")
            raise UserError(
                f"{model.source}: input {value.name!r} is of type {kind!r}: engines are timed on arrays of fixed "
                "shape, so this model cannot be timed; export it again with tensors as inputs"
            )
    for value in model.proto.graph.output:
        kind = dtype_name(element_type(value.type).tensor_type.elem_type)
        container = (value.type.WhichOneof("value") or "tensor_type").removesuffix("_type")
        where = f"{model.source}: output {value.name!r} is of type"
        if kind not in READABLE_TYPES:
            raise UserError(
                f"{where} {kind!r}, which NumPy lacks, so results cannot be compared; end the model with a Cast to "
                "float, or export it without this output"
            )
        if container != "tensor" and backend and _capabilities(backend).tensors_only:
            raise UserError(
                f"{where} {container!r}, and backend {backend!r} returns only tensors; use backend 'onnxruntime', or "
                "export the model without this output"
            )
    types = {name: (model.types[name].dtype, model.types[name].shape) for name in model.inputs}
    try:
        check_types(types)
    except UserError as error:
        raise UserError(f"{model.source}: {error}") from error
    return types


def _capabilities(use: str) -> Capabilities:
    return capabilities_of(registry.load_plugin("benchmarker", use))


_SIMULATED_BACKENDS = ("simulated", "replay")
_BUILD_RANGE_S, _SLOW_BUILD_RANGE_S = (0.1, 2.0), (5.0, 60.0)
"""Smallest and largest seconds of a build, for models of some ten milliseconds; the second if builds time kernels."""
_PREPARE_RANGE_S = (1.0, 60.0)
"""Smallest and largest seconds for loading, calibration and the models of the PTQ tools of one task."""
_TURN_RANGE_S = (0.03, 0.3)
"""Smallest and largest seconds of one turn of a row in a comparison; a turn takes 60 ms or three inferences."""
_SCORE_FACTORS = (0.5, 2.0)
"""Smallest and largest ratio of the time of a score in a run to that of the float model on ONNX Runtime."""
_UNTIMED_SCORE_RANGE_S = (0.5, 60.0)
"""Smallest and largest seconds of a score whose time is not known."""
_SCORED_SHARES = (0.2, 1.0)
"""Smallest and largest share of the candidates of a search that are scored; slower and worse ones are not."""
_RECOVERED_RANGE_S = (0.0, 60.0)
"""Smallest and largest seconds to recover one placement, without scores."""
_RECOVERED = (0, 4)
"""Smallest and largest number of recovered placements of a task."""
_RECOVERY_LIMIT_S = 120.0
"""Seconds after which no further recovery starts, if the searches took less."""
_RECOVERED_SCORES = 8
"""Typical number of scored files of a recovered placement."""
TimeRange = tuple[float, float]


def describe_workload(experiment: Experiment, score_s: Mapping[str, float]) -> str:
    """Return a line with the numbers of tasks, searches and evaluations, and a rough estimate of the time.

    Args:
        score_s: Seconds of a score on all samples by the name of the model, see `estimate_time_s`.
    """
    tasks = plan_tasks(experiment)
    searches = sum(len(task.runs) for task in tasks)
    evaluations = searches * max(experiment.budget.evaluations)
    low_s, high_s = estimate_time_s(experiment, score_s)
    unit_s, unit = (3600.0, "hours") if high_s > 3 * 3600 else (60.0, "minutes")
    low, high = (
        f"{value:.1f}" if value < 10 and unit == "hours" else f"{value:.0f}"
        for value in (low_s / unit_s, high_s / unit_s)
    )
    if high_s < 90:
        duration = "roughly a minute"
    elif low == high:
        duration = f"roughly {high} {unit}"
    else:
        duration = f"roughly {low} to {high} {unit}" if float(low) else f"up to {high} {unit}"
    budget = experiment.budget
    counts = f"{_format_count(len(tasks), 'task')}, {_format_count(searches, 'search', 'searches')}"
    limits = [f"{budget.minutes:g} minutes a search at most"] if budget.minutes else []
    if budget.task_minutes is not None:
        limits.append(f"limit of a task: {budget.task_minutes:g} minutes, which a step that has begun may exceed")
    limit = f" ({'; '.join(limits)})" if limits else ""
    counts += f", {_format_count(evaluations, 'evaluation')} at most"
    return f"ok: {counts}; {duration}{limit}"


def estimate_time_s(experiment: Experiment, score_s: Mapping[str, float]) -> TimeRange:
    """Return the smallest and the largest typical time of an experiment in seconds, from set-up to confirmation.

    Args:
        score_s: Seconds of a score of the float model on all samples by the name of the model; a model without has an
            evaluator of unknown time.
    """
    ranges = [_task_range_s(task, experiment, score_s) for task in plan_tasks(experiment)]
    return sum(low for low, _ in ranges), sum(high for _, high in ranges)


def _task_range_s(task: TaskSpec, experiment: Experiment, score_s: Mapping[str, float]) -> TimeRange:
    """Return the smallest and the largest typical time of a task, in seconds, at most its limit."""
    name = task.backend.use.rpartition(":")[2]
    if name in _SIMULATED_BACKENDS:
        return _PREPARE_RANGE_S[0], _PREPARE_RANGE_S[1]
    builds = _SLOW_BUILD_RANGE_S if _capabilities(task.backend.use).tunes_builds else _BUILD_RANGE_S
    sampling, confirmation, objective = experiment.sampling, experiment.confirmation, experiment.objective
    longest_s = (sampling.warmup_ms + sampling.max_ms) / 1000 * (1 if sampling.interleave == "never" else 2)
    samples = (longest_s / 4, longest_s)
    rows = 2 + len(experiment.baselines) + len(task.runs) * confirmation.top_k  # the float model and its twin
    limit_s = 60 * (experiment.budget.minutes or float("inf"))
    known_s = score_s.get(task.model.name)
    scores = _UNTIMED_SCORE_RANGE_S if known_s is None else tuple(known_s * factor for factor in _SCORE_FACTORS)
    if task.model.evaluator is None:
        scores = (0.0, 0.0)
    half = 0.5 if objective.halves else 1.0

    def compared_s(end: int, engines: int, rounds: int) -> float:
        return engines * (builds[end] + rounds * _TURN_RANGE_S[end])

    def end_s(end: int) -> float:
        scored_s = half * scores[end] * (_SCORED_SHARES[end] if objective.uses_accuracy else 0)
        search_s = min(limit_s, max(experiment.budget.evaluations) * (builds[end] + samples[end] + scored_s))
        recovered_s = 0.0
        if objective.max_drop is not None and objective.recover:
            one_s = _RECOVERED_RANGE_S[end] + _RECOVERED_SCORES * half * scores[end]
            recovered_s = min(_RECOVERED[end] * one_s, max(_RECOVERY_LIMIT_S, len(task.runs) * search_s) + one_s)
        whole_s = (
            _PREPARE_RANGE_S[end]
            + compared_s(end, 2 * 3, 8)  # the noise floor
            + len(task.runs) * (search_s + compared_s(end, confirmation.candidates, 8))
            + recovered_s
            + (rows + 2) * scores[end]
            + confirmation.builds * compared_s(end, rows, confirmation.rounds)
        )
        return min(whole_s, 60 * (experiment.budget.task_minutes or float("inf")))

    return end_s(0), end_s(1)


def _format_count(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def need_own_sizes(spec: ModelSpec, model: Model) -> bool:
    """Return whether array data of a model with dynamic axes have samples of other sizes than its inputs."""
    given = None if spec.evaluator is None else spec.evaluator.params.get("data")
    arrays = [data for data in (spec.calibration.data, given) if isinstance(data, Mapping) and is_array_data(data)]
    inputs = {name: model.types[name].shape for name in model.inputs}
    return model.origin is not None and any(
        own not in (shape, shape[1:])
        for data in arrays
        for pick in (min, max)
        for name, own in read_sample_shapes(data, spec.base_dir, pick).items()
        for shape in (inputs.values() if name == UNNAMED_ARRAY else [inputs.get(name, own)])
    )


def require_own_sizes(spec: ModelSpec, model: Model, backend: PluginSpec, executor: str = "local") -> None:
    """Raise `UserError` if samples have other sizes than the inputs, and backend or executor run no other sizes."""
    capabilities = capabilities_of(registry.load_plugin("benchmarker", backend.use))
    able = capabilities.dynamic or capabilities.in_process
    if (able and executor == "local") or not need_own_sizes(spec, model):
        return
    shapes = ", ".join(f"{name} {'x'.join(map(str, model.types[name].shape))}" for name in model.inputs)
    where, other = (f"executor {executor!r}", "executor local") if able else (
        f"backend {backend.use!r}",
        "backend onnxruntime or openvino",
    )  # fmt: skip
    raise UserError(
        f"{model.source}: samples have other sizes than the inputs ({shapes}), and {where} runs no other sizes than "
        f"these; pad or cut the samples to these sizes, or use {other}"
    )


def calibration_batches(model: ModelSpec, loaded: Model, data: DatasetCache) -> InputBatches:
    """Return the batches of a model's calibration data, which must be given.

    Raises:
        UserError: The data or the preprocessing are invalid, or do not fit the inputs.
    """
    with prefix_key("calibration"):
        preprocess = None if model.preprocess is None else model.preprocess.mapping
        opened = data.open(model.calibration.data or {}, model.base_dir)
        axes = None if loaded.origin is None else loaded.origin.axes
        return make_batches(opened, preprocess, input_types(loaded), model.calibration.samples, axes)
