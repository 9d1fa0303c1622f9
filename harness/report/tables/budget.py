"""Budget and target tables: speedup by searcher and budget, and evaluations until a share of the best gain."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from harness.base.statistics import MIN_CLAIMED_GAIN, Interval
from harness.report.frames.confirmation import confirmed_choices, interval_over_seeds
from harness.report.frames.curves import median_float_ms
from harness.report.table_spec import Column, Row, TableSpec, interval_column, text_column
from harness.results.artifacts import FLOAT_ROW
from harness.results.folder import Results, TaskResults
from harness.results.search_log import SearchLog

TARGET_GAIN_SHARES = (0.95, 0.99)
NEVER_REACHED = "never"


def _format_evaluations(row: Row) -> str:
    if not row["reached"]:
        return NEVER_REACHED
    middle, low, high = (_format_spent(row[f"evaluations{end}"], "{:.0f}") for end in ("", "_low", "_high"))
    text = middle if row["seeds"] == 1 else f"{middle} [{low}, {high}]"
    return f"{text} ({_format_spent(row['minutes'], '{:.2f} min')})"


def _format_spent(value: float, form: str) -> str:
    return form.format(value) if math.isfinite(value) else NEVER_REACHED


BUDGET = TableSpec(
    name="budget",
    title="Budgets",
    columns=(text_column("task"), text_column("searcher")),
    caption=(
        "Confirmed speedup of the incumbent over the float baseline by number of evaluations: median over seeds [95 % "
        "interval of the median; below six seeds, the widest limits of the seeds' own 95 % intervals]. Bold: the "
        "highest median of a task at a budget; underlined: its interval overlaps that of the highest. Incumbents keep "
        "the bound on accuracy by the search's own measurements; the main table has the final accuracy."
    ),
    group_by=("task", "searcher"),
    spread_by="budget",
    spread=(interval_column("{budget} evaluations", "speedup", "low", "high", marked=True),),
    last=(("seeds", lambda rows: str(max(row["seeds"] for row in rows))),),
    timed=True,
    assumes_budget=True,
    source="choices",
)
TARGETS = TableSpec(
    name="targets",
    title="Evaluations to a target",
    columns=(text_column("task"), text_column("searcher")),
    caption=(
        "Evaluations (minutes) until the incumbent had this share of the best gain of any search of the task: median "
        "over seeds [range, if there are several seeds], and how many of the seeds reached it. Incumbent speed: "
        "confirmed latency if available, else that of the final selection, else the median search reading (capped at "
        "the best gain). Each search's own readings define its incumbents, so a search whose choice only the final "
        'selection showed to be that fast has "never". Initial placements count. The best gain is a confirmed one; '
        "tasks in which its interval includes the noise floor are left out, since their gain is not certain."
    ),
    group_by=("task", "searcher"),
    spread_by="share",
    spread=(
        Column("to {share:.0%} of the best gain", _format_evaluations),
        Column("reached {share:.0%}", lambda row: f"{row['reached']}/{row['seeds']}"),
    ),
    timed=True,
    assumes_budget=True,
)


def budget_frame(results: Results) -> pd.DataFrame:
    """Return the confirmed speedup of the choices by searcher and budget; see `interval_over_seeds`.

    Columns task, model, searcher, budget, speedup, low, high, seeds (their number), best and tied. `best`: the highest
    median of a task at a budget, if its limits exclude 1; `tied`: rows whose interval overlaps that of the best. Rows
    with limits below 1 are slower than the float model and never marked.
    """
    lines = []
    for task in results.tasks:
        for (searcher, budget), rows in confirmed_choices(task).items():
            middle = interval_over_seeds([task.summaries[row].speedup for row in rows.values()])
            lines.append(
                {
                    "task": task.name, "model": task.facts["model"], "searcher": searcher, "budget": budget,
                    "speedup": middle.value, "low": middle.low, "high": middle.high, "seeds": len(rows),
                }
            )  # fmt: skip
    columns = ["task", "model", "searcher", "budget", "speedup", "low", "high", "seeds"]
    frame = pd.DataFrame(lines, columns=columns)
    groups = [frame["task"], frame["budget"]]
    faster = frame["speedup"].where(frame["low"] > 1.0)
    best = faster == faster.groupby(groups).transform("max")
    lowest = frame["low"].where(best).groupby(groups).transform("max").fillna(1.0)
    return frame.assign(best=best, tied=(frame["high"] >= lowest) & (frame["high"] >= 1.0))


def target_frame(results: Results) -> pd.DataFrame:
    """Return evaluations and minutes until the incumbent has a share of the best gain, by the searches' readings.

    The best gain is that of the fastest confirmed incumbent of any search of the task (of any, if none is confirmed),
    in milliseconds. The gain of a placement comes from its confirmed speedup, since the best of many readings is low by
    chance; else from its speedup in the final selection; else from `TaskResults.latencies_ms`. Figures are medians over
    seeds with their range, where seeds that never reach the share count as infinite; `reached` of `seeds` reach it.
    Tasks whose interval of the best gain includes the noise floor have no row; a frame without rows has no columns.
    """
    lines = []
    for task in results.tasks:
        searches: dict[str, list[SearchLog]] = {}
        for search in task.searches:
            searches.setdefault(search.searcher, []).append(search)
        gains = _gains_ms(task)
        for searcher, logs in searches.items() if gains else ():
            for share in TARGET_GAIN_SHARES:
                costs = [_cost_to_target(log, gains, share * max(gains.values())) for log in logs]
                figures = {"share": share, "seeds": len(costs), "reached": sum(math.isfinite(n) for n, _ in costs)}
                evaluations, minutes = (_median_and_range(values) for values in zip(*costs, strict=True))
                lines.append(
                    {
                        "task": task.name, "searcher": searcher, **figures,
                        "evaluations": evaluations.value, "evaluations_low": evaluations.low,
                        "evaluations_high": evaluations.high, "minutes": minutes.value,
                    }
                )  # fmt: skip
    return pd.DataFrame(lines)


def _gains_ms(task: TaskResults) -> dict[str, float]:
    """Return the time in ms that each incumbent saves, by digest; empty if the largest may be only noise."""
    base_ms = median_float_ms(task)
    incumbents = [step for search in task.searches for step in search.incumbents]
    digests = {step.digest for step in incumbents}
    if base_ms is None or not digests:
        return {}
    confirmed = {name: task.summaries[name].speedup.value for name in digests & (task.summaries.keys() - {FLOAT_ROW})}
    if any(pick.kind == "search" and pick.row == FLOAT_ROW for pick in task.picks):
        confirmed |= {step.digest: 1.0 for step in incumbents if step.is_float}
    read = {digest: task.selection_speedups.get(digest, base_ms / task.latencies_ms[digest]) for digest in digests}
    speedups = read | confirmed
    compared = confirmed
    if any(pick.kind == "search" and pick.row and pick.search_ms is None for pick in task.picks):
        # A tool's own file was the choice: the best evaluated placement was compared with it in the final selection.
        compared = {
            digest: speedups[digest] for digest in digests if digest in confirmed or digest in task.selection_speedups
        }
    candidates = compared or speedups
    fastest = max(candidates, key=candidates.__getitem__)
    best = certain = candidates[fastest]
    if fastest in task.summaries:  # the highest of many confirmed figures is high by chance, too
        certain = task.summaries[fastest].speedup.low
    if certain - 1 < max(MIN_CLAIMED_GAIN, task.noise_floor or 0.0):
        return {}
    return {digest: base_ms * (1 - 1 / min(speedup, best)) for digest, speedup in speedups.items()}


def _cost_to_target(search: SearchLog, gains: Mapping[str, float], target_ms: float) -> tuple[float, float]:
    for step in search.incumbents:
        if gains[step.digest] >= target_ms:
            return step.evaluations, step.elapsed_s / 60
    return math.inf, math.inf


def _median_and_range(values: Iterable[Any]) -> Interval:
    ordered = sorted(values)
    middle = float(np.median(ordered)) if math.isfinite(ordered[len(ordered) // 2]) else math.inf
    return Interval(value=middle, low=ordered[0], high=ordered[-1])
