"""Report of `qdq sensitivity`: table, plot and JSON."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from harness.analysis.plots import draw_sensitivities
from harness.analysis.sensitivity import (
    SensitivityAnalysis,
    UnitEffect,
    UnitKind,
    measure_sensitivities,
    write_sensitivities,
)
from harness.errors import UserError
from harness.progress import Observer
from harness.records import Failed
from harness.results_dir.io import explain_write_errors
from harness.statistics import Interval
from harness.task_setup.study_task import StudyTask

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
