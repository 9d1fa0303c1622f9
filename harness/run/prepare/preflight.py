"""Preflight validation of an experiment: models, data sets, plug-ins and parameters.

A run takes hours, so all tasks are checked before the first one starts. Models with data or shapes are loaded, a
calibration batch is preprocessed, and evaluators score the float model on a few samples. No backend builds or measures.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

from harness import zoo
from harness.accuracy.calibration.range_estimators import create_estimator
from harness.accuracy.data.arrays import HALF_NAMES
from harness.accuracy.data.datasets import DatasetCache, ImageDataset
from harness.accuracy.data.preprocess import open_preprocess, parse_plugin_spec
from harness.accuracy.metrics.base import evaluator_params
from harness.accuracy.metrics.intervals import few_images_note
from harness.base.errors import (
    MAX_COUNT,
    CandidateError,
    ErrorCollector,
    EvaluationFailed,
    UserError,
    prefix_key,
    suggest_names,
)
from harness.base.files import read_json
from harness.base.paths import resolve_path
from harness.config.experiment import PTQ_TOOLS, Experiment, plan_tasks, quantized_precisions, with_base_dir
from harness.config.sections import Calibration, Limits, ModelSpec, Objective, PluginSpec, SearcherSpec, check_objective
from harness.graph.model import Model
from harness.graph.rules.dialects import dialect_name_for, load_dialect
from harness.plugins import registry
from harness.plugins.api import ExternalSearchTask, capabilities_of, require_timing
from harness.results.journal import require_same_fingerprint
from harness.results.scores import UNIT_INTERVAL_METRICS, metric_name
from harness.run.prepare.accuracy import has_float_score, make_scoring
from harness.run.prepare.bounds import bound_resolution_note, check_bound, loose_bound_note
from harness.run.prepare.external_tools import tool_remarks
from harness.run.prepare.initial_design import check_files
from harness.run.prepare.methods import is_external_searcher
from harness.run.prepare.model_checks import offered_precisions, try_float_model
from harness.run.prepare.model_loader import calibration_batches, evaluator_spec, input_types, open_model
from harness.workers.ray import require_trusted_address
from search.api import CONTRACT
from search.synthetic_problem import synthetic_space

CODE_KEYS: Mapping[str, str] = {
    "searchers.*.use": "searcher",
    "backends.*.use": "benchmarker",
    "initial.*.use": "fixed placement",
    "models.*.preprocess.use": "preprocessing",
    "models.*.evaluator.use": "evaluator",
    "models.*.calibration.method": "range estimator",
    "models.*.calibration.weights": "weight estimator",
}
"""Kind of plug-in of each key that accepts `module:Class`; "*" is an index. Plug-ins check their own parameters."""
SUPPLIED_PARAMS = ("input_name", "input_shape", "inputs", "reference", "base", "random_outputs", "axes")
"""Parameters that the harness supplies to evaluators; see `harness.accuracy.metrics.base.evaluator_params`."""


def check_experiment(experiment: Experiment, results: Path | None = None) -> tuple[str, ...]:
    """Run all fast checks of every task, and return remarks; see `check_and_time`."""
    return check_and_time(experiment, results)[0]


def check_and_time(experiment: Experiment, results: Path | None = None) -> tuple[tuple[str, ...], Mapping[str, float]]:
    """Run all fast checks of every task.

    Args:
        results: Results folder of a run that continues, which has the scores of float models; they are not scored here.

    Returns:
        Remarks on settings that are allowed but may be unintended, one line each. Seconds of a score of the float model
        on all samples by the name of the model, if they are known.

    Raises:
        UserError: A setting cannot be used; the message has a line for each such setting with the allowed values.
    """
    _require_trust(experiment)
    tasks = plan_tasks(experiment)
    scored = {task.model.name for task in tasks if results is not None and has_float_score(results / task.name)}
    precisions, errors, runs_models = offered_precisions(experiment), ErrorCollector(), False
    for i, method in enumerate(experiment.searchers):
        with errors.collect(), prefix_key(f"searchers.{i}"):
            if is_external_searcher(method):
                _check_external_searcher(method, experiment)
            else:
                supplied = {"space": synthetic_space(6, groups=2, precisions=precisions[:1]), "seed": 0}
                made = registry.create_plugin("searcher", method.use, method.params, supplied)
                registry.require_methods(f"searcher {method.use!r}", made, CONTRACT)
    for i, backend in enumerate(experiment.backends):
        with errors.collect(), prefix_key(f"backends.{i}"):
            _check_backend(with_base_dir(backend), precisions)
            runs_models |= not capabilities_of(registry.load_plugin("benchmarker", backend.use)).in_process
            if backend.use == "replay" and any(model.shape_set for model in experiment.models):
                raise UserError("backend 'replay': its tables are of one shape, but a model has a shape_set")
    with errors.collect(), prefix_key("initial"):
        check_files(experiment.initial)
    data, remarks, score_s = DatasetCache(), list[str](), dict[str, float]()
    limits = experiment.limits if runs_models else None
    with errors.collect():
        remarks += tool_remarks(experiment)
    for i, model in enumerate(experiment.models):
        with errors.collect():
            with prefix_key(f"models.{i}", f"model {model.name!r}"):
                _check_model(model, data)
            remarks += _check_objective(experiment.objective, model)
            with prefix_key(f"models.{i}", f"model {model.name!r}"):
                trial_limits = None if model.name in scored else limits
                found, seconds = _inspect_model(model, data, experiment.objective, trial_limits)
            remarks += [f"model {model.name!r}: {remark}" for remark in found]
            score_s |= {} if seconds is None else {model.name: seconds}
    errors.raise_all()
    return tuple(remarks), score_s


def check_recorded_inputs(experiment: Experiment, results: Path) -> None:
    """Raise `FingerprintMismatch` if a model or the data of its evaluator differ from those of existing results."""
    for spec in plan_tasks(experiment):
        path = results / spec.name / "task.json"
        if not path.exists():
            continue
        with tempfile.TemporaryDirectory(prefix="qdq-check-") as scratch:
            model = open_model(spec.model, Path(scratch))
            scoring = make_scoring(experiment.objective, spec.model, model, Path(scratch))
        recorded, now = read_json(path), {"model_sha256": model.sha256, **scoring.facts, "data": dict(scoring.data)}
        require_same_fingerprint(path, {key: recorded.get(key) for key in now}, now)


def _require_trust(experiment: Experiment) -> None:
    """Raise `UserError` for all keys that load code or connect to another machine, unless plug-ins are trusted."""
    errors = ErrorCollector()
    for key, kind in CODE_KEYS.items():
        for path, use in _values_at(experiment, key.split(".")):
            with errors.collect(), prefix_key(path):
                registry.check_trust(kind, use)
    with errors.collect():
        require_trusted_address(experiment.executor)
    errors.raise_all()


def _values_at(value: Any, key: Sequence[str], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each entry at a key of `CODE_KEYS`, without absent ones."""
    if not key or value is None:
        yield from () if value is None else [(path, value)]
        return
    inner = enumerate(value) if key[0] == "*" else [(key[0], getattr(value, key[0]))]
    for name, each in inner:
        yield from _values_at(each, key[1:], f"{path}.{name}".lstrip("."))


def _check_objective(objective: Objective, model: ModelSpec) -> list[str]:
    """Check the objective and the expected score by the metric of a model's evaluator, and return remarks."""
    evaluator: Any = None if model.evaluator is None else registry.load_plugin("evaluator", model.evaluator.use)
    metric = getattr(evaluator, "metric", None)
    check_objective(objective, metric, model.name)
    check_bound(objective, metric, model.name)
    if metric in UNIT_INTERVAL_METRICS and not 0 <= (model.expect or 0.0) <= 1:
        raise UserError(
            f"expect: {metric_name(metric)} of model {model.name!r} is between 0 and 1, but got "
            f"{model.expect:g}; 78 points are 0.78"
        )
    return [f"model {model.name!r}: {note}" for note in (loose_bound_note(objective, metric),) if note]


def _check_external_searcher(method: SearcherSpec, experiment: Experiment) -> None:
    what = f"external searcher {method.use!r}"
    for part in {"initial", "sharing"}.intersection(method.without):
        raise UserError(f"{what}: 'without: [{part}]' has no effect on it, because it has points of its own; remove it")
    made = {*experiment.baselines, *(start.name for start in experiment.initial)}

    def find(name: str) -> Path:
        if name in PTQ_TOOLS and name not in made:
            raise UserError(f"{what}: {name!r} is made only if initial or baselines contains it; add it there")
        return Path(name) if name in made else resolve_path(name, method.base_dir)

    precision = quantized_precisions(experiment.precision[0])[0]
    task = ExternalSearchTask(model=Path("model.onnx"), workdir=Path("work"), precision=precision, seed=0, find=find)
    registry.create_plugin("external searcher", method.use, method.params, {"task": task})


def _check_backend(backend: PluginSpec, precisions: tuple[str, ...]) -> None:
    what = f"backend {backend.use!r}"
    try:
        made = registry.create_plugin("benchmarker", backend.use, backend.params)
    except CandidateError as error:
        raise UserError(f"{what}: {error}") from error
    require_timing(backend.use, made)
    dialect = load_dialect(dialect_name_for(made, backend.use, {}))
    for precision in precisions:
        if precision not in dialect.precisions:
            raise UserError(f"precision {precision!r}: {what} runs {', '.join(sorted(dialect.precisions))}")


def _check_model(model: ModelSpec, data: DatasetCache) -> None:
    if model.use.startswith("zoo:"):
        name = model.use.removeprefix("zoo:")
        if name not in zoo.model_names():
            raise UserError(f"{model.use}: no such model; {suggest_names(name, zoo.model_names())}")
    else:
        resolve_path(model.use, model.base_dir)
    if model.preprocess is not None:
        used = model.preprocess
        with prefix_key("preprocess"):
            registry.create_plugin("preprocessing", used.use, used.params)
    with prefix_key("calibration"):
        create_estimator(model.calibration.method, model.calibration.percentile)
        registry.load_plugin("weight estimator", model.calibration.weights)
        if model.calibration.data is not None:
            data.open(model.calibration.data, model.base_dir)
    if model.evaluator is not None:
        with prefix_key("evaluator"):
            _check_evaluator(model.evaluator, model.preprocess, data)


def _check_evaluator(evaluator: PluginSpec, preprocess: PluginSpec | None, data: DatasetCache) -> None:
    use, params = evaluator.use, dict(evaluator.params)
    parameters = registry.plugin_signature("evaluator", use).parameters
    if preprocess is not None and "preprocess" in parameters:
        params.setdefault("preprocess", preprocess.mapping)
    evaluator_params(use, params, dict.fromkeys(SUPPLIED_PARAMS))
    # Parameters with these names are of these kinds in the built-in evaluators, but may differ in others.
    if isinstance(params.get("data"), Mapping):
        data.open(params["data"], evaluator.base_dir)
    if isinstance(params.get("preprocess"), str | Mapping):
        open_preprocess(params["preprocess"])
    if isinstance(params.get("decode"), str | Mapping):
        name, settings = parse_plugin_spec(params["decode"])
        registry.check_params("decoder", name, settings, supplied=("outputs", "prepared", "size"))


def _inspect_model(
    model: ModelSpec, data: DatasetCache, objective: Objective, limits: Limits | None
) -> tuple[list[str], float | None]:
    """Load a model with its shapes and data, and return remarks, and the seconds of a score if they are known.

    Args:
        objective: Objective, with the bound and the use of halves of the evaluator's data.
        limits: Limits of the worker that scores the float model; None: it is not scored, as it has a score, or as no
            backend runs models.

    Raises:
        UserError: Shapes or data do not fit the model, or the float model cannot be scored or scores 0.
    """
    remarks, seconds = list[str](), None
    _check_shape_set(model)
    if not (model.shapes or model.dims) and model.evaluator is None and model.calibration.data is None:
        return remarks, seconds
    halves = HALF_NAMES if objective.halves else (None,)
    with tempfile.TemporaryDirectory(prefix="qdq-check-") as scratch:
        loaded = open_model(model, Path(scratch))
        if model.shapes or model.dims:
            _check_channels(loaded)
        if model.calibration.data is not None:
            batches = calibration_batches(model, loaded, data)
            with prefix_key("calibration"):
                next(iter(batches))
        remarks += _sample_remarks(model, data, objective)
        with prefix_key("evaluator"):
            uses = [evaluator_spec(model, loaded, Path(scratch), half) for half in halves]
            made = [registry.create_plugin("evaluator", use.use, use.params) for use in uses if use is not None]
            for evaluator in made:
                _check_outputs(evaluator, loaded)
            if made and limits is not None:
                remark, seconds = try_float_model(model, loaded, data, Path(scratch), limits)
                remarks += [remark] if remark else []
    if made and model.calibration.data is None:
        remarks.append("no calibration data given, random data is used: do not trust any accuracy")
    for half, evaluator in zip(halves, made, strict=False):
        if isinstance(evaluator, Sized):
            where, count = f"evaluator{'' if half is None else f', {half} half'}", len(evaluator)
            metric = getattr(evaluator, "metric", None)
            notes = (few_images_note(count), bound_resolution_note(objective, metric, count))
            remarks += [f"{where}: {note}" for note in notes if note]
    return remarks, seconds


def _check_shape_set(model: ModelSpec) -> None:
    """Load the model at each shape of its set."""
    for number, entry in enumerate(() if model.shape_set is None else model.shape_set.shapes):
        with prefix_key(f"shape_set.shapes.{number}"), tempfile.TemporaryDirectory(prefix="qdq-check-") as scratch:
            _check_channels(open_model(model.at(entry), Path(scratch)))


def _sample_remarks(model: ModelSpec, data: DatasetCache, objective: Objective) -> Iterator[str]:
    """Yield remarks if more samples are requested than exist, if a default leaves some out, or if images are shared."""
    calibration = model.calibration
    if calibration.data is not None:
        requested, available = calibration.samples, len(data.open(calibration.data, model.base_dir))
        if "samples" in calibration.model_fields_set and available < requested < MAX_COUNT:
            yield f"calibration.samples: {requested} are requested, but the data have {available}"
        elif "samples" not in calibration.model_fields_set and requested < available:
            yield f"calibration.samples: not given, so the first {requested} of {available} samples are used"
        if objective.proxy > available:
            yield f"objective.proxy: {objective.proxy} samples are requested, but the calibration data have {available}"
    params: Mapping[str, Any] = {} if model.evaluator is None else model.evaluator.params
    limit, scored = params.get("samples"), params.get("data")
    if not isinstance(scored, Mapping):
        return
    available = len(data.open(scored, model.base_dir))
    if isinstance(limit, int) and limit > available:
        yield f"evaluator.params.samples: {limit} are requested, but the data have {available}"
    if calibration.data is not None and (shared := _count_shared_images(calibration, scored, model.base_dir, data)):
        yield f"{shared} of the calibration images are also scored, so the accuracy on new images may be lower"


def _count_shared_images(
    calibration: Calibration, scored: Mapping[str, Any], base_dir: Path, data: DatasetCache
) -> int:
    """Return the number of images that are used both for calibration and by the evaluator."""
    used = calibration.data or {}
    if any(used.get(key) != scored.get(key) for key in ("use", "images", "split")):
        return 0
    first, second = (data.open(each, base_dir) for each in (used, scored))
    if not (isinstance(first, ImageDataset) and isinstance(second, ImageDataset)):
        return 0
    return len(set(first.names[: calibration.samples]) & set(second.names))


def _check_channels(model: Model) -> None:
    """Raise an error for input shapes whose channels do not fit a convolution, which shape inference accepts."""
    for node in model.nodes:
        weight = model.constants.get(node.inputs[1]) if node.op == "Conv" and not node.opaque else None
        if weight is None or node.inputs[0] not in model.types:
            continue
        expected, shape = weight.dims[1] * int(node.attributes.get("group", 1)), model.types[node.inputs[0]].shape
        if len(shape) > 1 and shape[1] != expected:
            got = "x".join(map(str, shape))
            raise UserError(
                f"{model.source}: shapes: Conv {node.name!r} takes {expected} channels, but would get {got}"
            )


def _check_outputs(evaluator: Any, model: Model) -> None:
    """Compare the output shapes of a model for one sample with the labels and the decoder of an evaluator.

    Raises:
        UserError: The shapes do not fit the labels or the decoder.
    """
    check = getattr(evaluator, "check_outputs", None)
    types = [model.types.get(name) for name in model.outputs]
    if check is None or any(kind is None or not kind.shape for kind in types):
        return
    batch = next((shape[0] for _, shape in input_types(model).values() if shape), 1)
    shapes = {
        name: (1, *kind.shape[1:]) if kind.shape[0] == batch else kind.shape
        for name, kind in zip(model.outputs, types, strict=True)
        if kind is not None
    }
    try:
        check(shapes)
    except EvaluationFailed as error:
        raise UserError(str(error)) from error
