"""What each part of a searcher is worth: variants beside their reference, by budget, over cells and cell by cell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from harness.report.frames.budget_frames import confirmed_choices, ratio_over_seeds, speedups_at
from harness.report.frames.confirmation_samples import Turns, paired_ratio
from harness.report.frames.speedup_overview import MEAN_LABEL
from harness.report.load.results import CellResults, Results
from harness.report.load.stored_experiment import StoredExperiment
from harness.report.report_table import MISSING_CELL, ReportTable, format_interval
from harness.report.statistics import MIN_BLOCKS_FOR_WILCOXON, effect_size, geometric_mean
from harness.statistics import Interval, block_ci
from harness.timing.turn_log import TurnMatrix

__all__ = ["ablation_frame", "ablation_table"]

ABLATION_COLUMNS = (
    "reference", "variant", "params", "budget", "cell", "cells", "seeds", "ratio", "low", "high", "chance",
)  # fmt: skip
ABLATION_NOTE = (
    "Confirmed speedup of the variant's choice over that of the reference after so many evaluations, paired by seeds, "
    "and within a seed turn by turn, or by builds where the two rows were in different workers; 1 where both chose one "
    "placement. Below 1: what the variant lacks, or has otherwise, helps the reference. Chance: that a seed of the "
    "variant is better, ties half, mean over cells; 50 % is no effect.\n"
    "A cell: median over seeds [from the lowest to the highest limit of the seeds' own 95 % intervals; from six seeds "
    "on the 95 % interval of the median]. As far as seeds go, such a range holds the median of all seeds in 50 % of "
    "cases with two of them, 75 % with three, 94 % with five: with three an interval without 1 is a hint, no proof.\n"
    f"Geometric mean over cells: with fewer than {MIN_BLOCKS_FOR_WILCOXON} its limits are those of these cells "
    "together, as independent "
    f"ones, and say nothing of other models; from {MIN_BLOCKS_FOR_WILCOXON} cells on Student's over cells [95 "
    "%], and the cells have no "
    "lines of their own."
)


@dataclass(frozen=True, slots=True)
class _TaskComparison:
    """What the searches of a cell chose, and what that is worth.

    Attributes:
        rows: By searcher and budget the row of each seed.
        turns: Of the confirmation, by row.
    """

    cell: CellResults
    rows: Mapping[tuple[str, int], Mapping[int, str]]
    turns: Mapping[str, Turns]


def ablation_frame(results: Results) -> pd.DataFrame:
    """Searchers beside others of the same plug-in with other parameters, a budget a line: what each part is worth.

    The first without parameters is the reference, else the first of all. The ratio is that of the confirmed choices of
    one seed, the variant's over the reference's, see `harness.report.frames.confirmation_samples.paired_ratio`; a cell
    has the median over
    seeds, with the limits of the budget table. Below 1 the part that the variant lacks helps. The chance is that of
    being better, ties half.

    Lines without a cell are geometric means over `cells`: with `MIN_BLOCKS_FOR_WILCOXON` of them with Student's
    interval over cells, with fewer with limits of these cells alone, and the lines of the cells below.

    An experiment whose first searcher has variants, and whose others all have a label of their own, is an ablation of
    that first one: searchers that are the only ones of their plug-in are then compared with it too.

    Returns:
        Columns reference, variant, params, budget, cell, cells, seeds (the fewest of a cell), ratio, low, high, chance.
    """
    sides = [_TaskComparison(cell, confirmed_choices(cell), TurnMatrix(cell.events).turns) for cell in results.pooled]
    budgets = sorted({budget for side in sides for _, budget in side.rows})
    lines = [
        {
            "reference": reference, "variant": variant, "params": _format_parameters(results.stored, reference,
            variant),
            "budget": budget, **line,
        }
        for reference, variant in _reference_variant_pairs(results.stored)
        for budget in budgets
        for line in _ablation_rows(sides, reference, variant, budget)
    ]  # fmt: skip
    return pd.DataFrame(lines, columns=list(ABLATION_COLUMNS))


def _reference_variant_pairs(stored: StoredExperiment) -> Iterator[tuple[str, str]]:
    """References and their variants."""
    groups: dict[str, list[str]] = {}
    for name in stored.searchers:
        groups.setdefault(stored.uses[name][0], []).append(name)
    for names in groups.values():
        plain = [name for name in names if not stored.uses[name][1]]
        reference = (plain or names)[0]
        for variant in (*names, *_variants_of_other_plugins(stored, groups, reference)):
            if variant != reference:
                yield reference, variant


def _variants_of_other_plugins(
    stored: StoredExperiment, groups: Mapping[str, Sequence[str]], reference: str
) -> Iterator[str]:
    """Searchers of other plug-ins that an ablation of its first searcher has as parts of that one."""
    first, *others = stored.searchers
    use, params = stored.uses[first]
    labelled = all(name != stored.uses[name][0] for name in others)
    if reference == first and not params and labelled and len(groups[use]) > 1:
        yield from (names[0] for names in groups.values() if len(names) == 1)


def _format_parameters(stored: StoredExperiment, reference: str, variant: str) -> str:
    use, params = stored.uses[variant]
    other = {} if use == stored.uses[reference][0] else {"use": use}
    return ", ".join(f"{key}={value}" for key, value in {**other, **params}.items())


def _ablation_rows(
    sides: Sequence[_TaskComparison], reference: str, variant: str, budget: int
) -> Iterator[dict[str, Any]]:
    found = [line for side in sides if (line := _task_row(side, reference, variant, budget)) is not None]
    if len(found) > 1:
        yield _mean_row(found)
    if len(found) < MIN_BLOCKS_FOR_WILCOXON:
        yield from found


def _task_row(side: _TaskComparison, reference: str, variant: str, budget: int) -> dict[str, Any] | None:
    own, other = (side.rows.get((name, budget), {}) for name in (variant, reference))
    pairs = [(row, other[seed]) for seed, row in own.items() if seed in other]
    ratios = [ratio for pair in pairs if (ratio := paired_ratio(side.turns, *pair)) is not None]
    if not ratios:
        return None
    middle, speedups = ratio_over_seeds(ratios), speedups_at(side.cell, budget)
    return {
        "cell": side.cell.name, "cells": 1, "seeds": len(ratios), "ratio": middle.value, "low": middle.low,
        "high": middle.high, "chance": effect_size(speedups[variant], speedups[reference]),
    }  # fmt: skip


def _mean_row(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    parts = [Interval(value=line["ratio"], low=line["low"], high=line["high"]) for line in found]
    middle = (
        geometric_mean(parts) if len(parts) < MIN_BLOCKS_FOR_WILCOXON else block_ci([[part.value] for part in parts])
    )
    return {
        "cell": None, "cells": len(found), "seeds": min(line["seeds"] for line in found), "ratio": middle.value,
        "low": middle.low, "high": middle.high, "chance": float(np.mean([line["chance"] for line in found])),
    }  # fmt: skip


def ablation_table(ablation: pd.DataFrame) -> ReportTable:
    """One row a variant, a budget, and a cell or the mean over cells."""
    lines = [
        {
            "reference": row["reference"],
            "variant": row["variant"],
            "parameters": row["params"] or MISSING_CELL,
            "budget": f"{row['budget']} evaluations",
            "cell": f"{MEAN_LABEL} of {row['cells']}" if pd.isna(row["cell"]) else row["cell"],
            "ratio [limits]": format_interval(row["ratio"], row["low"], row["high"], 3),
            "chance": f"{row['chance']:.0%}",
            "seeds": str(row["seeds"]),
        }
        for row in ablation.to_dict("records")
    ]
    return ReportTable(
        name="ablation", title="What each part is worth", cells=pd.DataFrame(lines), raw=ablation, note=ABLATION_NOTE
    )
