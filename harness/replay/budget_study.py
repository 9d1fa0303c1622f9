"""Budget ablation: comparison of searchers at each budget, over many seeds and replayed tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from harness.base.errors import UserError
from harness.base.files import explain_write_errors
from harness.base.progress import Observer
from harness.base.text import pluralize
from harness.replay.budget_tables import TableResult, budget_tables, describe_seed_counts, table_result
from harness.replay.path_cache import FILE, MAX_EVALUATIONS, replay_cached
from harness.replay.recorded_landscape import NEAR_OPTIMUM_SHARE
from harness.replay.replay import ReplayRequest, load_landscape, optimum_in_initial_design
from harness.replay.search_key import search_key
from harness.replay.simulated_selection import Searches
from harness.replay.study_file import BudgetStudy, all_searchers
from harness.report.report_table import ReportTable, write_table
from harness.report.statistics import FriedmanRanks, compute_ranks
from harness.results.ownership import exclusive_lock


def study_budgets(study: BudgetStudy, out: Path, observer: Observer, *, workers: int = 1) -> tuple[ReportTable, ...]:
    """Replay searchers on recorded tables and write the results; an interrupted study continues.

    Tables whose optimum is an initial placement are left out, because all searchers are equal on them.

    Args:
        out: Folder for the tables (means, found, budget, reach, score, pairs, ranks), plots of curves and critical
            differences, and the cache of searches.
        workers: Number of processes that replay at once.
    """
    budget, searchers = max(study.budgets), study.searchers or all_searchers()
    if min(study.budgets) <= len(study.initial):
        first = pluralize(len(study.initial), "initial placement")
        raise UserError(f"budgets must be above the {first}, but got {study.budgets}")
    files = [Path(table) for table in study.tables]
    for what, names in (("tables", [f.stem for f in files]), ("searchers", [s.name for s in searchers])):
        if twice := ", ".join(name for name, count in Counter(names).items() if count > 1):
            raise UserError(f"two {what} have one name: {twice}; rename a table's file, give a searcher a label")
    optimal_starts = {file: optimum_in_initial_design(load_landscape(file), study.initial) for file in files}
    left_out = _describe_excluded_tables(optimal_starts)
    requests = {
        search_key(file, searcher, study.initial): ReplayRequest(
            searcher=searcher,
            table=file,
            seeds=range(searcher.seeds or study.seeds),
            budget=budget,
            initial=study.initial,
        )
        for file in files
        if not optimal_starts[file]
        for searcher in searchers
    }
    if any(file.parent.resolve() == out.resolve() for file in files):
        raise UserError(f"{out}: the folder has the tables, and {FILE} would be read as one; use another --out")
    most = sum(budget * len(request.seeds) for request in requests.values())
    if most > MAX_EVALUATIONS:
        raise UserError(f"{most} evaluations are more than one folder takes; use fewer seeds or tables at a time")
    with exclusive_lock(out, "replaying a study"), explain_write_errors(out):
        searches: dict[Path, dict[str, Searches]] = {}
        for key, paths in replay_cached(out, requests, observer, workers=workers).items():
            file = requests[key].table
            found = Searches(load_landscape(file), paths, budget)
            searches.setdefault(file, {})[key.searcher] = found
        blocks = [table_result(load_landscape(file), each, budget, study.initial) for file, each in searches.items()]
        ranks = {n: compute_ranks(_relative_speeds(blocks, n), unit="table") for n in study.budgets}
        warnings = (*left_out, *_describe_exhausted_searchers(blocks, budget))
        tables = [replace(table, warnings=warnings) for table in budget_tables(blocks, study, ranks)]
        for table in tables:
            write_table(table, out)
        _draw_plots(ranks, blocks, study, out)
    return tuple(tables)


def _relative_speeds(blocks: Sequence[TableResult], budget: int) -> pd.DataFrame:
    """Return optimum over latency at a budget, mean over seeds: one row per table, one column per searcher."""
    return pd.DataFrame(
        {name: np.mean(b.optimum_ms / each.latency_ms[:, budget - 1]) for name, each in b.searches.items()}
        for b in blocks
    )


def _describe_excluded_tables(optimal_starts: Mapping[Path, str]) -> tuple[str, ...]:
    """Return a warning that names the tables whose optimum is an initial placement.

    Args:
        optimal_starts: Name of the initial placement that is the optimum of a table, or "", by table.

    Raises:
        UserError: All tables are excluded.
    """
    names = ", ".join(f"{table.stem} ({name!r})" for table, name in optimal_starts.items() if name)
    if not names:
        return ()
    reason = (
        f"an initial placement is within {100 * NEAR_OPTIMUM_SHARE:.0f} % of the optimum, so all searchers are equal: "
        f"{names}; start without initial placements there (initial: none, or --cold)"
    )
    if all(optimal_starts.values()):
        raise UserError(f"no table is left: {reason}")
    return (f"Left out: {reason}.",)


def _describe_exhausted_searchers(blocks: Sequence[TableResult], budget: int) -> tuple[str, ...]:
    """Return a warning that names the searchers that ended before the budget."""
    listed = []
    for name in blocks[0].searches:
        evaluations = np.concatenate([block.searches[name].evaluations for block in blocks])
        early = evaluations[evaluations < budget]
        if len(early):
            median = f"in the median after {np.median(early):.0f}"
            listed.append(f"{name} ({len(early)} of {len(evaluations)} searches, {median})")
    if not listed:
        return ()
    return (f"Nothing more to propose before {budget} evaluations: {', '.join(listed)}. Their last choice counts.",)


def _draw_plots(
    ranks: Mapping[int, FriedmanRanks], blocks: Sequence[TableResult], study: BudgetStudy, out: Path
) -> None:
    from harness.report.plots.study_plots import draw_critical_difference, draw_regret  # matplotlib takes a second

    curves = {
        name: np.mean([b.regret_percent(name).mean(axis=0) for b in blocks], axis=0) for name in blocks[0].searches
    }
    draw_regret(curves, f"Mean over {pluralize(len(blocks), 'table')}: {study.study}", out / "curves")
    for budget, ranks_at_budget in ranks.items():
        if len(ranks_at_budget.mean) > 1:
            over = f"{pluralize(ranks_at_budget.blocks, 'table')}, {describe_seed_counts(blocks, study)}"
            draw_critical_difference(
                ranks_at_budget, f"Mean rank after {budget} evaluations, {over}", out / f"ranks-{budget}"
            )
