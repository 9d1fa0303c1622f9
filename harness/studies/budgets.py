"""What each searcher is worth at each budget, over many seeds and tables: all of it replayed, none of it measured."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd

from harness.errors import UserError
from harness.registry import plugins
from harness.report.statistics import Ranks, ranks_of
from harness.report.tables import Table, write_table
from harness.run.config import Use
from harness.run.journal import writing
from harness.run.observe import Observer
from harness.studies.budget_tables import Block, BudgetOrder, Curves, budget_tables
from harness.studies.landscape import Landscape, random_curve
from harness.studies.replay import Replayed, replay
from harness.tables import Table as Recorded

__all__ = ["BudgetOrder", "BudgetStudy", "study_budgets"]

EVERYTHING = "exhaustive"
"""It walks the table from one end to the other, and says nothing about searching."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetStudy:
    """Tables to show, and how the searchers rank over all recorded tables."""

    tables: tuple[Table, ...]
    ranks: Ranks


def study_budgets(
    recorded: Sequence[Recorded], searchers: Sequence[str], order: BudgetOrder, out: Path, observer: Observer
) -> BudgetStudy:
    """Replay searchers on recorded tables and write what comes of it; goes on where it was interrupted.

    Args:
        searchers: Names; none: all that are installed but `exhaustive`.
        out: Takes the tables (budget, reach, score, pairs, ranks), a critical-difference plot and all curves.

    Raises:
        UserError: Two tables of one name, an unknown searcher, or the folder cannot be written.
    """
    if min(order.budgets) <= len(order.initial) or order.seeds < 1:
        raise UserError(
            f"budgets are above the {len(order.initial)} initial placements, and there is a seed at least, but got "
            f"budgets {order.budgets} and {order.seeds} seeds"
        )
    if len({table.path.stem for table in recorded}) < len(recorded):
        raise UserError("two tables have one name; the name of a table's file stands for it")
    names = list(searchers) or [p.name for p in plugins("searcher") if p.name != EVERYTHING]
    with writing(out):
        blocks = [_block(table, names, order, out / "curves", observer) for table in recorded]
        ranks = ranks_of(_final(blocks, names))
        tables = budget_tables(blocks, order, ranks)
        for table in tables:
            write_table(table, out)
        _draw(ranks, order, out)
    return BudgetStudy(tables=tables, ranks=ranks)


def _block(table: Recorded, names: Sequence[str], order: BudgetOrder, folder: Path, observer: Observer) -> Block:
    landscape, most = Landscape(table), max(order.budgets)
    curves = {}
    with observer.work(f"replay {table.path.stem}", len(names)) as step:
        for name in names:
            curves[name] = _kept(landscape, name, order, folder)
            step.advance(name)
    return Block(
        name=table.path.stem,
        optimum_ms=float(landscape.latency_ms[landscape.optimum]),
        float_ms=landscape.anchors_ms.get("float", float(landscape.latency_ms.max())),
        random_ms=random_curve(landscape.distinct_ms, most).mean_ms,
        curves=curves,
    )


def _kept(landscape: Landscape, name: str, order: BudgetOrder, folder: Path) -> Curves:
    """The searches of one searcher, replayed unless the same code has done so on the same table before."""
    path = folder / f"{landscape.table.path.stem}-{name.replace(':', '-')}-{_key(landscape, order)}.csv"
    if not path.exists():
        seeds, most = range(order.seeds), max(order.budgets)
        found = replay(landscape, Use(use=name), seeds=seeds, budget=most, initial=order.initial)
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        _frame(found).to_csv(part, index=False)
        part.replace(path)
    frame = pd.read_csv(path)
    shape = (order.seeds, max(order.budgets))
    return Curves(
        latency_ms=frame["latency_ms"].to_numpy(dtype=float).reshape(shape),
        elapsed_s=frame["elapsed_s"].to_numpy(dtype=float).reshape(shape),
    )


def _frame(found: Replayed) -> pd.DataFrame:
    seeds, budget = found.latency_ms.shape
    return pd.DataFrame({
        "seed": np.repeat(found.seeds, budget),
        "evaluations": np.tile(np.arange(1, budget + 1), seeds),
        "latency_ms": found.latency_ms.ravel(),
        "elapsed_s": found.elapsed_s.ravel(),
    })  # fmt: skip


def _key(landscape: Landscape, order: BudgetOrder) -> str:
    """Changes with the table, with what is asked, and with the code of the searchers."""
    digest = hashlib.sha256(landscape.table.path.read_bytes())
    digest.update(json.dumps(asdict(order)).encode())
    spec = find_spec("search")
    for folder in spec.submodule_search_locations or () if spec else ():
        for file in sorted(Path(folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _final(blocks: Sequence[Block], names: Sequence[str]) -> pd.DataFrame:
    """Optimum over the latency that was reached in the end: one row a table, one column a searcher."""
    values = [[float(np.mean(b.optimum_ms / b.curves[name].latency_ms[:, -1])) for name in names] for b in blocks]
    return pd.DataFrame(values, index=[block.name for block in blocks], columns=list(names))


def _draw(ranks: Ranks, order: BudgetOrder, out: Path) -> None:
    if len(ranks.mean) < 2:
        return
    from harness.report.plots_study import critical_difference  # matplotlib takes a second

    title = f"Mean rank after {max(order.budgets)} evaluations, {ranks.blocks} tables, {order.seeds} seeds"
    critical_difference(ranks, title, out / "ranks")
