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

from harness.base.errors import UserError
from harness.base.files import explain_write_errors
from harness.base.progress import Observer
from harness.measure.provenance import comparability_key, describe_environment
from harness.measure.records import Failed
from harness.measure.sampling import STEADY_TOLERANCE
from harness.plugins import registry
from harness.replay.best_confirmation import BestConfirmation, median_latencies
from harness.replay.landscape_metrics import most_influential, neighbours, sensitivity
from harness.results.fingerprint import require_same_fingerprint
from harness.results.goal import Goal
from harness.results.journal import Journal
from harness.results.manifest import record_or_check
from harness.results.ownership import owned_results_dir
from harness.results.turns import baseline_latency
from harness.run.confirm.confirmation import measure_noise_floor, reference_latency_if_noisy
from harness.run.prepare.accuracy_store import AccuracyStore
from harness.run.prepare.study_task import StudyTask, prepare_study
from harness.run.prepare.task import Task
from harness.run.search.accuracy_gate import AccuracyGate
from harness.run.search.loop import COLD_START_EVALUATIONS, InitialPlacement, SearchTask, TrialEvent, run_search
from harness.run.search.trial import NoisePolicy, measure
from harness.runtimes.benchmark_table import (
    MAX_PLACEMENTS,
    BenchmarkTable,
    TableEntry,
    TableMetadata,
    TableSubspace,
    read_table,
    space_digest,
    write_table,
)
from harness.workers.engines import Engines
from harness.workers.sandbox import open_engines
from harness.workers.trial_pool import SyncExecutor, TrialFn
from search.api import Observation, Searcher
from search.space import Placement, Space

OPTIMUM_SEARCHER = (
    "portfolio"  # for the optional search: a table must not be centred on placements that the rules of `auto` find
)
DEFAULT_DIMENSIONS = 11  # two thousand placements, some hours for a model of a few milliseconds
MAX_TABLE_MB = 5  # limit for a committed table
Rows = dict[str, TableEntry]


def record(
    study: StudyTask,
    out: Path,
    dimensions: int | None,
    observer: Observer,
    *,
    search: int = 0,
    like: BenchmarkTable | None = None,
    note: str = "",
) -> Path:
    """Record a table, or continue an interrupted recording; a finished table stays as it is.

    First the sensitivity of every dimension is measured, one change at a time around a few placements. The placements
    of the most influential dimensions are then measured in random order, so that drift of the machine does not look
    like an effect.

    Args:
        out: Parquet file; the folder `OUT.recording` has the journals until the table is complete.
        dimensions: Number N for at most 2^N placements; None: 11, or that of a finished table.
        search: Number of evaluations of a search whose best placement is added to those whose changes are measured.
        like: Table of the same model whose placements are measured, without a screening; its sensitivities are kept and
            select dimensions if `dimensions` is smaller.
        note: Conditions of the recording, for the environment of the table.

    Raises:
        UserError: The file is a table with other inputs, or the study cannot be used; `like` is of another space.
    """
    if like is not None and search:
        raise UserError("--like: the other table decides on the placements; leave out --search")
    if dimensions is not None and not 1 <= dimensions <= math.log2(MAX_PLACEMENTS):
        raise UserError(f"--dimensions: 1 to {int(math.log2(MAX_PLACEMENTS))}, but got {dimensions}")
    if out.exists():
        with TemporaryDirectory(prefix="qdq-record-") as scratch:
            _check_finished_table(study, out, dimensions, Path(scratch), observer, like)
        return out
    folder = out.with_name(f"{out.name}.recording")
    with owned_results_dir(folder, study.experiment):
        machine = describe_environment()
        record_or_check(folder / "env.json", comparability_key(machine))
        task, worker = prepare_study(study, folder, observer)
        most = DEFAULT_DIMENSIONS if dimensions is None else dimensions
        if like is None:
            _check_dimensions(task.space, most)
        else:
            _require_same_space(task, like)
            machine["placements_of"] = like.path.stem
        if note:
            machine["note"] = note
        opened = partial(open_engines, limits=study.experiment.limits)
        with opened(worker) as engines:
            facts = engines.describe()
            machine["noise_floor"], _ = measure_noise_floor(opened, worker, task.model_file, facts, folder, observer)
            level_ms = reference_latency_if_noisy(folder, task.spec.backend, study.experiment.sampling.interleave)
            if worker.evaluators:
                AccuracyStore(folder, engines, observer).require_float_score(task.model_file)
            recorder = _TableRecorder(
                study=study, task=task, engines=engines, folder=folder, observer=observer, level_ms=level_ms
            )
            confirmation = BestConfirmation(
                task=task,
                open_engines=lambda: opened(worker),
                folder=folder,
                observer=observer,
                float_ms=baseline_latency(folder),
                level_ms=level_ms,
            )
            rows, facts = recorder.run(most, confirmation, search, like)
    with explain_write_errors(out):
        write_table(out, TableMetadata(**facts, environment=machine), rows)
        read_table(out)
    size_mb = out.stat().st_size / 1e6
    if size_mb > MAX_TABLE_MB:
        observer.say(f"{out} has {size_mb:.1f} MB, more than the {MAX_TABLE_MB} MB of a committed table: sample less")
    shutil.rmtree(folder)
    return out


def _require_same_space(task: Task, like: BenchmarkTable) -> None:
    """Raise `UserError` if a table is of another model or another space than the task."""
    same_model = like.metadata.model_sha256 == task.model.sha256
    if not same_model or space_digest(like.subspace.full_space) != space_digest(task.space):
        what = "space" if same_model else "model"
        raise UserError(f"--like {like.path}: a table of another {what} than that of {task.spec.name}")


def _reduce_subspace(like: BenchmarkTable, dimensions: int) -> TableSubspace:
    """Return the subspace of a table, with the most influential of its dimensions if it is larger than 2 ** dimensions.

    The dimensions that no longer vary are fixed at the fastest placement of the table.
    """
    subspace, sensitivities = like.subspace, like.metadata.sensitivity
    varied_sensitivities = np.array([sensitivities[dimension.name] for dimension in subspace.space.dimensions])
    selected = most_influential(subspace.space, varied_sensitivities, dimensions)
    if len(selected) == len(subspace.varied):
        return subspace
    listed = {subspace.full_space.digest(p): p for p in map(subspace.to_full_space, subspace.placements())}
    latency_ms = median_latencies({digest: like.rows[digest] for digest in listed})
    best = listed[min(latency_ms, key=latency_ms.__getitem__)]
    return TableSubspace(subspace.full_space, tuple(subspace.varied[i] for i in selected), best)


def _check_dimensions(space: Space, dimensions: int) -> None:
    """Raise `UserError` if no table can be that small, or the model has no dimensions."""
    least = min(space.sizes, default=0)
    if not 2 <= least <= 2**dimensions:
        limit = f"a dimension has at least {least} choices" if least else "the model has no insertion points"
        raise UserError(f"--dimensions {dimensions}: nothing to enumerate, for {limit}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _TableRecorder:
    """State of a recording; `level_ms` is the latency of `selection.confirmation.reference_latency_if_noisy`."""

    study: StudyTask
    task: Task
    engines: Engines
    folder: Path
    observer: Observer
    level_ms: float | None = None

    def run(
        self, dimensions: int, confirmation: BestConfirmation, search: int, like: BenchmarkTable | None
    ) -> tuple[Rows, dict[str, Any]]:
        """Return all rows, and the metadata of the table."""
        space, facts, rows = self.task.space, self.table_metadata(), Rows()
        if like is None:
            subspace, sensitivities = self._screen(dimensions, confirmation, search, rows, facts)
        else:
            self._measure_missing("sensitivity", list(self.task.placements.values()), rows, facts)
            subspace, sensitivities = _reduce_subspace(like, dimensions), like.metadata.sensitivity
        order = np.random.default_rng(0).permutation(len(subspace))
        listed = [subspace.to_full_space(placement) for placement in subspace.placements()]
        facts |= {"varied": tuple(space.dimensions[i].name for i in subspace.varied), "base": subspace.base.choices}
        self.observer.say(f"{len(subspace.varied)} of {len(space)} dimensions, {len(listed)} placements")
        self._measure_missing("table", [listed[index] for index in order], rows, facts)
        self._warn_if_optimum_beaten(self._confirm_best(confirmation, "table", listed, rows), rows)
        return rows, facts | {"sensitivity": dict(sensitivities)}

    def _screen(
        self, dimensions: int, confirmation: BestConfirmation, search: int, rows: Rows, facts: Mapping[str, Any]
    ) -> tuple[TableSubspace, Mapping[str, float]]:
        """Return the subspace of the most influential dimensions, and the sensitivity of every dimension by name."""
        space = self.task.space
        anchors = [*self.task.placements.values(), *self._search_optimum(search, confirmation, rows, facts)]
        around = [*anchors, *(p for anchor in anchors for p in neighbours(space, anchor))]
        self._measure_missing("sensitivity", around, rows, facts)
        best = self._confirm_best(confirmation, "sensitivity", around, rows)
        changes = sensitivity(space, anchors, median_latencies(rows))
        by_name = {d.name: float(value) for d, value in zip(space.dimensions, changes, strict=True)}
        return TableSubspace(space, most_influential(space, changes, dimensions), best), by_name

    def _warn_if_optimum_beaten(self, optimum: Placement, rows: Rows) -> None:
        """Report named placements that are faster than the optimum: the table then fixes the wrong dimensions."""
        digest, latency_ms = self.task.space.digest, median_latencies(rows)
        least_ms = latency_ms[digest(optimum)]
        for name, placement in self.task.placements.items():
            own_ms = latency_ms.get(digest(placement), math.inf)
            if own_ms < least_ms * (1 - STEADY_TOLERANCE):
                self.observer.say(
                    f"{name} takes {own_ms:.4g} ms, less than the {least_ms:.4g} ms of the table's optimum: the "
                    "choices that the table fixes are not the best; use more --dimensions, or --search 200"
                )

    def _search_optimum(
        self, evaluations: int, confirmation: BestConfirmation, rows: Rows, facts: Mapping[str, Any]
    ) -> Iterator[Placement]:
        """Yield the best placement of a search by `OPTIMUM_SEARCHER` from the anchors; nothing with 0 evaluations."""
        if evaluations:
            initial = tuple(InitialPlacement(name=name, placement=p) for name, p in self.task.placements.items())
            searcher: Searcher = registry.load_plugin("searcher", OPTIMUM_SEARCHER)(self.task.space, seed=0)
            self._search("search", searcher, rows, facts, evaluations, initial)
            yield self._confirm_best(confirmation, "search", [Placement(row.choices) for row in rows.values()], rows)

    def _confirm_best(
        self, confirmation: BestConfirmation, name: str, listed: Sequence[Placement], rows: Rows
    ) -> Placement:
        """Return the fastest of the listed placements; confirmed rows get the readings of the confirmation.

        Raises:
            UserError: None of them could be measured.
        """
        digests = [self.task.space.digest(placement) for placement in listed]
        rows |= confirmation.confirm_fastest(name, digests, rows)
        latency_ms = median_latencies({digest: rows[digest] for digest in digests})
        if not latency_ms:
            first = next(row.outcome for row in rows.values() if isinstance(row.outcome, Failed))
            raise UserError(f"no placement could be measured; {first.stage}: {first.reason}\n{first.log_tail}")
        return Placement(rows[min(latency_ms, key=latency_ms.__getitem__)].choices)

    def table_metadata(self) -> dict[str, Any]:
        """Return the metadata that is known before any measurement, and that an existing table must have."""
        task, experiment = self.task, self.study.experiment
        ranges = json.dumps(dict(task.ranges), sort_keys=True)
        return {
            "model": task.spec.model.name,
            "source": task.spec.model.use,
            "model_sha256": task.model.sha256,
            "dimensions": task.space.dimensions,
            "anchors": {name: placement.choices for name, placement in task.placements.items()},
            "precision": task.spec.precision,
            "dialect": task.dialect.name,
            "backend": dict(self.engines.describe()),
            "calibrated_on": task.calibrated_on,
            "ranges": hashlib.sha256(ranges.encode()).hexdigest()[:16],
            "sampling": experiment.sampling.model_dump(mode="json"),
        }

    def _measure_missing(self, name: str, listed: Sequence[Placement], rows: Rows, facts: Mapping[str, Any]) -> None:
        """Measure the placements that have no row yet, and add their rows."""
        space = self.task.space
        missing = {space.digest(p): p for p in listed if space.digest(p) not in rows}
        self._search(name, EnumeratingSearcher(missing.values()), rows, facts, len(missing))

    def _search(
        self,
        name: str,
        searcher: Searcher,
        rows: Rows,
        facts: Mapping[str, Any],
        evaluations: int,
        initial: tuple[InitialPlacement, ...] = (),
    ) -> None:
        """Measure the proposals of a searcher, and add their rows."""
        model = self.study.spec.model
        fingerprint = {
            **facts,
            "dimensions": space_digest(self.task.space),
            "dialect": self.task.dialect.facts,
            "qdq_bench": version("qdq-bench"),
            "evaluator": model.evaluator and [model.evaluator.model_dump(), str(model.preprocess)],
        }
        budget = max(evaluations, 1)
        task = SearchTask(
            space=self.task.space,
            searcher=searcher,
            initial_design=initial,
            candidate=self.task.candidate,
            evaluations=budget,
            # Once a placement was measured, failures no longer show a broken setup.
            patience=budget if median_latencies(rows) else COLD_START_EVALUATIONS,
        )
        with (
            Journal(self.folder / f"{name}.jsonl", json.loads(json.dumps(fingerprint, default=sorted))) as journal,
            self.observer.work(f"{self.task.spec.name} {name}", evaluations) as step,
        ):

            def watch(trial: TrialEvent) -> None:
                proposal = trial.proposal
                entry = TableEntry(number=len(rows), choices=proposal.choices, outcome=trial.outcome)
                rows.setdefault(proposal.digest, entry)
                step.advance("" if trial.best_ms is None else f"best {trial.best_ms:.3f} ms")

            ending = run_search(task, SyncExecutor(self._make_trial_fn()), journal, watch)
        if ending.failure is not None:
            raise UserError(f"{name}: the searcher failed: {ending.reason}\n{ending.failure.log_tail}")

    def _make_trial_fn(self) -> TrialFn:
        """Return a trial that scores everything, because no incumbent exists that a placement could fail to beat."""
        evaluator = self.study.spec.model.evaluator
        trial = partial(
            measure,
            engines=self.engines,
            sampling=self.study.experiment.sampling,
            gate=AccuracyGate(goal=Goal(metric=None if evaluator is None else evaluator.use, max_drop=None)),
            noise=NoisePolicy(reference_latency_ms=self.level_ms),
        )
        return lambda candidate, _: trial(candidate, None)


class EnumeratingSearcher:
    """Searcher that proposes given placements in order, each once, whatever their results are."""

    def __init__(self, placements: Iterable[Placement]) -> None:
        self._left = list(placements)[::-1]

    def ask(self, n: int) -> Sequence[Placement]:
        return [self._left.pop() for _ in range(min(n, len(self._left)))]

    def tell(self, observation: Observation) -> None:
        pass


def _check_finished_table(
    study: StudyTask,
    out: Path,
    dimensions: int | None,
    scratch: Path,
    observer: Observer,
    like: BenchmarkTable | None,
) -> None:
    """Raise `FingerprintMismatch` if a finished table has other inputs or another size than the requested one."""
    finished = read_table(out).metadata
    task, worker = prepare_study(study, scratch, observer)
    with open_engines(worker, study.experiment.limits) as engines:
        recorder = _TableRecorder(study=study, task=task, engines=engines, folder=scratch, observer=observer)
        requested = recorder.table_metadata()
    recorded = {key: getattr(finished, key) for key in requested}
    for facts in (recorded, requested):
        facts["dimensions"] = space_digest(Space(facts["dimensions"]))
    if dimensions is not None:
        sensitivities = np.array([finished.sensitivity[dimension.name] for dimension in finished.dimensions])
        recorded["varied in the finished table"] = len(finished.varied)
        requested["varied in the finished table"] = len(
            most_influential(Space(finished.dimensions), sensitivities, dimensions)
        )
    if like is not None:
        space = like.subspace.full_space
        recorded["varied in the finished table"] = finished.varied
        requested["varied in the finished table"] = [
            space.dimensions[i].name for i in _reduce_subspace(like, dimensions or DEFAULT_DIMENSIONS).varied
        ]
    require_same_fingerprint(out, json.loads(json.dumps(recorded)), json.loads(json.dumps(requested)))
