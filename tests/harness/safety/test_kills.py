"""kill -9 at random moments of a run, resumed with the same call each time: nothing lost, nothing counted twice.

QDQ_KILLS sets how many (docs/explanation/reliability.md has the figures of 200); QDQ_SEED draws other moments.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from harness.records import Failed, TrialResult
from harness.report.frames.main_frame import main_frame
from harness.report.load.results import load
from harness.results_dir.journal import read_journal
from harness.results_dir.lines import has_lines

KILLS = int(os.environ.get("QDQ_KILLS", "6"))
SEED = int(os.environ.get("QDQ_SEED", "7"))


def told(out: Path) -> dict[str, dict[int, Any]]:
    """Outcomes by journal and number, as they stand on the disk."""
    found = {}
    for path in sorted(out.glob("*/runs/*.jsonl*")):
        if has_lines(path):
            found[path.name.removesuffix(".gz")] = {
                e.proposal.number: e.result for e in read_journal(path) if e.result is not None
            }
    return found


def said(line: TrialResult) -> object:
    """What an outcome says, but for how long it took."""
    return line.outcome.reason if isinstance(line.outcome, Failed) else line.outcome.samples_ms


def table(out: Path) -> list[dict[str, Any]]:
    """The final table, but for how long it took."""
    return main_frame(load(out)).drop(columns="minutes").astype(str).to_dict("records")


@pytest.mark.slow
@pytest.mark.parametrize(
    "executor", ["{use: local}", "{use: local, workers: 3, searches: 2}", "{use: local, searches: 2}"]
)
def test_killed_at_any_moment_nothing_is_lost_and_the_table_is_the_same(
    workplace: Any, tmp_path: Path, executor: str, record_property: Any
) -> None:
    place = workplace.with_executor(executor)
    started_s = time.monotonic()
    assert not place.kill_after(place.start(tmp_path / "whole"), 300)
    took_s = time.monotonic() - started_s
    rng, kills, runs, evaluations = random.Random(SEED), 0, 0, 0
    while kills < KILLS:
        out = tmp_path / f"cut-{runs}"
        seen: dict[str, dict[int, Any]] = {}
        while place.kill_after(place.start(out), rng.random() * took_s * (1.0 if rng.random() < 0.5 else 0.3)):
            kills += 1
            now = told(out)
            for name, outcomes in seen.items():
                assert now[name].items() >= outcomes.items(), "an outcome that was reported is gone"
            seen = now
            if kills >= KILLS:
                break
        assert not place.kill_after(place.start(out), 300)
        whole, cut = told(tmp_path / "whole"), told(out)
        for name, outcomes in seen.items():
            assert cut[name].items() >= outcomes.items()
        for name, outcomes in cut.items():
            assert {number: said(line) for number, line in outcomes.items()} == {
                number: said(line) for number, line in whole[name].items()
            }
        assert table(out) == table(tmp_path / "whole")
        evaluations += sum(map(len, cut.values()))
        runs += 1
    record_property("kills", kills)
    print(f"{kills} kills over {runs} runs, {evaluations} evaluations")
