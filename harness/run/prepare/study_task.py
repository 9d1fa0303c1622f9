"""Task of a study of one model, made from the model's name or from an experiment file."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from harness.accuracy.data.decode import suggest_decoder
from harness.base.errors import UserError
from harness.base.progress import Observer
from harness.config.experiment import Experiment, TaskSpec, load_experiment, parse_experiment, plan_tasks
from harness.config.yaml_loader import dump_yaml
from harness.graph.load import ModelSignature, read_signature
from harness.graph.passes.dimension_sizes import format_shape
from harness.measure.records import MAIN_BENCHMARKER
from harness.plugins.registry import load_plugin
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


class StudyTask(NamedTuple):
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


DEFAULT_SEQUENCE_LENGTH = 128
DEFAULT_IMAGE_SIZE = 224
CHANNELS = 3


def first_experiment(model: Path, output: Path, images: Path | None, labels: Path | None, backend: str) -> str:
    """Return the text of an experiment that `qdq run --check` accepts.

    Preprocessing, layout and decoder are found by the shapes of inputs and outputs. Lines to fill in are comments, and
    without images the calibration is on random inputs.

    Args:
        model: ONNX file.
        output: File that the text will be written to, from whose folder its paths start.
        images: Folder of images.
        labels: Labels of these images.
        backend: Name of the benchmarker.

    Raises:
        UserError: The model cannot be read or is already quantized, or there is no such backend.
    """
    signature = read_signature(model)
    if signature.precisions:
        raise UserError(f"{model}: is already quantized; start from the float model")

    def quote(path: Path | None, missing: str = "") -> str:
        return json.dumps(missing if path is None else os.path.relpath(path, output.parent), ensure_ascii=False)

    preprocess, evaluator, decode = _find_task(signature) or ("NAME", "NAME", "")
    data = f"use: images, images: {quote(images, 'FOLDER')}"
    scored = f"{{data: {{{data}, labels: {quote(labels, 'FILE')}}}{decode}}}"
    unknown = "# " if images is None or preprocess == "NAME" else ""
    threads = "threads: 2" if "threads" in inspect.signature(load_plugin("benchmarker", backend)).parameters else ""
    unlabelled = unknown or ("# " if labels is None else "")
    random = "    calibration: {samples: 48}  # on random inputs: give data, whose ranges decide the scales"
    lines = [
        f"# First experiment for {model.name}; docs/reference/experiment.md has all keys.",
        f"experiment: {quote(None, output.stem)}",
        "models:",
        f"  - use: {quote(model)}",
        *_size_lines(signature),
        *([random] if unknown else []),
        f"    {unknown}preprocess: {preprocess}  # found by shapes; others: qdq list preprocessings",
        f"    {unknown}calibration: {{data: {{{data}}}, samples: 300}}",
        f"    {unlabelled}evaluator: {{use: {evaluator}, params: {scored}}}  # others: qdq list evaluators",
        f"backends: [{{use: {backend}, params: {{{threads}}}}}]  # the runtime and threads that you deploy with",
        f"{unlabelled}objective: {{minimize: latency, max_drop: 0.01, halves: true}}  # 0.01: a point of the metric",
        "searchers: [auto]",
        "budget: {evaluations: [25, 50]}",
    ]
    return "\n".join([*lines, ""])


def _find_task(signature: ModelSignature) -> tuple[str, str, str] | None:
    """Return preprocessing, evaluator and the evaluator's decoder as text, or None for a model without images."""
    shapes = [dims for _, dims in signature.inputs.values()]
    if len(shapes) != 1 or len(shapes[0]) != 4 or CHANNELS not in (shapes[0][1], shapes[0][3]):
        return None
    first = 2 if shapes[0][1] == CHANNELS else 1
    height, width = (size or DEFAULT_IMAGE_SIZE for size in shapes[0][first : first + 2])
    if decoder := suggest_decoder(signature.outputs, (height, width)):
        return decoder, "coco_map", f", decode: {decoder}"
    outputs = list(signature.outputs.values())
    return ("torch_imagenet", "top1", "") if len(outputs) == 1 and len(outputs[0]) == 2 else None


def _size_lines(signature: ModelSignature) -> Iterator[str]:
    """Yield the sizes of dynamic axes: by symbol, or the whole shape of an input with an axis that has no symbol."""
    sizes: dict[str, int] = {}
    shapes: dict[str, str] = {}
    for name, axes in signature.axes.items():
        rank = len(axes or ())
        usual = [1, *[DEFAULT_IMAGE_SIZE if rank == 4 else DEFAULT_SEQUENCE_LENGTH] * rank]
        known = [axis if isinstance(axis, int) else size for axis, size in zip(axes or (), usual, strict=False)]
        sizes |= {axis: size for axis, size in zip(axes or (), known, strict=True) if isinstance(axis, str)}
        if None in (axes or ()):
            shapes[name] = format_shape(tuple(known))
    if sizes:
        yield f"    dims: {json.dumps(sizes, ensure_ascii=False)}  # of dynamic axes: those that you deploy with"
    if shapes:
        yield f"    shapes: {json.dumps(shapes, ensure_ascii=False)}  # of dynamic inputs: those that you deploy with"
