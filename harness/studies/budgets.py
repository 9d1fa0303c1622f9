"""What each searcher is worth at each budget, over many seeds and tables: all of it replayed, none of it measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from harness.errors import UserError
from harness.report.statistics import Ranks, ranks_of
from harness.report.tables import Table, several, write_table
from harness.run.journal import writing
from harness.run.observe import Observer
from harness.studies.budget_tables import Block, Curves, budget_tables, telling
from harness.studies.landscape import Landscape
from harness.studies.random_search import random_search
from harness.studies.replay import first_placements, idle
from harness.studies.replaying import chunks_of, curves_of, replay_all
from harness.studies.study_file import BudgetStudy, everybody
from harness.tables import read_table

__all__ = ["Budgets", "study_budgets"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Tables to show, and how the searchers rank over all recorded tables."""

    tables: tuple[Table, ...]
    ranks: Ranks


def study_budgets(study: BudgetStudy, out: Path, observer: Observer, *, workers: int = 1) -> Budgets:
    """Replay searchers on recorded tables and write what comes of it; goes on where it was interrupted.

    Args:
        out: Takes the tables (budget, reach, score, pairs, ranks), a critical-difference plot and all curves.
        workers: Processes that replay at once.

    Raises:
        UserError: Two tables or two searchers of one name, an unknown searcher or initial placement, a table that
            cannot be read, or the folder cannot be written.
    """
    contenders = study.searchers or everybody()
    if min(study.budgets) <= len(study.initial):
        told = several(len(study.initial), "initial placement")
        raise UserError(f"budgets are above the {told}, but got {study.budgets}")
    _refuse_twins("tables", [Path(table).stem for table in study.tables])
    _refuse_twins("searchers", [contender.name for contender in contenders])
    landscapes = {Path(table): Landscape(read_table(Path(table))) for table in study.tables}
    for landscape in landscapes.values():
        first_placements(landscape, study.initial)  # refused before an hour is spent
    with writing(out):
        chunks = {
            (table, contender.name): chunks_of(table, contender, study, out / "curves")
            for table in landscapes
            for contender in contenders
        }
        replay_all([chunk for some in chunks.values() for chunk in some], workers, observer)
        blocks = [
            _block(landscape, {c.name: curves_of(chunks[table, c.name]) for c in contenders}, study)
            for table, landscape in landscapes.items()
        ]
        ranks = ranks_of(_final(telling(blocks)), unit="table")
        tables = budget_tables(blocks, study, ranks)
        for table in tables:
            write_table(table, out)
        _draw(ranks, study, out)
    return Budgets(tables=tables, ranks=ranks)


def _refuse_twins(what: str, names: Sequence[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise UserError(f"two {what} have one name: {', '.join(twice)}; rename a table's file, give a searcher a label")


def _block(landscape: Landscape, curves: dict[str, Curves], study: BudgetStudy) -> Block:
    first = first_placements(landscape, study.initial)
    return Block(
        name=landscape.table.path.stem,
        optimum_ms=float(landscape.latency_ms[landscape.optimum]),
        float_ms=landscape.anchors_ms.get("float", float(landscape.latency_ms.max())),
        random_ms=random_search(landscape, study.most, first),
        curves=curves,
        told=len({int(landscape.identity[landscape.index(placement)]) for placement in first}),
        idle=idle(landscape, study.initial, "initial: none, or --cold"),
    )


def _final(blocks: Sequence[Block]) -> pd.DataFrame:
    """Optimum over the latency that was reached in the end: one row a table, one column a searcher."""
    reached = [
        {name: float(np.mean(b.optimum_ms / c.latency_ms[:, -1])) for name, c in b.curves.items()} for b in blocks
    ]
    return pd.DataFrame(reached, index=[block.name for block in blocks])


def _draw(ranks: Ranks, study: BudgetStudy, out: Path) -> None:
    if len(ranks.mean) < 2:
        return
    from harness.report.plots_study import critical_difference  # matplotlib takes a second

    title = (
        f"Mean rank after {study.most} evaluations, {several(ranks.blocks, 'table')}, {several(study.seeds, 'seed')}"
    )
    critical_difference(ranks, title, out / "ranks")
