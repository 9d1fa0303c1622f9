"""Budget ablation: worth of each searcher at each budget, over many seeds and replayed tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from harness.benchmark_table import read_table
from harness.errors import UserError
from harness.progress import Observer
from harness.report.report_table import ReportTable, pluralize, write_table
from harness.report.statistics import FriedmanRanks, compute_ranks
from harness.results_dir.io import explain_write_errors
from harness.results_dir.ownership import exclusive_lock
from harness.studies.budget_tables import SearchCurves, TableResult, budget_tables, describe_seed_counts
from harness.studies.path_cache import FILE, MAX_EVALUATIONS, PathCache, SearchKey
from harness.studies.random_search import random_search
from harness.studies.recorded_landscape import NEAR_OPTIMUM_SHARE, Landscape
from harness.studies.replay import initial_placements, optimum_in_initial_design
from harness.studies.replay_pool import ReplayBatch, missing_batches, replay_batches, search_curves, search_key
from harness.studies.study_file import BudgetStudy, all_searchers

__all__ = ["study_budgets"]


def study_budgets(study: BudgetStudy, out: Path, observer: Observer, *, workers: int = 1) -> tuple[ReportTable, ...]:
    """Replay searchers on recorded tables and write what comes of it; goes on where it was interrupted.

    Tables whose optimum every search is told first are left out, for they tell no searcher from another.

    Args:
        out: Takes the tables (means, found, budget, reach, score, pairs, ranks), critical-difference plots and walks.
        workers: Processes that replay at once.

    Raises:
        UserError: Two tables or two searchers of one name, an unknown searcher or initial placement, a table that
            cannot be read, no table that tells searchers apart, or the folder cannot be written, is at work for another
            process or holds the tables.
    """
    contenders = study.searchers or all_searchers()
    if min(study.budgets) <= len(study.initial):
        first = pluralize(len(study.initial), "initial placement")
        raise UserError(f"budgets are above the {first}, but got {study.budgets}")
    _refuse_duplicates("tables", [Path(table).stem for table in study.tables])
    _refuse_duplicates("searchers", [contender.name for contender in contenders])
    landscapes = {Path(table): Landscape(read_table(Path(table))) for table in study.tables}
    told = {table: optimum_in_initial_design(landscape, study.initial) for table, landscape in landscapes.items()}
    left_out = _describe_excluded_tables(told)
    telling = {table: landscape for table, landscape in landscapes.items() if not told[table]}
    named = {contender.name: contender for contender in contenders}
    series = {(t, name): search_key(t, contender, study) for t in telling for name, contender in named.items()}
    if any(Path(table).parent.resolve() == out.resolve() for table in study.tables):
        raise UserError(f"{out}: the tables lie there, and {FILE} would be taken for one; use another --out")
    most = study.max_evaluations * sum((named[name].seeds or study.seeds) for _, name in series)
    if most > MAX_EVALUATIONS:
        raise UserError(f"{most} evaluations are more than one folder keeps; ask for fewer seeds or tables at a time")
    with exclusive_lock(out, "replaying a study"), explain_write_errors(out):
        kept = PathCache(out)
        missing = [
            chunk
            for (t, name), each in series.items()
            for chunk in missing_batches(kept, each, t, landscapes[t], named[name], study)
        ]
        if again := _describe_outdated_paths(kept, series.values(), missing):
            observer.say(f"Replayed again, for what is kept is of other code, tables or libraries, or no walk: {again}")
        replay_batches(missing, workers, observer)
        kept.compact(frozenset(series.values()))
        blocks = []
        for path, landscape in telling.items():
            curves = {c.name: search_curves(kept, series[path, c.name], landscape, c, study) for c in contenders}
            blocks.append(_table_result(landscape, curves, study))
        ranks = {
            budget: compute_ranks(_relative_speed_matrix(blocks, budget), unit="table") for budget in study.budgets
        }
        tables = budget_tables(
            blocks, study, ranks, (*left_out, *_describe_exhausted_searchers(blocks, study.max_evaluations))
        )
        for table in tables:
            write_table(table, out)
        _draw_rank_plots(ranks, blocks, study, out)
    return tables


def _describe_outdated_paths(kept: PathCache, series: Collection[SearchKey], missing: Iterable[ReplayBatch]) -> str:
    """Searchers of which something was kept that will not do."""
    stale = {each.question for each in kept.outdated_keys(frozenset(series))}

    def refused(chunk: ReplayBatch) -> bool:
        there = kept.paths_by_seed(chunk.series)
        known = (there[seed] for seed in chunk.seeds if seed in there)
        return chunk.series.question in stale or any(walk.budget >= chunk.budget for walk in known)

    return ", ".join(dict.fromkeys(chunk.series.searcher for chunk in missing if refused(chunk)))


def _describe_excluded_tables(told: Mapping[Path, str]) -> tuple[str, ...]:
    """What to say of the tables whose optimum every search is told.

    Args:
        told: By table, the initial placement that is its optimum, or "".

    Raises:
        UserError: No other table is there.
    """
    names = ", ".join(f"{table.stem} ({name!r})" for table, name in told.items() if name)
    if not names:
        return ()
    said = (
        f"told first, and within {100 * NEAR_OPTIMUM_SHARE:.0f} % of the optimum, so that no searcher can be told from "
        f"another: {names}; a cold start has something to find there (initial: none, or --cold)"
    )
    if all(told.values()):
        raise UserError(f"no table is left: {said}")
    return (f"Left out: {said}.",)


def _describe_exhausted_searchers(blocks: Sequence[TableResult], budget: int) -> tuple[str, ...]:
    """What to say of the searchers that had nothing more to propose before the budget was spent."""
    said = []
    for name in blocks[0].curves:
        evaluations = np.concatenate([block.curves[name].evaluations for block in blocks])
        early = evaluations[evaluations < budget]
        if len(early):
            middle = f"in the median after {np.median(early):.0f}"
            said.append(f"{name} ({len(early)} of {len(evaluations)} searches, {middle})")
    if not said:
        return ()
    return (
        f"Nothing more to propose before {budget} evaluations had: {', '.join(said)}. Their last choice counts on.",
    )


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
        told=len({int(landscape.identity[landscape.index(placement)]) for placement in first}),
    )


def _relative_speed_matrix(blocks: Sequence[TableResult], budget: int) -> pd.DataFrame:
    """Optimum over the latency that was reached by then: one row a table, one column a searcher."""
    reached = [
        {name: float(np.mean(b.optimum_ms / c.latency_ms[:, budget - 1])) for name, c in b.curves.items()}
        for b in blocks
    ]
    return pd.DataFrame(reached, index=[block.name for block in blocks])


def _draw_rank_plots(
    ranks: Mapping[int, FriedmanRanks], blocks: Sequence[TableResult], study: BudgetStudy, out: Path
) -> None:
    """A picture of the ranks at each budget."""
    from harness.report.plots.study_plots import draw_critical_difference  # matplotlib takes a second

    for budget, found in ranks.items():
        if len(found.mean) > 1:
            over = f"{pluralize(found.blocks, 'table')}, {describe_seed_counts(blocks, study)}"
            draw_critical_difference(found, f"Mean rank after {budget} evaluations, {over}", out / f"ranks-{budget}")
