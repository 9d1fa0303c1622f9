"""Run of the searches of one task, and the fingerprint that must not change during the run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harness.base.files import archive_existing, facts_digest
from harness.base.progress import Observer, ProgressTask, format_incumbent
from harness.config.experiment import Experiment, SearchSpec
from harness.graph.io.digests import digest_file
from harness.measure.records import SCHEMA_VERSION
from harness.results.journal import Journal, read_journal
from harness.results.lines import first_line, restore_lines
from harness.results.manifest import recorded, recorded_log
from harness.results.search_log import encode_goal
from harness.results.termination import clear_termination, read_termination, write_termination
from harness.results.turns import baseline_latency
from harness.run.confirm.confirmation import reference_latency_if_noisy
from harness.run.early_answer import EarlyAnswers
from harness.run.prepare.accuracy import Scoring
from harness.run.prepare.accuracy_store import AccuracyStore
from harness.run.prepare.float_baseline import dialect_use
from harness.run.prepare.methods import ExternalSearcherAdapter, open_search
from harness.run.prepare.task import Task
from harness.run.search.loop import ReplayMismatch, SearchLoopResult, SearchTask, TrialEvent, run_search
from harness.run.search.optuna_mirror import OPTUNA_JOURNAL_NAME, mirror_to_optuna
from harness.run.search.trial import MAX_BUILDS, AccuracyGate, NoisePolicy, measure
from harness.run.time_limit import TimeLeft, TimeLimit, seconds_after_searches
from harness.run.verify.runtime_checker import RuntimeChecker
from harness.runtimes.shape_set import ShapeSet
from harness.workers.engines import Engines, WorkerSpec
from harness.workers.trial_pool import QueueFactory

PRECISIONS_ADDED_LATER = frozenset({"fp8e5m2"})
"""Precisions that were added to dialects later; they are left out of fingerprints because they change no candidate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRun:
    """State of a task while its searches run.

    Attributes:
        worker: Plug-ins of the workers of the task.
        scoring: Evaluators of the task.
        store: Scores of the task's files.
        judge: Test of candidates by accuracy, with the goal of the searches.
        noise_floor: Relative noise floor of latency.
        checker: Comparison of engines with their files; None if the benchmarker runs no model.
        answers: Source of early answers; None: incumbents are confirmed only at the end.
        limit: Limit on the wall-clock time of the task; None: no limit.
        turn_s: Seconds of one turn of a build in the A/A check; 0: unknown.
    """

    experiment: Experiment
    task: Task
    engines: Engines
    worker: WorkerSpec
    scoring: Scoring
    store: AccuracyStore
    judge: AccuracyGate
    noise_floor: float
    folder: Path
    observer: Observer
    checker: RuntimeChecker | None = None
    answers: EarlyAnswers | None = None
    limit: TimeLimit | None = None
    turn_s: float = 0.0

    @property
    def shapes(self) -> ShapeSet | None:
        """Return the shapes at which placements are timed; None: the shape of the search."""
        return self.worker.adapt if isinstance(self.worker.adapt, ShapeSet) else None

    @property
    def searches(self) -> tuple[SearchSpec, ...]:
        """Return the searches of the task; none if its space is empty."""
        return self.task.spec.runs if len(self.task.searched_space) else ()

    def run_search(self, run: SearchSpec, workers: QueueFactory, retry_failed: bool) -> None:
        """Run or continue one search, and record the reason if it ends before its budget is spent.

        A search whose searcher failed continues, or starts anew if the searcher now makes other proposals.

        Args:
            workers: Function that opens the executor of the search, given the factory of its trial function.
            retry_failed: Whether failed trials are attempted once more.

        Raises:
            ReplayMismatch: A searcher that had not failed does not make the proposals of the journal again.
        """
        journal, named = self.journal(run), f"{self.task.spec.name} {run.name}"
        # Removed only when it is outdated, so that an interrupted run changes nothing.
        before = read_termination(journal)
        try:
            ending = self._run_search_loop(run, workers, retry_failed)
        except ReplayMismatch:
            if before is None or not before.failed:
                raise
            with recorded(journal):
                restore_lines(journal)
                kept = archive_existing(journal)
            clear_termination(journal)
            self.observer.say(
                f"{named} failed and now has other proposals, so it starts again (old journal: {kept.name})"
            )
            ending = self._run_search_loop(run, workers, retry_failed)
        if not ending.reason:
            clear_termination(journal)
            return
        what, most = "ended" if ending.failure is None else "failed", max(self.experiment.budget.evaluations)
        reason = f"{what} at {ending.evaluations} of {most}: {ending.reason}"
        self.observer.say(f"{named} {write_termination(journal, reason, ending.failure).reason}")

    def _run_search_loop(self, run: SearchSpec, workers: QueueFactory, retry_failed: bool) -> SearchLoopResult:
        budget, sampling, path = self.experiment.budget, self.experiment.sampling, self.journal(run)
        most, confirmation = max(budget.evaluations), self.experiment.confirmation
        one_winner = self.experiment.objective.minimize == "latency"
        kept = max(confirmation.top_k, confirmation.candidates) if one_winner else most
        without, judge = run.searcher.without, self.judge
        level_ms = reference_latency_if_noisy(self.folder, self.task.spec.backend, sampling.interleave)
        noise = NoisePolicy(
            noise_floor=self.noise_floor,
            racing="racing" not in without,
            builds=1 if "rebuilds" in without else MAX_BUILDS,
            reference_latency_ms=level_ms,
        )
        with (
            open_search(run, self.task, kept) as search,
            Journal(path, self._search_fingerprint(run)) as journal,
            recorded_log(path),
            self.observer.work(f"{self.task.spec.name} {run.name}", most) as step,
            workers(lambda own: partial(measure, engines=own, sampling=sampling, gate=judge, noise=noise)) as executor,
        ):
            left = 1 + sum(not first_line(self.journal(each)) for each in self.task.spec.runs)
            spent_s = max((entry.result.elapsed_s for entry in journal.entries if entry.result), default=0.0)
            limits = [] if budget.minutes is None else [budget.minutes * 60]
            if self.limit is not None:
                limits.append(spent_s + self.limit.search_seconds(left))
            design, least = [search.candidate(each.placement) for each in search.initial_design], 0
            if self.answers is not None:
                least = self.answers.required_evaluations(design)
            task = replace(
                search,
                goal=judge.goal,
                evaluations=most,
                seconds=min(limits, default=None),
                least=least,
                window=self.experiment.executor.max_pending,
                retry_failed=retry_failed,
                stop_at=budget.stop_at,
            )
            watch = self._make_watcher(run, task, step, journal, most * left, interleaved=level_ms is not None)
            ending = run_search(task, executor, journal, watch)
        error = search.searcher.left if isinstance(search.searcher, ExternalSearcherAdapter) else None
        if ending.failure is not None or error is None:
            return ending
        return ending._replace(reason=f"on leaving: {error.reason}", failure=error)

    def _make_watcher(
        self,
        run: SearchSpec,
        task: SearchTask,
        step: ProgressTask,
        journal: Journal,
        evaluations: int,
        *,
        interleaved: bool,
    ) -> Callable[[TrialEvent], None]:
        """Return the function that shows each trial, and confirms a clearly better incumbent.

        Args:
            evaluations: Number of evaluations of this search and of those that have not begun.
            interleaved: Whether candidates are timed in turns with the float model.
        """
        searches, goal, spent = self.task.spec.runs, self.judge.goal, 0
        baselines = len(self.experiment.baselines) + len(self.worker.benchmarkers) - 1
        live = mirror_to_optuna(
            self.folder / OPTUNA_JOURNAL_NAME,
            f"{self.task.spec.name}/{run.name}",
            task.space,
            goal,
            fresh=not journal.entries,
        )
        describe = partial(
            format_incumbent,
            float_ms=baseline_latency(self.folder),
            interleaved=interleaved,
            bounded=goal.metric is not None,
        )
        left = TimeLeft(
            evaluations=evaluations,
            replayed=sum(entry.result is not None for entry in journal.entries),
            later_s=seconds_after_searches(self.turn_s, self.experiment.confirmation, baselines, len(searches)),
            limit=self.limit,
        )

        def watch(trial: TrialEvent) -> None:
            nonlocal spent
            live(trial)
            if trial.evaluations > spent:
                spent, notes = trial.evaluations, list[str]()
                if trial.best_ms is not None:
                    notes.append(describe(trial.best_ms, is_float=trial.best_is_float))
                notes.append(self.answers.note if self.answers else "")
                if trial.expected_gain is not None:
                    notes.append(f"expected further gain {trial.expected_gain:.1%}")
                step.advance(", ".join(filter(None, (*notes, left.describe(spent)))))
            if self.answers is not None:
                initial = trial.proposal.number + 1 < len(task.initial_design)
                self.answers.consider(run.searcher.name, trial, task.candidate, initial=initial)

        return watch

    def _search_fingerprint(self, run: SearchSpec) -> dict[str, Any]:
        """Return the inputs of a search that must not change when it resumes.

        Settings that did not exist in older versions are included only if they differ from their defaults.
        """
        window = self.experiment.executor.max_pending
        method = run.searcher.model_dump(exclude=None if run.searcher.without else {"without"})
        fingerprint = {**self.fingerprint(), "searcher": method, "seed": run.seed}
        return fingerprint if window == 1 else {**fingerprint, "window": window}

    def journal(self, run: SearchSpec) -> Path:
        """Return the path of the journal of a search."""
        return self.folder / "runs" / f"{run.name}.jsonl"

    def is_unfinished(self, run: SearchSpec) -> bool:
        """Return whether a search has fewer results than its budget, also if its searcher had no more proposals."""
        path = self.journal(run)
        known = {entry.proposal.digest for entry in read_journal(path) if entry.result} if first_line(path) else ()
        return len(known) < max(self.experiment.budget.evaluations)

    @property
    def experiment_digest(self) -> str:
        """Return the digest (16 hexadecimal digits) of the experiment's settings that affect results."""
        unused: dict[str, Any] = {"description": True, "executor": True, "models": {"__all__": {"expect"}}}
        if self.experiment.budget.stop_at is None:
            unused["budget"] = {"stop_at"}
        if self.experiment.budget.task_minutes is None:
            unused["budget"] = {*unused.get("budget", ()), "task_minutes"}
        return facts_digest(self.experiment.model_dump(mode="json", exclude=unused))

    def task_digest(self) -> str:
        """Return a digest, as `experiment_digest`, also of the task's inputs, including models of other tools."""
        brought = {name: digest_file(f.path) for name, f in self.task.external_models.items() if f.path is not None}
        models = [brought] if brought else []
        return facts_digest([self.experiment_digest, *models, *map(self._search_fingerprint, self.task.spec.runs)])

    def fingerprint(self) -> dict[str, Any]:
        """Return the values, as JSON values by name, that must not change for a run to resume."""
        dialect = self.task.dialect
        return {
            "model_sha256": self.task.model.sha256,
            "backend": dict(self.engines.describe()),
            "precision": self.task.spec.precision,
            "space": hashlib.sha256(repr(self.task.space.dimensions).encode()).hexdigest()[:16],
            "initial": {each.name: self.task.space.digest(each.placement) for each in self.task.initial_design},
            "dialect": facts_digest({**dialect.facts, "precisions": dialect.precisions - PRECISIONS_ADDED_LATER}),
            "calibration": self.task.spec.model.calibration.model_dump(mode="json"),
            "ranges": facts_digest(self.task.ranges),
            "sampling": self.experiment.sampling.model_dump(mode="json"),
            "goal": encode_goal(self.judge.goal),
            **self.scoring.facts,
            **({"data": dict(self.scoring.data)} if self.scoring.data else {}),
            "qdq_bench": version("qdq-bench"),
        }

    def task_facts(self) -> dict[str, Any]:
        """Return the content of `task.json`: the fingerprint and other facts that readers of the results need."""
        return {
            "schema": SCHEMA_VERSION,
            "config": self.experiment_digest,
            "task": self.task.spec.name,
            "model": self.task.spec.model.name,
            "source": self.task.spec.model.use,
            "nodes": len(self.task.model.nodes),
            "inputs": {name: list(self.task.model.types[name].shape) for name in self.task.model.inputs},
            "dimensions": len(self.task.space),
            "patterns": len(self.task.space.groups),
            "calibrated_on": self.task.calibrated_on,
            "accuracy_only": sorted(self.task.accuracy_only),
            "calibration_remarks": list(self.task.remarks),
            "cache_remarks": list(self.task.cache_remarks),
            "tool_methods": {name: tool.method for name, tool in self.task.external_models.items() if tool.method},
            "dialect_use": dialect_use(self.task.spec.backend, self.task.facts),
            "placements": {name: list(placement.choices) for name, placement in self.task.placements.items()},
            "metric": self.scoring.metric,
            "higher_is_better": self.scoring.higher_is_better,
            **({} if self.shapes is None else {"shapes": {each.label: each.inputs for each in self.shapes.shapes}}),
            **self.fingerprint(),
        }
