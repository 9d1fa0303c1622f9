"""Checks of models before a run: load, cast and run the files, or compile them; score a few samples."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from harness.accuracy.calibration.ranges import explain_unrunnable
from harness.accuracy.data.datasets import ALLOWED_DATA_KEYS, DatasetCache
from harness.accuracy.metrics.base import likely_causes, low_reference_warning
from harness.base.errors import MAX_COUNT, CandidateError, ErrorCollector, UserError, prefix_key
from harness.config.experiment import Experiment, TaskSpec, plan_tasks, quantized_precisions, with_base_dir
from harness.config.sections import Limits, ModelSpec, PluginSpec
from harness.graph.equivalence.compare import iter_random_inputs
from harness.graph.load import load, read_signature, save_to_folder
from harness.graph.model import Model
from harness.graph.passes.dimension_sizes import InputSizes, iter_sizes, resolve_shapes
from harness.graph.qdq.import_placement import require_float_model
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import load_dialect
from harness.graph.segmented_run import open_reference_session
from harness.measure.records import MAIN_BENCHMARKER, Failed
from harness.plugins import registry
from harness.plugins.api import Accuracy, Array, Candidate, capabilities_of
from harness.plugins.registry import create_plugin
from harness.results.scores import UNIT_INTERVAL_METRICS, metric_name
from harness.run.prepare.external_tools import PTQ_FUNCTIONS
from harness.run.prepare.float_baseline import cast_problems, runtime_input_file
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
from harness.workers.sandbox import open_engines
from search.space import edges_digest

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
            for backend in experiment.backends:
                input_types(loaded, backend.use)
                require_own_sizes(model, loaded, backend, experiment.executor.use)
            found = [*_cast_remarks(experiment, loaded, precisions), _size_remark(model, loaded) or _ort_remark(loaded)]
            remarks += [f"model {model.name!r}: {remark}" for remark in filter(None, found)]
    errors.raise_all()
    return tuple(remarks)


def offered_precisions(experiment: Experiment) -> tuple[str, ...]:
    """Return the quantized precisions that some task of an experiment uses."""
    return tuple(dict.fromkeys(each for setting in experiment.precision for each in quantized_precisions(setting)))


def _cast_remarks(experiment: Experiment, model: Model, precisions: Sequence[str]) -> Iterator[str]:
    """Yield a remark for each float precision that a model cannot be cast to.

    Raises:
        UserError: The experiment sets a backend to such a precision.
    """
    for backend in experiment.backends:
        for precision, problem in cast_problems(with_base_dir(backend), model, precisions).items():
            message = f"backend {backend.use!r}: {problem}"
            if not precision:
                raise UserError(message)
            yield f"no {precision} where the precision is open: {message}"


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
    """Return why a model runs on none of the inputs; "" if it runs on one, or cannot be loaded (see `_ort_remark`)."""
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


def _ort_remark(model: Model) -> str:
    with tempfile.TemporaryDirectory(prefix="qdq-check-") as scratch:
        reason, tools = explain_unrunnable(save_to_folder(model, Path(scratch))), ", ".join(PTQ_FUNCTIONS)
    wrong = f"ONNX Runtime cannot run it as it is: calibration and {tools} leave parts float, or fail: {reason}"
    return wrong if reason else ""


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
            for label, path in _write_files(task, Path(work)):
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


def _write_files(task: TaskSpec, work: Path) -> Iterator[tuple[str, Path]]:
    """Write the models of a task in float and with all points quantized, and yield a label and the path of each."""
    dialect = load_dialect(_dialect_name(task))
    model = open_model(task.model, work, dialect.opset(task.precisions))
    file = runtime_input_file(task.backend, save_to_folder(model, work), work)
    yield "float", file
    model = load(file, source=task.model.use, min_opset=dialect.opset(task.precisions))
    space = build_space(model, dialect, precisions=task.precisions)
    ranges = {edge.tensor: ANY_RANGE for dimension in space.dimensions for edge in dimension.edges}
    placement = space.resolve(space.quantize_all())
    yield f"all {task.precision}", Inserter(model, dialect, ranges).export(placement, work / "all.onnx")


SAMPLE_COUNT = 16
"""Largest number of scored samples."""
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

    Args:
        spec: Entry of the model in the experiment.
        model: The float model.
        data: Cache of the experiment's data.
        work: Scratch folder.
        limits: Limits of the worker.

    Returns:
        A remark on a score close to 0, else ""; and the seconds that the score of all samples would take, or None.

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
    use, every = _with_few_samples(evaluator, source, total)
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
            _require_plausible_zero(spec, samples, f"{metric_name(metric)} 0 on {counted}", use.params, found.note)
        remark = low_reference_warning(found, metric, higher, use.params)
    return remark and f"on {counted} {remark}", None if seconds is None else seconds / samples * total


def _with_few_samples(use: PluginSpec, data: Mapping[str, Any], total: int) -> tuple[PluginSpec, int]:
    """Return (evaluator on every n-th sample, n), so that there are a few samples with labels, evenly spread."""
    for count in (SAMPLE_COUNT, SAMPLE_COUNT * UNLABELLED_SAMPLE_FACTOR):
        every = -(-total // count)
        few = {**data, "every": every * data.get("every", 1)}
        short = use.model_copy(update={"params": {**use.params, "data": few}})
        with suppress(UserError):  # raised if none of the samples has a label
            registry.create_plugin("evaluator", use.use, short.params)
            return short, every
    return use, 1


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


def _require_plausible_zero(spec: ModelSpec, samples: int, score: str, params: Mapping[str, Any], note: str) -> None:
    """Raise an error for a score of 0 on some samples unless it is plausible for the score that is expected on all."""
    expected = ASSUMED_SCORE if spec.expect is None else spec.expect
    if (1 - expected) ** samples > MIN_PLAUSIBILITY:
        return
    known = "" if spec.expect is None else f", but expect is {spec.expect:g}"
    raise UserError(
        f"the float model has {score}{known}. {likely_causes(params, note)}. If the model is known to score that low, "
        "give its score by the key 'expect' of the model; 'expect: 0' accepts every score"
    )
