"""--accept-changes, --retry-failed, and the owner of a results folder: messages when an experiment continues."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
from small import qdq, save_chain
from stored import forget_task, read_records, read_text

from harness.base.files import read_json, write_json
from harness.base.paths import HOST_VARIABLE
from harness.base.progress import NullProgress
from harness.config.experiment import load_experiment
from harness.report.frames import main_frame
from harness.results.artifacts import read_finalists
from harness.results.folder import load
from harness.results.journal import RETRY_ORIGIN, read_journal
from harness.results.ownership import owned_results_dir
from harness.run.runner import MAX_WORKER_LOSSES, run_with_recovery
from harness.workers.engines import WorkerLost

EXPERIMENT = """
experiment: small
models: [{use: net.onnx, calibration: {samples: 2}}]
backends: [{use: simulated, params: {seed: 5, noise: 0.0, failure_rate: 0.3}}]
searchers: [random]
initial: [float, linear]
baselines: [linear]
budget: {evaluations: [12]}
seeds: [0]
confirmation: {builds: 3, rounds: 2, samples: 3}
"""
TASK = "net-simulated-int8"


def write_model(path: Path, seed: int) -> None:
    """Three convolutions with weights of their own."""
    save_chain(path, (8, 8, 12), seed=seed)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sections")
    write_model(folder / "net.onnx", seed=1)
    (folder / "small.yaml").write_text(EXPERIMENT)
    assert qdq("run", str(folder / "small.yaml"), "--out", str(folder / "out")) == 0
    return folder


@pytest.fixture
def copy(done, tmp_path):
    shutil.copytree(done, tmp_path / "copy")
    return tmp_path / "copy"


def age(copy: Path) -> None:
    """As if the results were begun with another version of NumPy."""
    forget_task(copy / "out" / TASK)
    path = copy / "out" / TASK / "env.json"
    facts = read_json(path)
    facts["packages"]["numpy"] = "1.0"
    write_json(path, facts)


def test_accepted_change_archives_earlier_results(copy, capsys):
    age(copy)
    before = read_text(copy / "out" / TASK / "runs" / "random-0.jsonl")
    assert qdq("run", str(copy / "small.yaml"), "--out", str(copy / "out")) == 2
    assert "packages.numpy: '1.0' -> " in capsys.readouterr().err
    assert qdq("run", str(copy / "small.yaml"), "--out", str(copy / "out"), "--accept-changes") == 0
    assert f"accepted: the earlier results are in {TASK}.1" in capsys.readouterr().err
    assert read_text(copy / "out" / f"{TASK}.1" / "runs" / "random-0.jsonl") == before
    frame = main_frame(load(copy / "out"))
    assert set(frame["task"]) == {TASK, f"{TASK}.1"}
    assert (frame.groupby("task")["method"].count() == 3).all()
    assert qdq("run", str(copy / "small.yaml"), "--out", str(copy / "out")) == 0, "and it continues without the flag"


def test_changed_model_is_refused_or_archived_if_accepted(copy, capsys):
    write_model(copy / "net.onnx", seed=2)
    command = ["run", str(copy / "small.yaml"), "--out", str(copy / "out")]
    assert qdq(*command) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert re.search(r"model_sha256: '[0-9a-f]+' -> '[0-9a-f]+'", error), error
    assert "--accept-changes" in error
    assert qdq(*command, "--accept-changes") == 0
    assert set(main_frame(load(copy / "out"))["task"]) == {TASK, f"{TASK}.1"}


def test_added_seeds_continue_existing_results(copy, capsys):
    (copy / "small.yaml").write_text(EXPERIMENT.replace("seeds: [0]", "seeds: [0, 1]"))
    runs = copy / "out" / TASK / "runs"
    before = read_text(runs / "random-0.jsonl")
    assert qdq("run", str(copy / "small.yaml"), "--out", str(copy / "out")) == 0
    assert "seeds: 1 added" in capsys.readouterr().err
    assert read_text(runs / "random-0.jsonl") == before
    assert read_text(runs / "random-1.jsonl")
    assert not (copy / "out" / f"{TASK}.1").exists()
    assert "seeds:\n- 0\n" in (copy / "out" / "experiment.1.yaml").read_text()


def confirmed(task: Path) -> dict[str, str]:
    """The rows that the confirmation is of, with the hashes of their files."""
    rows: dict[str, str] = read_records(task / "confirmation.jsonl")[0]["rows"]
    return rows


def test_larger_budget_continues_and_smaller_is_refused(copy, capsys):
    task, command = copy / "out" / TASK, ["run", str(copy / "small.yaml"), "--out", str(copy / "out")]
    journal = task / "runs" / "random-0.jsonl"
    before = read_text(journal)
    (copy / "small.yaml").write_text(EXPERIMENT.replace("[12]", "[12, 15]"))
    assert qdq(*command) == 0
    assert "budget 12 -> 12, 15: continuing from the existing results" in capsys.readouterr().err
    assert read_text(journal).startswith(before), "nothing is measured twice"
    assert len({entry.proposal.digest for entry in read_journal(journal)}) == 15
    rows, picks = read_finalists(task)
    assert {pick.budget for pick in picks if pick.kind == "search"} == {12, 15}
    assert confirmed(task) == {row.id: row.sha256 for row in rows}, "what is shown was confirmed"
    assert not (copy / "out" / f"{TASK}.1").exists()
    (copy / "small.yaml").write_text(EXPERIMENT)
    assert qdq(*command) == 2
    assert "different: budget); use another --out, or --accept-changes" in capsys.readouterr().err


def test_added_searcher_and_baseline_continue_existing_results(copy):
    task = copy / "out" / TASK
    before = read_text(task / "runs" / "random-0.jsonl")
    more = EXPERIMENT.replace("[random]", "[random, evolutionary]").replace(
        "baselines: [linear]", "baselines: [linear, all]"
    )
    (copy / "small.yaml").write_text(more)
    assert qdq("run", str(copy / "small.yaml"), "--out", str(copy / "out")) == 0
    assert read_text(task / "runs" / "random-0.jsonl") == before
    assert list(main_frame(load(copy / "out"))["method"]) == ["float", "linear", "all", "random", "evolutionary"]
    assert confirmed(task) == {row.id: row.sha256 for row in read_finalists(task)[0]}


def test_changed_executor_continues_unless_window_differs(copy, capsys):
    out = str(copy / "out")
    (copy / "small.yaml").write_text(f"{EXPERIMENT}executor: {{use: local, workers: 3, window: 1}}\n")
    assert qdq("run", str(copy / "small.yaml"), "--out", out) == 0
    (copy / "small.yaml").write_text(f"{EXPERIMENT}executor: {{use: local, workers: 2}}\n")
    assert qdq("run", str(copy / "small.yaml"), "--out", out) == 2
    assert "window: None -> 3" in capsys.readouterr().err


def test_retry_failed_repeats_failed_trials_once(copy):
    path = copy / "out" / TASK / "runs" / "random-0.jsonl"
    lines = read_text(path).splitlines(keepends=True)
    failed = sum('"status":"failed"' in line for line in lines)
    assert failed
    assert qdq("run", str(copy / "small.yaml"), "--out", str(copy / "out"), "--retry-failed") == 0
    retried = [entry for entry in read_journal(path) if entry.proposal.origin == RETRY_ORIGIN]
    assert len(retried) == failed
    assert read_text(path).startswith("".join(lines)), "what was there stays there"
    assert qdq("run", str(copy / "small.yaml"), "--out", str(copy / "out")) == 0


@pytest.mark.parametrize(("with_host", "owner"), [("0", ""), ("1", r" of \w+ on \S+")])
def test_owner_of_locked_folder_is_named(done, tmp_path, capsys, monkeypatch, with_host, owner):
    monkeypatch.setenv(HOST_VARIABLE, with_host)
    with owned_results_dir(tmp_path / "out", load_experiment(done / "small.yaml")):
        assert qdq("run", str(done / "small.yaml"), "--out", str(tmp_path / "out")) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert re.search(rf"process {os.getpid()}{owner}, since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d", error)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that is read-only")
def test_read_only_folder_is_refused(done, capsys):
    assert qdq("run", str(done / "small.yaml"), "--out", "/proc/self/out") == 2
    error = capsys.readouterr().err
    assert "/proc/self/out: cannot be written (" in error
    assert "use another --out" in error


def test_wall_clock_jumps_do_not_change_results(done, tmp_path, monkeypatch):
    import time

    now, calls = time.time(), iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: now + (-1) ** next(calls) * 86400.0)
    assert qdq("run", str(done / "small.yaml"), "--out", str(tmp_path / "out")) == 0
    frames = [main_frame(load(out)).drop(columns="minutes").astype(str) for out in (done / "out", tmp_path / "out")]
    assert frames[0].equals(frames[1])
    minutes = main_frame(load(tmp_path / "out"))["minutes"].dropna()
    assert ((minutes >= 0) & (minutes < 10)).all()


@pytest.mark.parametrize(("lost", "ends"), [(MAX_WORKER_LOSSES, True), (MAX_WORKER_LOSSES + 1, False)])
def test_task_continues_after_limited_number_of_worker_losses(tmp_path, lost, ends):
    begun, said = [], []

    class Loud(NullProgress):
        def say(self, text: str) -> None:
            said.append(text)

    def work() -> None:
        begun.append(1)
        if len(begun) <= lost:
            raise WorkerLost("the worker on node-a was lost: power cut")

    with nullcontext() if ends else pytest.raises(WorkerLost, match="node-a was lost"):
        run_with_recovery(tmp_path / "task", work, False, Loud())
    assert len(begun) == MAX_WORKER_LOSSES + 1
    assert (
        said
        == ["task: the worker on node-a was lost: power cut; continuing with the remaining workers"] * MAX_WORKER_LOSSES
    )
