"""Attribution of a row's speed to the parts of its placement, measured on this machine."""

from __future__ import annotations

import hashlib
import logging
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from harness.base.errors import UserError
from harness.base.progress import Observer
from harness.base.statistics import Interval
from harness.config.experiment import Experiment, load_experiment
from harness.config.plan import plan_tasks
from harness.config.sections import Confirmation, PluginSpec
from harness.graph.partition.patterns import find_patterns
from harness.graph.partition.regions import discover_regions
from harness.insight.ablation import (
    AblationTimer,
    AblationTiming,
    AccuracyAblation,
    backward_elimination,
    quantized,
    without,
)
from harness.insight.explained_row import find_explained_row
from harness.insight.layers import iter_edge_fusions, read_layers
from harness.measure.records import MAIN_BENCHMARKER, Failed
from harness.plugins import registry
from harness.results.artifacts import FLOAT_ROW
from harness.results.folder import TaskResults, load
from harness.results.task_files import AttributionReport, MinimalPlacement, PartEffect
from harness.run.prepare.accuracy import Scoring, make_scoring
from harness.run.prepare.task import Task, compose_task
from harness.run.verify.shape_files import SHAPES_FILE_NAME, make_shape_set
from harness.runtimes.shape_set import ShapeSet
from harness.workers.engines import WorkerSpec
from harness.workers.sandbox import open_engines
from search.space import Placement

ATTRIBUTION_SCHEDULE = Confirmation(builds=3, rounds=10, samples=3)
FEWEST_POINTS_STEP = "the fewest points"
logger = logging.getLogger(__name__)


def attribute_row(folder: Path, where: str, *, base: Path, observer: Observer) -> tuple[AttributionReport, Path]:
    """Measure the gain of each pattern and of points of relevant patterns, and find the fewest points that keep it.

    Args:
        where: A row of the main table: its number, method, id, or TASK/METHOD. Of a file that recovery made, the
            placement it was made from is measured.
        base: Folder that relative paths of the experiment start from.

    Returns:
        The report, and the folder of the row's task.

    Raises:
        UserError: The row is unknown or has no placement, the model or the runtime has changed, or the float model
            cannot be timed in turns with the row.
    """
    experiment = load_experiment(folder / "experiment.yaml", base)
    found = find_explained_row(load(folder), where, experiment)
    row, task_results = found.row, found.task
    spec = next((spec for spec in plan_tasks(experiment) if spec.name == task_results.name), None)
    if spec is None:
        raise UserError(f"{folder / 'experiment.yaml'}: has no task {task_results.name!r}")
    ranges = (start for start in experiment.initial if start.params.get("ranges"))  # otherwise the scales would differ
    bare = experiment.model_copy(update={"initial": (PluginSpec(use="float"), *ranges), "baselines": ()})
    with tempfile.TemporaryDirectory(prefix="qdq-explain-") as work:
        task = compose_task(bare, spec, Path(work), observer)
        _require_same_task(task, task_results)
        if (known := task_results.folder / SHAPES_FILE_NAME).exists():
            shutil.copy(known, work)
        task = task.with_benchmarkers({MAIN_BENCHMARKER: _recorded_backend(spec.backend, task_results)})
        explainer = _RowExplainer(
            experiment=experiment,
            task=task,
            shapes=make_shape_set(task, Path(work), partial(open_engines, limits=experiment.limits), observer),
            scoring=make_scoring(experiment.objective, spec.model, task.model, task.work),
            whole=found.placement,
            observer=observer,
        )
        report = explainer.explain(row.id, row.sha256, found.method)
    return replace(report, recovery=found.recovery), task_results.folder


def _require_same_task(task: Task, results: TaskResults) -> None:
    space = hashlib.sha256(repr(task.space.dimensions).encode()).hexdigest()[:16]
    for what, current, recorded in (
        ("model", task.model.sha256, results.facts.get("model_sha256")),
        ("space of placements", space, results.facts.get("space")),
    ):
        if recorded is not None and current != recorded:
            raise UserError(
                f"{results.folder}: the {what} has changed ({current[:12]}, was {str(recorded)[:12]}), so the row "
                "cannot be explained: run the experiment again"
            )


def _recorded_backend(use: PluginSpec, results: TaskResults) -> PluginSpec:
    """Return the backend with the float precision of the recorded baseline."""
    facts = registry.create_plugin("benchmarker", use.use, use.params).describe()
    fastest = str(results.facts["backend"].get("float_precision"))
    pinned: Mapping[str, Any] = facts.get("float_params", {}).get(fastest, {})
    return use.model_copy(update={"params": {**use.params, **pinned}})


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowExplainer:
    """Set-up of the attribution of one row.

    Attributes:
        task: Task with the backend of the row.
        shapes: Shapes that the row is timed at; None: one.
        whole: Placement of the row.
    """

    experiment: Experiment
    task: Task
    shapes: ShapeSet | None
    scoring: Scoring
    whole: Placement
    observer: Observer

    def explain(self, row: str, sha256: str, method: str) -> AttributionReport:
        """Measure and return the attribution; see `attribute_row`."""
        bench = self._ablation_timer()
        space, whole = self.task.space, self.whole
        flat, floor = _speedup_over_float(bench)
        patterns, drop = self._pattern_effects(bench)
        points = self._point_effects(bench, patterns)
        fast = flat.low > 1 + floor
        minimal = self._minimal_placement(bench, patterns, points, flat) if fast else None
        before, after = (
            self._layers(placement, name) for name, placement in (("b", space.float_placement()), ("a", whole))
        )
        resolved = self.task.edges_in_file(space.resolve(whole))
        return AttributionReport(
            row=row,
            sha256=sha256,
            method=method,
            pairs=self._count_pairs(whole),
            speedup=flat,
            noise_floor=bench.noise_floor,
            patterns=patterns,
            points=points,
            minimal=minimal,
            before=before,
            after=after,
            edges=tuple(iter_edge_fusions(resolved, self.task.cast or self.task.model, after)),
            latency_ms=bench.whole_ms,
            metric=self.scoring.metric,
            drop=drop,
            steps=tuple(bench.steps),
        )

    def _worker(self) -> WorkerSpec:
        return WorkerSpec(
            benchmarkers=self.task.benchmarkers,
            workdir=self.task.work,
            evaluators=self.scoring.evaluators,
            adapt=self.shapes,
            sizes=self.task.sizes,
        )

    def _ablation_timer(self) -> AblationTimer:
        return AblationTimer(
            space=self.task.space,
            whole=self.whole,
            candidate=self.task.candidate,
            open_engines=partial(open_engines, self._worker(), self.experiment.limits),
            plan=ATTRIBUTION_SCHEDULE,
            observer=self.observer,
        )

    def _count_pairs(self, placement: Placement) -> int:
        return self.task.inserter.count_pairs(self.task.space.resolve(placement))

    def _pattern_effects(self, bench: AblationTimer) -> tuple[tuple[PartEffect, ...], Interval | None]:
        """Return the effects of each pattern left out and alone, and the row's drop of accuracy against float."""
        space, whole = self.task.space, self.whole
        chosen = set(quantized(whole))
        parts = {group: [i for i in indices if i in chosen] for group, indices in space.groups.items()}
        parts = {group: indices for group, indices in parts.items() if indices}
        rest = {group: without(whole, indices) for group, indices in parts.items()}
        alone = {group: without(whole, list(chosen - set(indices))) for group, indices in parts.items()}
        timed = bench.time(rest, "patterns left out")
        single = bench.time({**alone, FLOAT_ROW: space.float_placement()}, "patterns alone")
        drops = self._accuracy_drops({**rest, "": space.float_placement()})
        operators = self._operators_by_point()
        effects = (
            replace(
                self._part_effect(group, group, timed[group], rest[group], operators),
                alone=_ratio_of(single[FLOAT_ROW], single[group]),
                drop=drops.get(group),
            )
            for group in parts
        )
        return _sort_effects(effects), drops.get("")

    def _accuracy_drops(self, others: Mapping[str, Placement]) -> Mapping[str, Interval]:
        """Return the loss of accuracy of the row against each of the others; empty without a metric."""
        if self.scoring.metric is None:
            return {}
        with open_engines(self._worker(), self.experiment.limits) as engines:
            accountant = AccuracyAblation(
                task=self.task,
                engines=engines,
                observer=self.observer,
                metric=self.scoring.metric,
                higher_is_better=self.scoring.higher_is_better,
            )
            return accountant.measure_drops(self.whole, others)

    def _point_effects(self, bench: AblationTimer, patterns: Sequence[PartEffect]) -> tuple[PartEffect, ...]:
        """Return the effect of each point left out, of the patterns whose effect exceeds the noise."""
        floor = bench.noise_floor
        matter = {e.pattern for e in patterns if e.ratio is not None and abs(e.ratio.value - 1) > floor}
        dimensions = self.task.space.dimensions
        rest = {i: without(self.whole, [i]) for i in quantized(self.whole) if dimensions[i].group in matter}
        timed = bench.time({dimensions[i].name: placement for i, placement in rest.items()}, "points left out")
        operators = self._operators_by_point()
        return _sort_effects(
            self._part_effect(dimensions[i].name, dimensions[i].group, timed[dimensions[i].name], placement, operators)
            for i, placement in rest.items()
        )

    def _part_effect(
        self, part: str, pattern: str, timed: AblationTiming, rest: Placement, operators: Mapping[str, str]
    ) -> PartEffect:
        return PartEffect(
            part=part,
            pattern=pattern,
            operators=operators.get(pattern.partition(".")[0], ""),
            pairs=self._count_pairs(self.whole) - self._count_pairs(rest),
            ratio=timed.ratio,
            reason=timed.reason,
            noise_floor=timed.noise_floor,
        )

    def _operators_by_point(self) -> dict[str, str]:
        """Return the operators of the regions of each group, by its name."""
        patterns = find_patterns(self.task.model, discover_regions(self.task.model))
        names = {group.partition(".")[0] for group in self.task.space.groups}
        return {n: ", ".join(p.operators) for n in names for p in patterns if p.signature.startswith(n)}

    def _minimal_placement(
        self, bench: AblationTimer, patterns: Sequence[PartEffect], points: Sequence[PartEffect], flat: Interval
    ) -> MinimalPlacement:
        """Return the placement with the fewest points that keeps the gain when all steps are timed again together.

        If the float model fails in that timing, its earlier latency ratio `flat` is used.
        """
        dimensions = self.task.space.dimensions
        worth = {e.part: e.ratio.value for e in (*patterns, *points) if e.ratio is not None}
        order = sorted(
            quantized(self.whole),
            key=lambda i: (worth.get(dimensions[i].name, 1.0), worth.get(dimensions[i].group, 1.0)),
        )
        trail, tests = backward_elimination(bench, order)
        steps = {f"{len(quantized(placement))} points": placement for placement in trail}
        timed = bench.time({**steps, FLOAT_ROW: self.task.space.float_placement()}, FEWEST_POINTS_STEP)
        keeping = [(n, r) for n in steps if timed[n].keeps_speed and (r := timed[n].ratio) is not None]
        fewest, ratio = keeping[-1]  # never empty, as the whole placement is the first step
        placement, speedup = steps[fewest], _divide_intervals(timed[FLOAT_ROW].ratio or flat, ratio)
        names = tuple(dimensions[index].name for index in quantized(placement))
        return MinimalPlacement(
            points=names, pairs=self._count_pairs(placement), ratio=ratio, speedup=speedup, tests=tests
        )

    def _layers(self, placement: Placement, name: str) -> tuple[Any, ...]:
        backend = self.task.benchmarkers[MAIN_BENCHMARKER]
        layers = read_layers(backend, self.task.candidate(placement), self.task.work / f"layers-{name}")
        if isinstance(layers, Failed):
            logger.warning("no layers: %s: %s", layers.stage, layers.reason)
            return ()
        return layers


def _sort_effects(effects: Iterable[PartEffect]) -> tuple[PartEffect, ...]:
    """Return the effects, the most valuable first and those without a ratio last."""
    return tuple(sorted(effects, key=lambda e: (e.ratio is None, -(e.ratio.value if e.ratio is not None else 0.0))))


def _speedup_over_float(bench: AblationTimer) -> tuple[Interval, float]:
    """Return the latency of the float model over that of the whole placement, and the noise floor of this step.

    Raises:
        UserError: The float model could not be timed.
    """
    flat = bench.time({FLOAT_ROW: bench.space.float_placement()}, "against float")[FLOAT_ROW]
    if flat.ratio is None:
        raise UserError(
            f"the float model could not be timed in turns with this row ({flat.reason}), so its speedup is unknown: "
            "run the same command again on an idle machine; limits are those of experiment.yaml in the folder"
        )
    return flat.ratio, flat.noise_floor


def _ratio_of(first: AblationTiming, second: AblationTiming) -> Interval | None:
    """Return the latency of the first over that of the second; None if one of them was not timed."""
    return None if first.ratio is None or second.ratio is None else _divide_intervals(first.ratio, second.ratio)


def _divide_intervals(first: Interval, second: Interval) -> Interval:
    """Return the quotient of two ratios with the limits of interval arithmetic."""
    return Interval(value=first.value / second.value, low=first.low / second.high, high=first.high / second.low)
