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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from harness.base.errors import UserError
from harness.base.files import facts_digest, read_json
from harness.base.progress import Observer
from harness.config.experiment import Experiment, SearchSpec, TaskSpec, plan_tasks
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
from harness.run.early_answer import AnswerSink, EarlyAnswers, InitialTiming, time_initial_rows
from harness.run.prepare.accuracy import AccuracyStore, Scoring, make_scoring, score_float_file, score_tool_files
from harness.run.prepare.float_baseline import select_float_baseline
from harness.run.prepare.task import Task, compose_task
from harness.run.prepare.transfer import transferred_placements, write_pattern_cache
from harness.run.select.export import export_finalists
from harness.run.select.final_selection import select_final
from harness.run.select.recovery import recover_placements
from harness.run.task_run import TaskRun
from harness.run.time_limit import TimeLimit, seconds_after_searches
from harness.run.verify.dynamic_check import write_dynamic_rows
from harness.run.verify.runtime_checker import RuntimeChecker, make_check_plan, runs_no_model
from harness.run.verify.shape_files import make_shape_set
from harness.runtimes.shape_set import ShapeSet
from harness.workers.engines import Engines, WorkerLost, WorkerSpec, as_outcome
from harness.workers.ray import open_execution_target
from harness.workers.trial_pool import ExecutionTarget, run_concurrently


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setup:
    """Task with the specification of its workers, before an engine is built.

    Attributes:
        limit: Limit on the time of the task, or None.
        shapes: Files of the task for several shapes of the inputs; None: a single shape.
    """

    clock: PhaseClock
    limit: TimeLimit | None
    task: Task
    scoring: Scoring
    shapes: ShapeSet | None
    worker: WorkerSpec

    @property
    def other_benchmarkers(self) -> list[str]:
        """Names of the float precisions that are not the baseline."""
        return [name for name in self.worker.benchmarkers if name != MAIN_BENCHMARKER]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Session:
    """Task with open engines, a noise floor and a goal.

    Attributes:
        store: Scores of the task's files.
        backend: Facts of the benchmarker.
        turn_s: Seconds of one turn of a build in the A/A check.
    """

    running: TaskRun
    store: AccuracyStore
    backend: Mapping[str, Any]
    turn_s: float


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
            UserError: A step failed for a reason that the user can correct.
            WorkerLost: A worker was lost, and no other one can continue its work.
        """
        require_unchanged_task(self.folder, self.observer.say)
        setup = self._set_up()
        with (
            self.site.open(setup.worker) as engines,
            self._open_runtime_checker(setup.task, engines) as checker,
        ):
            session = self._begin(setup, engines, checker)
            running = session.running
            record_or_check(
                self.folder / "task.json",
                running.task_facts(),
                lambda facts: {key: facts.get(key) for key in running.fingerprint()},
            )
            clear_task_error(self.folder)
            inputs_digest = running.task_digest()  # first: later changes of the inputs must invalidate the marker
            if not (self.experiment.transfer or self.retry_failed) and is_complete(self.folder, inputs_digest):
                self.observer.say(f"{self.spec.name}: nothing is left to do")
                shutil.rmtree(setup.task.work, ignore_errors=True)
                return
            reopen_task(self.folder)
            runs, running = self._prepare_searches(setup, session)
            baseline = setup.task.candidate(setup.task.space.float_placement())
            with self.site.workers(setup.worker, engines, setup.task.inserter, baseline) as workers:
                searches = [partial(running.run_search, run, workers, self.retry_failed) for run in runs]
                run_concurrently(searches, self.experiment.executor.searches)
            table = self._export(setup, session)
            if self.ends_after_search:
                return
            self._score_and_check(setup, session, table)
        self._confirm(setup, session, table)
        shutil.rmtree(setup.task.work, ignore_errors=True)
        failed = any(end.failed for run in self.spec.runs if (end := running.termination(run)))  # tried again on resume
        complete_task(self.folder, inputs_digest, complete=not failed)

    def _set_up(self) -> _Setup:
        """Compose the task, and select the float precision of its baseline."""
        clock = PhaseClock(self.folder, "set-up")
        minutes = self.experiment.budget.task_minutes
        record_or_check(self.folder / "env.json", self.site.environment(self.commit), comparability_key)
        work = self.folder / "work"
        facts = self.site.describe(self.spec.backend, work)
        task = compose_task(self.experiment, self.spec, work, self.observer, facts)
        scoring = make_scoring(self.experiment.objective, self.spec.model, task.model, task.work)
        benchmarkers = select_float_baseline(
            self.spec.backend, task.float_file, self.folder, self.site.open, self.observer, facts
        )
        task = task.with_benchmarkers(benchmarkers)
        shapes = make_shape_set(task, self.folder, self.site.open, self.observer)
        worker = WorkerSpec(
            benchmarkers=benchmarkers,
            workdir=task.work,
            evaluators=scoring.evaluators,
            reference=task.model_file,
            adapt=shapes,
            sizes=task.sizes,
        )
        limit = None if minutes is None else TimeLimit(seconds=minutes * 60, clock=clock)
        return _Setup(clock=clock, limit=limit, task=task, scoring=scoring, shapes=shapes, worker=worker)

    @contextmanager
    def _open_runtime_checker(self, task: Task, engines: Engines) -> Iterator[RuntimeChecker | None]:
        """Yield the checker that compares engines with their files, or None if the benchmarker runs no model."""
        if runs_no_model(task.spec.backend):
            yield None
            return
        plan = make_check_plan(
            task, self.folder, self.experiment.limits, lacks_vnni(read_json(self.folder / "env.json"))
        )
        with RuntimeChecker(plan, engines, self.observer) as checker:
            yield checker

    def _begin(self, setup: _Setup, engines: Engines, checker: RuntimeChecker | None) -> _Session:
        """Measure the noise floor, time the initial placements with it, and score the float model."""
        clock, task, scoring, limit = setup.clock, setup.task, setup.scoring, setup.limit
        clock.start("noise floor")
        backend = engines.describe()
        measure = partial(
            measure_noise_floor,
            self.site.open,
            setup.worker,
            task.model_file,
            backend,
            self.folder,
            self.observer,
            seconds=math.inf if limit is None else limit.search_seconds(1 + len(self.spec.runs)),
        )
        initial = time_initial_rows(self.experiment, task, measure, answers=self.sink is not None)
        clock.start("set-up")
        clock.split("noise floor", "early answer", initial.share)
        turn_s = clock.seconds_of("noise floor") / len(noise_floor_events(self.folder))
        store = AccuracyStore(
            self.folder, engines, self.observer, facts_digest(scoring.facts), keep_mixable=scoring.cross_fitted
        )
        fixed_rows = len(self.experiment.baselines) + len(setup.other_benchmarkers)
        running = TaskRun(
            experiment=self.experiment,
            task=task,
            engines=engines,
            scoring=scoring,
            judge=scoring.make_accuracy_gate(scoring.goal(store, task.model_file, self.folder), store, task.model_file),
            noise_floor=initial.noise_floor,
            folder=self.folder,
            observer=self.observer,
            checker=checker,
            shapes=setup.shapes,
            limit=limit,
            later_s=seconds_after_searches(turn_s, self.experiment.confirmation, fixed_rows, len(self.spec.runs)),
        )
        running = replace(running, answers=self._make_answers(running, initial, setup.worker))
        return _Session(running=running, store=store, backend=backend, turn_s=turn_s)

    def _make_answers(self, running: TaskRun, initial: InitialTiming, worker: WorkerSpec) -> EarlyAnswers | None:
        if self.sink is None or initial.rows is None:
            return None
        return EarlyAnswers(
            running.task,
            running.engines,
            lambda: self.site.open(worker),
            checker=running.checker,
            initial=initial,
            metric=running.judge.goal.metric,
            shapes=running.shapes,
            limit=running.limit,
            sink=self.sink,
            observer=self.observer,
        )

    def _prepare_searches(self, setup: _Setup, session: _Session) -> tuple[tuple[SearchSpec, ...], TaskRun]:
        """Return the searches and their task run; before, deliver a confirmed initial placement as an early answer.

        If the runtime computes the float model wrongly, a line reports it, and there are no early answers.
        """
        running, task = session.running, setup.task
        runs = self.spec.runs if len(task.searched_space) else ()
        unfinished = self.retry_failed or any(map(running.is_unfinished, runs))
        if running.judge.goal.metric is not None and unfinished:
            setup.scoring.prepare_evaluators(session.store, task.model_file)
        if running.checker is not None and unfinished and self._is_float_wrong(setup, session, running.checker):
            running = replace(running, answers=None)
        setup.clock.write("search")
        if running.answers is not None and runs:
            running.answers.answer_initial()
        return runs, running

    def _is_float_wrong(self, setup: _Setup, session: _Session, checker: RuntimeChecker) -> bool:
        """Return whether the runtime computes the float model wrongly, by its outputs or its metric, and say so."""
        floating = setup.task.candidate(setup.task.space.float_placement())
        with self.observer.work("compare the float model with its file", 1) as step:
            found = checker.check(floating, name=f"{self.spec.name}, the float model")
            step.advance()
        text = str(found) if found.is_wrong else self._float_score_difference(setup, session, checker)
        if text:
            steps = "; ".join(wrong_float_remedies(session.backend))
            self.observer.say(
                f"{self.spec.name}: {session.backend.get('name')} computes the float model wrongly ({text}), so no "
                f"result of this task can be trusted. Remedies: {steps}. The search continues; Ctrl-C ends it"
            )
        return bool(text)

    def _float_score_difference(self, setup: _Setup, session: _Session, checker: RuntimeChecker) -> str:
        """Return how the metric of the float model differs between the runtime and its file, or "".

        The metric is compared only if an output cannot be, for instance indices of NonMaxSuppression, because the
        float model is scored once more. A metric that compares with the float model itself is not.
        """
        scoring, task = setup.scoring, setup.task
        own = session.store.known_float_score(task.model_file)
        all_compared = as_outcome("check", lambda: checker.compares_all_outputs)
        use = scoring.evaluators.get(MAIN_BENCHMARKER)
        if own is None or use is None or "reference" in use.params or all_compared is not False:
            return ""
        by_file = score_float_file(session.store, task.model_file, setup.worker, self.experiment.limits)
        if isinstance(by_file, Failed):
            return ""
        return score_difference(own, by_file, scoring.metric or "", str(session.backend.get("float_precision", "")))

    def _export(self, setup: _Setup, session: _Session) -> FinalistSet:
        """Recover accuracy, select the incumbents that are confirmed, and export their files."""
        running, task = session.running, setup.task
        setup.clock.write("final selection")
        write_pattern_cache(task, running.judge.goal, self.folder)
        recovered = recover_placements(running, session.store)
        selection = select_final(running, lambda: self.site.open(setup.worker), self.retry_failed, recovered)
        transferred = (
            {}
            if self.ends_after_search
            else transferred_placements(self.experiment.transfer, task, plan_tasks(self.experiment), self.folder.parent)
        )
        return export_finalists(running, selection, setup.other_benchmarkers, transferred)

    def _score_and_check(self, setup: _Setup, session: _Session, table: FinalistSet) -> None:
        """Score the exported files, and compare their outputs in the runtime with those of the files."""
        scoring, store, checker = setup.scoring, session.store, session.running.checker
        setup.clock.write("scoring")
        if scoring.evaluators:
            if store.has_unscored_rows(table):
                scoring.prepare_evaluators(store, setup.task.model_file)
            store.score_rows(table)
            if checker is not None:
                score_tool_files(
                    table, setup.worker, self.experiment.limits, self.observer, facts_digest(scoring.facts)
                )
        setup.clock.write("comparison with files")
        if checker is not None:
            checker.check_rows(table, self.retry_failed)

    def _confirm(self, setup: _Setup, session: _Session, table: FinalistSet) -> None:
        """Confirm the latency of the exported files, and write their forms with dynamic axes."""
        setup.clock.write("confirmation")
        timed, plan = table.with_latency, self.experiment.confirmation
        if setup.limit is not None:
            plan = setup.limit.shorten(plan, len(timed.rows), session.turn_s, read_begun_plan(self.folder))
        confirm_rows(plan, self.site.open, setup.worker, timed, session.backend, self.observer, self.retry_failed)
        setup.clock.write("dynamic axes")
        shape_inputs = () if setup.shapes is None else [shape.inputs for shape in setup.shapes.shapes]
        task, use = setup.task, self.spec.backend.use
        write_dynamic_rows(task.model, table, use, self.observer, shape_inputs, task.feeds)
        setup.clock.write("")


MAX_WORKER_LOSSES = 3  # per task; counted only if no other worker can take over

MAX_BROKEN_SHOWN = 3
"""Number of failed searches named at the end; the report lists all."""


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
        UserError: One task or more failed for a reason that the user can correct; all measurements are kept.
    """
    commit = git_commit()
    stopped: dict[str, list[str]] = {}
    errors: list[UserError] = []
    tasks = plan_tasks(experiment)
    alone = len(tasks) == 1
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
            stopped.setdefault(str(error), []).append(spec.name)
            errors.append(error)
            if not isinstance(error, FingerprintMismatch):  # a refused task changes nothing
                write_task_error(folder, str(error))
            if not alone:  # the reason is printed once, at the end
                observer.say(f"{spec.name} stopped; the reason is printed at the end")

    with (
        owned_results_dir(out, experiment, accept_changes) as grown,
        open_execution_target(experiment.executor, experiment.limits, known, observer, model_files) as site,
    ):
        if grown:
            observer.say(f"{grown}: continuing from the existing results")
        if experiment.transfer:  # all searches end before placements are transferred
            run_concurrently([partial(run, spec, site, searching=True) for spec in tasks], experiment.executor.tasks)
            tasks = tuple(spec for spec in tasks if spec.name not in chain(*stopped.values()))
        run_concurrently([partial(run, spec, site) for spec in tasks], experiment.executor.tasks)
        close_results(out, [spec.name for spec in plan_tasks(experiment)])
    if stopped:
        lines = (text if alone else f"{', '.join(names)}: {text}" for text, names in stopped.items())
        raise UserError("\n".join(lines)) from errors[0]
    _raise_searcher_failures(tasks, out)


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


def _raise_searcher_failures(tasks: Iterable[TaskSpec], out: Path) -> None:
    """Raise an error with the failed searches and the location of their tracebacks.

    Raises:
        SearcherFailures: A searcher failed.
    """
    ends = {
        f"{spec.name} {run.name}": read_termination(out / spec.name / "runs" / f"{run.name}.jsonl")
        for spec in tasks
        for run in spec.runs
    }
    broken = [
        f"{name} {end.reason}" + (f" (traceback: {end.traceback_file})" if end.traceback_file else "")
        for name, end in ends.items()
        if end and end.failed
    ]
    if broken:
        named = broken[:MAX_BROKEN_SHOWN] + (
            [f"and {len(broken) - MAX_BROKEN_SHOWN} more"] if len(broken) > MAX_BROKEN_SHOWN else []
        )
        raise SearcherFailures("\n".join(named) + "; all other work is done: fix it and run the same command again")


def _recorded_environment(tasks: Sequence[TaskSpec], out: Path) -> Mapping[str, Any] | None:
    """Return the content of the first task's `env.json`, or None if no task has one; the task itself reports damage."""
    for path in (out / spec.name / "env.json" for spec in tasks):
        with suppress(UserError):
            return read_json(path)
    return None
