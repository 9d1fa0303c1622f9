"""Paired comparisons of searchers' choices: with the best fixed row of a task, and with variants of a searcher."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from harness.base.statistics import MIN_CLAIMED_GAIN, Interval, block_ci, speedup_verdict
from harness.measure.turn_log import TurnMatrix
from harness.report.frames import Turns, confirmed_choices, paired_ratio, ratio_over_seeds, speedups_at
from harness.report.report_table import (
    MISSING_CELL,
    Column,
    ReportTable,
    Row,
    TableSpec,
    format_interval,
    frame_rows,
    interval_column,
    is_missing,
    number_column,
    text_column,
)
from harness.report.statistics import MIN_BLOCKS_FOR_WILCOXON, effect_size, geometric_mean, mean_ratio_over_blocks
from harness.report.tables.main import MEAN_LABEL
from harness.results.folder import Results, TaskResults
from harness.results.stored_experiment import StoredExperiment

FIXED_COLUMNS = (
    "task", "model", "tasks", "searcher", "budget", "fixed", "row", "ratio", "low", "high", "noise_floor", "verdict",
    "seeds", "same", "unfit",
)  # fmt: skip
ABLATION_COLUMNS = (
    "reference", "variant", "params", "budget", "task", "tasks", "seeds", "ratio", "low", "high", "chance",
)  # fmt: skip
SAME_PLACEMENT = "the same placement"
NO_SHIPPABLE_ROW = "none to ship"
FIXED_VERDICTS = ("faster", "tie", SAME_PLACEMENT, "slower")


def _format_gain(row: Row) -> str:
    if is_missing(row["ratio"]):
        return MISSING_CELL
    text = format_interval(row["ratio"], row["low"], row["high"])
    if is_missing(row["task"]):
        return f"{text} of {row['tasks']}" + (f", {row['unfit']} not to ship" if row["unfit"] else "")
    text = SAME_PLACEMENT if row["verdict"] == SAME_PLACEMENT else f"{text} {row['verdict']}"
    return text + (f", {row['unfit']}/{row['seeds']} not to ship" if row["unfit"] else "")


FIXED = TableSpec(
    name="fixed",
    title="What a search adds to the best fixed row",
    columns=(
        Column("task", lambda row: MEAN_LABEL if is_missing(row["task"]) else str(row["task"]), text=True),
        Column(
            "best fixed row",
            lambda row: MISSING_CELL if is_missing(row["task"]) else row["fixed"] or NO_SHIPPABLE_ROW,
            text=True,
        ),
        number_column("noise floor", "noise_floor", "{:.1%}"),
        text_column("searcher"),
    ),
    caption=(
        "Confirmed speedup of a searcher's choice over the best fixed row of the task by number of evaluations, paired "
        "turn by turn, or by builds if the two were in different workers: median over seeds, intervals as in the "
        "budget table. Faster, tie, slower: by the rule of the main table, against the fixed row. Few seeds give wide "
        f'intervals and many ties, so compare the ratios too. "{SAME_PLACEMENT}": every seed chose that of the fixed '
        "row.\n"
        "Best fixed row: the fastest confirmed baseline of the experiment that keeps the bound on accuracy, if there "
        f'is one; "{NO_SHIPPABLE_ROW}": no baseline keeps it, or none could be scored. "1/2 not to ship": the '
        "choices of 1 of 2 seeds exceed the bound or could not be scored.\n"
        "The best fixed row was selected by its confirmed figure, the searcher's choice before the confirmation, so "
        "chance in the confirmation favours the fixed row. Geometric mean over tasks: Student's t interval over them "
        "[95 %], none below three. Ties by their intervals alone: the ratio itself is slower by more than the "
        "noise floor; ties by the noise floor alone: the interval excludes 1."
    ),
    group_by=("task", "searcher"),
    spread_by="budget",
    spread=(Column("{budget} evaluations", _format_gain),),
    last=(("seeds", lambda rows: str(max(row["seeds"] for row in rows))),),
    timed=True,
    states_noise_floor=True,
    assumes_budget=True,
    source="choices",
)
ABLATION = TableSpec(
    name="ablation",
    title="What each part is worth",
    columns=(
        text_column("reference"),
        text_column("variant"),
        Column("parameters", lambda row: row["params"] or MISSING_CELL, text=True),
        Column("budget", lambda row: f"{row['budget']} evaluations"),
        Column("task", lambda row: f"{MEAN_LABEL} of {row['tasks']}" if is_missing(row["task"]) else row["task"], True),
        interval_column("ratio [limits]", "ratio", "low", "high", 3),
        number_column("chance", form="{:.0%}"),
        text_column("seeds"),
    ),
    caption=(
        "Confirmed speedup of the variant's choice over that of the reference at a number of evaluations, paired by "
        "seed, and within a seed turn by turn, or by builds if the two rows were in different workers; 1 if both chose "
        "one placement. Below 1: the part that the variant lacks or changes helps the reference. Chance: probability "
        "that a seed of the variant is better, ties count half, mean over tasks; 50 % is no effect.\n"
        "A task: median over seeds [the widest limits of the seeds' own 95 % intervals; from six seeds, the 95 % "
        "interval of the median]. The range of two seeds contains the median of all seeds with a probability of 50 %, "
        "that of three 75 %, that of five 94 %: with three seeds, an interval without 1 is a hint, not a proof.\n"
        f"Geometric mean over tasks: below {MIN_BLOCKS_FOR_WILCOXON} tasks its limits combine those of these tasks as "
        f"independent ones and do not apply to other models; from {MIN_BLOCKS_FOR_WILCOXON} tasks, Student's t over "
        "tasks [95 %], without rows of single tasks."
    ),
    timed=True,
    assumes_budget=True,
    source="choices",
)


def fixed_table(results: Results) -> ReportTable:
    """Return the table of gains over the best fixed row, with the tally of each searcher if there are several tasks."""
    fixed = fixed_frame(results)
    return FIXED.build(fixed, _iter_tallies(fixed))


def _iter_tallies(fixed: pd.DataFrame) -> Iterator[str]:
    """Yield for each searcher and budget the verdicts over tasks and the smallest ratio."""
    judged = fixed[fixed["ratio"].notna() & fixed["task"].notna()]
    for searcher, lines in judged.groupby("searcher", sort=False) if judged["task"].nunique() > 1 else ():
        tallies = []
        for budget, part in lines.groupby("budget"):
            counts, ratios = part["verdict"].value_counts(), part["ratio"].astype(float)
            floors, tied = part["noise_floor"].astype(float).fillna(0.0), part["verdict"] == "tie"
            alone = {
                "their intervals": tied & (ratios * (1 + floors.clip(lower=MIN_CLAIMED_GAIN)) < 1),
                "the noise floor": tied & ((part["low"] > 1) | (part["high"] < 1)),
            }
            ties = []
            for what, which in alone.items():
                if named := ", ".join(f"{row['task']} {row['ratio']:.2f}" for row in frame_rows(part[which])):
                    ties.append(f"ties by {what} alone: {named}")
            counted = ", ".join(f"{counts[verdict]} {verdict}" for verdict in FIXED_VERDICTS if verdict in counts)
            listed = f" ({'; '.join(ties)})" if ties else ""
            tallies.append(f"after {budget} evaluations {counted}, least {ratios.min():.2f}{listed}")
        yield f"{searcher}: {'; '.join(tallies)}."


def fixed_frame(results: Results) -> pd.DataFrame:
    """Return the confirmed speedup (`ratio`) of the choices over the best fixed row, by task, searcher and budget.

    Fixed rows are the experiment's baselines; rows transferred from other tasks came from a search. The best is the
    fastest confirmed one that obeys the bound on accuracy; if none does, `row` is "" and there is no ratio. `same` of
    the `seeds` chose the fixed row itself, and `unfit` of them a row beyond the bound or without a score. Tasks without
    a confirmed baseline have no row.

    Rows without a task are geometric means over the `tasks` of `Results.pooled` with a ratio, if there are several.
    """
    lines = [line for task in results.tasks for line in _fixed_rows(task, results.stored.baselines)]
    frame = pd.DataFrame(lines, columns=list(FIXED_COLUMNS))
    pooled = frame[frame["ratio"].notna() & frame["task"].isin([task.name for task in results.pooled])]
    for (searcher, budget), part in pooled.groupby(["searcher", "budget"], sort=False):
        if len(part) > 1:
            mean = mean_ratio_over_blocks(part["ratio"].astype(float).tolist())
            lines.append(
                {
                    **dict.fromkeys(FIXED_COLUMNS), "model": MEAN_LABEL, "tasks": len(part), "searcher": searcher,
                    "budget": budget, **_limits(mean), "seeds": int(part["seeds"].min()),
                    "same": int(part["same"].sum()), "unfit": int(part["unfit"].sum()),
                }
            )  # fmt: skip
    return pd.DataFrame(lines, columns=list(FIXED_COLUMNS))


def _fixed_rows(task: TaskResults, baselines: Sequence[str]) -> Iterator[dict[str, Any]]:
    fixed: dict[str, list[str]] = {}
    for pick in task.picks:
        if pick.kind == "baseline" and pick.method in baselines and pick.row in task.summaries:
            fixed.setdefault(pick.row, []).append(pick.method)
    turns = TurnMatrix(task.events).turns
    best = max(filter(task.obeys, fixed), key=lambda row: task.summaries[row].speedup.value, default="")
    for (searcher, budget), by_seed in confirmed_choices(task).items() if fixed else ():
        rows = list(by_seed.values())
        ratios = [ratio for row in rows if (ratio := paired_ratio(turns, row, best)) is not None]
        middle = ratio_over_seeds(ratios) if ratios else None
        verdict = MISSING_CELL if middle is None else speedup_verdict(middle, task.noise_floor or 0.0)
        yield {
            **dict.fromkeys(FIXED_COLUMNS), "task": task.name, "model": task.facts["model"], "tasks": 1,
            "searcher": searcher, "budget": budget, "fixed": ", ".join(fixed.get(best, [])), "row": best,
            "noise_floor": task.noise_floor, **_limits(middle),
            "verdict": SAME_PLACEMENT if ratios and set(rows) == {best} else verdict, "seeds": len(rows),
            "same": rows.count(best), "unfit": sum(not task.obeys(row) for row in rows),
        }  # fmt: skip


def _limits(interval: Interval | None) -> dict[str, float]:
    return {} if interval is None else {"ratio": interval.value, "low": interval.low, "high": interval.high}


def ablation_frame(results: Results) -> pd.DataFrame:
    """Return the ratio of the choices of variants over those of their reference, by budget.

    Variants are the searchers of one plug-in with other parameters; the reference is the first without parameters, else
    the first. If the first searcher of the experiment has variants and all others have a label of their own, searchers
    that are the only ones of their plug-in are variants of it too. Ratios are paired by seed, see `paired_ratio`.

    Rows without a task are geometric means over `tasks`: from `MIN_BLOCKS_FOR_WILCOXON` tasks with Student's interval
    over tasks; below, with limits of these tasks alone, and with rows of the tasks.

    Returns:
        Columns reference, variant, params, budget, task, tasks, seeds (the fewest of a task), ratio, low, high, chance.
    """
    stored, turns = results.stored, {task.name: TurnMatrix(task.events).turns for task in results.pooled}
    budgets = sorted({budget for task in results.pooled for _, budget in confirmed_choices(task)})
    lines = []
    for reference, variant in _reference_variant_pairs(stored):
        use, params = stored.uses[variant]
        other = {} if use == stored.uses[reference][0] else {"use": use}
        facts = {"reference": reference, "variant": variant}
        facts["params"] = ", ".join(f"{key}={value}" for key, value in {**other, **params}.items())
        for budget in budgets:
            rows = []
            for task in results.pooled:
                if row := _ablation_row(task, turns[task.name], reference, variant, budget):
                    rows.append({**facts, "budget": budget, **row})
            many = len(rows) >= MIN_BLOCKS_FOR_WILCOXON
            if len(rows) > 1:
                parts = [Interval(value=row["ratio"], low=row["low"], high=row["high"]) for row in rows]
                mean = block_ci([[part.value] for part in parts]) if many else geometric_mean(parts)
                chance, seeds = float(np.mean([row["chance"] for row in rows])), min(row["seeds"] for row in rows)
                figures = {"task": None, "tasks": len(rows), "seeds": seeds, **_limits(mean), "chance": chance}
                lines.append({**facts, "budget": budget, **figures})
            lines += [] if many else rows
    return pd.DataFrame(lines, columns=list(ABLATION_COLUMNS))


def _reference_variant_pairs(stored: StoredExperiment) -> Iterator[tuple[str, str]]:
    groups: dict[str, list[str]] = {}
    for name in stored.searchers:
        groups.setdefault(stored.uses[name][0], []).append(name)
    for names in groups.values():
        reference = next((name for name in names if not stored.uses[name][1]), names[0])
        first, *others = stored.searchers
        use, params = stored.uses[first]
        labelled = all(name != stored.uses[name][0] for name in others)
        variants = list(names)
        if reference == first and not params and labelled and len(groups[use]) > 1:
            variants += [alone[0] for alone in groups.values() if len(alone) == 1]
        yield from ((reference, variant) for variant in variants if variant != reference)


def _ablation_row(
    task: TaskResults, turns: Mapping[str, Turns], reference: str, variant: str, budget: int
) -> dict[str, Any]:
    """Return the ratio of a task; {} without a seed that has both choices."""
    choices = confirmed_choices(task)
    own, other = (choices.get((name, budget), {}) for name in (variant, reference))
    pairs = [(row, other[seed]) for seed, row in own.items() if seed in other]
    ratios = [ratio for pair in pairs if (ratio := paired_ratio(turns, *pair)) is not None]
    if not ratios:
        return {}
    speedups = speedups_at(task, budget)
    chance = effect_size(speedups[variant], speedups[reference])
    return {"task": task.name, "tasks": 1, "seeds": len(ratios), **_limits(ratio_over_seeds(ratios)), "chance": chance}
