"""Shapes of a task whose model has a `shape_set`: files of the float model, and its latencies for the worst ratio."""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from harness.base.errors import UserError
from harness.base.progress import Observer
from harness.config.sections import Sampling
from harness.graph.io.digests import digest_file
from harness.graph.load import save_to_folder
from harness.measure.records import Failed
from harness.plugins.api import Candidate
from harness.results.journal import read_matching_record
from harness.results.manifest import write_record
from harness.run.prepare.model_loader import MIN_OPSET, open_model
from harness.run.prepare.task import Task
from harness.runtimes.shape_set import ShapeSet, TimedShape
from harness.workers.engines import Engines, WorkerSpec
from harness.workers.trial_pool import SpecEngineFactory
from search.space import edges_digest

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
            record = {**basis, "float_ms": _time_float(shapes, task, engines, observer)}
            write_record(path, record)
    return [replace(shape, float_ms=float(record["float_ms"][shape.label])) for shape in shapes]


def _time_float(shapes: list[TimedShape], task: Task, engines: Engines, observer: Observer) -> dict[str, float]:
    """Return the median latency in ms of the float model at each shape, timed in turns."""
    handles: dict[str, int] = {}
    readings: dict[str, list[float]] = {shape.label: [] for shape in shapes}
    with observer.work(f"float at {len(shapes)} shapes", FLOAT_ROUNDS * len(shapes)) as step:
        for shape in shapes:
            source = partial(Path, shape.file or task.float_file)
            candidate = Candidate(digest=edges_digest(()), edges=(), source=source, shape=shape.label)
            handles[shape.label] = _require(engines.build(candidate), shape.label).handle
        for _ in range(FLOAT_ROUNDS):
            for label, handle in handles.items():
                readings[label] += _require(engines.sample(handle, Sampling(max_ms=100.0)), label).latency_ms
                step.advance()
        for handle in handles.values():
            engines.release(handle)
    latencies_ms = {label: statistics.median(known) for label, known in readings.items()}
    observer.say("float model: " + ", ".join(f"{label} {value:.3f} ms" for label, value in latencies_ms.items()))
    return latencies_ms


def _require(outcome: T | Failed, label: str) -> T:
    if isinstance(outcome, Failed):
        raise UserError(f"shape_set: {label}: the float model fails; {outcome.stage}: {outcome.reason}")
    return outcome
