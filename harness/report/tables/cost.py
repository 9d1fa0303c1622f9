"""Tables of cost and noise: where the searches spent their time, and how much latencies vary."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import pandas as pd

from harness.report.report_table import MISSING_CELL, ReportTable
from harness.report.table_spec import Row, TableSpec, number_column, text_column
from harness.results.folder import Results, TaskResults
from harness.results.search_log import SearchLog


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


COST = TableSpec(
    name="cost",
    title="Cost of the searches",
    columns=(text_column("task"), text_column("searcher")),
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


def cost_table(results: Results) -> ReportTable:
    """Return the table of times, with the numbers of failed evaluations as notes."""
    cost = cost_frame(results)
    spec = COST
    if len(cost) and cost["build_s"].isna().any():
        spec = replace(spec, caption=f"{COST.caption} A dash: replayed builds, whose time is that of the recording.")
    if len(cost) and cost["search_s"].isna().all():
        spec = replace(spec, last=tuple(column for column in COST.last if column[0] != "search"))
    return spec.build(cost, chain(_phase_notes(results), _failure_notes(results)))


def cost_frame(results: Results) -> pd.DataFrame:
    """Return a row per search with seconds of its parts, numbers of readings, and numbers of candidates.

    `total_s` has the parts `build_s` (with release; NaN if builds are replayed), `sampling_s`, `evaluation_s`,
    `failures_s` and `harness_s`, of which the searcher took `search_s` (NaN in runs of earlier versions). `saved` is an
    estimate of the readings that racing saved. `rebuilt` candidates were built again; of `disturbed` ones the first
    readings were discarded; of `unstable` ones the second were disturbed too, or the latency was never steady.
    """
    searches = [(task, search) for task in results.tasks for search in task.searches if search.elapsed_s]
    return pd.DataFrame([_cost_row(task, search) for task, search in searches])


def _cost_row(task: TaskResults, search: SearchLog) -> dict[str, Any]:
    total_s = search.elapsed_s[-1]
    spent = {name: search.cost.get(name, 0.0) for name in ("build_s", "sampling_s", "evaluation_s", "failures_s")}
    passed_s = sum(spent.values())
    if "recorded_on" in task.facts["backend"].get("options", {}):
        passed_s -= spent["build_s"]
        spent["build_s"] = math.nan
    counts = {name: search.cost.get(name, 0) for name in ("readings", "saved", "rebuilt", "disturbed", "unstable")}
    return {
        "task": task.name, "searcher": search.searcher, "seed": search.seed, "evaluations": search.evaluations,
        "total_s": total_s, **spent, "harness_s": max(0.0, total_s - passed_s),
        "search_s": search.cost.get("searcher_s", math.nan),
        **counts,
    }  # fmt: skip


def _phase_notes(results: Results) -> Iterator[str]:
    for task in results.tasks:
        if total_s := sum(task.phases_s.values()):
            shares = ", ".join(f"{phase} {seconds / total_s:.0%}" for phase, seconds in task.phases_s.items())
            yield f"Wall-clock of {task.name}, {total_s / 60:.1f} minutes: {shares}."


def _failure_notes(results: Results) -> Iterator[str]:
    for task in results.tasks:
        counts = [
            f"{search.name} {', '.join(f'{n} at {stage}' for stage, n in search.failures.items())}"
            for search in task.searches
            if search.failures
        ]
        if counts:
            yield f"Failed evaluations, {task.name}: {'; '.join(counts)}."
