"""Tables of a budget ablation: means, regret, time to the gain, score against random search, pairs, ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from harness.base.text import pluralize
from harness.replay.recorded_landscape import Floats, Landscape
from harness.replay.replay import initial_models
from harness.replay.simulated_selection import RANDOM_LABEL, Searches, random_search
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
class TableResult:
    """Replayed searches of a recorded table, by searcher.

    Attributes:
        name: Name of the table.
        block: Block of the table in statistics.
        split: Split of the table's task in QDQ-Bench, or "".
        optimum_ms: Lowest recorded latency.
        float_ms: Latency relative to which gains are computed: the float model's, or the slowest if that failed.
        random_ms: Latency of random searches, of shape (searches, evaluations).
        initial_count: Number of evaluations that the initial placements take; a model counts once.
    """

    name: str
    block: str
    split: str
    optimum_ms: float
    float_ms: float
    random_ms: Floats
    initial_count: int
    searches: Mapping[str, Searches]

    def latency_ms(self, searcher: str) -> Floats:
        """Return the recorded latency of the choices of a searcher, or of random search, (searches, evaluations)."""
        return self.random_ms if searcher == RANDOM_LABEL else self.searches[searcher].latency_ms

    def regret_percent(self, searcher: str) -> Floats:
        """Return the latency of the choices above the optimum in %, (searches, evaluations)."""
        return 100 * (self.latency_ms(searcher) / self.optimum_ms - 1)

    def scores(self, searcher: str) -> Floats:
        """Return the score of each search against random search."""
        random_ms = self.random_ms.mean(axis=0)
        return score_against_random(self.latency_ms(searcher), random_ms, self.optimum_ms, self.initial_count)


def table_result(
    landscape: Landscape,
    searches: Mapping[str, Searches],
    budget: int,
    initial: Sequence[str],
    *,
    block: str = "",
    split: str = "",
) -> TableResult:
    """Return the searches of a table with random searches of the same budget; `block` is the table if it is ""."""
    name = landscape.table.path.stem
    return TableResult(
        name=name,
        block=block or name,
        split=split,
        optimum_ms=float(landscape.latency_ms[landscape.optimum]),
        float_ms=landscape.anchors_ms.get("float", float(landscape.latency_ms.max())),
        random_ms=random_search(landscape, budget, initial),
        initial_count=len(initial_models(landscape, initial)),
        searches=searches,
    )


def budget_tables(
    results: Sequence[TableResult], study: BudgetStudy, ranks: Mapping[int, FriedmanRanks]
) -> tuple[ReportTable, ...]:
    """Return all tables of a study.

    Args:
        results: Results on each replay table; the tables are the blocks of the statistical tests.
        study: Study that the results are of.
        ranks: Ranks of the searchers by budget.
    """
    budgets, names = study.budgets, list(results[0].searches)
    seeds, tables = describe_seed_counts(results, study), pluralize(len(results), "table")
    initial = pluralize(len(study.initial), "initial placement")
    means = _make_table(
        "means",
        "In the mean over tables",
        [_mean_regret_line(results, name, budgets) for name in (RANDOM_LABEL, *names)],
        "Latency of the incumbent above the optimum in %, and the score against random search: mean over seeds and "
        f"{tables}, {_describe_limits(len(results))} (Student's). Tables are few and differ; the table "
        "pairs compares searchers on one and the same table.",
    )
    found = _make_table(
        "found",
        "Found, chosen or not",
        [_best_evaluated_line(results, name, budgets) for name in names],
        "Latency above the optimum in % of the fastest model that a search had evaluated, chosen or not: mean over "
        f"seeds and {tables}, as in the table means. The rest of the regret in that table is lost in choosing among "
        "noisy readings.",
    )
    budget = _make_table(
        "budget",
        "Budgets",
        [_regret_line(result, name, budgets) for result in results for name in (RANDOM_LABEL, *names)],
        f"Latency of the incumbent above the table's optimum in %: median over {seeds} [quartiles]. {initial} of every "
        f"search, also of random search, {'counts' if len(study.initial) == 1 else 'count'}. All budgets are read off "
        f"the same searches. {RISES}",
    )
    reach = _make_table(
        "reach",
        "Time to the gain",
        [_time_to_gain_line(r, name) for r in results if r.float_ms > r.optimum_ms for name in names],
        "Evaluations, and recorded minutes of builds and measurements, until a search had that share of the gain from "
        f"the float model to the table's optimum: median over {seeds}; those that never had it within "
        f"{max(budgets)} evaluations count as later than all others. In brackets: how many had it, if only "
        "for a while. A table without a placement faster than the float model has no line.",
    )
    score = _make_table(
        "score",
        "Score against random search",
        [_score_line(result, name) for result in results for name in names],
        "Share of what random search leaves that a searcher finds, on average until random search itself has found 95 "
        "% of what there is to find, after the initial placements (Willemsen et al. 2024): 0 is random search from the "
        f"same start, 1 the optimum at once, and below 0 worse than random. Mean over {seeds} with its 95 % interval "
        "(Student's), because random search is a mean too; a dash if the initial placements leave nothing.",
    )
    return means, found, budget, reach, score, _pairwise_table(results, budgets), _rank_table(ranks)


def _make_table(name: str, title: str, lines: Sequence[_Line], note: str) -> ReportTable:
    raw, cells = (pd.DataFrame([line[part] for line in lines]) for part in (0, 1))
    return ReportTable(name=name, title=title, cells=cells, raw=raw, note=note)


def _mean_regret_line(results: Sequence[TableResult], name: str, budgets: Sequence[int]) -> _Line:
    regrets = [result.regret_percent(name) for result in results]
    figures = {f"mean_{n}": (f"{n} evaluations", np.array([r[:, n - 1].mean() for r in regrets])) for n in budgets}
    scores = [np.nan if name == RANDOM_LABEL else result.scores(name).mean() for result in results]
    return _mean_line(name, {**figures, "score": ("score", np.array(scores))})


def _best_evaluated_line(results: Sequence[TableResult], name: str, budgets: Sequence[int]) -> _Line:
    regrets = np.array([100 * (r.searches[name].found_ms.mean(axis=0) / r.optimum_ms - 1) for r in results])
    return _mean_line(name, {f"found_{n}": (f"{n} evaluations", regrets[:, n - 1]) for n in budgets})


def _mean_line(searcher: str, figures: Mapping[str, tuple[str, Floats]]) -> _Line:
    """Return the line of a searcher: the mean over tables of each figure, given by name with its column's title."""
    line, cells = dict[str, Any](searcher=searcher), dict[str, Any](searcher=searcher)
    for name, (title, values) in figures.items():
        mean, low, high = mean_interval(values)
        line |= {name: mean, f"{name}_low": low, f"{name}_high": high}
        cells[title] = format_interval(mean, low, high)
    return line, cells


def _regret_line(result: TableResult, name: str, budgets: Sequence[int]) -> _Line:
    line: dict[str, Any] = {"table": result.name, "searcher": name}
    cells, regrets = dict(line), result.regret_percent(name)
    for budget in budgets:
        middle, low, high = quartiles(regrets[:, budget - 1])
        line |= {f"regret_{budget}": middle, f"lower_{budget}": low, f"upper_{budget}": high}
        line[f"mean_{budget}"] = float(regrets[:, budget - 1].mean())
        cells[f"{budget} evaluations"] = format_interval(middle, low, high)
    return line, cells


def _time_to_gain_line(result: TableResult, name: str) -> _Line:
    """Return evaluations and minutes until each share of the best gain; for searches without it they are infinite."""
    line: dict[str, Any] = {"table": result.name, "searcher": name}
    cells, searches = dict(line), result.searches[name]
    for gain in TARGET_GAIN_SHARES:
        target_ms = result.float_ms - gain * (result.float_ms - result.optimum_ms)
        is_reached = searches.latency_ms <= target_ms
        reached, first = is_reached.any(axis=1), is_reached.argmax(axis=1)
        evaluations = np.where(reached, first + 1, np.inf)
        minutes = np.where(reached, searches.elapsed_s[np.arange(len(first)), first] / 60, np.inf)
        middle, minute = (float(np.quantile(values, 0.5, method="higher")) for values in (evaluations, minutes))
        share, is_finite = f"{100 * gain:.0f}", bool(np.isfinite(middle))
        line |= {
            f"evaluations_{share}": middle if is_finite else None,
            f"minutes_{share}": minute if is_finite else None,
        }
        line[f"reached_{share}"] = int(reached.sum())
        count = f"{middle:.0f}, {minute:.1f} min" if is_finite else f"> {is_reached.shape[1]}"
        cells[f"{share} % of the gain"] = f"{count} ({reached.sum()} of {len(first)})"
    return line, cells


def _score_line(result: TableResult, name: str) -> _Line:
    mean, low, high = mean_interval(result.scores(name), 2)
    line = {"table": result.name, "searcher": name}
    return {**line, "score": mean, "low": low, "high": high}, {**line, "score": format_interval(mean, low, high)}


def _pairwise_table(results: Sequence[TableResult], budgets: Sequence[int]) -> ReportTable:
    """Return the comparison of the first searcher with each of the others, at each budget."""
    control, *others = results[0].searches
    frames = []
    for budget in budgets:
        shares = {
            name: {r.name: (r.optimum_ms / r.latency_ms(name)[:, budget - 1]).tolist() for r in results}
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
        f"mean over seeds, {_describe_limits(len(results))}. Chance: that a search of the first ends faster than one "
        "of the second (effect size; 0.5 is none). p: Wilcoxon's signed ranks over tables with Holm's correction for "
        f"all of one budget; the smallest that {pluralize(len(results), 'table')} and "
        f"{pluralize(len(others), 'comparison')} can give is {smallest_p_value(len(results), len(others)):.3g}."
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


def describe_seed_counts(results: Sequence[TableResult], study: BudgetStudy) -> str:
    """Return the number of seeds of a study as text, with the searchers that had fewer."""
    counts = {name: len(searches.seeds) for name, searches in results[0].searches.items()}
    listed = ", ".join(f"{name}: {count}" for name, count in counts.items() if count != study.seeds)
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
