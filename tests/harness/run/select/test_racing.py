"""A race of fresh builds: eliminations follow from the rounds so far, not from later ones in the log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from turns import Instant, Listening, row

from harness.base.progress import NullProgress
from harness.config.sections import Sampling
from harness.measure.elimination import TURNS_PER_RACING_ROUND
from harness.measure.records import MAIN_BENCHMARKER, Failed
from harness.measure.sampling import Samples
from harness.plugins.api import Candidate
from harness.results.turns import median_speedups, read_comparison
from harness.run.confirm.confirmation import PairedComparison
from harness.run.select.final_selection import FIRST_SCHEDULE, select, select_winner
from harness.workers.engines import BuiltEngine, Engines

FLOAT = "float"
FULL_TURNS = True


class Machine(Instant):
    """Engines with true latencies, of which each build is off by something and each turn by something.

    Attributes:
        broken: Whether a row's build of this number (from 0) fails.
        rows: What was built in each worker, in order.
    """

    def __init__(
        self,
        true_ms: Mapping[str, float],
        *,
        by_builds: float = 0.0,
        by_turns: float = 0.0,
        seed: int = 0,
        broken: Callable[[str, int], bool] = lambda row, number: False,
    ) -> None:
        self._true_ms = {FLOAT: 2.0, **true_ms}
        self._by_builds, self._by_turns = by_builds, by_turns
        self._rng = np.random.default_rng(seed)
        self.broken = broken
        self.rows: list[list[str]] = []
        self._handles: list[float] = []

    def build(self, candidate: Candidate, benchmarker: str = MAIN_BENCHMARKER) -> BuiltEngine | Failed:
        if self.broken(candidate.digest, len(self.rows) - 1):
            return Failed(stage="build", reason="out of memory")
        self.rows[-1].append(candidate.digest)
        self._handles.append(self._true_ms[candidate.digest] * np.exp(self._by_builds * self._rng.standard_normal()))
        return BuiltEngine(handle=len(self._handles) - 1, build_s=0.1)

    def sample(self, handle: int, sampling: Sampling) -> Samples:
        read_ms = float(self._handles[handle] * np.exp(self._by_turns * self._rng.standard_normal()))
        return Samples(latency_ms=(read_ms,) * 3, warmup=0, measure_s=0.0, stable=True)

    @contextmanager
    def open(self) -> Iterator[Engines]:
        self.rows.append([])
        yield self  # type: ignore[misc]


def contest(path: Path, names: str) -> PairedComparison:
    return PairedComparison(
        name="final_selection", path=path / "final_selection.jsonl", header={}, baseline=row(FLOAT),
        rows=tuple(row(name) for name in names), schedule=FIRST_SCHEDULE,
    )  # fmt: skip


def test_repeated_race_reuses_log_with_same_result(tmp_path):
    """Later turns order the candidates otherwise; one that is eliminated after the first round stays eliminated."""
    true_ms = dict(zip("abcde", (1.0, 1.004, 1.02, 1.03, 1.2), strict=True))
    lots = {"first": list("abcd"), "second": list("bcde")}
    for seed in range(30):
        folder = tmp_path / str(seed)
        folder.mkdir()
        held = contest(folder, "abcde")
        left = select(held, lots, Machine(true_ms, by_builds=0.01, by_turns=0.02, seed=seed).open, NullProgress())
        written = held.path.read_bytes()
        again = Machine(true_ms)
        assert select(held, lots, again.open, NullProgress()) == left
        assert (held.path.read_bytes(), again.rows) == (written, []), f"seed {seed}"


def test_interrupted_round_does_not_change_earlier_round(tmp_path):
    """What is there of the second heat has b far behind; the first one left it in, so its second build begins anew."""

    class Interrupted(Machine):
        left = 4 * 7

        def sample(self, handle: int, sampling: Sampling) -> Samples:
            if len(self.rows) == 2:
                self.left -= 1
                if not self.left:
                    raise KeyboardInterrupt
            return super().sample(handle, sampling)

        def build(self, candidate: Candidate, benchmarker: str = MAIN_BENCHMARKER) -> BuiltEngine | Failed:
            if len(self.rows) == 2:
                self._true_ms["b"] = 1.3
            return super().build(candidate, benchmarker)

    held, true_ms = contest(tmp_path, "abc"), {"a": 1.0, "b": 1.003, "c": 1.5}
    with pytest.raises(KeyboardInterrupt):
        select(held, {"all": list("abc")}, Interrupted(true_ms).open, NullProgress())
    machine = Machine(true_ms)
    assert select(held, {"all": list("abc")}, machine.open, NullProgress())[0] == {"all": ["a", "b"]}
    assert [sorted(names) for names in machine.rows] == [["a", "b", FLOAT, FLOAT]] * 2


def test_race_out_of_time_uses_first_and_logged_rounds(tmp_path):
    held, lots, machine = contest(tmp_path, "ab"), {"all": ["a", "b"]}, Machine({"a": 1.0, "b": 1.001})
    select(held, lots, machine.open, NullProgress(), is_time_up=lambda: True)
    assert len(machine.rows) == 1
    whole = select(held, lots, machine.open, NullProgress())
    assert len(machine.rows) == 3
    assert select(held, lots, machine.open, NullProgress(), is_time_up=lambda: True) == whole


@pytest.mark.parametrize("heat", range(len(TURNS_PER_RACING_ROUND)))
def test_candidate_failing_in_any_round_is_eliminated(tmp_path, heat):
    """However fast it was before; b, which stays close, wins."""
    held = contest(tmp_path, "abc")
    machine = Machine({"a": 1.0, "b": 1.001, "c": 1.5}, broken=lambda name, number: name == "a" and number == heat)
    assert select(held, {"all": list("abc")}, machine.open, NullProgress())[0]["all"] == ["b"]
    speedups = median_speedups(read_comparison(held.path), FLOAT)
    assert "a" not in speedups
    assert max(speedups, key=speedups.__getitem__) == "b"


def test_build_variance_of_baseline_keeps_close_candidates(tmp_path):
    """The float model's own builds differ by 10 %, so rows that are 3 % apart are not told apart by one build each."""

    class Uneven(Machine):
        def build(self, candidate: Candidate, benchmarker: str = MAIN_BENCHMARKER) -> BuiltEngine | Failed:
            self._true_ms[FLOAT] = 2.2 if FLOAT in self.rows[-1] else 2.0
            return super().build(candidate, benchmarker)

    for machine, heats in ((Machine({"a": 1.0, "b": 1.03}), 1), (Uneven({"a": 1.0, "b": 1.03}), 3)):
        folder = tmp_path / type(machine).__name__
        folder.mkdir()
        select(contest(folder, "ab"), {"all": ["a", "b"]}, machine.open, NullProgress())
        assert len(machine.rows) == heats


def test_noise_floor_keeps_close_candidates(tmp_path):
    machine = Machine({"a": 1.0, "b": 1.03})
    select(replace(contest(tmp_path, "ab"), noise_floor=0.1), {"all": ["a", "b"]}, machine.open, NullProgress())
    assert len(machine.rows) == len(TURNS_PER_RACING_ROUND)


@pytest.mark.parametrize(("broken", "won"), [("", "a"), ("a", "b"), ("ab", "c"), ("abc", "")])
def test_a_winner_is_found_among_the_rows_that_finished(tmp_path, broken, won):
    """Of a and b, which stay close, either may fail in the second heat; c was beaten in the first."""
    machine = Machine(
        {"a": 1.0, "b": 1.001, "c": 1.5}, broken=lambda name, number: name in broken and (number == 1 or name == "c")
    )
    found, speedup = select_winner(contest(tmp_path, "abc"), machine.open, NullProgress())
    assert found == won
    assert speedup == pytest.approx({"a": 2.0, "b": 2.0 / 1.001, "c": 2.0 / 1.5, "": 0.0}[won])


def test_disturbance_is_reported_once(tmp_path):
    class Disturbed(Machine):
        def sample(self, handle: int, sampling: Sampling) -> Samples:
            return replace(super().sample(handle, sampling), disturbed="waited for a core 50% of the time")

    observer = Listening()
    select(contest(tmp_path, "ab"), {"all": ["a", "b"]}, Disturbed({"a": 1.0, "b": 1.0}).open, observer)
    assert [text.count("close other work") for text in observer.said] == [1]
