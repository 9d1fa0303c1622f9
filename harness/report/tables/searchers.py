"""Tables that compare searchers over tasks: score against random search, pairs with ranks, and hypervolume."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from harness.base.statistics import median_ci
from harness.base.text import pluralize
from harness.report.frames.confirmation import speedups_at
from harness.report.frames.curves import Curve, hypervolume_frame, iter_speedup_curves
from harness.report.report_table import ReportTable, format_interval, frame_rows
from harness.report.statistics import (
    FriedmanRanks,
    compare_pairs,
    compute_ranks,
    score_against_random,
    smallest_p_value,
)
from harness.report.table_spec import Row, TableSpec, interval_column, number_column, text_column
from harness.results.folder import Results, TaskResults

RANDOM_SEARCHER = "random"
SEARCH_LATENCY_NOTE = (
    "The latency of a placement is the median over all searches of the task that measured it, so it is the same for "
    "each of them."
)
SCORE = TableSpec(
    name="score",
    title="Score against random search",
    columns=(
        text_column("task"),
        text_column("searcher"),
        interval_column("score [CI]", "score", "low", "high"),
        number_column("seeds"),
    ),
    caption=(
        "Share of the improvement that random search leaves that a searcher has found, averaged over its evaluations "
        "after the initial placements until random search has found 95 % of what these leave: 0 is random search, 1 "
        "the best placement at once. Tasks where they leave less than 1 % are left out, as are searchers with other "
        "initial placements, such as external ones. Random search is the mean over its seeds; median over seeds [95 % "
        f"interval; the range below six seeds]. {SEARCH_LATENCY_NOTE}"
    ),
)
PAIRS = TableSpec(
    name="pairs",
    title="Searchers in pairs",
    columns=(
        text_column("first"),
        text_column("second"),
        number_column("tasks", "blocks"),
        interval_column("ratio [CI]", "ratio", "low", "high", 3),
        number_column("chance", form="{:.0%}"),
        number_column("p (Holm)", "p_holm", "{:.3f}"),
    ),
    caption=(
        "Confirmed speedup at the largest budget, first over second, medians over seeds: geometric mean over tasks [95 "
        "%, Student's t over tasks; none below three]. Chance: probability that a seed of the first is better than one "
        "of the second, ties count half, mean over tasks; 50 % is no effect. p (Holm): Wilcoxon's signed-rank test "
        "over tasks, corrected for all pairs."
    ),
    timed=True,
    assumes_budget=True,
    source="choices",
)


def _format_volume(rows: Sequence[Row]) -> str:
    middle = median_ci([row["volume"] for row in rows])
    return format_interval(middle.value, middle.low, middle.high, 3)


VOLUME = TableSpec(
    name="volume",
    title="Front of latency and accuracy",
    columns=(text_column("task"), text_column("searcher")),
    caption=(
        "Hypervolume of latency and accuracy at the end of the search, as a share of the box between the ideal (no "
        "time, no loss) and the float model's latency with the largest loss of any search of the task: median over "
        "seeds [95 % interval; the range below six seeds]. Scored: evaluations with a measured metric, all seeds. "
        f"{SEARCH_LATENCY_NOTE}"
    ),
    group_by=("task", "searcher"),
    last=(
        ("hypervolume [CI]", _format_volume),
        ("scored", lambda rows: str(sum(row["scored"] for row in rows))),
        ("seeds", lambda rows: str(len(rows))),
    ),
)


def volume_table(results: Results) -> ReportTable:
    """Return the table of hypervolumes at the end of the searches."""
    volumes = hypervolume_frame(results.tasks)
    last = volumes.groupby(["task", "searcher", "seed"], sort=False, as_index=False).last()
    return VOLUME.build(volumes, rows=frame_rows(last))


def score_frame(results: Results) -> pd.DataFrame:
    """Return the score of each searcher against random search by task; see `score_against_random`.

    Random search is the mean over the seeds of the searcher `random` of the task; latencies are those of `curve_frame`,
    and the best is the lowest of any search of the task. There is no row for tasks without random search, for tasks
    that minimise something else than latency, and for searchers with other initial placements than random search. On
    recorded tables `qdq bench study` compares with ten thousand random searches instead.

    Returns:
        Columns task, searcher, seeds, score, low, high: median over seeds with its 95 % interval.
    """
    lines = [line for task in results.tasks for line in _score_rows(task, results.stored.uses)]
    return pd.DataFrame(lines, columns=["task", "searcher", "seeds", "score", "low", "high"])


def _score_rows(task: TaskResults, uses: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if task.goal.minimize != "latency":
        return
    curves: dict[str, list[Curve]] = {}
    for curve in iter_speedup_curves(task):
        curves.setdefault(curve.searcher, []).append(curve)
    random = next((name for name in curves if uses.get(name, (name,))[0] == RANDOM_SEARCHER), None)
    if random is None:
        return
    initial: dict[str, set[int]] = {}
    for search in task.searches:
        initial.setdefault(search.searcher, set()).add(search.initial)
    first, last = max(initial[random]), max(int(each.evaluations[-1]) for seeds in curves.values() for each in seeds)
    latency = {name: _latency_ratios(seeds, last) for name, seeds in curves.items()}
    best = min(float(values.min()) for values in latency.values())
    for name, values in latency.items():
        scores = score_against_random(values, latency[random].mean(axis=0), best, first)
        warm = "qdq_baseline" in uses.get(name, ("", {}))[1]
        if name != random and initial[name] == {first} and not warm and not np.isnan(scores).any():
            middle = median_ci(scores)
            figures = {"score": middle.value, "low": middle.low, "high": middle.high}
            yield {"task": task.name, "searcher": name, "seeds": len(scores), **figures}


def _latency_ratios(curves: Iterable[Curve], last: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the latency of the incumbent over that of the float model: [seed, evaluation]; 1 before the first."""
    whole = [
        np.concatenate(
            [np.ones(curve.evaluations[0] - 1), curve.values, np.full(last - curve.evaluations[-1], curve.values[-1])]
        )
        for curve in sorted(curves, key=lambda curve: curve.seed)
    ]
    return 1 / np.array(whole)


def pair_frame(results: Results) -> pd.DataFrame:
    """Return every pair of searchers by confirmed speedup at the largest budget; see `compare_pairs`.

    Blocks are tasks that minimise latency.
    """
    return compare_pairs(_speedups_by_searcher(results))


def _speedups_by_searcher(results: Results) -> dict[str, dict[str, Sequence[float]]]:
    speedups: dict[str, dict[str, Sequence[float]]] = {name: {} for name in results.stored.searchers}
    for task in (each for each in results.pooled if each.goal.minimize == "latency"):
        for searcher, values in speedups_at(task, task.budget).items():
            speedups.setdefault(searcher, {})[task.name] = values
    return {name: blocks for name, blocks in speedups.items() if blocks}


def rank_searchers(results: Results) -> FriedmanRanks | None:
    """Return mean ranks of the searchers over the tasks that have all of them; None below two searchers or tasks."""
    speedups = _speedups_by_searcher(results)
    medians = {name: {b: median_ci(v).value for b, v in blocks.items()} for name, blocks in speedups.items()}
    table = pd.DataFrame(medians).dropna()
    return None if min(table.shape) < 2 else compute_ranks(table)


def pair_table(results: Results) -> ReportTable:
    """Return `pair_frame` as a table, with the mean ranks and the smallest p that Wilcoxon's test can give as notes."""
    pairs = pair_frame(results)
    most = int(pairs["blocks"].max()) if len(pairs) else 0
    counts = f"{pluralize(most, 'task')} and {pluralize(len(pairs), 'pair')}"
    least = f"The smallest p (Holm) that {counts} can give is {smallest_p_value(most, len(pairs)):.3g}."
    return PAIRS.build(pairs, [least, *_rank_notes(rank_searchers(results))])


def _rank_notes(ranks: FriedmanRanks | None) -> Iterator[str]:
    if ranks is None:
        return
    means = ", ".join(f"{name} {rank:.2f}" for name, rank in ranks.mean.items())
    yield f"Mean ranks over the {ranks.blocks} tasks that have all searchers: {means}."
    if ranks.untested_reason:
        yield f"{ranks.untested_reason[0].upper()}{ranks.untested_reason[1:]}."
    elif ranks.p_value is not None and ranks.critical_difference is not None:
        yield (
            f"Friedman's test: p = {ranks.p_value:.3g}; Nemenyi's critical difference of mean ranks at 5 %: "
            f"{ranks.critical_difference:.2f}."
        )
