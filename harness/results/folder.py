"""Reader of a results folder, finished or not, of live and replayed runs; exported models are not needed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.accuracy.metrics.intervals import NEGLIGIBLE_SCORE, decode_accuracy
from harness.base.errors import UserError
from harness.base.files import DamagedFile, from_json, read_json
from harness.measure.records import Failed
from harness.measure.turn_log import RowFailure, RowSummary, TurnEvent, summarize_turns
from harness.results.artifacts import FLOAT_ROW, RECOVERY_FILE, Choice, ExportedModel, read_finalists, recovered_row
from harness.results.manifest import MANIFEST_FILE, require_unchanged_results
from harness.results.output_check import OutputCheck, read_checks
from harness.results.scores import FILE_BENCHMARKER, read_scores, score_difference
from harness.results.search_log import Goal, SearchLog, read_searches
from harness.results.stored_experiment import (
    Environment,
    RecoveryRecord,
    StoredExperiment,
    read_builds,
    read_metric_scores,
    read_stored_experiment,
    read_task_facts,
)
from harness.results.termination import read_phases, read_task_error
from harness.results.turns import (
    CONFIRMATION_LOG_NAME,
    FINAL_SELECTION_LOG_NAME,
    median_speedups,
    read_comparison,
    read_noise_floor,
)

NOISY_FLOOR = 0.10  # relative noise floor from which a machine is called noisy: gains of quantization are of this size

_Scores = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResults:
    """Results of one task.

    Attributes:
        facts: Content of `task.json`.
        environment: Machine on which the task started; empty if it was not recorded.
        rows: Exported models by id.
        picks: Row that each baseline and each search chose, a search at each budget and of each rank.
        searches: Summary of the journal of each search.
        latencies_ms: Latency of each incumbent and scored placement by digest: the median over the searches that
            measured it, so that it is the same in each of them.
        selection_speedups: Speedup over the float model in the final selection, by digest; empty without one.
        scores: Record of the evaluator by row id.
        file_scores: Record of the evaluator by row id of PTQ tools, with their files run as they describe it.
        recovery: Record of recovered placements by their digest.
        events: Events of the confirmation, in order.
        summaries: Confirmed figures by row id.
        failed: Last failure in the confirmation by row id.
        checks: Comparison of the outputs of runtime and file by row id; empty if it was not made.
        lost: Number of builds of the confirmation in which the row failed, by row id.
        phases_s: Wall-clock of each phase in seconds; empty in runs of earlier versions.
        noise_floor: Relative noise floor, the larger of that before the searches and that of the confirmation; None
            before both.
        disturbed: Share of disturbed turns of the confirmation.
        builds: Planned number of fresh builds of the confirmation; None before it.
        float_measured: Whether the float precision of the baseline was selected by measurement.
        complete: Whether all searches ended and the confirmation has all its builds.
    """

    folder: Path
    facts: Mapping[str, Any]
    environment: Mapping[str, Any]
    rows: Mapping[str, ExportedModel]
    picks: tuple[Choice, ...]
    searches: tuple[SearchLog, ...]
    latencies_ms: Mapping[str, float]
    selection_speedups: Mapping[str, float]
    scores: Mapping[str, Mapping[str, Any]]
    file_scores: Mapping[str, Mapping[str, Any]]
    recovery: Mapping[str, Mapping[str, Any]]
    events: tuple[TurnEvent, ...]
    summaries: Mapping[str, RowSummary]
    failed: Mapping[str, Failed]
    checks: Mapping[str, OutputCheck]
    lost: Mapping[str, int]
    phases_s: Mapping[str, float]
    noise_floor: float | None
    disturbed: float
    builds: int | None
    float_measured: bool
    complete: bool

    @property
    def name(self) -> str:
        """Name of the task and of its folder."""
        return self.folder.name

    @property
    def goal(self) -> Goal:
        """Objective and bounds of the searches."""
        return from_json(Goal, self.facts["goal"])

    @property
    def budget(self) -> int:
        """Largest budget in evaluations at which a search has made a choice; 0 before any."""
        return max((pick.budget or 0 for pick in self.picks), default=0)

    @property
    def allowed(self) -> float | None:
        """Bound on the loss of the metric; None without a bound."""
        goal = self.goal
        return None if goal.metric is None else goal.max_drop

    @property
    def metric(self) -> str | None:
        """Name of the evaluator's metric; None without an evaluator."""
        name = self.facts.get("metric")
        return None if name is None else str(name)

    @property
    def tool_methods(self) -> Mapping[str, str]:
        """Calibration method of each PTQ tool that uses another one than the experiment."""
        return dict(self.facts.get("tool_methods", {}))

    @property
    def note(self) -> str:
        """Restriction on the use of the latencies that the backend states (`Benchmarker.describe`), or ""."""
        return str(self.facts["backend"].get("note", ""))

    @property
    def higher_is_better(self) -> bool:
        """True if higher values of the metric are better."""
        return bool(self.facts.get("higher_is_better", self.facts["goal"].get("higher_is_better", True)))

    @property
    def blind(self) -> bool:
        """Return whether the float model scores below `NEGLIGIBLE_SCORE` (0.01), so that drops mean nothing.

        False without a score, and for a metric of which less is better.
        """
        float_score = self.score(FLOAT_ROW)
        return self.higher_is_better and float_score is not None and 0 <= float_score < NEGLIGIBLE_SCORE

    def score(self, row: str) -> float | None:
        """Return the metric of a row; None if it has no score."""
        value = self.scores.get(row, {}).get("metrics", {}).get(self.metric)
        return None if value is None else float(value)

    def drop(self, row: str) -> float | None:
        """Return the loss against the float model, positive if the row is worse; None if one of them has no score."""
        own, reference = self.score(row), self.score(FLOAT_ROW)
        if own is None or reference is None:
            return None
        return reference - own if self.higher_is_better else own - reference

    def wrong(self, row: str) -> bool:
        """Return whether the result of the runtime contradicts the row's file."""
        return row in self.checks and self.checks[row].is_wrong

    def obeys(self, row: str) -> bool:
        """Return whether a row may be shipped: right result, no failed score, and within the bound if there is one.

        False for every row if the task is `blind`, or if there is a bound and the result of the float model is wrong.
        """
        if self.blind or "failed" in self.scores.get(row, {}) or self.wrong(row):
            return False
        goal, drop = self.goal, self.drop(row)
        if goal.metric is not None and self.wrong(FLOAT_ROW):
            return False  # its loss is relative to a wrong score
        return goal.metric is None or (drop is not None and goal.loss_excess(drop) == 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Results folder of an experiment.

    Attributes:
        stored: Experiment of the folder.
        tasks: Tasks that have results, in the order of the experiment.
        waiting: Names of the other tasks.
        starting: Names in `waiting` of tasks that have started: they are running or were stopped.
        stops: Reason why the last run of a task stopped early, by task.
    """

    folder: Path
    stored: StoredExperiment
    tasks: tuple[TaskResults, ...]
    waiting: tuple[str, ...]
    starting: tuple[str, ...] = ()
    stops: Mapping[str, str] = field(default_factory=dict)

    @property
    def pooled(self) -> tuple[TaskResults, ...]:
        """Tasks whose results enter the means: those without a `note`, or all if each has one."""
        return tuple(task for task in self.tasks if not task.note) or self.tasks

    @property
    def complete(self) -> bool:
        """Return whether nothing of the experiment is missing."""
        return not self.waiting and all(task.complete for task in self.tasks)

    def task(self, name: str) -> TaskResults:
        """Return a task by name."""
        for task in self.tasks:
            if task.name == name:
                return task
        raise UserError(f"{self.folder}: no task {name!r}; there are {', '.join(c.name for c in self.tasks) or 'none'}")


def load(folder: Path) -> Results:
    """Read a results folder, complete or not."""
    file = folder / "experiment.yaml"
    if folder.is_file():
        raise UserError(f"{folder}: a file, not the results folder of an experiment")
    if (folder / "autotuner_state.yaml").exists():
        raise UserError(f"{folder}: contains output of ModelOpt's procedure, not results of an experiment (qdq run)")
    if not (file.exists() or (folder / MANIFEST_FILE).exists()):
        raise UserError(f"{folder}: no results here (no experiment.yaml); qdq run EXPERIMENT.yaml --out {folder}")
    require_unchanged_results(folder)
    stored = read_stored_experiment(file)
    begun = {path.parent.name for path in folder.glob("*/task.json")}
    names = list(dict.fromkeys(spec.name for spec in stored.tasks))
    order = [name for name in names if name in begun] + sorted(begun - set(names))
    waiting = tuple(name for name in names if name not in begun)
    return Results(
        folder=folder,
        stored=stored,
        tasks=tuple(_load_task(folder / name, stored) for name in order),
        waiting=waiting,
        starting=tuple(name for name in waiting if (folder / name / "env.json").exists()),
        stops={name: reason for name in names if (reason := read_task_error(folder / name))},
    )


def _load_task(folder: Path, stored: StoredExperiment) -> TaskResults:
    facts = read_task_facts(folder)
    try:
        goal = from_json(Goal, facts["goal"])
    except ValueError as error:
        raise DamagedFile(folder / "task.json", f"damaged (goal: {error})") from error
    finalists, picks = read_finalists(folder)
    rows = {row.id: row for row in finalists}
    events = read_comparison(folder / CONFIRMATION_LOG_NAME)
    lost = {(event.row, event.build) for event in events if isinstance(event, RowFailure)}
    noise_floor = read_noise_floor(folder)
    summary = summarize_turns(events, baseline=FLOAT_ROW, noise_floor=noise_floor) if events else None
    metric = None if facts.get("metric") is None else str(facts["metric"])
    scores, file_scores = read_metric_scores(folder, str(metric)), read_scores(folder, FILE_BENCHMARKER)
    checks = read_checks(folder, rows)
    checks = checks | _differing_scores(facts, scores, file_scores, checks)
    wrong = {name: check.label for name, check in checks.items() if check.is_wrong}
    summaries = {} if summary is None else summary.rows
    builds = read_builds(folder / CONFIRMATION_LOG_NAME) or (stored.builds if events else None)
    paced = replace(goal, minimize="latency")  # the same bounds, but by latency, whatever the searches minimised
    searches, latencies_ms = read_searches(folder / "runs", paced, metric, stored.searchers)
    largest: dict[tuple[str, int | None], int] = defaultdict(int)  # budgets at which choices were made
    for pick in picks:
        largest[pick.method, pick.seed] = max(pick.budget or 0, largest[pick.method, pick.seed])
    # A search may have continued after its choices were made, for instance with a larger budget.
    current = all(s.evaluations <= largest.get((s.searcher, s.seed), s.evaluations) for s in searches)
    is_confirmed = summary is not None and builds is not None and summary.builds >= builds
    return TaskResults(
        folder=folder,
        facts=facts,
        environment=read_json(folder / "env.json", {}, Environment),
        rows=rows,
        picks=picks,
        searches=searches,
        latencies_ms=latencies_ms,
        selection_speedups=median_speedups(read_comparison(folder / FINAL_SELECTION_LOG_NAME), FLOAT_ROW),
        scores=scores,
        file_scores={row: score for row, score in file_scores.items() if not is_float_row(row)},
        recovery=_read_recovery(folder / RECOVERY_FILE),
        events=events,
        summaries={name: replace(row, verdict=wrong.get(name, row.verdict)) for name, row in summaries.items()},
        failed={} if summary is None else summary.failed,
        checks=checks,
        lost=Counter(row for row, _ in lost),
        phases_s=read_phases(folder),
        noise_floor=(noise_floor or None) if summary is None else summary.noise_floor,
        disturbed=0.0 if summary is None else summary.disturbed,
        builds=builds,
        float_measured=(folder / "float.json").exists(),
        complete=bool(picks) and is_confirmed and current,
    )


def _read_recovery(path: Path) -> Mapping[str, Mapping[str, Any]]:
    """Return the record of each recovered placement by digest, with `estimate` and `estimate_before` if known."""
    record = read_json(path, {"placements": {}}, RecoveryRecord)
    estimates, placements = record.get("estimated_losses", {}), dict[str, Mapping[str, Any]]()
    for digest, facts in record["placements"].items():
        rows = {"estimate_before": digest, "estimate": recovered_row(facts.get("sha256", ""))}
        placements[digest] = {**facts, **{key: estimates[row] for key, row in rows.items() if row in estimates}}
    return placements


def _differing_scores(
    facts: Mapping[str, Any], scores: _Scores, file_scores: _Scores, checks: Mapping[str, OutputCheck]
) -> dict[str, OutputCheck]:
    """Return checks with the verdict "wrong result" of rows that score differently by the runtime and by the file."""
    metric, differing = str(facts.get("metric")), {}
    for row in file_scores.keys() & scores.keys() - {name for name, check in checks.items() if check.is_wrong}:
        if not all("metrics" in record.get(row, {}) for record in (scores, file_scores)):
            continue
        by_file, by_runtime = decode_accuracy(file_scores[row]), decode_accuracy(scores[row])
        own = row.removeprefix(FLOAT_ROW).removeprefix("-") or str(facts["backend"].get("float_precision", ""))
        precision = own if is_float_row(row) else None
        if reason := score_difference(by_runtime, by_file, metric, precision):
            previous = checks.get(row, OutputCheck(verdict="right", runtime=str(facts["backend"].get("name", ""))))
            differing[row] = replace(previous, verdict="wrong result", reason=reason)
    return differing


def is_float_row(row: str) -> bool:
    """Return whether a row is the float model, at the precision of the baseline or at another one."""
    return row == FLOAT_ROW or row.startswith(f"{FLOAT_ROW}-")


def row_labels(task: TaskResults, lines: Iterable[Mapping[Any, Any]]) -> dict[str, str]:
    """Return the labels of rows in plots, the baseline first: the methods of the main table that chose them.

    Rows that only other seeds or smaller budgets chose are named by these.

    Args:
        lines: Rows of the main frame; those of other tasks are ignored.
    """
    names: dict[str, dict[str, None]] = {}
    for line in (line for line in lines if line["task"] == task.name and line["row"] != ""):
        name = line["method"] if line["method"] != FLOAT_ROW else f"{FLOAT_ROW} {line['precision']}"
        names.setdefault(line["row"], {})[name] = None
    others: dict[str, dict[str, None]] = {}
    for pick in task.picks:
        if pick.row and pick.row not in names:
            others.setdefault(pick.row, {})[f"{pick.method}, seed {pick.seed} at {pick.budget}"] = None
    return {row: ", ".join(labels) for row, labels in {**names, **others}.items()}
