"""Compilation of an experiment's TensorRT models without a GPU: in float, and with every point quantized."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from harness.api import capabilities_of
from harness.config.experiment import Experiment
from harness.config.plan import TaskSpec, plan_tasks
from harness.errors import CandidateError, UserError
from harness.graph.load import load, save_to_folder
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import load_dialect
from harness.registry import create_plugin
from harness.runtimes.rtx_compile.compiler import compile_file, import_compiler
from harness.task_setup.float_baseline import runtime_input_file
from harness.task_setup.model_loader import open_model

COMPILED_DIALECTS = ("tensorrt", "tensorrt_rtx")
ANY_RANGE = (-1.0, 1.0)
"""Range of each tensor; the verdicts of the compiler do not depend on the values of scales."""


def compile_tasks(experiment: Experiment, target: str) -> Iterator[str]:
    """Compile each model of an experiment, and yield a line with the compiler's verdict for each file.

    Args:
        experiment: Experiment, whose tasks of other dialects than TensorRT's are left out.
        target: Key of `harness.runtimes.rtx_compile.compiler.TARGETS`.

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
