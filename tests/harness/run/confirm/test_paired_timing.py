"""A comparison reports other work on the machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from stored import JOURNAL_HEADER, write_lines
from turns import Instant, Listening, row

from harness.base.errors import UserError
from harness.base.progress import NullProgress
from harness.config.sections import Sampling, TurnSchedule
from harness.measure.records import MAIN_BENCHMARKER, Failed
from harness.measure.sampling import Samples
from harness.measure.turn_log import TurnMatrix
from harness.plugins.api import Candidate
from harness.results.lines import compress_lines
from harness.results.turns import read_comparison, turn_speedups
from harness.run.confirm.confirmation import PairedComparison, run_comparison, warn_if_disturbed
from harness.workers.engines import BuiltEngine


class Busy(Instant):
    """Engines of a machine on which something else is at work, or not."""

    def __init__(self, disturbed: str) -> None:
        self.disturbed = disturbed

    def sample(self, handle: int, sampling: Sampling) -> Samples:
        return replace(super().sample(handle, sampling), disturbed=self.disturbed)


class Failing(Busy):
    """Builds everything but the row that is called so, as long as it is not mended."""

    mended = False

    def build(self, candidate: Candidate, benchmarker: str = MAIN_BENCHMARKER) -> BuiltEngine | Failed:
        if candidate.digest.startswith("a") and not self.mended:
            return Failed(stage="build", reason="out of memory")
        return super().build(candidate, benchmarker)


def test_retry_failed_repeats_failed_rows(tmp_path):
    rows, plan = (row("a"), row("b")), TurnSchedule(builds=2, rounds=3, samples=3)
    path = tmp_path / "confirmation.jsonl"
    contest = PairedComparison(
        name="confirmation", path=path, header={}, baseline=row("float"), rows=rows, schedule=plan
    )
    engines = Failing("")
    run_comparison(contest, engines.open, NullProgress())
    before = path.read_bytes()
    engines.mended = True
    run_comparison(contest, engines.open, NullProgress())
    assert path.read_bytes() == before, "a failure is an outcome"
    run_comparison(contest, engines.open, NullProgress(), retry_failed=True)
    readings = TurnMatrix(read_comparison(path))
    assert not any(readings.failed.values())
    assert {name: len(readings.turns[name]) for name in ("float", "a", "b")} == {"float": 2, "a": 2, "b": 2}
    assert len(readings.paired_samples("a", "float")[0]) == 2


def test_rows_that_fail_for_one_reason_name_it_once(tmp_path):
    listening = Listening()
    rows, plan = (row("a"), row("a2"), row("b")), TurnSchedule(builds=2, rounds=3, samples=3)
    comparison = PairedComparison(
        name="confirmation", path=None, header={}, baseline=row("float"), rows=rows, schedule=plan
    )
    run_comparison(comparison, Failing("").open, listening)
    failed = [line for line in listening.said if "failed" in line]
    assert ["out of memory" in line for line in failed] == [True, False]


def test_comparison_continues_with_fewer_rows(tmp_path):
    """Its builds count on, and what was timed before stays."""
    path = tmp_path / "final_selection.jsonl"
    whole = PairedComparison(
        name="final_selection", path=path, header={}, baseline=row("float"), rows=(row("a"), row("b")),
        schedule=TurnSchedule(builds=1, rounds=3, samples=3),
    )  # fmt: skip
    rest = replace(whole, rows=(row("b"),), schedule=TurnSchedule(builds=2, rounds=4, samples=3), first_build=1)
    for contest in (whole, rest):
        run_comparison(contest, Busy("").open, NullProgress())
    written = path.read_bytes()
    for contest in (whole, rest):
        run_comparison(contest, Busy("").open, NullProgress())
    assert path.read_bytes() == written, "nothing is left to do"
    ratios = turn_speedups(TurnMatrix(read_comparison(path)), "float")
    assert sorted(ratios["a"]) == [(0, turn) for turn in range(3)]
    assert sorted(ratios["b"]) == sorted(ratios["a"]) + [(build, turn) for build in (1, 2) for turn in range(4)]


@pytest.mark.parametrize("disturbed", ["", "waited for a core 50% of the time"])
def test_disturbance_is_reported_and_recorded(tmp_path, disturbed):
    contest = PairedComparison(
        name="confirmation",
        path=tmp_path / "confirmation.jsonl",
        header={},
        baseline=row("float"),
        rows=(row("a"),),
        schedule=TurnSchedule(builds=2, rounds=3, samples=3),
    )
    observer = Listening()
    events = run_comparison(contest, Busy(disturbed).open, observer)
    warn_if_disturbed(contest.name, events, observer)
    assert len(observer.said) == bool(disturbed)
    assert all("confirmation" in said and "100%" in said for said in observer.said)
    assert read_comparison(tmp_path / "confirmation.jsonl") == events
    assert {event.disturbed for event in events} == {disturbed}  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["turns.jsonl", "turns.jsonl.gz"])
def test_damaged_turn_is_named_with_its_line_and_file(tmp_path, name):
    path = tmp_path / "turns.jsonl"
    turn = '{"kind":"turn","build":0,"group":0,"round":0,"row":"a","samples_ms":[1.0]}'
    write_lines(path, [JOURNAL_HEADER, turn, turn, turn.replace("1.0", "-1.0"), turn])
    if name.endswith("gz"):
        compress_lines(path)
    with pytest.raises(UserError, match=rf"{name}, line 4: .*samples_ms"):
        read_comparison(path)


def test_log_of_another_runtime_is_archived(tmp_path):
    path, plan = tmp_path / "final_selection.jsonl", TurnSchedule(builds=1, rounds=2, samples=3)
    for name in ("openvino", "openvino", "onnxruntime"):
        contest = PairedComparison(
            name="race", path=path, header={"name": name}, baseline=row("float"), rows=(row("a"),), schedule=plan
        )
        run_comparison(contest, Busy("").open, NullProgress())
    assert path.with_name("final_selection.1.jsonl").exists()
    assert not path.with_name("final_selection.2.jsonl").exists()
