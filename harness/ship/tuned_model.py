"""Folder to deploy of one confirmed model: the result of the autotuner, or an early answer of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.accuracy.data.batching import RANDOM_DATA
from harness.base.files import explain_write_errors, facts_digest
from harness.base.progress import Observer
from harness.measure.provenance import describe_environment, format_options
from harness.measure.turn_log import ConfirmationSummary, TurnEvent
from harness.results.artifacts import FLOAT_ROW
from harness.results.deploy_folder import SHIP_FOLDER
from harness.results.output_check import wrong_float_remedies
from harness.run.early_answer import EarlyAnswer
from harness.run.prepare.study_task import model_label
from harness.run.prepare.task import Task
from harness.run.verify.dynamic_delivery import DynamicModel, write_dynamic_model
from harness.ship.bundle import Shipment, remove_bundle, shipment_facts, write_bundle
from harness.ship.deploy_script import find_target
from harness.ship.results_bundle import confirmation_facts


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedModel:
    """Confirmed model of the autotuner or of an early answer.

    Attributes:
        file: Path of the confirmed ONNX file.
        float_file: Path of the float model at the same static shapes.
        pairs: Number of Q/DQ pairs of the confirmed model; 0: it is the float model.
        accuracy: Text about the accuracy of the model.
        proven: Whether the confirmed model is the delivered one and faster than the float model beyond noise.
        dynamic: File with the dynamic axes of the original model, or None without such axes.
        name: Name of the folder; "": MODEL-RUNTIME-PRECISION.
        method: Name of the searcher that chose the placement, or of the fixed placement.
        row: Name of the model in the confirmation.
        baseline: Name of the float model in the confirmation.
        shapes: Shape of each input by the label of the timed shape, if several were timed.
        float_fault: Check of the float model as text if the runtime computes it wrongly, else "".
    """

    file: Path
    float_file: Path
    pairs: int
    accuracy: str
    proven: bool
    dynamic: DynamicModel | None = None
    name: str = ""
    method: str = "autotune"
    row: str = "final"
    baseline: str = "baseline"
    shapes: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    float_fault: str = ""


def describe_accuracy(calibrated: bool) -> str:
    """Return the text about the accuracy of a model whose accuracy was not measured."""
    return "not measured" if calibrated else "unknown: ranges of random data, calibrate before use"


def ship_tuned_model(
    tuned: TunedModel,
    task: Task,
    runtime: dict[str, Any],
    confirmed: tuple[ConfirmationSummary, Sequence[TurnEvent]],
    out: Path,
    observer: Observer,
) -> str:
    """Write the folder `ship/NAME` of a model, or of the float model if no placement is faster; return the answer.

    For a runtime without a script no folder is written, and the answer names the file itself.

    Args:
        runtime: Description of the benchmarker.
        confirmed: Summary of the confirmation, and its turns.
        out: Folder that contains `ship`.

    Raises:
        UserError: A file cannot be written.
    """
    name = tuned.name or f"{model_label(task.model.source)}-{runtime['name']}-{task.spec.precision}"
    parent, target = out / SHIP_FOLDER, find_target(runtime)
    (summary, events), options = confirmed, format_options(runtime.get("options", {}))
    kept = not tuned.proven or not tuned.pairs
    row, model = (tuned.baseline, tuned.float_file) if kept else (tuned.row, tuned.file)
    reason = ", because no placement of Q/DQ pairs proved faster in fresh builds"
    if kept and tuned.float_fault:
        remove_bundle(parent / name)
        cause = f"because {runtime['name']} computes it wrongly ({tuned.float_fault})"
        remedies = "; ".join(wrong_float_remedies(runtime))
        return f"deploy no file, not even the float model, {cause}; remedies: {remedies}"
    if kept and (target is None or row not in summary.rows):
        remove_bundle(parent / name)
        return f"keep the float model{reason}"
    speed = summary.rows[row].speedup
    answer = (
        f"the float model at {runtime.get('float_precision', 'float')}"
        if kept
        else (
            f"{speed.value:.2f}x [{speed.low:.2f}, {speed.high:.2f}], {tuned.pairs} Q/DQ pairs (accuracy "
            f"{tuned.accuracy})"
        )
    )
    answer += f"; on this processor, {options}"
    if target is None:
        return f"take {tuned.file}: {answer}"
    shipment = Shipment(
        name=name,
        model=model,
        dynamic_model=None if kept or tuned.dynamic is None else tuned.dynamic.file,
        float_model=tuned.float_file,
        target=target,
        facts=shipment_facts(
            answer=f"{name}.onnx: {answer}",
            method=FLOAT_ROW if kept else tuned.method,
            decision=summary.rows[row].verdict,
            timing=confirmation_facts(summary, events, row, tuned.baseline, tuned.shapes),
            runtime=runtime,
            environment=describe_environment(),
            calibration={
                "data": task.calibrated_on,
                "method": task.choices.activations,
                "ranges": facts_digest(task.ranges),
            },
            model={"source": task.model.source, "sha256": task.model.sha256},
            dynamic_remark="" if kept or tuned.dynamic is None else tuned.dynamic.remark,
            experiment=_experiment(task),
        ),
    )
    folder = write_bundle(parent, shipment, observer)
    file = folder / f"{name}.onnx"
    return f"keep the float model ({file}){reason}" if kept else f"take {file}: {answer}"


def ship_answer(answer: EarlyAnswer, out: Path, observer: Observer) -> str:
    """Write the folder to deploy of an early answer to `ship` in `out`, and return the answer as one line.

    Raises:
        UserError: A file cannot be written.
    """
    task = answer.task
    calibrated = not task.calibrated_on.startswith(RANDOM_DATA)
    bounded = None if answer.metric is None else f"{answer.metric} within its bound on the data of the search"
    with explain_write_errors(answer.file):
        shapes = list(answer.shapes.values())
        dynamic = write_dynamic_model(task.model, answer.file, task.spec.backend.use, shapes, task.feeds)
    if dynamic is not None and dynamic.file is None:
        observer.say(dynamic.remark.replace(answer.digest, task.spec.name))
    tuned = TunedModel(
        file=answer.file,
        float_file=task.model_file,
        pairs=answer.pairs,
        accuracy=bounded or describe_accuracy(calibrated),
        proven=True,
        name=task.spec.name,
        method=answer.method,
        row=answer.digest,
        baseline=FLOAT_ROW,
        dynamic=dynamic,
        shapes=answer.shapes,
    )
    return ship_tuned_model(tuned, task, answer.runtime, (answer.summary, answer.events), out, observer)


def _experiment(task: Task) -> dict[str, Any]:
    """Return the keys of an experiment that define the task, from which `qdq apply` continues."""
    model, spec = task.model, task.spec
    shapes = {name: "x".join(map(str, model.types[name].shape)) for name in model.inputs}
    fixed = {"shapes": shapes if model.origin else {}} if spec.model.shape_set is None else {}
    return {
        "experiment": "autotune",
        "models": [{**spec.model.model_dump(mode="json"), **fixed}],
        "backends": [{"use": spec.backend.use, "params": dict(spec.backend.params)}],
        "precision": [spec.precision],
    }
