"""Rank correlation of label-free figures (agreement, SQNR) with the metric, over placements of one model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from harness.base.errors import UserError
from harness.base.files import explain_write_errors, write_json
from harness.base.progress import Observer
from harness.config.sections import PluginSpec
from harness.measure.records import MAIN_BENCHMARKER, SCHEMA_VERSION, Failed
from harness.plugins.api import Accuracy, Candidate
from harness.run.prepare.model_loader import evaluator_spec
from harness.run.prepare.study_task import StudyTask, prepare_study
from harness.run.prepare.task import Task
from harness.workers.engines import Engines
from harness.workers.sandbox import open_engines

COLUMN_NAMES = ("figure", "placements", "rank correlation", "better half", "float", "worst")
AGREEMENT, FIDELITY = "agreement", "sqnr_db"
FIDELITY_SAMPLES = 32
LABEL_FREE_EVALUATORS = ("agreement", "fidelity")


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
    return COLUMN_NAMES, rows, [f"{task.spec.name}: {len(usable)} random placements; {figures}"]


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
