"""Effect of each pattern or point on latency and fidelity, quantized alone and left out of the full model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from harness.base.files import write_json
from harness.base.progress import Observer
from harness.base.statistics import Interval, paired_ratio_ci
from harness.config.sections import Sampling
from harness.measure.records import MAIN_BENCHMARKER, SCHEMA_VERSION, Failed
from harness.run.prepare.accuracy import PROXY_EVALUATOR, make_proxy_evaluator
from harness.run.prepare.accuracy_store import AccuracyStore
from harness.run.prepare.study_task import StudyTask, prepare_study
from harness.run.prepare.task import Task
from harness.workers.engines import Engines, WorkerSpec
from harness.workers.sandbox import open_engines
from search.space import Placement, Space

UnitKind = Literal["pattern", "point"]
TURNS_PER_ENGINE = 4  # of base and candidate in alternation, so that drift of the machine affects both
TURN_SAMPLING = Sampling(warmup_ms=10.0, min_samples=5, max_samples=9, max_ms=60.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationUnit:
    """Dimensions that are quantized together, at one precision: those of a pattern, or one point.

    Attributes:
        name: Name of the pattern or of the point.
        role: Role of the dimension with the highest cost, see `search.space.Dimension`.
        dimensions: Indices of the dimensions in the space.
        edges: Number of edges that the dimensions quantize.
        cost: Share of the model's multiply-accumulate operations that read these edges.
    """

    name: str
    precision: str
    role: str
    dimensions: tuple[int, ...]
    edges: int
    cost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitEffect:
    """Effect of quantizing a unit, with the other units all float or all quantized.

    Attributes:
        gain_us: Saved time in microseconds; None if the device only emulates the precision.
        sqnr_db: SQNR of the measured model's outputs, in dB.
    """

    gain_us: Interval | None
    sqnr_db: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSensitivity:
    """Unit with its effects.

    Attributes:
        alone: Effect with only this unit quantized (leave-one-in).
        left_out: Effect with only this unit float (leave-one-out); `gain_us` is the time that is lost without it.
    """

    unit: QuantizationUnit
    alone: UnitEffect | Failed
    left_out: UnitEffect | Failed

    @property
    def relative_noise_power(self) -> float:
        """Return error power over signal power with only this unit quantized; infinite if it cannot be built."""
        return float("inf") if isinstance(self.alone, Failed) else float(10 ** (-self.alone.sqnr_db / 10))

    @property
    def rank(self) -> float:
        """Return the gain in microseconds divided by the relative noise power, a loss times it; highest is best."""
        if isinstance(self.alone, Failed) or self.alone.gain_us is None:
            return float("-inf")
        gain_us = self.alone.gain_us.value
        return gain_us / self.relative_noise_power if gain_us > 0 else gain_us * self.relative_noise_power


@dataclass(frozen=True, slots=True, kw_only=True)
class SensitivityAnalysis:
    """All units of a task, best rank first.

    Attributes:
        full_db: SQNR in dB with everything quantized, by precision, without precisions that cannot be built.
        calibrated_on: Source of the data for ranges and fidelity, as text.
        backend: Facts of the benchmarker.
    """

    name: str
    space: Space
    units: tuple[UnitSensitivity, ...]
    full_db: Mapping[str, float]
    calibrated_on: str
    backend: dict[str, Any]


def quantization_units(space: Space, by: UnitKind) -> tuple[QuantizationUnit, ...]:
    """Return the units of a space in graph order, one for each pattern (or point) and precision."""
    groups = space.groups if by == "pattern" else {d.name: (i,) for i, d in enumerate(space.dimensions)}
    members = {name: [space.dimensions[index] for index in indices] for name, indices in groups.items()}
    return tuple(
        QuantizationUnit(
            name=name,
            precision=precision,
            role=max(members[name], key=lambda member: member.cost).role,
            dimensions=tuple(indices),
            edges=len({edge for member in members[name] for edge in member.edges}),
            cost=sum(member.cost for member in members[name]),
        )
        for name, indices in groups.items()
        for precision in dict.fromkeys(choice for member in members[name] for choice in member.choices[1:])
    )


def measure_sensitivities(
    study: StudyTask, by: UnitKind, folder: Path, observer: Observer, *, samples: int = 8
) -> SensitivityAnalysis:
    """Measure every unit alone and left out; a failed measurement is recorded as `Failed`.

    Args:
        by: Kind of unit, pattern or point.
        folder: Folder for scratch files, and for the choice of the float precision.
        samples: Number of calibration samples on which outputs are compared; random samples without data.

    Raises:
        UserError: The study cannot be used, or the float model fails.
    """
    task, worker = prepare_study(study, folder, observer)
    proxy = make_proxy_evaluator(samples, study.spec.model, task.model, task.work)
    worker = WorkerSpec(
        benchmarkers={MAIN_BENCHMARKER: worker.benchmarkers[MAIN_BENCHMARKER]},
        workdir=worker.workdir,
        evaluators={PROXY_EVALUATOR: proxy},
        sizes=task.sizes,
    )
    units = quantization_units(task.space, by)
    with open_engines(worker, study.experiment.limits) as engines:
        AccuracyStore(folder, engines, observer).require_float_score(task.model_file, PROXY_EVALUATOR)
        bench = SensitivityTimer(engines=engines, task=task)
        with observer.work(f"{study.spec.name}: {len(units)} units", len(units)) as step:
            measured = []
            for unit in units:
                measured.append(bench.measure_unit(unit))
                step.advance(unit.name)
        full = {
            each: bench.measure_sqnr(task.space.quantize_all(each)) for each in sorted({u.precision for u in units})
        }
        backend = dict(engines.describe())
    return SensitivityAnalysis(
        name=study.spec.name,
        space=task.space,
        units=tuple(sorted(measured, key=lambda each: -each.rank)),
        full_db={name: sqnr_db for name, sqnr_db in full.items() if not isinstance(sqnr_db, Failed)},
        calibrated_on=task.calibrated_on,
        backend=backend,
    )


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

    def measure_unit(self, unit: QuantizationUnit) -> UnitSensitivity:
        """Return the effects of a unit, quantized alone and left out, or their failures."""
        space = self.task.space
        nothing, everything = space.float_placement(), space.quantize_all(unit.precision)
        return UnitSensitivity(
            unit=unit,
            alone=self._measure_effect(_replace_unit(nothing, unit, space, unit.precision), nothing, unit, 1.0),
            left_out=self._measure_effect(_replace_unit(everything, unit, space, None), everything, unit, -1.0),
        )

    def measure_sqnr(self, placement: Placement) -> float | Failed:
        """Return the SQNR in dB of the outputs of a placement, or its failure."""
        built = self.engines.build(self.task.candidate(placement))
        return built if isinstance(built, Failed) else self._score_build(built.handle)

    def _measure_effect(
        self, placement: Placement, base: Placement, unit: QuantizationUnit, sign: float
    ) -> UnitEffect | Failed:
        timed = unit.precision not in self.task.accuracy_only
        built = self.engines.build(self.task.candidate(placement))
        if isinstance(built, Failed):
            return self._discard_bases(built)
        gain_us = self._measure_gain_us(base, built.handle, sign) if timed else None
        if isinstance(gain_us, Failed):
            self.engines.release(built.handle)
            return self._discard_bases(gain_us)
        sqnr_db = self._score_build(built.handle)
        return (
            self._discard_bases(sqnr_db)
            if isinstance(sqnr_db, Failed)
            else UnitEffect(gain_us=gain_us, sqnr_db=sqnr_db)
        )

    def _measure_gain_us(self, base: Placement, handle: int, sign: float) -> Interval | Failed:
        """Return base latency minus candidate latency in microseconds, times `sign` (-1 if a unit is left out)."""
        base_handle = self._open_base(base)
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

    def _open_base(self, placement: Placement) -> int | Failed:
        digest = self.task.space.digest(placement)
        if digest not in self._bases:
            built = self.engines.build(self.task.candidate(placement))
            self._bases[digest] = built if isinstance(built, Failed) else built.handle
        return self._bases[digest]

    def _score_build(self, handle: int) -> float | Failed:
        score = self.engines.evaluate(handle, PROXY_EVALUATOR)
        self.engines.release(handle)
        return score if isinstance(score, Failed) else score.metrics["sqnr_db"]

    def _discard_bases(self, failed: Failed) -> Failed:
        """Discard the bases if the worker died, and return the failure."""
        if failed.stage in ("crash", "timeout"):
            self._bases.clear()
        return failed


def _replace_unit(base: Placement, unit: QuantizationUnit, space: Space, precision: str | None) -> Placement:
    """Return the base with the points of a unit at a precision, or float if a point does not offer it."""
    choices = list(base.choices)
    for index in unit.dimensions:
        offered = space.dimensions[index].choices
        choices[index] = offered.index(precision) if precision in offered else 0
    return Placement(tuple(choices))


def write_sensitivities(found: SensitivityAnalysis, path: Path) -> None:
    """Write the sensitivities as JSON; a later search can start from the file, see `harness.config.initial`.

    Raises:
        UserError: The file cannot be written.
    """
    names = [dimension.name for dimension in found.space.dimensions]
    units = [
        {
            "name": each.unit.name,
            "precision": each.unit.precision,
            "role": each.unit.role,
            "dimensions": [names[index] for index in each.unit.dimensions],
            "edges": each.unit.edges,
            "cost": each.unit.cost,
            "alone": _effect_facts(each.alone),
            "left_out": _effect_facts(each.left_out),
        }
        for each in found.units
    ]
    facts = {"task": found.name, "backend": found.backend, "calibrated_on": found.calibrated_on}
    write_json(
        path, {"schema": SCHEMA_VERSION, "kind": "sensitivity", **facts, "full_db": dict(found.full_db), "units": units}
    )


def _effect_facts(effect: UnitEffect | Failed) -> dict[str, Any]:
    if isinstance(effect, Failed):
        return {"failed": effect.stage, "reason": effect.reason}
    gain = effect.gain_us
    figures = {} if gain is None else {"gain_us": gain.value, "gain_low_us": gain.low, "gain_high_us": gain.high}
    return {**figures, "sqnr_db": effect.sqnr_db}
