"""Reproduction of the recorded facts of one exported file: hash, Q/DQ edges, accuracy, outputs, latency."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from harness.accuracy.metrics.intervals import decode_accuracy, drop_estimate
from harness.base.errors import UserError
from harness.base.progress import NullProgress, Observer
from harness.base.statistics import Interval
from harness.config.experiment import Experiment, TaskSpec, load_experiment, plan_tasks
from harness.config.sections import Confirmation, Limits
from harness.graph.io.digests import digest_file
from harness.graph.qdq.qdq_graph import count_pairs, diff_edges
from harness.measure.provenance import machine_lacks_vnni
from harness.measure.records import MAIN_BENCHMARKER, Failed
from harness.measure.turn_log import summarize_turns
from harness.plugins.api import Accuracy, Candidate
from harness.report.trace import ExportedRow
from harness.results.artifacts import FLOAT_ROW, ExportedModel, FinalistSet
from harness.results.folder import TaskResults, load
from harness.results.journal import changed_data
from harness.results.scores import METRIC_CAPS, format_drop
from harness.run.confirm.confirmation import TimedRow, confirm
from harness.run.prepare.accuracy import bound_status, make_scoring
from harness.run.prepare.accuracy_store import AccuracyStore
from harness.run.prepare.float_baseline import select_float_baseline
from harness.run.prepare.task import SHAPES_FILE_NAME, Task, compose_task, make_shape_set
from harness.run.verify.runtime_checker import RuntimeChecker, make_check_plan, runs_no_model
from harness.workers.engines import Engines, WorkerSpec
from harness.workers.sandbox import open_engines
from search.space import Placement

Bound = float | str
"""Largest loss of the metric: absolute, or a share of the float model's metric such as "1%"."""
RELATIVE_SCORE_TOLERANCE = 1e-6
"""Largest relative difference of equal metrics: evaluators, and runtimes with several threads, round differently."""
REPRODUCTION_SCHEDULE = Confirmation(builds=3, rounds=4, samples=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """Result of one check.

    Attributes:
        what: "file", "edges", "accuracy", "bound", "runtime" (correct results) or "latency".
        holds: Whether the value agrees with the record, or keeps the bound; None if there is no record, or if noise
            hides whether the speedup does.
        found: Text with the recorded value and the value found now.
    """

    what: str
    holds: bool | None
    found: str


def verify(
    model: Path | ExportedRow,
    observer: Observer,
    *,
    results: Path | None = None,
    base: Path | None = None,
    max_drop: Bound | None = None,
) -> list[CheckResult]:
    """Reproduce the recorded facts of an exported file, and compare its accuracy with the bound.

    Args:
        model: Path of an exported model, or a row with its file.
        results: Results folder; by default the one whose `TASK/models` contains the file.
        base: Folder from which relative paths of the experiment start; by default the working folder.
        max_drop: Bound on the loss of accuracy that replaces `objective.max_drop` of the experiment.

    Returns:
        One result for each check; only that of "file" if the file is not the recorded one.

    Raises:
        UserError: The file or its results do not exist, the task can no longer be set up, or `max_drop` is given for a
            model without an evaluator.
    """
    file = model.file if isinstance(model, ExportedRow) else model
    if not file.is_file():
        raise UserError(f"{file}: no such file")
    folder = results or file.resolve().parent.parent.parent
    if results is None and not (folder / "experiment.yaml").exists():
        raise UserError(
            f"{file}: is in no results folder: give RESULTS/TASK/models/NAME.onnx, or the results folder by --results"
        )
    digest = digest_file(file)
    found = load(folder)
    if isinstance(model, ExportedRow):
        task = found.task(model.task)
        row = task.rows[model.row]
    else:
        rows = [(task, row) for task in found.tasks for row in task.rows.values()]
        same = [(task, row) for task, row in rows if (task.folder / "models" / row.file).resolve() == file.resolve()]
        same += [(task, row) for task, row in rows if row.sha256 == digest]
        if not same:
            raise UserError(
                f"{file}: {folder} has no row of this file (SHA-256 {digest}); name its results by --results"
            )
        task, row = same[0]
    if row.sha256 != digest:
        return [CheckResult(what="file", holds=False, found=f"SHA-256 {row.sha256} is recorded, but it is {digest}")]
    experiment = load_experiment(folder / "experiment.yaml", base or Path.cwd())
    spec = next((spec for spec in plan_tasks(experiment) if spec.name == task.name), None)
    if spec is None:
        raise UserError(f"{folder}: its experiment has no task {task.name!r} any more")
    checks = [CheckResult(what="file", holds=True, found=f"SHA-256 {digest}")]
    with tempfile.TemporaryDirectory(prefix="qdq-verify-") as scratch:
        again = _Reproduction(
            file=file, row=row, results=task, experiment=experiment, spec=spec, scratch=Path(scratch),
            bound=task.allowed if max_drop is None else max_drop,
        )  # fmt: skip
        if max_drop is not None and spec.model.evaluator is None:
            raise UserError(f"--max-drop: model {spec.model.name!r} has no evaluator whose metric could drop")
        return checks + list(again.run_checks(observer))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reproduction:
    """Reproduction of one row.

    Attributes:
        bound: Largest allowed loss of accuracy; None: no bound.
    """

    file: Path
    row: ExportedModel
    results: TaskResults
    experiment: Experiment
    spec: TaskSpec
    scratch: Path
    bound: Bound | None

    def run_checks(self, observer: Observer) -> Iterator[CheckResult]:
        bare = self.experiment.model_copy(update={"initial": (), "baselines": ()})
        task = compose_task(bare, self.spec, self.scratch / "work", observer)
        scoring = make_scoring(self.experiment.objective, self.spec.model, task.model, task.work)
        for name in ("float.json", SHAPES_FILE_NAME):
            if (self.results.folder / name).exists():
                shutil.copy(self.results.folder / name, self.scratch)
        benchmarkers = select_float_baseline(
            self.spec.backend, task.float_file, self.scratch, self._open_engines, observer
        )
        task = task.with_benchmarkers(benchmarkers)
        yield self._check_edges(task)
        if changed := changed_data(self.results.facts, {**scoring.facts, "data": scoring.data}):
            yield CheckResult(
                what="data", holds=False, found=f"{changed}, so accuracy is not comparable with the record"
            )
        evaluators = {name: use for name, use in scoring.evaluators.items() if name == MAIN_BENCHMARKER}
        shapes = make_shape_set(task, self.scratch, self._open_engines, observer)
        worker = WorkerSpec(
            benchmarkers=benchmarkers, workdir=task.work, evaluators=evaluators, adapt=shapes, sizes=task.sizes
        )
        score = self.results.scores.get(self.row.id, {})
        if evaluators and ("metrics" in score or self.bound is not None):
            with self._open_engines(worker) as engines:
                # Score the row again, and compare the score with the record and the bound
                store = AccuracyStore(self.scratch, engines, observer)
                reference = store.float_score(task.model_file)
                found = reference if self.row.id == FLOAT_ROW else store.score_row(self._candidate(task), self.row)
                if "metrics" in score:
                    yield self._compare_accuracy(score["metrics"], found)
                else:
                    yield CheckResult(what="accuracy", holds=None, found=_not_measured_result(score))
                if self.bound is not None and self.row.id != FLOAT_ROW:
                    holds, text = bound_status(self.bound, reference, found, self.results)
                    yield CheckResult(what="bound", holds=holds, found=text)
        else:
            nothing = _not_measured_result(score) if evaluators else "the model has no evaluator"
            yield CheckResult(what="accuracy", holds=None, found=nothing)
        if not runs_no_model(self.spec.backend):
            with self._open_engines(worker) as engines:
                yield self._check_outputs(engines, task)
        summary = self.results.summaries.get(self.row.id)
        if summary is not None and self.row.id != FLOAT_ROW:
            yield self._check_speedup(summary.speedup, worker, task, observer)

    def _open_engines(self, worker: WorkerSpec) -> Any:
        limits: Limits = self.experiment.limits
        return open_engines(worker, limits)

    def _candidate(self, task: Task) -> Candidate:
        table = FinalistSet(folder=self.results.folder, space=task.space, rows=(self.row,))
        return replace(table.candidate(self.row), source=lambda: self.file)

    def _check_edges(self, task: Task) -> CheckResult:
        """Compare the requested Q/DQ edges with those in the file; those of another tool's model are only counted."""
        if self.row.choices is None:
            pairs = count_pairs(self.file)
            text = f"{self.row.pairs} Q/DQ pairs recorded, {pairs} in the file"
            return CheckResult(what="edges", holds=pairs == self.row.pairs, found=text)
        requested = task.space.resolve(task.space.validate(Placement(self.row.choices)))
        missing, extra = diff_edges(task.edges_in_file(requested), self.file)
        counts = f"{len(requested)} quantized edges of {self.row.pairs} Q/DQ pairs requested"
        text = f"{counts}, {len(missing)} of them missing, {len(extra)} unexpected"
        return CheckResult(what="edges", holds=not (missing or extra), found=text)

    def _compare_accuracy(self, known: Mapping[str, float], found: Accuracy | Failed) -> CheckResult:
        if not isinstance(found, Accuracy):
            return CheckResult(what="accuracy", holds=False, found=_failed_result(found))
        agrees = partial(math.isclose, rel_tol=RELATIVE_SCORE_TOLERANCE, abs_tol=RELATIVE_SCORE_TOLERANCE)
        differing = [name for name, value in known.items() if not agrees(value, found.metrics.get(name, math.nan))]
        named = [name for name in known if name == self.results.metric]
        shown = differing or named or list(known)[:1]
        text = ", ".join(
            f"{name} {known[name]:.6g} recorded, {found.metrics.get(name, math.nan):.6g} now" for name in shown
        )
        results, row = self.results, self.row.id
        drop, bound, metric = results.drop(row), results.allowed, results.metric
        if drop is not None and row != FLOAT_ROW and metric is not None and metric not in METRIC_CAPS:
            reference, own = (decode_accuracy(results.scores[name]) for name in (FLOAT_ROW, row))
            interval = Interval(value=drop, low=math.nan, high=math.nan)
            with suppress(ValueError):  # the record allows none
                estimate = drop_estimate(reference, own, metric, higher_is_better=results.higher_is_better)
                interval = interval if estimate is None else estimate.interval
            side = "beyond" if results.goal.loss_excess(drop) else "within"
            limit = "no bound" if bound is None else f"{side} the bound {bound:g}"
            text = f"{text}; drop {format_drop(interval, metric)}, {limit}"
        return CheckResult(what="accuracy", holds=not differing, found=text)

    def _check_outputs(self, engines: Engines, task: Task) -> CheckResult:
        """Compare the outputs in the runtime with those of a reference execution of the file."""
        plan = make_check_plan(task, self.scratch, self.experiment.limits, machine_lacks_vnni())
        with RuntimeChecker(plan, engines, NullProgress()) as checker:
            found = checker.check(self._candidate(task), self.row.benchmarker, name=self.row.id)
        recorded = self.results.checks.get(self.row.id)
        if found.verdict == "not checked":
            return CheckResult(what="runtime", holds=None, found=str(found))
        text = "" if recorded is None or recorded.verdict == found.verdict else f"{recorded.label} recorded, now "
        return CheckResult(what="runtime", holds=not (found.is_wrong or text), found=f"{text}{found}")

    def _check_speedup(self, recorded: Interval, worker: WorkerSpec, task: Task, observer: Observer) -> CheckResult:
        """Measure the speedup with new builds; the check fails if it is lower than recorded by more than the noise."""
        baseline = TimedRow(name=FLOAT_ROW, candidate=task.candidate(task.space.float_placement()))
        turn = TimedRow(name=self.row.id, candidate=self._candidate(task), benchmarker=self.row.benchmarker)
        events = []
        with observer.work("time again", REPRODUCTION_SCHEDULE.builds * REPRODUCTION_SCHEDULE.rounds * 3) as step:
            for event in confirm(
                [turn],
                baseline,
                open_engines=lambda: self._open_engines(worker),
                schedule=REPRODUCTION_SCHEDULE,
                rng=np.random.default_rng(1),
            ):
                events.append(event)
                step.advance()
        summary = summarize_turns(events, baseline=FLOAT_ROW, noise_floor=self.results.noise_floor or 0.0)
        again = summary.rows.get(self.row.id)
        if again is None:
            return CheckResult(what="latency", holds=False, found=_failed_result(summary.failed.get(self.row.id)))
        text = (
            f"speedup {_format_interval(recorded)} recorded, {_format_interval(again.speedup)} now; "
            f"noise floor {summary.noise_floor:.1%}"
        )
        noise = summary.noise_floor * recorded.value
        holds = speedup_agrees(recorded, again.speedup, noise)
        if again.speedup.low - recorded.high > noise:
            text += "; faster than recorded"
        elif holds is None:
            text += "; the noise hides whether the gain is still there: close other programs and repeat"
        return CheckResult(what="latency", holds=holds, found=text)


def speedup_agrees(recorded: Interval, now: Interval, noise: float) -> bool | None:
    """Return whether a speedup is not lower than recorded; None if a loss of the whole recorded gain would not show.

    Args:
        noise: Difference of speedups that counts as none.
    """
    if recorded.low - now.high > noise:
        return False
    hidden = recorded.low - 1 <= noise or now.low <= 1
    return None if recorded.low > 1 and hidden else True


def _format_interval(interval: Interval) -> str:
    return f"{interval.value:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def _not_measured_result(score: Mapping[str, Any]) -> str:
    return f"{score['failed']}: {score['reason']}" if "failed" in score else "the folder has no score of this file"


def _failed_result(failed: Failed | None) -> str:
    return "it gave no reading" if failed is None else f"it failed: {failed.stage}: {failed.reason}"
