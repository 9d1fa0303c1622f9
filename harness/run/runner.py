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

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from harness.base.errors import UserError
from harness.base.files import read_json
from harness.base.progress import Observer
from harness.config.experiment import Experiment, TaskSpec, plan_tasks
from harness.graph.io.files import model_files
from harness.measure.provenance import git_commit
from harness.results.journal import FingerprintMismatch
from harness.results.manifest import archive_task, close_results
from harness.results.ownership import owned_results_dir
from harness.results.termination import SearcherFailures, read_termination, write_task_error
from harness.run.early_answer import AnswerSink
from harness.run.task_pipeline import TaskPipeline
from harness.workers.engines import WorkerLost
from harness.workers.ray import open_execution_target
from harness.workers.trial_pool import ExecutionTarget, run_concurrently

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
