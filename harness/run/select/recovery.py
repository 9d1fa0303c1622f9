"""Recovery of accuracy after the searches: other scales and weights for the fastest placements near the bound.

Other scales and corrected biases may regain accuracy at the same latency. So the fastest placements within the bound,
and the fastest that miss it, get other range estimators, scales by channel and recovery steps. If a file still misses
the bound, the nodes that cost most accuracy are left float. Files that then keep the bound on the images of the search
compete with the incumbents in the final selection. Each file, with and without recovery, gets an estimated loss, which
decides between files that are equally fast, and excludes files that are expected to miss the bound on other images.

A placement that is surely within the bound needs no recovery, nor does one that is slower than such a file. Recovery
takes at most about as long as the searches. The record has the reason why a placement was not recovered.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

from harness.accuracy.metrics.intervals import drop_estimate, surely_within
from harness.accuracy.recovery.pipeline import Feeds, split_held_out
from harness.base.errors import UserError
from harness.base.files import explain_write_errors, read_json
from harness.base.statistics import stderr_from_interval
from harness.graph.io.digests import digest_file
from harness.graph.qdq.qdq_graph import count_pairs
from harness.measure.records import SCHEMA_VERSION, Failed
from harness.plugins.api import Accuracy
from harness.results.artifacts import NOT_TRIED, RECOVERY_FILE, recovered_row
from harness.results.cross_fitting import estimate_losses, estimate_recorded_losses
from harness.results.journal import read_journal
from harness.results.manifest import write_record
from harness.results.search_log import PREDICTED_METRIC, Evaluation, Goal, is_feasible, iter_evaluations
from harness.run.prepare.accuracy import AccuracyStore
from harness.run.prepare.methods import WarmStartModel, is_external_searcher
from harness.run.prepare.placed_models import ModelPlacer, RecoveryAttempt, iter_attempts, list_choices, open_placer
from harness.run.task_run import TaskRun
from search.space import Placement, edges_digest

MAX_NEAR_MISSES = 2
"""Largest number of placements of a search that miss the bound and are recovered."""
MAX_WITHIN = 2
"""Largest number of placements of a search within the bound that are recovered."""
MAX_RECOVERED = 4
"""Largest number of recovered placements of a task."""
MIN_RECOVERY_S = 120.0
"""No other recovery starts after this time, or after the time that the searches took if it is longer."""
OUT_OF_TIME = f"{NOT_TRIED}: the time for recovery is over"
FASTER_AND_WITHIN = "is faster and surely within the bound"
MAX_LOST_SHARE = 0.6
"""Largest loss, as a share of the float model's metric, of a placement that is recovered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Recovered models of a task, and estimated losses of its finalists.

    Attributes:
        models: Models within the bound on the images of the search, by the name of the search.
        losses: Estimated loss of the metric by row, for recovered models and for their placements without recovery; see
            `harness.results.cross_fitting`.
    """

    models: Mapping[str, tuple[WarmStartModel, ...]] = field(default_factory=dict)
    losses: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loss:
    """Loss on the images of the search with its standard error; infinite without a score.

    Attributes:
        surely_within: Whether the loss keeps the bound with a probability of at least `SURELY_WITHIN`.
    """

    loss: float = math.inf
    stderr: float = math.inf
    surely_within: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScoredFile:
    """File of an attempt with its score on the images of the search."""

    attempt: RecoveryAttempt
    path: Path
    score: _Loss

    def facts(self, *, within: bool) -> dict[str, Any]:
        """Return the record of the file for `recovery.json`; `within` says whether it keeps the bound."""
        steps = [asdict(gain) for gain in self.attempt.gains]
        left_float = [asdict(group) for group in self.attempt.left_float]
        return {
            "label": self.attempt.label,
            "steps": steps,
            **({"left_float": left_float} if left_float else {}),
            **asdict(self.score),
            "sqnr_db": self.attempt.sqnr_db,
            "file": self.path.name,
            "sha256": digest_file(self.path),
            "within": within,
        }


def recover_placements(running: TaskRun, store: AccuracyStore) -> Recovery:
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
    by_search = {name: placements_to_recover(running, found) for name, found in trials.items()}
    selected = list({trial.digest: trial for found in by_search.values() for trial in found}.values())[:MAX_RECOVERED]
    records = _read_known(running)
    missing = sorted((trial for trial in selected if trial.digest not in records), key=lambda trial: trial.latency_ms)
    if missing:
        search_s = sum(max(trial.elapsed_s for trial in found) for found in trials.values() if found)
        records |= _recover_all(running, store, missing, by_search.values(), max(MIN_RECOVERY_S, search_s))
    models = {
        name: tuple(model for trial in found if (model := _known_model(records.get(trial.digest), trial)) is not None)
        for name, found in by_search.items()
    }
    measured = {trial.digest: _loss(running, trial) for trial in chain(*trials.values()) if is_feasible(trial.score)}
    return Recovery(
        models=models, losses=measured | estimated if (estimated := estimate_recorded_losses(records)) else {}
    )


def placements_to_recover(running: TaskRun, trials: Iterable[Evaluation]) -> list[Evaluation]:
    """Return the placements of a search that may win after recovery, see the module's docstring.

    The first ones miss the bound, lose at most `MAX_LOST_SHARE`, and are faster than the best one within the bound by
    more than the noise floor: the fastest, then those with the smallest loss, at most `MAX_NEAR_MISSES` in all. Then
    come the `MAX_WITHIN` fastest quantized placements within the bound.
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


def _recover_all(
    running: TaskRun,
    store: AccuracyStore,
    trials: Sequence[Evaluation],
    searches: Collection[Sequence[Evaluation]],
    limit_s: float,
) -> dict[str, dict[str, Any]]:
    """Recover placements, the fastest first, and return the records of all.

    Args:
        running: The task after its searches.
        store: Store of the task's scores.
        trials: Placements without a record.
        searches: Placements that each search wants to be recovered.
        limit_s: Seconds after which no other recovery starts.
    """
    task, started_s = running.task, time.monotonic()
    ended_s, batches = started_s, list(task.feeds)

    def has_time() -> bool:
        return (running.limit is None or running.limit.allows_recovery) and time.monotonic() < started_s + limit_s

    @cache
    def placer() -> ModelPlacer | str:
        """Return the placer, or the reason why there is none."""
        try:
            split_held_out(batches)
            return open_placer(task, list_choices(task), batches, len(batches), running.observer)
        except UserError as error:
            running.observer.say(f"{task.spec.name}: no placement is recovered: {error}")
            return str(error)

    if has_time():
        running.scoring.prepare_evaluators(store, task.model_file)
    with running.observer.work(f"{task.spec.name}: recover placements", len(trials)) as step:
        for trial in trials:
            untried: dict[str, Any] = {"loss_before": _loss(running, trial), "label": OUT_OF_TIME, "within": False}
            facts = _needs_none(running, store, _read_known(running), trial, searches) if has_time() else untried
            if not facts:
                opened = placer()
                if isinstance(opened, str):
                    facts = {**untried, "label": f"{NOT_TRIED}: {opened}"}
                else:
                    facts = _recover(running, store, opened, trial, batches, has_time)
            seconds, ended_s = time.monotonic() - ended_s, time.monotonic()  # the first one has the calibration
            _write_known(running, trial.digest, {**facts, "seconds": round(seconds, 1)})
            step.advance(facts["label"])
    return _read_known(running)


def _needs_none(
    running: TaskRun,
    store: AccuracyStore,
    known: Mapping[str, Mapping[str, Any]],
    trial: Evaluation,
    searches: Collection[Sequence[Evaluation]],
) -> dict[str, Any]:
    """Return the record of a placement that needs no recovery, with the reason as its label, or an empty one."""
    top_k = running.experiment.confirmation.top_k

    def fastest(search: Sequence[Evaluation]) -> list[str]:
        faster = (each for each in search if each.latency_ms * (1 + running.noise_floor) < trial.latency_ms)
        return [each.digest for each in faster if known.get(each.digest, {}).get("surely_within", False)][:top_k]

    faster_files = [fastest(search) for search in searches if any(each.digest == trial.digest for each in search)]
    before = {"loss_before": _loss(running, trial), "within": False}
    if all(len(each) == top_k for each in faster_files):
        return {**before, "label": f"{NOT_TRIED}: {faster_files[0][0]} {FASTER_AND_WITHIN}"}
    if is_feasible(trial.score):
        resolved = running.task.space.resolve(Placement(trial.choices))
        path = _export(running, trial, 0, partial(running.task.inserter.export, resolved))
        given = _score(running, store, path, "as given")
        if given.surely_within:
            before |= {"loss_before": given.loss, "stderr_before": given.stderr}
            return {**before, "label": f"{NOT_TRIED}: surely within the bound as given", "surely_within": True}
    return {}


def _recover(
    running: TaskRun,
    store: AccuracyStore,
    placer: ModelPlacer,
    trial: Evaluation,
    batches: Sequence[Feeds],
    has_time: Callable[[], bool],
) -> dict[str, Any]:
    """Recover a placement, and return its record.

    The record has the first file that is expected to keep the bound, or else the file with the smallest loss. The
    placement without recovery is scored too, so that both files have a loss with a standard error.
    """
    goal, competes = running.judge.goal, is_feasible(trial.score)
    scored: list[_ScoredFile] = []
    resolved = running.task.space.resolve(Placement(trial.choices))
    for attempt in iter_attempts(placer, resolved, batches, running.observer):
        path = _export(running, trial, len(scored), attempt.placed.export)
        scored.append(_ScoredFile(attempt=attempt, path=path, score=_score(running, store, path, attempt.label)))
        if len(scored) > 1 and (competes or not has_time() or _expected_within(scored, goal)[-1]):
            break
    facts: dict[str, Any] = {"loss_before": _loss(running, trial), "label": "nothing to try", "within": False}
    if scored:
        losses, db = [file.score.loss for file in scored], scored[0].attempt.sqnr_db
        facts |= {"loss_before": losses[0], "stderr_before": scored[0].score.stderr, "sqnr_db_before": db}
        within, expected = [goal.loss_excess(loss) == 0 for loss in losses], _expected_within(scored, goal)
        first = 0 if within[0] and not competes else 1  # the proxy predicted a loss that is too large
        best = min(range(first, len(scored)), key=lambda i: (not expected[i], losses[i]), default=None)
        if best is not None:
            facts |= scored[best].facts(within=within[best])
            facts["surely_within"] &= scored[best].attempt.keeps_kernels(running.task.choices)
    return facts


def _export(running: TaskRun, trial: Evaluation, number: int, write: Callable[[Path], Path]) -> Path:
    folder = running.task.work / "recovered"
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        return write(folder / f"{trial.digest}-{number}.onnx")


def _expected_within(scored: Sequence[_ScoredFile], goal: Goal) -> list[bool]:
    """Return for each file whether both its measured and its estimated loss keep the bound."""
    expected = [file.score.loss for file in scored]
    known = [i for i, file in enumerate(scored) if math.isfinite(file.score.loss + file.score.stderr)]
    measured = [(scored[i].score.loss, scored[i].score.stderr, scored[i].attempt.sqnr_db) for i in known]
    for i, loss in zip(known, estimate_losses(measured), strict=True):
        expected[i] = max(loss, expected[i])
    return [goal.loss_excess(loss) == 0 for loss in expected]


def _score(running: TaskRun, store: AccuracyStore, path: Path, label: str) -> _Loss:
    """Return the loss of a file on the images of the search."""
    goal, evaluator = running.judge.goal, running.judge.evaluator
    metric, score = goal.metric or "", store.score_file(path, label, evaluator)
    value = score.metrics.get(metric, math.nan) if isinstance(score, Accuracy) else math.nan
    if isinstance(score, Failed) or not math.isfinite(value):
        return _Loss()
    reference = store.require_float_score(running.task.model_file, evaluator)
    drop = drop_estimate(reference, score, metric, higher_is_better=goal.higher_is_better)
    sure = surely_within(reference, score, metric, goal.max_drop or 0.0, higher_is_better=goal.higher_is_better)
    stderr = math.inf if drop is None else stderr_from_interval(drop.interval)
    return _Loss(loss=goal.loss(value), stderr=stderr, surely_within=sure)


def _known_model(facts: Mapping[str, Any] | None, trial: Evaluation) -> WarmStartModel | None:
    if facts is None or not facts["within"]:
        return None
    path, name = Path(facts["path"]), recovered_row(facts["sha256"])
    return WarmStartModel(digest=name, placement_digest=trial.digest, path=path, pairs=count_pairs(path))


def _read_known(running: TaskRun) -> dict[str, dict[str, Any]]:
    """Return the records of placements whose files still exist, by digest."""
    path = running.folder / RECOVERY_FILE
    known = read_json(path, {"placements": {}})["placements"]
    found = {}
    for digest, facts in known.items():
        file = running.task.work / "recovered" / facts.get("file", "")
        if facts["label"] == OUT_OF_TIME or facts["label"].endswith(FASTER_AND_WITHIN):
            continue  # decided anew when the run continues
        if not facts["within"]:
            found[digest] = facts
        elif file.is_file() and digest_file(file) == facts["sha256"]:
            found[digest] = {**facts, "path": str(file)}
    return found


def _write_known(running: TaskRun, digest: str, facts: Mapping[str, Any]) -> None:
    path = running.folder / RECOVERY_FILE
    finite = {key: value for key, value in facts.items() if not isinstance(value, float) or math.isfinite(value)}
    placements = {**read_json(path, {"placements": {}})["placements"], digest: finite}
    estimated = estimate_recorded_losses(placements)
    write_record(path, {"schema": SCHEMA_VERSION, "placements": placements, "estimated_losses": estimated})
