"""Recovery in a run: more accurate files of its fastest placements, and estimates of their losses.

Other scales and corrected biases may regain the accuracy of a placement at the same latency. So, under a bound, the
fastest placements within it, and the fastest that miss it, get other range estimators, scales by channel and recovery
steps. If the file still misses the bound, the nodes that cost most accuracy are left float. Files that then keep the
bound on the images of the search are timed with the incumbents in the final selection. Each file, with and without
recovery, has an estimated loss, which decides between files that are equally fast, and excludes those that are expected
to miss the bound on other images.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from harness.accuracy.metrics.intervals import drop_estimate
from harness.accuracy.recovery.float_layers import FloatGroup, leave_float, rank_groups
from harness.accuracy.recovery.pipeline import (
    Feeds,
    PlacedModel,
    StepGain,
    create_steps,
    measure_sqnr_db,
    recover,
    split_held_out,
)
from harness.api import Accuracy
from harness.errors import CandidateError, UserError
from harness.graph.io.digests import digest_file
from harness.graph.qdq.qdq_graph import count_pairs
from harness.pipeline.task_run import TaskRun
from harness.records import SCHEMA_VERSION, Failed
from harness.results_dir.artifacts import RECOVERY_FILE, recovered_row
from harness.results_dir.io import explain_write_errors, read_json, write_json
from harness.results_dir.journal import read_journal
from harness.search_loop.journal_reader import Evaluation, iter_evaluations
from harness.search_loop.objective import PREDICTED_METRIC, Goal, is_feasible
from harness.selection.cross_fitting import MeasuredLoss, estimate_losses
from harness.statistics import stderr_from_interval
from harness.task_setup.methods import WarmStartModel, is_external_searcher
from harness.task_setup.placed_models import RECOVERY_STEPS, ModelPlacer, list_choices, open_placer
from harness.verification.accuracy_store import AccuracyStore
from search.space import Placement, edges_digest

MAX_NEAR_MISSES = 2
"""Largest number of placements of a search that miss the bound and are recovered."""
MAX_WITHIN = 2
"""Largest number of placements of a search within the bound that are recovered."""
MAX_RECOVERED = 4
"""Largest number of recovered placements of a task; each takes up to a minute."""
FLOAT_COUNTS = (1, 2, 4, 8, 16)
"""Numbers of groups of nodes that are left float if a recovered placement still misses the bound. With more groups a
file is rarely faster than the float model."""
MAX_LOST_SHARE = 0.6
"""Largest loss, as a share of the float model's metric, of a placement that is recovered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Recovered models of a task, and estimated losses of its finalists.

    Attributes:
        models: Models within the bound on the images of the search, by the name of the search.
        losses: Estimated loss of the metric by row, for recovered models and for their placements without recovery; see
            `harness.selection.cross_fitting`.
    """

    models: Mapping[str, tuple[WarmStartModel, ...]] = field(default_factory=dict)
    losses: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """Model of a placement with its contents and steps.

    Attributes:
        sqnr_db: SQNR of the outputs on held-out calibration samples, in dB.
        gains: Effect of each recovery step.
        left_float: Groups of nodes that are left float.
    """

    placed: PlacedModel
    sqnr_db: float
    gains: tuple[StepGain, ...] = ()
    left_float: tuple[FloatGroup, ...] = ()

    @property
    def label(self) -> str:
        kept = [gain.step for gain in self.gains if gain.kept]
        left = sum(len(group.nodes) for group in self.left_float)
        float_nodes = f"{left} nodes float" if left else ""
        return ", ".join(filter(None, [self.placed.choices.text, *kept, float_nodes])) or "as given"


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScoredFile:
    """File of an attempt with its loss on the images of the search; infinite without a score."""

    attempt: _Attempt
    path: Path
    loss: float
    stderr: float

    def facts(self, *, within: bool) -> dict[str, Any]:
        """Return the record of the file as JSON values; `within`: whether it keeps the bound."""
        steps = [asdict(gain) for gain in self.attempt.gains]
        left_float = [asdict(group) for group in self.attempt.left_float]
        return {
            "label": self.attempt.label,
            "steps": steps,
            **({"left_float": left_float} if left_float else {}),
            "loss": self.loss,
            "stderr": self.stderr,
            "sqnr_db": self.attempt.sqnr_db,
            "file": self.path.name,
            "sha256": digest_file(self.path),
            "within": within,
        }


def recover_placements(running: TaskRun, book: AccuracyStore) -> Recovery:
    """Recover the fastest placements of a task near its bound, and estimate the losses of all files.

    Writes `recovery.json`; the files are in the scratch folder of the task, from which the finalists are exported. The
    result is empty without a bound, or if recovery is switched off.

    Raises:
        UserError: The disk is full.
    """
    goal, task = running.judge.goal, running.task
    raced = goal.minimize == "latency" and running.experiment.confirmation.candidates > 1
    bounded = goal.metric is not None and goal.max_drop is not None and running.experiment.objective.recover
    if not (raced and bounded) or running.checker is None or task.cast is not None:
        return Recovery()
    trials = {
        run.name: list(iter_evaluations(read_journal(running.folder / "runs" / f"{run.name}.jsonl"), goal))
        for run in (task.spec.runs if len(task.searched_space) else ())
        if not is_external_searcher(run.searcher)
    }
    wanted = {name: placements_to_recover(running, found) for name, found in trials.items()}
    chosen = list({trial.digest: trial for found in wanted.values() for trial in found}.values())[:MAX_RECOVERED]
    known = _read_known(running)
    if any(trial.digest not in known for trial in chosen) and _has_time(running):
        known |= _recover_all(running, book, [trial for trial in chosen if trial.digest not in known])
    models = {
        name: tuple(model for trial in found if (model := _known_model(known.get(trial.digest), trial)) is not None)
        for name, found in wanted.items()
    }
    measured = {trial.digest: _loss(running, trial) for trial in chain(*trials.values()) if is_feasible(trial.score)}
    return Recovery(models=models, losses=measured | estimated if (estimated := _estimate_losses(known)) else {})


def placements_to_recover(running: TaskRun, trials: Iterable[Evaluation]) -> list[Evaluation]:
    """Return the placements of a search that may win after recovery.

    These are the fastest ones within the bound. Of those that miss the bound and are faster than the incumbent by more
    than the noise floor, they are the fastest and the one with the smallest loss.
    """
    ordered = sorted(trials, key=lambda trial: trial.latency_ms)
    within = list({trial.digest: trial for trial in ordered if is_feasible(trial.score)}.values())
    best_ms = min((trial.latency_ms for trial in within), default=math.inf)
    missed = {
        trial.digest: trial
        for trial in ordered
        if trial.score.violation > 0
        and trial.latency_ms * (1 + running.noise_floor) < best_ms
        and _loss(running, trial) <= MAX_LOST_SHARE * abs(running.judge.goal.reference)
    }
    fastest = [*missed.values()]
    closest = sorted(fastest[1:], key=lambda trial: _loss(running, trial))
    quantized = [trial for trial in within if trial.digest != edges_digest(())]
    return [*fastest[:1], *closest[: MAX_NEAR_MISSES - 1], *quantized[:MAX_WITHIN]]


def _loss(running: TaskRun, trial: Evaluation) -> float:
    goal, metrics = running.judge.goal, trial.score.metrics
    value = metrics.get(goal.metric or "", metrics.get(PREDICTED_METRIC))
    return math.inf if value is None else goal.loss(value)


def _recover_all(running: TaskRun, book: AccuracyStore, trials: Sequence[Evaluation]) -> dict[str, dict[str, Any]]:
    task, started_s = running.task, time.monotonic()
    batches = list(task.feeds)
    try:
        split_held_out(batches)
        placer = open_placer(task, list_choices(task), batches, len(batches), running.observer)
    except UserError as error:
        running.observer.say(f"{task.spec.name}: nothing is recovered: {error}")
        return {}
    running.scoring.prepare_evaluators(book, task.model_file)
    with running.observer.work(f"{task.spec.name}: recover placements", len(trials)) as step:
        for trial in trials:
            if not _has_time(running):
                running.observer.say(f"{task.spec.name}: no time is left to recover {trial.digest}")
                break
            facts = _recover(running, book, placer, trial, batches)
            ended_s = time.monotonic()
            _write_known(running, trial.digest, {**facts, "seconds": round(ended_s - started_s, 1)})
            started_s = ended_s  # the first one has the calibration
            step.advance(facts["label"])
    return _read_known(running)


def _has_time(running: TaskRun) -> bool:
    return running.limit is None or running.limit.allows_recovery


def _recover(
    running: TaskRun, book: AccuracyStore, placer: ModelPlacer, trial: Evaluation, batches: Sequence[Feeds]
) -> dict[str, Any]:
    """Recover a placement, and return its record with the first file expected to keep the bound, or the best file.

    The placement without recovery is scored too, so that both files have a loss with a standard error.
    """
    goal, folder, competes = running.judge.goal, running.task.work / "recovered", is_feasible(trial.score)
    scored: list[_ScoredFile] = []
    for attempt in _iter_attempts(running, placer, trial, batches):
        with explain_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            path = attempt.placed.export(folder / f"{trial.digest}-{len(scored)}.onnx")
        loss, stderr = _score(running, book, path, attempt.label)
        scored.append(_ScoredFile(attempt=attempt, path=path, loss=loss, stderr=stderr))
        if len(scored) > 1 and (competes or not _has_time(running) or _expected_within(scored, goal)[-1]):
            break
    facts: dict[str, Any] = {"loss_before": _loss(running, trial), "label": "nothing to try", "within": False}
    if scored:
        given = scored[0]
        facts |= {"loss_before": given.loss, "stderr_before": given.stderr, "sqnr_db_before": given.attempt.sqnr_db}
        within, expected = [goal.loss_excess(file.loss) == 0 for file in scored], _expected_within(scored, goal)
        first = 0 if within[0] and not competes else 1  # the proxy predicted a loss that is too large
        best = min(range(first, len(scored)), key=lambda i: (not expected[i], scored[i].loss), default=None)
        facts |= {} if best is None else scored[best].facts(within=within[best])
    return {key: value for key, value in facts.items() if not isinstance(value, float) or math.isfinite(value)}


def _expected_within(scored: Sequence[_ScoredFile], goal: Goal) -> list[bool]:
    """Return for each file whether both its measured and its estimated loss keep the bound."""
    expected = [file.loss for file in scored]
    known = [i for i, file in enumerate(scored) if math.isfinite(file.loss + file.stderr)]
    estimated = estimate_losses(
        [MeasuredLoss(loss=scored[i].loss, stderr=scored[i].stderr, sqnr_db=scored[i].attempt.sqnr_db) for i in known]
    )
    for i, loss in zip(known, estimated, strict=True):
        expected[i] = max(loss, expected[i])
    return [goal.loss_excess(loss) == 0 for loss in expected]


def _score(running: TaskRun, book: AccuracyStore, path: Path, label: str) -> tuple[float, float]:
    """Return the loss of a file on the images of the search, and its standard error; infinite without a score."""
    goal, evaluator = running.judge.goal, running.judge.evaluator
    metric, score = goal.metric or "", book.score_file(path, label, evaluator)
    value = score.metrics.get(metric, math.nan) if isinstance(score, Accuracy) else math.nan
    if isinstance(score, Failed) or not math.isfinite(value):
        return math.inf, math.inf
    reference = book.require_float_score(running.task.model_file, evaluator)
    drop = drop_estimate(reference, score, metric, higher_is_better=goal.higher_is_better)
    return goal.loss(value), math.inf if drop is None else stderr_from_interval(drop.interval)


def _iter_attempts(
    running: TaskRun, placer: ModelPlacer, trial: Evaluation, batches: Sequence[Feeds]
) -> Iterator[_Attempt]:
    """Yield files of a placement: as given, with recovery steps, with other choices of scales, and partly float.

    The last are recovered models with increasing numbers of groups left float, the groups that cost most first.
    """
    resolved, (_, held) = running.task.space.resolve(Placement(trial.choices)), split_held_out(batches)
    with suppress(UserError, CandidateError):  # ONNX Runtime may not run a model: nothing is recovered then
        ranked = placer.rank(resolved, held)
        given = next(each for each in ranked if each.placed.choices == running.task.choices)
        yield _Attempt(placed=given.placed, sqnr_db=given.sqnr_db)
        recalibrate = placer.recalibration(ranked[0].placed.choices, batches)
        placed, gains = recover(ranked[0].placed, create_steps(RECOVERY_STEPS), batches, recalibrate, running.observer)
        kept = [gain.after_db for gain in gains if gain.kept]
        if kept:
            yield _Attempt(placed=placed, gains=gains, sqnr_db=kept[-1] or 0.0)
        yield from (_Attempt(placed=each.placed, sqnr_db=each.sqnr_db) for each in ranked[:2] if each is not given)
        groups = rank_groups(placed, held, running.observer)
        for chosen in _iter_float_groups(groups):
            partly = leave_float(placed, {name for group in chosen for name in group.nodes})
            (sqnr_db,) = measure_sqnr_db([partly], held)
            yield _Attempt(placed=partly, gains=gains, sqnr_db=sqnr_db, left_float=chosen)


def _iter_float_groups(groups: Sequence[FloatGroup]) -> Iterator[tuple[FloatGroup, ...]]:
    """Yield increasing sets of groups to leave float, each without and with the groups at the outputs, but never all.

    Errors of the groups at the outputs are not attenuated, and a metric may lose more by them than the SQNR shows: the
    boxes and scores of a detector share a scale there.
    """
    last = tuple(group for group in groups if group.at_outputs)
    others = tuple(group for group in groups if not group.at_outputs)
    sets = [last, *chain.from_iterable((others[:count], last + others[:count]) for count in FLOAT_COUNTS)]
    yield from (chosen for chosen in dict.fromkeys(sets) if 0 < len(chosen) < len(groups))


def _estimate_losses(known: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the estimated losses of recovered models and of their placements without recovery, by row."""
    files: dict[str, MeasuredLoss] = {}
    for digest, facts in known.items():
        rows = {digest: "_before", **({recovered_row(facts["sha256"]): ""} if "sha256" in facts else {})}
        for row, suffix in rows.items():
            figures = [facts.get(f"{name}{suffix}", math.inf) for name in ("loss", "stderr", "sqnr_db")]
            if all(map(math.isfinite, figures)):
                loss, stderr, sqnr_db = figures
                files[row] = MeasuredLoss(loss=loss, stderr=stderr, sqnr_db=sqnr_db)
    return dict(zip(files, estimate_losses([*files.values()]), strict=True))


def _known_model(facts: Mapping[str, Any] | None, trial: Evaluation) -> WarmStartModel | None:
    if facts is None or not facts["within"]:
        return None
    path, name = Path(facts["path"]), recovered_row(facts["sha256"])
    return WarmStartModel(digest=name, placement_digest=trial.digest, path=path, pairs=count_pairs(path))


def _read_known(running: TaskRun) -> dict[str, dict[str, Any]]:
    """Return the records of placements whose files still exist, by digest."""
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
    placements = {**(read_json(path)["placements"] if path.exists() else {}), digest: dict(facts)}
    estimated = _estimate_losses(placements)
    write_json(path, {"schema": SCHEMA_VERSION, "placements": placements, "estimated_losses": estimated})
