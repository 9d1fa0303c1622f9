"""A results folder as values, finished or not. Live and replayed runs read the same way; model files are not needed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from harness.accuracy.metrics.base import NEGLIGIBLE_SCORE
from harness.errors import UserError
from harness.records import SCHEMA_VERSION, Failed
from harness.report.load.search_logs import SearchLog, median_latencies_ms, read_searches
from harness.report.load.stored_experiment import StoredExperiment, read_metric_scores, read_stored_experiment
from harness.results_dir.artifacts import FLOAT_ROW, Choice, ExportedModel, read_finalists
from harness.results_dir.journal import has_header
from harness.results_dir.termination import read_task_error
from harness.search_loop.objective import Goal
from harness.selection.confirmation import read_events, read_noise_floor
from harness.selection.paired_timing import SELECTION_LOG_NAME, read_speedups
from harness.timing.confirmation import ContenderSummary, summarize_turns
from harness.timing.turn_log import RowFailure, TurnEvent
from harness.verification.output_comparison import CHECK_FILE_NAME, OutputCheck, read_checks

__all__ = ["NOISY_FLOOR", "CellResults", "Results", "load"]

T = TypeVar("T")
NOISY_FLOOR = 0.10  # A/A floor of a noisy machine, on which gains of the size that quantization has are lost
REPAIR_HINT = "move it away and repeat qdq run, which makes it anew, or restore it"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResults:
    """What one cell's folder holds.

    Attributes:
        environment: The machine on which it was begun; empty where that was not written down.
        searches: Those that have begun.
        levels_ms: Latency of each placement that they measured, by digest: one for all of them, the median of their
            readings, so that what several searches came to is as fast in each.
        runoff: Speedup over the float model by digest of what met in the runoff; empty where there was none.
        scores: The evaluator's figures by row id.
        events: Of the confirmation, in order.
        summaries: Confirmed figures by row id.
        failed: The last failure by row id, of the rows that failed in the confirmation.
        checks: How what the runtime computes compares with the file, by row id, as far as that was looked at.
        lost: Number of builds by row id in which the confirmation lost it.
        floor: Relative A/A noise floor, the larger of before the searches and of the confirmation; None before both.
        disturbed: Share of the confirmation's turns in which something else was at work on the machine.
        builds: Fresh builds that the confirmation was to make; None where it has not begun.
        float_measured: The baseline's float precision was chosen by measurement.
        complete: All searches ended and the confirmation has all its builds.
    """

    folder: Path
    facts: Mapping[str, Any]
    environment: Mapping[str, Any]
    rows: Mapping[str, ExportedModel]
    picks: tuple[Choice, ...]
    searches: tuple[SearchLog, ...]
    levels_ms: Mapping[str, float]
    runoff: Mapping[str, float]
    scores: Mapping[str, Mapping[str, Any]]
    events: tuple[TurnEvent, ...]
    summaries: Mapping[str, ContenderSummary]
    failed: Mapping[str, Failed]
    checks: Mapping[str, OutputCheck]
    lost: Mapping[str, int]
    floor: float | None
    disturbed: float
    builds: int | None
    float_measured: bool
    complete: bool

    @property
    def name(self) -> str:
        """Name of the cell and of its folder."""
        return self.folder.name

    @property
    def goal(self) -> Goal:
        """What the searches minimised."""
        return _read_goal(self.facts)

    @property
    def budget(self) -> int:
        """Evaluations of the largest budget that its searches have chosen at; 0 where none has ended."""
        return max((pick.budget or 0 for pick in self.picks), default=0)

    @property
    def allowed(self) -> float | None:
        """Largest loss of the metric that the experiment allows; None: any."""
        goal = self.goal
        return None if goal.metric is None else goal.max_drop

    @property
    def metric(self) -> str | None:
        """Name of the evaluator's figure; None where nothing was scored."""
        name = self.facts.get("metric")
        return None if name is None else str(name)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What is odd about the activations on calibration data."""
        return _strings(self.facts.get("calibration_remarks"))

    @property
    def cache_remarks(self) -> tuple[str, ...]:
        """Which schemes of pattern caches were measured elsewhere."""
        return _strings(self.facts.get("cache_remarks"))

    @property
    def tool_methods(self) -> Mapping[str, str]:
        """Calibration method of each PTQ tool that lacks the one of the experiment."""
        found = self.facts.get("tool_methods")
        return {str(name): str(method) for name, method in found.items()} if isinstance(found, dict) else {}

    @property
    def note(self) -> str:
        """What the backend has to say below its figures; "" where nothing."""
        return " ".join(_strings([self.facts["backend"].get("note", "")]))

    @property
    def higher_is_better(self) -> bool:
        """Direction of the metric."""
        return bool(self.facts.get("higher_is_better", self.facts["goal"].get("higher_is_better", True)))

    @property
    def blind(self) -> bool:
        """The float model itself scores next to nothing, so no drop from there says anything."""
        own = self.score(FLOAT_ROW)
        return self.higher_is_better and own is not None and 0 <= own < NEGLIGIBLE_SCORE

    def score(self, row: str) -> float | None:
        """The evaluator's figure of a row; None where it has none."""
        value = self.scores.get(row, {}).get("metrics", {}).get(self.metric)
        return None if value is None else float(value)

    def drop(self, row: str) -> float | None:
        """Loss against the float model, positive where the row is worse; None where one of them has no score."""
        own, reference = self.score(row), self.score(FLOAT_ROW)
        if own is None or reference is None:
            return None
        return reference - own if self.higher_is_better else own - reference

    def wrong(self, row: str) -> bool:
        """Whether the runtime computes something else than the row's file says."""
        return row in self.checks and self.checks[row].is_wrong

    def obeys(self, row: str) -> bool:
        """Whether a row may be delivered: its result is right, it could be scored, and it holds the bound if any."""
        if self.blind or "failed" in self.scores.get(row, {}) or self.wrong(row):
            return False
        goal, drop = self.goal, self.drop(row)
        return goal.metric is None or (drop is not None and goal.loss_excess(drop) == 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """A results folder.

    Attributes:
        cells: Those that have begun, in the order of the experiment.
        waiting: Names of those that have not.
        starting: Those of `waiting` whose machine was written down: they are on their way, or were stopped.
        stops: By name of the cell why its last run ended before its time, where it did.
    """

    folder: Path
    stored: StoredExperiment
    cells: tuple[CellResults, ...]
    waiting: tuple[str, ...]
    starting: tuple[str, ...] = ()
    stops: Mapping[str, str] = field(default_factory=dict)

    @property
    def pooled(self) -> tuple[CellResults, ...]:
        """Cells of which means are taken: where only some backends have a note, theirs are left out."""
        return tuple(cell for cell in self.cells if not cell.note) or self.cells

    @property
    def complete(self) -> bool:
        """Everything that the experiment asks for is there."""
        return not self.waiting and all(cell.complete for cell in self.cells)

    def cell(self, name: str) -> CellResults:
        """The cell of this name.

        Raises:
            UserError: There is none; the text lists those that are.
        """
        for cell in self.cells:
            if cell.name == name:
                return cell
        raise UserError(f"{self.folder}: no cell {name!r}; there are {', '.join(c.name for c in self.cells) or 'none'}")


def load(folder: Path) -> Results:
    """Read a results folder, complete or not.

    Raises:
        UserError: Not a results folder, written with another schema, or a file in it is damaged.
    """
    file = folder / "experiment.yaml"
    if folder.is_file():
        raise UserError(f"{folder}: is a file, not the results folder of an experiment")
    if (folder / "autotuner_state.yaml").exists():
        raise UserError(f"{folder}: holds what qdq autotune wrote, not the results of an experiment (qdq run)")
    if not file.exists():
        raise UserError(f"{folder}: no results here (no experiment.yaml); qdq run EXPERIMENT.yaml --out {folder}")
    stored = read_stored_experiment(file)
    begun = {path.parent.name for path in folder.glob("*/cell.json")}
    names = list(dict.fromkeys(spec.name for spec in stored.cells))
    order = [name for name in names if name in begun] + sorted(begun - set(names))
    waiting = tuple(name for name in names if name not in begun)
    return Results(
        folder=folder,
        stored=stored,
        cells=tuple(_load_task(folder / name, stored) for name in order),
        waiting=waiting,
        starting=tuple(name for name in waiting if (folder / name / "env.json").exists()),
        stops={name: reason for name in names if (reason := read_task_error(folder / name))},
    )


def _load_task(folder: Path, stored: StoredExperiment) -> CellResults:
    facts = _read_task_facts(folder)
    goal = _read_or_explain(folder / "cell.json", lambda: _read_goal(facts))
    rows, picks = _read_or_explain(folder / "rows.json", lambda: read_finalists(folder))
    events = read_events(folder)
    lost = {(event.row, event.build) for event in events if isinstance(event, RowFailure)}
    floor = read_noise_floor(folder)
    summary = summarize_turns(events, baseline=FLOAT_ROW, floor=floor) if events else None
    named = {row.id: row for row in rows}
    checks = _read_or_explain(folder / CHECK_FILE_NAME, lambda: read_checks(folder, named))
    paced = replace(goal, minimize="latency")  # the same bounds, but the fastest counts, whatever was minimised
    builds = _read_builds(folder / "confirm.jsonl") or (stored.builds if events else None)
    metric = facts.get("metric")
    searches = read_searches(folder / "runs", paced, None if metric is None else str(metric), stored.searchers)
    return CellResults(
        folder=folder,
        facts=facts,
        environment=_read_environment(folder / "env.json"),
        rows=named,
        picks=picks,
        searches=searches,
        levels_ms=median_latencies_ms(searches),
        runoff=_read_or_explain(
            folder / SELECTION_LOG_NAME, lambda: read_speedups(folder / SELECTION_LOG_NAME, FLOAT_ROW)
        ),
        scores=_read_or_explain(folder / "accuracy.json", lambda: read_metric_scores(folder, str(facts.get("metric")))),
        events=events,
        summaries={} if summary is None else _with_checks(summary.rows, checks),
        failed={} if summary is None else summary.failed,
        checks=checks,
        lost={name: sum(row == name for row, _ in lost) for name, _ in lost},
        floor=(floor or None) if summary is None else summary.floor,
        disturbed=0.0 if summary is None else summary.disturbed,
        builds=builds,
        float_measured=(folder / "float.json").exists(),
        complete=bool(picks)
        and summary is not None
        and builds is not None
        and summary.builds >= builds
        and _picks_are_current(searches, picks),
    )


def _with_checks(
    summaries: Mapping[str, ContenderSummary], checks: Mapping[str, OutputCheck]
) -> dict[str, ContenderSummary]:
    """Return the confirmed figures; a row whose result is wrong is neither faster nor slower."""
    wrong = {name: each.label for name, each in checks.items() if each.is_wrong}
    return {name: replace(each, verdict=wrong.get(name, each.verdict)) for name, each in summaries.items()}


def _picks_are_current(searches: Iterable[SearchLog], picks: Iterable[Choice]) -> bool:
    """Whether the picks are of the searches as they are now; a larger budget makes searches go on, and picks old."""
    most: dict[tuple[str, int | None], int] = {}
    for pick in picks:
        most[pick.method, pick.seed] = max(pick.budget or 0, most.get((pick.method, pick.seed), 0))
    return all(s.evaluations <= most.get((s.searcher, s.seed), s.evaluations) for s in searches)


def _read_task_facts(folder: Path) -> Mapping[str, Any]:
    path = folder / "cell.json"
    facts = _read_or_explain(path, lambda: json.loads(path.read_text(encoding="utf-8")))
    if not isinstance(facts, dict) or facts.get("schema") != SCHEMA_VERSION:
        there = facts.get("schema", "unknown") if isinstance(facts, dict) else "unknown"
        raise UserError(
            f"{folder}: written with schema {there}, this version reads schema {SCHEMA_VERSION}; "
            "render it with the version that wrote it, or run the experiment again into another folder"
        )
    missing = [key for key in ("model", "backend", "precision", "goal", "calibrated_on") if key not in facts]
    if missing:
        raise UserError(f"{path}: damaged (no {', '.join(missing)}); {REPAIR_HINT}")
    return facts


def _read_environment(path: Path) -> Mapping[str, Any]:
    found = _read_or_explain(path, lambda: json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
    return found if isinstance(found, dict) else {}


def _read_builds(path: Path) -> int | None:
    """How many builds the confirmation was to make; None where its header does not tell."""
    if not has_header(path):
        return None
    with path.open("rb") as file:
        header = _read_or_explain(path, lambda: json.loads(file.readline()))
    plan = header.get("plan") if isinstance(header, dict) else None
    builds = plan.get("builds") if isinstance(plan, dict) else None
    return builds if isinstance(builds, int) else None


def _strings(found: object) -> tuple[str, ...]:
    return tuple(str(text) for text in found) if isinstance(found, list) else ()


def _read_goal(facts: Mapping[str, Any]) -> Goal:
    known = {field.name for field in fields(Goal)}
    return Goal(**{key: value for key, value in dict(facts["goal"]).items() if key in known})


def _read_or_explain(path: Path, reader: Callable[[], T]) -> T:
    try:
        return reader()
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: damaged ({error}); {REPAIR_HINT}") from error
