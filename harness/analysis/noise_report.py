"""Report of `qdq noise`: terminal text, plot and JSON."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from harness.analysis.noise import NestedDesign, NoiseComponent, estimate_components, measure_noise
from harness.analysis.plots import draw_noise
from harness.errors import UserError, suggest_names
from harness.progress import Observer
from harness.records import MAIN_BENCHMARKER
from harness.registry import create_plugin
from harness.results_dir.io import explain_write_errors, write_json
from harness.task_setup.study_task import StudyTask, prepare_study
from harness.timing.provenance import describe_environment
from harness.timing.turn_log import disturbance_note
from harness.timing.workers.sandbox import open_engines


def noise_report(
    study: StudyTask, placement: str, design: NestedDesign, out: Path, observer: Observer
) -> tuple[tuple[str, ...], list[tuple[str, ...]], list[str]]:
    """Measure the components of noise; write `noise.json` (raw readings, components, machine) and `noise.png`.

    Args:
        study: Model and backend.
        placement: Placement to measure: "float", "all" or "linear".
        design: Numbers of processes, builds and readings.
        out: Folder of the two files.
        observer: Receiver of the progress.

    Returns:
        Header and rows of a table, and the lines below it.

    Raises:
        UserError: The placement is unknown, or the study cannot be used or measured.
    """
    with explain_write_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    task, worker = prepare_study(study, out, observer)
    if placement not in task.placements:
        raise UserError(f"--placement: unknown placement {placement!r}; {suggest_names(placement, task.placements)}")
    candidate = task.candidate(task.placements[placement])
    limits, use = study.experiment.limits, worker.benchmarkers[MAIN_BENCHMARKER]
    occasion = measure_noise(lambda: open_engines(worker, limits), candidate, design, observer)
    latency_ms = occasion.latency_ms
    found = estimate_components(latency_ms)
    backend = dict(create_plugin("benchmarker", use.use, use.params).describe())
    title = f"{study.spec.model.name}, {placement}, {backend['name']}, {backend['float_precision']}"
    record = {
        "model": study.spec.model.use,
        "model_sha256": task.model.sha256,
        "placement": placement,
        "digest": candidate.digest,
        "backend": backend,
        "design": asdict(design),
        "components": asdict(found),
        "disturbed": occasion.disturbed,
        "latency_ms": latency_ms.tolist(),
        "environment": describe_environment(),
    }
    with explain_write_errors(out):
        write_json(out / "noise.json", record)
        draw_noise(latency_ms, found, title, out / "noise.png")
    processes, builds, readings = latency_ms.shape
    notes = [
        f"{title}: {found.latency_ms:.3f} ms; {processes} processes of {builds} builds of {readings} readings",
        f"one fresh process with one build is known within {100 * found.one_build:.1f} % (95 %); "
        f"{found.processes_needed} of them within 1 %",
        *([f"{note}: close other work and repeat"] if (note := disturbance_note(occasion.disturbed)) else []),
        f"{out / 'noise.png'}, raw readings in {out / 'noise.json'}",
    ]
    return (
        ("component", "standard deviation [95 %]", "share of variance"),
        [_component_row(c) for c in found.components],
        notes,
    )


def _component_row(component: NoiseComponent) -> tuple[str, ...]:
    sd = component.sd
    return (
        component.name,
        f"{100 * sd.value:.2f} % [{100 * sd.low:.2f}, {100 * sd.high:.2f}]",
        f"{100 * component.share:.0f} %",
    )
