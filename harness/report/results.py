"""A results folder as values, finished or not. Live and replayed runs read the same way; model files are not needed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from harness.errors import UserError
from harness.measure.confirm import Dropped, RowSummary, summarise
from harness.records import SCHEMA, Failed
from harness.run.config import Experiment, load_experiment
from harness.run.confirming import read_events
from harness.run.engine import Goal
from harness.run.journal import Entry, read_journal
from harness.run.plan import plan
from harness.run.rows import FLOAT_ROW, Pick, Row, read_rows
from harness.run.scores import read_scores

__all__ = ["CellResults", "Results", "Search", "load"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """One search as far as it came."""

    searcher: str
    seed: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResults:
    """What one cell's folder holds.

    Attributes:
        searches: Those that have begun.
        scores: The evaluator's figures by row id.
        summaries: Confirmed figures by row id.
        failed: The last failure by row id, of the rows that failed in the confirmation.
        lost: Number of builds by row id in which the confirmation lost it.
        floor: Relative A/A noise floor of the confirmation; None where it has not begun.
        float_measured: The baseline's float precision was chosen by measurement.
        complete: All searches ended and the confirmation has all its builds.
    """

    name: str
    facts: Mapping[str, Any]
    rows: Mapping[str, Row]
    picks: tuple[Pick, ...]
    searches: tuple[Search, ...]
    scores: Mapping[str, Mapping[str, Any]]
    summaries: Mapping[str, RowSummary]
    failed: Mapping[str, Failed]
    lost: Mapping[str, int]
    floor: float | None
    float_measured: bool
    complete: bool

    @property
    def goal(self) -> Goal:
        """What the searches minimised."""
        return Goal(**self.facts["goal"])

    @property
    def metric(self) -> str | None:
        """Name of the evaluator's figure; None where nothing was scored."""
        name = self.facts.get("metric")
        return None if name is None else str(name)

    @property
    def higher_is_better(self) -> bool:
        """Direction of the metric."""
        return bool(self.facts.get("higher_is_better", self.facts["goal"]["higher_is_better"]))

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """A results folder.

    Attributes:
        cells: Those that have begun, in the order of the experiment.
        waiting: Names of those that have not.
    """

    experiment: Experiment
    cells: tuple[CellResults, ...]
    waiting: tuple[str, ...]


def load(folder: Path) -> Results:
    """Read a results folder, complete or not.

    Raises:
        UserError: Not a results folder, written with another schema, or a file in it is damaged.
    """
    file = folder / "experiment.yaml"
    if not file.exists():
        raise UserError(f"{folder}: no results here (no experiment.yaml); qdq run EXPERIMENT.yaml --out {folder}")
    experiment = load_experiment(file)
    names = [spec.name for spec in plan(experiment)]
    begun = [name for name in names if (folder / name / "cell.json").exists()]
    return Results(
        experiment=experiment,
        cells=tuple(_cell(folder / name, experiment) for name in begun),
        waiting=tuple(name for name in names if name not in begun),
    )


def _cell(folder: Path, experiment: Experiment) -> CellResults:
    facts = _read(folder / "cell.json", lambda: json.loads((folder / "cell.json").read_text(encoding="utf-8")))
    if not isinstance(facts, dict) or facts.get("schema") != SCHEMA:
        there = facts.get("schema") if isinstance(facts, dict) else None
        raise UserError(f"{folder}: written with schema {there}, this version reads schema {SCHEMA}")
    rows, picks = _read(folder / "rows.json", lambda: read_rows(folder))
    events = read_events(folder)
    lost = {(event.row, event.build) for event in events if isinstance(event, Dropped)}
    summary = summarise(events, baseline=FLOAT_ROW) if events else None
    return CellResults(
        name=folder.name,
        facts=facts,
        rows={row.id: row for row in rows},
        picks=picks,
        searches=_searches(folder / "runs", experiment),
        scores=_read(folder / "accuracy.json", lambda: read_scores(folder)),
        summaries={} if summary is None else summary.rows,
        failed={} if summary is None else summary.failed,
        lost={name: sum(row == name for row, _ in lost) for name, _ in lost},
        floor=None if summary is None else summary.floor,
        float_measured=(folder / "float.json").exists(),
        complete=bool(picks) and summary is not None and summary.builds >= experiment.confirmation.builds,
    )


def _searches(runs: Path, experiment: Experiment) -> tuple[Search, ...]:
    found = []
    for searcher in experiment.searchers:
        for seed in experiment.seeds:
            path = runs / f"{searcher.name}-{seed}.jsonl"
            if _has_a_line(path):
                found.append(Search(searcher=searcher.name, seed=seed, entries=tuple(read_journal(path))))
    return tuple(found)


def _has_a_line(path: Path) -> bool:
    """Whether the header, at least, was written to its end before the run was cut off."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        return file.readline().endswith(b"\n")


def _read(path: Path, reader: Callable[[], T]) -> T:
    try:
        return reader()
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: damaged ({error}); move it away and run the same command again") from error
