"""Folder to deploy of the autotuner's command line, from its confirmation on fresh builds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.progress import Observer
from harness.results_dir.fingerprint import facts_digest
from harness.shipping.bundle import SHIP_FOLDER, Shipment, remove_bundle, shipment_facts, write_bundle
from harness.shipping.deploy_script import find_target
from harness.shipping.results_bundle import confirmation_facts
from harness.task_setup.study_task import model_label
from harness.task_setup.task import Task
from harness.timing.confirmation import ConfirmationSummary
from harness.timing.provenance import describe_environment, format_options
from harness.timing.turn_log import TurnEvent
from harness.verification.dynamic_delivery import DynamicModel

__all__ = ["TunedModel", "ship_tuned_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedModel:
    """Result of the autotuner.

    Attributes:
        file: Path of the delivered model.
        float_file: Path of the float model at the same static shapes.
        dynamic: Form with the dynamic axes of the original model, if that has some.
        pairs: Number of Q/DQ pairs of the confirmed model; 0: it is the float model.
        calibrated: Whether the ranges come from calibration data.
        proven: The confirmed model is the delivered one, and faster than the float model beyond noise.
    """

    file: Path
    float_file: Path
    dynamic: DynamicModel | None
    pairs: int
    calibrated: bool
    proven: bool


def ship_tuned_model(
    tuned: TunedModel,
    task: Task,
    runtime: dict[str, Any],
    confirmed: tuple[ConfirmationSummary, Sequence[TurnEvent]],
    observer: Observer,
) -> str:
    """Write the folder to deploy next to the result, and return the answer in one line.

    A folder of an earlier run is removed if the float model is to be kept.

    Args:
        task: Task of the model.
        runtime: Description of the benchmarker.
        confirmed: Summary and turns of the confirmation, with the rows "baseline" and "final".
        observer: Receives the progress.

    Raises:
        UserError: A file cannot be written.
    """
    name = f"{model_label(task.model.source)}-{runtime['name']}-{task.spec.precision}"
    parent = tuned.file.parent / SHIP_FOLDER
    if not tuned.proven or not tuned.pairs:
        remove_bundle(parent / name)
        return "keep the float model, because no placement of Q/DQ pairs proved faster in fresh builds"
    summary, events = confirmed
    speed, target = summary.rows["final"].speedup, find_target(runtime)
    accuracy = "not measured" if tuned.calibrated else "unknown: ranges of random data, calibrate before use"
    answer = (
        f"{speed.value:.2f}x [{speed.low:.2f}, {speed.high:.2f}], {tuned.pairs} Q/DQ pairs (accuracy {accuracy}); "
        f"on this processor, {format_options(runtime.get('options', {}))}"
    )
    if target is None:
        return f"take {tuned.file}: {answer}"
    shipment = Shipment(
        name=name,
        model=tuned.file,
        dynamic_model=None if tuned.dynamic is None else tuned.dynamic.file,
        float_model=tuned.float_file,
        target=target,
        facts=shipment_facts(
            answer=f"{name}.onnx: {answer}",
            method="autotune",
            decision=summary.rows["final"].verdict,
            timing=confirmation_facts(summary, events, "final", "baseline"),
            runtime=runtime,
            environment=describe_environment(),
            calibration={
                "data": task.calibrated_on,
                "method": task.choices.activations,
                "ranges": facts_digest(task.ranges),
            },
            model={"source": task.model.source, "sha256": task.model.sha256},
            dynamic_remark="" if tuned.dynamic is None else tuned.dynamic.remark,
            experiment=_experiment(task),
        ),
    )
    folder = write_bundle(parent, shipment, observer)
    return f"take {folder / f'{name}.onnx'}: {answer}"


def _experiment(task: Task) -> dict[str, Any]:
    """Return the keys of an experiment that define the task, from which `qdq apply` continues."""
    model, spec = task.model, task.spec
    shapes = {name: "x".join(map(str, model.types[name].shape)) for name in model.inputs}
    return {
        "experiment": "autotune",
        "models": [{**spec.model.model_dump(mode="json"), "shapes": shapes if model.origin else {}}],
        "backends": [{"use": spec.backend.use, "params": dict(spec.backend.params)}],
        "precision": [spec.precision],
    }
