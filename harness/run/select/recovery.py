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

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from harness.accuracy.calibration.range_estimators import Ranges, finite_ranges
from harness.accuracy.calibration.ranges import calibrate, calibrate_by_methods
from harness.accuracy.metrics.intervals import drop_estimate, surely_within
from harness.accuracy.recovery.pipeline import (
    MIN_GAIN_DB,
    Feeds,
    FloatGroup,
    PlacedModel,
    StepGain,
    create_steps,
    iter_float_sets,
    leave_float,
    measure_sqnr_db,
    rank_groups,
    recover,
    split_held_out,
)
from harness.base.errors import CandidateError, UserError
from harness.base.files import explain_write_errors, read_json
from harness.base.progress import Observer
from harness.base.statistics import stderr_from_interval
from harness.graph.io.digests import digest_file
from harness.graph.load import save_to_folder
from harness.graph.model import Model
from harness.graph.qdq.qdq_graph import count_pairs
from harness.graph.quantize.numeric_choices import NumericChoices, depthwise_inputs
from harness.measure.records import SCHEMA_VERSION, Failed
from harness.plugins.api import Accuracy, Array
from harness.results.artifacts import NOT_TRIED, RECOVERY_FILE, recovered_row
from harness.results.cross_fitting import estimate_losses, estimate_recorded_losses
from harness.results.journal import read_journal
from harness.results.manifest import write_record
from harness.results.search_log import PREDICTED_METRIC, Evaluation, is_feasible, iter_evaluations
from harness.run.prepare.methods import WarmStartModel, is_external_searcher
from harness.run.prepare.task import Task
from harness.run.task_run import TaskRun
from search.space import Placement, Resolved, edges_digest

RECOVERY_STEPS = ("equalization", "smoothing", "rounding", "bias_correction")
"""Recovery steps in order; each is undone if held-out samples show no gain. `estimator_selection` is not among them: it
takes longer than all of these together and gained less than half a decibel on five models."""
ESTIMATORS = ("mean",)
"""Range estimators that are tried in addition to that of the experiment; for channels, the others take minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlacer:
    """Inserter of Q/DQ pairs with several combinations of estimators and scales.

    Attributes:
        combinations: Choices of estimators and scales, each of which gives a model.
        tensors: Names of the activations that may be quantized.
        by_method: Ranges of the activations by estimator.
    """

    task: Task
    combinations: Sequence[NumericChoices]
    tensors: Sequence[str]
    by_method: Mapping[str, Ranges]
    _recalibrated: dict[tuple[str, NumericChoices], Ranges] = field(default_factory=dict)

    def place(self, resolved: Resolved) -> Iterator[PlacedModel]:
        """Yield the model of quantized edges with each combination of choices."""
        for choices in self.combinations:
            yield PlacedModel(
                model=self.task.model,
                reference=self.task.model,
                dialect=self.task.dialect,
                ranges=finite_ranges(self.by_method[choices.activations]),
                resolved=resolved,
                choices=choices,
            )

    def rank(self, resolved: Resolved, held: Sequence[Feeds]) -> list[RecoveryAttempt]:
        """Return the models of quantized edges in descending order of their SQNR on held-out samples.

        The combination of the task is first unless another one is better by at least `MIN_GAIN_DB`.
        """
        models = list(self.place(resolved))
        figures = measure_sqnr_db(models, held)
        judged = [RecoveryAttempt(placed=model, sqnr_db=db) for model, db in zip(models, figures, strict=True)]
        return sorted(judged, key=lambda each: -each.sqnr_db - MIN_GAIN_DB * (each is judged[0]))

    def recalibration(
        self, choices: NumericChoices, batches: Sequence[Mapping[str, Array]]
    ) -> Callable[[Model], Ranges]:
        """Return a function that calibrates a changed float model on `batches` with the estimators of `choices`.

        Ranges are stored by the digest of the model, because a step may change it in the same way for each placement.
        """

        def calibrate_again(model: Model) -> Ranges:
            path = save_to_folder(model, self.task.work / "recovery")
            key = digest_file(path), choices
            if key not in self._recalibrated:
                found = calibrate(
                    path,
                    self.tensors,
                    batches,
                    method=choices.activations,
                    percentile=choices.percentile,
                    channels=depthwise_inputs(model) if choices.depthwise == "channel" else None,
                    source=self.task.model.source,
                )
                self._recalibrated[key] = finite_ranges(found)
            return self._recalibrated[key]

        return calibrate_again


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryAttempt:
    """Model of a placement after recovery steps.

    Attributes:
        sqnr_db: SQNR of the outputs on held-out calibration samples, in dB.
        gains: Effect of each recovery step.
        left_float: Groups of nodes that are left float.
    """

    placed: PlacedModel
    sqnr_db: float
    gains: tuple[StepGain, ...] = ()
    left_float: tuple[FloatGroup, ...] = ()

    def keeps_kernels(self, choices: NumericChoices) -> bool:
        """Return whether the file runs the same kernels as one with `choices`, so that both are equally fast."""
        return not self.left_float and self.placed.choices.depthwise == choices.depthwise

    @property
    def label(self) -> str:
        """Return the choices, steps and float nodes that the file adds to the placement; "as given" without any."""
        kept = [gain.step for gain in self.gains if gain.kept]
        left = sum(len(group.nodes) for group in self.left_float)
        float_nodes = f"{left} nodes float" if left else ""
        return ", ".join(filter(None, [self.placed.choices.text, *kept, float_nodes])) or "as given"


def list_choices(task: Task) -> list[NumericChoices]:
    """Return the choices of a task, then variants with other estimators and with scales by channel."""
    own = task.choices
    grains = [own.depthwise]
    if task.dialect.channel_activations and depthwise_inputs(task.model) and own.depthwise == "tensor":
        grains.append("channel")
    estimators = dict.fromkeys((own.activations, *ESTIMATORS))
    return [replace(own, activations=each, depthwise=grain) for each, grain in itertools.product(estimators, grains)]


def open_placer(
    task: Task,
    combinations: Sequence[NumericChoices],
    batches: Collection[Mapping[str, Array]] | Iterable[Mapping[str, Array]],
    count: int,
    observer: Observer,
) -> ModelPlacer:
    """Calibrate a task by the estimators of several combinations, in one pass over the data.

    Args:
        batches: Calibration samples.
        count: Number of batches, for the progress bar.

    Raises:
        UserError: The dialect does not offer a combination, or samples have other sizes than the inputs of the model.
    """
    if task.sizes is not None and not all(map(task.sizes.fit, batches)):
        raise UserError(
            f"{task.model.source}: recovery takes calibration samples of the timed size; pad or cut the others"
        )
    for choices in combinations:
        choices.adapt_dialect(task.dialect)  # raises before minutes of calibration
    tensors = sorted({e.tensor for d in task.space.dimensions for e in d.edges if e.tensor not in task.model.constants})
    channels = depthwise_inputs(task.model) if any(c.depthwise == "channel" for c in combinations) else {}
    with observer.work(f"calibrate {task.model.source}", count) as progress:
        by_method = calibrate_by_methods(
            task.float_file,
            tensors,
            batches,
            methods=tuple(dict.fromkeys(c.activations for c in combinations)),
            percentile=task.choices.percentile,
            channels=channels,
            progress=lambda _: progress.advance(),
            source=task.model.source,
        )
    return ModelPlacer(task=task, combinations=combinations, tensors=tensors, by_method=by_method)


def iter_attempts(
    placer: ModelPlacer, resolved: Resolved, batches: Sequence[Feeds], observer: Observer
) -> Iterator[RecoveryAttempt]:
    """Yield models of a placement: without recovery, with recovery steps, with other scales, and partly float.

    The last ones are recovered models with increasing numbers of float groups of nodes, those that cost most accuracy
    first. The iteration ends if ONNX Runtime does not run a model.
    """
    held_out = split_held_out(batches)[1]
    with suppress(UserError, CandidateError):
        ranked = placer.rank(resolved, held_out)
        given = next(each for each in ranked if each.placed.choices == placer.task.choices)
        yield given
        recalibrate = placer.recalibration(ranked[0].placed.choices, batches)
        placed, gains = recover(ranked[0].placed, create_steps(RECOVERY_STEPS), batches, recalibrate, observer)
        gained = [gain.after_db for gain in gains if gain.kept]
        if gained:
            yield RecoveryAttempt(placed=placed, gains=gains, sqnr_db=gained[-1] or 0.0)
        yield from (each for each in ranked[:2] if each is not given)
        groups = rank_groups(placed, held_out, observer)
        for chosen in iter_float_sets(groups):
            partly = leave_float(placed, {name for group in chosen for name in group.nodes})
            (sqnr_db,) = measure_sqnr_db([partly], held_out)
            yield RecoveryAttempt(placed=partly, gains=gains, sqnr_db=sqnr_db, left_float=chosen)


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


class _Loss(NamedTuple):
    """Loss of a file on the images of the search with its standard error; infinite without a score.

    Attributes:
        surely_within: Whether the loss keeps the bound with a probability of at least `SURELY_WITHIN`.
    """

    loss: float = math.inf
    stderr: float = math.inf
    surely_within: bool = False


def recover_placements(running: TaskRun) -> Recovery:
    """Recover the fastest placements of a task near its bound, and estimate the losses of all files.

    Writes `recovery.json`; the files are in the scratch folder of the task, from which the finalists are exported. The
    result is empty without a bound, or if recovery is switched off.
    """
    goal, task = running.judge.goal, running.task
    raced = goal.minimize == "latency" and running.experiment.confirmation.candidates > 1
    bounded = goal.metric is not None and goal.max_drop is not None and running.experiment.objective.recover
    if not (raced and bounded) or running.checker is None or task.cast is not None:
        return Recovery()
    trials = {
        run.name: list(iter_evaluations(read_journal(running.journal(run)), goal))
        for run in running.searches
        if not is_external_searcher(run.searcher)
    }
    by_search = {name: placements_to_recover(running, found) for name, found in trials.items()}
    selected = list({trial.digest: trial for found in by_search.values() for trial in found}.values())[:MAX_RECOVERED]
    records = _read_known(running)
    missing = sorted((trial for trial in selected if trial.digest not in records), key=lambda trial: trial.latency_ms)
    if missing:
        search_s = sum(max(trial.elapsed_s for trial in found) for found in trials.values() if found)
        _recover_all(running, missing, by_search.values(), max(MIN_RECOVERY_S, search_s))
        records |= _read_known(running)
    models: dict[str, tuple[WarmStartModel, ...]] = {}
    for name, found in by_search.items():
        kept = [(trial.digest, records[trial.digest]) for trial in found if trial.digest in records]
        models[name] = tuple(
            WarmStartModel(
                digest=recovered_row(facts["sha256"]),
                placement_digest=digest,
                path=Path(facts["path"]),
                pairs=count_pairs(Path(facts["path"])),
            )
            for digest, facts in kept
            if facts["within"]
        )
    measured = {trial.digest: _loss(running, trial) for trial in chain(*trials.values()) if is_feasible(trial.score)}
    estimated = estimate_recorded_losses(records)
    return Recovery(models=models, losses=measured | estimated if estimated else {})


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
    running: TaskRun, trials: Sequence[Evaluation], searches: Collection[Sequence[Evaluation]], limit_s: float
) -> None:
    """Recover placements, the fastest first, and write the record of each.

    Args:
        running: The task after its searches.
        trials: Placements without a record.
        searches: Placements that each search wants to be recovered.
        limit_s: Seconds after which no other recovery starts.
    """
    task, started_s, record = running.task, time.monotonic(), running.folder / RECOVERY_FILE
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
        running.scoring.prepare_evaluators(running.store, task.model_file)
    with running.observer.work(f"{task.spec.name}: recover placements", len(trials)) as step:
        for trial in trials:
            untried: dict[str, Any] = {"loss_before": _loss(running, trial), "label": OUT_OF_TIME, "within": False}
            facts = _needs_none(running, trial, searches) if has_time() else untried
            if not facts:
                opened = placer()
                if isinstance(opened, str):
                    facts = {**untried, "label": f"{NOT_TRIED}: {opened}"}
                else:
                    facts = _recover(running, opened, trial, batches, has_time)
            seconds, ended_s = time.monotonic() - ended_s, time.monotonic()  # the first one has the calibration
            facts["seconds"] = round(seconds, 1)
            finite = {key: each for key, each in facts.items() if not isinstance(each, float) or math.isfinite(each)}
            placements = {**read_json(record, {"placements": {}})["placements"], trial.digest: finite}
            estimated = estimate_recorded_losses(placements)
            write_record(record, {"schema": SCHEMA_VERSION, "placements": placements, "estimated_losses": estimated})
            step.advance(facts["label"])


def _needs_none(running: TaskRun, trial: Evaluation, searches: Collection[Sequence[Evaluation]]) -> dict[str, Any]:
    """Return the record of a placement that needs no recovery, with the reason as its label, or an empty one."""
    top_k, known = running.experiment.confirmation.top_k, _read_known(running)
    sure = [digest for digest, facts in known.items() if facts.get("surely_within", False)]
    faster_files = []
    for search in searches:
        if any(each.digest == trial.digest for each in search):
            faster = [each for each in search if each.latency_ms * (1 + running.noise_floor) < trial.latency_ms]
            faster_files.append([each.digest for each in faster if each.digest in sure][:top_k])
    before = {"loss_before": _loss(running, trial), "within": False}
    if all(len(each) == top_k for each in faster_files):
        return {**before, "label": f"{NOT_TRIED}: {faster_files[0][0]} {FASTER_AND_WITHIN}"}
    if is_feasible(trial.score):
        resolved = running.task.space.resolve(Placement(trial.choices))
        given = _score(running, trial, 0, partial(running.task.inserter.export, resolved), "as given")[1]
        if given.surely_within:
            before |= {"loss_before": given.loss, "stderr_before": given.stderr}
            return {**before, "label": f"{NOT_TRIED}: surely within the bound as given", "surely_within": True}
    return {}


def _recover(
    running: TaskRun,
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
    attempts, files = list[RecoveryAttempt](), list[tuple[Path, _Loss]]()
    resolved, expected = running.task.space.resolve(Placement(trial.choices)), list[bool]()
    for attempt in iter_attempts(placer, resolved, batches, running.observer):
        attempts.append(attempt)
        files.append(_score(running, trial, len(files), attempt.placed.export, attempt.label))
        # A file is expected to keep the bound if both its measured and its estimated loss do.
        losses = [score.loss for _, score in files]
        known = [i for i, (_, score) in enumerate(files) if math.isfinite(score.loss + score.stderr)]
        measured = [(losses[i], files[i][1].stderr, attempts[i].sqnr_db) for i in known]
        estimated = dict(zip(known, estimate_losses(measured), strict=True))
        expected = [goal.loss_excess(max(loss, estimated.get(i, loss))) == 0 for i, loss in enumerate(losses)]
        if len(files) > 1 and (competes or not has_time() or expected[-1]):
            break
    facts: dict[str, Any] = {"loss_before": _loss(running, trial), "label": "nothing to try", "within": False}
    if not files:
        return facts
    facts |= {"loss_before": losses[0], "stderr_before": files[0][1].stderr, "sqnr_db_before": attempts[0].sqnr_db}
    within = [goal.loss_excess(loss) == 0 for loss in losses]
    first = 0 if within[0] and not competes else 1  # the proxy predicted a loss that is too large
    best = min(range(first, len(files)), key=lambda i: (not expected[i], losses[i]), default=None)
    if best is None:
        return facts
    attempt, (path, score) = attempts[best], files[best]
    left_float = [asdict(group) for group in attempt.left_float]
    facts |= {
        "label": attempt.label,
        "steps": [asdict(gain) for gain in attempt.gains],
        **({"left_float": left_float} if left_float else {}),
        **score._asdict(),
        "sqnr_db": attempt.sqnr_db,
        "file": path.name,
        "sha256": digest_file(path),
        "within": within[best],
    }
    facts["surely_within"] &= attempt.keeps_kernels(running.task.choices)
    return facts


def _score(
    running: TaskRun, trial: Evaluation, number: int, write: Callable[[Path], Path], label: str
) -> tuple[Path, _Loss]:
    """Write a file of a placement, and return its path and its loss on the images of the search."""
    folder, store = running.task.work / "recovered", running.store
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        path = write(folder / f"{trial.digest}-{number}.onnx")
    goal, evaluator = running.judge.goal, running.judge.evaluator
    metric, score = goal.metric or "", store.score_file(path, label, evaluator)
    value = score.metrics.get(metric, math.nan) if isinstance(score, Accuracy) else math.nan
    if isinstance(score, Failed) or not math.isfinite(value):
        return path, _Loss()
    reference = store.require_float_score(running.task.model_file, evaluator)
    drop = drop_estimate(reference, score, metric, higher_is_better=goal.higher_is_better)
    sure = surely_within(reference, score, metric, goal.max_drop or 0.0, higher_is_better=goal.higher_is_better)
    stderr = math.inf if drop is None else stderr_from_interval(drop.interval)
    return path, _Loss(loss=goal.loss(value), stderr=stderr, surely_within=sure)


def _read_known(running: TaskRun) -> dict[str, dict[str, Any]]:
    """Return the records of placements whose files still exist, by digest."""
    found = {}
    for digest, facts in read_json(running.folder / RECOVERY_FILE, {"placements": {}})["placements"].items():
        file = running.task.work / "recovered" / facts.get("file", "")
        if facts["label"] == OUT_OF_TIME or facts["label"].endswith(FASTER_AND_WITHIN):
            continue  # decided anew when the run continues
        if not facts["within"]:
            found[digest] = facts
        elif file.is_file() and digest_file(file) == facts["sha256"]:
            found[digest] = {**facts, "path": str(file)}
    return found
