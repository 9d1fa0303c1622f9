"""Preflight validation of an experiment: models, data sets, plug-ins and parameters.

A run takes hours, so all tasks are checked before the first one starts. Models with data or shapes are loaded, a
calibration batch is preprocessed, and evaluators score the float model on a few samples. No backend builds or measures.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from harness import zoo
from harness.accuracy.calibration.range_estimators import create_estimator
from harness.accuracy.calibration.ranges import explain_unrunnable
from harness.accuracy.data.arrays import HALF_NAMES
from harness.accuracy.data.datasets import ALLOWED_DATA_KEYS, DatasetCache, ImageDataset
from harness.accuracy.data.preprocess import open_preprocess, parse_plugin_spec
from harness.accuracy.metrics.base import evaluator_params, likely_causes, low_reference_warning
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
from harness.config.experiment import PTQ_TOOLS, Experiment, TaskSpec, plan_tasks, quantized_precisions, with_base_dir
from harness.config.sections import Limits, ModelSpec, Objective, PluginSpec, SearcherSpec, check_objective
from harness.graph.equivalence.compare import iter_random_inputs
from harness.graph.load import load, read_signature, save_to_folder
from harness.graph.model import Model
from harness.graph.passes.dimension_sizes import InputSizes, iter_sizes, resolve_shapes
from harness.graph.qdq.import_placement import require_float_model
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import dialect_name_for, load_dialect
from harness.graph.segmented_run import open_reference_session
from harness.measure.records import MAIN_BENCHMARKER, Failed
from harness.plugins import registry
from harness.plugins.api import Accuracy, Array, Candidate, ExternalSearchTask, capabilities_of, require_timing
from harness.plugins.registry import create_plugin
from harness.results.journal import require_same_fingerprint
from harness.results.scores import UNIT_INTERVAL_METRICS, metric_name
from harness.run.prepare.accuracy import bound_resolution_note, check_bound, loose_bound_note, make_scoring
from harness.run.prepare.accuracy_store import has_float_score
from harness.run.prepare.float_baseline import cast_problems, runtime_input_file
from harness.run.prepare.initial_design import PTQ_FUNCTIONS, check_files, tool_remarks
from harness.run.prepare.methods import is_external_searcher
from harness.run.prepare.model_loader import (
    calibration_batches,
    evaluator_spec,
    input_types,
    need_own_sizes,
    open_model,
    require_own_sizes,
)
from harness.runtimes.host_clock import one_line_error
from harness.runtimes.onnxruntime import unfused_execution
from harness.runtimes.rtx_compile import compile_file, import_compiler
from harness.runtimes.shape_set import make_sample_sizes
from harness.workers.engines import Engines, WorkerSpec
from harness.workers.helper_process import RUNTIME_FACTOR, HelperCallFailed, call_in_helper_process
from harness.workers.ray import require_trusted_address
from harness.workers.sandbox import open_engines
from search.api import CONTRACT
from search.space import edges_digest
from search.synthetic_problem import synthetic_space

MAX_REASON_CHARS = 200
COMPILED_DIALECTS = ("tensorrt", "tensorrt_rtx")
ANY_RANGE = (-1.0, 1.0)
"""Range of each tensor; the verdicts of the compiler do not depend on the values of scales."""


def check_models(experiment: Experiment) -> tuple[str, ...]:
    """Load every model file, so that invalid files are reported before a run.

    If a backend reads models at FP16 or BF16, each model is cast, and its insertion points are determined.

    Returns:
        Remarks, one line each: casts that fail, and limits of calibration and the PTQ tools with a model.

    Raises:
        UserError: A model cannot be used; the message has a line for each such model with the reason.
    """
    errors, remarks = ErrorCollector(), list[str]()
    precisions = offered_precisions(experiment)
    for i, model in enumerate(experiment.models):
        if model.use.startswith("zoo:"):  # code makes it, so it is valid
            continue
        with errors.collect(), prefix_key(f"models.{i}", f"model {model.name!r}"):
            loaded = open_model(model, Path())
            require_float_model(loaded)
            found = []
            for backend in experiment.backends:
                input_types(loaded, backend.use)
                require_own_sizes(model, loaded, backend, experiment.executor.use)
            for backend in experiment.backends:
                for precision, problem in cast_problems(with_base_dir(backend), loaded, precisions).items():
                    message = f"backend {backend.use!r}: {problem}"
                    if not precision:  # the experiment sets it
                        raise UserError(message)
                    found.append(f"no {precision} where the precision is open: {message}")
            if not (remark := _size_remark(model, loaded)):
                with tempfile.TemporaryDirectory(prefix="qdq-check-") as scratch:
                    reason, tools = explain_unrunnable(save_to_folder(loaded, Path(scratch))), ", ".join(PTQ_FUNCTIONS)
                unfit = f"ONNX Runtime cannot run it as it is: calibration and {tools} leave parts float, or fail"
                remark = f"{unfit}: {reason}" if reason else ""
            remarks += [f"model {model.name!r}: {each}" for each in (*found, remark) if each]
    errors.raise_all()
    return tuple(remarks)


def offered_precisions(experiment: Experiment) -> tuple[str, ...]:
    """Return the quantized precisions that some task of an experiment uses."""
    return tuple(dict.fromkeys(each for setting in experiment.precision for each in quantized_precisions(setting)))


def _size_remark(model: ModelSpec, loaded: Model) -> str:
    """Return a remark on a model whose run at its input sizes crashes ONNX Runtime, else "".

    Models with static inputs, or widened to several samples, are not checked, nor those that ONNX Runtime does not
    load.

    Raises:
        UserError: The model runs neither on the calibration data nor on any kind of random inputs; the message names
            its sizes, and the keys that give them.
    """
    if loaded.origin is None or not isinstance(path := loaded.origin.model, Path):
        return ""
    axes, types = read_signature(path, loaded.source).axes, input_types(loaded)
    shapes = {name: shape for name, (_, shape) in types.items()}
    if any(
        isinstance(axis, int) and axis != size
        for name, shape in shapes.items()
        for axis, size in zip(axes.get(name) or (), shape, strict=False)
    ):
        return ""  # the file takes one sample
    data = model.calibration.data
    feeds = iter_random_inputs(types) if data is None else calibration_batches(model, loaded, DatasetCache())
    sizes = dict.fromkeys(f"{name} {size}" for name, size in iter_sizes({**dict.fromkeys(shapes), **axes}, shapes))
    at = f"with {', '.join(sizes)} on {'random inputs' if data is None else 'calibration data'}"
    what, tried = f"{loaded.source}: the run at its input sizes", list(islice(feeds, None if data is None else 1))
    try:
        reason = call_in_helper_process(what, _explain_failure, path, tried, factor=RUNTIME_FACTOR)
    except HelperCallFailed as error:
        return f"not run {at}: ONNX Runtime {error.how}"
    if not reason:
        return ""
    keys = [key for key in ("shapes", "dims") if getattr(model, key)]
    resolved = resolve_shapes(axes, InputSizes(shapes=model.shapes, dims=model.dims), loaded.source)
    if resolved.missing_symbols or resolved.missing_inputs:
        keys.append("calibration.data")
    raise UserError(f"{' or '.join(keys)}: {loaded.source} does not run {at} ({reason}); give other sizes or data")


def _explain_failure(path: Path, feeds: Sequence[Mapping[str, Array]]) -> str:
    """Return why a model runs on none of the inputs; "" if it runs on one, or cannot be loaded (see `check_models`)."""
    try:
        session = open_reference_session(str(path))
    except Exception:  # ONNX Runtime's exceptions have no common base
        return ""
    reasons = []
    for each in feeds:
        try:
            session.run(None, dict(each))
        except Exception as error:  # ONNX Runtime's exceptions have no common base
            reasons.append(one_line_error(error))
        else:
            return ""
    return (reasons[0].partition("while running ")[2] or reasons[0])[:MAX_REASON_CHARS]


def compile_tasks(experiment: Experiment, target: str) -> Iterator[str]:
    """Compile each model of an experiment, and yield a line with the compiler's verdict for each file.

    Args:
        experiment: Experiment, whose tasks of other dialects than TensorRT's are left out.
        target: Key of `harness.runtimes.rtx_compile.TARGETS`.

    Raises:
        UserError: The compiler is not installed, no task is on TensorRT, or the compiler refuses a file; the latter is
            raised after all lines.
    """
    import_compiler()
    tasks = [task for task in plan_tasks(experiment) if _dialect_name(task) in COMPILED_DIALECTS]
    if not tasks:
        raise UserError(f"--compile: no backend has dialect {' or '.join(COMPILED_DIALECTS)}")
    refused = []
    for task in tasks:
        with tempfile.TemporaryDirectory(prefix="qdq-compile-") as work:
            dialect = load_dialect(_dialect_name(task))
            opset = dialect.opset(task.precisions)
            model = open_model(task.model, Path(work), opset)
            file = runtime_input_file(task.backend, save_to_folder(model, Path(work)), Path(work))
            model = load(file, source=task.model.use, min_opset=opset)
            space = build_space(model, dialect, precisions=task.precisions)
            ranges = {edge.tensor: ANY_RANGE for dimension in space.dimensions for edge in dimension.edges}
            placement, quantized = space.resolve(space.quantize_all()), Path(work) / "all.onnx"
            Inserter(model, dialect, ranges).export(placement, quantized)
            for label, path in (("float", file), (f"all {task.precision}", quantized)):
                try:
                    made = compile_file(path, target)
                    verdict = f"{len(made.kernels)} kernels" if made.refusal is None else str(made.refusal)
                    failed = made.refusal is not None
                except CandidateError as error:
                    verdict, failed = str(error), True
                refused += [task.name] if failed else []
                yield f"{task.name}: {label}: compiled for {target}: {verdict}"
    if refused:
        raise UserError(f"--compile: refused: {', '.join(dict.fromkeys(refused))}")


def _dialect_name(task: TaskSpec) -> str:
    made = create_plugin("benchmarker", task.backend.use, task.backend.params)
    return capabilities_of(made).dialect or task.backend.use


SAMPLE_COUNT = 16
"""Number of samples that are scored first."""
UNLABELLED_SAMPLE_FACTOR = 8
"""Factor by which the samples grow if none of them has a label; after that all samples are used."""
ASSUMED_SCORE = 0.3
"""Score of a float model for which none is expected; a model with it scores 0 on nine samples once in 25 times."""
MIN_PLAUSIBILITY = 0.05
"""Probability of a score of 0 below which the trial fails."""
LONG_TRIAL_S = 2.0
"""A shorter trial is repeated to time it, because the first one includes imports."""


def try_float_model(
    spec: ModelSpec, model: Model, data: DatasetCache, work: Path, limits: Limits
) -> tuple[str, float | None]:
    """Score a float model on a few samples with ONNX Runtime in a worker, if it has an evaluator.

    The trial is skipped for an evaluator with data of an unknown kind (the later score of the float model covers it),
    and for a model that ONNX Runtime does not run (the calibration reports it).

    Returns a remark on a score close to 0, else "", and the seconds that the score of all samples would take, or None.

    Raises:
        UserError: The float model cannot be scored, or its score is 0 and `expect` does not make that plausible.
    """
    evaluator = evaluator_spec(spec, model, work)
    source = None if evaluator is None else evaluator.params.get("data")
    if evaluator is None or not isinstance(source, Mapping) or source.get("use") not in ALLOWED_DATA_KEYS:
        return "", None
    total = min(len(data.open(source, spec.base_dir)), evaluator.params.get("samples") or MAX_COUNT)
    if "samples" in evaluator.params:
        evaluator = evaluator.model_copy(update={"params": {**evaluator.params, "samples": SAMPLE_COUNT}})
    use, every = evaluator, 1
    for count in (SAMPLE_COUNT, SAMPLE_COUNT * UNLABELLED_SAMPLE_FACTOR):
        step = -(-total // count)
        few = {**source, "every": step * source.get("every", 1)}  # evenly spread
        short = evaluator.model_copy(update={"params": {**evaluator.params, "data": few}})
        with suppress(UserError):  # raised if none of the samples has a label
            registry.create_plugin("evaluator", short.use, short.params)
            use, every = short, step
            break
    samples = -(-total // every)
    counted = f"{samples} of {total} samples"
    file = save_to_folder(model, work)
    worker = WorkerSpec(
        benchmarkers={MAIN_BENCHMARKER: unfused_execution("basic")},
        workdir=work / "tryout",
        evaluators={MAIN_BENCHMARKER: use},
        sizes=make_sample_sizes(model, file) if need_own_sizes(spec, model) else None,
    )
    with open_engines(worker, limits) as engines:
        found, seconds = _score(engines, file, compares="reference" in use.params)
    if isinstance(found, Failed):
        raise UserError(f"{use.use!r}: the float model cannot be scored; {found.stage}: {found.reason}")
    factory: Any = registry.load_plugin("evaluator", use.use)
    metric, higher = getattr(factory, "metric", ""), getattr(factory, "higher_is_better", True)
    remark = ""
    if found is not None:
        if metric in UNIT_INTERVAL_METRICS and found.metrics.get(metric) == 0:
            expected = ASSUMED_SCORE if spec.expect is None else spec.expect
            if (1 - expected) ** samples <= MIN_PLAUSIBILITY:
                known = "" if spec.expect is None else f", but expect is {spec.expect:g}"
                raise UserError(
                    f"the float model has {metric_name(metric)} 0 on {counted}{known}. "
                    f"{likely_causes(use.params, found.note)}. If the model is known to score that low, give its score "
                    "by the key 'expect' of the model; 'expect: 0' accepts every score"
                )
        remark = low_reference_warning(found, metric, higher, use.params)
    return remark and f"on {counted} {remark}", None if seconds is None else seconds / samples * total


def _score(engines: Engines, file: Path, *, compares: bool) -> tuple[Accuracy | Failed | None, float | None]:
    """Return accuracy and seconds of a trial; the accuracy is None if the evaluator compares with the float model.

    Both are None if the model does not run.
    """
    found: Accuracy | Failed | None = None
    seconds = 0.0
    for _ in range(2):
        built = engines.build(Candidate(digest=edges_digest(()), edges=(), source=lambda: file))
        if isinstance(built, Failed):
            return None, None
        started_s = time.monotonic()
        found = engines.prepare(built.handle)
        if found is None and not compares:
            found = engines.evaluate(built.handle)
        seconds = time.monotonic() - started_s
        engines.release(built.handle)
        if isinstance(found, Failed) or seconds > LONG_TRIAL_S:
            break
    return found, seconds


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
    errors = ErrorCollector()
    for key, kind in CODE_KEYS.items():
        for path, use in _values_at(experiment, key.split(".")):
            with errors.collect(), prefix_key(path):
                registry.check_trust(kind, use)
    with errors.collect():
        require_trusted_address(experiment.executor)
    errors.raise_all()  # before any code of a plug-in runs
    tasks = plan_tasks(experiment)
    scored = {task.model.name for task in tasks if results is not None and has_float_score(results / task.name)}
    precisions, runs_models = offered_precisions(experiment), False
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
        evaluator, params = model.evaluator, dict(model.evaluator.params)
        with prefix_key("evaluator"):
            parameters = registry.plugin_signature("evaluator", evaluator.use).parameters
            if model.preprocess is not None and "preprocess" in parameters:
                params.setdefault("preprocess", model.preprocess.mapping)
            evaluator_params(evaluator.use, params, dict.fromkeys(SUPPLIED_PARAMS))
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
    for number, entry in enumerate(() if model.shape_set is None else model.shape_set.shapes):
        with prefix_key(f"shape_set.shapes.{number}"), tempfile.TemporaryDirectory(prefix="qdq-check-") as scratch:
            _check_channels(open_model(model.at(entry), Path(scratch)))
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
    used = calibration.data or {}
    if calibration.data is None or any(used.get(key) != scored.get(key) for key in ("use", "images", "split")):
        return
    first, second = (data.open(each, model.base_dir) for each in (used, scored))
    if isinstance(first, ImageDataset) and isinstance(second, ImageDataset):
        shared = len(set(first.names[: calibration.samples]) & set(second.names))
        if shared:
            yield f"{shared} of the calibration images are also scored, so the accuracy on new images may be lower"


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
