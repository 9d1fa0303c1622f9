"""Frames of the confirmation: its samples, choices by searcher and budget, paired ratios, ties, and variance."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from harness.base.statistics import Interval, block_ci, median_ci, paired_ratio_ci, speedup_verdict
from harness.measure.turn_log import BuildKey, Turn, TurnEvent, TurnMatrix
from harness.results.artifacts import FLOAT_ROW
from harness.results.folder import Results, TaskResults

#: Median latency in ms of each turn, by worker (build, group).
Turns = Mapping[BuildKey, Mapping[int, float]]
MIN_SEEDS_FOR_INTERVAL = 6  # with fewer, no interval of the median reaches a confidence of 95 %


def valid_turns(events: Iterable[TurnEvent]) -> list[Turn]:
    """Return the turns of the last worker of each build and group, without failed rows; see `TurnMatrix`."""
    valid: dict[BuildKey, dict[str, dict[int, Turn]]] = defaultdict(lambda: defaultdict(dict))
    workers: dict[BuildKey, int] = {}
    for event in events:
        key = (event.build, event.group)
        if isinstance(event, Turn):
            if event.worker > workers.setdefault(key, event.worker):
                valid.pop(key)
                workers[key] = event.worker
            valid[key][event.row][event.round] = event
        else:
            valid[key].pop(event.row, None)
    return [turn for rows in valid.values() for turns in rows.values() for turn in turns.values()]


def sample_frame(tasks: Iterable[TaskResults]) -> pd.DataFrame:
    """Return every valid sample: columns task, row, build, group, round, sample, latency_ms."""
    lines = [
        (task.name, turn.row, turn.build, turn.group, turn.round, number, latency_ms)
        for task in tasks
        for turn in valid_turns(task.events)
        for number, latency_ms in enumerate(turn.samples_ms)
    ]
    return pd.DataFrame(lines, columns=["task", "row", "build", "group", "round", "sample", "latency_ms"])


def confirmed_choices(task: TaskResults) -> dict[tuple[str, int], dict[int, str]]:
    """Return the confirmed row that each seed chose, by searcher and budget, then by seed."""
    rows: dict[tuple[str, int], dict[int, str]] = {}
    for pick in task.picks:
        if pick.kind != "search" or pick.rank or pick.seed is None or pick.budget is None:
            continue
        if pick.row in task.summaries:
            rows.setdefault((pick.method, pick.budget), {})[pick.seed] = pick.row
    return rows


def speedups_at(task: TaskResults, budget: int) -> dict[str, list[float]]:
    """Return the confirmed speedups of the choices at a budget by searcher, one per seed."""
    return {
        searcher: [task.summaries[row].speedup.value for row in rows.values()]
        for (searcher, at), rows in confirmed_choices(task).items()
        if at == budget
    }


def interval_over_seeds(figures: Sequence[Interval]) -> Interval:
    """Return the median over seeds with its 95 % interval.

    Below `MIN_SEEDS_FOR_INTERVAL` seeds, which give no 95 % interval of their median (Hettmansperger and Sheather
    1986), the limits are the lowest and the highest limit of the single seeds.
    """
    middle = median_ci([figure.value for figure in figures])
    if len(figures) >= MIN_SEEDS_FOR_INTERVAL:
        return middle
    return replace(middle, low=min(figure.low for figure in figures), high=max(figure.high for figure in figures))


def ratio_over_seeds(ratios: Sequence[Interval]) -> Interval:
    """Return `interval_over_seeds` of ratios; its limits are 0 and infinity if a seed has no finite ones (one turn)."""
    middle = interval_over_seeds(ratios)
    bounded = all(math.isfinite(ratio.high) for ratio in ratios)
    return middle if bounded else replace(middle, low=0.0, high=math.inf)


def statistical_ties(task: TaskResults, best: str) -> frozenset[str]:
    """Return the rows whose confirmed latency is not distinguishable from that of the row `best`, with `best` itself.

    The rule is that of the verdicts: the interval of the ratio contains 1, or the difference is below 1 % or below the
    noise floor.
    """
    turns = TurnMatrix(task.events).turns
    others = {
        row: speedup_verdict(ratio, task.noise_floor or 0.0)
        for row in task.summaries
        if row != best and (ratio := paired_ratio(turns, best, row)) is not None
    }
    return frozenset({best, *(row for row, verdict in others.items() if verdict == "tie")})


def paired_ratio(turns: Mapping[str, Turns], row: str, other: str) -> Interval | None:
    """Return the latency of `other` over that of `row`, both confirmed; None if no build has both.

    `turns` has the turns of each row. Rows of one worker are paired turn by turn; rows of different workers by build,
    each over its own baseline. The ratio of a row to itself is exactly 1.
    """
    if row == other:
        return Interval(value=1.0, low=1.0, high=1.0)
    shared = [key for key in turns.get(row, {}) if key in turns.get(other, {})]
    pairs = [_common_turns(turns[other][key], turns[row][key]) for key in shared]
    if pairs := [pair for pair in pairs if pair[0]]:
        return paired_ratio_ci([slow for slow, _ in pairs], [fast for _, fast in pairs])
    speedups, other_speedups = (_speedup_by_build(turns, name) for name in (row, other))
    builds = sorted(speedups.keys() & other_speedups.keys())
    return block_ci([[speedups[build] / other_speedups[build]] for build in builds]) if builds else None


def _common_turns(one: Mapping[int, float], two: Mapping[int, float]) -> tuple[list[float], list[float]]:
    both = sorted(one.keys() & two.keys())
    return [one[number] for number in both], [two[number] for number in both]


def _speedup_by_build(turns: Mapping[str, Turns], row: str) -> dict[int, float]:
    speedups = {}
    for key, row_turns in turns.get(row, {}).items():
        base_ms, row_ms = _common_turns(turns.get(FLOAT_ROW, {}).get(key, {}), row_turns)
        if base_ms:
            speedups[key[0]] = float(np.median(np.divide(base_ms, row_ms)))
    return speedups


def variance_frame(results: Results) -> pd.DataFrame:
    """Return relative standard deviations of `inference`, `turn` and fresh `build`, a row per task.

    Each is the median over the task's rows (`rows`: their number). Analysis of variance on logarithms, samples nested
    in turns in builds, by the method of moments: the variance of the means of a level minus that of the level below
    (Kalibera and Jones, "Rigorous benchmarking in reasonable time", ISMM 2013, section 6). Negative ones count as 0.
    """
    lines = []
    for task in results.tasks:
        rows: dict[str, dict[BuildKey, list[tuple[float, ...]]]] = defaultdict(lambda: defaultdict(list))
        for turn in valid_turns(task.events):
            rows[turn.row][turn.build, turn.group].append(turn.samples_ms)
        parts = [part for builds in rows.values() if (part := _variance_components(builds)) is not None]
        if parts:
            middle = dict(zip(("inference", "turn", "build"), np.median(parts, axis=0).tolist(), strict=True))
            lines.append({"task": task.name, "rows": len(parts), **middle})
    return pd.DataFrame(lines, columns=["task", "rows", "inference", "turn", "build"])


def _variance_components(builds: Mapping[BuildKey, list[tuple[float, ...]]]) -> list[float] | None:
    """Return the standard deviations of inference, turn and build; None without two builds of two turns each."""
    logs = [[np.log(turn) for turn in turns if len(turn) > 1] for turns in builds.values()]
    logs = [turns for turns in logs if len(turns) > 1]
    if len(logs) < 2:
        return None
    within = float(np.mean([turn.var(ddof=1) for turns in logs for turn in turns]))
    samples = float(np.mean([len(turn) for turns in logs for turn in turns]))
    means = [[float(turn.mean()) for turn in turns] for turns in logs]
    between_turns = float(np.mean([np.var(turns, ddof=1) for turns in means]))
    per_build = float(np.mean([len(turns) for turns in means]))
    between_builds = float(np.var([np.mean(turns) for turns in means], ddof=1))
    turn = max(0.0, between_turns - within / samples)
    build = max(0.0, between_builds - between_turns / per_build)
    return [math.sqrt(variance) for variance in (within, turn, build)]
