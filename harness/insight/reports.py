"""Reports of sensitivity and noise: terminal text, plots and JSON; and the plots of other analyses."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from harness.base.errors import UserError, suggest_names
from harness.base.files import explain_write_errors, write_json
from harness.base.progress import Observer
from harness.base.statistics import Interval
from harness.insight.noise import (
    Floats,
    NestedDesign,
    NoiseComponent,
    NoiseComponents,
    estimate_components,
    measure_noise,
)
from harness.insight.sensitivity import (
    QuantizationUnit,
    SensitivityAnalysis,
    UnitEffect,
    UnitKind,
    measure_sensitivities,
    write_sensitivities,
)
from harness.measure.provenance import describe_environment
from harness.measure.records import MAIN_BENCHMARKER, Failed
from harness.measure.turn_log import disturbance_note
from harness.plugins.registry import create_plugin
from harness.report.plots.figures import COLOURS, figure_file
from harness.run.prepare.study_task import StudyTask, prepare_study
from harness.workers.sandbox import open_engines

LABELLED_UNITS = 5  # number of units whose names are written next to their dots


def draw_layer_losses(before_db: Mapping[str, float], after_db: Mapping[str, float], title: str, path: Path) -> None:
    """Plot the SQNR of each layer's output in the order of the graph, without and with recovery.

    Args:
        before_db: SQNR in dB by the name of the layer.
        after_db: SQNR in dB of the recovered model, by the name of the layer.
        path: PNG to write.
    """
    with figure_file(path, columns=(1,)) as (axes,):
        for label, colour, values in (("as given", COLOURS[1], before_db), ("recovered", COLOURS[0], after_db)):
            axes.plot(range(len(values)), list(values.values()), ".-", color=colour, label=label, linewidth=1)
        worst = min(before_db, key=lambda name: before_db[name])
        axes.annotate(worst, (list(before_db).index(worst), before_db[worst]), fontsize=7, va="top")
        axes.set(title=title, xlabel="layer, in the order of the graph", ylabel="SQNR of its result in dB")
        axes.grid(alpha=0.3)
        axes.legend()


def draw_noise(latency_ms: Floats, found: NoiseComponents, title: str, path: Path) -> None:
    """Plot all readings by build, with one colour for each process, and the components of noise.

    Args:
        latency_ms: Latencies as [process, build, reading].
        path: PNG to write.
    """
    processes, builds, readings = latency_ms.shape
    with figure_file(path, columns=(2, 1)) as (left, right):
        for process in range(processes):
            colour = COLOURS[process % len(COLOURS)]
            for build in range(builds):
                place = (process * builds + build) * (readings + readings // 5) + np.arange(readings)
                left.plot(place, latency_ms[process, build], ".", ms=2, color=colour)
                median = np.median(latency_ms[process, build])
                left.plot(place[[0, -1]], [median, median], color="black", linewidth=1)
        left.set_xticks([])
        left.set_xlabel("readings of each build, which took turns; a colour is a process, a line a build's median")
        left.set_ylabel("latency, ms")
        left.set_title(title)
        sd = [100 * component.sd.value for component in found.components]
        errors = [[100 * abs(getattr(c.sd, end) - c.sd.value) for c in found.components] for end in ("low", "high")]
        right.bar(range(len(sd)), sd, yerr=errors, capsize=4, color="#56B4E9")
        right.set_xticks(range(len(sd)), [component.name.replace(" ", "\n", 1) for component in found.components])
        right.set_ylabel("standard deviation, % of latency")
        right.grid(alpha=0.25, axis="y")


def draw_sensitivities(found: SensitivityAnalysis, path: Path) -> None:
    """Plot the loss of fidelity over the microseconds gained, one dot per unit: quantized alone, and left out.

    Colours show roles, bars 95 % intervals; the units with the best rank are labelled.

    Args:
        found: The units, best first.
        path: PNG to write.
    """
    roles = list(dict.fromkeys(each.unit.role for each in found.units))
    colours = {role: COLOURS[index % len(COLOURS)] for index, role in enumerate(roles)}
    with figure_file(path, columns=(2, 2)) as (left, right):
        _draw_effects(left, [(each.unit, each.alone, 0.0) for each in found.units], colours)
        compared = [each for each in found.units if each.unit.precision in found.full_db]
        _draw_effects(
            right, [(each.unit, each.left_out, found.full_db[each.unit.precision]) for each in compared], colours
        )
        left.set_title("alone in the float model")
        left.set_ylabel("SQNR, dB (lower: more is lost)")
        right.set_title("left out of the full model")
        right.set_ylabel("SQNR regained, dB")
        for role, colour in colours.items():
            left.plot([], [], "o", color=colour, label=role)
        left.legend(frameon=False, fontsize=7)


def _draw_effects(
    axes: Any, effects: Sequence[tuple[QuantizationUnit, UnitEffect | Failed, float]], colours: Mapping[str, str]
) -> None:
    """Draw the SQNR of each unit relative to its base, in dB, over the time that quantizing it gains."""
    for rank, (unit, effect, base_db) in enumerate(effects):
        if isinstance(effect, Failed) or effect.gain_us is None:
            continue
        gain, place = effect.gain_us, (effect.gain_us.value, effect.sqnr_db - base_db)
        reach = [[max(0.0, gain.value - gain.low)], [max(0.0, gain.high - gain.value)]]
        axes.errorbar(*place, xerr=reach, fmt="o", ms=4, color=colours[unit.role], linewidth=0.6, alpha=0.8)
        if rank < LABELLED_UNITS:
            axes.annotate(unit.name[:20], place, fontsize=6, xytext=(3, 3), textcoords="offset points")
    axes.axvline(0, color="0.6", linewidth=0.8)
    axes.set_xlabel("microseconds gained by quantizing it")
    axes.grid(alpha=0.25)


COLUMN_NAMES = ("unit", "precision", "role", "edges", "alone µs [CI]", "alone dB", "left out µs [CI]", "left out dB")


def sensitivity_report(
    study: StudyTask, by: UnitKind, folder: Path, observer: Observer, samples: int
) -> tuple[tuple[str, ...], list[tuple[str, ...]], list[str]]:
    """Measure sensitivities, write `sensitivity.json` and `sensitivity.png`, and return a table with its notes.

    Args:
        by: Kind of unit, pattern or point.
        folder: Folder of the two files.
        samples: Number of samples on which outputs are compared.

    Raises:
        UserError: The study cannot be used, or the folder cannot be written.
    """
    fresh = not folder.exists()
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        analysis = measure_sensitivities(study, by, folder, observer, samples=samples)
    except UserError:
        if fresh:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    write_sensitivities(analysis, folder / "sensitivity.json")
    with explain_write_errors(folder):
        draw_sensitivities(analysis, folder / "sensitivity.png")
    shutil.rmtree(folder / "work", ignore_errors=True)
    return (
        COLUMN_NAMES,
        [_unit_row(analysis, index) for index in range(len(analysis.units))],
        list(_format_notes(analysis, folder)),
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
        placement: Placement to measure: "float", "all" or "linear".
        design: Numbers of processes, builds and readings.
        out: Folder of the two files.

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
    components = estimate_components(latency_ms)
    backend = dict(create_plugin("benchmarker", use.use, use.params).describe())
    title = f"{study.spec.model.name}, {placement}, {backend['name']}, {backend['float_precision']}"
    record = {
        "model": study.spec.model.use,
        "model_sha256": task.model.sha256,
        "placement": placement,
        "digest": candidate.digest,
        "backend": backend,
        "design": asdict(design),
        "components": asdict(components),
        "disturbed": occasion.disturbed,
        "latency_ms": latency_ms.tolist(),
        "environment": describe_environment(),
    }
    with explain_write_errors(out):
        write_json(out / "noise.json", record)
        draw_noise(latency_ms, components, title, out / "noise.png")
    processes, builds, readings = latency_ms.shape
    notes = [
        f"{title}: {components.latency_ms:.3f} ms; {processes} processes of {builds} builds of {readings} readings",
        f"one fresh process with one build is known within {100 * components.one_build:.1f} % (95 %); "
        f"{components.processes_needed} of them within 1 %",
        *([f"{note}: close other work and repeat"] if (note := disturbance_note(occasion.disturbed)) else []),
        f"{out / 'noise.png'}, raw readings in {out / 'noise.json'}",
    ]
    return (
        ("component", "standard deviation [95 %]", "share of variance"),
        [_component_row(c) for c in components.components],
        notes,
    )


def _component_row(component: NoiseComponent) -> tuple[str, ...]:
    sd = component.sd
    return (
        component.name,
        f"{100 * sd.value:.2f} % [{100 * sd.low:.2f}, {100 * sd.high:.2f}]",
        f"{100 * component.share:.0f} %",
    )
