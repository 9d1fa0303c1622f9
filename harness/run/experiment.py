"""Runs an experiment: for each cell compose, search, choose finalists, score, confirm. Can be run again at any time.

A results folder holds, for each cell:
    env.json        the machine on which it was begun
    float.json      at which float precision, by measurement
    floor.json      what the baseline gains over itself: the noise floor
    cell.json       what was compared: model, device, space, seeds, baselines, goal
    runs/*.jsonl    one journal per search
    rows.json       the finalists: exported files with their hashes, and which method chose which
    accuracy.json   the evaluator's figures of each file
    confirm.jsonl   raw samples of the confirmation
    models/*.onnx   the exported files themselves: what was timed and scored, byte for byte

`env.json` and `cell.json` are written once; what they hold must still be so when the experiment goes on.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Set
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

from harness.cluster import open_site
from harness.errors import UserError
from harness.measure.engines import MAIN, Engines, WorkerSpec
from harness.measure.executor import Attempt, at_once
from harness.measure.provenance import decisive, git_commit
from harness.measure.site import Site, Workers
from harness.records import SCHEMA
from harness.run.claim import claimed
from harness.run.compare import refuse_changes
from harness.run.compose import Cell, compose, dialect_use
from harness.run.config import Experiment
from harness.run.confirming import confirm_rows, level, noise_floor
from harness.run.engine import SearchTask, Trial, run_search
from harness.run.finalists import choose
from harness.run.goal import goal_facts
from harness.run.journal import Journal
from harness.run.judge import Judge
from harness.run.live import LIVE, live_study
from harness.run.methods import open_search
from harness.run.observe import Observer, Step
from harness.run.plan import CellSpec, RunSpec, plan
from harness.run.rows import read_json, write_json
from harness.run.scores import ScoreBook
from harness.run.scoring import Scoring, scoring_of
from harness.run.sections import in_sections
from harness.run.strongest import float_benchmarkers
from harness.run.transfer import guests, remember
from harness.run.trial import BUILDS, Care, attempt_with

__all__ = ["run_experiment"]

LATER = frozenset({"fp8e5m2"})
"""Precisions that a dialect has come to offer beside others, which changes no candidate of a cell."""


def run_experiment(
    experiment: Experiment,
    *,
    base: Path,
    out: Path,
    observer: Observer,
    accept_changes: bool = False,
    retry_failed: bool = False,
) -> None:
    """Run what is not yet there of an experiment; a cell that cannot be run does not stop the others.

    Args:
        base: Folder that relative paths of the experiment start from.
        out: Results folder; created where missing.
        accept_changes: A cell that was begun with something else is kept beside, and begun anew.
        retry_failed: What failed in searches that were interrupted or finished is attempted once more.

    Raises:
        UserError: Something that the user can mend, in one cell or more; whatever was measured is kept.
    """
    commit = git_commit()
    stopped: dict[str, list[str]] = {}
    cells = plan(experiment)

    def run(spec: CellSpec, site: Site, searching: bool = False) -> None:
        observer.say(spec.name)
        folder = out / spec.name
        place = _Place(
            spec=spec,
            base=base,
            folder=folder,
            commit=commit,
            site=site,
            retry_failed=retry_failed,
            searching=searching,
        )
        try:
            in_sections(folder, lambda: _run_cell(place, experiment, observer), accept_changes, observer)
        except UserError as error:
            stopped.setdefault(str(error), []).append(spec.name)
            observer.say(f"{spec.name} stops: {error}")

    with (
        claimed(out, experiment, accept_changes),
        open_site(experiment.executor, experiment.limits, out, observer) as site,
    ):
        if experiment.transfer:  # every cell has searched before the first looks at what others found
            at_once([partial(run, spec, site, searching=True) for spec in cells], experiment.executor.cells)
            cells = tuple(spec for spec in cells if spec.name not in chain(*stopped.values()))
        at_once([partial(run, spec, site) for spec in cells], experiment.executor.cells)
    if stopped:
        alone = len(cells) == 1
        raise UserError("\n".join(text if alone else f"{', '.join(names)}: {text}" for text, names in stopped.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A cell and where it lies.

    Attributes:
        commit: The commit of the code that runs.
        site: Where its engines run.
        retry_failed: See `run_experiment`.
        searching: Stop where the finalists are picked; what other cells find is not among them yet.
    """

    spec: CellSpec
    base: Path
    folder: Path
    commit: str | None
    site: Site
    retry_failed: bool
    searching: bool


def _run_cell(place: _Place, experiment: Experiment, observer: Observer) -> None:
    spec, folder, site = place.spec, place.folder, place.site
    _begun(folder / "env.json", site.environment(place.commit), decisive)
    cell = compose(experiment, spec, place.base, folder / "work", observer)
    scoring = scoring_of(experiment.objective, spec.model, cell.model, place.base, cell.work)
    benchmarkers = float_benchmarkers(spec.backend, cell.float_file, folder, site.open, observer)
    cell = cell.at(benchmarkers)
    worker = WorkerSpec(
        benchmarkers=benchmarkers, workdir=cell.work, evaluators=scoring.evaluators, reference=cell.model_file
    )
    with site.open(worker) as engines:
        floor = noise_floor(site.open, worker, cell.model_file, engines.describe(), folder, observer)
        book = ScoreBook(folder, engines, observer, _digest(scoring.facts))
        goal = scoring.goal(book, cell.model_file, folder / "floor.json")
        running = _Running(
            experiment=experiment,
            cell=cell,
            base=place.base,
            engines=engines,
            scoring=scoring,
            judge=scoring.judge(goal),
            floor=floor,
            folder=folder,
            observer=observer,
        )
        _begun(
            folder / "cell.json", running.facts(), lambda facts: {key: facts.get(key) for key in running.fingerprint()}
        )
        with site.workers(worker, engines, cell.inserter, cell.candidate(cell.space.float_placement())) as workers:
            runs = spec.runs if len(cell.searched) else ()
            searches = [partial(running.search, run, workers, place.retry_failed) for run in runs]
            at_once(searches, experiment.executor.searches)
        remember(cell, goal, folder)
        others = [name for name in benchmarkers if name != MAIN]
        if place.searching:
            choose(experiment, cell, goal, folder, others)
            return
        table = choose(
            experiment, cell, goal, folder, others, guests(experiment.transfer, cell, plan(experiment), folder.parent)
        )
        if scoring.evaluators:
            book.score(table)
        backend = engines.describe()
    confirm_rows(experiment.confirmation, site.open, worker, table.timed, backend, observer)
    shutil.rmtree(cell.work, ignore_errors=True)


def _begun(path: Path, facts: dict[str, Any], decisive: Callable[[Mapping[str, Any]], dict[str, Any]]) -> None:
    """Write down with what a cell was begun; where that was done before, go on with nothing else.

    Raises:
        UserError: A decisive fact is not what it was.
    """
    if path.exists():
        refuse_changes(path, decisive(read_json(path)), decisive(facts))
    else:
        write_json(path, facts)


def _digest(facts: Any) -> str:
    """Of anything that JSON can hold, and of sets: the same in every process."""

    def plain(value: Any) -> Any:
        return sorted(value) if isinstance(value, Set) else repr(value)

    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=plain).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    """One cell while its searches run."""

    experiment: Experiment
    cell: Cell
    base: Path
    engines: Engines
    scoring: Scoring
    judge: Judge
    floor: float
    folder: Path
    observer: Observer

    def search(self, run: RunSpec, workers: Workers, retry_failed: bool) -> None:
        """Run one search, or what is left of it."""
        budget, without = self.experiment.budget, run.searcher.without
        window = self.experiment.executor.width

        def attempt(engines: Engines) -> Attempt:
            return attempt_with(
                engines,
                self.experiment.sampling,
                judge=self.judge,
                care=Care(
                    floor=self.floor,
                    racing="racing" not in without,
                    builds=1 if "retakes" in without else BUILDS,
                    level_ms=level(self.folder, self.experiment.sampling.beside),
                ),
            )

        method = run.searcher.model_dump(exclude=None if without else {"without"})
        fingerprint = {**self.fingerprint(), "searcher": method, "seed": run.seed}
        if window > 1:  # as long as it was always 1, it was not written down
            fingerprint["window"] = window
        one_winner = self.experiment.objective.minimize == "latency"
        keep = self.experiment.confirmation.top_k if one_winner else max(budget.evaluations)
        with (
            open_search(run, self.cell, self.base, keep) as search,
            Journal(self.folder / "runs" / f"{run.name}.jsonl", fingerprint) as journal,
            self.observer.work(f"{self.cell.spec.name} {run.name}", max(budget.evaluations)) as step,
            workers.lane(attempt) as executor,
        ):
            task = SearchTask(
                space=search.space,
                searcher=search.searcher,
                seeds=search.seeds,
                candidate=search.candidate,
                goal=self.judge.goal,
                evaluations=max(budget.evaluations),
                seconds=None if budget.minutes is None else budget.minutes * 60,
                window=window,
                retry_failed=retry_failed,
            )
            name, file = f"{self.cell.spec.name}/{run.name}", self.folder.parent / LIVE
            live = live_study(file, name, search.space, self.judge.goal, fresh=not journal.entries)
            run_search(task, executor, journal, _watch(step, live))

    def fingerprint(self) -> dict[str, Any]:
        """What must be the same for a run to go on."""
        dialect = self.cell.dialect
        return {
            "model_sha256": self.cell.model.sha256,
            "backend": dict(self.engines.describe()),
            "precision": self.cell.spec.precision,
            "space": hashlib.sha256(repr(self.cell.space.dimensions).encode()).hexdigest()[:16],
            "seeds": {seed.name: self.cell.space.digest(seed.placement) for seed in self.cell.seeds},
            "dialect": _digest({**asdict(dialect), "precisions": dialect.precisions - LATER}),
            "calibration": self.cell.spec.model.calibration.model_dump(mode="json"),
            "ranges": _digest(self.cell.ranges),
            "sampling": self.experiment.sampling.model_dump(mode="json"),
            "goal": goal_facts(self.judge.goal),
            **self.scoring.facts,
            "qdq_bench": version("qdq-bench"),
        }

    def facts(self) -> dict[str, Any]:
        """What readers of the results need to know about the cell."""
        return {
            "schema": SCHEMA,
            "config": _digest(self.experiment.model_dump(mode="json", exclude={"description", "executor"})),
            "cell": self.cell.spec.name,
            "model": self.cell.spec.model.name,
            "source": self.cell.spec.model.use,
            "nodes": len(self.cell.model.nodes),
            "dimensions": len(self.cell.space),
            "patterns": len(self.cell.space.groups),
            "calibrated_on": self.cell.calibrated_on,
            "accuracy_only": sorted(self.cell.accuracy_only),
            "calibration_remarks": list(self.cell.remarks),
            "cache_remarks": list(self.cell.cache_remarks),
            "dialect_use": dialect_use(self.cell.spec.backend),
            "placements": {name: list(placement.choices) for name, placement in self.cell.placements.items()},
            "metric": self.scoring.metric,
            "higher_is_better": self.scoring.higher_is_better,
            **self.fingerprint(),
        }


def _watch(step: Step, live: Callable[[Trial], None]) -> Callable[[Trial], None]:
    spent = 0

    def watch(trial: Trial) -> None:
        nonlocal spent
        live(trial)
        if trial.evaluations > spent:
            spent = trial.evaluations
            step.advance("" if trial.best_ms is None else f"best {trial.best_ms:.3f} ms")

    return watch
