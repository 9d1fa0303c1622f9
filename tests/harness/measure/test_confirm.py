from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.api import Accuracy, Candidate
from harness.errors import UserError
from harness.measure.confirm import Row, confirm, summarise
from harness.measure.engines import MAIN, Built, Engines
from harness.measure.events import TWIN, Block, Dropped, Event, decode_event, disturbance_note, encode_event
from harness.measure.sampling import Samples
from harness.records import Failed
from harness.run.config import Confirmation, Sampling

PLAN = Confirmation(builds=3, rounds=4, samples=5)


class Bench:
    """Engines of made-up latency; keeps a diary of what was asked of it.

    Args:
        latency_ms: By name of the row; the truth.
        faults: By name of the row, what to answer instead: (when, stage), when being "build" or a turn's number.
        build_noise: Standard deviation of the logarithm of a build's latency.
        busy: Numbers of the turns of all rows, from 0, beside which something else is at work.
    """

    def __init__(
        self,
        latency_ms: Mapping[str, float],
        faults: Mapping[str, tuple[str | int, str]] | None = None,
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
        self.diary: list[tuple[str, str]] = []
        self.most_open = 0

    @contextmanager
    def open(self) -> Iterator[Engines]:
        self.opened += 1
        yield _Worker(self)


class _Worker:
    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.engines: list[tuple[str, float]] = []
        self.turns: Counter[str] = Counter()
        self.dead = False

    def build(self, candidate: Candidate, benchmarker: str = MAIN) -> Built | Failed:
        assert not self.dead, "a dead worker was used"
        name = f"{candidate.digest}{'' if benchmarker == MAIN else '@' + benchmarker}"
        self.bench.diary.append(("build", name))
        when, stage = self.bench.faults.get(name, (None, ""))
        if when == "build":
            return self._fail(stage)
        latency_ms = self.bench.latency_ms[name] * np.exp(self.bench.build_noise * self.bench.rng.standard_normal())
        self.engines.append((name, float(latency_ms)))
        self.bench.most_open = max(self.bench.most_open, len(self.engines))
        return Built(handle=len(self.engines) - 1, build_s=0.1)

    def sample(self, handle: int, sampling: Sampling) -> Samples | Failed:
        assert not self.dead, "a dead worker was used"
        name, latency_ms = self.engines[handle]
        self.bench.diary.append(("sample", name))
        when, stage = self.bench.faults.get(name, (None, ""))
        self.turns[name] += 1
        if when == self.turns[name]:
            return self._fail(stage)
        readings = latency_ms * np.exp(0.005 * self.bench.rng.standard_normal(sampling.min_samples))
        disturbed = "waited for a core" if self.bench.taken in self.bench.busy else ""
        self.bench.taken += 1
        # What others take is a slice of time, and not a share of the inference.
        latency_ms = tuple((readings + 4.0 * bool(disturbed)).tolist())
        return Samples(latency_ms=latency_ms, warmup=0, measure_s=0.0, stable=True, disturbed=disturbed)

    def _fail(self, stage: str) -> Failed:
        self.dead = stage in ("crash", "timeout")
        return Failed(stage=stage, reason="because")

    def evaluate(self, handle: int, evaluator: str = MAIN) -> Accuracy | Failed:
        raise AssertionError("confirmation does not score")

    def release(self, handle: int) -> None:
        raise AssertionError("the worker goes as a whole")

    def describe(self, benchmarker: str = MAIN) -> Mapping[str, Any]:
        return {}


def row(name: str, benchmarker: str = MAIN) -> Row:
    def source() -> Path:
        raise AssertionError("the worker asks for the file, not the confirmation")

    return Row(name=name, candidate=Candidate(digest=name, edges=(), source=source), benchmarker=benchmarker)


def run(
    bench: Bench, *names: str, done: tuple[Event, ...] = (), plan: Confirmation = PLAN, seed: int = 0
) -> list[Event]:
    rows = [row(name) for name in names]
    rng = np.random.default_rng(seed)
    return list(confirm(rows, row("float"), open_engines=bench.open, plan=PLAN, rng=rng, done=done))


def test_every_row_gets_its_turns_in_every_build() -> None:
    bench = Bench({"float": 10.0, "a": 5.0, "b": 20.0})
    events = run(bench, "a", "b")
    turns = Counter((e.build, e.row) for e in events if isinstance(e, Block))
    assert turns == {(build, name): 4 for build in range(3) for name in ("float", TWIN, "a", "b")}
    assert all(isinstance(e, Block) and len(e.samples_ms) == 5 for e in events)
    assert bench.opened == 3


def test_turns_are_in_random_order_and_the_seed_decides_it() -> None:
    orders = [[e.row for e in run(Bench({"float": 10.0, "a": 5.0}), "a", seed=seed)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    rounds = {tuple(orders[0][start : start + 3]) for start in range(0, len(orders[0]), 3)}
    assert len(rounds) > 1


def test_many_rows_are_spread_over_workers() -> None:
    names = [f"r{number}" for number in range(12)]
    bench = Bench({"float": 10.0, **dict.fromkeys(names, 5.0)})
    summary = summarise(run(bench, *names), "float")
    assert bench.opened == 6
    assert bench.most_open == 12
    assert set(summary.rows) == {"float", *names}
    assert (summary.rows["r11"].builds, summary.builds) == (3, 3)


def test_summary_gives_speedups_verdicts_and_the_floor() -> None:
    bench = Bench({"float": 10.0, "fast": 5.0, "slow": 20.0, "same": 10.0})
    summary = summarise(run(bench, "fast", "slow", "same"), "float")
    assert {name: found.verdict for name, found in summary.rows.items()} == {
        "float": "tie", "fast": "faster", "slow": "slower", "same": "tie",
    }  # fmt: skip
    fast = summary.rows["fast"]
    assert fast.speedup.value == pytest.approx(2.0, rel=0.02)
    assert fast.latency_ms.value == pytest.approx(5.0, rel=0.02)
    assert fast.speedup.low < fast.speedup.value < fast.speedup.high
    assert summary.rows["float"].speedup.value == 1.0
    assert 0 < summary.floor < 0.01
    assert (fast.builds, fast.builds_ok, summary.builds) == (3, 3, 3)


def test_builds_that_differ_raise_the_floor_above_small_gains() -> None:
    noisy = Bench({"float": 10.0, "a": 9.7}, build_noise=0.1)
    summary = summarise(run(noisy, "a"), "float")
    assert summary.floor > 0.03
    assert summary.rows["a"].verdict == "tie"
    assert summarise(run(Bench({"float": 10.0, "a": 9.0}), "a"), "float", floor=0.2).rows["a"].verdict == "tie"


def test_no_claim_is_made_on_a_flat_landscape() -> None:
    names = [f"r{number}" for number in range(6)]
    claims = sum(
        found.verdict != "tie"
        for seed in range(40)
        for found in summarise(
            run(Bench(dict.fromkeys(["float", *names], 10.0), build_noise=0.02, seed=seed), *names), "float"
        ).rows.values()
    )
    assert claims / (40 * 6) <= 0.05


def test_a_tie_recommends_the_baseline_and_only_what_is_faster_is_delivered() -> None:
    rows = summarise(
        run(Bench({"float": 10.0, "fast": 5.0, "slow": 20.0, "same": 10.0}), "fast", "slow", "same"), "float"
    ).rows
    assert [name for name, found in rows.items() if found.recommended] == ["fast"]


def test_shrinkage_is_what_the_confirmation_takes_away() -> None:
    fast = summarise(run(Bench({"float": 10.0, "fast": 5.0}), "fast"), "float").rows["fast"]
    assert fast.shrinkage(2.3) == pytest.approx(0.3, abs=0.03)
    assert fast.shrinkage(1.9) < 0


def test_rounds_that_something_else_disturbed_are_taken_again_at_the_end() -> None:
    bench = Bench({"float": 10.0, "a": 5.0}, busy=(0, 3, 12))  # of the first build the first two rounds, and one again
    events = run(bench, "a")
    first = [e for e in events if isinstance(e, Block) and e.build == 0]
    assert [e.round for e in first] == [number for number in (2, 3, 0, 1) for _ in range(3)]
    assert [bool(e.disturbed) for e in first].count(True) == 1
    assert {e.round for e in first if len(e.discarded_ms) == len(e.samples_ms)} == {0, 1}
    summary = summarise(events, "float")
    assert summary.disturbed == pytest.approx(1 / 36)
    assert summary.rows["a"].speedup.value == pytest.approx(2.0, rel=0.02)
    assert (summary.builds, disturbance_note(summary.disturbed)) == (3, "")


@pytest.mark.parametrize("cut", range(1, 12))
def test_an_interruption_before_a_round_was_taken_again_costs_the_build_and_nothing_more(cut: int) -> None:
    """Two interrupted workers, which held back different rounds, must not pass for one that went through."""
    truth = {"float": 10.0, "a": 5.0}
    first = run(Bench(truth, busy=(0, 3)), "a")[:cut]
    second = run(Bench(truth, busy=(6, 9)), "a", done=first)[:cut]
    third = run(Bench(truth), "a", done=[*first, *second])
    summary = summarise([*first, *second, *third], "float")
    assert (summary.builds, summary.disturbed) == (3, 0.0)
    counted = {e.worker for e in third if isinstance(e, Block) and e.build == 0}
    assert counted == {2}, "the worker after the two"


def test_what_stays_disturbed_is_marked_and_costs_no_second_take() -> None:
    events = run(Bench({"float": 10.0, "a": 5.0}, busy=range(1000)), "a")
    assert len(events) == 36
    summary = summarise(events, "float")
    assert summary.disturbed == 1.0
    assert summary.rows["a"].speedup.value == pytest.approx(14 / 9, rel=0.02)
    assert disturbance_note(1.0) == (
        "something else was at work in 100% of the turns, which distorts speedups, upwards as a rule"
    )


def test_a_worker_that_dies_in_a_round_that_is_taken_again_starts_anew() -> None:
    bench = Bench({"float": 10.0, "bad": 5.0, "good": 5.0}, {"bad": (5, "crash")}, busy=(0,))
    summary = summarise(run(bench, "bad", "good"), "float")
    assert bench.opened == 4
    assert summary.rows["bad"].builds_ok == 2
    assert (summary.rows["good"].builds_ok, summary.builds) == (3, 3)


def test_the_same_model_on_another_benchmarker_is_a_row() -> None:
    bench = Bench({"float": 10.0, "float@fp32": 20.0})
    rows = [Row(name="fp32", candidate=row("float").candidate, benchmarker="fp32")]
    rng = np.random.default_rng(0)
    events = confirm(rows, row("float"), open_engines=bench.open, plan=PLAN, rng=rng)
    assert summarise(events, "float").rows["fp32"].verdict == "slower"


@pytest.mark.parametrize("when", ["build", 2])
def test_a_row_that_fails_drops_out_and_the_others_go_on(when: str | int) -> None:
    bench = Bench({"float": 10.0, "bad": 5.0, "good": 5.0}, {"bad": (when, "measure")})
    events = run(bench, "bad", "good")
    summary = summarise(events, "float")
    assert [e.build for e in events if isinstance(e, Dropped)] == [0, 1, 2]
    assert "bad" not in summary.rows
    assert summary.failed["bad"].reason == "because"
    assert summary.rows["good"].builds_ok == 3
    assert (bench.opened, summary.builds) == (3, 3)


@pytest.mark.parametrize("stage", ["crash", "timeout"])
@pytest.mark.parametrize("when", ["build", 3])
def test_a_row_that_takes_the_worker_with_it_costs_a_worker_and_no_other_row(when: str | int, stage: str) -> None:
    bench = Bench({"float": 10.0, "bad": 5.0, "good": 5.0}, {"bad": (when, stage)})
    summary = summarise(run(bench, "bad", "good"), "float")
    assert bench.opened == 6
    assert (summary.rows["good"].builds_ok, summary.rows["good"].verdict) == (3, "faster")
    assert "bad" not in summary.rows


def test_builds_that_failed_are_counted() -> None:
    events = run(Bench({"float": 10.0, "a": 5.0}), "a")
    lost = Dropped(build=1, group=0, row="a", failed=Failed(stage="build", reason="no"))
    found = summarise([*events, lost], "float").rows["a"]
    assert (found.builds, found.builds_ok, found.verdict) == (3, 2, "faster")


def test_without_a_baseline_there_is_nothing_to_compare_with() -> None:
    bench = Bench({"float": 10.0, "a": 5.0}, {"float": (2, "measure")})
    with pytest.raises(UserError, match=r"the baseline failed in the confirmation.*measure: because"):
        run(bench, "a")


def test_rows_need_names_of_their_own() -> None:
    with pytest.raises(ValueError, match="need names of their own, but got float, A/A twin, a, a"):
        run(Bench({"float": 1.0}), "a", "a")


def test_what_is_complete_is_not_measured_again() -> None:
    names = [f"r{number}" for number in range(8)]
    truth = {"float": 10.0, **dict.fromkeys(names, 5.0)}
    events = tuple(run(Bench(truth), *names))
    again = Bench(truth)
    assert run(again, *names, done=events) == []
    assert again.opened == 0


@pytest.mark.parametrize("cut", [1, 10, 24, 35])
def test_an_interrupted_confirmation_goes_on(cut: int) -> None:
    truth = {"float": 10.0, "a": 5.0}
    whole = run(Bench(truth), "a")
    kept = tuple(whole[:cut])
    bench = Bench(truth)
    rest = run(bench, "a", done=kept)
    assert bench.opened == 3 - cut // 12
    summary = summarise([*kept, *rest], "float")
    assert (summary.builds, summary.rows["a"].builds) == (3, 3)
    turns = {(e.build, e.row, e.round): e for e in (*kept, *rest) if isinstance(e, Block)}
    assert len(turns) == len(whole)
    # Same seed, same order: the repeated worker takes its turns as the first would have.
    assert [(e.build, e.row) for e in whole[-len(rest) :]] == [(e.build, e.row) for e in rest]


def test_an_unfinished_confirmation_says_so() -> None:
    events = run(Bench({"float": 10.0, "a": 5.0}), "a")
    assert summarise(events[:-1], "float").builds == 2
    assert summarise([], "float").builds == 0


def make_block() -> Block:
    return Block(build=1, group=0, round=2, row="a", samples_ms=(1.25, 1.5), discarded_ms=(9.0,), disturbed="heat")


def make_dropped() -> Dropped:
    return Dropped(build=1, group=0, row="a", failed=Failed(stage="crash", reason="r", log_tail="x\ny", wall_s=0.5))


@pytest.mark.parametrize("make", [make_block, make_dropped])
def test_events_survive_the_journal(make: Callable[[], Event]) -> None:
    line = encode_event(make())
    assert "\n" not in line
    assert decode_event(line) == make()


def test_turns_from_before_disturbances_were_noticed_are_read() -> None:
    found = decode_event('{"kind":"block","build":1,"group":0,"round":2,"row":"a","samples_ms":[1.5]}')
    assert found == Block(build=1, group=0, round=2, row="a", samples_ms=(1.5,))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "not a line of a confirmation"),
        ('{"kind":"other"}', "not a line of a confirmation"),
        ('{"kind":"block","build":1}', "lacks or adds a field"),
        ('{"kind":"dropped","failed":{"stag":1}}', "lacks or adds a field"),
        ("{", "Expecting"),
    ],
)
def test_lines_that_are_not_ours_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_event(text)
