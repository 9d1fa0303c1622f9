"""Checks of an experiment's model files before a run: load, cast and run them, or compile them without a GPU."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from harness.accuracy.calibration.ranges import explain_unrunnable
from harness.accuracy.data.datasets import DatasetCache
from harness.base.errors import CandidateError, ErrorCollector, UserError, prefix_key
from harness.config.experiment import Experiment, TaskSpec, plan_tasks, quantized_precisions, with_base_dir
from harness.config.sections import ModelSpec
from harness.graph.equivalence.compare import iter_random_inputs
from harness.graph.load import load, read_signature, save_to_folder
from harness.graph.model import Model
from harness.graph.passes.dimension_sizes import InputSizes, iter_sizes, resolve_shapes
from harness.graph.qdq.import_placement import require_float_model
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import load_dialect
from harness.graph.segmented_run import open_reference_session
from harness.plugins.api import Array, capabilities_of
from harness.plugins.registry import create_plugin
from harness.run.prepare.external_tools import PTQ_FUNCTIONS
from harness.run.prepare.float_baseline import cast_problems, runtime_input_file
from harness.run.prepare.model_loader import calibration_batches, input_types, open_model, require_own_sizes
from harness.runtimes.host_clock import one_line_error
from harness.runtimes.rtx_compile import compile_file, import_compiler
from harness.workers.helper_process import RUNTIME_FACTOR, HelperCallFailed, call_in_helper_process

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
