"""Rank correlation of label-free figures (agreement, SQNR) with the metric, over placements of one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from search.space import Placement, Space

COLUMN_NAMES = ("figure", "placements", "rank correlation", "better half", "float", "worst")
AGREEMENT, FIDELITY = "agreement", "sqnr_db"
FIDELITY_SAMPLES = 32
LABEL_FREE_EVALUATORS = ("agreement", "fidelity")
Scores = Mapping[str, float]


def agreement_report(
    study: StudyTask, placements: int, samples: int, folder: Path, observer: Observer
) -> tuple[tuple[str, ...], list[tuple[str, ...]], list[str]]:
    """Score random placements by the metric, by agreement and by SQNR; return a table with its notes.

    Writes `agreement.json` with the figures of each placement. Each dimension of a placement is quantized with a
    probability drawn for the placement.

    Args:
        study: Model, backend and evaluator.
        placements: Number of random placements.
        samples: Maximum number of scored samples.
        folder: Folder of `agreement.json` and scratch files.

    Raises:
        UserError: The study cannot be used, or has no evaluator with labels.
    """
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    task, worker = prepare_study(study, folder, observer)
    evaluators = _evaluators(study, task, samples)
    scored: list[Scores] = []
    with (
        open_engines(replace(worker, evaluators=evaluators), study.experiment.limits) as engines,
        observer.work("score placements", placements + 1) as step,
    ):
        reference = _score(engines, task.candidate(task.space.float_placement()), evaluators, prepare=True)
        for placement in random_placements(task.space, placements):
            step.advance()
            scored.append(_score(engines, task.candidate(placement), evaluators))
        step.advance()
    usable = [scores for scores in scored if scores]
    metric = next(iter(reference), "")
    write_json(
        folder / "agreement.json",
        {"schema": SCHEMA_VERSION, "metric": metric, "float": reference, "placements": usable},
    )
    if len(usable) < 3:
        raise UserError(f"only {len(usable)} placements could be scored: a rank correlation needs three")
    rows = [_row(name, metric, usable, reference) for name in (AGREEMENT, FIDELITY)]
    note = (
        f"{task.spec.name}: {len(usable)} random placements; {metric} of float {reference[metric]:.4f}, of the worst "
    )
    return COLUMN_NAMES, rows, [f"{note}{min(scores[metric] for scores in usable):.4f}"]


def _evaluators(study: StudyTask, task: Task, samples: int) -> dict[str, PluginSpec]:
    """Return the evaluator of the study, and label-free evaluators on the same samples, by name."""
    given = study.spec.model.evaluator
    if given is None or given.use in LABEL_FREE_EVALUATORS or not isinstance(given.params.get("data"), Mapping):
        raise UserError("the study needs an evaluator whose data have labels, for instance top1 or coco_map")
    data = {**given.params["data"], "count": min(samples, given.params["data"].get("count", samples))}
    shared: dict[str, Any] = {
        key: given.params[key] for key in ("preprocess", "decode", "output") if key in given.params
    }
    unlabelled = {"data": data} | {key: value for key, value in shared.items() if key == "preprocess"}
    specs = {
        MAIN_BENCHMARKER: given.model_copy(update={"params": {**given.params, "data": data}}),
        AGREEMENT: PluginSpec(use="agreement", params={"data": data, **shared}),
        FIDELITY: PluginSpec(use="fidelity", params=unlabelled | {"samples": FIDELITY_SAMPLES, "sqnr_only": True}),
    }
    evaluators = {}
    for name, spec in specs.items():
        model = study.spec.model.model_copy(update={"evaluator": spec})
        if (complete := evaluator_spec(model, task.model, task.work / name)) is not None:
            evaluators[name] = complete
    return evaluators


def random_placements(space: Space, count: int) -> list[Placement]:
    """Return `count` placements of all degrees of quantization, always the same; the last quantizes everything."""
    rng = np.random.default_rng(0)
    shares = np.linspace(0, 1, count + 1)[1:]
    return [space.quantize_dimensions(np.flatnonzero(rng.random(len(space)) < share).tolist()) for share in shares]


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


def _row(name: str, metric: str, found: Sequence[Scores], reference: Scores) -> tuple[str, ...]:
    from scipy.stats import spearmanr

    better = sorted(found, key=lambda scores: -scores[metric])[: max(3, len(found) // 2)]
    pairs = [np.array([(scores[name], scores[metric]) for scores in part]) for part in (found, better)]
    ranks = [spearmanr(pair).statistic if np.ptp(pair, axis=0).all() else np.nan for pair in pairs]
    worst = min(scores[name] for scores in found)
    return (
        name,
        str(len(found)),
        *("-" if np.isnan(rank) else f"{rank:.2f}" for rank in ranks),
        f"{reference[name]:.4g}",
        f"{worst:.4g}",
    )
