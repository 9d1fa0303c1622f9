"""Writes the report of a results folder and gives its tables as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from harness.report.frames import budget_frame, cost_frame, curve_frame, finalist_frame, main_frame
from harness.report.plots import anytime
from harness.report.results import CellResults, Results, load
from harness.report.tables import MISSING, Table, interval, markdown, note_markdown, write_table

__all__ = ["render"]

BUDGET_NOTE = (
    "Confirmed speedup over the float baseline of the incumbent after so many evaluations: median over seeds "
    "[95 % interval of the median; the range where there are fewer than six seeds]."
)
FINALIST_NOTE = (
    "Every placement that a search sent to the confirmation at its largest budget; METHOD #2 is the second best of a "
    "search by its own samples. The main table shows the best of each searcher by these samples, never by the "
    "confirmed ones."
)
COST_NOTE = (
    "Searches of a cell together, wall-clock from the first proposal; composing, calibration and confirmation are "
    "not in it. Harness: the share outside build, sampling, evaluation and failed candidates."
)
METRICS = {"map": ("mAP", 4, ""), "top1": ("top-1", 4, ""), "sqnr_db": ("SQNR", 1, " dB")}
"""How a metric is shown: name, digits, unit. Others are shown under their own name with four digits."""


def render(folder: Path) -> str:
    """Write tables and curves into `folder/report`; gives the main, the budget and the cost table as Markdown.

    Of a run that is still going on, what is there is shown, and the text says UNFINISHED.

    Raises:
        UserError: Not a results folder, or a damaged one.
    """
    results = load(folder)
    out = folder / "report"
    budgets = budget_frame(results)
    tables = [table for table in _tables(results, budgets) if len(table.raw)]
    for table in tables:
        write_table(table, out)
    for cell in results.cells:
        curves = curve_frame(cell)
        if len(curves):
            marks = budgets[budgets["cell"] == cell.name]
            anytime(curves, cell.name, out / f"anytime-{cell.name}.png", confirmed=marks)
            anytime(curves, cell.name, out / f"anytime-minutes-{cell.name}.png", over="minutes")
    shown = [f"{markdown(table)}\n\n{note_markdown(table)}" for table in tables if table.name != "finalists"]
    if not any(table.name == "main" for table in tables):
        shown += ["No search has ended yet." if results.cells else "No cell has begun yet.", *_unfinished(results)]
    return "\n\n".join(shown)


def _tables(results: Results, budgets: pd.DataFrame) -> Iterable[Table]:
    main, finalists, cost = main_frame(results), finalist_frame(results), cost_frame(results)
    best = [number for number, row in enumerate(main.to_dict("records")) if row["best"]]
    standing_out = ("latency ms [CI]", "speedup [CI]")
    yield Table(
        name="main",
        cells=_formatted(main, _main_row),
        raw=main,
        note=_note(results),
        bold=frozenset((number, column) for number in best for column in standing_out),
    )
    yield Table(name="finalists", cells=_formatted(finalists, _finalist_row), raw=finalists, note=FINALIST_NOTE)
    yield Table(name="budget", cells=_budget_cells(budgets), raw=budgets, note=BUDGET_NOTE)
    yield Table(name="cost", cells=_cost_cells(cost), raw=cost, note=COST_NOTE)


def _note(results: Results) -> str:
    floors = [f"{cell.name} {cell.floor:.1%}" for cell in results.cells if cell.floor is not None]
    random = sorted({cell.facts["model"] for cell in results.cells if cell.facts["calibrated_on"] == "random data"})
    bounds = sorted({cell.goal.max_drop for cell in results.cells if cell.goal.metric is not None})
    builds = results.experiment.confirmation.builds
    within = f" among those whose drop is at most {', '.join(f'{b:g}' for b in bounds)}" if bounds else ""
    lines = [
        f"Latency: geometric mean over {builds} fresh builds (the baseline: more) of their median turns. Speedup: "
        f"{_denominator(results.cells)}, paired by turns. Intervals: 95 %, Student's over builds.",
        "Tie: the interval contains 1, or the gain is below 1 % or below the A/A floor. Drop: loss against the float "
        f"baseline, positive is worse. Bold: the fastest of a finished cell{within}. Builds ok: in the search for a "
        "searcher, in the confirmation for the others.",
        f"A/A floor: {', '.join(floors) if floors else 'not measured yet'}.",
    ]
    if random:
        lines.append(f"Calibrated on random data (no accuracy): {', '.join(random)}.")
    return "\n".join([*lines, *_unfinished(results)])


def _unfinished(results: Results) -> list[str]:
    names = [cell.name for cell in results.cells if not cell.complete] + list(results.waiting)
    return [f"UNFINISHED: {', '.join(names)}; run the same command again to go on."] if names else []


def _denominator(cells: Iterable[CellResults]) -> str:
    """What the speedups are over, by cell where cells differ."""
    groups: dict[str, list[str]] = {}
    for cell in cells:
        groups.setdefault(_float_baseline(cell), []).append(cell.name)
    if len(groups) == 1:
        return f"over the float model {next(iter(groups))}"
    parts = [f"{how} ({', '.join(names)})" for how, names in groups.items()]
    return f"over the float model {', '.join(parts)}"


def _float_baseline(cell: CellResults) -> str:
    backend = cell.facts["backend"]
    precision = backend.get("float_precision")
    if cell.float_measured:
        return f"at {precision}, the fastest float precision by measurement"
    if precision is None:
        return "as it is"
    return f"at {precision} (pinned)" if len(backend.get("float_params", {})) > 1 else f"at {precision}"


def _formatted(raw: pd.DataFrame, show: Callable[[dict[Any, Any]], dict[str, str]]) -> pd.DataFrame:
    return pd.DataFrame([show(row) for row in raw.to_dict("records")])


def _main_row(row: dict[Any, Any]) -> dict[str, str]:
    return {
        "model": row["model"],
        "device": row["device"],
        "precision": row["precision"],
        "method": row["method"],
        "latency ms [CI]": interval(row["latency_ms"], row["latency_low_ms"], row["latency_high_ms"], 3),
        "speedup [CI]": interval(row["speedup"], row["speedup_low"], row["speedup_high"]),
        "mAP or top-1": _score(row),
        "drop": _drop(row),
        "Q/DQ pairs": MISSING if pd.isna(row["pairs"]) else f"{row['pairs']:.0f}",
        "builds ok": f"{row['builds_ok']}/{row['builds']}",
        "minutes": MISSING if pd.isna(row["minutes"]) else f"{row['minutes']:.1f}",
        "verdict": row["verdict"],
    }


def _finalist_row(row: dict[Any, Any]) -> dict[str, str]:
    shown = _main_row(row)
    kept = ("method", "latency ms [CI]", "speedup [CI]", "mAP or top-1", "drop", "Q/DQ pairs", "verdict")
    line = {"cell": row["cell"], **{column: shown[column] for column in kept}}
    return {**line, "seed": f"{row['seed']:.0f}", "placement": row["row"] or MISSING}


def _score(row: dict[Any, Any]) -> str:
    if pd.isna(row["score"]):
        return MISSING
    name, digits, unit = METRICS.get(row["metric"], (row["metric"], 4, ""))
    return f"{name} {row['score']:.{digits}f}{unit}"


def _drop(row: dict[Any, Any]) -> str:
    _, digits, unit = METRICS.get(row["metric"], ("", 4, ""))
    return MISSING if pd.isna(row["drop"]) else f"{row['drop']:+.{digits}f}{unit}"


def _budget_cells(budgets: pd.DataFrame) -> pd.DataFrame:
    lines = []
    for (cell, searcher), part in budgets.groupby(["cell", "searcher"], sort=False):
        line = {"cell": cell, "searcher": searcher}
        for row in part.to_dict("records"):
            line[f"{row['budget']} evaluations"] = interval(row["speedup"], row["low"], row["high"])
        lines.append({**line, "seeds": str(part["seeds"].max())})
    return pd.DataFrame(lines).fillna(MISSING)


def _cost_cells(cost: pd.DataFrame) -> pd.DataFrame:
    lines = []
    for cell, part in cost.groupby("cell", sort=False) if len(cost) else ():
        total_s = part["total_s"].sum()
        shares = {
            what: f"{part[f'{what}_s'].sum() / total_s:.1%}" if total_s else MISSING
            for what in ("build", "sampling", "evaluation", "failures", "harness")
        }
        line = {"cell": cell, "searches": str(len(part)), "evaluations": str(part["evaluations"].sum())}
        lines.append({**line, "minutes": f"{total_s / 60:.1f}", **shares})
    return pd.DataFrame(lines)
