"""Effect of each pattern or point on latency and fidelity, quantized alone and left out of the full model."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from harness.base.errors import UserError
from harness.base.files import explain_write_errors, write_json
from harness.base.progress import Observer
from harness.base.statistics import Interval, paired_ratio_ci
from harness.config.sections import Sampling
from harness.measure.records import SCHEMA_VERSION, Failed
from harness.report.plots.figures import COLOURS, figure_file
from harness.run.prepare.accuracy import PROXY_EVALUATOR, make_proxy_evaluator
from harness.run.prepare.accuracy_store import AccuracyStore
from harness.run.prepare.study_task import StudyTask, prepare_study
from harness.run.prepare.task import Task
from harness.workers.engines import Engines
from harness.workers.sandbox import open_engines
from search.space import Placement, Space

UnitKind = Literal["pattern", "point"]
TURNS_PER_ENGINE = 4  # of base and candidate in alternation, so that drift of the machine affects both
TURN_SAMPLING = Sampling(warmup_ms=10.0, min_samples=5, max_samples=9, max_ms=60.0)
LABELLED_UNITS = 5  # number of units whose names are written next to their dots
COLUMN_NAMES = ("unit", "precision", "role", "edges", "alone µs [CI]", "alone dB", "left out µs [CI]", "left out dB")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitEffect:
    """Effect of quantizing a unit, with the other units all float or all quantized.

    Attributes:
        gain_us: Saved time in microseconds; None if the device only emulates the precision.
        sqnr_db: SQNR of the measured model's outputs, in dB.
    """

    gain_us: Interval | None
    sqnr_db: float


NOT_MEASURED = Failed(stage="", reason="not measured")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationUnit:
    """Dimensions that are quantized together, at one precision: those of a pattern, or one point; with their effects.

    Attributes:
        name: Name of the pattern or of the point.
        role: Role of the dimension with the highest cost, see `search.space.Dimension`.
        dimensions: Indices of the dimensions in the space.
        edges: Number of edges that the dimensions quantize.
        cost: Share of the model's multiply-accumulate operations that read these edges.
        alone: Effect with only this unit quantized (leave-one-in).
        left_out: Effect with only this unit float (leave-one-out); `gain_us` is the time that is lost without it.
    """

    name: str
    precision: str
    role: str
    dimensions: tuple[int, ...]
    edges: int
    cost: float
    alone: UnitEffect | Failed = NOT_MEASURED
    left_out: UnitEffect | Failed = NOT_MEASURED

    @property
    def rank(self) -> float:
        """Return the gain in microseconds divided by the relative noise power, a loss times it; highest is best."""
        if isinstance(self.alone, Failed) or self.alone.gain_us is None:
            return float("-inf")
        gain_us, noise_power = self.alone.gain_us.value, float(10 ** (-self.alone.sqnr_db / 10))
        return gain_us / noise_power if gain_us > 0 else gain_us * noise_power


def quantization_units(space: Space, by: UnitKind) -> tuple[QuantizationUnit, ...]:
    """Return the units of a space in graph order, one for each pattern (or point) and precision."""
    groups = space.groups if by == "pattern" else {d.name: (i,) for i, d in enumerate(space.dimensions)}
    units = []
    for name, indices in groups.items():
        members = [space.dimensions[index] for index in indices]
        units += [
            QuantizationUnit(
                name=name,
                precision=precision,
                role=max(members, key=lambda member: member.cost).role,
                dimensions=tuple(indices),
                edges=len({edge for member in members for edge in member.edges}),
                cost=sum(member.cost for member in members),
            )
            for precision in dict.fromkeys(choice for member in members for choice in member.choices[1:])
        ]
    return tuple(units)


def sensitivity_report(
    study: StudyTask, by: UnitKind, folder: Path, observer: Observer, samples: int
) -> tuple[tuple[str, ...], list[tuple[str, ...]], list[str]]:
    """Measure sensitivities, write `sensitivity.json` and `sensitivity.png`, and return a table with its notes.

    A failed measurement is recorded as `Failed`. A search can start from the file, see `harness.config.experiment`.

    Args:
        folder: Folder of the two files.
        samples: Number of calibration samples on which outputs are compared; random samples without data.
    """
    fresh = not folder.exists()
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        task, worker = prepare_study(study, folder, observer)
        proxy = make_proxy_evaluator(samples, study.spec.model, task.model, task.work)
        worker = replace(worker, evaluators={PROXY_EVALUATOR: proxy}, reference=None)
        units = quantization_units(task.space, by)
        with open_engines(worker, study.experiment.limits) as engines:
            AccuracyStore(folder, engines, observer).require_float_score(task.model_file, PROXY_EVALUATOR)
            timer = SensitivityTimer(engines=engines, task=task)
            measured = []
            with observer.work(f"{study.spec.name}: {len(units)} units", len(units)) as step:
                for unit in units:
                    measured.append(timer.measure_unit(unit))
                    step.advance(unit.name)
            full_db = {}
            for precision in sorted({unit.precision for unit in units}):
                sqnr_db = timer.measure_sqnr(task.space.quantize_all(precision))
                if not isinstance(sqnr_db, Failed):
                    full_db[precision] = sqnr_db
            facts = {"task": study.spec.name, "backend": dict(engines.describe()), "calibrated_on": task.calibrated_on}
    except UserError:
        if fresh:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    measured.sort(key=lambda each: -each.rank)
    write_sensitivities(measured, task.space, {**facts, "full_db": full_db}, folder / "sensitivity.json")
    with explain_write_errors(folder):
        draw_sensitivities(measured, full_db, folder / "sensitivity.png")
    shutil.rmtree(folder / "work", ignore_errors=True)
    notes = _format_notes(measured, full_db)
    if task.calibrated_on == "random data":
        notes.append("No calibration data given: fidelity on random data is not reliable.")
    notes.append(f"All figures: {folder / 'sensitivity.json'} and {folder / 'sensitivity.png'}.")
    return COLUMN_NAMES, [_cells(each, full_db.get(each.precision)) for each in measured], notes


@dataclass(slots=True, kw_only=True)
class SensitivityTimer:
    """Timer of quantization units (`QuantizationUnit`), each in turns with a base, whose engine is kept open.

    The base is the float model for a unit that is quantized alone, and the model with everything at the unit's
    precision for a unit that is left out. If a base fails, so do the effects that are measured against it.

    Attributes:
        engines: Engines that build, time and score the models.
        task: Task whose space has the units.
    """

    engines: Engines
    task: Task
    _bases: dict[str, int | Failed] = field(default_factory=dict)

    def measure_unit(self, unit: QuantizationUnit) -> QuantizationUnit:
        """Return a unit with its effects, quantized alone and left out, or their failures."""
        space = self.task.space
        effects = []
        for base, precision in ((space.float_placement(), unit.precision), (space.quantize_all(unit.precision), None)):
            effect = self._measure_effect(base, unit, precision)
            if isinstance(effect, Failed) and effect.stage in ("crash", "timeout"):
                self._bases.clear()  # the worker died, and its engines with it
            effects.append(effect)
        return replace(unit, alone=effects[0], left_out=effects[1])

    def measure_sqnr(self, placement: Placement) -> float | Failed:
        """Return the SQNR in dB of the outputs of a placement, or its failure."""
        built = self.engines.build(self.task.candidate(placement))
        return built if isinstance(built, Failed) else self._score_build(built.handle)

    def _measure_effect(self, base: Placement, unit: QuantizationUnit, precision: str | None) -> UnitEffect | Failed:
        """Return the effect of a change of the base: the unit at a precision; None: at float, so that time is lost."""
        choices = list(base.choices)
        for index in unit.dimensions:
            offered = self.task.space.dimensions[index].choices
            choices[index] = offered.index(precision) if precision in offered else 0
        built = self.engines.build(self.task.candidate(Placement(tuple(choices))))
        if isinstance(built, Failed):
            return built
        gain_us = None
        if unit.precision not in self.task.accuracy_only:
            gained = self._measure_gain_us(base, built.handle, -1.0 if precision is None else 1.0)
            if isinstance(gained, Failed):
                self.engines.release(built.handle)
                return gained
            gain_us = gained
        sqnr_db = self._score_build(built.handle)
        return sqnr_db if isinstance(sqnr_db, Failed) else UnitEffect(gain_us=gain_us, sqnr_db=sqnr_db)

    def _measure_gain_us(self, base: Placement, handle: int, sign: float) -> Interval | Failed:
        """Return base latency minus candidate latency in microseconds, times `sign` (-1 if a unit is left out)."""
        digest = self.task.space.digest(base)
        if digest not in self._bases:
            built = self.engines.build(self.task.candidate(base))
            self._bases[digest] = built if isinstance(built, Failed) else built.handle
        base_handle = self._bases[digest]
        if isinstance(base_handle, Failed):
            return base_handle
        turns: tuple[list[float], list[float]] = ([], [])
        for _ in range(TURNS_PER_ENGINE):
            for engine, readings in zip((base_handle, handle), turns, strict=True):
                samples = self.engines.sample(engine, TURN_SAMPLING)
                if isinstance(samples, Failed):
                    return samples
                readings.append(float(np.median(samples.latency_ms)))
        base_us = 1000 * float(np.median(turns[0]))
        ratio = paired_ratio_ci([turns[0]], [turns[1]])
        gains = sorted(sign * base_us * (1 - 1 / value) for value in (ratio.low, ratio.high))
        return Interval(value=sign * base_us * (1 - 1 / ratio.value), low=gains[0], high=gains[1])

    def _score_build(self, handle: int) -> float | Failed:
        score = self.engines.evaluate(handle, PROXY_EVALUATOR)
        self.engines.release(handle)
        return score if isinstance(score, Failed) else score.metrics["sqnr_db"]


def write_sensitivities(
    measured: Sequence[QuantizationUnit], space: Space, facts: Mapping[str, Any], path: Path
) -> None:
    """Write the units, best first, with the facts of their measurement as JSON."""
    units = []
    for each in measured:
        unit: dict[str, Any] = {
            "name": each.name,
            "precision": each.precision,
            "role": each.role,
            "dimensions": [space.dimensions[index].name for index in each.dimensions],
            "edges": each.edges,
            "cost": each.cost,
        }
        for name, effect in (("alone", each.alone), ("left_out", each.left_out)):
            if isinstance(effect, Failed):
                unit[name] = {"failed": effect.stage, "reason": effect.reason}
                continue
            unit[name] = {"sqnr_db": effect.sqnr_db}
            if (gain := effect.gain_us) is not None:
                unit[name] |= {"gain_us": gain.value, "gain_low_us": gain.low, "gain_high_us": gain.high}
        units.append(unit)
    write_json(path, {"schema": SCHEMA_VERSION, "kind": "sensitivity", **facts, "units": units})


def draw_sensitivities(measured: Sequence[QuantizationUnit], full_db: Mapping[str, float], path: Path) -> None:
    """Plot the loss of fidelity over the microseconds gained, one dot per unit: quantized alone, and left out.

    Colours show roles, bars 95 % intervals; the units with the best rank are labelled.

    Args:
        measured: The units, best first.
        full_db: SQNR with everything quantized, by precision; units at other precisions are not drawn as left out.
    """
    roles = list(dict.fromkeys(each.role for each in measured))
    colours = {role: COLOURS[index % len(COLOURS)] for index, role in enumerate(roles)}
    compared = [each for each in measured if each.precision in full_db]
    alone = [(each, each.alone, 0.0) for each in measured]
    left_out = [(each, each.left_out, full_db[each.precision]) for each in compared]
    with figure_file(path, columns=(2, 2)) as (left, right):
        for axes, effects, title, label in (
            (left, alone, "alone in the float model", "SQNR, dB (lower: more is lost)"),
            (right, left_out, "left out of the full model", "SQNR regained, dB"),
        ):
            for rank, (unit, effect, base_db) in enumerate(effects):
                if isinstance(effect, Failed) or effect.gain_us is None:
                    continue
                gain, place = effect.gain_us, (effect.gain_us.value, effect.sqnr_db - base_db)
                reach = [[max(0.0, gain.value - gain.low)], [max(0.0, gain.high - gain.value)]]
                axes.errorbar(*place, xerr=reach, fmt="o", ms=4, color=colours[unit.role], linewidth=0.6, alpha=0.8)
                if rank < LABELLED_UNITS:
                    axes.annotate(unit.name[:20], place, fontsize=6, xytext=(3, 3), textcoords="offset points")
            axes.axvline(0, color="0.6", linewidth=0.8)
            axes.set(title=title, xlabel="microseconds gained by quantizing it", ylabel=label)
            axes.grid(alpha=0.25)
        for role, colour in colours.items():
            left.plot([], [], "o", color=colour, label=role)
        left.legend(frameon=False, fontsize=7)


def _cells(each: QuantizationUnit, full_db: float | None) -> tuple[str, ...]:
    cells = [each.name, each.precision, each.role, str(each.edges)]
    for effect, base_db, form in ((each.alone, 0.0, ".1f"), (each.left_out, full_db, "+.1f")):
        if isinstance(effect, Failed):
            cells += [f"failed: {effect.stage}", "-"]
            continue
        gain = effect.gain_us
        cells.append("accuracy only" if gain is None else f"{gain.value:+.0f} [{gain.low:+.0f}, {gain.high:+.0f}]")
        cells.append("-" if base_db is None else format(effect.sqnr_db - base_db, form))
    return tuple(cells)


def _format_notes(measured: Sequence[QuantizationUnit], full_db: Mapping[str, float]) -> list[str]:
    """Return the meaning of the columns, and a warning if one gain lies in the intervals of all units."""
    figures = [f"{value:.1f} dB" + (f" at {name}" if len(full_db) > 1 else "") for name, value in full_db.items()]
    full = f"has {', '.join(figures)}" if figures else "cannot be built"
    notes = [
        "Alone: quantized in the float model; microseconds gained and the SQNR that is left. Left out: of the model "
        f"with everything quantized, which {full}; microseconds lost and SQNR regained. Best gain per noise "
        "first. Brackets: 95 %, Student's over turns of one build.",
    ]
    gains = [each.alone.gain_us for each in measured if isinstance(each.alone, UnitEffect) and each.alone.gain_us]
    if len(gains) > 1 and max(gain.low for gain in gains) <= min(gain.high for gain in gains):
        notes.append(
            "Too noisy to rank: the intervals of all units timed alone have a gain in common, so their order does not "
            "depend on time; close other work and repeat."
        )
    return notes
