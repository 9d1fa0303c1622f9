"""Tables of a budget ablation: means, regret, time to the gain, score against random search, pairs, ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.special import stdtrit

from harness.base.text import pluralize
from harness.replay.recorded_landscape import Floats
from harness.replay.simulated_selection import RANDOM_LABEL
from harness.replay.study_file import BudgetStudy
from harness.report.report_table import ReportTable, format_interval
from harness.report.statistics import (
    MIN_BLOCKS,
    FriedmanRanks,
    compare_with,
    quartiles,
    score_against_random,
    smallest_p_value,
)

TARGET_GAIN_SHARES = (0.95, 0.99)
RISES = (
    "A search is shown at the recorded latency of its final choice, which a simulated final selection makes among its "
    "best readings. Noise may still decide, so the latency may rise with the evaluations."
)
_Line = tuple[dict[str, Any], dict[str, Any]]
"""Line of a table: raw figures and formatted cells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchCurves:
    """Searches of one searcher on one table; float arrays have the shape (seeds, evaluations).

    After the end of a search its last value is repeated.

    Attributes:
        latency_ms: Recorded latency of the final choice, see `harness.replay.simulated_selection`.
        found_ms: Recorded latency of the fastest evaluated placement, chosen or not.
        elapsed_s: Recorded wall-clock of all builds and measurements so far.
        evaluations: Number of evaluations of each search until it had nothing more to propose, of shape (seeds,).
    """

    latency_ms: Floats
    found_ms: Floats
    elapsed_s: Floats
    evaluations: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableResult:
    """Replayed searches of a recorded table, by searcher.

    Attributes:
        float_ms: Latency relative to which gains are computed: the float model's, or the slowest if that failed.
        random_ms: Latency of random searches as returned by `simulated_selection.random_search`.
        initial_count: Number of evaluations that the initial placements take; a model counts once.
    """

    name: str
    optimum_ms: float
    float_ms: float
    random_ms: Floats
    curves: Mapping[str, SearchCurves]
    initial_count: int = 0


def budget_tables(
    blocks: Sequence[TableResult], study: BudgetStudy, ranks: Mapping[int, FriedmanRanks], warnings: tuple[str, ...]
) -> tuple[ReportTable, ...]:
    """Return all tables of a study.

    Args:
        blocks: Results on each replay table; the tables are the blocks of the statistical tests.
        study: Study that the results are of.
        ranks: Ranks of the searchers by budget.
        warnings: Lines that are shown below each table.
    """
    seeds, tables = describe_seed_counts(blocks, study), pluralize(len(blocks), "table")
    initial = pluralize(len(study.initial), "initial placement")
    budget = _make_table(
        "budget",
        "Budgets",
        _regret_lines(blocks, study.budgets),
        f"Latency of the incumbent above the table's optimum in %: median over {seeds} [quartiles]. {initial} of every "
        f"search, also of random search, {'counts' if len(study.initial) == 1 else 'count'}. All budgets are read off "
        f"the same searches. {RISES}",
    )
    score = _make_table(
        "score",
        "Score against random search",
        _score_lines(blocks),
        "Share of what random search leaves that a searcher finds, on average until random search itself has found 95 "
        "% of what there is to find, after the initial placements (Willemsen et al. 2024): 0 is random search from the "
        f"same start, 1 the optimum at once, and below 0 worse than random. Mean over {seeds} with its 95 % interval "
        "(Student's), because random search is a mean too; a dash if the initial placements leave nothing.",
    )
    best_evaluated = _make_table(
        "found",
        "Found, chosen or not",
        _best_evaluated_lines(blocks, study.budgets),
        "Latency above the optimum in % of the fastest model that a search had evaluated, chosen or not: mean over "
        f"seeds and {tables}, as in the table means. The rest of the regret in that table is lost in choosing among "
        "noisy readings.",
    )
    reach = _make_table(
        "reach",
        "Time to the gain",
        _time_to_target_lines(blocks),
        "Evaluations, and recorded minutes of builds and measurements, until a search had that share of the gain from "
        f"the float model to the table's optimum: median over {seeds}; those that never had it within "
        f"{study.max_evaluations} evaluations count as later than all others. In brackets: how many had it, if only "
        "for a while. A table without a placement faster than the float model has no line.",
    )
    means = mean_regret_rows(budget.raw, score.raw)
    tables_in_order = (means, best_evaluated, budget, reach, score, _pairwise_table(blocks, study), _rank_table(ranks))
    return tuple(replace(table, warnings=warnings) for table in tables_in_order)


def _make_table(name: str, title: str, lines: Iterable[_Line], note: str) -> ReportTable:
    listed = list(lines)
    raw, cells = (pd.DataFrame([line[part] for line in listed]) for part in (0, 1))
    return ReportTable(name=name, title=title, cells=cells, raw=raw, note=note)


def mean_regret_rows(budget: pd.DataFrame, score: pd.DataFrame) -> ReportTable:
    """Return the table with the mean over tables of each searcher's regret at each budget, and of its score.

    Args:
        budget: Raw figures of the table `budget`: table, searcher, and a column `mean_BUDGET` for each budget.
        score: Raw figures of the table `score`.
    """
    names = [str(name) for name in budget if str(name).startswith("mean_")]
    figures = budget[["table", "searcher", *names]].merge(score[["table", "searcher", "score"]], how="left")
    titles = {**{name: f"{name.removeprefix('mean_')} evaluations" for name in names}, "score": "score"}
    lines = (
        _mean_line(searcher, {name: (title, part[name].to_numpy(dtype=float)) for name, title in titles.items()})
        for searcher, part in figures.groupby("searcher", sort=False)
    )
    blocks = budget["table"].nunique()
    return _make_table(
        "means",
        "In the mean over tables",
        lines,
        "Latency of the incumbent above the optimum in %, and the score against random search: mean over seeds and "
        f"{pluralize(blocks, 'table')}, {_describe_limits(blocks)} (Student's). Tables are few and differ; the table "
        "pairs compares searchers on one and the same table.",
    )


def _best_evaluated_lines(blocks: Sequence[TableResult], budgets: Sequence[int]) -> Iterator[_Line]:
    for name in blocks[0].curves:
        regrets = {
            budget: [100 * (b.curves[name].found_ms[:, budget - 1].mean() / b.optimum_ms - 1) for b in blocks]
            for budget in budgets
        }
        yield _mean_line(name, {f"found_{n}": (f"{n} evaluations", np.array(each)) for n, each in regrets.items()})


def _mean_line(searcher: Any, figures: Mapping[str, tuple[str, Floats]]) -> _Line:
    """Return the line of a searcher: the mean over tables of each figure, given by name with its column's title."""
    line, cells = {"searcher": searcher}, {"searcher": searcher}
    for name, (title, values) in figures.items():
        mean, low, high = mean_interval(values)
        line |= {name: mean, f"{name}_low": low, f"{name}_high": high}
        cells[title] = format_interval(mean, low, high)
    return line, cells


def _regret_lines(blocks: Sequence[TableResult], budgets: Sequence[int]) -> Iterator[_Line]:
    for block in blocks:
        for name, latency_ms in {RANDOM_LABEL: block.random_ms, **_latencies(block)}.items():
            line: dict[str, Any] = {"table": block.name, "searcher": name}
            cells = dict(line)
            for budget in budgets:
                regrets = 100 * (latency_ms[:, budget - 1] / block.optimum_ms - 1)
                middle, low, high = quartiles(regrets)
                line |= {f"regret_{budget}": middle, f"lower_{budget}": low, f"upper_{budget}": high}
                line[f"mean_{budget}"] = float(regrets.mean())
                cells[f"{budget} evaluations"] = format_interval(middle, low, high)
            yield line, cells


def _latencies(block: TableResult) -> dict[str, Floats]:
    return {name: curves.latency_ms for name, curves in block.curves.items()}


def _time_to_target_lines(blocks: Sequence[TableResult]) -> Iterator[_Line]:
    """Yield evaluations and minutes until each share of the best gain; for searches without it they are infinite."""
    for block in (block for block in blocks if block.float_ms > block.optimum_ms):
        for name, curves in block.curves.items():
            line: dict[str, Any] = {"table": block.name, "searcher": name}
            cells = dict(line)
            for gain in TARGET_GAIN_SHARES:
                target_ms = block.float_ms - gain * (block.float_ms - block.optimum_ms)
                is_reached = np.less_equal(curves.latency_ms, target_ms)
                reached, first = is_reached.any(axis=1), is_reached.argmax(axis=1)
                evaluations = np.where(reached, first + 1, np.inf)
                minutes = np.where(reached, curves.elapsed_s[np.arange(len(first)), first] / 60, np.inf)
                middle, minute = (float(np.quantile(values, 0.5, method="higher")) for values in (evaluations, minutes))
                share = f"{100 * gain:.0f}"
                line |= {f"evaluations_{share}": _finite_or_none(middle), f"minutes_{share}": _finite_or_none(minute)}
                line[f"reached_{share}"] = int(reached.sum())
                count = f"{middle:.0f}, {minute:.1f} min" if np.isfinite(middle) else f"> {is_reached.shape[1]}"
                cells[f"{share} % of the gain"] = f"{count} ({reached.sum()} of {len(first)})"
            yield line, cells


def _score_lines(blocks: Sequence[TableResult]) -> Iterator[_Line]:
    for block in blocks:
        random_ms = block.random_ms.mean(axis=0)
        for name, latency_ms in _latencies(block).items():
            scores = score_against_random(latency_ms, random_ms, block.optimum_ms, block.initial_count)
            mean, low, high = mean_interval(scores, 2)
            line = {"table": block.name, "searcher": name}
            yield {**line, "score": mean, "low": low, "high": high}, {**line, "score": format_interval(mean, low, high)}


def _pairwise_table(blocks: Sequence[TableResult], study: BudgetStudy) -> ReportTable:
    """Return the comparison of the first searcher with each of the others, at each budget."""
    control, *others = blocks[0].curves
    frames = []
    for budget in study.budgets:
        shares = {
            name: {b.name: (b.optimum_ms / b.curves[name].latency_ms[:, budget - 1]).tolist() for b in blocks}
            for name in (control, *others)
        }
        frames.append(compare_with(control, shares).assign(budget=budget))
    raw = pd.concat(frames, ignore_index=True)
    cells = raw[["budget", "first", "second", "blocks"]].assign(
        ratio=[format_interval(*figures, 3) for figures in zip(raw["ratio"], raw["low"], raw["high"], strict=True)],
        chance=[f"{value:.2f}" for value in raw["chance"]],
        p=[f"{value:.3f}" if np.isfinite(value) else "-" for value in raw["p_holm"]],
    )
    note = (
        f"{control} with each of the others, at each budget. Ratio: of the shares of the optimum's speed, each the "
        f"mean over seeds, {_describe_limits(len(blocks))}. Chance: that a search of the first ends faster than one of "
        "the second (effect size; 0.5 is none). p: Wilcoxon's signed ranks over tables with Holm's correction for all "
        f"of one budget; the smallest that {pluralize(len(blocks), 'table')} and "
        f"{pluralize(len(others), 'comparison')} can give is {smallest_p_value(len(blocks), len(others)):.3g}."
    )
    return ReportTable(name="pairs", title="Pairs", cells=cells, raw=raw, note=note)


def _rank_table(ranks: Mapping[int, FriedmanRanks]) -> ReportTable:
    """Return the mean rank of each searcher at each budget, the best at the largest budget first."""
    most = ranks[max(ranks)]
    columns = {str(budget): [at_budget.mean[name] for name in most.mean] for budget, at_budget in ranks.items()}
    raw = pd.DataFrame({"searcher": list(most.mean), **columns})
    cells = raw.assign(**{budget: [f"{value:.2f}" for value in raw[budget]] for budget in columns})
    test = "too few for a test"
    if most.critical_difference is not None:
        tests = ", ".join(f"{at_budget.p_value:.2g} at {budget}" for budget, at_budget in ranks.items())
        test = (
            f"Friedman p = {tests}; ranks of one budget that differ by more than {most.critical_difference:.2f} are "
            "different at 5 % (Nemenyi)"
        )
    note = (
        f"Mean rank over {pluralize(most.blocks, 'table')} by the latency at each budget, on average over seeds, "
        f"because the medians of many are the optimum; {test}. Tables of one model are related, which the test does "
        "not know."
    )
    return ReportTable(name="ranks", title="Ranks", cells=cells, raw=raw, note=note)


def describe_seed_counts(blocks: Sequence[TableResult], study: BudgetStudy) -> str:
    """Return the number of seeds of a study as text, with the searchers that had fewer on the first of `blocks`."""
    fewer = {name: len(c.latency_ms) for name, c in blocks[0].curves.items() if len(c.latency_ms) != study.seeds}
    listed = ", ".join(f"{name}: {count}" for name, count in fewer.items())
    return f"{pluralize(study.seeds, 'seed')} ({listed})" if listed else pluralize(study.seeds, "seed")


def _describe_limits(blocks: int) -> str:
    few = f"no interval, for {MIN_BLOCKS} tables are needed"
    return few if blocks < MIN_BLOCKS else "with its 95 % interval over tables"


def mean_interval(values: Floats, least: int = MIN_BLOCKS) -> tuple[float | None, float | None, float | None]:
    """Return mean and limits of Student's 95 % interval; None if a value is NaN; limits None below `least` values."""
    if np.isnan(values).any():
        return None, None, None
    mean = float(values.mean())
    if len(values) < least:
        return mean, None, None
    half = float(stdtrit(len(values) - 1, 0.975) * values.std(ddof=1) / np.sqrt(len(values)))
    return mean, mean - half, mean + half


def _finite_or_none(value: float) -> float | None:
    return value if np.isfinite(value) else None
