"""Recording of a replay table: screening of dimensions, then every placement of the selected ones."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from harness import registry
from harness.benchmark_table import (
    MAX_PLACEMENTS,
    TableEntry,
    TableMetadata,
    TableSubspace,
    read_table,
    space_digest,
    write_table,
)
from harness.errors import UserError
from harness.progress import Observer
from harness.records import Failed
from harness.results_dir.fingerprint import require_same_fingerprint
from harness.results_dir.io import explain_write_errors, read_json, write_json
from harness.results_dir.journal import Journal
from harness.results_dir.ownership import owned_results_dir
from harness.search_loop.loop import COLD_START_EVALUATIONS, InitialPlacement, SearchTask, TrialEvent, run_search
from harness.search_loop.objective import AccuracyGate, Goal
from harness.search_loop.trial import NoisePolicy, make_trial_fn
from harness.selection.confirmation import baseline_latency, measure_noise_floor, reference_latency_if_noisy
from harness.studies.best_confirmation import BestConfirmation, median_latencies
from harness.studies.dimension_screening import most_influential, neighbours, sensitivity
from harness.studies.study_task import StudyTask, prepare_study
from harness.task_setup.task import Task
from harness.timing.provenance import comparability_key, describe_environment
from harness.timing.sampling import STEADY_TOLERANCE
from harness.timing.workers.engines import Engines
from harness.timing.workers.sandbox import open_engines
from harness.timing.workers.trial_pool import SyncExecutor, TrialFn
from harness.verification.accuracy_store import AccuracyStore
from search.api import Observation, Searcher
from search.space import Placement, Space

__all__ = ["record"]

OPTIMUM_SEARCHER = "portfolio"
"""What searches first, where a search is asked for: a table must not lie around what `auto`'s own rules found."""
DEFAULT_DIMENSIONS = 11
"""Two thousand placements: an evening's work for a model of some milliseconds."""
MAX_TABLE_MB = 5
"""A committed table is no larger."""
Rows = dict[str, TableEntry]


def record(study: StudyTask, out: Path, dimensions: int | None, observer: Observer, *, search: int = 0) -> Path:
    """Measure a table, or go on where it was interrupted; a finished one is left as it is.

    The sensitivity of every dimension is measured first, one change at a time around a few placements; the most telling
    ones are then enumerated in random order, so that a drift of the machine does not look like an effect.

    Args:
        out: Parquet file; a folder beside it holds the journals until the table is complete.
        dimensions: The table has at most 2 ** dimensions placements; None: 11, or as many as a finished table has.
        search: Evaluations of a search whose best is one more placement to look around.

    Raises:
        UserError: A table of something else is there, or anything in the study cannot be used.
    """
    if dimensions is not None and not 1 <= dimensions <= math.log2(MAX_PLACEMENTS):
        raise UserError(f"--dimensions: 1 to {int(math.log2(MAX_PLACEMENTS))}, but got {dimensions}")
    if out.exists():
        with TemporaryDirectory(prefix="qdq-record-") as scratch:
            _check_finished_table(study, out, dimensions, Path(scratch), observer)
        return out
    folder = out.with_name(f"{out.name}.recording")
    with owned_results_dir(folder, study.experiment):
        machine = describe_environment()
        _record_or_check_metadata(folder / "env.json", comparability_key(machine))
        cell, worker = prepare_study(study, folder, observer)
        most = DEFAULT_DIMENSIONS if dimensions is None else dimensions
        _check_dimensions(cell.space, most)
        opened = partial(open_engines, limits=study.experiment.limits)
        with opened(worker) as engines:
            measure_noise_floor(opened, worker, cell.model_file, engines.describe(), folder, observer)
            level_ms = reference_latency_if_noisy(folder, cell.spec.backend, study.experiment.sampling.beside)
            recording = _TableRecorder(
                study=study, cell=cell, engines=engines, folder=folder, observer=observer, level_ms=level_ms
            )
            meeting = BestConfirmation(
                cell=cell,
                open_engines=lambda: opened(worker),
                folder=folder,
                observer=observer,
                float_ms=baseline_latency(folder),
                level_ms=level_ms,
            )
            if worker.evaluators:
                recording.prepare()
            rows, facts = recording.run(most, meeting, search)
    with explain_write_errors(out):
        write_table(out, TableMetadata(**facts, environment=machine), rows)
        read_table(out)
    size_mb = out.stat().st_size / 1e6
    if size_mb > MAX_TABLE_MB:
        observer.say(f"{out} has {size_mb:.1f} MB, more than the {MAX_TABLE_MB} MB of a committed table: sample less")
    shutil.rmtree(folder)
    return out


def _check_dimensions(space: Space, dimensions: int) -> None:
    """Before anything is timed: no table is smaller than its smallest dimension, and a model may have none."""
    least = min(space.sizes, default=0)
    if not 2 <= least <= 2**dimensions:
        held = f"a dimension has at least {least} choices" if least else "the model has no insertion points"
        raise UserError(f"--dimensions {dimensions}: nothing to enumerate, for {held}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _TableRecorder:
    """One table while it is measured.

    Attributes:
        level_ms: See `harness.selection.confirmation.level`.
    """

    study: StudyTask
    cell: Task
    engines: Engines
    folder: Path
    observer: Observer
    level_ms: float | None = None

    def prepare(self) -> None:
        """Let the evaluator see the float model's engine.

        Raises:
            UserError: The float model cannot be scored.
        """
        found = AccuracyStore(self.folder, self.engines, self.observer).float_score(self.cell.model_file)
        if isinstance(found, Failed):
            raise UserError(f"the float model cannot be scored; {found.stage}: {found.reason}")

    def run(self, dimensions: int, meeting: BestConfirmation, search: int) -> tuple[Rows, dict[str, Any]]:
        """All rows, and what the table says about itself."""
        space, facts = self.cell.space, self.table_metadata()
        rows: Rows = {}
        anchors = [*self.cell.placements.values(), *self._search_optimum(search, meeting, rows, facts)]
        around = [*anchors, *(p for anchor in anchors for p in neighbours(space, anchor))]
        self._measure_missing("sensitivity", around, rows, facts)
        best = self._confirm_best(meeting, "sensitivity", around, rows)
        found = sensitivity(space, anchors, median_latencies(rows))
        varied = most_influential(space, found, dimensions)
        subspace = TableSubspace(space, varied, best)
        order = np.random.default_rng(0).permutation(len(subspace))
        listed = [subspace.to_full_space(placement) for placement in subspace.placements()]
        facts |= {"varied": tuple(space.dimensions[i].name for i in varied), "base": best.choices}
        self.observer.say(f"{len(varied)} of {len(space)} dimensions, {len(listed)} placements")
        self._measure_missing("table", [listed[index] for index in order], rows, facts)
        self._warn_if_optimum_beaten(self._confirm_best(meeting, "table", listed, rows), rows)
        facts["sensitivity"] = {d.name: float(value) for d, value in zip(space.dimensions, found, strict=True)}
        return rows, facts

    def _warn_if_optimum_beaten(self, optimum: Placement, rows: Rows) -> None:
        """Tell of what everybody knows and is faster than the optimum: then the table fixes what it should not."""
        digest, latency_ms = self.cell.space.digest, median_latencies(rows)
        least_ms = latency_ms[digest(optimum)]
        for name, placement in self.cell.placements.items():
            own_ms = latency_ms.get(digest(placement), math.inf)
            if own_ms < least_ms * (1 - STEADY_TOLERANCE):
                self.observer.say(
                    f"{name} takes {own_ms:.4g} ms, less than the {least_ms:.4g} ms of the table's optimum: what the "
                    "table leaves fixed is not the best; use more --dimensions, or --search 200"
                )

    def _search_optimum(
        self, evaluations: int, meeting: BestConfirmation, rows: Rows, facts: Mapping[str, Any]
    ) -> Iterator[Placement]:
        """What a search finds that is told the anchors first and goes by no rules of experts; nothing for none."""
        if evaluations:
            seeds = tuple(InitialPlacement(name=name, placement=p) for name, p in self.cell.placements.items())
            searcher: Searcher = registry.load_plugin("searcher", OPTIMUM_SEARCHER)(self.cell.space, seed=0)
            self._search("search", searcher, rows, facts, evaluations, seeds)
            yield self._confirm_best(meeting, "search", [Placement(row.choices) for row in rows.values()], rows)

    def _confirm_best(self, meeting: BestConfirmation, name: str, listed: Sequence[Placement], rows: Rows) -> Placement:
        """The fastest of the listed placements, by a meeting; the rows of those that met have its readings.

        Raises:
            UserError: None of them could be measured.
        """
        digests = [self.cell.space.digest(placement) for placement in listed]
        rows |= meeting.confirm_fastest(name, digests, rows)
        latency_ms = median_latencies({digest: rows[digest] for digest in digests})
        if not latency_ms:
            first = next(row.outcome for row in rows.values() if isinstance(row.outcome, Failed))
            raise UserError(f"no placement could be measured; {first.stage}: {first.reason}\n{first.log_tail}")
        return Placement(rows[min(latency_ms, key=latency_ms.__getitem__)].choices)

    def table_metadata(self) -> dict[str, Any]:
        """What is known before anything is measured; a table that exists must agree with it."""
        cell, experiment = self.cell, self.study.experiment
        ranges = json.dumps(dict(cell.ranges), sort_keys=True)
        return {
            "model": cell.spec.model.name,
            "source": cell.spec.model.use,
            "model_sha256": cell.model.sha256,
            "dimensions": cell.space.dimensions,
            "anchors": {name: placement.choices for name, placement in cell.placements.items()},
            "precision": cell.spec.precision,
            "dialect": cell.dialect.name,
            "backend": dict(self.engines.describe()),
            "calibrated_on": cell.calibrated_on,
            "ranges": hashlib.sha256(ranges.encode()).hexdigest()[:16],
            "sampling": experiment.sampling.model_dump(mode="json"),
        }

    def _measure_missing(self, name: str, listed: Sequence[Placement], rows: Rows, facts: Mapping[str, Any]) -> None:
        """Measure those of the placements that have no row yet, and add their rows."""
        space = self.cell.space
        missing = {space.digest(p): p for p in listed if space.digest(p) not in rows}
        self._search(name, EnumeratingSearcher(missing.values()), rows, facts, len(missing))

    def _search(
        self,
        name: str,
        searcher: Searcher,
        rows: Rows,
        facts: Mapping[str, Any],
        evaluations: int,
        seeds: tuple[InitialPlacement, ...] = (),
    ) -> None:
        """Measure what a searcher proposes, and add the rows."""
        plain = {**facts, "dimensions": space_digest(self.cell.space), "dialect": self.cell.dialect.facts}
        fingerprint = {**plain, "qdq_bench": version("qdq-bench"), "evaluator": self._evaluator()}
        task = SearchTask(
            space=self.cell.space,
            searcher=searcher,
            initial_design=seeds,
            candidate=self.cell.candidate,
            evaluations=max(evaluations, 1),
            patience=max(evaluations, 1)
            if median_latencies(rows)
            else COLD_START_EVALUATIONS,  # what works elsewhere is no broken setup
        )
        with (
            Journal(self.folder / f"{name}.jsonl", json.loads(json.dumps(fingerprint, default=sorted))) as journal,
            self.observer.work(f"{self.cell.spec.name} {name}", evaluations) as step,
        ):

            def watch(trial: TrialEvent) -> None:
                asked = trial.asked
                rows.setdefault(
                    asked.digest, TableEntry(number=len(rows), choices=asked.choices, outcome=trial.outcome)
                )
                step.advance("" if trial.best_ms is None else f"best {trial.best_ms:.3f} ms")

            ending = run_search(task, SyncExecutor(self._make_trial_fn()), journal, watch)
        if ending.broken is not None:
            raise UserError(f"{name}: the searcher broke: {ending.reason}\n{ending.broken.log_tail}")

    def _make_trial_fn(self) -> TrialFn:
        """An attempt that scores everything, for a table knows no incumbent that could not be beaten."""
        evaluator = self.study.spec.model.evaluator
        judge = None if evaluator is None else AccuracyGate(goal=Goal(metric=evaluator.use, max_drop=None))
        care = NoisePolicy(reference_latency_ms=self.level_ms)
        attempt = make_trial_fn(self.engines, self.study.experiment.sampling, judge=judge, care=care)
        return lambda candidate, _: attempt(candidate, None)

    def _evaluator(self) -> Any:
        model = self.study.spec.model
        return None if model.evaluator is None else [model.evaluator.model_dump(), str(model.preprocess)]


class EnumeratingSearcher:
    """A searcher that asks for given placements in order."""

    def __init__(self, placements: Iterable[Placement]) -> None:
        self._left = list(placements)[::-1]

    def ask(self, n: int) -> Sequence[Placement]:
        """The next ones."""
        return [self._left.pop() for _ in range(min(n, len(self._left)))]

    def tell(self, observation: Observation) -> None:
        """Nothing to learn."""


def _record_or_check_metadata(path: Path, facts: dict[str, Any]) -> None:
    if path.exists():
        require_same_fingerprint(path, read_json(path), facts)
    else:
        write_json(path, facts)


def _check_finished_table(
    study: StudyTask, out: Path, dimensions: int | None, scratch: Path, observer: Observer
) -> None:
    """Refuse to take a finished table of something else, or of another size, for the one that is asked for.

    Raises:
        UserError: With each leaf that differs.
    """
    there = read_table(out).metadata
    cell, worker = prepare_study(study, scratch, observer)
    with open_engines(worker, study.experiment.limits) as engines:
        here = _TableRecorder(
            study=study, cell=cell, engines=engines, folder=scratch, observer=observer
        ).table_metadata()
    known = {key: getattr(there, key) for key in here}
    for facts in (known, here):
        facts["dimensions"] = space_digest(Space(facts["dimensions"]))
    if dimensions is not None:
        told = np.array([there.sensitivity[dimension.name] for dimension in there.dimensions])
        known["varied in the finished table"] = len(there.varied)
        here["varied in the finished table"] = len(most_influential(Space(there.dimensions), told, dimensions))
    require_same_fingerprint(out, json.loads(json.dumps(known)), here)
