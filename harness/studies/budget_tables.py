"""The tables of a budget ablation: means, regret, time to the gain, score against random search, pairs, ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.stats import t as student

from harness.report.report_table import ReportTable, format_interval, pluralize
from harness.report.statistics import (
    MIN_BLOCKS,
    FriedmanRanks,
    compare_with,
    quartiles,
    score_against_random,
    smallest_p_value,
)
from harness.studies.random_search import RANDOM_LABEL
from harness.studies.recorded_landscape import Floats
from harness.studies.study_file import BudgetStudy

__all__ = ["RISES", "SearchCurves", "TableResult", "budget_tables", "describe_seed_counts", "mean_regret_rows"]

TARGET_GAIN_SHARES = (0.95, 0.99)
RISES = (
    "A search is shown at the recorded latency of what it hands over: a runoff of its best readings chooses, as on the "
    "machine. Luck may still choose, so the latency may rise with the evaluations."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchCurves:
    """Searches of one searcher on one table; arrays are [seed, evaluation].

    Attributes:
        latency_ms: Recorded latency of what a search hands over, see `harness.studies.simulated_selection`.
        found_ms: Recorded latency of the fastest that it evaluated, whether it was chosen or not.
        elapsed_s: Recorded wall-clock of all that was built and measured until then.
        evaluations: Of each search, until it had nothing more to propose; [seed].
    """

    latency_ms: Floats
    found_ms: Floats
    elapsed_s: Floats
    evaluations: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableResult:
    """One table with everything that was replayed on it, by searcher.

    Attributes:
        float_ms: Latency that a gain starts from: the float model's, or the slowest where that failed.
        random_ms: Of random searches, [search, evaluation]; see `harness.studies.random_search`.
        told: Evaluations that go to the placements that every search is told first; a model counts once.
    """

    name: str
    optimum_ms: float
    float_ms: float
    random_ms: Floats
    curves: Mapping[str, SearchCurves]
    told: int = 0


def budget_tables(
    blocks: Sequence[TableResult], study: BudgetStudy, ranks: Mapping[int, FriedmanRanks], warnings: tuple[str, ...]
) -> tuple[ReportTable, ...]:
    """All tables of a study; a block is one recorded table with everything that was replayed on it.

    Args:
        ranks: By budget.
        warnings: Shown below each table.
    """
    budget, score = _regret_rows(blocks, study), _score_rows(blocks, study)
    means = mean_regret_rows(budget.raw, score.raw)
    made = (
        means,
        _best_evaluated_rows(blocks, study),
        budget,
        _time_to_target_rows(blocks, study),
        score,
        _pairwise_rows(blocks, study),
        _rank_rows(ranks),
    )
    return tuple(replace(table, warnings=warnings) for table in made)


def mean_regret_rows(budget: pd.DataFrame, score: pd.DataFrame) -> ReportTable:
    """A line a searcher: its regret at each budget and its score, in the mean over tables.

    Args:
        budget: Raw figures of the table `budget`: table, searcher, and a column `mean_BUDGET` for each budget.
        score: Raw figures of the table `score`.
    """
    blocks = budget["table"].nunique()
    names = [str(name) for name in budget if str(name).startswith("mean_")]
    columns = {name: f"{name.removeprefix('mean_')} evaluations" for name in names}
    figures = budget[["table", "searcher", *columns]].merge(score[["table", "searcher", "score"]], how="left")
    lines, shown = [], []
    for searcher, part in figures.groupby("searcher", sort=False):
        line: dict[str, Any] = {"searcher": searcher}
        cells = dict(line)
        for name, title in {**columns, "score": "score"}.items():
            values = part[name].to_numpy(dtype=float)
            mean, low, high = (None, None, None) if np.isnan(values).any() else _mean_over_tables(values)
            line |= {name: mean, f"{name}_low": low, f"{name}_high": high}
            cells[title] = format_interval(mean, low, high)
        lines.append(line)
        shown.append(cells)
    limits = "no interval, for 3 tables are needed" if blocks < MIN_BLOCKS else "with its 95 % interval over tables"
    note = (
        "Latency of the incumbent above the optimum in %, and the score against random search: mean over seeds and "
        f"{pluralize(blocks, 'table')}, {limits} (Student's). Tables are few and differ; `pairs` compares searchers on "
        "one and the same table."
    )
    return ReportTable(
        name="means", title="In the mean over tables", cells=pd.DataFrame(shown), raw=pd.DataFrame(lines), note=note
    )


def _best_evaluated_rows(blocks: Sequence[TableResult], study: BudgetStudy) -> ReportTable:
    """What searches came by, before anything was chosen: the rest of what `means` shows is lost in choosing."""
    lines, shown = [], []
    for searcher in blocks[0].curves:
        line: dict[str, Any] = {"searcher": searcher}
        cells = dict(line)
        for budget in study.budgets:
            regrets = [100 * (b.curves[searcher].found_ms[:, budget - 1].mean() / b.optimum_ms - 1) for b in blocks]
            mean, low, high = _mean_over_tables(np.array(regrets))
            line |= {f"found_{budget}": mean, f"found_{budget}_low": low, f"found_{budget}_high": high}
            cells[f"{budget} evaluations"] = format_interval(mean, low, high)
        lines.append(line)
        shown.append(cells)
    note = (
        "Latency above the optimum in % of the fastest model that a search had evaluated, whether it was handed over "
        f"or not: mean over seeds and {pluralize(len(blocks), 'table')}, as in `means`. What that table shows beyond "
        "this is lost in choosing among noisy readings."
    )
    return ReportTable(
        name="found", title="Found, chosen or not", cells=pd.DataFrame(shown), raw=pd.DataFrame(lines), note=note
    )


def _mean_over_tables(values: Floats) -> tuple[float, float | None, float | None]:
    mean, half = _mean_with_half_width(values)
    return (mean, None, None) if half is None or len(values) < MIN_BLOCKS else (mean, mean - half, mean + half)


def _regret_rows(blocks: Sequence[TableResult], study: BudgetStudy) -> ReportTable:
    """Regret at each budget."""
    lines, shown = [], []
    for block in blocks:
        figures = {RANDOM_LABEL: block.random_ms, **{name: c.latency_ms for name, c in block.curves.items()}}
        for name, latency_ms in figures.items():
            line: dict[str, Any] = {"table": block.name, "searcher": name}
            cells = dict(line)
            for budget in study.budgets:
                regrets = 100 * (latency_ms[:, budget - 1] / block.optimum_ms - 1)
                middle, low, high = quartiles(regrets)
                line |= {f"regret_{budget}": middle, f"lower_{budget}": low, f"upper_{budget}": high}
                line[f"mean_{budget}"] = float(regrets.mean())
                cells[f"{budget} evaluations"] = format_interval(middle, low, high)
            lines.append(line)
            shown.append(cells)
    note = (
        f"Latency of the incumbent above the table's optimum in %: median over {describe_seed_counts(blocks, study)} "
        f"[quartiles]. {pluralize(len(study.initial), 'placement')} that every search is told first, random "
        "search too, "
        f"{'counts' if len(study.initial) == 1 else 'count'}. All budgets are read off the same searches. {RISES}"
    )
    return ReportTable(name="budget", title="Budgets", cells=pd.DataFrame(shown), raw=pd.DataFrame(lines), note=note)


def _time_to_target_rows(blocks: Sequence[TableResult], study: BudgetStudy) -> ReportTable:
    """Evaluations and minutes until so much of the best gain is there; what never comes is censored at the end."""
    lines, shown = [], []
    for block in (block for block in blocks if block.float_ms > block.optimum_ms):
        for name, curves in block.curves.items():
            line: dict[str, Any] = {"table": block.name, "searcher": name}
            cells = dict(line)
            for gain in TARGET_GAIN_SHARES:
                wanted_ms = block.float_ms - gain * (block.float_ms - block.optimum_ms)
                there = np.less_equal(curves.latency_ms, wanted_ms)
                reached, first = there.any(axis=1), there.argmax(axis=1)
                spent = np.where(reached, first + 1, np.inf)
                minutes = np.where(reached, curves.elapsed_s[np.arange(len(first)), first] / 60, np.inf)
                middle, minute = (float(np.quantile(values, 0.5, method="higher")) for values in (spent, minutes))
                share = f"{100 * gain:.0f}"
                line |= {f"evaluations_{share}": _finite_or_none(middle), f"minutes_{share}": _finite_or_none(minute)}
                line[f"reached_{share}"] = int(reached.sum())
                count = f"{middle:.0f}, {minute:.1f} min" if np.isfinite(middle) else f"> {there.shape[1]}"
                cells[f"{share} % of the gain"] = f"{count} ({reached.sum()} of {len(first)})"
            lines.append(line)
            shown.append(cells)
    note = (
        "Evaluations, and recorded minutes of builds and measurements, until a search had so much of the gain from the "
        f"float model to the table's optimum: median over {describe_seed_counts(blocks, study)}; those that "
        f"never had it within {study.max_evaluations} "
        "evaluations count as later than all others. In brackets: how many had it, "
        "if only for a while. A table without a placement faster than the float model has no line."
    )
    return ReportTable(
        name="reach", title="Time to the gain", cells=pd.DataFrame(shown), raw=pd.DataFrame(lines), note=note
    )


def _score_rows(blocks: Sequence[TableResult], study: BudgetStudy) -> ReportTable:
    lines, shown = [], []
    for block in blocks:
        random_ms = block.random_ms.mean(axis=0)
        for name, curves in block.curves.items():
            scores = score_against_random(curves.latency_ms, random_ms, block.optimum_ms, block.told)
            mean, half = (None, None) if np.isnan(scores).any() else _mean_with_half_width(scores)
            low, high = (None, None) if mean is None or half is None else (mean - half, mean + half)
            line = {"table": block.name, "searcher": name}
            lines.append({**line, "score": mean, "low": low, "high": high})
            shown.append({**line, "score": format_interval(mean, low, high)})
    cells, raw = pd.DataFrame(shown), pd.DataFrame(lines)
    note = (
        "How much of what random search leaves a searcher finds, on average until random search itself has found 95 % "
        "of what there is to find, after the placements that all are told first (Willemsen et al. 2024): 0 is random "
        "search from the same start, 1 the optimum at once, and below 0 worse than random. "
        f"Mean over {describe_seed_counts(blocks, study)} with its 95 % interval (Student's), for random "
        "search is a mean too; a dash where these placements leave nothing."
    )
    return ReportTable(name="score", title="Score against random search", cells=cells, raw=raw, note=note)


def _pairwise_rows(blocks: Sequence[TableResult], study: BudgetStudy) -> ReportTable:
    """The first searcher with each of the others, at each budget."""
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
    few = len(blocks) < MIN_BLOCKS
    limits = f"no interval, for {MIN_BLOCKS} tables are needed" if few else "with its 95 % interval over tables"
    note = (
        f"{control} with each of the others, at each budget. Ratio: of the shares of the optimum's speed, each "
        f"the mean over seeds, {limits}. "
        "Chance: that a search of the first ends faster than one of the second (effect size; 0.5 is none). "
        "p: Wilcoxon's signed ranks over tables with Holm's correction for all of one budget; the smallest that "
        f"{pluralize(len(blocks), 'table')} and {pluralize(len(others), 'comparison')} can give is "
        f"{smallest_p_value(len(blocks), len(others)):.3g}."
    )
    return ReportTable(name="pairs", title="Pairs", cells=cells, raw=raw, note=note)


def _rank_rows(ranks: Mapping[int, FriedmanRanks]) -> ReportTable:
    """Mean rank of each searcher at each budget, the best of the largest budget first."""
    most = ranks[max(ranks)]
    columns = {str(budget): [found.mean[name] for name in most.mean] for budget, found in ranks.items()}
    raw = pd.DataFrame({"searcher": list(most.mean), **columns})
    cells = raw.assign(**{budget: [f"{value:.2f}" for value in raw[budget]] for budget in columns})
    if most.critical_difference is None:
        test = "too few for a test"
    else:
        tests = ", ".join(f"{found.p_value:.2g} at {budget}" for budget, found in ranks.items())
        test = (
            f"Friedman p = {tests}; ranks of one budget that differ by more than {most.critical_difference:.2f} are "
            "different at 5 % (Nemenyi)"
        )
    note = (
        f"Mean rank over {pluralize(most.blocks, 'table')} of what the searchers have reached after so many "
        "evaluations, "
        f"on average over seeds, because the medians of many are the optimum; {test}. Tables of one model are related, "
        "which the test does not know."
    )
    return ReportTable(name="ranks", title="Ranks", cells=cells, raw=raw, note=note)


def describe_seed_counts(blocks: Sequence[TableResult], study: BudgetStudy) -> str:
    """How many seeds there are, and who had fewer."""
    fewer = {name: len(c.latency_ms) for name, c in blocks[0].curves.items() if len(c.latency_ms) != study.seeds}
    said = ", ".join(f"{name}: {count}" for name, count in fewer.items())
    return f"{pluralize(study.seeds, 'seed')} ({said})" if said else pluralize(study.seeds, "seed")


def _mean_with_half_width(values: Floats) -> tuple[float, float | None]:
    """Mean with the half-width of Student's 95 % interval; one value has none."""
    mean = float(values.mean())
    if len(values) < 2:
        return mean, None
    return mean, float(student.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)))


def _finite_or_none(value: float) -> float | None:
    return value if np.isfinite(value) else None
