"""Run of an experiment: set up, search, select, score and confirm each task. A repeated run continues an earlier one.

A results folder has for each task:
    env.json                machine on which it was begun
    float.json              latency at each float precision, and the fastest of them
    noise_floor.json        speedup of the rebuilt baseline over itself
    phases.json             seconds of each phase
    task.json               inputs: model, device, space, initial design, baselines, goal
    runs/*.jsonl            one journal per search
    runs/*.ended.txt        reason why a search spent less than its budget; removed when it continues
    runs/*.failed.txt       error of a searcher, with the end of its traceback
    recovery.json           placements near the bound, with recovery steps, their gains and estimated losses
    final_selection.jsonl   raw samples of the final selection among the best of each search
    rows.json               finalists: exported files with their hashes, and the methods that chose them
    accuracy.json           scores of each file by the evaluator
    runtime_check.json      comparison of each file's outputs in the runtime with those that the file describes
    wrong_result/*          small models that reproduce wrong results
    confirmation.jsonl      raw samples of the confirmation
    models/*.onnx           exported files, byte for byte those that were timed and scored; *.dynamic.onnx have the
                            dynamic inputs of the original model
    dynamic.json            sizes at which each *.dynamic.onnx was checked, or the reason why it was not written
    stopped.txt             reason why the last run of the task ended early; removed on resume

`manifest.json` of the results folder has length and digest of each file of finished tasks; a finished task is skipped.
`env.json` and `task.json` are written once and compared on resume. Logs are compressed (`.jsonl.gz`) when the task
ends.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from harness.base.errors import UserError
from harness.base.files import facts_digest, read_json
from harness.base.progress import Observer
from harness.config.experiment import Experiment, TaskSpec, plan_tasks
from harness.graph.io.files import model_files
from harness.measure.provenance import comparability_key, git_commit, lacks_vnni
from harness.measure.records import MAIN_BENCHMARKER, Failed
from harness.results.artifacts import FinalistSet
from harness.results.journal import FingerprintMismatch
from harness.results.manifest import (
    archive_task,
    close_results,
    complete_task,
    is_complete,
    record_or_check,
    reopen_task,
    require_unchanged_task,
)
from harness.results.output_check import wrong_float_remedies
from harness.results.ownership import owned_results_dir
from harness.results.scores import score_difference
from harness.results.termination import (
    PhaseClock,
    SearcherFailures,
    clear_task_error,
    read_termination,
    write_task_error,
)
from harness.results.turns import noise_floor_events, read_begun_plan
from harness.run.confirm.confirmation import confirm_rows, measure_noise_floor
from harness.run.early_answer import AnswerSink, EarlyAnswers, time_initial_rows
from harness.run.prepare.accuracy import Scoring, make_scoring
from harness.run.prepare.accuracy_store import AccuracyStore, score_float_file, score_tool_files
from harness.run.prepare.float_baseline import select_float_baseline
from harness.run.prepare.task import Task, compose_task, make_shape_set
from harness.run.select.export import export_finalists, transferred_placements, write_pattern_cache
from harness.run.select.final_selection import select_final
from harness.run.select.recovery import recover_placements
from harness.run.task_run import TaskRun
from harness.run.time_limit import TimeLimit
from harness.run.verify.dynamic_check import write_dynamic_rows
from harness.run.verify.runtime_checker import RuntimeChecker, make_check_plan, runs_no_model
from harness.workers.engines import Engines, WorkerLost, WorkerSpec, as_outcome
from harness.workers.ray import open_execution_target
from harness.workers.trial_pool import ExecutionTarget, run_concurrently

MAX_WORKER_LOSSES = 3  # per task; counted only if no other worker can take over
MAX_BROKEN_SHOWN = 3
"""Number of failed searches named at the end; the report lists all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPipeline:
    """Task of an experiment with the folder of its results.

    Attributes:
        commit: Commit of the running code.
        site: Machine or cluster that runs the engines.
        retry_failed: Whether failed trials, final selections and confirmations are attempted once more.
        ends_after_search: Whether the run stops after the searches, because placements of other tasks are missing.
        sink: Function that receives incumbents confirmed while a search runs; None: no early answers.
    """

    experiment: Experiment
    spec: TaskSpec
    folder: Path
    commit: str | None
    site: ExecutionTarget
    retry_failed: bool
    ends_after_search: bool
    sink: AnswerSink | None
    observer: Observer

    def run(self) -> None:
        """Run the missing steps of the task.

        Raises:
            FingerprintMismatch: The task was begun with other inputs or on another kind of machine.
            WorkerLost: A worker was lost, and no other one can continue its work.
        """
        require_unchanged_task(self.folder, self.observer.say)
        clock, limits = PhaseClock(self.folder, "set-up"), self.experiment.limits
        task, scoring, worker = self._set_up()
        with ExitStack() as stack:
            engines, checker = stack.enter_context(self.site.open(worker)), None
            if not runs_no_model(self.spec.backend):
                saturates = lacks_vnni(read_json(self.folder / "env.json"))
                plan = make_check_plan(task, self.folder, limits, saturates)
                checker = stack.enter_context(RuntimeChecker(plan, engines, self.observer))
            running = self._begin(clock, task, scoring, worker, engines, checker)
            record_or_check(
                self.folder / "task.json",
                running.task_facts(),
                lambda facts: {key: facts.get(key) for key in running.fingerprint()},
            )
            clear_task_error(self.folder)
            inputs_digest = running.task_digest()  # first: later changes of the inputs must invalidate the marker
            if not (self.experiment.transfer or self.retry_failed) and is_complete(self.folder, inputs_digest):
                self.observer.say(f"{self.spec.name}: nothing is left to do")
                shutil.rmtree(task.work, ignore_errors=True)
                return
            reopen_task(self.folder)
            searching = self._prepare_searches(clock, running)
            baseline = task.candidate(task.space.float_placement())
            with self.site.workers(worker, engines, task.inserter, baseline) as workers:
                searches = [
                    partial(searching.run_search, each, workers, self.retry_failed) for each in running.searches
                ]
                run_concurrently(searches, self.experiment.executor.searches)
            table = self._export(clock, running)
            if self.ends_after_search:
                return
            clock.write("scoring")
            if scoring.evaluators:
                if running.store.has_unscored_rows(table):
                    scoring.prepare_evaluators(running.store, task.model_file)
                running.store.score_rows(table)
                if checker is not None:
                    score_tool_files(table, worker, limits, self.observer, facts_digest(scoring.facts))
            clock.write("comparison with files")
            if checker is not None:
                checker.check_rows(table, self.retry_failed)
            backend = engines.describe()
        self._confirm(clock, running, table, backend)
        shutil.rmtree(task.work, ignore_errors=True)
        ends = [read_termination(running.journal(run)) for run in self.spec.runs]
        complete_task(self.folder, inputs_digest, complete=not any(end and end.failed for end in ends))

    def _set_up(self) -> tuple[Task, Scoring, WorkerSpec]:
        """Compose the task, and select the float precision of its baseline."""
        record_or_check(self.folder / "env.json", self.site.environment(self.commit), comparability_key)
        work, backend = self.folder / "work", self.spec.backend
        facts = self.site.describe(backend, work)
        task = compose_task(self.experiment, self.spec, work, self.observer, facts)
        scoring = make_scoring(self.experiment.objective, self.spec.model, task.model, task.work)
        benchmarkers = select_float_baseline(
            backend, task.float_file, self.folder, self.site.open, self.observer, facts
        )
        task = task.with_benchmarkers(benchmarkers)
        worker = WorkerSpec(
            benchmarkers=benchmarkers,
            workdir=task.work,
            evaluators=scoring.evaluators,
            reference=task.model_file,
            adapt=make_shape_set(task, self.folder, self.site.open, self.observer),
            sizes=task.sizes,
        )
        return task, scoring, worker

    def _begin(
        self,
        clock: PhaseClock,
        task: Task,
        scoring: Scoring,
        worker: WorkerSpec,
        engines: Engines,
        checker: RuntimeChecker | None,
    ) -> TaskRun:
        """Measure the noise floor, time the initial placements with it, and score the float model."""
        minutes = self.experiment.budget.task_minutes
        limit = None if minutes is None else TimeLimit(seconds=minutes * 60, clock=clock)
        clock.start("noise floor")
        measure = partial(
            measure_noise_floor,
            self.site.open,
            worker,
            task.model_file,
            engines.describe(),
            self.folder,
            self.observer,
            seconds=math.inf if limit is None else limit.search_seconds(1 + len(self.spec.runs)),
        )
        initial = time_initial_rows(self.experiment, task, measure, answers=self.sink is not None)
        clock.start("set-up")
        clock.split("noise floor", "early answer", initial.share)
        facts = facts_digest(scoring.facts)
        store = AccuracyStore(self.folder, engines, self.observer, facts, keep_mixable=scoring.cross_fitted)
        running = TaskRun(
            experiment=self.experiment,
            task=task,
            engines=engines,
            worker=worker,
            scoring=scoring,
            store=store,
            judge=scoring.make_accuracy_gate(scoring.goal(store, task.model_file, self.folder), store, task.model_file),
            noise_floor=initial.noise_floor,
            folder=self.folder,
            observer=self.observer,
            checker=checker,
            limit=limit,
            turn_s=clock.seconds_of("noise floor") / len(noise_floor_events(self.folder)),
        )
        if self.sink is None or initial.rows is None:
            return running
        answers = EarlyAnswers(
            task,
            engines,
            lambda: self.site.open(worker),
            checker=checker,
            initial=initial,
            metric=running.judge.goal.metric,
            shapes=running.shapes,
            limit=limit,
            sink=self.sink,
            observer=self.observer,
        )
        return replace(running, answers=answers)

    def _prepare_searches(self, clock: PhaseClock, running: TaskRun) -> TaskRun:
        """Score the float model, and deliver a confirmed initial placement as an early answer.

        If the runtime computes the float model wrongly, a line reports it, and there are no early answers.
        """
        task, checker = running.task, running.checker
        unfinished = self.retry_failed or any(map(running.is_unfinished, running.searches))
        if running.judge.goal.metric is not None and unfinished:
            running.scoring.prepare_evaluators(running.store, task.model_file)
        if checker is not None and unfinished and (fault := self._float_fault(running, checker)):
            backend = running.engines.describe()
            self.observer.say(
                f"{self.spec.name}: {backend.get('name')} computes the float model wrongly ({fault}), so no result of "
                f"this task can be trusted. Remedies: {'; '.join(wrong_float_remedies(backend))}. The search "
                "continues; Ctrl-C ends it"
            )
            running = replace(running, answers=None)
        clock.write("search")
        if running.answers is not None and running.searches:
            running.answers.answer_initial()
        return running

    def _float_fault(self, running: TaskRun, checker: RuntimeChecker) -> str:
        """Return how the runtime computes the float model wrongly, by its outputs or its metric, or "".

        The metric is compared only if an output cannot be, for instance indices of NonMaxSuppression, because the
        float model is scored once more. A metric that compares with the float model itself is not.
        """
        scoring, task, store = running.scoring, running.task, running.store
        with self.observer.work("compare the float model with its file", 1) as step:
            floating = task.candidate(task.space.float_placement())
            found = checker.check(floating, name=f"{self.spec.name}, the float model")
            step.advance()
        if found.is_wrong:
            return str(found)
        own, use = store.known_float_score(task.model_file), scoring.evaluators.get(MAIN_BENCHMARKER)
        all_compared = as_outcome("check", lambda: checker.compares_all_outputs)
        if own is None or use is None or "reference" in use.params or all_compared is not False:
            return ""
        by_file = score_float_file(store, task.model_file, running.worker, self.experiment.limits)
        if isinstance(by_file, Failed):
            return ""
        precision = str(running.engines.describe().get("float_precision", ""))
        return score_difference(own, by_file, scoring.metric or "", precision)

    def _export(self, clock: PhaseClock, running: TaskRun) -> FinalistSet:
        """Recover accuracy, select the incumbents that are confirmed, and export their files."""
        clock.write("final selection")
        write_pattern_cache(running.task, running.judge.goal, self.folder)
        recovered = recover_placements(running)
        selection = select_final(running, lambda: self.site.open(running.worker), self.retry_failed, recovered)
        kinds, tasks = () if self.ends_after_search else self.experiment.transfer, plan_tasks(self.experiment)
        transferred = transferred_placements(kinds, running.task, tasks, self.folder.parent)
        return export_finalists(running, selection, transferred)

    def _confirm(self, clock: PhaseClock, running: TaskRun, table: FinalistSet, backend: Mapping[str, Any]) -> None:
        """Confirm the latency of the exported files, and write their forms with dynamic axes."""
        clock.write("confirmation")
        timed, plan = table.with_latency, self.experiment.confirmation
        if running.limit is not None:
            plan = running.limit.shorten(plan, len(timed.rows), running.turn_s, read_begun_plan(self.folder))
        confirm_rows(plan, self.site.open, running.worker, timed, backend, self.observer, self.retry_failed)
        clock.write("dynamic axes")
        shapes = () if running.shapes is None else [shape.inputs for shape in running.shapes.shapes]
        task, use = running.task, self.spec.backend.use
        write_dynamic_rows(task.model, table, use, self.observer, shapes, task.feeds)
        clock.write("")


def run_experiment(
    experiment: Experiment,
    *,
    out: Path,
    observer: Observer,
    accept_changes: bool = False,
    retry_failed: bool = False,
    answers: AnswerSink | None = None,
) -> None:
    """Run the missing parts of an experiment; a task that cannot be run does not stop the others.

    Args:
        out: Results folder; created if missing.
        accept_changes: Whether a task that was started with other inputs is archived and started anew.
        retry_failed: Whether failed trials, final selections and confirmations are attempted once more.
        answers: Function that receives incumbents confirmed while a search runs; None: no early answers.

    Raises:
        SearcherFailures: Searchers raised unexpected errors; everything else was done.
    """
    commit = git_commit()
    stopped: dict[str, UserError] = {}
    remaining = tasks = plan_tasks(experiment)
    known = None if accept_changes else _recorded_environment(tasks, out)

    def run(spec: TaskSpec, site: ExecutionTarget, searching: bool = False) -> None:
        observer.say(spec.name)
        folder = out / spec.name
        pipeline = TaskPipeline(
            experiment=experiment,
            spec=spec,
            folder=folder,
            commit=commit,
            site=site,
            retry_failed=retry_failed,
            ends_after_search=searching,
            sink=answers,
            observer=observer,
        )
        try:
            run_with_recovery(folder, pipeline.run, accept_changes, observer)
        except UserError as error:
            stopped[spec.name] = error
            if not isinstance(error, FingerprintMismatch):  # a refused task changes nothing
                write_task_error(folder, str(error))
            if len(tasks) > 1:  # the reason is printed once, at the end
                observer.say(f"{spec.name} stopped; the reason is printed at the end")

    with (
        owned_results_dir(out, experiment, accept_changes) as grown,
        open_execution_target(experiment.executor, experiment.limits, known, observer, model_files) as site,
    ):
        if grown:
            observer.say(f"{grown}: continuing from the existing results")
        if experiment.transfer:  # all searches end before placements are transferred
            run_concurrently([partial(run, spec, site, searching=True) for spec in tasks], experiment.executor.tasks)
            remaining = tuple(spec for spec in tasks if spec.name not in stopped)
        run_concurrently([partial(run, spec, site) for spec in remaining], experiment.executor.tasks)
        close_results(out, [spec.name for spec in tasks])
    _raise_failures(tasks, stopped, out)


def _recorded_environment(tasks: Sequence[TaskSpec], out: Path) -> Mapping[str, Any] | None:
    """Return the content of the first readable `env.json` of the tasks; a damaged one is reported by its task."""
    for spec in tasks:
        with suppress(UserError):
            return read_json(out / spec.name / "env.json")
    return None


def _raise_failures(tasks: Sequence[TaskSpec], stopped: Mapping[str, UserError], out: Path) -> None:
    """Raise an error with the reasons of stopped tasks, or else one with the failed searches and their tracebacks."""
    if stopped:
        named: dict[str, list[str]] = {}
        for name, error in stopped.items():
            named.setdefault(str(error), []).append(name)
        lines = (text if len(tasks) == 1 else f"{', '.join(names)}: {text}" for text, names in named.items())
        raise UserError("\n".join(lines)) from next(iter(stopped.values()))
    broken = []
    for task in tasks:
        for search in task.runs:
            end = read_termination(out / task.name / "runs" / f"{search.name}.jsonl")
            if end and end.failed:
                traceback = f" (traceback: {end.traceback_file})" if end.traceback_file else ""
                broken.append(f"{task.name} {search.name} {end.reason}{traceback}")
    if broken:
        more = [f"and {len(broken) - MAX_BROKEN_SHOWN} more"] if len(broken) > MAX_BROKEN_SHOWN else []
        shown = "\n".join([*broken[:MAX_BROKEN_SHOWN], *more])
        raise SearcherFailures(f"{shown}; all other work is done: fix it and run the same command again")


def run_with_recovery(folder: Path, run_task: Callable[[], None], accept_changes: bool, observer: Observer) -> None:
    """Run a task, and continue it after the loss of a worker.

    Args:
        folder: Folder of the task.
        run_task: Function that runs or continues the task.
        accept_changes: Whether the results of a task with changed inputs are archived, and the task starts anew.

    Raises:
        FingerprintMismatch: The inputs have changed, and `accept_changes` is False.
        WorkerLost: More than `MAX_WORKER_LOSSES` workers were lost.
    """
    losses = 0
    while True:
        try:
            return run_task()
        except WorkerLost as error:
            losses += 1
            if losses > MAX_WORKER_LOSSES:
                raise
            observer.say(f"{folder.name}: {error}; continuing with the remaining workers")
        except FingerprintMismatch as error:
            if not accept_changes:
                raise
            backup = archive_task(folder)
            observer.say(f"{error}\naccepted: the earlier results are in {backup.name}; {folder.name} starts over")
