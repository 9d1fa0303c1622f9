"""Comparison of the searchers of submissions: regret, score, ranks, targets and pairs, over blocks of tasks."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from harness.base.errors import UserError
from harness.base.text import pluralize
from harness.replay.bench.submission import SearcherRecord, read_submission, table_landscape
from harness.replay.bench.tasks import TierName, describe_block, read_catalogue
from harness.replay.budget_tables import mean_interval
from harness.replay.path_cache import PathCache
from harness.replay.recorded_landscape import Floats
from harness.replay.replay import initial_placements, read_paths
from harness.replay.simulated_selection import random_search
from harness.report.report_table import ReportTable, format_interval
from harness.report.statistics import FriedmanRanks, compare_with, compute_ranks, score_against_random, smallest_p_value

CONTROL = "auto"
#: Searchers that `CONTROL` is tested against at `PLANNED_BUDGET` on the test tasks, chosen before they were compared.
PLANNED = ("tpe", "smac", "random_mutation")
PLANNED_BUDGET = 25
#: Targets of a task: relative latencies above the optimum.
TARGETS = np.geomspace(0.005, 0.5, 41)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSearches:
    """Searches of all searchers on a task.

    Attributes:
        block: Block of the task in statistics.
        split: Split of the task.
        optimum_ms: Lowest recorded latency.
        random_ms: Mean latency of random searches after each evaluation.
        initial_count: Number of evaluations that the initial placements take.
        latency_ms: Recorded latency of the choice by searcher, of shape (seeds, evaluations).
    """

    block: str
    split: str
    optimum_ms: float
    random_ms: Floats
    initial_count: int
    latency_ms: Mapping[str, Floats]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaderboard:
    """Comparison of the searchers of all submissions over the tasks of a tier, those of the lowest mean rank first.

    Attributes:
        tables: Searchers, pairs with `CONTROL`, those on the test tasks, searchers by split.
        ranks: Ranks by budget.
        regret: Mean regret in % over blocks after each evaluation, by searcher.
        targets: Share of the targets that were reached after each evaluation, by searcher.
    """

    tables: tuple[ReportTable, ...]
    ranks: Mapping[int, FriedmanRanks]
    regret: Mapping[str, Floats]
    targets: Mapping[str, Floats]


Results = tuple[dict[str, SearcherRecord], dict[str, TaskSearches]]


def read_results(folders: Sequence[Path], tier: TierName) -> Results:
    """Return the records of all searchers of the submissions in `folders`, and their searches by task.

    Raises:
        UserError: A submission is damaged or lacks a task or evaluations of the tier, or two submissions have a
            searcher of the same name.
    """
    catalogue = read_catalogue()
    budget, tasks = max(catalogue.tiers[tier].budgets), catalogue.tasks_of_tier(tier)
    records: dict[str, SearcherRecord] = {}
    latency_ms: dict[str, dict[str, Floats]] = {task: {} for task in tasks}
    for folder in folders:
        submission, cache = read_submission(folder), PathCache(folder)
        for name, record in submission.searchers.items():
            if name in records:
                raise UserError(f"{folder}: a searcher called {name!r} is in another submission too; give it a label")
            if record.budget < budget or not record.tasks.keys() >= tasks.keys():
                raise UserError(f"{folder}: {name} lacks tasks or evaluations of the tier {tier}")
            records[name] = record.model_copy(update={"tasks": {task: record.tasks[task] for task in tasks}})
            for task in tasks:
                paths, seeds = cache.paths_by_seed(record.key(name, task)), range(record.tasks[task].seeds)
                if not paths.keys() >= set(seeds):
                    raise UserError(f"{folder}: {name} lacks searches on {task}")
                walks = {seed: paths[seed].indices[:budget] for seed in seeds}
                try:
                    searches = read_paths(table_landscape(task), walks, budget)
                except ValueError as error:
                    raise UserError(f"{folder}: {name} on {task}: {error}") from error
                latency_ms[task][name] = searches.latency_ms(table_landscape(task))
    return records, {task: _task_results(task, budget, latency_ms[task]) for task in tasks}


def _task_results(task: str, budget: int, latency_ms: Mapping[str, Floats]) -> TaskSearches:
    landscape, settings = table_landscape(task), read_catalogue().tasks[task]
    first = initial_placements(landscape, settings.initial)
    return TaskSearches(
        block=describe_block(landscape.table.metadata),
        split=settings.split,
        optimum_ms=float(landscape.latency_ms[landscape.optimum]),
        random_ms=random_search(landscape, budget, first).mean(axis=0),
        initial_count=len({int(landscape.identity[landscape.index(placement)]) for placement in first}),
        latency_ms=latency_ms,
    )


def compare_searchers(results: Results, tier: TierName) -> Leaderboard:
    """Return the comparison of all searchers, those of the lowest mean rank first."""
    records, tasks = results
    budgets, listed = read_catalogue().tiers[tier].budgets, list(tasks.values())
    speeds = {name: _task_speeds(listed, name) for name in records}
    ranks = {}
    for budget in budgets:
        means = {name: {b: v[:, budget - 1].mean() for b, v in blocks.items()} for name, blocks in speeds.items()}
        ranks[budget] = compute_ranks(pd.DataFrame(means), unit="block")
    order = sorted(records, key=lambda name: float(np.mean([at_budget.mean[name] for at_budget in ranks.values()])))
    tables = [_searchers_table(order, records, listed, ranks)]
    if CONTROL in records and len(records) > 1:
        others, tests = [name for name in order if name != CONTROL], [task for task in listed if task.split == "test"]
        tables.append(_pairs_table(others, speeds, budgets))
        tables.append(_planned_table(others, {name: _task_speeds(tests, name) for name in order}, budgets))
    tables.append(_splits_table(order, listed, budgets))
    return Leaderboard(
        tables=tuple(tables),
        ranks=ranks,
        regret={name: _regret_percent(listed, name).mean(axis=0) for name in order},
        targets={name: _reached_targets(listed, name) for name in order},
    )


def _task_speeds(tasks: Sequence[TaskSearches], searcher: str) -> dict[str, Floats]:
    """Return the share of the optimum's speed by block, [task, evaluation]: means over the seeds of a task."""
    found: dict[str, list[Floats]] = {}
    for task in tasks:
        found.setdefault(task.block, []).append((task.optimum_ms / task.latency_ms[searcher]).mean(axis=0))
    return {block: np.array(parts) for block, parts in found.items()}


def _over_blocks(tasks: Sequence[TaskSearches], figures: Sequence[Floats]) -> Floats:
    """Return the means of the figures of tasks over the tasks of each block, [block, ...]."""
    blocks = [task.block for task in tasks]
    means = [np.mean([f for b, f in zip(blocks, figures, strict=True) if b == block], axis=0) for block in set(blocks)]
    return np.array(means)


def _regret_percent(tasks: Sequence[TaskSearches], searcher: str) -> Floats:
    """Return the latency of the choice above the optimum in %, mean over seeds, [block, evaluation]."""
    return _over_blocks(tasks, [100 * (task.latency_ms[searcher].mean(axis=0) / task.optimum_ms - 1) for task in tasks])


def _score(tasks: Sequence[TaskSearches], searcher: str) -> str:
    """Return the score against random search with Student's interval over blocks."""
    each = [
        score_against_random(task.latency_ms[searcher], task.random_ms, task.optimum_ms, task.initial_count).mean()
        for task in tasks
    ]
    return format_interval(*mean_interval(_over_blocks(tasks, each)))


def _reached_targets(tasks: Sequence[TaskSearches], searcher: str) -> Floats:
    """Return the share of all targets of all tasks that a search has reached after each evaluation."""
    shares = []
    for task in tasks:
        best = np.minimum.accumulate(task.latency_ms[searcher], axis=1) / task.optimum_ms - 1
        shares.append((best[:, :, None] <= TARGETS).mean(axis=(0, 2)))
    reached: Floats = _over_blocks(tasks, shares).mean(axis=0)
    return reached


def _describe_seeds(tasks: Sequence[TaskSearches], searcher: str) -> str:
    counts = sorted({len(task.latency_ms[searcher]) for task in tasks})
    return f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])


def _searchers_table(
    order: Sequence[str],
    records: Mapping[str, SearcherRecord],
    tasks: Sequence[TaskSearches],
    ranks: Mapping[int, FriedmanRanks],
) -> ReportTable:
    rows = []
    for name in order:
        record, regret = records[name], _regret_percent(tasks, name)
        row = {"searcher": name, "seeds": _describe_seeds(tasks, name), "score": _score(tasks, name)}
        row |= {f"{budget} evaluations": f"{regret[:, budget - 1].mean():.2f}" for budget in ranks}
        row["mean ranks"] = " / ".join(f"{at_budget.mean[name]:.1f}" for at_budget in ranks.values())
        row["searcher's seconds"] = f"{np.mean([each.searcher_s for each in record.tasks.values()]):.2f}"
        rows.append(row)
    last = next(iter(ranks.values()))
    difference = "none" if last.critical_difference is None else f"{last.critical_difference:.2f}"
    tests = ", ".join(
        f"{at_budget.p_value:.2g} at {n}" for n, at_budget in ranks.items() if at_budget.p_value is not None
    )
    blocks = f"{pluralize(len(tasks), 'task')} in {pluralize(last.blocks, 'block')} (model and runtime)"
    note = (
        f"{blocks}. Score: the share of the improvement left by random search of as many evaluations, on average over "
        "evaluations; 0 is random search, 1 the optimum at once; with its 95 % interval over blocks. Evaluations: "
        "latency of the choice above the optimum in %, mean over seeds and blocks. Mean ranks at "
        f"{', '.join(map(str, ranks))} evaluations; a difference below {difference} is none (Nemenyi, 5 %); Friedman's "
        f"p: {tests or 'none'}. Seconds: processor time of the searcher in one search of the largest budget, without "
        "builds and measurements."
    )
    return _table("searchers", "Searchers", rows, note)


def _compare(
    speeds: Mapping[str, Mapping[str, Floats]], names: Sequence[str], budget: int
) -> list[dict[Hashable, Any]]:
    """Return a line of `compare_with` for each searcher that is compared with `CONTROL`."""
    speeds_at_budget = {
        name: {b: v[:, budget - 1].tolist() for b, v in speeds[name].items()} for name in (CONTROL, *names)
    }
    return compare_with(CONTROL, speeds_at_budget).to_dict("records")


def _pairs_table(
    others: Sequence[str], speeds: Mapping[str, Mapping[str, Floats]], budgets: Sequence[int]
) -> ReportTable:
    rows = {name: {"searcher": name} for name in others}
    ahead: list[str] = []
    bold: frozenset[tuple[int, str]] = frozenset()
    for budget in budgets:
        for line in _compare(speeds, others, budget):
            rows[line["second"]][f"{budget} evaluations"] = f"{line['ratio']:.3f} (p {line['p_holm']:.2f})"
            if line["p_holm"] < 0.05:
                bold |= {(others.index(line["second"]), f"{budget} evaluations")}
            if line["ratio"] < 1:
                ahead.append(f"{line['second']} at {budget} ({line['ratio']:.3f}, p {line['p_holm']:.2f})")
    blocks = len(speeds[CONTROL])
    count = f"{pluralize(blocks, 'block')} and {pluralize(len(others), 'comparison')}"
    note = (
        f"Speed of {CONTROL} over that of each other searcher, above 1 if {CONTROL} is faster: geometric mean over "
        "blocks. p: Wilcoxon's signed-rank test over blocks with Holm's correction for all searchers of a budget; "
        f"bold below 0.05; the smallest that {count} can give is {smallest_p_value(blocks, len(others)):.2g}. "
        f"Faster than {CONTROL} in the mean: {', '.join(ahead) or 'none'}."
    )
    return replace(_table("pairs", f"{CONTROL} and each other searcher", list(rows.values()), note), bold=bold)


def _planned_table(
    others: Sequence[str], speeds: Mapping[str, Mapping[str, Floats]], budgets: Sequence[int]
) -> ReportTable:
    """Return the planned comparisons on the test tasks, and those with the best other searcher at each budget."""
    planned = [name for name in PLANNED if name in others] if PLANNED_BUDGET in budgets else []
    lines = [(PLANNED_BUDGET, "planned", line) for line in _compare(speeds, planned, PLANNED_BUDGET)] if planned else []
    for budget in budgets:
        lines.append((budget, "best other", min(_compare(speeds, others, budget), key=lambda line: line["ratio"])))
    rows = [
        {
            "evaluations": str(budget),
            "searcher": f"{line['second']} ({kind})",
            "ratio": format_interval(line["ratio"], line["low"], line["high"], digits=3),
            "p": f"{line['p_value']:.3f}",
            "p, Holm": f"{line['p_holm']:.3f}",
        }
        for budget, kind, line in lines
    ]
    note = (
        f"Speed of {CONTROL} over that of the searcher on the test tasks: geometric mean over "
        f"{pluralize(len(speeds[CONTROL]), 'block')} with Student's 95 % interval; p: Wilcoxon's signed-rank test over "
        "blocks. Planned: chosen before any search of the tier extended was compared, with Holm's correction for the "
        f"{len(planned)} planned ones alone. Best other: the fastest of {pluralize(len(others), 'searcher')} in the "
        "mean, with Holm's correction for all of them."
    )
    return _table("planned", f"{CONTROL} on the test tasks", rows, note)


def _splits_table(order: Sequence[str], tasks: Sequence[TaskSearches], budgets: Sequence[int]) -> ReportTable:
    rows = [{"searcher": name} for name in order]
    for split in sorted({task.split for task in tasks}):
        some = [task for task in tasks if task.split == split]
        for row in rows:
            regret = _regret_percent(some, row["searcher"]).mean(axis=0)
            row[f"{split}, {pluralize(len(some), 'task')}"] = " / ".join(f"{regret[n - 1]:.2f}" for n in budgets)
    counts = ", ".join(map(str, budgets))
    note = f"Latency of the choice above the optimum in % at {counts} evaluations, mean over seeds and blocks."
    return _table("splits", "Development and test tasks", rows, note)


def _table(name: str, title: str, rows: list[dict[str, str]], note: str) -> ReportTable:
    cells = pd.DataFrame(rows)
    return ReportTable(name=name, title=title, cells=cells, raw=cells, note=note)
