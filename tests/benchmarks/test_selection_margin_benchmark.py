"""Whether a final selection should hand over a start unless the leader is well ahead of it.

Run with `pytest tests/benchmarks/test_selection_margin_benchmark.py --benchmark-enable -s`; it takes a minute and
needs no quiet machine, for it looks at committed tables: every choice of `auto` that was confirmed with starts which
met it in the final selection. For each lead that the choice must have over the best of these, the figures of
docs/explanation/measurement.md: how the confirmed speedups of what would have been handed over compare with those of
the higher reading, and how often a start was more than 1 % faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from harness.base.statistics import MIN_CLAIMED_GAIN
from harness.measure.elimination import build_variance_slack
from harness.results.artifacts import FLOAT_ROW
from harness.results.folder import TaskResults, load
from harness.results.journal import read_journal
from harness.results.lines import stored_path
from harness.results.search_log import iter_evaluations
from harness.results.turns import FINAL_SELECTION_LOG_NAME, median_speedups, read_comparison

pytestmark = pytest.mark.slow
RESULTS = Path(__file__).parents[2] / "results"


class Met(NamedTuple):
    """Speedup over float in the final selection, and confirmed."""

    read: float
    confirmed: float


class Choice(NamedTuple):
    """What a search handed over, and the starts that met it."""

    own: Met
    is_start: bool
    starts: list[Met]
    noise_floor: float


def choices(task: TaskResults) -> Iterator[Choice]:
    read = median_speedups(read_comparison(task.folder / FINAL_SELECTION_LOG_NAME), FLOAT_ROW)
    met = {row: Met(read[row], task.summaries[row].speedup.value) for row in read.keys() & task.summaries.keys()}
    for pick in task.picks:
        journal = task.folder / "runs" / f"{pick.method}-{pick.seed}.jsonl"
        if (
            pick.kind != "search"
            or pick.rank
            or pick.method != "auto"
            or pick.row not in met
            or not stored_path(journal)
        ):
            continue
        found = (
            trial for trial in iter_evaluations(read_journal(journal), task.goal) if trial.evaluations <= pick.budget
        )
        starts = {trial.digest for trial in found if trial.origin.startswith("initial:")}
        if known := [met[start] for start in starts & met.keys()]:
            yield Choice(met[pick.row], pick.row in starts, known, max(MIN_CLAIMED_GAIN, task.noise_floor or 0.0))


def test_confirmed_speedup_by_selection_margin(benchmark):
    if benchmark.disabled:
        pytest.skip("it only prints figures of committed tables; enable benchmarks")
    folders = sorted({path.parents[1] for path in RESULTS.glob(f"*/*/{FINAL_SELECTION_LOG_NAME}*")})
    tasks = (task for folder in folders for task in load(folder).tasks)
    live = (
        task
        for task in tasks
        if stored_path(task.folder / FINAL_SELECTION_LOG_NAME) and task.goal.minimize == "latency"
    )
    found = [choice for task in live for choice in choices(task)]
    print(f"\n{len(found)} choices of auto")
    for words, lead in (
        ("the higher reading", lambda noise_floor: 0.0),
        ("a lead of 1 %", lambda noise_floor: 0.01),
        ("a lead of 3 %", lambda noise_floor: 0.03),
        ("beyond what builds differ by", lambda noise_floor: np.expm1(build_variance_slack(3, noise_floor))),
        ("beyond the floor", lambda noise_floor: noise_floor),
        ("always a start", lambda noise_floor: np.inf),
    ):
        given = []
        for own, is_start, starts, noise_floor in found:
            best = max(starts)
            given.append(own if is_start or own.read > best.read * (1 + lead(noise_floor)) else best)
        ratios = [one.confirmed / choice.own.confirmed for one, choice in zip(given, found, strict=True)]
        behind = [
            one.confirmed / max(start.confirmed for start in choice.starts)
            for one, choice in zip(given, found, strict=True)
        ]
        print(
            f"{words}: {np.exp(np.mean(np.log(ratios))):.4f} of what was handed over in the mean, "
            f"{sum(ratio < 0.99 for ratio in behind)} more than 1 % behind the best start, {min(behind):.3f} at least"
        )
    assert found
