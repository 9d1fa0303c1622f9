"""Attribution of a row's speed to the parts of its placement, measured on this machine."""

from __future__ import annotations

import hashlib
import logging
import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from harness.accuracy.metrics.intervals import drop_estimate
from harness.base.errors import UserError
from harness.base.progress import Observer
from harness.base.statistics import MIN_CLAIMED_GAIN, Interval, noise_floor_from_ratios
from harness.config.experiment import PTQ_TOOLS, Experiment, load_experiment, plan_tasks
from harness.config.sections import Confirmation, PluginSpec
from harness.graph.partition.patterns import find_patterns
from harness.graph.partition.regions import discover_regions
from harness.insight.model_report import iter_edge_fusions, read_layers
from harness.measure.records import MAIN_BENCHMARKER, Failed
from harness.measure.turn_log import TWIN, TurnMatrix, summarize_turns
from harness.plugins import registry
from harness.plugins.api import Accuracy
from harness.report.frames import main_frame
from harness.report.report_table import frame_rows
from harness.report.trace import find_main_row
from harness.results.artifacts import FLOAT_ROW, ExportedModel, recovered_row
from harness.results.folder import Results, TaskResults, load
from harness.results.journal import read_journal
from harness.results.task_files import AttributionReport, MeasuredStep, MinimalPlacement, PartEffect
from harness.run.confirm.confirmation import EngineFactory, PairedComparison, TimedRow, run_comparison
from harness.run.prepare.accuracy import Scoring, make_scoring
from harness.run.prepare.accuracy_store import AccuracyStore
from harness.run.prepare.task import SHAPES_FILE_NAME, Task, compose_task, make_shape_set
from harness.workers.engines import WorkerSpec
from harness.workers.sandbox import open_engines
from search.space import Placement

ATTRIBUTION_SCHEDULE = Confirmation(builds=3, rounds=10, samples=3)
WHOLE_PLACEMENT = "whole"
FEWEST_POINTS_STEP = "the fewest points"
MAX_ELIMINATION_TESTS = 150  # placements that the search for the fewest points may build
logger = logging.getLogger(__name__)


def attribute_row(folder: Path, where: str, *, base: Path, observer: Observer) -> tuple[AttributionReport, Path]:
    """Measure the gain of each pattern and of points of relevant patterns, and find the fewest points that keep it.

    Args:
        where: A row of the main table: its number, method, id, or TASK/METHOD. Of a file that recovery made, the
            placement it was made from is measured.
        base: Folder that relative paths of the experiment start from.

    Returns:
        The report, and the folder of the row's task.
    """
    experiment = load_experiment(folder / "experiment.yaml", base)
    results, row, method, placement, recovery = find_explained_row(load(folder), where, experiment)
    spec = next((spec for spec in plan_tasks(experiment) if spec.name == results.name), None)
    if spec is None:
        raise UserError(f"{folder / 'experiment.yaml'}: has no task {results.name!r}")
    ranges = (start for start in experiment.initial if start.params.get("ranges"))  # otherwise the scales would differ
    bare = experiment.model_copy(update={"initial": (PluginSpec(use="float"), *ranges), "baselines": ()})
    with tempfile.TemporaryDirectory(prefix="qdq-explain-") as work:
        task = compose_task(bare, spec, Path(work), observer)
        space = hashlib.sha256(repr(task.space.dimensions).encode()).hexdigest()[:16]
        for key, what, current in (
            ("model_sha256", "model", task.model.sha256),
            ("space", "space of placements", space),
        ):
            recorded = results.facts.get(key)
            if recorded is not None and current != recorded:
                raise UserError(
                    f"{results.folder}: the {what} has changed ({current[:12]}, was {str(recorded)[:12]}), so the row "
                    "cannot be explained: run the experiment again"
                )
        if (known := results.folder / SHAPES_FILE_NAME).exists():
            shutil.copy(known, work)
        backend = spec.backend  # at the float precision of the recorded baseline
        facts = registry.create_plugin("benchmarker", backend.use, backend.params).describe()
        pinned = facts.get("float_params", {}).get(str(results.facts["backend"].get("float_precision")), {})
        backend = backend.model_copy(update={"params": {**backend.params, **pinned}})
        task = task.with_benchmarkers({MAIN_BENCHMARKER: backend})
        scoring = make_scoring(experiment.objective, spec.model, task.model, task.work)
        worker = WorkerSpec(
            benchmarkers=task.benchmarkers,
            workdir=task.work,
            evaluators=scoring.evaluators,
            adapt=make_shape_set(task, Path(work), partial(open_engines, limits=experiment.limits), observer),
            sizes=task.sizes,
        )
        timer = AblationTimer(
            task=task,
            whole=placement,
            open_engines=partial(open_engines, worker, experiment.limits),
            observer=observer,
        )
        return _attribute(timer, scoring, row, method, recovery), results.folder


def find_explained_row(
    results: Results, where: str, experiment: Experiment
) -> tuple[TaskResults, ExportedModel, str, Placement, str]:
    """Return the task, file, method and placement of a row, and from what placement recovery made it, or "".

    Args:
        where: ROW of `harness.report.trace.find_main_row`, or the digest of a recovered placement.
    """
    lines = frame_rows(main_frame(results))
    selected = where
    for each in results.tasks:
        name = where.removeprefix(f"{each.name}/")
        ids = (name, recovered_row(each.recovery.get(name, {}).get("sha256", "")))
        # Several searches may have chosen the same file, whose explanation is the same.
        alike = [n for n, line in enumerate(lines, 1) if line["task"] == each.name and line["row"] in ids]
        if alike and name != FLOAT_ROW and any(row in each.rows for row in ids):
            selected = str(alike[0])
            break
    line = find_main_row(results, selected)
    task, method = results.task(str(line["task"])), str(line["method"])
    row = task.rows.get(str(line["row"]))
    is_float = row is not None and row.id == FLOAT_ROW and method != FLOAT_ROW
    if is_float or (row is not None and row.choices and not any(row.choices)):
        raise UserError(
            f"{where}: nothing faster was found, so this row is the float model itself, without a placement to explain"
        )
    placement, recovery = (None, "") if row is None else _placement(task, row)
    tools = {*PTQ_TOOLS, *(start.name for start in experiment.initial if start.use == "import")}
    is_tool_file = row is not None and row.id in tools and row.id != method
    if row is None or placement is None or is_tool_file:
        named = []
        for each_line in lines:
            other = results.task(each_line["task"])
            known = other.rows.get(each_line["row"])
            choices = _placement(other, known)[0] if known is not None and known.timed else None
            if choices is not None and any(choices.choices):
                method_name = str(each_line["method"])
                named.append(method_name if len(results.tasks) == 1 else f"{other.name}/{method_name}")
        shown = ", ".join(dict.fromkeys(named))
        advice = f"explain another one: {shown}" if named else "no row of this folder has one"
        if row is not None and is_tool_file:
            raise UserError(
                f"{where}: its choice is the file of {row.id} as that tool made it, whose parts cannot be left out: "
                f"{advice}"
            )
        raise UserError(f"{where}: the placement of this row is not recorded ({method}): {advice}")
    if not row.timed:
        raise UserError(f"{where}: this device only emulates {line['precision']}, so its latency is not measured")
    return task, row, method, placement, recovery


def _placement(task: TaskResults, row: ExportedModel) -> tuple[Placement | None, str]:
    """Return the placement of a row, and a note if its file was recovered from this placement."""
    if row.choices:
        return Placement(row.choices), ""
    made_from = ((d, facts) for d, facts in task.recovery.items() if recovered_row(facts.get("sha256", "")) == row.id)
    digest, facts = next(made_from, ("", {}))
    proposals = (entry.proposal for search in task.searches if digest for entry in read_journal(search.path))
    choices = next((proposal.choices for proposal in proposals if proposal.digest == digest), None)
    if choices is None or not any(choices):
        return None, ""
    return Placement(choices), f"placement {digest}, {facts.get('label')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationTiming:
    """Latency of a placement relative to the whole one.

    Attributes:
        ratio: Latency over that of the whole placement; None if it could not be timed.
        reason: Why it could not be timed, or "".
        noise_floor: Relative loss of speed that noise explains in its step.
        tolerance: Largest relative loss of a placement that keeps the speed: the noise floor of its step, or the median
            of the steps until then if that is smaller, so that a disturbed step does not accept slow placements.
    """

    ratio: Interval | None = None
    reason: str = ""
    noise_floor: float = MIN_CLAIMED_GAIN
    tolerance: float = MIN_CLAIMED_GAIN

    @property
    def keeps_speed(self) -> bool:
        """Return whether the placement is as fast as the whole one within noise."""
        return self.ratio is not None and self.ratio.value <= 1 + self.tolerance


@dataclass(slots=True, kw_only=True)
class AblationTimer:
    """Timer of placements in turns with the whole placement, on fresh builds like a confirmation.

    Attributes:
        steps: Measured steps so far.
        whole_ms: Latency of the whole placement by the first readings; None before.
    """

    task: Task
    whole: Placement
    open_engines: EngineFactory
    observer: Observer
    steps: list[MeasuredStep] = field(default_factory=list)
    whole_ms: float | None = None

    @property
    def noise_floor(self) -> float:
        """Return the median noise floor of the steps, on which a disturbed step has no influence."""
        return float(np.median([step.noise_floor for step in self.steps]))

    def time(self, placements: Mapping[str, Placement], title: str) -> dict[str, AblationTiming]:
        """Return the timing of each placement by name, or why it failed; those of the same graph are timed once.

        The results are appended to `steps` under `title`.
        """
        digests = {name: self.task.space.digest(placement) for name, placement in placements.items()}
        tested = {digests[name]: placement for name, placement in placements.items()}
        tested.pop(self.task.space.digest(self.whole), None)
        rows = tuple(TimedRow(name=digest, candidate=self.task.candidate(each)) for digest, each in tested.items())
        baseline = TimedRow(name=WHOLE_PLACEMENT, candidate=self.task.candidate(self.whole))
        comparison = PairedComparison(name=title, baseline=baseline, rows=rows, schedule=ATTRIBUTION_SCHEDULE)
        events = run_comparison(comparison, self.open_engines, self.observer)
        summary = summarize_turns(events, baseline=WHOLE_PLACEMENT)
        own, twins = TurnMatrix(events).paired_samples(TWIN, WHOLE_PLACEMENT)
        aa_ratios = tuple(float(np.median(np.divide(one, two))) for one, two in zip(own, twins, strict=True))
        if self.whole_ms is None and WHOLE_PLACEMENT in summary.rows:
            self.whole_ms = summary.rows[WHOLE_PLACEMENT].latency_ms.value
        timed = {}
        for digest in tested:
            row = summary.rows.get(digest)
            if digest in summary.failed:
                failed = summary.failed[digest]
                timed[digest] = AblationTiming(reason=f"{failed.stage}: {failed.reason}")
            elif row is None or row.builds_ok < 2:
                timed[digest] = AblationTiming(reason="no readings")
            else:
                ratio = Interval(value=1 / row.speedup.value, low=1 / row.speedup.high, high=1 / row.speedup.low)
                timed[digest] = AblationTiming(ratio=ratio)
        same = AblationTiming(ratio=Interval(value=1.0, low=1.0, high=1.0))
        found = {name: timed.get(digest, same) for name, digest in digests.items()}
        floor = max(MIN_CLAIMED_GAIN, noise_floor_from_ratios(aa_ratios))
        ratios = {name: timing.ratio for name, timing in found.items() if timing.ratio is not None}
        self.steps.append(MeasuredStep(title=title, noise_floor=floor, aa_ratios=aa_ratios, ratios=ratios))
        tolerance = min(floor, self.noise_floor)
        return {name: replace(timing, noise_floor=floor, tolerance=tolerance) for name, timing in found.items()}

    def count_pairs(self, placement: Placement) -> int:
        """Return the number of Q/DQ pairs of a placement."""
        return self.task.inserter.count_pairs(self.task.space.resolve(placement))


def quantized(placement: Placement) -> list[int]:
    """Return the dimensions that a placement quantizes."""
    return [index for index, choice in enumerate(placement.choices) if choice]


def without(placement: Placement, indices: Sequence[int]) -> Placement:
    """Return the placement with these dimensions at float."""
    removed = set(indices)
    return Placement(tuple(0 if index in removed else choice for index, choice in enumerate(placement.choices)))


def _attribute(
    timer: AblationTimer, scoring: Scoring, row: ExportedModel, method: str, recovery: str
) -> AttributionReport:
    """Measure and return the attribution; see `attribute_row`."""
    task, whole, space = timer.task, timer.whole, timer.task.space
    nothing, chosen = space.float_placement(), quantized(whole)
    float_turns = timer.time({FLOAT_ROW: nothing}, "against float")[FLOAT_ROW]
    if float_turns.ratio is None:
        raise UserError(
            f"the float model could not be timed with this row; its speedup is unknown ({float_turns.reason}): "
            "run the same command again on an idle machine; limits are those of experiment.yaml in the folder"
        )
    parts = {group: [i for i in indices if i in chosen] for group, indices in space.groups.items()}
    parts = {group: indices for group, indices in parts.items() if indices}
    patterns = _part_effects(timer, parts, "patterns left out")
    alone = {group: without(whole, [i for i in chosen if i not in indices]) for group, indices in parts.items()}
    single = timer.time({**alone, FLOAT_ROW: nothing}, "patterns alone")
    drops = _accuracy_drops(
        timer, scoring, {**{group: without(whole, indices) for group, indices in parts.items()}, "": nothing}
    )
    for index, effect in enumerate(patterns):
        first, second = single[FLOAT_ROW].ratio, single[effect.part].ratio
        gain = None if first is None or second is None else _divide_intervals(first, second)
        patterns[index] = replace(effect, alone=gain, drop=drops.get(effect.part))
    floor = timer.noise_floor
    relevant = {e.pattern for e in patterns if e.ratio is not None and abs(e.ratio.value - 1) > floor}
    single_points = {space.dimensions[i].name: [i] for i in chosen if space.dimensions[i].group in relevant}
    points = _part_effects(timer, single_points, "points left out")
    faster = float_turns.ratio.low > 1 + float_turns.noise_floor
    minimal = _minimal_placement(timer, [*patterns, *points], float_turns.ratio) if faster else None
    layers = {}
    for name, placement in (("b", nothing), ("a", whole)):
        read = read_layers(task.benchmarkers[MAIN_BENCHMARKER], task.candidate(placement), task.work / f"layers-{name}")
        if isinstance(read, Failed):
            logger.warning("no layers: %s: %s", read.stage, read.reason)
        layers[name] = () if isinstance(read, Failed) else read
    return AttributionReport(
        row=row.id,
        sha256=row.sha256,
        method=method,
        pairs=timer.count_pairs(whole),
        speedup=float_turns.ratio,
        noise_floor=timer.noise_floor,
        patterns=tuple(patterns),
        points=tuple(points),
        minimal=minimal,
        before=layers["b"],
        after=layers["a"],
        edges=tuple(iter_edge_fusions(task.edges_in_file(space.resolve(whole)), task.cast or task.model, layers["a"])),
        latency_ms=timer.whole_ms,
        metric=scoring.metric,
        drop=drops.get(""),
        steps=tuple(timer.steps),
        recovery=recovery,
    )


def _part_effects(timer: AblationTimer, parts: Mapping[str, Sequence[int]], title: str) -> list[PartEffect]:
    """Return the effect of each part left out, the most valuable first and those without a ratio last."""
    space, whole = timer.task.space, timer.whole
    rest = {name: without(whole, indices) for name, indices in parts.items()}
    timed = timer.time(rest, title)
    known = find_patterns(timer.task.model, discover_regions(timer.task.model))
    effects = []
    for name, indices in parts.items():
        group = space.dimensions[indices[0]].group
        signature = group.partition(".")[0]
        effects.append(
            PartEffect(
                part=name,
                pattern=group,
                operators=next((", ".join(p.operators) for p in known if p.signature.startswith(signature)), ""),
                pairs=timer.count_pairs(whole) - timer.count_pairs(rest[name]),
                ratio=timed[name].ratio,
                reason=timed[name].reason,
                noise_floor=timed[name].noise_floor,
            )
        )
    return sorted(effects, key=lambda e: math.inf if e.ratio is None else -e.ratio.value)


def _accuracy_drops(timer: AblationTimer, scoring: Scoring, others: Mapping[str, Placement]) -> dict[str, Interval]:
    """Return the loss of the whole placement against each of the others that can be scored, in the metric's unit.

    A loss is positive if the whole placement is worse, for any direction of the metric; there is none without a metric,
    or if the whole placement cannot be scored. Limits are 95 %, by the paired bootstrap over images; NaN without
    results of single images.
    """
    task, metric = timer.task, scoring.metric
    if metric is None:
        return {}
    drops: dict[str, Interval] = {}
    own: Accuracy | None = None
    title = "accuracy without each pattern"
    with timer.open_engines() as engines, timer.observer.work(title, len(others) + 1) as step:
        store = AccuracyStore(task.work, engines, timer.observer)
        float_score = store.float_score(task.model_file)  # some evaluators must be prepared with the float model
        for name, placement in {WHOLE_PLACEMENT: timer.whole, **others}.items():
            candidate = task.candidate(placement)
            row = ExportedModel(id=candidate.digest, file="", sha256=candidate.digest, pairs=len(candidate.edges))
            score = store.score_row(candidate, row) if candidate.edges else float_score
            step.advance()
            if isinstance(score, Failed):
                logger.warning("%s is not scored: %s: %s", candidate.digest, score.stage, score.reason)
                if own is None:
                    break
            elif own is None:
                own = score
            else:
                estimate = drop_estimate(score, own, metric, higher_is_better=scoring.higher_is_better)
                loss = (score.metrics[metric] - own.metrics[metric]) * (1 if scoring.higher_is_better else -1)
                bare = Interval(value=loss, low=math.nan, high=math.nan)
                drops[name] = bare if estimate is None else estimate.interval
    return drops


def _minimal_placement(timer: AblationTimer, effects: Sequence[PartEffect], earlier: Interval) -> MinimalPlacement:
    """Return the placement with the fewest points that keeps the gain when all steps are timed again together.

    If the float model fails in that timing, its earlier latency ratio `earlier` is used.
    """
    dimensions = timer.task.space.dimensions
    worth = {effect.part: effect.ratio.value for effect in effects if effect.ratio is not None}
    order = sorted(
        quantized(timer.whole),
        key=lambda i: (worth.get(dimensions[i].name, 1.0), worth.get(dimensions[i].group, 1.0)),
    )
    trail, tests = backward_elimination(timer, order)
    steps = {f"{len(quantized(placement))} points": placement for placement in trail}
    timed = timer.time({**steps, FLOAT_ROW: timer.task.space.float_placement()}, FEWEST_POINTS_STEP)
    keeping = [(steps[n], r) for n in steps if timed[n].keeps_speed and (r := timed[n].ratio) is not None]
    placement, ratio = keeping[-1]  # never empty, as the whole placement is the first step
    return MinimalPlacement(
        points=tuple(dimensions[index].name for index in quantized(placement)),
        pairs=timer.count_pairs(placement),
        ratio=ratio,
        speedup=_divide_intervals(timed[FLOAT_ROW].ratio or earlier, ratio),
        tests=tests,
    )


def backward_elimination(timer: AblationTimer, order: Sequence[int]) -> tuple[list[Placement], int]:
    """Return placements with fewer and fewer quantized dimensions that are as fast as the whole one within noise.

    Delta debugging (Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", IEEE Transactions on
    Software Engineering 28, 2002): ever smaller chunks are left out; those that can be left out alone are left out
    together if that holds too, else the one that costs least. All tests of a step are timed in turns with the whole
    placement, so that small losses do not accumulate. As the best of many noisy tests are selected by chance, too, the
    results must be timed again together before they are reported.

    Args:
        order: The dimensions, least valuable first, so that early chunks consist of useless ones.

    Returns:
        The placements, the whole one first, and the number of placements built to find them.
    """
    kept, chunks, tests = list(order), min(8, len(order)), 0
    steps = [timer.whole]
    while kept and tests < MAX_ELIMINATION_TESTS:
        parts = [part.tolist() for part in np.array_split(kept, chunks) if len(part)]
        free = _removable_parts(timer, kept, parts)
        tests += len(parts)
        if len(free) > 1:
            tests += 1
            free = _removable_parts(timer, kept, [[index for *_, part in free for index in part]]) or free
        if free:
            removed = set(min(free)[-1])
            kept = [index for index in kept if index not in removed]
            steps.append(without(timer.whole, [index for index in order if index not in set(kept)]))
            chunks = min(max(2, chunks - 1), len(kept)) or 1
        elif chunks >= len(kept):
            break
        else:
            chunks = min(2 * chunks, len(kept))
    return steps, tests


def _removable_parts(
    timer: AblationTimer, kept: Sequence[int], parts: Sequence[list[int]]
) -> list[tuple[int, float, list[int]]]:
    """Return the parts without which the speed is kept, each after minus its length and its latency ratio."""
    gone = [index for index in quantized(timer.whole) if index not in set(kept)]
    names = [", ".join(timer.task.space.dimensions[index].name for index in part) for part in parts]
    placements = {name: without(timer.whole, [*gone, *part]) for name, part in zip(names, parts, strict=True)}
    timed = timer.time(placements, f"fewest points, {len(kept)} left")
    return [
        (-len(part), ratio.value, part)
        for name, part in zip(names, parts, strict=True)
        if timed[name].keeps_speed and (ratio := timed[name].ratio) is not None
    ]


def _divide_intervals(first: Interval, second: Interval) -> Interval:
    """Return the quotient of two ratios with the limits of interval arithmetic."""
    return Interval(value=first.value / second.value, low=first.low / second.high, high=first.high / second.low)
