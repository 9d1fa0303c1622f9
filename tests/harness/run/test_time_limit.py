from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from small import qdq, save_chain
from stored import read_text

from harness.base.files import read_json
from harness.config.sections import Confirmation
from harness.results import termination
from harness.results.artifacts import read_finalists
from harness.results.journal import read_journal
from harness.results.turns import read_begun_plan
from harness.run.time_limit import MIN_PLAN, TimeLeft, TimeLimit, seconds_after_searches

EXPERIMENT = """
experiment: limited
models: [chain.onnx]
backends: [simulated]
searchers: [random]
initial: [float, all]
baselines: [all]
confirmation: {builds: 5, rounds: 20, candidates: 2}
budget: {evaluations: [60], task_minutes: 0.00001}
"""


def limit(spent_s: float) -> TimeLimit:
    clock: Any = SimpleNamespace(elapsed_s=spent_s)
    return TimeLimit(seconds=300.0, clock=clock)


def test_searches_share_the_first_half_and_recovery_ends_before_the_confirmation():
    assert limit(30).search_seconds(2) == pytest.approx(60)
    assert limit(290).search_seconds(1) == pytest.approx(30), "a slow set-up leaves some"
    assert limit(200).allows_recovery
    assert not limit(215).allows_recovery


def test_a_confirmation_that_would_take_too_long_is_shortened():
    whole = Confirmation(builds=5, rounds=20)
    assert limit(200).shorten(whole, rows=2, turn_s=0.25) == whole, "3 rows x 100 turns take 75 s"
    shorter = limit(270).shorten(whole, rows=2, turn_s=0.25)
    assert (shorter.builds, shorter.rounds) == (3, 13)
    assert limit(400).shorten(whole, rows=2, turn_s=0.25, begun=shorter) == shorter, "another plan would start anew"
    least = limit(400).shorten(whole, rows=2, turn_s=0.25)
    assert (least.builds, least.rounds) == (MIN_PLAN.builds, MIN_PLAN.rounds)


def test_the_time_left_includes_final_selection_and_confirmation(monkeypatch):
    later_s = seconds_after_searches(1.0, Confirmation(builds=3, rounds=2, candidates=4), baselines=2, searches=1)
    assert later_s == 8 * 6 + 24 * 4 + 5 * 6, "race of 4 and 2 candidates, then 3 rows and 2 builds of the float model"
    left = TimeLeft(evaluations=10, replayed=4, later_s=later_s, since_s=0.0)
    monkeypatch.setattr("harness.run.time_limit.time", SimpleNamespace(monotonic=lambda: 6.0))
    assert left.describe(4) == "", "evaluations of an earlier run say nothing about the pace"
    assert "3:00 min left" in left.describe(7), "3 more at 2 s each have 6 s"
    assert replace(left, later_s=0.0).describe(7) == ""


def test_phase_clock_includes_earlier_runs(tmp_path, monkeypatch):
    now = iter([0.0, 5.0, 7.0, 100.0, 104.0])
    monkeypatch.setattr(termination, "time", SimpleNamespace(monotonic=lambda: next(now)))
    clock = termination.PhaseClock(tmp_path, "set-up")
    clock.write("search")
    assert clock.elapsed_s == 7.0
    assert termination.PhaseClock(tmp_path, "set-up").elapsed_s == 9.0


def test_a_task_without_time_left_still_delivers_a_confirmed_file(tmp_path, capsys):
    save_chain(tmp_path / "chain.onnx", (8, 8, 12))
    (tmp_path / "limited.yaml").write_text(EXPERIMENT)
    assert qdq("run", str(tmp_path / "limited.yaml"), "--out", str(tmp_path / "out")) == 0
    (folder,) = (path.parent for path in (tmp_path / "out").rglob("task.json"))
    events = read_json(folder / "noise_floor.json")["events"]
    assert {(each["build"], each["round"]) for each in events} == {(b, r) for b in range(3) for r in range(3)}
    assert "3 of 8 rounds, because of the time limit" in capsys.readouterr().err
    rows, _ = read_finalists(folder)
    assert len(rows) == 2, "the float model and the baseline"
    assert '"rounds":4' in read_text(folder / "confirmation.jsonl")
    begun = read_begun_plan(folder)
    assert begun is not None
    assert (begun.builds, begun.rounds) == (3, 4)
    assert len(list(read_journal(next(folder.glob("runs/*.jsonl*"))))) < 60
