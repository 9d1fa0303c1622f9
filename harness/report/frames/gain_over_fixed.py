"""Gain over the best fixed row: each searcher's choice against the fastest rule or PTQ tool of its task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from harness.report.frames.budget_frames import confirmed_choices, ratio_over_seeds
from harness.report.frames.confirmation_samples import Turns, paired_ratio
from harness.report.frames.speedup_overview import MEAN_LABEL
from harness.report.load.results import CellResults, Results
from harness.report.report_table import MISSING_CELL, ReportTable, format_interval
from harness.report.statistics import mean_ratio_over_blocks
from harness.statistics import MIN_CLAIMED_GAIN, speedup_verdict
from harness.timing.turn_log import TurnMatrix

__all__ = ["fixed_frame", "fixed_table"]

FIXED_COLUMNS = (
    "cell", "model", "cells", "searcher", "budget", "fixed", "row", "ratio", "low", "high", "floor", "verdict", "seeds",
    "same", "unfit",
)  # fmt: skip
SAME_PLACEMENT = "the same placement"
NO_SHIPPABLE_PLACEMENT = "none to ship"
FIXED_VERDICTS = ("faster", "tie", SAME_PLACEMENT, "slower")
FIXED_NOTE = (
    "Confirmed: how many times as fast as the best fixed row of its cell a searcher's choice after so many evaluations "
    "is, paired turn by turn, or by builds where the two were in different workers; median over seeds, brackets as in "
    "the table of budgets. Faster, tie, slower: by the rule of the main table, against the fixed row in the place of "
    f'float; few seeds make wide brackets and many ties, so look at the ratios too. "{SAME_PLACEMENT}": every '
    "seed chose the "
    "fixed row's own.\n"
    "Best fixed row: the fastest in the confirmation of the experiment's baselines without float, of those that keep "
    f'the bound on accuracy where there is one; "{NO_SHIPPABLE_PLACEMENT}": no baseline keeps it, or none could '
    'be scored. "1/2 not to '
    'ship": the choices of so many of the seeds break the bound, or could not be scored.\n'
    "The best fixed row was picked by its confirmed figure, the searcher's choice before the confirmation: what luck "
    "there was in the confirmation is the fixed row's, so the comparison favours it. Geometric mean over cells: "
    "Student's interval over them [95 %], none of fewer than three. Ties by their brackets alone: the figure itself is "
    "slower by more than the A/A floor; ties by the floor alone: the bracket is without 1."
)


def fixed_frame(results: Results) -> pd.DataFrame:
    """Searcher by budget: confirmed ratio of its choice over the best fixed row of the cell, median over seeds.

    Fixed are the experiment's baselines; what was brought over from other cells was found by a search. The best is the
    fastest confirmed one that obeys the bound on accuracy; where none does, `row` is "" and there is no ratio. Ratios
    are paired as `harness.report.frames.confirmation_samples.paired_ratio` has it, 1 where a seed chose the fixed row
    itself. `same` of the
    `seeds` did, and `unfit` chose what breaks the bound or could not be scored. Cells without a confirmed baseline have
    no line.

    Lines without a cell are geometric means over the `cells` that have a ratio, of searchers with several; cells that
    are never pooled (`Results.pooled`) are not among them.
    """
    lines = [line for cell in results.cells for line in _task_rows(cell, results.stored.baselines)]
    frame = pd.DataFrame(lines, columns=list(FIXED_COLUMNS))
    pooled = frame["cell"].isin([cell.name for cell in results.pooled])
    return pd.DataFrame([*lines, *_mean_rows(frame[frame["ratio"].notna() & pooled])], columns=list(FIXED_COLUMNS))


def _mean_rows(judged: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Over cells, by searcher and budget."""
    for (searcher, budget), part in judged.groupby(["searcher", "budget"], sort=False):
        if len(part) > 1:
            mean = mean_ratio_over_blocks(part["ratio"].astype(float).tolist())
            yield {
                **dict.fromkeys(FIXED_COLUMNS), "model": MEAN_LABEL, "cells": len(part), "searcher": searcher,
                "budget": budget,
                "ratio": mean.value, "low": mean.low, "high": mean.high, "seeds": int(part["seeds"].min()),
                "same": int(part["same"].sum()), "unfit": int(part["unfit"].sum()),
            }  # fmt: skip


def _task_rows(cell: CellResults, baselines: Sequence[str]) -> Iterator[dict[str, Any]]:
    fixed: dict[str, list[str]] = {}
    for pick in cell.picks:
        if pick.kind == "baseline" and pick.method in baselines and pick.row in cell.summaries:
            fixed.setdefault(pick.row, []).append(pick.method)
    if not fixed:
        return
    turns = TurnMatrix(cell.events).turns
    best = max(filter(cell.obeys, fixed), key=lambda row: cell.summaries[row].speedup.value, default="")
    for (searcher, budget), rows in confirmed_choices(cell).items():
        yield {
            "cell": cell.name, "model": cell.facts["model"], "cells": 1, "searcher": searcher, "budget": budget,
            "fixed": ", ".join(fixed.get(best, [])), "row": best, "floor": cell.floor,
            **_compare_with_best(cell, turns, list(rows.values()), best), "seeds": len(rows),
            "same": sum(row == best for row in rows.values()),
            "unfit": sum(not cell.obeys(row) for row in rows.values()),
        }  # fmt: skip


def _compare_with_best(cell: CellResults, turns: Mapping[str, Turns], rows: Sequence[str], best: str) -> dict[str, Any]:
    ratios = [ratio for row in rows if (ratio := paired_ratio(turns, row, best)) is not None]
    if not ratios:
        return {"ratio": None, "low": None, "high": None, "verdict": MISSING_CELL}
    middle = ratio_over_seeds(ratios)
    said = SAME_PLACEMENT if set(rows) == {best} else speedup_verdict(middle, cell.floor or 0.0)
    return {"ratio": middle.value, "low": middle.low, "high": middle.high, "verdict": said}


def fixed_table(fixed: pd.DataFrame) -> ReportTable:
    """One row a cell and searcher, one column a budget; below it the tally of each searcher where cells are several."""
    heads = {budget: f"{budget} evaluations" for budget in sorted(set(fixed["budget"]))}
    lines = []
    for (cell, searcher), part in fixed.groupby(["cell", "searcher"], sort=False, dropna=False):
        first, shown = part.iloc[0], {row["budget"]: _format_gain(row) for row in part.to_dict("records")}
        mean = bool(pd.isna(first["cell"]))
        lines.append(
            {
                "cell": MEAN_LABEL if mean else str(cell),
                "best fixed row": MISSING_CELL if mean else first["fixed"] or NO_SHIPPABLE_PLACEMENT,
                "A/A floor": MISSING_CELL if pd.isna(first["floor"]) else f"{first['floor']:.1%}",
                "searcher": str(searcher),
                **{head: shown.get(budget, MISSING_CELL) for budget, head in heads.items()},
                "seeds": str(part["seeds"].max()),
            }
        )
    note = "\n".join([FIXED_NOTE, *_iter_tallies(fixed)])
    title = "What a search adds to the best fixed row"
    return ReportTable(name="fixed", title=title, cells=pd.DataFrame(lines), raw=fixed, note=note)


def _format_gain(row: Mapping[Any, Any]) -> str:
    if pd.isna(row["ratio"]):
        return MISSING_CELL
    if pd.isna(row["cell"]):
        mean = f"{format_interval(row['ratio'], row['low'], row['high'])} of {row['cells']}"
        return f"{mean}, {row['unfit']} not to ship" if row["unfit"] else mean
    figure = "" if row["verdict"] == SAME_PLACEMENT else f"{format_interval(row['ratio'], row['low'], row['high'])} "
    said = f"{figure}{row['verdict']}"
    return f"{said}, {row['unfit']}/{row['seeds']} not to ship" if row["unfit"] else said


def _iter_tallies(fixed: pd.DataFrame) -> Iterator[str]:
    """Of each searcher and budget the verdicts over cells, and the least that came of it."""
    judged = fixed[fixed["ratio"].notna() & fixed["cell"].notna()]
    for searcher, lines in judged.groupby("searcher", sort=False) if judged["cell"].nunique() > 1 else ():
        told = [f"after {budget} evaluations {_count_verdicts(part)}" for budget, part in lines.groupby("budget")]
        yield f"{searcher}: {'; '.join(told)}."


def _count_verdicts(part: pd.DataFrame) -> str:
    counts = part["verdict"].value_counts()
    ratios, floors = part["ratio"].astype(float), part["floor"].astype(float).fillna(0.0)
    tied = part["verdict"] == "tie"
    below = tied & (ratios * (1 + floors.clip(lower=MIN_CLAIMED_GAIN)) < 1)
    clear = tied & ((part["low"] > 1) | (part["high"] < 1))
    counted = ", ".join(f"{counts[said]} {said}" for said in FIXED_VERDICTS if said in counts)
    kinds = {"their brackets": below, "the floor": clear}
    alone = [f"ties by {what} alone: {_join_task_ratios(part[which])}" for what, which in kinds.items() if which.any()]
    return f"{counted}, least {ratios.min():.2f}" + (f" ({'; '.join(alone)})" if alone else "")


def _join_task_ratios(part: pd.DataFrame) -> str:
    return ", ".join(f"{row['cell']} {row['ratio']:.2f}" for row in part.to_dict("records"))
