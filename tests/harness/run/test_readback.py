"""What readers take from a journal: what an evaluation is, when it came, who was the incumbent."""

from __future__ import annotations

import pytest

from harness.records import Asked, Failed, Measured, Outcome, Told
from harness.run.goal import Goal
from harness.run.journal import RETRY, Entry
from harness.run.readback import counted, evaluated, incumbents, leaders, minutes, within

LOST = Failed(stage="crash", reason="the worker was lost")


def outcome(latency_ms: float) -> Measured:
    return Measured(samples_ms=(latency_ms,) * 5, build_s=1.0, measure_s=1.0)


def entry(number: int, found: Outcome | None, elapsed_s: float, origin: str = "searcher", digest: str = "") -> Entry:
    asked = Asked(number=number, choices=(number,), digest=digest or str(number), origin=origin)
    told = None if found is None else Told(number=number, outcome=found, elapsed_s=elapsed_s)
    return Entry(asked=asked, told=told)


@pytest.fixture
def entries() -> list[Entry]:
    """Two evaluations, a duplicate, the second one's retry, and a third; the first outcome came last of the two."""
    return [
        entry(0, outcome(8.0), 120.0),
        entry(1, LOST, 60.0),
        entry(2, None, 0.0, digest="0"),
        entry(3, outcome(2.0), 180.0, origin=RETRY, digest="1"),
        entry(4, outcome(4.0), 240.0),
    ]


def test_duplicates_and_retries_are_no_evaluations(entries: list[Entry]) -> None:
    assert [(spent, found.asked.number) for spent, found, _ in counted(entries)] == [(1, 0), (2, 1), (2, 3), (3, 4)]
    assert [trial.evaluations for trial in evaluated(entries, Goal())] == [1, 2, 3]
    assert [found.asked.number for found in within(entries, 2)] == [0, 1, 3]


def test_a_retry_that_worked_is_found_within_the_budget_that_its_failure_took(entries: list[Entry]) -> None:
    assert [trial.latency_ms for trial in leaders(entries, Goal(), 2, 3)] == [2.0, 8.0]
    assert [trial.latency_ms for trial in incumbents(entries, Goal())] == [8.0, 2.0]


def test_minutes_are_those_of_the_outcome_that_came_last(entries: list[Entry]) -> None:
    assert minutes(entries[:2], 2) == 2.0, "the first proposal took longer than the second"
    assert (minutes(entries, 1), minutes(entries, 2), minutes(entries, 3)) == (2.0, 3.0, 4.0)
    assert minutes([], 25) == 0.0
