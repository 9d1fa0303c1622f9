"""Recording of a replay table: screening of dimensions, then every placement of the selected ones."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from harness.base.errors import UserError
from harness.base.files import explain_write_errors
from harness.base.progress import Observer
from harness.base.statistics import median_ci
from harness.config.sections import TurnSchedule
from harness.measure.provenance import comparability_key, describe_environment
from harness.measure.records import Failed
from harness.measure.sampling import STEADY_TOLERANCE
from harness.measure.turn_log import MAX_GROUP_ROWS, TurnMatrix
from harness.plugins import registry
from harness.replay.replay import Floats
from harness.replay.simulated_selection import recorded_duration_s
from harness.results.artifacts import FLOAT_ROW
from harness.results.journal import Journal, require_same_fingerprint
from harness.results.manifest import record_or_check
from harness.results.ownership import owned_results_dir
from harness.results.search_log import Goal
from harness.results.turns import baseline_latency
from harness.run.confirm.confirmation import (
    PairedComparison,
    TimedRow,
    measure_noise_floor,
    reference_latency_if_noisy,
    run_comparison,
    warn_if_disturbed,
)
from harness.run.prepare.accuracy_store import AccuracyStore
from harness.run.prepare.study_task import StudyTask, prepare_study
from harness.run.prepare.task import Task
from harness.run.search.loop import COLD_START_EVALUATIONS, InitialPlacement, SearchTask, TrialEvent, run_search
from harness.run.search.trial import AccuracyGate, NoisePolicy, measure
from harness.runtimes.replay import (
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
from harness.workers.trial_pool import SyncExecutor
from search.api import Observation, Searcher
from search.space import Placement, Space

OPTIMUM_SEARCHER = "portfolio"
"""For the optional search: a table must not be centred on what the expert placements of `auto` find."""
DEFAULT_DIMENSIONS = 11  # two thousand placements, some hours for a model of a few milliseconds
MAX_TABLE_MB = 5  # limit for a committed table
FASTEST_PER_COMPARISON = 16
LOST_ROW_REASON = "it was measured once and failed in the confirmation, so its only reading may be low by chance"
CONFIRMATION_SCHEDULE = TurnSchedule(builds=1, rounds=20, samples=3)
PACE_TOLERANCE = (
    0.15  # relative change of the float model's latency since the start of the recording that is not reported
)


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
        FingerprintMismatch: The file is a table with other inputs or of another size.
        UserError: The study cannot be used; `like` is of another space.
    """
    if like is not None and search:
        raise UserError("--like: the other table decides on the placements; leave out --search")
    if dimensions is not None and not 1 <= dimensions <= math.log2(MAX_PLACEMENTS):
        raise UserError(f"--dimensions: 1 to {int(math.log2(MAX_PLACEMENTS))}, but got {dimensions}")
    if out.exists():
        with TemporaryDirectory(prefix="qdq-record-") as scratch:
            task, worker = prepare_study(study, Path(scratch), observer)
            with open_engines(worker, study.experiment.limits) as engines:
                facts = _describe_inputs(study, task, engines)
        _check_finished_table(out, facts, dimensions, like)
        return out
    folder = out.with_name(f"{out.name}.recording")
    with owned_results_dir(folder, study.experiment):
        metadata, rows = _measure_table(study, folder, dimensions or DEFAULT_DIMENSIONS, observer, search, like, note)
    with explain_write_errors(out):
        write_table(out, metadata, rows)
        read_table(out)
    size_mb = out.stat().st_size / 1e6
    if size_mb > MAX_TABLE_MB:
        observer.say(f"{out} has {size_mb:.1f} MB, more than the {MAX_TABLE_MB} MB of a committed table: sample less")
    shutil.rmtree(folder)
    return out


def _measure_table(
    study: StudyTask,
    folder: Path,
    dimensions: int,
    observer: Observer,
    search: int,
    like: BenchmarkTable | None,
    note: str,
) -> tuple[TableMetadata, Mapping[str, TableEntry]]:
    """Return the metadata and all rows of a table, see `record`; the journals of the measurements are in `folder`."""
    machine = describe_environment()
    record_or_check(folder / "env.json", comparability_key(machine))
    task, worker = prepare_study(study, folder, observer)
    if like is None:
        least = min(task.space.sizes, default=0)
        if not 2 <= least <= 2**dimensions:
            limit = f"a dimension has at least {least} choices" if least else "the model has no insertion points"
            raise UserError(f"--dimensions {dimensions}: nothing to enumerate, for {limit}")
    else:
        same_model = like.metadata.model_sha256 == task.model.sha256
        if not same_model or space_digest(like.subspace.full_space) != space_digest(task.space):
            what = "space" if same_model else "model"
            raise UserError(f"--like {like.path}: a table of another {what} than that of {task.spec.name}")
        machine["placements_of"] = like.path.stem
    if note:
        machine["note"] = note
    opened = partial(open_engines, limits=study.experiment.limits)
    with opened(worker) as engines:
        runtime = engines.describe()
        machine["noise_floor"], _ = measure_noise_floor(opened, worker, task.model_file, runtime, folder, observer)
        if worker.evaluators:
            AccuracyStore(folder, engines, observer).require_float_score(task.model_file)
        recording = _Recording(study, task, engines, partial(opened, worker), folder, observer)
        if like is None:
            subspace, sensitivities = recording.screen(dimensions, search)
        else:
            recording.measure_missing("sensitivity", task.placements.values())
            subspace, sensitivities = _reduce_subspace(like, dimensions), like.metadata.sensitivity
        recording.measure_subspace(subspace)
    metadata = TableMetadata(**recording.facts, sensitivity=dict(sensitivities), environment=machine)
    return metadata, recording.rows


def _describe_inputs(study: StudyTask, task: Task, engines: Engines) -> dict[str, Any]:
    """Return the metadata that is known before any measurement, and that an existing table must have."""
    ranges = json.dumps(dict(task.ranges), sort_keys=True)
    return {
        "model": task.spec.model.name,
        "source": task.spec.model.use,
        "model_sha256": task.model.sha256,
        "dimensions": task.space.dimensions,
        "anchors": {name: placement.choices for name, placement in task.placements.items()},
        "precision": task.spec.precision,
        "dialect": task.dialect.name,
        "backend": dict(engines.describe()),
        "calibrated_on": task.calibrated_on,
        "ranges": hashlib.sha256(ranges.encode()).hexdigest()[:16],
        "sampling": study.experiment.sampling.model_dump(mode="json"),
    }


def _check_finished_table(
    out: Path, requested: dict[str, Any], dimensions: int | None, like: BenchmarkTable | None
) -> None:
    """Raise `FingerprintMismatch` if a finished table has other inputs or another size than the requested one."""
    finished, size = read_table(out).metadata, "varied in the finished table"
    recorded = {key: getattr(finished, key) for key in requested}
    for facts in (recorded, requested):
        facts["dimensions"] = space_digest(Space(facts["dimensions"]))
    if like is not None:
        subspace = _reduce_subspace(like, dimensions or DEFAULT_DIMENSIONS)
        recorded[size] = finished.varied
        requested[size] = [dimension.name for dimension in subspace.space.dimensions]
    elif dimensions is not None:
        sensitivities = np.array([finished.sensitivity[dimension.name] for dimension in finished.dimensions])
        recorded[size] = len(finished.varied)
        requested[size] = len(most_influential(Space(finished.dimensions), sensitivities, dimensions))
    require_same_fingerprint(out, json.loads(json.dumps(recorded)), json.loads(json.dumps(requested)))


def _reduce_subspace(like: BenchmarkTable, dimensions: int) -> TableSubspace:
    """Return the subspace of a table, with the most influential of its dimensions if it is larger than 2 ** dimensions.

    The dimensions that no longer vary are fixed at the fastest placement of the table.
    """
    subspace = like.subspace
    sensitivities = np.array([like.metadata.sensitivity[dimension.name] for dimension in subspace.space.dimensions])
    selected = most_influential(subspace.space, sensitivities, dimensions)
    if len(selected) == len(subspace.varied):
        return subspace
    listed = {subspace.full_space.digest(p): p for p in map(subspace.to_full_space, subspace.placements())}
    latency_ms = median_latencies({digest: like.rows[digest] for digest in listed})
    best = listed[min(latency_ms, key=latency_ms.__getitem__)]
    return TableSubspace(subspace.full_space, tuple(subspace.varied[i] for i in selected), best)


class EnumeratingSearcher:
    """Searcher that proposes given placements in order, each once, whatever their results are."""

    def __init__(self, placements: Iterable[Placement]) -> None:
        self._left = list(placements)[::-1]

    def ask(self, n: int) -> Sequence[Placement]:
        return [self._left.pop() for _ in range(min(n, len(self._left)))]

    def tell(self, observation: Observation) -> None:
        pass


class _Recording:
    """Rows of a table during its recording, and what measures them.

    Args:
        study: The study.
        task: Its task.
        engines: Engines that measure the table.
        open_engines: Factory of fresh engines.
        folder: Folder for the journals and for a log of each comparison.
        observer: Receiver of messages and of the progress.

    Attributes:
        facts: Metadata of the table.
        level_ms: See `harness.run.confirm.confirmation.reference_latency_if_noisy`.
        rows: Entries by the digest of their placement.
    """

    def __init__(
        self,
        study: StudyTask,
        task: Task,
        engines: Engines,
        open_engines: Callable[[], AbstractContextManager[Engines]],
        folder: Path,
        observer: Observer,
    ) -> None:
        self.study, self.task, self.engines, self.open_engines = study, task, engines, open_engines
        self.folder, self.observer, self.rows = folder, observer, dict[str, TableEntry]()
        self.facts = _describe_inputs(study, task, engines)
        interleave = study.experiment.sampling.interleave
        self.level_ms = reference_latency_if_noisy(folder, task.spec.backend, interleave)

    def screen(self, dimensions: int, search: int) -> tuple[TableSubspace, Mapping[str, float]]:
        """Return the subspace of the most influential dimensions, and the sensitivity of every dimension by name."""
        space, anchors = self.task.space, list(self.task.placements.values())
        if search:
            initial = tuple(InitialPlacement(name=name, placement=p) for name, p in self.task.placements.items())
            searcher: Searcher = registry.load_plugin("searcher", OPTIMUM_SEARCHER)(space, seed=0)
            self._search("search", searcher, search, initial)
            anchors.append(self._confirm_fastest("search", list(self.rows)))
        around = [*anchors, *(p for anchor in anchors for p in neighbours(space, anchor))]
        self.measure_missing("sensitivity", around)
        best = self._confirm_fastest("sensitivity", map(space.digest, around))
        changes = sensitivity(space, anchors, median_latencies(self.rows))
        by_name = {d.name: float(value) for d, value in zip(space.dimensions, changes, strict=True)}
        return TableSubspace(space, most_influential(space, changes, dimensions), best), by_name

    def measure_subspace(self, subspace: TableSubspace) -> None:
        """Measure every placement of a subspace in random order, and confirm its optimum.

        Named placements that are faster are reported: the table then fixes the wrong dimensions.
        """
        space = self.task.space
        order = np.random.default_rng(0).permutation(len(subspace))
        listed = [subspace.to_full_space(placement) for placement in subspace.placements()]
        self.facts |= {
            "varied": tuple(space.dimensions[i].name for i in subspace.varied),
            "base": subspace.base.choices,
        }
        self.observer.say(f"{len(subspace.varied)} of {len(space)} dimensions, {len(listed)} placements")
        self.measure_missing("table", [listed[index] for index in order])
        optimum = self._confirm_fastest("table", map(space.digest, listed))
        latency_ms = median_latencies(self.rows)
        least_ms = latency_ms[space.digest(optimum)]
        for name, placement in self.task.placements.items():
            own_ms = latency_ms.get(space.digest(placement), math.inf)
            if own_ms < least_ms * (1 - STEADY_TOLERANCE):
                self.observer.say(
                    f"{name} takes {own_ms:.4g} ms, less than the {least_ms:.4g} ms of the table's optimum: the "
                    "choices that the table fixes are not the best; use more --dimensions, or --search 200"
                )

    def measure_missing(self, name: str, listed: Iterable[Placement]) -> None:
        """Measure the placements that have no row yet, and add their rows."""
        missing = {digest: p for p in listed if (digest := self.task.space.digest(p)) not in self.rows}
        self._search(name, EnumeratingSearcher(missing.values()), len(missing))

    def _search(
        self, name: str, searcher: Searcher, evaluations: int, initial: tuple[InitialPlacement, ...] = ()
    ) -> None:
        """Measure the proposals of a searcher, and add their rows."""
        model, space, budget = self.study.spec.model, self.task.space, max(evaluations, 1)
        fingerprint = {
            **self.facts,
            "dimensions": space_digest(space),
            "dialect": self.task.dialect.facts,
            "qdq_bench": version("qdq-bench"),
            "evaluator": model.evaluator and [model.evaluator.model_dump(), str(model.preprocess)],
        }
        task = SearchTask(
            space=space,
            searcher=searcher,
            initial_design=initial,
            candidate=self.task.candidate,
            evaluations=budget,
            # Once a placement was measured, failures no longer show a broken setup.
            patience=budget if median_latencies(self.rows) else COLD_START_EVALUATIONS,
        )
        trial = partial(
            measure,
            engines=self.engines,
            sampling=self.study.experiment.sampling,
            gate=AccuracyGate(goal=Goal(metric=model.evaluator.use if model.evaluator else None, max_drop=None)),
            noise=NoisePolicy(reference_latency_ms=self.level_ms),
        )
        # No incumbent exists that a placement could fail to beat, so everything is scored.
        executor = SyncExecutor(lambda candidate, _: trial(candidate, None))
        with (
            Journal(self.folder / f"{name}.jsonl", json.loads(json.dumps(fingerprint, default=sorted))) as journal,
            self.observer.work(f"{self.task.spec.name} {name}", evaluations) as step,
        ):

            def watch(trial: TrialEvent) -> None:
                proposal = trial.proposal
                entry = TableEntry(number=len(self.rows), choices=proposal.choices, outcome=trial.outcome)
                self.rows.setdefault(proposal.digest, entry)
                step.advance("" if trial.best_ms is None else f"best {trial.best_ms:.3f} ms")

            ending = run_search(task, executor, journal, watch)
        if ending.failure is not None:
            raise UserError(f"{name}: the searcher failed: {ending.reason}\n{ending.failure.log_tail}")

    def _confirm_fastest(self, name: str, digests: Iterable[str]) -> Placement:
        """Return the fastest of some rows, after comparisons until no other row has a lower latency.

        The lowest of a thousand noisy readings is low by chance and must not define the optimum of the table; see
        `harness.run.select.final_selection`. So the fastest rows get the readings of fresh builds that are timed in
        turns.

        Args:
            name: Prefix of the logs.
            digests: Rows to consider.

        Raises:
            UserError: None of them could be measured.
        """
        listed, confirmed = list(digests), set[str]()
        while latency_ms := median_latencies({digest: self.rows[digest] for digest in listed}):
            fastest = sorted(latency_ms, key=latency_ms.__getitem__)[:FASTEST_PER_COMPARISON]
            if fastest[0] in confirmed:
                return Placement(self.rows[fastest[0]].choices)
            unconfirmed = [digest for digest in fastest if digest not in confirmed]
            self._time_in_turns(f"{name}-final-selection-{len(confirmed)}", unconfirmed)
            confirmed.update(unconfirmed)
        first = next(row.outcome for row in self.rows.values() if isinstance(row.outcome, Failed))
        raise UserError(f"no placement could be measured; {first.stage}: {first.reason}\n{first.log_tail}")

    def _time_in_turns(self, name: str, digests: Sequence[str]) -> None:
        """Replace the readings of rows by readings taken in turns; a row without such readings becomes a failure.

        A change of the machine's speed since the start of the recording is reported, with its effect on the rows.
        """
        task, started_ms = self.task, baseline_latency(self.folder)
        plan = CONFIRMATION_SCHEDULE.model_dump(mode="json")
        comparison = PairedComparison(
            name=f"{task.spec.name} final selection",
            path=self.folder / f"{name}.jsonl",
            header={"rows": sorted(digests), "plan": plan, "group": MAX_GROUP_ROWS},
            baseline=TimedRow(name=FLOAT_ROW, candidate=task.candidate(task.space.float_placement())),
            rows=tuple(
                TimedRow(name=digest, candidate=task.candidate(Placement(self.rows[digest].choices)))
                for digest in digests
            ),
            schedule=CONFIRMATION_SCHEDULE,
        )
        events = run_comparison(comparison, self.open_engines, self.observer)
        warn_if_disturbed(comparison.name, events, self.observer)
        readings = TurnMatrix(events)
        now_ms = float(np.median([ms for turns in readings.turns[FLOAT_ROW].values() for ms in turns.values()]))
        if not 1 / (1 + PACE_TOLERANCE) <= now_ms / started_ms <= 1 + PACE_TOLERANCE:
            effect = "rows are timed in turns with the float model, so they stay on one scale"
            if self.level_ms is None:
                effect = "its rows are on another scale; record the table anew with `sampling.interleave: always`"
            self.observer.say(
                f"{comparison.name}: the float model takes {now_ms:.4g} ms, it took {started_ms:.4g} ms; {effect}"
            )
        for digest in digests:
            float_builds, row_builds = readings.paired_samples(digest, FLOAT_ROW)
            row, outcome = self.rows[digest], self.rows[digest].outcome
            if isinstance(outcome, Failed):
                continue
            if not row_builds:
                failed = Failed(stage="build", reason=LOST_ROW_REASON, wall_s=recorded_duration_s(outcome))
                self.rows[digest] = replace(row, outcome=failed)
                continue
            row_ms, float_ms = np.concatenate(row_builds), np.concatenate(float_builds)
            turns = replace(outcome, samples_ms=tuple(row_ms.tolist()))
            if self.level_ms is not None:  # one sample per turn, relative to the float model's turns
                turns = replace(
                    outcome,
                    samples_ms=tuple((row_ms / float_ms * self.level_ms).tolist()),
                    raw_ms=tuple(row_ms.tolist()),
                    reference_ms=tuple(float_ms.tolist()),
                )
            self.rows[digest] = replace(row, outcome=turns)


def median_latencies(rows: Mapping[str, TableEntry]) -> dict[str, float]:
    """Return the median latency in ms by digest, without failed rows."""
    return {
        digest: median_ci(row.outcome.samples_ms).value
        for digest, row in rows.items()
        if not isinstance(row.outcome, Failed)
    }


def neighbours(space: Space, placement: Placement) -> Iterator[Placement]:
    """Yield all placements that differ from a placement in one dimension."""
    for index, size in enumerate(space.sizes):
        for choice in range(size):
            if choice != placement.choices[index]:
                choices = list(placement.choices)
                choices[index] = choice
                yield Placement(tuple(choices))


def sensitivity(space: Space, anchors: Sequence[Placement], latency_ms: Mapping[str, float]) -> Floats:
    """Return the typical change of log latency by one dimension alone: root mean square over anchors and choices.

    Args:
        anchors: Placements whose neighbours are compared with them.
        latency_ms: Latencies by digest, without failed placements.

    Returns:
        One value for each dimension; 0 if no two latencies can be compared.
    """
    squares: list[list[float]] = [[] for _ in range(len(space))]
    for anchor in anchors:
        anchor_ms = latency_ms.get(space.digest(anchor))
        for other in neighbours(space, anchor):
            other_ms = latency_ms.get(space.digest(other))
            if anchor_ms is not None and other_ms is not None:
                changed = next(i for i, (a, b) in enumerate(zip(anchor.choices, other.choices, strict=True)) if a != b)
                squares[changed].append(math.log(other_ms / anchor_ms) ** 2)
    return np.array([math.sqrt(sum(values) / len(values)) if values else 0.0 for values in squares])


def most_influential(space: Space, changes: Floats, dimensions: int) -> tuple[int, ...]:
    """Return the indices of the dimensions that change latency most, ascending.

    Args:
        changes: Change of each dimension, see `sensitivity`.
        dimensions: Number N; the dimensions of the result have at most 2 ** N placements.
    """
    chosen: list[int] = []
    for index in np.argsort(-changes, kind="stable").tolist():
        if math.prod(space.sizes[i] for i in (*chosen, index)) <= 2**dimensions:
            chosen.append(index)
    return tuple(sorted(chosen))
