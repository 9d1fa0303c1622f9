"""Results as pandas frames of raw figures; nothing is rounded here."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from harness.measure.stats import median_ci
from harness.records import Measured, Told
from harness.report.results import CellResults, Results, Search
from harness.run.readback import incumbents
from harness.run.rows import FLOAT_ROW, Pick

__all__ = ["budget_frame", "cost_frame", "curve_frame", "finalist_frame", "main_frame"]

REASON_WIDTH = 60


def main_frame(results: Results) -> pd.DataFrame:
    """One row a method: confirmed latency and speedup with 95 % intervals, accuracy, drop, cost, verdict.

    A searcher stands with the best of its seeds at the largest budget, best by its own search samples;
    the figures shown are fresh ones. `best` marks the fastest confirmed method of a finished cell among
    those that obey the bound on accuracy.
    """
    return pd.DataFrame([line for cell in results.cells for line in _main_lines(cell)])


def _main_lines(cell: CellResults) -> list[dict[str, Any]]:
    searches: dict[str, list[Pick]] = {}
    for pick in _final(cell):
        if pick.rank == 0:
            searches.setdefault(pick.method, []).append(pick)
    chosen = [min(picks, key=lambda p: (p.search_ms is None, p.search_ms or 0.0)) for picks in searches.values()]
    lines = [_line(cell, pick) for pick in (*(p for p in cell.picks if p.kind != "search"), *chosen)]
    best = _best(cell, lines) if cell.complete else None
    return [{**line, "best": best is not None and line["speedup"] == best} for line in lines]


def finalist_frame(results: Results) -> pd.DataFrame:
    """One row for each placement that a search sent to the confirmation: every seed, every rank.

    The second best of a search is called "METHOD #2". It stands here only: to put the better one of several
    by their confirmed figures into the main table would be to choose and report by the same samples.
    """
    lines = []
    for cell in results.cells:
        for pick in _final(cell):
            line = _line(cell, pick)
            lines.append({**line, "method": pick.method if pick.rank == 0 else f"{pick.method} #{pick.rank + 1}"})
    return pd.DataFrame(lines)


def _final(cell: CellResults) -> Iterator[Pick]:
    """What the searches chose at the largest budget."""
    largest = max((pick.budget or 0 for pick in cell.picks), default=0)
    return (pick for pick in cell.picks if pick.kind == "search" and pick.budget == largest)


def _best(cell: CellResults, lines: list[dict[str, Any]]) -> float | None:
    goal = cell.goal
    speedups = [
        line["speedup"]
        for line in lines
        if line["speedup"] is not None
        and (goal.metric is None or (line["score"] is not None and goal.violation({goal.metric: line["score"]}) == 0.0))
    ]
    return max(speedups, default=None)


def _line(cell: CellResults, pick: Pick) -> dict[str, Any]:
    summary = cell.summaries.get(pick.row)
    row = cell.rows.get(pick.row)
    good, tried = _builds(cell, pick)
    verdict, reason = _verdict(cell, pick)
    return {
        "cell": cell.name,
        "model": cell.facts["model"],
        "device": _device(cell.facts),
        "precision": _precision(cell.facts, pick),
        "method": pick.method,
        "latency_ms": None if summary is None else summary.latency_ms.value,
        "latency_low_ms": None if summary is None else summary.latency_ms.low,
        "latency_high_ms": None if summary is None else summary.latency_ms.high,
        "speedup": None if summary is None else summary.speedup.value,
        "speedup_low": None if summary is None else summary.speedup.low,
        "speedup_high": None if summary is None else summary.speedup.high,
        "metric": cell.metric,
        "score": cell.score(pick.row),
        "drop": cell.drop(pick.row),
        "pairs": None if row is None else row.pairs,
        "builds_ok": good,
        "builds": tried,
        "minutes": pick.minutes,
        "verdict": verdict,
        "reason": reason,
        "seed": pick.seed,
        "budget": pick.budget,
        "search_ms": pick.search_ms,
        "row": pick.row,
        "sha256": None if row is None else row.sha256,
    }


def _builds(cell: CellResults, pick: Pick) -> tuple[int, int]:
    """Builds that worked, of those tried: in the search for a searcher, in the confirmation for the others."""
    if pick.kind == "search":
        entries = next((s.entries for s in cell.searches if (s.searcher, s.seed) == (pick.method, pick.seed)), ())
        told = [entry.told.outcome for entry in entries if entry.told is not None]
        return sum(isinstance(outcome, Measured) for outcome in told), len(told)
    summary = cell.summaries.get(pick.row)
    return (0, cell.lost.get(pick.row, 0)) if summary is None else (summary.builds_ok, summary.builds)


def _verdict(cell: CellResults, pick: Pick) -> tuple[str, str]:
    """Verdict for the table, and the whole reason where there is none."""
    summary, failed = cell.summaries.get(pick.row), cell.failed.get(pick.row)
    if pick.reason:
        return textwrap.shorten(pick.reason, REASON_WIDTH, placeholder=" ..."), pick.reason
    if summary is not None:
        return ("baseline" if pick.row == FLOAT_ROW and pick.kind == "float" else summary.verdict), ""
    return ("not confirmed", "") if failed is None else (f"failed: {failed.stage}", failed.reason)


def _device(facts: Mapping[str, Any]) -> str:
    backend = facts["backend"]
    device = str(backend.get("device", backend.get("name")))
    threads = backend.get("options", {}).get("threads")
    return device if threads is None else f"{device}, {threads} thread{'' if threads == 1 else 's'}"


def _precision(facts: Mapping[str, Any], pick: Pick) -> str:
    strongest = str(facts["backend"].get("float_precision", "float"))
    if pick.kind == "float":
        return pick.row.removeprefix(f"{FLOAT_ROW}-") if pick.row != FLOAT_ROW else strongest
    return f"{facts['precision']}+{strongest}"


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


def cost_frame(results: Results) -> pd.DataFrame:
    """What each search took, in seconds: build, sampling, evaluation, failures, and the harness's own rest."""
    return pd.DataFrame([_cost(cell, search) for cell in results.cells for search in cell.searches if _told(search)])


def _cost(cell: CellResults, search: Search) -> dict[str, Any]:
    told = _told(search)
    good = [t.outcome for t in told if isinstance(t.outcome, Measured)]
    spent = {
        "build_s": sum(outcome.build_s for outcome in good),
        "sampling_s": sum(outcome.measure_s for outcome in good),
        "evaluation_s": sum(outcome.evaluate_s for outcome in good),
        "failures_s": sum(t.outcome.wall_s for t in told if not isinstance(t.outcome, Measured)),
    }
    total_s = told[-1].elapsed_s
    return {
        "cell": cell.name, "searcher": search.searcher, "seed": search.seed, "evaluations": len(told),
        "total_s": total_s, **spent, "harness_s": max(0.0, total_s - sum(spent.values())),
    }  # fmt: skip


def _told(search: Search) -> list[Told]:
    """Outcomes in order; duplicates cost nothing and have none."""
    return [entry.told for entry in search.entries if entry.told is not None]


def curve_frame(cell: CellResults) -> pd.DataFrame:
    """Incumbent after each evaluation of every search of a cell, as speedup over the float seed's own samples."""
    lines = []
    for search in cell.searches:
        float_ms = _float_ms(cell, search)
        objectives = {step.evaluations: step.score.objective for step in incumbents(search.entries, cell.goal)}
        best = None
        for number, told in enumerate(_told(search), 1):
            best = objectives.get(number, best)
            if best is not None and float_ms is not None:
                lines.append(
                    {
                        "searcher": search.searcher, "seed": search.seed, "evaluations": number,
                        "minutes": told.elapsed_s / 60, "speedup": float_ms / best,
                    }
                )  # fmt: skip
    return pd.DataFrame(lines, columns=["searcher", "seed", "evaluations", "minutes", "speedup"])


def _float_ms(cell: CellResults, search: Search) -> float | None:
    """The float model's latency in this search; where it was no seed of it, the confirmed one."""
    for entry in search.entries:
        if not any(entry.asked.choices) and entry.told is not None and isinstance(entry.told.outcome, Measured):
            return median_ci(entry.told.outcome.samples_ms).value
    summary = cell.summaries.get(FLOAT_ROW)
    return None if summary is None else summary.latency_ms.value
