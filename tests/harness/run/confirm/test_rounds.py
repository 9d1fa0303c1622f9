"""Rows against a baseline: turns in random order, fresh builds, failures and interruptions, and the summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from harness.base.errors import UserError
from harness.config.sections import Confirmation, Sampling
from harness.measure.records import MAIN_BENCHMARKER, Failed
from harness.measure.sampling import Samples
from harness.measure.turn_log import (
    TWIN,
    ConfirmationSummary,
    RowFailure,
    Turn,
    TurnEvent,
    decode_turn_event,
    disturbance_note,
    encode_turn_event,
    summarize_turns,
)
from harness.plugins.api import Candidate
from harness.run.confirm.confirmation import TimedRow, confirm
from harness.workers.engines import BuiltEngine

SCHEDULE = Confirmation(builds=3, rounds=4, samples=5)
TRUTH = {"float": 10.0, "a": 5.0}
TWO = {"float": 10.0, "bad": 5.0, "good": 5.0}


class Bench:
    """Factory of simulated engines.

    Args:
        latency_ms: True latency by "DIGEST" or "DIGEST@BENCHMARKER".
        faults: By the same key: "build" or the number of the turn that fails, and the stage of the failure.
        build_noise: Relative standard deviation between builds.
        busy: Numbers of the disturbed turns.
    """

    def __init__(
        self,
        latency_ms: Mapping[str, float] = TRUTH,
        faults: Mapping[str, tuple[str | int, str]] | None = None,
        *,
        build_noise: float = 0.0,
        seed: int = 0,
        busy: Collection[int] = (),
    ) -> None:
        self.latency_ms = latency_ms
        self.faults = faults or {}
        self.build_noise = build_noise
        self.busy = busy
        self.taken = 0
        self.rng = np.random.default_rng(seed)
        self.opened = 0
        self.most_open = 0

    @contextmanager
    def open(self) -> Iterator[Worker]:
        self.opened += 1
        yield Worker(self)


class Worker:
    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.engines: list[tuple[str, float]] = []
        self.turns: Counter[str] = Counter()
        self.dead = False

    def build(self, candidate: Candidate, benchmarker: str = MAIN_BENCHMARKER) -> BuiltEngine | Failed:
        assert not self.dead, "a dead worker was used"
        name = f"{candidate.digest}{'' if benchmarker == MAIN_BENCHMARKER else '@' + benchmarker}"
        when, stage = self.bench.faults.get(name, (None, ""))
        if when == "build":
            return self._fail(stage)
        latency_ms = self.bench.latency_ms[name] * np.exp(self.bench.build_noise * self.bench.rng.standard_normal())
        self.engines.append((name, float(latency_ms)))
        self.bench.most_open = max(self.bench.most_open, len(self.engines))
        return BuiltEngine(handle=len(self.engines) - 1, build_s=0.1)

    def sample(self, handle: int, sampling: Sampling) -> Samples | Failed:
        assert not self.dead, "a dead worker was used"
        name, latency_ms = self.engines[handle]
        when, stage = self.bench.faults.get(name, (None, ""))
        self.turns[name] += 1
        if when == self.turns[name]:
            return self._fail(stage)
        readings = latency_ms * np.exp(0.005 * self.bench.rng.standard_normal(sampling.min_samples))
        disturbed = "waited for a core" if self.bench.taken in self.bench.busy else ""
        self.bench.taken += 1
        # Other processes take a time slice, not a share of the inference.
        latencies = tuple((readings + 4.0 * bool(disturbed)).tolist())
        return Samples(latency_ms=latencies, warmup=0, measure_s=0.0, stable=True, disturbed=disturbed)

    def _fail(self, stage: str) -> Failed:
        self.dead = stage in ("crash", "timeout")
        return Failed(stage=stage, reason="because")


def row(name: str, benchmarker: str = MAIN_BENCHMARKER) -> TimedRow:
    def source() -> Path:
        raise AssertionError("the worker asks for the file, not the confirmation")

    return TimedRow(name=name, candidate=Candidate(digest=name, edges=(), source=source), benchmarker=benchmarker)


def run(bench: Bench, *names: str, done: Collection[TurnEvent] = (), seed: int = 0) -> list[TurnEvent]:
    rows = [row(name) for name in names]
    rng = np.random.default_rng(seed)
    return list(confirm(rows, row("float"), open_engines=bench.open, schedule=SCHEDULE, rng=rng, done=done))


def summary_of(bench: Bench, *names: str, noise_floor: float = 0.0) -> ConfirmationSummary:
    return summarize_turns(run(bench, *names), "float", noise_floor)


def test_every_row_gets_its_turns_in_every_build():
    bench = Bench({"float": 10.0, "a": 5.0, "b": 20.0})
    events = run(bench, "a", "b")
    turns = Counter((e.build, e.row) for e in events if isinstance(e, Turn))
    assert turns == {(build, name): 4 for build in range(3) for name in ("float", TWIN, "a", "b")}
    assert all(isinstance(e, Turn) and len(e.samples_ms) == 5 for e in events)
    assert bench.opened == 3


def test_turns_are_in_random_order_that_depends_on_the_seed():
    orders = [[e.row for e in run(Bench(), "a", seed=seed)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    rounds = {tuple(orders[0][start : start + 3]) for start in range(0, len(orders[0]), 3)}
    assert len(rounds) > 1


def test_many_rows_are_distributed_over_workers():
    names = [f"r{number}" for number in range(12)]
    bench = Bench({"float": 10.0, **dict.fromkeys(names, 5.0)})
    summary = summary_of(bench, *names)
    assert (bench.opened, bench.most_open) == (6, 12)
    assert set(summary.rows) == {"float", *names}
    assert (summary.rows["r11"].builds, summary.builds) == (3, 3)


def test_summary_gives_speedups_verdicts_and_the_floor():
    bench = Bench({"float": 10.0, "fast": 5.0, "slow": 20.0, "same": 10.0, "float@fp32": 20.0})
    summary = summary_of(bench, "fast", "slow", "same")
    assert {name: found.verdict for name, found in summary.rows.items()} == {
        "float": "tie", "fast": "faster", "slow": "slower", "same": "tie",
    }  # fmt: skip
    assert [name for name, found in summary.rows.items() if found.recommended] == ["fast"]
    fast = summary.rows["fast"]
    assert fast.speedup.value == pytest.approx(2.0, rel=0.02)
    assert fast.latency_ms.value == pytest.approx(5.0, rel=0.02)
    assert fast.speedup.low < fast.speedup.value < fast.speedup.high
    assert summary.rows["float"].speedup.value == 1.0
    assert 0 < summary.noise_floor < 0.01
    assert (fast.builds, fast.builds_ok, summary.builds) == (3, 3, 3)
    assert fast.shrinkage(2.3) == pytest.approx(0.3, abs=0.03)
    assert fast.shrinkage(1.9) < 0


def test_the_same_model_on_another_benchmarker_is_a_row():
    bench, rng = Bench({"float": 10.0, "float@fp32": 20.0}), np.random.default_rng(0)
    rows = [TimedRow(name="fp32", candidate=row("float").candidate, benchmarker="fp32")]
    events = confirm(rows, row("float"), open_engines=bench.open, schedule=SCHEDULE, rng=rng)
    assert summarize_turns(events, "float").rows["fp32"].verdict == "slower"


def test_builds_that_differ_raise_the_floor_above_small_gains():
    summary = summary_of(Bench({"float": 10.0, "a": 9.7}, build_noise=0.1), "a")
    assert summary.noise_floor > 0.03
    assert summary.rows["a"].verdict == "tie"
    assert summary_of(Bench({"float": 10.0, "a": 9.0}), "a", noise_floor=0.2).rows["a"].verdict == "tie"


def test_no_gain_is_claimed_between_equal_rows():
    names = [f"r{number}" for number in range(6)]
    truth = dict.fromkeys(["float", *names], 10.0)
    benches = [Bench(truth, build_noise=0.02, seed=seed) for seed in range(40)]
    claims = sum(row.verdict != "tie" for bench in benches for row in summary_of(bench, *names).rows.values())
    assert claims / (40 * 6) <= 0.05


def test_disturbed_rounds_are_repeated_at_the_end():
    bench = Bench(busy=(0, 3, 12))  # the first two rounds of the first build, and one of their repetitions
    events = run(bench, "a")
    first = [e for e in events if isinstance(e, Turn) and e.build == 0]
    assert [e.round for e in first] == [number for number in (2, 3, 0, 1) for _ in range(3)]
    assert [bool(e.disturbed) for e in first].count(True) == 1
    assert {e.round for e in first if len(e.discarded_ms) == len(e.samples_ms)} == {0, 1}
    summary = summarize_turns(events, "float")
    assert summary.disturbed == pytest.approx(1 / 36)
    assert summary.rows["a"].speedup.value == pytest.approx(2.0, rel=0.02)
    assert (summary.builds, disturbance_note(summary.disturbed)) == (3, "")


def test_a_permanent_disturbance_is_marked_and_not_repeated():
    events = run(Bench(busy=range(1000)), "a")
    assert len(events) == 36
    summary = summarize_turns(events, "float")
    assert summary.disturbed == 1.0
    assert summary.rows["a"].speedup.value == pytest.approx(14 / 9, rel=0.02)
    assert "100%" in disturbance_note(1.0)


@pytest.mark.parametrize("cut", [1, 3, 6, 7, 11])
def test_an_interruption_before_a_repetition_costs_one_build(cut):
    """Two interrupted workers that withheld different rounds must not count as one that completed."""
    first = run(Bench(busy=(0, 3)), "a")[:cut]
    second = run(Bench(busy=(6, 9)), "a", done=first)[:cut]
    third = run(Bench(), "a", done=[*first, *second])
    summary = summarize_turns([*first, *second, *third], "float")
    assert (summary.builds, summary.disturbed) == (3, 0.0)
    assert {e.worker for e in third if isinstance(e, Turn) and e.build == 0} == {2}, "the worker after the two"


def test_a_worker_that_dies_in_a_repetition_is_replaced():
    bench = Bench(TWO, {"bad": (5, "crash")}, busy=(0,))
    summary = summary_of(bench, "bad", "good")
    assert bench.opened == 4
    assert summary.rows["bad"].builds_ok == 2
    assert (summary.rows["good"].builds_ok, summary.builds) == (3, 3)


@pytest.mark.parametrize("when", ["build", 2])
def test_a_row_that_fails_is_dropped_and_the_others_continue(when):
    bench = Bench(TWO, {"bad": (when, "measure")})
    events = run(bench, "bad", "good")
    summary = summarize_turns(events, "float")
    assert [e.build for e in events if isinstance(e, RowFailure)] == [0, 1, 2]
    assert "bad" not in summary.rows
    assert summary.failed["bad"].reason == "because"
    assert summary.rows["good"].builds_ok == 3
    assert (bench.opened, summary.builds) == (3, 3)


@pytest.mark.parametrize(("when", "stage"), [("build", "crash"), ("build", "timeout"), (3, "crash"), (3, "timeout")])
def test_a_row_that_kills_the_worker_costs_a_worker_and_no_other_row(when, stage):
    bench = Bench(TWO, {"bad": (when, stage)})
    summary = summary_of(bench, "bad", "good")
    assert bench.opened == 6
    assert (summary.rows["good"].builds_ok, summary.rows["good"].verdict) == (3, "faster")
    assert "bad" not in summary.rows


def test_failed_builds_are_counted():
    lost = RowFailure(build=1, group=0, row="a", failed=Failed(stage="build", reason="no"))
    found = summarize_turns([*run(Bench(), "a"), lost], "float").rows["a"]
    assert (found.builds, found.builds_ok, found.verdict) == (3, 2, "faster")


def test_a_baseline_that_fails_and_equal_names_are_refused():
    with pytest.raises(UserError, match=r"the baseline failed.*measure: because"):
        run(Bench(TRUTH, {"float": (2, "measure")}), "a")
    with pytest.raises(ValueError, match="different names, but got float, A/A twin, a, a"):
        run(Bench(), "a", "a")


@pytest.mark.parametrize("cut", [1, 10, 24, 35, 36])
def test_an_interrupted_confirmation_resumes(cut):
    whole = run(Bench(), "a")
    kept = whole[:cut]
    bench = Bench()
    rest = run(bench, "a", done=kept)
    assert bench.opened == 3 - cut // 12
    summary = summarize_turns([*kept, *rest], "float")
    assert (summary.builds, summary.rows["a"].builds) == (3, 3)
    turns = {(e.build, e.row, e.round) for e in (*kept, *rest) if isinstance(e, Turn)}
    assert len(turns) == len(whole)
    # Same seed, same order: the repeated worker takes its turns as the first would have.
    assert [(e.build, e.row) for e in whole[len(whole) - len(rest) :]] == [(e.build, e.row) for e in rest]


def test_an_unfinished_confirmation_has_fewer_builds():
    assert summarize_turns(run(Bench(), "a")[:-1], "float").builds == 2
    assert summarize_turns([], "float").builds == 0


def make_turn() -> Turn:
    return Turn(build=1, group=0, round=2, row="a", samples_ms=(1.25, 1.5), discarded_ms=(9.0,), disturbed="heat")


def make_failure() -> RowFailure:
    return RowFailure(build=1, group=0, row="a", failed=Failed(stage="crash", reason="r", log_tail="x\ny", wall_s=0.5))


@pytest.mark.parametrize("make", [make_turn, make_failure])
def test_turn_events_round_trip(make):
    line = encode_turn_event(make())
    assert "\n" not in line
    assert decode_turn_event(line) == make()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "not a line of a confirmation"),
        ('{"kind":"other"}', "not a line of a confirmation"),
        ('{"kind":"turn","build":1}', "group"),
        ('{"kind":"failure","failed":{"stag":1}}', "build"),
        (encode_turn_event(make_turn()).replace("1.25", "-1.25"), "samples_ms"),
        (encode_turn_event(make_turn()).replace("1.25", '"1.25"'), "samples_ms"),
        (encode_turn_event(make_turn()).replace("1.25", "NaN"), "samples_ms"),
        (encode_turn_event(make_turn()).replace('"heat"', '"heat","colour":1'), "colour"),
        ("{", "Expecting"),
    ],
)
def test_invalid_turn_lines_are_rejected(text, message):
    with pytest.raises(ValueError, match=message):
        decode_turn_event(text)
