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
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from harness.cluster import open_execution_target
from harness.config.experiment import Experiment
from harness.config.plan import TaskSpec, plan_tasks
from harness.errors import UserError
from harness.pipeline.early_answer import AnswerSink, EarlyAnswers, InitialTiming, time_initial_rows
from harness.pipeline.export import export_finalists
from harness.pipeline.file_scores import score_tool_files
from harness.pipeline.final_selection import select_final
from harness.pipeline.recovery import recover_placements
from harness.pipeline.runtime_checker import RuntimeChecker, make_check_plan, runs_no_model
from harness.pipeline.shape_files import make_shape_set
from harness.pipeline.task_run import TaskRun
from harness.pipeline.time_limit import TimeLimit, seconds_after_searches
from harness.pipeline.transfer import transferred_placements, write_pattern_cache
from harness.progress import Observer
from harness.records import MAIN_BENCHMARKER
from harness.results_dir.fingerprint import FingerprintMismatch, facts_digest, record_or_check
from harness.results_dir.io import archive_existing, read_json
from harness.results_dir.manifest import close_results, complete_task, is_complete, reopen_task
from harness.results_dir.ownership import owned_results_dir
from harness.results_dir.phases import PhaseClock
from harness.results_dir.termination import SearcherFailures, clear_task_error, read_termination, write_task_error
from harness.selection.confirmation import (
    confirm_rows,
    count_noise_floor_turns,
    measure_noise_floor,
    read_begun_plan,
)
from harness.task_setup.accuracy import make_scoring
from harness.task_setup.float_baseline import select_float_baseline
from harness.task_setup.task import Task, compose_task
from harness.timing.provenance import comparability_key, git_commit, lacks_vnni
from harness.timing.workers.engines import Engines, WorkerSpec
from harness.timing.workers.execution_target import ExecutionTarget
from harness.timing.workers.trial_pool import WorkerLost, run_concurrently
from harness.verification.accuracy_store import AccuracyStore
from harness.verification.dynamic_delivery import write_dynamic_rows

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
    tasks = plan_tasks(experiment)
    alone = len(tasks) == 1
    known = None if accept_changes else _recorded_environment(tasks, out)

    def run(spec: TaskSpec, site: ExecutionTarget, searching: bool = False) -> None:
        observer.say(spec.name)
        folder = out / spec.name
        context = _TaskContext(
            spec=spec,
            folder=folder,
            commit=commit,
            site=site,
            retry_failed=retry_failed,
            searching=searching,
            sink=answers,
        )
        try:
            run_with_recovery(folder, partial(_run_task, context, experiment, observer), accept_changes, observer)
        except UserError as error:
            stopped.setdefault(str(error), []).append(spec.name)
            if not isinstance(error, FingerprintMismatch):  # a refused task changes nothing
                write_task_error(folder, str(error))
            if not alone:  # the reason is printed once, at the end
                observer.say(f"{spec.name} stopped; the reason is printed at the end")

    with (
        owned_results_dir(out, experiment, accept_changes) as grown,
        open_execution_target(experiment.executor, experiment.limits, known, observer) as site,
    ):
        if grown:
            observer.say(f"{grown}: continuing from the existing results")
        if experiment.transfer:  # all searches end before placements are transferred
            run_concurrently([partial(run, spec, site, searching=True) for spec in tasks], experiment.executor.tasks)
            tasks = tuple(spec for spec in tasks if spec.name not in chain(*stopped.values()))
        run_concurrently([partial(run, spec, site) for spec in tasks], experiment.executor.tasks)
        close_results(out, [spec.name for spec in plan_tasks(experiment)])
    if stopped:
        raise UserError("\n".join(text if alone else f"{', '.join(names)}: {text}" for text, names in stopped.items()))
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
            backup = archive_existing(folder)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _TaskContext:
    """Task with the folder of its results.

    Attributes:
        commit: Commit of the running code.
        site: Machine or cluster that runs the engines.
        retry_failed: Whether failed trials, final selections and confirmations are attempted once more.
        searching: Whether the run stops after the searches, because placements of other tasks are still missing.
        sink: Function that receives incumbents confirmed while a search runs; None: no early answers.
    """

    spec: TaskSpec
    folder: Path
    commit: str | None
    site: ExecutionTarget
    retry_failed: bool
    searching: bool
    sink: AnswerSink | None


def _run_task(context: _TaskContext, experiment: Experiment, observer: Observer) -> None:
    spec, folder, site = context.spec, context.folder, context.site
    clock = PhaseClock(folder, "set-up")
    minutes = experiment.budget.task_minutes
    limit = None if minutes is None else TimeLimit(seconds=minutes * 60, clock=clock)
    record_or_check(folder / "env.json", site.environment(context.commit), comparability_key)
    facts = site.describe(spec.backend, folder / "work")
    task = compose_task(experiment, spec, folder / "work", observer, facts)
    scoring = make_scoring(experiment.objective, spec.model, task.model, task.work)
    benchmarkers = select_float_baseline(spec.backend, task.float_file, folder, site.open, observer, facts)
    task = task.with_benchmarkers(benchmarkers)
    shapes = make_shape_set(task, folder, site.open, observer)
    worker = WorkerSpec(
        benchmarkers=benchmarkers,
        workdir=task.work,
        evaluators=scoring.evaluators,
        reference=task.model_file,
        adapt=shapes,
    )
    with site.open(worker) as engines, _open_runtime_checker(task, engines, folder, experiment, observer) as checker:
        clock.start("noise floor")
        backend = engines.describe()
        seconds = math.inf if limit is None else limit.search_seconds(1 + len(spec.runs))
        measure = partial(
            measure_noise_floor, site.open, worker, task.model_file, backend, folder, observer, seconds=seconds
        )
        initial = time_initial_rows(experiment, task, measure, answers=context.sink is not None)
        clock.start("set-up")
        clock.split("noise floor", "early answer", initial.share)
        turn_s = clock.seconds_of("noise floor") / count_noise_floor_turns(folder)
        store = AccuracyStore(folder, engines, observer, facts_digest(scoring.facts), keep_mixable=scoring.cross_fitted)
        goal = scoring.goal(store, task.model_file, folder)
        running = TaskRun(
            experiment=experiment,
            task=task,
            engines=engines,
            scoring=scoring,
            judge=scoring.make_accuracy_gate(goal, store, task.model_file),
            noise_floor=initial.noise_floor,
            folder=folder,
            observer=observer,
            checker=checker,
            shapes=shapes,
            limit=limit,
            later_s=seconds_after_searches(
                turn_s, experiment.confirmation, len(experiment.baselines) + len(benchmarkers) - 1, len(spec.runs)
            ),
        )
        running = replace(running, answers=_make_answers(running, initial, lambda: site.open(worker), context.sink))
        record_or_check(
            folder / "task.json",
            running.task_facts(),
            lambda facts: {key: facts.get(key) for key in running.fingerprint()},
        )
        clear_task_error(folder)
        inputs_digest = running.task_digest()  # first: later changes of the inputs must invalidate the marker
        if not (experiment.transfer or context.retry_failed) and is_complete(folder, inputs_digest):
            observer.say(f"{spec.name}: nothing is left to do")
            shutil.rmtree(task.work, ignore_errors=True)
            return
        reopen_task(folder)
        runs = spec.runs if len(task.searched_space) else ()
        if goal.metric is not None and (context.retry_failed or any(map(running.is_unfinished, runs))):
            scoring.prepare_evaluators(store, task.model_file)
        clock.write("search")
        if running.answers is not None and runs:
            running.answers.answer_initial()
        with site.workers(worker, engines, task.inserter, task.candidate(task.space.float_placement())) as workers:
            searches = [partial(running.run_search, run, workers, context.retry_failed) for run in runs]
            run_concurrently(searches, experiment.executor.searches)
        clock.write("final selection")
        write_pattern_cache(task, goal, folder)
        others = [name for name in benchmarkers if name != MAIN_BENCHMARKER]
        recovered = recover_placements(running, store)
        found = select_final(running, lambda: site.open(worker), context.retry_failed, recovered)
        if context.searching:
            export_finalists(running, found, others)
            return
        table = export_finalists(
            running,
            found,
            others,
            transferred_placements(experiment.transfer, task, plan_tasks(experiment), folder.parent),
        )
        clock.write("scoring")
        if scoring.evaluators:
            if store.has_unscored_rows(table):
                scoring.prepare_evaluators(store, task.model_file)
            store.score_rows(table)
            if checker is not None:
                score_tool_files(table, worker, experiment.limits, observer, facts_digest(scoring.facts))
        clock.write("comparison with files")
        if checker is not None:
            checker.check_rows(table, context.retry_failed)
    clock.write("confirmation")
    timed = table.with_latency
    plan = experiment.confirmation
    if limit is not None:
        plan = limit.shorten(plan, len(timed.rows), turn_s, read_begun_plan(folder))
    confirm_rows(plan, site.open, worker, timed, backend, observer, context.retry_failed)
    clock.write("dynamic axes")
    shape_inputs = () if shapes is None else [shape.inputs for shape in shapes.shapes]
    write_dynamic_rows(task.model, table, spec.backend.use, observer, shape_inputs)
    clock.write("")
    shutil.rmtree(task.work, ignore_errors=True)
    failed = any(end.failed for run in runs if (end := running.termination(run)))  # tried again on resume
    complete_task(folder, inputs_digest, complete=not failed)


def _make_answers(
    running: TaskRun,
    initial: InitialTiming,
    open_engines: Callable[[], AbstractContextManager[Engines]],
    sink: AnswerSink | None,
) -> EarlyAnswers | None:
    if sink is None or initial.rows is None:
        return None
    return EarlyAnswers(
        running.task,
        running.engines,
        open_engines,
        checker=running.checker,
        initial=initial,
        metric=running.judge.goal.metric,
        shapes=running.shapes,
        limit=running.limit,
        sink=sink,
        observer=running.observer,
    )


@contextmanager
def _open_runtime_checker(
    task: Task, engines: Engines, folder: Path, experiment: Experiment, observer: Observer
) -> Iterator[RuntimeChecker | None]:
    """Yield the checker that compares engines with their files, or None if the benchmarker runs no model."""
    if runs_no_model(task.spec.backend):
        yield None
        return
    plan = make_check_plan(task, folder, experiment.limits, lacks_vnni(read_json(folder / "env.json")))
    with RuntimeChecker(plan, engines, observer) as checker:
        yield checker


def _recorded_environment(tasks: Sequence[TaskSpec], out: Path) -> Mapping[str, Any] | None:
    """Return the content of the first task's `env.json`, or None if no task has one."""
    begun = (path for spec in tasks if (path := out / spec.name / "env.json").exists())
    return next(map(read_json, begun), None)
