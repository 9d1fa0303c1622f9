"""Recovery in a run: placements that are faster than the incumbent and miss the bound get another chance.

What the Q/DQ pairs contain and corrected biases may regain the accuracy of a placement at the same latency. So, under a
bound, the fastest placements that missed it are given other range estimators, scales by channel and recovery steps.
Files that then keep the bound on the images of the search are timed with the incumbents in the final selection.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.accuracy.recovery.pipeline import (
    Feeds,
    PlacedModel,
    StepGain,
    create_steps,
    recover,
    split_held_out,
)
from harness.api import Accuracy
from harness.errors import CandidateError, UserError
from harness.graph.io.files import digest_file
from harness.graph.qdq.qdq_graph import count_pairs
from harness.pipeline.task_run import TaskRun
from harness.records import SCHEMA_VERSION
from harness.results_dir.artifacts import RECOVERY_FILE, recovered_row
from harness.results_dir.io import explain_write_errors, read_json, write_json
from harness.results_dir.journal import read_journal
from harness.search_loop.journal_reader import Evaluation, iter_evaluations
from harness.search_loop.objective import PREDICTED_METRIC, is_feasible
from harness.task_setup.methods import WarmStartModel, is_external_searcher
from harness.task_setup.placed_models import RECOVERY_STEPS, ModelPlacer, list_choices, open_placer
from harness.verification.accuracy_store import AccuracyStore
from search.space import Placement

__all__ = ["near_misses", "recovered_models"]

MAX_NEAR_MISSES = 2
"""Of a task; each costs about a minute."""
MAX_LOST_SHARE = 0.6
"""A placement that lost a larger share of the float model's figure is broken, and not near the bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """Model of a placement with its contents and steps."""

    placed: PlacedModel
    gains: tuple[StepGain, ...] = ()

    @property
    def label(self) -> str:
        kept = [gain.step for gain in self.gains if gain.kept]
        return ", ".join(filter(None, [self.placed.choices.text, *kept])) or "as given"


def recovered_models(running: TaskRun, book: AccuracyStore) -> dict[str, tuple[WarmStartModel, ...]]:
    """Return the recovered models within the bound by the name of the search that found their placement.

    Writes `recovery.json`; the files are in the scratch folder of the task, from which the finalists are exported.

    Raises:
        UserError: The disk is full.
    """
    goal, task = running.judge.goal, running.task
    raced = goal.minimize == "latency" and running.experiment.confirmation.candidates > 1
    bounded = goal.metric is not None and goal.max_drop is not None and running.experiment.objective.recover
    if not (raced and bounded) or running.checker is None or task.cast is not None:
        return {}
    misses = near_misses(running)
    chosen = list({miss.digest: miss for found in misses.values() for miss in found}.values())[:MAX_NEAR_MISSES]
    known = _read_known(running)
    if any(miss.digest not in known for miss in chosen) and _has_time(running):
        known |= _recover_all(running, book, [miss for miss in chosen if miss.digest not in known])
    return {
        name: tuple(model for miss in found if (model := _known_model(known.get(miss.digest), miss)) is not None)
        for name, found in misses.items()
    }


def near_misses(running: TaskRun) -> dict[str, list[Evaluation]]:
    """Return, of each search, the placements that miss the bound and are faster than its incumbent beyond the noise.

    At most two: the fastest, and of the others the one with the smallest loss.
    """
    goal, found = running.judge.goal, dict[str, list[Evaluation]]()
    for run in running.task.spec.runs if len(running.task.searched_space) else ():
        if is_external_searcher(run.searcher):
            continue
        trials = list(iter_evaluations(read_journal(running.folder / "runs" / f"{run.name}.jsonl"), goal))
        best_ms = min((trial.latency_ms for trial in trials if is_feasible(trial.score)), default=math.inf)
        missed = {
            trial.digest: trial
            for trial in sorted(trials, key=lambda trial: -trial.latency_ms)
            if trial.score.violation > 0
            and trial.latency_ms * (1 + running.noise_floor) < best_ms
            and _loss(running, trial) <= MAX_LOST_SHARE * abs(goal.reference)
        }
        ordered = sorted(missed.values(), key=lambda trial: trial.latency_ms)
        closest = sorted(ordered[1:], key=lambda trial: _loss(running, trial))
        found[run.name] = [*ordered[:1], *closest[:1]]
    return found


def _loss(running: TaskRun, trial: Evaluation) -> float:
    goal, metrics = running.judge.goal, trial.score.metrics
    value = metrics.get(goal.metric or "", metrics.get(PREDICTED_METRIC))
    return math.inf if value is None else goal.loss(value)


def _recover_all(running: TaskRun, book: AccuracyStore, misses: Sequence[Evaluation]) -> dict[str, dict[str, Any]]:
    task, started_s = running.task, time.monotonic()
    batches = list(task.feeds)
    try:
        split_held_out(batches)
        placer = open_placer(task, list_choices(task), batches, len(batches), running.observer)
    except UserError as error:
        running.observer.say(f"{task.spec.name}: nothing is recovered: {error}")
        return {}
    running.scoring.prepare_evaluators(book, task.model_file)
    with running.observer.work(f"{task.spec.name}: recover placements", len(misses)) as step:
        for miss in misses:
            if not _has_time(running):
                running.observer.say(f"{task.spec.name}: no time is left to recover {miss.digest}")
                break
            facts = _recover(running, book, placer, miss, batches)
            ended_s = time.monotonic()
            _write_known(running, miss.digest, {**facts, "seconds": round(ended_s - started_s, 1)})
            started_s = ended_s  # the first one has the calibration
            step.advance(facts["label"])
    return _read_known(running)


def _has_time(running: TaskRun) -> bool:
    return running.limit is None or running.limit.allows_recovery


def _recover(
    running: TaskRun, book: AccuracyStore, placer: ModelPlacer, miss: Evaluation, batches: Sequence[Feeds]
) -> dict[str, Any]:
    """Return the record of a placement: the first attempt within the bound, or the one with the smallest loss."""
    goal, folder = running.judge.goal, running.task.work / "recovered"
    tried: list[tuple[float, dict[str, Any]]] = []
    for attempt in _iter_attempts(running, placer, miss, batches):
        with explain_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            path = attempt.placed.export(folder / f"{miss.digest}-{len(tried)}.onnx")
        score = book.score_file(path, attempt.label, running.judge.evaluator)
        value = score.metrics.get(goal.metric or "", math.nan) if isinstance(score, Accuracy) else math.nan
        loss = goal.loss(value) if math.isfinite(value) else math.inf
        gains = [
            {"step": g.step, "before_db": g.before_db, "after_db": g.after_db, "kept": g.kept} for g in attempt.gains
        ]
        facts = {"label": attempt.label, "steps": gains, "loss_before": _loss(running, miss), "loss": loss,
                 "file": path.name, "sha256": digest_file(path), "within": goal.loss_excess(loss) == 0}  # fmt: skip
        tried.append((loss, facts))
        if facts["within"] or not _has_time(running):
            break
    return min(tried, key=lambda pair: pair[0])[1] if tried else {"label": "nothing to try", "within": False}


def _iter_attempts(
    running: TaskRun, placer: ModelPlacer, miss: Evaluation, batches: Sequence[Feeds]
) -> Iterator[_Attempt]:
    """Yield the contents closest to the float model with recovery and without it, then the next closest."""
    resolved = running.task.space.resolve(Placement(miss.choices))
    with suppress(UserError, CandidateError):  # ONNX Runtime may not run a model: nothing is recovered then
        ranked = placer.rank(resolved, split_held_out(batches)[1])
        recalibrate = placer.recalibration(ranked[0].choices, batches)
        placed, gains = recover(ranked[0], create_steps(RECOVERY_STEPS), batches, recalibrate, running.observer)
        if any(gain.kept for gain in gains):
            yield _Attempt(placed=placed, gains=gains)
        yield from (_Attempt(placed=each) for each in ranked[:2])


def _known_model(facts: Mapping[str, Any] | None, miss: Evaluation) -> WarmStartModel | None:
    if facts is None or not facts["within"]:
        return None
    path, name = Path(facts["path"]), recovered_row(facts["sha256"])
    return WarmStartModel(digest=name, placement_digest=miss.digest, path=path, pairs=count_pairs(path))


def _read_known(running: TaskRun) -> dict[str, dict[str, Any]]:
    """Return the records of placements by digest, of which the files are still there."""
    path = running.folder / RECOVERY_FILE
    known = read_json(path)["placements"] if path.exists() else {}
    found = {}
    for digest, facts in known.items():
        file = running.task.work / "recovered" / facts.get("file", "")
        if not facts["within"]:
            found[digest] = facts
        elif file.is_file() and digest_file(file) == facts["sha256"]:
            found[digest] = {**facts, "path": str(file)}
    return found


def _write_known(running: TaskRun, digest: str, facts: Mapping[str, Any]) -> None:
    path = running.folder / RECOVERY_FILE
    known = read_json(path)["placements"] if path.exists() else {}
    write_json(path, {"schema": SCHEMA_VERSION, "placements": {**known, digest: dict(facts)}})
