"""What the searches of a results folder did, as pandas frames: budgets, cost, curves, evaluations to a target."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from harness.report.load.results import CellResults, Results
from harness.report.load.search_logs import SearchLog
from harness.results_dir.artifacts import FLOAT_ROW, Choice
from harness.statistics import MIN_CLAIMED_GAIN, Interval, median_ci

__all__ = [
    "TARGET_GAIN_FRACTIONS",
    "budget_frame",
    "confirmed_choices",
    "cost_frame",
    "curve_frame",
    "early_end_notes",
    "failure_notes",
    "median_float_ms",
    "metric_usage_note",
    "ratio_over_seeds",
    "search_float_ms",
    "speedups_at",
    "target_frame",
]  # fmt: skip

TARGET_GAIN_FRACTIONS = (0.95, 0.99)
"""Shares of the best gain that any search of the cell found."""
MIN_SEEDS_FOR_INTERVAL = 6
"""With fewer no interval of their median reaches 95 %."""
CURVE_COLUMNS = ["cell", "searcher", "seed", "evaluations", "minutes", "speedup"]


def budget_frame(results: Results) -> pd.DataFrame:
    """Searcher by budget: confirmed speedup of the incumbent at that budget, median over seeds and its interval.

    With fewer than six seeds there is no 95 % interval of their median (Hettmansperger and Sheather 1986): the limits
    are then the lowest and the highest of the seeds' own confirmed intervals.

    `best` marks the highest median of a cell and a budget whose limits exclude 1, `tied` those whose interval meets
    that of the best; a row whose limits are below 1 is slower than the float model and never marked.
    """
    lines = []
    for cell in results.cells:
        for (searcher, budget), rows in confirmed_choices(cell).items():
            middle = _speedup_over_seeds([cell.summaries[row].speedup for row in rows.values()])
            lines.append(
                {
                    "cell": cell.name, "model": cell.facts["model"], "searcher": searcher, "budget": budget,
                    "speedup": middle.value, "low": middle.low, "high": middle.high, "seeds": len(rows),
                }
            )  # fmt: skip
    columns = ["cell", "model", "searcher", "budget", "speedup", "low", "high", "seeds"]
    frame = pd.DataFrame(lines, columns=columns)
    groups = [frame["cell"], frame["budget"]]
    faster = frame["speedup"].where(frame["low"] > 1.0)
    best = faster == faster.groupby(groups).transform("max")
    lowest = frame["low"].where(best).groupby(groups).transform("max").fillna(1.0)
    return frame.assign(best=best, tied=(frame["high"] >= lowest) & (frame["high"] >= 1.0))


def confirmed_choices(cell: CellResults) -> dict[tuple[str, int], dict[int, str]]:
    """By searcher and budget the row that each seed chose, of those that are confirmed."""
    found: dict[tuple[str, int], dict[int, str]] = {}
    for pick in cell.picks:
        if pick.kind != "search" or pick.rank or pick.seed is None or pick.budget is None:
            continue
        if pick.row in cell.summaries:
            found.setdefault((pick.method, pick.budget), {})[pick.seed] = pick.row
    return found


def _speedup_over_seeds(speedups: Sequence[Interval]) -> Interval:
    middle = median_ci([speedup.value for speedup in speedups])
    if len(speedups) >= MIN_SEEDS_FOR_INTERVAL:
        return middle
    return Interval(value=middle.value, low=min(s.low for s in speedups), high=max(s.high for s in speedups))


def ratio_over_seeds(ratios: Sequence[Interval]) -> Interval:
    """Median over seeds with limits as in `budget_frame`; none where a seed's own ratio has none (a single turn)."""
    middle = _speedup_over_seeds(ratios)
    bounded = all(math.isfinite(ratio.high) for ratio in ratios)
    return middle if bounded else replace(middle, low=0.0, high=math.inf)


def speedups_at(cell: CellResults, budget: int) -> dict[str, list[float]]:
    """Confirmed speedup of the incumbents at a budget, by searcher, one a seed."""
    return {
        searcher: [cell.summaries[row].speedup.value for row in rows.values()]
        for (searcher, asked), rows in confirmed_choices(cell).items()
        if asked == budget
    }


def early_end_notes(results: Results) -> list[str]:
    """Which searches have spent less than their budget, and why where they told, a line for each reason."""
    named: dict[tuple[str, str], list[SearchLog]] = {}
    for cell in results.cells:
        for search in cell.searches:
            if said := _describe_end(search, cell.budget):
                named.setdefault((cell.name, said), []).append(search)
    lines = []
    for (cell_name, said), found in named.items():
        names = ", ".join(f"{search.searcher}-{search.seed}" for search in found)
        traces = [
            str(s.end.traceback_file.relative_to(results.folder)) for s in found if s.end and s.end.traceback_file
        ]
        lines.append(f"{cell_name}: {names} {said}{'; traceback: ' if traces else ''}{', '.join(traces)}.")
    return lines


def _describe_end(search: SearchLog, budget: int) -> str:
    """How a search ended before its budget; "" where it did not, or where no search has chosen yet (budget 0)."""
    if search.end is not None:
        return search.end.reason
    return f"ended at {search.evaluations} of {budget}" if search.evaluations < budget else ""


def failure_notes(results: Results) -> list[str]:
    """How many evaluations of which searches failed at which stage, a line a cell."""
    lines = []
    for cell in results.cells:
        told = [
            f"{search.searcher}-{search.seed} {', '.join(f'{n} at {stage}' for stage, n in search.failures.items())}"
            for search in cell.searches
            if search.failures
        ]
        if told:
            lines.append(f"Failed evaluations, {cell.name}: {'; '.join(told)}.")
    return lines


def metric_usage_note(cell: CellResults) -> str:
    """How often each search looked at the metric, and how far its proxy agreed; "" where none did."""
    largest = cell.budget
    picks = [p for p in cell.picks if p.rank == 0 and p.budget == largest and p.scored is not None]
    seeds = {method: [p for p in picks if p.method == method] for method in dict.fromkeys(p.method for p in picks)}
    return ", ".join(
        f"{method} {_describe_metric_usage(found, cell)}{_format_rank_correlation(found)}"
        for method, found in seeds.items()
    )


def _describe_metric_usage(seeds: Sequence[Choice], cell: CellResults) -> str:
    """How many evaluations were scored, of those that were spent: a search may have ended before its budget."""
    largest = cell.budget
    spent = {f"{s.searcher}-{s.seed}": min(s.evaluations, largest) for s in cell.searches}
    total = sum(spent.get(f"{pick.method}-{pick.seed}", largest) for pick in seeds)
    return f"{sum(pick.scored or 0 for pick in seeds)} of {total}"


def _format_rank_correlation(seeds: Iterable[Choice]) -> str:
    told = [f"{pick.agreement:+.2f}" for pick in seeds if pick.agreement is not None]
    return f" (rank correlation of proxy and metric {' and '.join(told)})" if told else ""


def cost_frame(results: Results) -> pd.DataFrame:
    """What each search took, in seconds: engines built and let go, sampling, evaluation, failures, the harness's rest.

    Of that rest `search_s` is the searcher's own work, its asks and tells; runs of earlier versions did not record it.
    Builds of a replayed cell took their time elsewhere, when the table was recorded: they have none here.
    `saved` are the readings that racing spared, an estimate; `surprises` the candidates that were built again before
    anyone believed them; `disturbed` those whose first readings were thrown away, `unsteady` those whose second ones
    were no better, or that never warmed up.
    """
    return pd.DataFrame(
        [_cost_row(cell, search) for cell in results.cells for search in cell.searches if search.elapsed_s]
    )


def _cost_row(cell: CellResults, search: SearchLog) -> dict[str, Any]:
    total_s = search.elapsed_s[-1]
    spent = {name: search.cost.get(name, 0.0) for name in ("build_s", "sampling_s", "evaluation_s", "failures_s")}
    passed_s = sum(spent.values())
    if "recorded_on" in cell.facts["backend"].get("options", {}):
        passed_s -= spent["build_s"]
        spent["build_s"] = math.nan
    counts = {name: search.cost.get(name, 0) for name in ("readings", "saved", "surprises", "disturbed", "unsteady")}
    return {
        "cell": cell.name, "searcher": search.searcher, "seed": search.seed, "evaluations": search.evaluations,
        "total_s": total_s, **spent, "harness_s": max(0.0, total_s - passed_s),
        "search_s": search.cost.get("searcher_s", math.nan),
        **counts,
    }  # fmt: skip


def curve_frame(cells: Iterable[CellResults]) -> pd.DataFrame:
    """The incumbent after each evaluation of every search, as speedup over the float model by the searches' readings.

    The search's own readings say which placement that is; how fast it is says `CellResults.levels_ms`. So searches that
    have come to one placement stand at one level, and a curve falls where a lucky reading had displaced a better one.
    """
    curves = [_search_curve(cell, search) for cell in cells for search in cell.searches]
    filled = [curve for curve in curves if len(curve)]
    return pd.concat(filled, ignore_index=True) if filled else pd.DataFrame(columns=CURVE_COLUMNS)


def _search_curve(cell: CellResults, search: SearchLog) -> pd.DataFrame:
    base_ms = median_float_ms(cell)
    if base_ms is None or not search.steps:
        return pd.DataFrame(columns=CURVE_COLUMNS)
    first, level_ms = search.steps[0].evaluations, np.full(search.evaluations, np.nan)
    for step in search.steps:  # of an evaluation and its retry the better one, which comes later
        level_ms[step.evaluations - 1] = cell.levels_ms[step.digest]
    figures = {
        "cell": cell.name, "searcher": search.searcher, "seed": search.seed,
        "evaluations": np.arange(1, search.evaluations + 1), "minutes": np.array(search.elapsed_s) / 60,
        "speedup": base_ms / pd.Series(level_ms).ffill(),
    }  # fmt: skip
    return pd.DataFrame(figures, columns=CURVE_COLUMNS)[first - 1 :]


def target_frame(results: Results) -> pd.DataFrame:
    """Evaluations and minutes until the incumbent has a share of the best gain, by the searches' readings.

    The gain is that of the fastest confirmed incumbent of any search of the cell (of any, where none is confirmed), in
    milliseconds. A placement is as fast as its confirmed speedup makes it of the float model's readings, because the
    best of many readings is a lucky one; what was not confirmed is as fast as in the runoff, and what was in neither
    stands at its level (`CellResults.levels_ms`). Median over the seeds with their range; seeds that never came so far
    count as infinitely late, and `reached` of `seeds` did. Cells have no lines where the interval of the best gain
    reaches down to the A/A floor.
    """
    lines = []
    for cell in results.cells:
        searches: dict[str, list[SearchLog]] = {}
        for search in cell.searches:
            searches.setdefault(search.searcher, []).append(search)
        gains = _gains_ms_by_digest(cell)
        for searcher, found in searches.items() if gains else ():
            for share in TARGET_GAIN_FRACTIONS:
                spent = [_cost_to_target(search, gains, share * max(gains.values())) for search in found]
                figures = {"share": share, "seeds": len(spent), "reached": sum(math.isfinite(n) for n, _ in spent)}
                evaluations, minutes = (_median_and_range(values) for values in zip(*spent, strict=True))
                lines.append(
                    {
                        "cell": cell.name, "searcher": searcher, **figures,
                        "evaluations": evaluations.value, "evaluations_low": evaluations.low,
                        "evaluations_high": evaluations.high, "minutes": minutes.value,
                    }
                )  # fmt: skip
    return pd.DataFrame(lines)


def _gains_ms_by_digest(cell: CellResults) -> dict[str, float]:
    """By digest the milliseconds that each incumbent saves; nothing where the best may save no more than the noise."""
    base_ms = median_float_ms(cell)
    steps = {step.digest for search in cell.searches for step in search.steps}
    if base_ms is None or not steps:
        return {}
    confirmed = {
        digest: cell.summaries[digest].speedup.value for digest in steps & (cell.summaries.keys() - {FLOAT_ROW})
    }
    if any(pick.kind == "search" and pick.row == FLOAT_ROW for pick in cell.picks):
        confirmed |= {
            s.digest: 1.0 for search in cell.searches for s in search.steps if s.choices and not any(s.choices)
        }
    read = {digest: cell.runoff.get(digest, base_ms / cell.levels_ms[digest]) for digest in steps}
    speedups = read | confirmed
    met = confirmed
    if any(pick.kind == "search" and pick.row and pick.search_ms is None for pick in cell.picks):
        # a tool's own file was the choice: the best that was evaluated met it in the runoff, and no confirmation
        met = {digest: speedups[digest] for digest in steps if digest in confirmed or digest in cell.runoff}
    known = met or speedups
    fastest = max(known, key=known.__getitem__)
    best, sure = known[fastest], known[fastest]
    if fastest in cell.summaries:  # the highest of many confirmed ones is a lucky one too
        sure = cell.summaries[fastest].speedup.low
    if sure - 1 < max(MIN_CLAIMED_GAIN, cell.floor or 0.0):
        return {}
    return {digest: base_ms * (1 - 1 / min(speedup, best)) for digest, speedup in speedups.items()}


def _cost_to_target(search: SearchLog, gains: Mapping[str, float], wanted_ms: float) -> tuple[float, float]:
    """Evaluations and minutes until the incumbent saved so much; infinite if never."""
    for step in search.steps:
        if gains[step.digest] >= wanted_ms:
            return step.evaluations, step.elapsed_s / 60
    return math.inf, math.inf


def _median_and_range(values: Iterable[float]) -> Interval:
    ordered = sorted(values)
    middle = float(np.median(ordered)) if math.isfinite(ordered[len(ordered) // 2]) else math.inf
    return Interval(value=middle, low=ordered[0], high=ordered[-1])


def median_float_ms(cell: CellResults) -> float | None:
    """The float model's latency in the searches of a cell, the median of their readings; else the confirmed one."""
    found = [search.float_ms for search in cell.searches if search.float_ms is not None]
    return float(np.median(found)) if found else _confirmed_float_ms(cell)


def search_float_ms(cell: CellResults, search: SearchLog) -> float | None:
    """The float model's latency in this search; where it was no seed of it, the confirmed one."""
    return _confirmed_float_ms(cell) if search.float_ms is None else search.float_ms


def _confirmed_float_ms(cell: CellResults) -> float | None:
    summary = cell.summaries.get(FLOAT_ROW)
    return None if summary is None else summary.latency_ms.value
