"""Writes the report of a results folder and gives its main table as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from harness.report.frames import Results, budget_frame, curve_frame, load, main_frame
from harness.report.plots import anytime
from harness.report.tables import MISSING, interval, markdown, write_table

__all__ = ["render"]


def render(folder: Path) -> str:
    """Write tables and curves into `folder/report` and return the main and the budget table as Markdown.

    Raises:
        UserError: Not a results folder.
    """
    results = load(folder)
    out = folder / "report"
    if not results.cells:
        return "No cell has begun yet."
    raw = main_frame(results)
    note = _note(results)
    parts = []
    if len(raw):
        table = _main_table(raw)
        write_table(table, raw, out, "main", note)
        parts += [markdown(table), note]
    budgets = budget_frame(results)
    if len(budgets):
        table = _budget_table(budgets)
        write_table(table, budgets, out, "budget", BUDGET_NOTE)
        parts += [markdown(table), BUDGET_NOTE]
    for cell in results.cells:
        curves = curve_frame(cell, results.experiment)
        if len(curves):
            marks = budgets[budgets["cell"] == cell.name]
            anytime(curves, marks, cell.name, out / f"anytime-{cell.name}.png")
    return "\n\n".join(parts) if parts else "No search has ended yet."


BUDGET_NOTE = (
    "Confirmed speedup over the float baseline of the incumbent after so many evaluations: median over seeds "
    "[95 % interval of the median; the range where there are fewer than six seeds]."
)


def _note(results: Results) -> str:
    floors = [f"{cell.name} {cell.floor:.1%}" for cell in results.cells if cell.floor is not None]
    unfinished = [cell.name for cell in results.cells if not cell.complete]
    random = sorted({cell.facts["model"] for cell in results.cells if cell.facts["calibrated_on"] == "random data"})
    lines = [
        "Latency: median of fresh builds [95 % interval over builds]. Speedup: over the float model at the strongest "
        "float precision, paired by turns [95 % interval over builds]. Tie: the interval contains 1, or the gain is "
        "below 1 % or below the A/A floor.",
        f"A/A floor: {', '.join(floors) if floors else 'not measured yet'}.",
    ]
    if random:
        lines.append(f"Calibrated on random data (no accuracy): {', '.join(random)}.")
    if unfinished:
        lines.append(f"UNFINISHED: {', '.join(unfinished)}; run the same command again to go on.")
    return "\n".join(lines)


def _main_table(raw: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame([_main_row(row) for row in raw.to_dict("records")])


def _main_row(row: dict[Any, Any]) -> dict[str, str]:
    return {
        "model": row["model"],
        "device": row["device"],
        "precision": row["precision"],
        "method": row["method"],
        "latency ms [95 % CI]": interval(row["latency_ms"], row["latency_low_ms"], row["latency_high_ms"], 3),
        "speedup [95 % CI]": interval(row["speedup"], row["speedup_low"], row["speedup_high"]),
        "accuracy": MISSING if pd.isna(row["score"]) else f"{row['metric']} {row['score']:.4f}",
        "drop": MISSING if pd.isna(row["drop"]) else f"{row['drop']:+.4f}",
        "Q/DQ pairs": MISSING if pd.isna(row["pairs"]) else f"{row['pairs']:.0f}",
        "builds ok": f"{row['builds_ok']}/{row['builds']}",
        "minutes": MISSING if pd.isna(row["minutes"]) else f"{row['minutes']:.1f}",
        "verdict": row["verdict"],
    }


def _budget_table(budgets: pd.DataFrame) -> pd.DataFrame:
    lines = []
    for (model, searcher), part in budgets.groupby(["cell", "searcher"], sort=False):
        line = {"cell": model, "searcher": searcher}
        for row in part.to_dict("records"):
            line[f"{row['budget']} evaluations"] = interval(row["speedup"], row["low"], row["high"])
        lines.append({**line, "seeds": str(part["seeds"].max())})
    return pd.DataFrame(lines).fillna(MISSING)
