"""A whole experiment on a runtime that crashes, hangs, exceeds its memory and reports wrong times."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from small import save_chain

from harness.base.progress import NullProgress
from harness.config.experiment import parse_experiment
from harness.config.sections import TurnSchedule
from harness.graph.builder import GraphBuilder
from harness.measure.records import Failed, Measured
from harness.measure.turn_log import summarize_parts, summarize_turns
from harness.results.journal import read_journal
from harness.results.turns import CONFIRMATION_LOG_NAME, read_comparison, read_noise_floor
from harness.run.early_answer import EarlyAnswer
from harness.run.runner import run_experiment

REAL_WORKERS = True
EXPERIMENT = """
experiment: faults
models: [{use: net.onnx, calibration: {samples: 2}}]
backends: [{use: 'faulty:Lottery'}]
searchers: [random]
initial: [float]
baselines: []
budget: {evaluations: [14]}
sampling: {warmup_ms: 0, min_samples: 5, max_samples: 5}
confirmation: {builds: 3, rounds: 2, samples: 3, candidates: 1}
limits: {build_s: 20, measure_s: 1, memory_gb: 0.4}
"""
REASONS = (
    "ended by SIGSEGV", "ended by SIGABRT", "the runtime refuses this", "exited with status 3", "ended by SIGKILL",
    "more than 0.4 GB of memory", "no such kernel", "sample took longer than 1 s", "impossible latency of 0 ms",
    "impossible latency of nan ms", "impossible latency of -1.25 ms",
)  # fmt: skip


BOUNDED = """
experiment: bounded
models:
  - use: net.onnx
    calibration: {samples: 2}
    evaluator: {use: fidelity, params: {samples: 2}}
    shape_set: {shapes: [{dims: {batch: 1}}, {dims: {batch: 4}}]}
backends: [{use: 'faulty:Reliable'}]
objective: {minimize: latency, max_drop: 100}
searchers: [random]
initial: [float, all]
baselines: []
budget: {evaluations: [4]}
sampling: {warmup_ms: 0, min_samples: 3, max_samples: 3}
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    save_chain(folder / "net.onnx", (4, 6, 8, 10), size=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "workers"))
        experiment = parse_experiment(EXPERIMENT, "faults.yaml", folder)
        run_experiment(experiment, out=folder / "out", observer=NullProgress())
    return folder / "out" / "net-Lottery-int8"


@pytest.fixture(scope="module")
def entries(task):
    return [entry for entry in read_journal(task / "runs" / "random-0.jsonl") if entry.result is not None]


def test_search_spends_budget_despite_failures(entries):
    assert len(entries) == 14
    assert 3 <= sum(entry.result is not None and isinstance(entry.result.outcome, Measured) for entry in entries) <= 11


def test_failures_record_their_reason(entries):
    failed = [entry.result.outcome for entry in entries if entry.result and isinstance(entry.result.outcome, Failed)]
    met = Counter(reason for outcome in failed for reason in REASONS if reason in outcome.reason)
    assert met.total() == len(failed), [outcome.reason for outcome in failed]
    assert len(met) >= 5
    fallen = [outcome for outcome in failed if "SIGSEGV" in outcome.reason]
    assert all("about to fall" in outcome.log_tail for outcome in fallen)


def test_best_row_is_faster_and_noise_floor_is_zero(task):
    summary = summarize_turns(
        read_comparison(task / CONFIRMATION_LOG_NAME), baseline="float", noise_floor=read_noise_floor(task)
    )
    best = max((row for row in summary.rows.values()), key=lambda row: row.speedup.value)
    assert best.verdict == "faster"
    assert best.recommended
    assert (read_noise_floor(task), summary.noise_floor) == (0.0, 0.0)


def test_workers_time_all_shapes_and_score_before_an_early_answer(tmp_path, monkeypatch):
    builder = GraphBuilder("net", seed=1)
    builder.output(builder.conv(builder.input("x", ("batch", 3, 8, 8)), 8, 3, pad=1))
    builder.save(tmp_path / "net.onnx")
    answers: list[EarlyAnswer] = []

    def stop(answer: EarlyAnswer) -> None:
        answers.append(answer)
        raise KeyboardInterrupt

    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "workers"))
    one_build = TurnSchedule(builds=1, rounds=4)  # each has a worker of its own
    monkeypatch.setattr("harness.run.confirm.confirmation.NOISE_FLOOR_SCHEDULE", one_build)
    experiment = parse_experiment(BOUNDED, "bounded.yaml", tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(experiment, out=tmp_path / "out", observer=NullProgress(), answers=stop)
    (answer,) = answers
    assert (answer.metric, answer.evaluations) == ("sqnr_db", 2)
    assert list(answer.shapes) == list(summarize_parts(answer.events, "float")) == ["batch=1", "batch=4"]
    assert answer.summary.rows[answer.digest].recommended
    outcomes = [
        entry.result.outcome for path in tmp_path.rglob("*.jsonl") for entry in read_journal(path) if entry.result
    ]
    assert [outcome.metrics["sqnr_db"] > 20 for outcome in outcomes if isinstance(outcome, Measured)] == [True, True]
