"""Budget ablation: comparison of searchers at each budget, over many seeds and replayed tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from harness.base.errors import UserError
from harness.base.files import explain_write_errors
from harness.base.progress import Observer
from harness.base.text import pluralize
from harness.replay.budget_tables import SearchCurves, TableResult, budget_tables, describe_seed_counts
from harness.replay.path_cache import FILE, MAX_EVALUATIONS, PathCache
from harness.replay.recorded_landscape import NEAR_OPTIMUM_SHARE, Landscape
from harness.replay.replay import initial_placements, optimum_in_initial_design
from harness.replay.replay_pool import ReplayBatch, missing_batches, replay_batches, search_curves
from harness.replay.search_key import SearchKey, search_key
from harness.replay.simulated_selection import random_search
from harness.replay.study_file import BudgetStudy, all_searchers
from harness.report.report_table import ReportTable, write_table
from harness.report.statistics import FriedmanRanks, compute_ranks
from harness.results.ownership import exclusive_lock
from harness.runtimes.benchmark_table import read_table


def study_budgets(study: BudgetStudy, out: Path, observer: Observer, *, workers: int = 1) -> tuple[ReportTable, ...]:
    """Replay searchers on recorded tables and write the results; an interrupted study continues.

    Tables whose optimum is an initial placement are left out, because all searchers are equal on them.

    Args:
        out: Folder for the tables (means, found, budget, reach, score, pairs, ranks), plots of curves and critical
            differences, and the cache of searches.
        workers: Number of processes that replay at once.

    Raises:
        UserError: Two tables or two searchers share a name, a searcher or initial placement is unknown, a table cannot
            be read, no table is left, or the folder cannot be written, is in use, or contains the tables.
    """
    searchers = {searcher.name: searcher for searcher in study.searchers or all_searchers()}
    if min(study.budgets) <= len(study.initial):
        first = pluralize(len(study.initial), "initial placement")
        raise UserError(f"budgets must be above the {first}, but got {study.budgets}")
    _refuse_duplicates("tables", [Path(table).stem for table in study.tables])
    _refuse_duplicates("searchers", [searcher.name for searcher in study.searchers])
    landscapes = {Path(table): Landscape(read_table(Path(table))) for table in study.tables}
    optimal_starts = {
        table: optimum_in_initial_design(landscape, study.initial) for table, landscape in landscapes.items()
    }
    left_out = _describe_excluded_tables(optimal_starts)
    keys = {
        (table, name): search_key(table, searcher, study)
        for table in landscapes
        if not optimal_starts[table]
        for name, searcher in searchers.items()
    }
    if any(Path(table).parent.resolve() == out.resolve() for table in study.tables):
        raise UserError(f"{out}: the folder has the tables, and {FILE} would be read as one; use another --out")
    most = study.max_evaluations * sum((searchers[name].seeds or study.seeds) for _, name in keys)
    if most > MAX_EVALUATIONS:
        raise UserError(f"{most} evaluations are more than one folder takes; use fewer seeds or tables at a time")
    with exclusive_lock(out, "replaying a study"), explain_write_errors(out):
        cache = PathCache(out)
        missing = [
            batch
            for (table, name), key in keys.items()
            for batch in missing_batches(cache, key, table, landscapes[table], searchers[name], study)
        ]
        if again := _describe_outdated_paths(cache, keys.values(), missing):
            observer.say(
                f"Replayed again, because the cache is of other code, tables or libraries, or damaged: {again}"
            )
        replay_batches(missing, workers, observer)
        cache.compact(frozenset(keys.values()))
        blocks = [
            _table_result(
                landscape,
                {n: search_curves(cache, keys[path, n], landscape, c, study) for n, c in searchers.items()},
                study,
            )
            for path, landscape in landscapes.items()
            if not optimal_starts[path]
        ]
        ranks = {n: compute_ranks(_relative_speed_matrix(blocks, n), unit="table") for n in study.budgets}
        warnings = (*left_out, *_describe_exhausted_searchers(blocks, study.max_evaluations))
        tables = budget_tables(blocks, study, ranks, warnings)
        for table in tables:
            write_table(table, out)
        _draw_plots(ranks, blocks, study, out)
    return tables


def _describe_outdated_paths(cache: PathCache, keys: Collection[SearchKey], missing: Iterable[ReplayBatch]) -> str:
    """Return the names of searchers with cached searches that cannot be used, as text."""
    outdated = {key.question for key in cache.outdated_keys(frozenset(keys))}

    def is_refused(batch: ReplayBatch) -> bool:
        cached = cache.paths_by_seed(batch.key)
        return batch.key.question in outdated or any(
            cached[seed].budget >= batch.budget for seed in batch.seeds if seed in cached
        )

    return ", ".join(dict.fromkeys(batch.key.searcher for batch in missing if is_refused(batch)))


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
    for name in blocks[0].curves:
        evaluations = np.concatenate([block.curves[name].evaluations for block in blocks])
        early = evaluations[evaluations < budget]
        if len(early):
            median = f"in the median after {np.median(early):.0f}"
            listed.append(f"{name} ({len(early)} of {len(evaluations)} searches, {median})")
    if not listed:
        return ()
    return (f"Nothing more to propose before {budget} evaluations: {', '.join(listed)}. Their last choice counts.",)


def _refuse_duplicates(what: str, names: Sequence[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise UserError(f"two {what} have one name: {', '.join(twice)}; rename a table's file, give a searcher a label")


def _table_result(landscape: Landscape, curves: dict[str, SearchCurves], study: BudgetStudy) -> TableResult:
    first = initial_placements(landscape, study.initial)
    return TableResult(
        name=landscape.table.path.stem,
        optimum_ms=float(landscape.latency_ms[landscape.optimum]),
        float_ms=landscape.anchors_ms.get("float", float(landscape.latency_ms.max())),
        random_ms=random_search(landscape, study.max_evaluations, first),
        curves=curves,
        initial_count=len({int(landscape.identity[landscape.index(placement)]) for placement in first}),
    )


def _relative_speed_matrix(blocks: Sequence[TableResult], budget: int) -> pd.DataFrame:
    """Return optimum over latency at a budget: one row per table, one column per searcher."""
    speeds = [
        {name: float(np.mean(b.optimum_ms / c.latency_ms[:, budget - 1])) for name, c in b.curves.items()}
        for b in blocks
    ]
    return pd.DataFrame(speeds, index=[block.name for block in blocks])


def _draw_plots(
    ranks: Mapping[int, FriedmanRanks], blocks: Sequence[TableResult], study: BudgetStudy, out: Path
) -> None:
    from harness.report.plots.study_plots import draw_critical_difference, draw_regret  # matplotlib takes a second

    curves = {
        name: np.mean([100 * (b.curves[name].latency_ms.mean(axis=0) / b.optimum_ms - 1) for b in blocks], axis=0)
        for name in blocks[0].curves
    }
    draw_regret(curves, f"Mean over {pluralize(len(blocks), 'table')}: {study.study}", out / "curves")
    for budget, ranks_at_budget in ranks.items():
        if len(ranks_at_budget.mean) > 1:
            over = f"{pluralize(ranks_at_budget.blocks, 'table')}, {describe_seed_counts(blocks, study)}"
            draw_critical_difference(
                ranks_at_budget, f"Mean rank after {budget} evaluations, {over}", out / f"ranks-{budget}"
            )
