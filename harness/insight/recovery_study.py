"""Accuracy of one placement with several choices of ranges and scales, with and without recovery steps."""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from harness.accuracy.calibration.calibration_batches import CalibrationBatches
from harness.accuracy.metrics.intervals import drop_estimate
from harness.accuracy.recovery.float_layers import FloatGroup, leave_float, rank_groups
from harness.accuracy.recovery.pipeline import (
    PlacedModel,
    RecoveryStep,
    StepGain,
    create_steps,
    recover,
    split_held_out,
)
from harness.accuracy.tools.catalog import TOOLS
from harness.base.errors import UserError
from harness.base.files import explain_write_errors, write_json
from harness.base.progress import Observer
from harness.base.statistics import Interval
from harness.graph.qdq.import_placement import import_placement
from harness.graph.quantize.numeric_choices import Granularity, NumericChoices
from harness.graph.segmented_run import layer_sqnr_db
from harness.insight.reports import draw_layer_losses
from harness.measure.records import SCHEMA_VERSION, Failed
from harness.plugins.api import Accuracy
from harness.run.prepare.accuracy import Scoring, make_scoring
from harness.run.prepare.accuracy_store import AccuracyStore
from harness.run.prepare.external_tools import QuantizationRequest, run_external_tool
from harness.run.prepare.model_loader import input_types
from harness.run.prepare.placed_models import RECOVERY_STEPS, list_choices, open_placer
from harness.run.prepare.study_task import StudyTask, prepare_study
from harness.run.prepare.task import Task
from harness.workers.helper_process import RUNTIME_FACTOR, call_in_helper_process
from harness.workers.sandbox import open_engines
from search.fixed_placements import FIXED_PLACEMENTS
from search.space import Resolved

PLACEMENT_NAMES = tuple(name for name in FIXED_PLACEMENTS if name != "float")
PLOTTED_SAMPLES = 4
COLUMN_NAMES = ("pairs", "recovery", "{metric}", "drop [95 % CI]", "gain of each step on held-out samples")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryRequest:
    """Choices whose combinations are scored in addition to the choices of the study.

    Attributes:
        placement: An element of `PLACEMENT_NAMES`, a PTQ tool that is run, or a Q/DQ file that was made from the model.
        float_nodes: Wildcards of nodes that stay float.
        methods: Range estimators of activations; empty, also for `weights` and `depthwise`: that of the study.
        steps: Names of recovery steps, in order.
        subsets: Number of parts of the calibration samples; the study's own choices are also calibrated on each part.
        auto: Whether only two files are scored: the study's own choices, and those that gain on calibration samples.
        float_groups: Number of groups of nodes, those that cost most, left float in an additional file; 0: no file.
    """

    placement: str = "linear"
    float_nodes: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    depthwise: tuple[Granularity, ...] = ()
    steps: tuple[str, ...] = ()
    subsets: int = 0
    auto: bool = False
    float_groups: int = 0

    def combinations(self, own: NumericChoices) -> list[NumericChoices]:
        """Return all combinations of choices, those of the study (`own`) first."""
        product = itertools.product(
            self.methods or (own.activations,), self.weights or (own.weights,), self.depthwise or (own.depthwise,)
        )
        combinations = [replace(own, activations=a, weights=w, depthwise=d) for a, w, d in product]
        return list(dict.fromkeys([own, *combinations]))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """File of the placement with one choice of scales and steps.

    Attributes:
        subset: Name of the part of the calibration samples; "" for all samples.
        groups: Groups of nodes that are left float because they cost most.
        drop: Loss of the metric relative to the float model; None if it has no interval.
    """

    choices: NumericChoices
    subset: str
    gains: tuple[StepGain, ...]
    path: Path
    score: Accuracy | Failed
    drop: Interval | None = None
    groups: tuple[FloatGroup, ...] = ()


def recovery_report(
    study: StudyTask, request: RecoveryRequest, folder: Path, observer: Observer
) -> tuple[tuple[str, ...], list[tuple[str, ...]], list[str]]:
    """Score a placement with each combination of choices, without and with recovery; return a table with its notes.

    Writes `recovery.json`, the file of each row to `models/`, and the SQNR of each layer to `layers.png`.

    Args:
        study: Model, backend, calibration data and evaluator.
        folder: Folder of the written files.

    Raises:
        UserError: The study cannot be used, has no evaluator, or needs a cast model.
    """
    with explain_write_errors(folder):
        (folder / "models").mkdir(parents=True, exist_ok=True)
    task, worker = prepare_study(study, folder, observer)
    if task.cast is not None:
        raise UserError("recovery works on the float model: give --param precision=f32")
    scoring = make_scoring(study.experiment.objective, study.spec.model, task.model, task.work)
    if scoring.metric is None:
        raise UserError("recovery needs an evaluator: give an experiment file whose model has one, or 'fidelity'")
    steps = create_steps(request.steps or (RECOVERY_STEPS if request.auto else ()))
    with open_engines(worker, study.experiment.limits) as engines:
        store = AccuracyStore(folder, engines, observer)
        reference = store.require_float_score(task.model_file)
        rows: list[_Row] = []
        for subset, gains, placed, groups in _iter_models(study, task, request, steps, observer):
            path = placed.export(folder / "models" / f"{len(rows)}.onnx")
            score = store.score_file(path, placed.choices.text or "default")
            drop = _drop(scoring, reference, score)
            row = _Row(
                choices=placed.choices, subset=subset, gains=gains, path=path, score=score, drop=drop, groups=groups
            )
            rows.append(row)
    best = _best_row([row for row in rows if not row.subset], scoring.metric, higher_is_better=scoring.higher_is_better)
    plotted = [] if best is None else _plot_layers(task, rows[0], best, folder)
    header = tuple(name.format(metric=scoring.metric) for name in COLUMN_NAMES)
    figure = f"{reference.metrics[scoring.metric]:.4f}"
    _write_rows(rows, scoring.metric, reference, folder / "recovery.json")
    cells = [("float", "", figure, "", ""), *(_cells(row, scoring.metric) for row in rows)]
    notes = [
        f"{task.spec.name}: placement {request.placement}, calibrated on {task.calibrated_on}",
        f"files in the order of the rows: {folder}/models",
        *([] if best is None else [f"best: {best.path}"]),
        *_subset_note(rows, scoring.metric),
        *(_describe_group(group) for row in rows for group in row.groups),
        *plotted,
    ]
    return header, cells, notes


def _best_row(rows: Sequence[_Row], metric: str, *, higher_is_better: bool) -> _Row | None:
    """Return the row with the best metric, the first of equal ones, or None if no file was scored."""
    figures = {index: row.score.metrics[metric] for index, row in enumerate(rows) if isinstance(row.score, Accuracy)}
    sign = 1 if higher_is_better else -1
    return rows[max(figures, key=lambda index: sign * figures[index])] if figures else None


def _plot_layers(task: Task, first: _Row, best: _Row, folder: Path) -> Iterator[str]:
    """Plot the SQNR of each layer in the first and in the best file, and yield a note; nothing if they are the same."""
    if best is first:
        return
    layers = [node.name for node in task.model.nodes if node.op in task.dialect.linear_ops]
    samples = list(itertools.islice(task.feeds, PLOTTED_SAMPLES))
    what = f"losses by layer of {task.model.source}"
    before, after = (
        call_in_helper_process(what, layer_sqnr_db, task.float_file, row.path, layers, samples, factor=RUNTIME_FACTOR)
        for row in (first, best)
    )
    draw_layer_losses(before, after, task.spec.model.name, folder / "layers.png")
    yield f"loss by layer: {folder}/layers.png"


def _iter_models(
    study: StudyTask, task: Task, request: RecoveryRequest, steps: Mapping[str, RecoveryStep], observer: Observer
) -> Iterator[tuple[str, tuple[StepGain, ...], PlacedModel, tuple[FloatGroup, ...]]]:
    """Yield the placement with each combination of choices, without and with recovery, then for parts of the samples.

    After the combinations, the last file follows again with the groups that cost most left float.
    """
    combinations = list_choices(task) if request.auto else request.combinations(task.choices)
    feeds = CalibrationBatches(study.spec.model, task.model, input_types(task.model))
    resolved = _resolve(task, request, feeds, observer)
    placer = open_placer(task, combinations, feeds, feeds.count, observer)
    batches = list(feeds) if steps or request.subsets or request.float_groups else []
    models = placer.place(resolved)
    if request.auto:
        yield "", (), next(models), ()
        models = iter([placer.rank(resolved, split_held_out(batches)[1])[0].placed])
    gains: tuple[StepGain, ...] = ()
    for placed in models:
        if not request.auto:
            yield "", (), placed, ()
        final = placed
        if steps:
            recalibrate = placer.recalibration(placed.choices, batches)
            final, gains = recover(placed, steps, batches, recalibrate, observer)
            yield "", gains, final, ()
    if request.float_groups:
        groups = tuple(rank_groups(final, split_held_out(batches)[1], observer)[: request.float_groups])
        yield "", gains, leave_float(final, {name for group in groups for name in group.nodes}), groups
    for k in range(request.subsets):
        part = batches[k :: request.subsets]
        placed = next(open_placer(task, [task.choices], part, len(part), observer).place(resolved))
        yield f"samples {k + 1} of {request.subsets}", (), placed, ()


def _resolve(task: Task, request: RecoveryRequest, feeds: CalibrationBatches, observer: Observer) -> Resolved:
    space = task.space
    if request.placement in PLACEMENT_NAMES:
        resolved = space.resolve(FIXED_PLACEMENTS[request.placement](space, None))
    else:
        file = _tool_file(task, request.placement, feeds, observer)
        resolved = space.resolve(space.nearest(import_placement(file, task.model)))
    names = {edge.consumer for edge, _ in resolved}
    for pattern in request.float_nodes:
        if not fnmatch.filter(names, pattern):
            raise UserError(f"--float-node {pattern}: no quantized node has such a name")
    left_out = {name for pattern in request.float_nodes for name in fnmatch.filter(names, pattern)}
    return tuple((edge, precision) for edge, precision in resolved if edge.consumer not in left_out)


def _tool_file(task: Task, placement: str, feeds: CalibrationBatches, observer: Observer) -> Path:
    """Return the Q/DQ file that a placement names, or run the tool of this name and return its file.

    Raises:
        UserError: There is no such file or tool, or the tool failed.
    """
    if placement not in TOOLS:
        if not Path(placement).is_file():
            names = ", ".join((*PLACEMENT_NAMES, *TOOLS))
            raise UserError(f"--placement {placement}: no such file, and none of {names}")
        return Path(placement)
    options = feeds.ptq_options(task.dialect, task.spec.precisions[0])
    request = QuantizationRequest(
        model_file=task.float_file,
        source=task.model.source,
        data=feeds,
        data_key=repr(feeds.cache_key),
        options=options,
    )
    result = run_external_tool(placement, request, observer)
    if result.path is None or result.path.suffix != ".onnx":
        raise UserError(f"--placement {placement}: {result.reason or 'it delivers an IR; name nncf_ptq_onnx'}")
    return result.path


def _describe_group(group: FloatGroup) -> str:
    """Return the nodes of a group as options `--float-node`, with the SQNR if only they are quantized."""
    options = " ".join(f"--float-node {name}" for name in group.nodes if name) or "the outputs of the model"
    return f"{group.alone_db:.1f} dB if only these are quantized: {options}"


def _subset_note(rows: Sequence[_Row], metric: str) -> Iterator[str]:
    """Yield a note about the variation of the metric between parts of the calibration samples."""
    values = [row.score.metrics[metric] for row in rows if row.subset and isinstance(row.score, Accuracy)]
    if values:
        limits = f"{min(values):.4f} to {max(values):.4f}"
        yield f"{metric} by the calibration samples, {len(values)} parts of them: {limits}"


def _drop(scoring: Scoring, reference: Accuracy, score: Accuracy | Failed) -> Interval | None:
    if isinstance(score, Failed) or scoring.metric is None:
        return None
    estimate = drop_estimate(reference, score, scoring.metric, higher_is_better=scoring.higher_is_better)
    return None if estimate is None else estimate.interval


def _cells(row: _Row, metric: str) -> tuple[str, ...]:
    score = row.score
    figure = f"failed: {score.reason}" if isinstance(score, Failed) else f"{score.metrics[metric]:.4f}"
    drop = "-" if row.drop is None else f"{row.drop.value:+.4f} [{row.drop.low:+.4f}, {row.drop.high:+.4f}]"
    steps = " + ".join(gain.step for gain in row.gains if gain.kept) or ("none kept" if row.gains else "-")
    return (
        ", ".join(filter(None, (row.choices.text or "default", row.subset, _count_float(row)))),
        steps,
        figure,
        drop,
        "; ".join(map(str, row.gains)),
    )


def _count_float(row: _Row) -> str:
    return f"{sum(len(group.nodes) for group in row.groups)} nodes float" if row.groups else ""


def _write_rows(rows: Sequence[_Row], metric: str, reference: Accuracy, path: Path) -> None:
    facts = [
        {
            "choices": row.choices.text,
            **({"samples": row.subset} if row.subset else {}),
            **({"left_float": [asdict(group) for group in row.groups]} if row.groups else {}),
            "file": row.path.name,
            "steps": [
                {"step": g.step, "before_db": g.before_db, "after_db": g.after_db, "kept": g.kept} for g in row.gains
            ],
            metric: math.nan if isinstance(row.score, Failed) else row.score.metrics[metric],
            **(
                {}
                if row.drop is None
                else {"drop": row.drop.value, "drop_low": row.drop.low, "drop_high": row.drop.high}
            ),
        }
        for row in rows
    ]
    content = {"schema": SCHEMA_VERSION, "kind": "recovery", "float": reference.metrics[metric], "rows": facts}
    write_json(path, content)
