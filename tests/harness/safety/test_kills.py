"""kill -9 at random moments of a run, resumed with the same call each time: nothing lost, nothing counted twice.

QDQ_KILLS sets how many (docs/explanation/reliability.md has the figures of 200); QDQ_SEED draws other moments.
QDQ_WORKER_KILLS sets how often a worker is killed, and not the driver (docs: 50).
"""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.measure.records import Failed, TrialResult
from harness.report.frames import main_frame
from harness.results.folder import load
from harness.results.journal import read_journal
from harness.results.lines import first_line

KILLS = int(os.environ.get("QDQ_KILLS", "6"))
WORKER_KILLS = int(os.environ.get("QDQ_WORKER_KILLS", "0"))
KILLS_PER_RUN = 3  # a task survives that many anywhere
WORKER_BODY = "harness.workers.sandbox"
SEED = int(os.environ.get("QDQ_SEED", "7"))


def told(out: Path) -> dict[str, dict[int, Any]]:
    """Outcomes by journal and number, as they stand on the disk."""
    found = {}
    for path in sorted(out.glob("*/runs/*.jsonl*")):
        if first_line(path):
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
def test_killed_run_resumes_without_loss_and_with_same_table(workplace, tmp_path, executor, record_property):
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


def kill_workers(moments_s: list[float], done: threading.Event, killed: list[float]) -> None:
    """Kill a worker of this process at each moment, or as soon as there is one."""
    begin_s = time.monotonic()
    for moment_s in sorted(moments_s):
        done.wait(max(0.0, begin_s + moment_s - time.monotonic()))
        while not done.is_set():
            try:
                workers = [each for each in psutil.Process().children() if WORKER_BODY in each.cmdline()]
                if workers:
                    workers[0].kill()
                    killed.append(moment_s)
                    break
            except psutil.Error:  # it ended meanwhile
                continue
            done.wait(0.002)


@pytest.mark.slow
@pytest.mark.skipif(not WORKER_KILLS, reason="takes minutes; test_sandbox.py kills single workers")
def test_killed_worker_is_retried_with_same_table(workplace, tmp_path):
    place = workplace.with_workers()
    started_s = time.monotonic()
    place.run(tmp_path / "whole")
    took_s, whole = time.monotonic() - started_s, told(tmp_path / "whole")
    rng, runs = random.Random(SEED), 0
    killed: list[float] = []
    while len(killed) < WORKER_KILLS:
        out, done = tmp_path / f"cut-{runs}", threading.Event()
        moments_s = [rng.random() * took_s for _ in range(min(KILLS_PER_RUN, WORKER_KILLS - len(killed)))]
        killer = threading.Thread(target=kill_workers, args=(moments_s, done, killed))
        killer.start()
        place.run(out)
        done.set()
        killer.join()
        cut = told(out)
        assert cut.keys() == whole.keys()
        for name, outcomes in cut.items():
            assert {number: said(line) for number, line in outcomes.items()} == {
                number: said(line) for number, line in whole[name].items()
            }
        assert table(out) == table(tmp_path / "whole")
        runs += 1
    print(f"{len(killed)} workers killed over {runs} runs")
