"""The tables of a budget ablation: regret, time to the gain, score against random search, pairs, ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.stats import t as student

from harness.report.statistics import Ranks, compare_pairs, score_against_random
from harness.report.tables import Table, interval
from harness.studies.study_file import BudgetStudy

__all__ = ["Block", "Curves", "budget_tables"]

Floats = npt.NDArray[np.float64]
GAINS = (0.95, 0.99)
RANDOM = "random, calculated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Searches of one searcher on one table; both arrays are [seed, evaluation].

    Attributes:
        latency_ms: Recorded latency of the incumbent.
        elapsed_s: Recorded wall-clock of all that was built and measured until then.
    """

    latency_ms: Floats
    elapsed_s: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One table with everything that was replayed on it, by searcher.

    Attributes:
        float_ms: Latency that a gain starts from: the float model's, or the slowest where that failed.
        random_ms: Of random search, its expectation.
    """

    name: str
    optimum_ms: float
    float_ms: float
    random_ms: Floats
    curves: Mapping[str, Curves]


def budget_tables(blocks: Sequence[Block], study: BudgetStudy, ranks: Ranks) -> tuple[Table, ...]:
    """All tables of a study; a block is one recorded table with everything that was replayed on it."""
    return _budget(blocks, study), _reach(blocks, study), _score(blocks, study), _pairs(blocks), _ranking(ranks)


def _budget(blocks: Sequence[Block], study: BudgetStudy) -> Table:
    """Regret at each budget."""
    lines, shown = [], []
    for block in blocks:
        figures = {RANDOM: block.random_ms[None, :], **{name: c.latency_ms for name, c in block.curves.items()}}
        for name, latency_ms in figures.items():
            line: dict[str, Any] = {"table": block.name, "searcher": name}
            cells = dict(line)
            for budget in study.budgets:
                mean, half = _mean(100 * (latency_ms[:, budget - 1] / block.optimum_ms - 1))
                line |= {f"regret_{budget}": mean, f"half_width_{budget}": half}
                cells[f"{budget} evaluations"] = f"{mean:.2f}" if half is None else f"{mean:.2f} ± {half:.2f}"
            lines.append(line)
            shown.append(cells)
    note = (
        f"Latency of the incumbent above the table's optimum in %: mean over {_seeds(blocks, study)} ± half of its "
        f"95 % interval (Student's). The {len(study.initial)} placements that every search is told first count. Random "
        "search is calculated from the table, without them."
    )
    return Table(name="budget", title="Budgets", cells=pd.DataFrame(shown), raw=pd.DataFrame(lines), note=note)


def _reach(blocks: Sequence[Block], study: BudgetStudy) -> Table:
    """Evaluations and minutes until so much of the best gain is there; what never comes is censored at the end."""
    lines, shown = [], []
    for block in blocks:
        for name, curves in block.curves.items():
            line: dict[str, Any] = {"table": block.name, "searcher": name}
            cells = dict(line)
            for gain in GAINS:
                wanted_ms = block.float_ms - gain * (block.float_ms - block.optimum_ms)
                there = np.less_equal(curves.latency_ms, wanted_ms)
                reached, first = there.any(axis=1), there.argmax(axis=1)
                spent = np.where(reached, first + 1, np.inf)
                minutes = np.where(reached, curves.elapsed_s[np.arange(len(first)), first] / 60, np.inf)
                middle, minute = (float(np.quantile(values, 0.5, method="higher")) for values in (spent, minutes))
                share = f"{100 * gain:.0f}"
                line |= {f"evaluations_{share}": _finite(middle), f"minutes_{share}": _finite(minute)}
                line[f"reached_{share}"] = int(reached.sum())
                count = f"{middle:.0f}, {minute:.1f} min" if np.isfinite(middle) else f"> {there.shape[1]}"
                cells[f"{share} % of the gain"] = f"{count} ({reached.sum()} of {len(first)})"
            lines.append(line)
            shown.append(cells)
    note = (
        "Evaluations, and recorded minutes of builds and measurements, until a search had so much of the gain from the "
        f"float model to the table's optimum: median over {_seeds(blocks, study)}; those that never had it within "
        f"{study.most} evaluations count as later than all others. In brackets: how many had it."
    )
    return Table(name="reach", title="Time to the gain", cells=pd.DataFrame(shown), raw=pd.DataFrame(lines), note=note)


def _score(blocks: Sequence[Block], study: BudgetStudy) -> Table:
    lines, shown = [], []
    for block in blocks:
        for name, curves in block.curves.items():
            scores = score_against_random(curves.latency_ms, block.random_ms, block.optimum_ms, len(study.initial))
            mean, half = _mean(scores)
            low, high = (None, None) if half is None else (mean - half, mean + half)
            line = {"table": block.name, "searcher": name}
            lines.append({**line, "score": mean, "low": low, "high": high})
            shown.append({**line, "score": interval(mean, low, high)})
    cells, raw = pd.DataFrame(shown), pd.DataFrame(lines)
    note = (
        "How much of what random search leaves a searcher finds, on average until random search itself has 95 % of the "
        f"gain (Willemsen et al. 2024): 0 is random search, 1 the optimum at once. Mean over {_seeds(blocks, study)} "
        "with its 95 % interval; a dash where random search leaves nothing."
    )
    return Table(name="score", title="Score against random search", cells=cells, raw=raw, note=note)


def _pairs(blocks: Sequence[Block]) -> Table:
    names = list(blocks[0].curves)
    reached = {
        name: {b.name: (b.optimum_ms / b.curves[name].latency_ms[:, -1]).tolist() for b in blocks} for name in names
    }
    raw = compare_pairs(reached)
    cells = raw[["first", "second", "blocks"]].assign(
        ratio=[interval(*figures, 3) for figures in zip(raw["ratio"], raw["low"], raw["high"], strict=True)],
        chance=[f"{value:.2f}" for value in raw["chance"]],
        p=[f"{value:.3f}" if np.isfinite(value) else "-" for value in raw["p_holm"]],
    )
    note = (
        "Every pair at the largest budget. Ratio: of the shares of the optimum's speed, with its 95 % interval over "
        "tables. Chance: that a search of the first ends faster than one of the second (effect size; 0.5 is none). "
        "p: Wilcoxon's signed ranks over tables with Holm's correction; none with fewer than 6 tables."
    )
    return Table(name="pairs", title="Pairs", cells=cells, raw=raw, note=note)


def _ranking(ranks: Ranks) -> Table:
    raw = pd.DataFrame({"searcher": list(ranks.mean), "mean_rank": list(ranks.mean.values())})
    cells = raw.assign(mean_rank=[f"{value:.2f}" for value in raw["mean_rank"]])
    if ranks.p_value is None or ranks.critical_difference is None:
        test = "too few for a test"
    else:
        test = (
            f"Friedman p = {ranks.p_value:.2g}; ranks that differ by more than {ranks.critical_difference:.2f} are "
            "different at 5 % (Nemenyi)"
        )
    note = f"Mean rank over {ranks.blocks} tables of what the searchers reached at the largest budget; {test}."
    return Table(name="ranks", title="Ranks", cells=cells, raw=raw, note=note)


def _seeds(blocks: Sequence[Block], study: BudgetStudy) -> str:
    """How many, and who had fewer."""
    fewer = {name: len(c.latency_ms) for name, c in blocks[0].curves.items() if len(c.latency_ms) != study.seeds}
    said = ", ".join(f"{name}: {count}" for name, count in fewer.items())
    return f"{study.seeds} seeds ({said})" if said else f"{study.seeds} seeds"


def _mean(values: Floats) -> tuple[float, float | None]:
    """Mean with the half-width of Student's 95 % interval; one value has none."""
    mean = float(values.mean())
    if len(values) < 2:
        return mean, None
    return mean, float(student.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)))


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
