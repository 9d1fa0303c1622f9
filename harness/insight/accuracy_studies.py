"""Studies of accuracy: one placement with several choices of ranges, scales and recovery steps; figures without labels.

The second study correlates the ranks of label-free figures (agreement, SQNR) with the metric, over random placements.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from harness.accuracy.calibration.ranges import CalibrationBatches
from harness.accuracy.metrics.intervals import drop_estimate
from harness.accuracy.recovery.pipeline import (
    PlacedModel,
    StepGain,
    create_steps,
    leave_float,
    rank_groups,
    recover,
    split_held_out,
)
from harness.accuracy.tools.ptq import TOOLS, ptq_options
from harness.base.errors import UserError
from harness.base.files import explain_write_errors, write_json
from harness.base.progress import Observer
from harness.base.statistics import Interval
from harness.config.sections import PluginSpec
from harness.graph.qdq.import_placement import import_placement
from harness.graph.quantize.numeric_choices import Granularity
from harness.graph.segmented_run import layer_sqnr_db
from harness.measure.records import MAIN_BENCHMARKER, SCHEMA_VERSION, Failed
from harness.plugins.api import Accuracy, Candidate
from harness.report.plots.figures import COLOURS, figure_file
from harness.run.prepare.accuracy import make_scoring
from harness.run.prepare.accuracy_store import AccuracyStore
from harness.run.prepare.initial_design import QuantizationRequest, run_external_tool
from harness.run.prepare.model_loader import evaluator_spec, input_types
from harness.run.prepare.study_task import StudyTask, prepare_study
from harness.run.prepare.task import Task
from harness.run.select.recovery import RECOVERY_STEPS, list_choices, open_placer
from harness.workers.engines import Engines
from harness.workers.helper_process import RUNTIME_FACTOR, call_in_helper_process
from harness.workers.sandbox import open_engines
from search.fixed_placements import FIXED_PLACEMENTS
from search.space import Resolved

PLACEMENT_NAMES = tuple(name for name in FIXED_PLACEMENTS if name != "float")
PLOTTED_SAMPLES = 4
AGREEMENT, FIDELITY = "agreement", "sqnr_db"
FIDELITY_SAMPLES = 32
LABEL_FREE_EVALUATORS = ("agreement", "fidelity")


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


def recovery_report(
    study: StudyTask, request: RecoveryRequest, folder: Path, observer: Observer
) -> tuple[tuple[str, ...], list[tuple[str, ...]], list[str]]:
    """Score a placement with each combination of choices, without and with recovery; return a table with its notes.

    Writes `recovery.json`, the file of each row to `models/`, and the SQNR of each layer to `layers.png`.
    """
    with explain_write_errors(folder):
        (folder / "models").mkdir(parents=True, exist_ok=True)
    task, worker = prepare_study(study, folder, observer)
    if task.cast is not None:
        raise UserError("recovery works on the float model: give --param precision=f32")
    scoring = make_scoring(study.experiment.objective, study.spec.model, task.model, task.work)
    metric, higher = scoring.metric, scoring.higher_is_better
    if metric is None:
        raise UserError("recovery needs an evaluator: give an experiment file whose model has one, or 'fidelity'")
    rows: list[dict[str, Any]] = []
    with open_engines(worker, study.experiment.limits) as engines:
        store = AccuracyStore(folder, engines, observer)
        reference = store.require_float_score(task.model_file)
        cells: list[tuple[str, ...]] = [("float", "", f"{reference.metrics[metric]:.4f}", "", "")]
        for facts, gains, placed in _iter_models(study, task, request, observer):
            path = placed.export(folder / "models" / f"{len(rows)}.onnx")
            score = store.score_file(path, placed.choices.text or "default")
            estimate = None
            if not isinstance(score, Failed):
                estimate = drop_estimate(reference, score, metric, higher_is_better=higher)
            drop = None if estimate is None else estimate.interval
            row, line = _row(facts, gains, placed.choices.text, score, metric, drop)
            rows.append({**row, "file": path.name})
            cells.append(line)
    facts = {"float": reference.metrics[metric], "rows": rows}
    write_json(folder / "recovery.json", {"schema": SCHEMA_VERSION, "kind": "recovery", **facts})
    notes = [
        f"{task.spec.name}: placement {request.placement}, calibrated on {task.calibrated_on}",
        f"files in the order of the rows: {folder}/models",
    ]
    scored = [row for row in rows if not math.isnan(row[metric])]
    whole = [row for row in scored if "samples" not in row]
    best = max(whole, key=lambda row: row[metric] if higher else -row[metric], default=None)
    if best is not None:
        notes.append(f"best: {folder / 'models' / best['file']}")
    if values := [row[metric] for row in scored if "samples" in row]:
        limits = f"{min(values):.4f} to {max(values):.4f}"
        notes.append(f"{metric} by the calibration samples, {len(values)} parts of them: {limits}")
    for group in (group for row in rows for group in row.get("left_float", ())):
        options = " ".join(f"--float-node {name}" for name in group["nodes"] if name) or "the outputs of the model"
        notes.append(f"{group['alone_db']:.1f} dB if only these are quantized: {options}")
    if best is not None and best is not rows[0]:
        files = [folder / "models" / row["file"] for row in (rows[0], best)]
        draw_layer_losses(task, files, folder / "layers.png")
        notes.append(f"loss by layer: {folder}/layers.png")
    header = ("pairs", "recovery", metric, "drop [95 % CI]", "gain of each step on held-out samples")
    return header, cells, notes


def _row(
    facts: Mapping[str, Any],
    gains: Sequence[StepGain],
    choices: str,
    score: Accuracy | Failed,
    metric: str,
    drop: Interval | None,
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the facts of a file, and its line in the table; `drop` is None if it has no interval."""
    figure = math.nan if isinstance(score, Failed) else score.metrics[metric]
    row = {"choices": choices, **facts, "steps": [asdict(gain) for gain in gains], metric: figure}
    text = "-"
    if drop is not None:
        row |= {"drop": drop.value, "drop_low": drop.low, "drop_high": drop.high}
        text = f"{drop.value:+.4f} [{drop.low:+.4f}, {drop.high:+.4f}]"
    groups = facts.get("left_float", ())
    count = f"{sum(len(group['nodes']) for group in groups)} nodes float" if groups else ""
    return row, (
        ", ".join(filter(None, (choices or "default", facts.get("samples"), count))),
        " + ".join(gain.step for gain in gains if gain.kept) or ("none kept" if gains else "-"),
        f"failed: {score.reason}" if isinstance(score, Failed) else f"{figure:.4f}",
        text,
        "; ".join(map(str, gains)),
    )


def _iter_models(
    study: StudyTask, task: Task, request: RecoveryRequest, observer: Observer
) -> Iterator[tuple[dict[str, Any], tuple[StepGain, ...], PlacedModel]]:
    """Yield the placement with each combination of choices, without and with recovery, then for parts of the samples.

    After the combinations, the last file follows again with the groups that cost most left float. The facts that come
    first are "samples", the name of the part, and "left_float", the groups; neither for all samples without groups.
    """
    own, steps = task.choices, create_steps(request.steps or (RECOVERY_STEPS if request.auto else ()))
    if request.auto:
        combinations = list_choices(task)
    else:
        product = itertools.product(
            request.methods or (own.activations,),
            request.weights or (own.weights,),
            request.depthwise or (own.depthwise,),
        )
        combinations = [own, *(replace(own, activations=a, weights=w, depthwise=d) for a, w, d in product)]
        combinations = list(dict.fromkeys(combinations))
    feeds = CalibrationBatches(study.spec.model, task.model, input_types(task.model))
    resolved = _resolve(task, request, feeds, observer)
    placer = open_placer(task, combinations, feeds, feeds.count, observer)
    batches = list(feeds) if steps or request.subsets or request.float_groups else []
    models = placer.place(resolved)
    if request.auto:
        yield {}, (), next(models)
        models = iter([placer.rank(resolved, split_held_out(batches)[1])[0].placed])
    gains: tuple[StepGain, ...] = ()
    for placed in models:
        if not request.auto:
            yield {}, (), placed
        final = placed
        if steps:
            recalibrate = placer.recalibration(placed.choices, batches)
            final, gains = recover(placed, steps, batches, recalibrate, observer)
            yield {}, gains, final
    if request.float_groups:
        groups = rank_groups(final, split_held_out(batches)[1], observer)[: request.float_groups]
        partly = leave_float(final, {name for group in groups for name in group.nodes})
        yield {"left_float": [asdict(group) for group in groups]}, gains, partly
    for k in range(request.subsets):
        part = batches[k :: request.subsets]
        placed = next(open_placer(task, [own], part, len(part), observer).place(resolved))
        yield {"samples": f"samples {k + 1} of {request.subsets}"}, (), placed


def _resolve(task: Task, request: RecoveryRequest, feeds: CalibrationBatches, observer: Observer) -> Resolved:
    """Return the quantized edges of the request's placement: a fixed one, that of a Q/DQ file, or of a tool's file."""
    space, placement, path = task.space, request.placement, Path(request.placement)
    if placement in PLACEMENT_NAMES:
        resolved = space.resolve(FIXED_PLACEMENTS[placement](space, None))
    else:
        if placement in TOOLS:
            tool_request = QuantizationRequest(
                model_file=task.float_file,
                source=task.model.source,
                data=feeds,
                data_key=repr(feeds.cache_key),
                options=ptq_options(feeds.settings, task.dialect, task.spec.precisions[0]),
            )
            result = run_external_tool(placement, tool_request, observer)
            if result.path is None or result.path.suffix != ".onnx":
                raise UserError(f"--placement {placement}: {result.reason or 'it delivers an IR; name nncf_ptq_onnx'}")
            path = result.path
        elif not path.is_file():
            known = ", ".join((*PLACEMENT_NAMES, *TOOLS))
            raise UserError(f"--placement {placement}: no such file, and none of {known}")
        resolved = space.resolve(space.nearest(import_placement(path, task.model)))
    names = {edge.consumer for edge, _ in resolved}
    left_out: set[str] = set()
    for pattern in request.float_nodes:
        if not (found := fnmatch.filter(names, pattern)):
            raise UserError(f"--float-node {pattern}: no quantized node has such a name")
        left_out.update(found)
    return tuple((edge, precision) for edge, precision in resolved if edge.consumer not in left_out)


def draw_layer_losses(task: Task, files: Sequence[Path], path: Path) -> None:
    """Plot the SQNR of each layer's output in the order of the graph, in a file as given and in a recovered one."""
    layers = [node.name for node in task.model.nodes if node.op in task.dialect.linear_ops]
    samples = list(itertools.islice(task.feeds, PLOTTED_SAMPLES))
    what = f"losses by layer of {task.model.source}"
    before, after = (
        call_in_helper_process(what, layer_sqnr_db, task.float_file, file, layers, samples, factor=RUNTIME_FACTOR)
        for file in files
    )
    with figure_file(path, columns=(1,)) as (axes,):
        for label, colour, values in (("as given", COLOURS[1], before), ("recovered", COLOURS[0], after)):
            axes.plot(range(len(values)), list(values.values()), ".-", color=colour, label=label, linewidth=1)
        worst = min(before, key=lambda name: before[name])
        axes.annotate(worst, (list(before).index(worst), before[worst]), fontsize=7, va="top")
        axes.set(
            title=task.spec.model.name, xlabel="layer, in the order of the graph", ylabel="SQNR of its result in dB"
        )
        axes.grid(alpha=0.3)
        axes.legend()


def agreement_report(
    study: StudyTask, placements: int, samples: int, folder: Path, observer: Observer
) -> tuple[tuple[str, ...], list[tuple[str, ...]], list[str]]:
    """Score random placements by the metric, by agreement and by SQNR; return a table with its notes.

    Writes `agreement.json` with the figures of each placement. Each dimension of a placement is quantized with a
    probability drawn for the placement; the placements are of all degrees of quantization, and always the same.

    Args:
        placements: Number of random placements; the last quantizes everything.
        samples: Maximum number of scored samples.
    """
    from scipy.stats import spearmanr

    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    task, worker = prepare_study(study, folder, observer)
    space, evaluators = task.space, _evaluators(study, task, samples)
    rng = np.random.default_rng(0)
    usable = []
    with (
        open_engines(replace(worker, evaluators=evaluators), study.experiment.limits) as engines,
        observer.work("score placements", placements + 1) as step,
    ):
        reference = _score(engines, task.candidate(space.float_placement()), evaluators, prepare=True)
        for share in np.linspace(0, 1, placements + 1)[1:]:
            step.advance()
            placement = space.quantize_dimensions(np.flatnonzero(rng.random(len(space)) < share).tolist())
            if scores := _score(engines, task.candidate(placement), evaluators):
                usable.append(scores)
        step.advance()
    metric = next(iter(reference), "")
    facts = {"metric": metric, "float": reference, "placements": usable}
    write_json(folder / "agreement.json", {"schema": SCHEMA_VERSION, **facts})
    if len(usable) < 3:
        raise UserError(f"only {len(usable)} placements could be scored: a rank correlation needs three")
    better = sorted(usable, key=lambda scores: -scores[metric])[: max(3, len(usable) // 2)]
    rows = []
    for name in (AGREEMENT, FIDELITY):
        ranks = []
        for part in (usable, better):
            pair = np.array([(scores[name], scores[metric]) for scores in part])
            ranks.append(f"{spearmanr(pair).statistic:.2f}" if np.ptp(pair, axis=0).all() else "-")
        worst = min(scores[name] for scores in usable)
        rows.append((name, str(len(usable)), *ranks, f"{reference[name]:.4g}", f"{worst:.4g}"))
    worst = min(scores[metric] for scores in usable)
    figures = f"{metric} of float {reference[metric]:.4f}, of the worst {worst:.4f}"
    header = ("figure", "placements", "rank correlation", "better half", "float", "worst")
    return header, rows, [f"{task.spec.name}: {len(usable)} random placements; {figures}"]


def _evaluators(study: StudyTask, task: Task, samples: int) -> dict[str, PluginSpec]:
    """Return the evaluator of the study, and label-free evaluators on the same samples, by name."""
    given = study.spec.model.evaluator
    if given is None or given.use in LABEL_FREE_EVALUATORS or not isinstance(given.params.get("data"), Mapping):
        raise UserError("the study needs an evaluator whose data have labels, for instance top1 or coco_map")
    data = {**given.params["data"], "count": min(samples, given.params["data"].get("count", samples))}
    unlabelled: dict[str, Any] = {key: given.params[key] for key in ("preprocess",) if key in given.params}
    shared = unlabelled | {key: given.params[key] for key in ("decode", "output") if key in given.params}
    fidelity = {"data": data, **unlabelled, "samples": FIDELITY_SAMPLES, "sqnr_only": True}
    specs = {
        MAIN_BENCHMARKER: given.model_copy(update={"params": {**given.params, "data": data}}),
        AGREEMENT: PluginSpec(use="agreement", params={"data": data, **shared}),
        FIDELITY: PluginSpec(use="fidelity", params=fidelity),
    }
    evaluators = {}
    for name, spec in specs.items():
        model = study.spec.model.model_copy(update={"evaluator": spec})
        if (complete := evaluator_spec(model, task.model, task.work / name)) is not None:
            evaluators[name] = complete
    return evaluators


def _score(
    engines: Engines, candidate: Candidate, evaluators: Mapping[str, PluginSpec], *, prepare: bool = False
) -> dict[str, float]:
    """Return the figures of a candidate by name, the metric first; empty if the candidate fails."""
    built = engines.build(candidate)
    if isinstance(built, Failed):
        return {}
    figures: dict[str, float] = {}
    try:
        for name in evaluators:
            failed = engines.prepare(built.handle, name) if prepare else None
            score = failed or engines.evaluate(built.handle, name)
            if not isinstance(score, Accuracy):
                return {}
            figures |= score.metrics if name != MAIN_BENCHMARKER else dict([next(iter(score.metrics.items()))])
    finally:
        engines.release(built.handle)
    return figures
