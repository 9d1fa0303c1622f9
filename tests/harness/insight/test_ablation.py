"""Ablation in a step that other processes disturb, on latencies that are known exactly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from turns import Instant

from harness.base.progress import NullProgress
from harness.config.sections import Confirmation
from harness.insight import ablation
from harness.insight.ablation import AblationTimer, backward_elimination, quantized, without
from harness.measure.turn_log import TWIN, Turn
from harness.plugins.api import Candidate
from search.space import Placement
from search.testing import synthetic_space

WORTH = {0: 0.1, 1: 0.1, 2: 0.1, 3: 0.05}  # relative slowdown without a point; other points are worth nothing


@pytest.fixture
def timer(monkeypatch) -> Callable[..., AblationTimer]:
    """A function that returns a timer whose steps of the given numbers have a twin that is 40 % slower."""

    def make(*disturbed: int) -> AblationTimer:
        space = synthetic_space(8, groups=4)
        whole = space.quantize_all()
        known: dict[str, Placement] = {}
        steps: list[str] = []

        def candidate(placement: Placement) -> Candidate:
            known[space.digest(placement)] = placement
            return Candidate(digest=space.digest(placement), edges=(), source=lambda: Path("never asked for"))

        def run(comparison: Any, *_: Any) -> list[Turn]:
            twin_ms = 14.0 if len(steps) in disturbed else 10.0
            steps.append(comparison.name)
            latencies = {comparison.baseline.name: 10.0, TWIN: twin_ms}
            for row in comparison.rows:
                kept = quantized(known[row.candidate.digest])
                latencies[row.name] = 10.0 * (1 + sum(cost for i, cost in WORTH.items() if i not in kept))
            return [
                Turn(build=build, group=0, worker=0, round=turn, row=name, samples_ms=(ms,))
                for build in range(3)
                for turn in range(3)
                for name, ms in latencies.items()
            ]

        monkeypatch.setattr(ablation, "run_comparison", run)
        return AblationTimer(
            space=space, whole=whole, candidate=candidate, open_engines=Instant().open, plan=Confirmation(),
            observer=NullProgress(),
        )  # fmt: skip

    return make


def test_each_step_has_its_own_noise_floor(timer):
    bench = timer(1)
    slower = {"without 0": without(bench.whole, [0])}
    quiet, loud = (bench.time(slower, title)["without 0"] for title in ("quiet", "disturbed"))
    assert [step.noise_floor for step in bench.steps] == pytest.approx([0.01, 0.4])
    assert (quiet.noise_floor, loud.noise_floor) == pytest.approx((0.01, 0.4))
    assert not quiet.keeps_speed


@pytest.mark.parametrize("disturbed", [(), (4, 5)])
def test_disturbed_step_removes_no_point_that_carries_gain(timer, disturbed):
    bench = timer(*disturbed)
    for title in ("against float", "patterns left out", "patterns alone", "points left out"):
        bench.time({"float": bench.space.float_placement()}, title)
    trail, tests = backward_elimination(bench, quantized(bench.whole)[::-1])
    assert quantized(trail[-1]) == list(WORTH)
    assert tests > 0
    names = {dimension.name for dimension in bench.space.dimensions}
    removed = [step.ratios for step in bench.steps if step.title.startswith("fewest points")]
    assert removed
    assert {part for ratios in removed for name in ratios for part in name.split(", ")} <= names
