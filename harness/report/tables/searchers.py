"""Tables of the searches: speedup by budget, evaluations to a target, cost, and searchers compared over tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from harness.base.statistics import MIN_CLAIMED_GAIN, median_ci
from harness.base.text import pluralize
from harness.report.frames import (
    confirmed_choices,
    curve_frame,
    hypervolume_frame,
    interval_over_seeds,
    search_float_ms,
    speedups_at,
)
from harness.report.report_table import (
    MISSING_CELL,
    Column,
    ReportTable,
    Row,
    TableSpec,
    format_interval,
    frame_rows,
    interval_column,
    number_column,
    text_column,
)
from harness.report.statistics import (
    FriedmanRanks,
    compare_pairs,
    compute_ranks,
    score_against_random,
    smallest_p_value,
)
from harness.results.artifacts import FLOAT_ROW
from harness.results.folder import Results, TaskResults

TARGET_GAIN_SHARES = (0.95, 0.99)
NEVER_REACHED = "never"
RANDOM_SEARCHER = "random"
SEARCH_LATENCY_NOTE = (
    "The latency of a placement is the median over all searches of the task that measured it, so it is the same for "
    "each of them."
)
TASK_AND_SEARCHER = (text_column("task"), text_column("searcher"))


def _format_evaluations(row: Row) -> str:
    def shown(key: str, form: str = "{:.0f}") -> str:
        return form.format(row[key]) if math.isfinite(row[key]) else NEVER_REACHED

    if not row["reached"]:
        return NEVER_REACHED
    limits = "" if row["seeds"] == 1 else f" [{shown('evaluations_low')}, {shown('evaluations_high')}]"
    return f"{shown('evaluations')}{limits} ({shown('minutes', '{:.2f} min')})"


def _sum(key: str) -> Callable[[Sequence[Row]], str]:
    return lambda rows: str(sum(row[key] for row in rows))


def _share(key: str) -> Callable[[Sequence[Row]], str]:
    def shown(rows: Sequence[Row]) -> str:
        total_s, spent_s = (sum(row[name] for row in rows) for name in ("total_s", key))
        return f"{spent_s / total_s:.1%}" if total_s and not math.isnan(spent_s) else MISSING_CELL

    return shown


def _saved_share(rows: Sequence[Row]) -> str:
    saved = sum(row["saved"] for row in rows)
    total = saved + sum(row["readings"] for row in rows)
    return f"{saved / total:.1%}" if total else MISSING_CELL


BUDGET = TableSpec(
    name="budget",
    title="Budgets",
    columns=TASK_AND_SEARCHER,
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
    columns=TASK_AND_SEARCHER,
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
    source="confirmed trials",
)
COST = TableSpec(
    name="cost",
    title="Cost of the searches",
    columns=TASK_AND_SEARCHER,
    caption=(
        "Wall-clock of all seeds of a searcher from the first proposal, without set-up, calibration, final selection "
        "and confirmation, and shares of it. Build: with the release of engines, if the run recorded it. Harness: the "
        "time left after build, sampling, evaluation and failed candidates; search: the searcher's part of it. "
        "With several workers that build in parallel, times add up to more than the wall-clock, and harness may be 0. "
        "Readings saved: estimated share of readings that racing saved. Built again: candidates that beat the "
        "incumbent by more than noise. Taken again: candidates whose first readings drifted or were disturbed, with "
        "those built again for it; unstable: the last readings were too, or never warmed up."
    ),
    group_by=("task", "searcher"),
    last=(
        ("seeds", lambda rows: str(len(rows))),
        ("evaluations", _sum("evaluations")),
        ("minutes", lambda rows: f"{sum(row['total_s'] for row in rows) / 60:.1f}"),
        *((part, _share(f"{part}_s")) for part in ("build", "sampling", "evaluation", "failures", "harness", "search")),
        ("readings saved", _saved_share),
        ("built again", _sum("rebuilt")),
        ("taken again", _sum("disturbed")),
        ("unstable", _sum("unstable")),
    ),
)
VARIANCE = TableSpec(
    name="variance",
    title="Where latency varies",
    columns=(
        text_column("task"),
        number_column("rows"),
        *(number_column(f"between {part}s", part, "{:.1%}") for part in ("inference", "turn", "build")),
    ),
    caption=(
        "Relative standard deviation of single inferences within a turn, of turns within a build, and of fresh builds: "
        "nested analysis of variance on logarithms, median over the rows of a task."
    ),
    source="confirmed rows",
)
SCORE = TableSpec(
    name="score",
    title="Score against random search",
    columns=(*TASK_AND_SEARCHER, interval_column("score [CI]", "score", "low", "high"), number_column("seeds")),
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


def _median_volume(rows: Sequence[Row]) -> str:
    middle = median_ci([row["volume"] for row in rows])
    return format_interval(middle.value, middle.low, middle.high, 3)


VOLUME = TableSpec(
    name="volume",
    title="Front of latency and accuracy",
    columns=TASK_AND_SEARCHER,
    caption=(
        "Hypervolume of latency and accuracy at the end of the search, as a share of the box between the ideal (no "
        "time, no loss) and the float model's latency with the largest loss of any search of the task: median over "
        "seeds [95 % interval; the range below six seeds]. Scored: evaluations with a measured metric, all seeds. "
        f"{SEARCH_LATENCY_NOTE}"
    ),
    group_by=("task", "searcher"),
    last=(
        ("hypervolume [CI]", _median_volume),
        ("scored", _sum("scored")),
        ("seeds", lambda rows: str(len(rows))),
    ),
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
            names = (task.name, task.facts["model"], searcher, budget)
            lines.append((*names, middle.value, middle.low, middle.high, len(rows)))
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
        gains = _gains_ms(task)
        for searcher in dict.fromkeys(search.searcher for search in task.searches if gains):
            logs = [search for search in task.searches if search.searcher == searcher]
            for share in TARGET_GAIN_SHARES:
                target_ms = share * max(gains.values())
                reached = (next((s for s in log.incumbents if gains[s.digest] >= target_ms), None) for log in logs)
                costs = [(math.inf, math.inf) if s is None else (s.evaluations, s.elapsed_s / 60) for s in reached]
                evaluations, minutes = (sorted(values) for values in zip(*costs, strict=True))
                lines.append(
                    {
                        "task": task.name, "searcher": searcher, "share": share, "seeds": len(costs),
                        "reached": sum(map(math.isfinite, minutes)), "evaluations": _median(evaluations),
                        "evaluations_low": evaluations[0], "evaluations_high": evaluations[-1],
                        "minutes": _median(minutes),
                    }
                )  # fmt: skip
    return pd.DataFrame(lines)


def _median(ordered: Sequence[float]) -> float:
    return float(np.median(ordered)) if math.isfinite(ordered[len(ordered) // 2]) else math.inf


def _gains_ms(task: TaskResults) -> dict[str, float]:
    """Return the time in ms that each incumbent saves, by digest; empty if the largest may be only noise."""
    base_ms = search_float_ms(task)
    incumbents = [step for search in task.searches for step in search.incumbents]
    digests = {step.digest for step in incumbents}
    if base_ms is None or not digests:
        return {}
    confirmed = {name: task.summaries[name].speedup.value for name in digests & (task.summaries.keys() - {FLOAT_ROW})}
    if any(pick.kind == "search" and pick.row == FLOAT_ROW for pick in task.picks):
        confirmed |= {step.digest: 1.0 for step in incumbents if step.is_float}
    read = {digest: task.selection_speedups.get(digest, base_ms / task.latencies_ms[digest]) for digest in digests}
    speedups, compared = read | confirmed, set(confirmed)
    if any(pick.kind == "search" and pick.row and pick.search_ms is None for pick in task.picks):
        # A tool's own file was the choice: the best evaluated placement was compared with it in the final selection.
        compared |= digests & task.selection_speedups.keys()
    candidates = {digest: speedups[digest] for digest in digests if digest in compared} or speedups
    fastest = max(candidates, key=candidates.__getitem__)
    best = certain = candidates[fastest]
    if fastest in task.summaries:  # the highest of many confirmed figures is high by chance, too
        certain = task.summaries[fastest].speedup.low
    if certain - 1 < max(MIN_CLAIMED_GAIN, task.noise_floor or 0.0):
        return {}
    return {digest: base_ms * (1 - 1 / min(speedup, best)) for digest, speedup in speedups.items()}


def cost_table(results: Results) -> ReportTable:
    """Return the table of times, with phases of each task and the numbers of failed evaluations as notes."""
    cost, spec, notes = cost_frame(results), COST, []
    if len(cost) and cost["build_s"].isna().any():
        spec = replace(spec, caption=f"{COST.caption} A dash: replayed builds, whose time is that of the recording.")
    if len(cost) and cost["search_s"].isna().all():
        spec = replace(spec, last=tuple(column for column in COST.last if column[0] != "search"))
    for task in results.tasks:
        if total_s := sum(task.phases_s.values()):
            shares = ", ".join(f"{phase} {seconds / total_s:.0%}" for phase, seconds in task.phases_s.items())
            notes.append(f"Wall-clock of {task.name}, {total_s / 60:.1f} minutes: {shares}.")
    for task in results.tasks:
        stages = {s.name: ", ".join(f"{n} at {stage}" for stage, n in s.failures.items()) for s in task.searches}
        if counts := "; ".join(f"{name} {text}" for name, text in stages.items() if text):
            notes.append(f"Failed evaluations, {task.name}: {counts}.")
    return spec.build(cost, notes)


def cost_frame(results: Results) -> pd.DataFrame:
    """Return a row per search with seconds of its parts, numbers of readings, and numbers of candidates.

    `total_s` has the parts `build_s` (with release; NaN if builds are replayed), `sampling_s`, `evaluation_s`,
    `failures_s` and `harness_s`, of which the searcher took `search_s` (NaN in runs of earlier versions). `saved` is an
    estimate of the readings that racing saved. `rebuilt` candidates were built again; of `disturbed` ones the first
    readings were discarded; of `unstable` ones the second were disturbed too, or the latency was never steady.
    """
    lines = []
    for task, search in ((each, search) for each in results.tasks for search in each.searches if search.elapsed_s):
        total_s, cost = search.elapsed_s[-1], search.cost
        spent = {name: cost.get(name, 0.0) for name in ("build_s", "sampling_s", "evaluation_s", "failures_s")}
        passed_s = sum(spent.values())
        if "recorded_on" in task.facts["backend"].get("options", {}):
            passed_s -= spent["build_s"]
            spent["build_s"] = math.nan
        lines.append(
            {
                "task": task.name, "searcher": search.searcher, "seed": search.seed, "evaluations": search.evaluations,
                "total_s": total_s, **spent, "harness_s": max(0.0, total_s - passed_s),
                "search_s": cost.get("searcher_s", math.nan),
                **{name: cost.get(name, 0) for name in ("readings", "saved", "rebuilt", "disturbed", "unstable")},
            }
        )  # fmt: skip
    return pd.DataFrame(lines)


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
    lines, uses = [], results.stored.uses
    for task in (each for each in results.tasks if each.goal.minimize == "latency"):
        curves = curve_frame([task])
        searchers = list(dict.fromkeys(curves["searcher"]))
        random = next((name for name in searchers if uses.get(name, (name,))[0] == RANDOM_SEARCHER), None)
        if random is None:
            continue
        initial: dict[str, set[int]] = {}
        for search in task.searches:
            initial.setdefault(search.searcher, set()).add(search.initial)
        first, last = max(initial[random]), int(curves["evaluations"].max())
        # Latency of the incumbent over that of the float model: [seed, evaluation]; 1 before the first incumbent.
        latency = {}
        for name, part in curves.groupby("searcher", sort=False):
            speedups = part.pivot(index="seed", columns="evaluations", values="speedup").reindex(
                columns=range(1, last + 1)
            )
            latency[str(name)] = 1 / np.ascontiguousarray(speedups.ffill(axis=1).fillna(1.0))
        best = min(float(values.min()) for values in latency.values())
        for name, values in latency.items():
            scores = score_against_random(values, latency[random].mean(axis=0), best, first)
            warm = "qdq_baseline" in uses.get(name, ("", {}))[1]
            if name != random and initial[name] == {first} and not warm and not np.isnan(scores).any():
                middle = median_ci(scores)
                lines.append((task.name, name, len(scores), middle.value, middle.low, middle.high))
    return pd.DataFrame(lines, columns=["task", "searcher", "seeds", "score", "low", "high"])


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
    pairs, ranks = pair_frame(results), rank_searchers(results)
    most = int(pairs["blocks"].max()) if len(pairs) else 0
    counts = f"{pluralize(most, 'task')} and {pluralize(len(pairs), 'pair')}"
    notes = [f"The smallest p (Holm) that {counts} can give is {smallest_p_value(most, len(pairs)):.3g}."]
    if ranks is not None:
        means = ", ".join(f"{name} {rank:.2f}" for name, rank in ranks.mean.items())
        notes.append(f"Mean ranks over the {ranks.blocks} tasks that have all searchers: {means}.")
        if ranks.untested_reason:
            notes.append(f"{ranks.untested_reason[0].upper()}{ranks.untested_reason[1:]}.")
        else:
            notes.append(
                f"Friedman's test: p = {ranks.p_value:.3g}; Nemenyi's critical difference of mean ranks at 5 %: "
                f"{ranks.critical_difference:.2f}."
            )
    return PAIRS.build(pairs, notes)
