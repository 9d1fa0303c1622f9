"""One cell while its searches run: what each search is made of, and what must not change while it goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harness.measure.engines import Engines
from harness.measure.executor import Attempt
from harness.measure.site import Workers
from harness.records import SCHEMA
from harness.run.compare import facts_digest
from harness.run.compose import Cell, dialect_use
from harness.run.config import Experiment
from harness.run.confirming import float_latency, level
from harness.run.engine import SearchTask, Trial, run_search
from harness.run.goal import goal_facts
from harness.run.journal import Journal, read_journal
from harness.run.judge import Judge
from harness.run.live import LIVE, live_study
from harness.run.methods import open_search
from harness.run.observe import Observer, Step, best_note
from harness.run.plan import RunSpec
from harness.run.scoring import Scoring
from harness.run.trial import BUILDS, Care, attempt_with

__all__ = ["Running"]

LATER = frozenset({"fp8e5m2"})
"""Precisions that a dialect has come to offer beside others, which changes no candidate of a cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
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
        level_ms = level(self.folder, self.experiment.sampling.beside)

        def attempt(engines: Engines) -> Attempt:
            return attempt_with(
                engines,
                self.experiment.sampling,
                judge=self.judge,
                care=Care(
                    floor=self.floor,
                    racing="racing" not in without,
                    builds=1 if "retakes" in without else BUILDS,
                    level_ms=level_ms,
                ),
            )

        method = run.searcher.model_dump(exclude=None if without else {"without"})
        fingerprint = {**self.fingerprint(), "searcher": method, "seed": run.seed}
        if window > 1:  # as long as it was always 1, it was not written down
            fingerprint["window"] = window
        confirmation, one_winner = self.experiment.confirmation, self.experiment.objective.minimize == "latency"
        keep = max(confirmation.top_k, confirmation.contenders) if one_winner else max(budget.evaluations)
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
            name = f"{self.cell.spec.name}/{run.name}"
            live = live_study(self.folder / LIVE, name, search.space, self.judge.goal, fresh=not journal.entries)
            note = partial(best_note, float_ms=float_latency(self.folder), beside=level_ms is not None)
            run_search(task, executor, journal, _watch(step, live, note))

    def unfinished(self, run: RunSpec) -> bool:
        """Whether a search may have something left to measure; one that had nothing more to ask counts as such."""
        path = self.folder / "runs" / f"{run.name}.jsonl"
        told = {entry.asked.digest for entry in read_journal(path) if entry.told} if path.exists() else ()
        return len(told) < max(self.experiment.budget.evaluations)

    def fingerprint(self) -> dict[str, Any]:
        """What must be the same for a run to go on."""
        dialect = self.cell.dialect
        return {
            "model_sha256": self.cell.model.sha256,
            "backend": dict(self.engines.describe()),
            "precision": self.cell.spec.precision,
            "space": hashlib.sha256(repr(self.cell.space.dimensions).encode()).hexdigest()[:16],
            "seeds": {seed.name: self.cell.space.digest(seed.placement) for seed in self.cell.seeds},
            "dialect": facts_digest({**asdict(dialect), "precisions": dialect.precisions - LATER}),
            "calibration": self.cell.spec.model.calibration.model_dump(mode="json"),
            "ranges": facts_digest(self.cell.ranges),
            "sampling": self.experiment.sampling.model_dump(mode="json"),
            "goal": goal_facts(self.judge.goal),
            **self.scoring.facts,
            "qdq_bench": version("qdq-bench"),
        }

    def facts(self) -> dict[str, Any]:
        """What readers of the results need to know about the cell."""
        return {
            "schema": SCHEMA,
            "config": facts_digest(self.experiment.model_dump(mode="json", exclude={"description", "executor"})),
            "cell": self.cell.spec.name,
            "model": self.cell.spec.model.name,
            "source": self.cell.spec.model.use,
            "nodes": len(self.cell.model.nodes),
            "inputs": {name: list(self.cell.model.types[name].shape) for name in self.cell.model.inputs},
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


def _watch(step: Step, live: Callable[[Trial], None], note: Callable[[float], str]) -> Callable[[Trial], None]:
    spent = 0

    def watch(trial: Trial) -> None:
        nonlocal spent
        live(trial)
        if trial.evaluations > spent:
            spent = trial.evaluations
            step.advance("" if trial.best_ms is None else note(trial.best_ms))

    return watch
