"""Reports of `qdq sensitivity` and `qdq noise`: terminal text, plots and JSON."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from harness.analysis.noise import NestedDesign, NoiseComponent, estimate_components, measure_noise
from harness.analysis.plots import draw_noise, draw_sensitivities
from harness.analysis.sensitivity import (
    SensitivityAnalysis,
    UnitEffect,
    UnitKind,
    measure_sensitivities,
    write_sensitivities,
)
from harness.errors import UserError, suggest_names
from harness.progress import Observer
from harness.records import MAIN_BENCHMARKER, Failed
from harness.registry import create_plugin
from harness.results_dir.io import explain_write_errors, write_json
from harness.statistics import Interval
from harness.task_setup.study_task import StudyTask, prepare_study
from harness.timing.provenance import describe_environment
from harness.timing.turn_log import disturbance_note
from harness.timing.workers.sandbox import open_engines

COLUMN_NAMES = ("unit", "precision", "role", "edges", "alone µs [CI]", "alone dB", "left out µs [CI]", "left out dB")


def sensitivity_report(
    study: StudyTask, by: UnitKind, folder: Path, observer: Observer, samples: int
) -> tuple[tuple[str, ...], list[tuple[str, ...]], list[str]]:
    """Measure sensitivities, write `sensitivity.json` and `sensitivity.png`, and return a table with its notes.

    Args:
        study: Model and backend.
        by: Kind of unit, pattern or point.
        folder: Folder of the two files.
        observer: Receiver of the progress.
        samples: Number of samples on which outputs are compared.

    Returns:
        Header and rows of a table, and the lines below it.

    Raises:
        UserError: The study cannot be used, or the folder cannot be written.
    """
    fresh = not folder.exists()
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        found = measure_sensitivities(study, by, folder, observer, samples=samples)
    except UserError:
        if fresh:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    write_sensitivities(found, folder / "sensitivity.json")
    with explain_write_errors(folder):
        draw_sensitivities(found, folder / "sensitivity.png")
    shutil.rmtree(folder / "work", ignore_errors=True)
    return (
        COLUMN_NAMES,
        [_unit_row(found, index) for index in range(len(found.units))],
        list(_format_notes(found, folder)),
    )


def _unit_row(found: SensitivityAnalysis, index: int) -> tuple[str, ...]:
    each = found.units[index]
    unit = each.unit
    left_out = each.left_out
    full_db = found.full_db.get(unit.precision)
    regained = "-" if isinstance(left_out, Failed) or full_db is None else f"{left_out.sqnr_db - full_db:+.1f}"
    alone = "-" if isinstance(each.alone, Failed) else f"{each.alone.sqnr_db:.1f}"
    return (
        unit.name,
        unit.precision,
        unit.role,
        str(unit.edges),
        _format_gain(each.alone),
        alone,
        _format_gain(left_out),
        regained,
    )


def _format_gain(effect: UnitEffect | Failed) -> str:
    if isinstance(effect, Failed):
        return f"failed: {effect.stage}"
    return "accuracy only" if effect.gain_us is None else _format_interval(effect.gain_us)


def _format_interval(interval: Interval) -> str:
    return f"{interval.value:+.0f} [{interval.low:+.0f}, {interval.high:+.0f}]"


def _format_notes(found: SensitivityAnalysis, folder: Path) -> list[str]:
    several = len(found.full_db) > 1
    figures = [f"{value:.1f} dB" + (f" at {name}" if several else "") for name, value in found.full_db.items()]
    full = f"has {', '.join(figures)}" if figures else "cannot be built"
    notes = [
        "Alone: quantized in the float model; microseconds gained and the SQNR that is left. Left out: of the model "
        f"with everything quantized, which {full}; microseconds lost and SQNR regained. Best gain per noise "
        "first. Brackets: 95 %, Student's over turns of one build.",
    ]
    if _statistical_ties([each.alone.gain_us for each in found.units if isinstance(each.alone, UnitEffect)]):
        notes.append(
            "Too noisy to rank: the intervals of all units timed alone have a gain in common, so their order does not "
            "depend on time; close other work and repeat."
        )
    if found.calibrated_on == "random data":
        notes.append("No calibration data given: fidelity on random data is not reliable.")
    return [*notes, f"All figures: {folder / 'sensitivity.json'} and {folder / 'sensitivity.png'}."]


def _statistical_ties(gains: Sequence[Interval | None]) -> bool:
    """Return whether there are two or more intervals and one gain lies in all of them."""
    timed = [gain for gain in gains if gain is not None]
    return len(timed) > 1 and max(gain.low for gain in timed) <= min(gain.high for gain in timed)


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
