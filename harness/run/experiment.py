"""Runs an experiment: for each cell compose, search, choose finalists, score, confirm. Can be run again at any time.

A results folder holds, for each cell:
    cell.json       what was compared: model, device, space, seeds, baselines, goal
    env.json        the machine
    runs/*.jsonl    one journal per search
    rows.json       the finalists: exported files with their hashes, and which method chose which
    accuracy.json   the evaluator's figures of each row
    confirm.jsonl   raw samples of the confirmation
    models/*.onnx   the exported files themselves: what was timed and scored, byte for byte
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from harness import registry
from harness.errors import UserError
from harness.measure.engines import MAIN, Engines, WorkerSpec
from harness.measure.provenance import environment
from harness.measure.sandbox import open_engines
from harness.records import SCHEMA, Failed
from harness.run.compose import Cell, compose, evaluator_use
from harness.run.config import Experiment, Use, to_yaml
from harness.run.confirming import confirm_rows
from harness.run.engine import Goal, SearchTask, Trial, run_search
from harness.run.finalists import choose
from harness.run.journal import Journal
from harness.run.observe import Observer, Step
from harness.run.plan import CellSpec, RunSpec, plan
from harness.run.rows import write_json
from harness.run.scores import ScoreBook
from harness.run.strongest import float_benchmarkers
from harness.run.trial import attempt_with

__all__ = ["check_experiment", "run_experiment"]


def check_experiment(experiment: Experiment) -> None:
    """Check every plug-in's name and parameters without running anything.

    Raises:
        UserError: The first that does not fit, with what would.
    """
    for searcher in experiment.searchers:
        registry.check_params("searcher", searcher.use, searcher.params, given=("space", "seed"))
    for backend in experiment.backends:
        registry.check_params("benchmarker", backend.use, backend.params)
    for model in experiment.models:
        if model.preprocess is not None:
            registry.check_params("preprocessing", model.preprocess.use, model.preprocess.params)
        if model.evaluator is not None:
            given = ("input_name", "input_shape", "inputs", "reference", "base", "preprocess")
            registry.check_params("evaluator", model.evaluator.use, model.evaluator.params, given=given)
        elif experiment.objective.max_drop is not None:
            raise UserError(f"objective.max_drop: model {model.name!r} has no evaluator whose metric could drop")


def run_experiment(experiment: Experiment, *, base: Path, out: Path, observer: Observer) -> None:
    """Run what is not yet there of an experiment.

    Args:
        base: Folder that relative paths of the experiment start from.
        out: Results folder; created where missing.

    Raises:
        UserError: Something that the user can mend; whatever was measured before is kept.
    """
    _claim(out, experiment)
    for spec in plan(experiment):
        _run_cell(experiment, spec, base, out / spec.name, observer)


def _claim(out: Path, experiment: Experiment) -> None:
    """Make the results folder this experiment's own.

    Raises:
        UserError: Another experiment's results are there.
    """
    file = out / "experiment.yaml"
    if file.exists():
        there = yaml.safe_load(file.read_text(encoding="utf-8"))
        here = experiment.model_dump(mode="json")
        changed = [key for key in here if not isinstance(there, dict) or there.get(key) != here[key]]
        if changed:
            raise UserError(
                f"{out}: holds results of another experiment (different: {', '.join(changed)}); use another --out"
            )
        return
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out}: is not empty and holds no experiment; use another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        file.write_text(to_yaml(experiment), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror}); use another --out") from error


def _run_cell(experiment: Experiment, spec: CellSpec, base: Path, folder: Path, observer: Observer) -> None:
    observer.say(spec.name)
    cell = compose(experiment, spec, base, folder / "work", observer)
    evaluator = evaluator_use(spec.model, cell.model, base, cell.work)
    write_json(folder / "env.json", environment())
    benchmarkers = float_benchmarkers(spec.backend, cell.model_file, folder, experiment.limits, observer)
    evaluators = {} if evaluator is None else {MAIN: evaluator}
    worker = WorkerSpec(benchmarkers=benchmarkers, workdir=cell.work, evaluators=evaluators)
    with open_engines(worker, experiment.limits) as engines:
        book = ScoreBook(folder, engines, observer)
        metric = _metric(evaluator)
        goal = _goal(experiment, metric, book, cell)
        running = _Running(
            experiment=experiment, cell=cell, engines=engines, goal=goal, folder=folder, observer=observer
        )
        write_json(folder / "cell.json", {**running.facts(), "metric": None if metric is None else metric.name})
        for run in spec.runs:
            running.search(run)
        rows, _ = choose(experiment, cell, goal, folder, [name for name in benchmarkers if name != MAIN])
        if evaluator is not None:
            book.score(rows)
    confirm_rows(experiment, worker, rows, folder, observer)
    shutil.rmtree(cell.work, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Metric:
    name: str
    higher_is_better: bool


def _metric(evaluator: Use | None) -> _Metric | None:
    if evaluator is None:
        return None
    factory: Any = registry.load("evaluator", evaluator.use)
    return _Metric(name=factory.metric, higher_is_better=factory.higher_is_better)


def _goal(experiment: Experiment, metric: _Metric | None, book: ScoreBook, cell: Cell) -> Goal:
    """The goal of the searches; where accuracy is bounded the float model is scored first.

    Raises:
        UserError: The float model itself cannot be scored.
    """
    if metric is None or experiment.objective.max_drop is None:
        return Goal()
    accuracy = book.float_score(cell.model_file)
    if isinstance(accuracy, Failed):
        raise UserError(f"{cell.model.source}: the float model cannot be scored; {accuracy.stage}: {accuracy.reason}")
    return Goal(
        metric=metric.name,
        reference=accuracy.metrics[metric.name],
        higher_is_better=metric.higher_is_better,
        max_drop=experiment.objective.max_drop,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    """One cell while its searches run."""

    experiment: Experiment
    cell: Cell
    engines: Engines
    goal: Goal
    folder: Path
    observer: Observer

    def search(self, run: RunSpec) -> None:
        """Run one search, or what is left of it."""
        budget = self.experiment.budget
        make: Any = registry.load("searcher", run.searcher.use)
        task = SearchTask(
            space=self.cell.space,
            searcher=make(self.cell.space, seed=run.seed, **run.searcher.params),
            seeds=self.cell.seeds,
            candidate=self.cell.candidate,
            goal=self.goal,
            evaluations=max(budget.evaluations),
            seconds=None if budget.minutes is None else budget.minutes * 60,
        )
        attempt = attempt_with(self.engines, self.experiment.sampling, scored=self.goal.metric is not None)
        fingerprint = {**self.fingerprint(), "searcher": run.searcher.model_dump(), "seed": run.seed}
        with (
            Journal(self.folder / "runs" / f"{run.name}.jsonl", fingerprint) as journal,
            self.observer.work(f"{self.cell.spec.name} {run.name}", task.evaluations) as step,
        ):
            run_search(task, attempt, journal, _watch(step))

    def fingerprint(self) -> dict[str, Any]:
        """What must be the same for a run to go on."""
        return {
            "model_sha256": self.cell.model.sha256,
            "backend": dict(self.engines.describe()),
            "precision": self.cell.spec.precision,
            "space": hashlib.sha256(repr(self.cell.space.dimensions).encode()).hexdigest()[:16],
            "seeds": {seed.name: self.cell.space.digest(seed.placement) for seed in self.cell.seeds},
            "calibration": self.cell.spec.model.calibration.model_dump(mode="json"),
            "sampling": self.experiment.sampling.model_dump(mode="json"),
            "goal": asdict(self.goal),
            "qdq_bench": version("qdq-bench"),
        }

    def facts(self) -> dict[str, Any]:
        """What readers of the results need to know about the cell."""
        return {
            "schema": SCHEMA,
            "cell": self.cell.spec.name,
            "model": self.cell.spec.model.name,
            "source": self.cell.spec.model.use,
            "nodes": len(self.cell.model.nodes),
            "dimensions": len(self.cell.space),
            "patterns": len(self.cell.space.groups),
            "calibrated_on": self.cell.calibrated_on,
            "placements": {name: list(placement.choices) for name, placement in self.cell.placements.items()},
            **self.fingerprint(),
        }


def _watch(step: Step) -> Callable[[Trial], None]:
    spent = 0

    def watch(trial: Trial) -> None:
        nonlocal spent
        if trial.evaluations > spent:
            spent = trial.evaluations
            step.advance("" if trial.best_ms is None else f"best {trial.best_ms:.3f} ms")

    return watch
