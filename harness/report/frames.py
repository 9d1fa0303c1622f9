"""A results folder as pandas frames: raw figures, one row a method. Live and replayed runs read the same way."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from harness.errors import UserError
from harness.measure.confirm import RowSummary, summarise
from harness.measure.stats import median_ci
from harness.records import SCHEMA, Measured
from harness.run.confirming import read_events
from harness.run.engine import Goal
from harness.run.journal import Entry, read_journal
from harness.run.readback import incumbents
from harness.run.rows import FLOAT_ROW, Pick, Row, read_rows
from harness.run.scores import read_scores

__all__ = ["CellResults", "Results", "budget_frame", "curve_frame", "load", "main_frame"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResults:
    """What one cell's folder holds.

    Attributes:
        complete: All searches ended and the confirmation has all its builds.
        floor: Relative A/A noise floor of the confirmation.
        summaries: Confirmed figures by row id.
    """

    name: str
    folder: Path
    facts: Mapping[str, Any]
    rows: Mapping[str, Row]
    picks: tuple[Pick, ...]
    scores: Mapping[str, Mapping[str, Any]]
    summaries: Mapping[str, RowSummary]
    floor: float | None
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

    def journal(self, searcher: str, seed: int) -> tuple[Entry, ...]:
        """The evaluations of one search; none where it has not begun."""
        path = self.folder / "runs" / f"{searcher}-{seed}.jsonl"
        return tuple(read_journal(path)) if path.exists() else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """A results folder."""

    experiment: Mapping[str, Any]
    folder: Path
    cells: tuple[CellResults, ...]


def load(folder: Path) -> Results:
    """Read a results folder, complete or not.

    Raises:
        UserError: Not a results folder, or written with another schema.
    """
    import yaml

    file = folder / "experiment.yaml"
    if not file.exists():
        raise UserError(f"{folder}: no results here (no experiment.yaml); qdq run EXPERIMENT.yaml --out {folder}")
    experiment = yaml.safe_load(file.read_text(encoding="utf-8"))
    cells = tuple(_cell(path.parent, experiment) for path in sorted(folder.glob("*/cell.json")))
    return Results(experiment=experiment, folder=folder, cells=cells)


def _cell(folder: Path, experiment: Mapping[str, Any]) -> CellResults:
    facts = json.loads((folder / "cell.json").read_text(encoding="utf-8"))
    if facts.get("schema") != SCHEMA:
        raise UserError(f"{folder}: written with schema {facts.get('schema')}, this version reads schema {SCHEMA}")
    rows, picks = read_rows(folder)
    events = read_events(folder)
    summary = summarise(events, baseline=FLOAT_ROW) if events else None
    return CellResults(
        name=folder.name,
        folder=folder,
        facts=facts,
        rows={row.id: row for row in rows},
        picks=picks,
        scores=read_scores(folder),
        summaries={} if summary is None else summary.rows,
        floor=None if summary is None else summary.floor,
        complete=summary is not None and summary.builds >= experiment["confirmation"]["builds"],
    )


def main_frame(results: Results) -> pd.DataFrame:
    """One row a method: confirmed latency and speedup with 95 % intervals, accuracy, drop, cost, verdict.

    A searcher stands with the best of its seeds at the largest budget, best by its own search samples;
    the figures shown are fresh ones.
    """
    return pd.DataFrame([line for cell in results.cells for line in _main_lines(cell)])


def _main_lines(cell: CellResults) -> Iterator[dict[str, Any]]:
    searches: dict[str, list[Pick]] = {}
    for pick in cell.picks:
        if pick.kind != "search":
            yield _line(cell, pick)
        elif pick.rank == 0 and pick.budget == max(p.budget or 0 for p in cell.picks):
            searches.setdefault(pick.method, []).append(pick)
    for picks in searches.values():
        yield _line(cell, min(picks, key=lambda p: (p.search_ms is None, p.search_ms or 0.0)))


def _line(cell: CellResults, pick: Pick) -> dict[str, Any]:
    summary = cell.summaries.get(pick.row)
    row = cell.rows.get(pick.row)
    score = cell.scores.get(pick.row, {}).get("metrics", {}).get(cell.metric)
    reference = cell.scores.get(FLOAT_ROW, {}).get("metrics", {}).get(cell.metric)
    good, tried = _builds(cell, pick)
    return {
        "cell": cell.name,
        "model": cell.facts["model"],
        "device": _device(cell.facts),
        "precision": _precision(cell.facts, pick),
        "method": _method(cell.facts, pick),
        "latency_ms": None if summary is None else summary.latency_ms.value,
        "latency_low_ms": None if summary is None else summary.latency_ms.low,
        "latency_high_ms": None if summary is None else summary.latency_ms.high,
        "speedup": None if summary is None else summary.speedup.value,
        "speedup_low": None if summary is None else summary.speedup.low,
        "speedup_high": None if summary is None else summary.speedup.high,
        "metric": cell.metric,
        "score": score,
        "drop": None if score is None or reference is None else reference - score,
        "pairs": None if row is None else row.pairs,
        "builds_ok": good,
        "builds": tried,
        "minutes": pick.minutes,
        "verdict": pick.reason or _verdict(pick, summary),
        "seed": pick.seed,
        "budget": pick.budget,
        "search_ms": pick.search_ms,
        "row": pick.row,
        "sha256": None if row is None else row.sha256,
    }


def _builds(cell: CellResults, pick: Pick) -> tuple[int, int]:
    """Builds that worked, of those tried: in the search for a searcher, in the confirmation for the others."""
    if pick.kind == "search" and pick.seed is not None:
        told = [e.told.outcome for e in cell.journal(pick.method, pick.seed) if e.told is not None]
        return sum(isinstance(outcome, Measured) for outcome in told), len(told)
    summary = cell.summaries.get(pick.row)
    return (0, 0) if summary is None else (summary.builds_ok, summary.builds)


def _verdict(pick: Pick, summary: RowSummary | None) -> str:
    if summary is None:
        return "not confirmed"
    return "baseline" if pick.row == FLOAT_ROW and pick.kind == "float" else summary.verdict


def _device(facts: Mapping[str, Any]) -> str:
    backend = facts["backend"]
    threads = backend.get("options", {}).get("threads")
    return f"{backend.get('device', backend.get('name'))}{'' if threads is None else f', {threads} thread'}"


def _precision(facts: Mapping[str, Any], pick: Pick) -> str:
    strongest = str(facts["backend"].get("float_precision", "float"))
    if pick.kind == "float":
        return pick.row.removeprefix(f"{FLOAT_ROW}-") if pick.row != FLOAT_ROW else strongest
    return f"{facts['precision']}+{strongest}"


def _method(facts: Mapping[str, Any], pick: Pick) -> str:
    return "float" if pick.kind == "float" else pick.method


def budget_frame(results: Results) -> pd.DataFrame:
    """Searcher by budget: confirmed speedup of the incumbent at that budget, median over seeds and its interval."""
    lines = []
    for cell in results.cells:
        found: dict[tuple[str, int], list[float]] = {}
        for pick in cell.picks:
            if pick.kind == "search" and pick.rank == 0 and pick.budget is not None and pick.row in cell.summaries:
                value = cell.summaries[pick.row].speedup.value
                found.setdefault((pick.method, pick.budget), []).append(value)
        for (searcher, budget), speedups in found.items():
            middle = median_ci(speedups)
            lines.append(
                {
                    "cell": cell.name, "model": cell.facts["model"], "searcher": searcher, "budget": budget,
                    "speedup": middle.value, "low": middle.low, "high": middle.high, "seeds": len(speedups),
                }
            )  # fmt: skip
    columns = ["cell", "model", "searcher", "budget", "speedup", "low", "high", "seeds"]
    return pd.DataFrame(lines, columns=columns)


def curve_frame(cell: CellResults, experiment: Mapping[str, Any]) -> pd.DataFrame:
    """Incumbent after each evaluation of every search of a cell, as speedup over the float seed's own samples."""
    lines = []
    last = max(experiment["budget"]["evaluations"])
    for searcher in dict.fromkeys(p.method for p in cell.picks if p.kind == "search"):
        for seed in experiment["seeds"]:
            entries = cell.journal(searcher, seed)
            float_ms = _float_ms(entries)
            if float_ms is None:
                continue
            steps = list(incumbents(entries, cell.goal))
            for step, until in zip(steps, [*(s.evaluations for s in steps[1:]), last + 1], strict=True):
                lines += [
                    {
                        "searcher": searcher, "seed": seed, "evaluations": n, "elapsed_s": step.elapsed_s,
                        "speedup": float_ms / step.score.objective,
                    }
                    for n in range(step.evaluations, until)
                ]  # fmt: skip
    return pd.DataFrame(lines, columns=["searcher", "seed", "evaluations", "elapsed_s", "speedup"])


def _float_ms(entries: tuple[Entry, ...]) -> float | None:
    for entry in entries:
        if not any(entry.asked.choices) and entry.told is not None and isinstance(entry.told.outcome, Measured):
            return median_ci(entry.told.outcome.samples_ms).value
    return None
