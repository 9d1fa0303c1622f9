"""Analysis of journals: evaluations, their order, incumbents and budgets."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from incumbents import iter_incumbents

from harness.measure.records import Failed, Measured, Outcome, Proposal, TrialResult
from harness.results.journal import RETRY_ORIGIN, JournalEntry
from harness.results.search_log import Goal, iter_counted, iter_evaluations, state_at_budgets
from search.pareto import front_numbers

LOST = Failed(stage="crash", reason="the worker was lost")
FRONT = Goal(metric="map", reference=0.5, max_drop=None, minimize="pareto", float_ms=10.0)


def outcome(latency_ms: float, **metrics: float) -> Measured:
    return Measured(samples_ms=(latency_ms,) * 5, build_s=1.0, measure_s=1.0, metrics=metrics)


def entry(
    number: int, found: Outcome | None, elapsed_s: float, origin: str = "searcher", digest: str = ""
) -> JournalEntry:
    asked = Proposal(number=number, choices=(number,), digest=digest or str(number), origin=origin)
    told = None if found is None else TrialResult(number=number, outcome=found, elapsed_s=elapsed_s)
    return JournalEntry(proposal=asked, result=told)


@pytest.fixture
def entries():
    """Two evaluations (the second result arrives first), a duplicate, a retry of the second, and a third evaluation."""
    return [
        entry(0, outcome(8.0), 120.0),
        entry(1, LOST, 60.0),
        entry(2, None, 0.0, digest="0"),
        entry(3, outcome(2.0), 180.0, origin=RETRY_ORIGIN, digest="1"),
        entry(4, outcome(4.0), 240.0),
    ]


def test_duplicates_and_retries_do_not_count(entries):
    assert [(spent, found.proposal.number) for spent, found, _ in iter_counted(entries)] == [
        (1, 0),
        (2, 1),
        (2, 3),
        (3, 4),
    ]
    assert [trial.evaluations for trial in iter_evaluations(entries, Goal())] == [1, 2, 3]


def test_a_successful_retry_belongs_to_the_budget_of_its_failure(entries):
    found = state_at_budgets(entries, Goal(), [2, 1], 3)
    assert [trial.latency_ms for trial in found[2].best] == [2.0, 8.0]
    assert [trial.latency_ms for trial in found[1].best] == [8.0]
    assert [trial.latency_ms for trial in iter_incumbents(entries, Goal())] == [8.0, 2.0]


def test_minutes_are_those_of_the_last_result(entries):
    assert state_at_budgets(entries[:2], Goal(), [2])[2].minutes == 2.0, (
        "the first proposal took longer than the second"
    )
    found = state_at_budgets(entries, Goal(), [1, 2, 3, 25])
    assert [found[budget].minutes for budget in (1, 2, 3, 25)] == [2.0, 3.0, 4.0, 4.0]
    assert state_at_budgets([], Goal(), [25])[25].minutes == 0.0


def test_last_failure_is_kept_at_later_budgets(entries):
    found = state_at_budgets(entries, Goal(), [1, 2])
    assert (found[1].last_failure, found[2].last_failure) == (None, LOST)


def test_reading_stops_at_the_largest_budget(entries):
    passing = iter(entries)
    state_at_budgets(passing, Goal(), [1])
    assert [each.proposal.number for each in passing] == [2, 3, 4]


READINGS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), max_size=25)


@given(READINGS, st.integers(1, 25), st.integers(1, 5))
def test_best_placements_equal_sorted_list_or_first_front(readings, budget, count):
    told = [entry(n, outcome(float(ms), map=loss / 10), float(n)) for n, (ms, loss) in enumerate(readings)]
    within = list(enumerate(readings))[:budget]
    fastest = [number for number, _ in sorted(within, key=lambda each: each[1][0])][:count]
    assert [trial.choices[0] for trial in state_at_budgets(told, Goal(), [budget], count)[budget].best] == fastest
    values = np.array([(ms, 0.5 - map_ / 10) for _, (ms, map_) in within]).reshape(-1, 2)
    front = {number for (number, _), rank in zip(within, front_numbers(values), strict=True) if rank == 0}
    assert {trial.choices[0] for trial in state_at_budgets(told, FRONT, [budget], 99)[budget].best} == front


def test_scipy_is_imported_only_if_needed():
    code = "import sys, harness.results.search_log; sys.exit('scipy.stats' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
