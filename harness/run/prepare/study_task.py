"""Task of a study of one model, made from the model's name or from an experiment file."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from harness.base.errors import UserError
from harness.base.progress import Observer
from harness.config.experiment import Experiment, TaskSpec, load_experiment, parse_experiment, plan_tasks
from harness.config.yaml_loader import dump_yaml
from harness.measure.records import MAIN_BENCHMARKER
from harness.run.prepare.float_baseline import select_float_baseline
from harness.run.prepare.model_loader import evaluator_spec
from harness.run.prepare.preflight import check_experiment
from harness.run.prepare.task import Task, compose_task
from harness.workers.engines import WorkerSpec
from harness.workers.sandbox import open_engines

ANCHOR_PLACEMENTS = ("float", "all", "linear")  # without PTQ tools, which take minutes

# Sampling for thousands of engines: few samples of each, in turns with the float model, because the speed of a machine
# changes in the quarter of an hour that a table takes.
STUDY_LIMITS: Mapping[str, Any] = {
    "warmup_ms": 30.0, "min_samples": 7, "max_samples": 21, "max_ms": 300.0, "interleave": "always",
}  # fmt: skip
SAFE_FOLDER_NAME = re.compile(r"[A-Za-z0-9._=-]{0,60}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyTask:
    """Task of a study and its experiment, with remarks on settings that may be unintended."""

    experiment: Experiment
    spec: TaskSpec
    remarks: tuple[str, ...]


def make_study(
    text: str,
    *,
    backend: str | None = None,
    params: Mapping[str, Any] | None = None,
    shapes: Mapping[str, str] | None = None,
    dims: Mapping[str, int] | None = None,
    precision: str | None = None,
    fidelity: bool = False,
    timed: bool = True,
) -> StudyTask:
    """Return the study of a model, or of the only task of an experiment file.

    Args:
        text: ONNX file, `zoo:NAME` or `assets:PATH`; or an experiment file (.yaml), which may have calibration data, an
            evaluator and settings of the sampling.
        backend: Benchmarker; by default that of the experiment file, or OpenVINO.
        params: Parameters of the benchmarker.
        shapes: Static shapes of dynamic inputs by name, such as {"images": "1x3x224x224"}; only for a model.
        dims: Sizes of dynamic dimensions by symbol; only for a model.
        precision: Quantized precision; by default that of the experiment file, or INT8.
        fidelity: Whether outputs are compared with those of the float model if there is no evaluator.
        timed: Whether the study measures latencies, so that a model with a `shape_set` is refused.

    Raises:
        UserError: An argument cannot be used, or the experiment has more than one task.
    """
    changes: dict[str, Any] = {"initial": list(ANCHOR_PLACEMENTS), "baselines": ["all", "linear"]}
    if backend is not None or params:
        changes["backends"] = [{"use": backend or "openvino", "params": dict(params or {})}]
    if precision is not None:
        changes["precision"] = [precision]
    if Path(text).suffix in (".yaml", ".yml"):
        experiment = load_experiment(Path(text))
    else:
        model = {"use": text, "label": model_label(text), "shapes": dict(shapes or {}), "dims": dict(dims or {})}
        experiment = _parse_experiment({"experiment": "study", "models": [model], "sampling": dict(STUDY_LIMITS)})
    described = {**experiment.model_dump(mode="json"), **changes}
    if max(experiment.budget.evaluations) <= len(ANCHOR_PLACEMENTS):  # no search spends it
        described["budget"] = {"evaluations": [len(ANCHOR_PLACEMENTS) + 1]}
    if fidelity:
        described["models"] = [
            {**model, "evaluator": model["evaluator"] or "fidelity"} for model in described["models"]
        ]
    experiment = _parse_experiment(described, experiment.base_dir)
    remarks = check_experiment(experiment)
    tasks = plan_tasks(experiment)
    if len(tasks) > 1:
        names = ", ".join(task.name for task in tasks)
        raise UserError(f"{text}: a study has one task, but this experiment has {len(tasks)}: {names}; keep one")
    if timed and tasks[0].model.shape_set is not None:
        raise UserError(
            f"{text}: shape_set: a study times one shape; remove the key, and name the shape by `dims` or `shapes` of "
            "the model"
        )
    return StudyTask(experiment=experiment, spec=tasks[0], remarks=remarks)


def study_name(study: StudyTask, placement: str) -> str:
    """Return the name of a placement's folder, such as "resnet18-openvino-precision=f32-threads=1-linear-int8".

    It has the model, the backend with its parameters, shapes, the placement and its precision, which the float model
    lacks. A digest replaces parameters and shapes that are not valid in a file name, such as a path.
    """
    spec = study.spec
    given = {**spec.backend.params, **spec.model.shapes, **spec.model.dims}
    options = "-".join(f"{name}={value}" for name, value in sorted(given.items()) if name != "base")
    what = placement if placement == "float" else f"{placement}-{spec.precision}"
    plain = (
        each if SAFE_FOLDER_NAME.fullmatch(each) else hashlib.sha256(each.encode()).hexdigest()[:12]
        for each in (options, what)
    )
    return "-".join(filter(None, (spec.model.name, spec.backend.name, *plain)))


def prepare_study(study: StudyTask, folder: Path, observer: Observer) -> tuple[Task, WorkerSpec]:
    """Set up the task of a study with the backend at its fastest float precision; return it and its worker.

    Args:
        folder: Folder for scratch files, and for the choice of the float precision.

    Raises:
        UserError: A setting of the study cannot be used.
    """
    task = compose_task(study.experiment, study.spec, folder / "work", observer)
    open_worker = partial(open_engines, limits=study.experiment.limits)
    found = select_float_baseline(study.spec.backend, task.float_file, folder, open_worker, observer)
    task = task.with_benchmarkers(found)
    evaluator = evaluator_spec(study.spec.model, task.model, task.work)
    evaluators = {} if evaluator is None else {MAIN_BENCHMARKER: evaluator}
    return task, WorkerSpec(
        benchmarkers={MAIN_BENCHMARKER: found[MAIN_BENCHMARKER]},
        workdir=task.work,
        evaluators=evaluators,
        reference=task.model_file,
        sizes=task.sizes,
    )


def _parse_experiment(described: Mapping[str, Any], base_dir: Path | None = None) -> Experiment:
    return parse_experiment(dump_yaml(dict(described)), "study", base_dir)


def model_label(text: str) -> str:
    """Return the name of a model in folders and tables, such as "resnet18" for "zoo:resnet18"."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(text.rpartition(":")[2]).stem).strip("-._") or "model"
