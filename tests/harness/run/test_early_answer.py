"""Early answers: a confirmed file exists long before the search ends, and an interrupted run keeps it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

from harness.base.errors import UserError
from harness.base.files import read_json
from harness.base.progress import NullProgress
from harness.cli.run import run_and_report
from harness.config.experiment import Experiment, parse_experiment
from harness.graph.builder import GraphBuilder
from harness.measure.turn_log import TurnEvent
from harness.results.journal import read_journal
from harness.run.confirm.confirmation import PairedComparison, run_comparison
from harness.run.early_answer import EarlyAnswer, EarlyAnswers
from harness.run.runner import run_experiment

YAML = """
experiment: early
models: [{model}]
backends: [{{use: simulated, params: {{noise: 0.001, wanted_share: 0.9}}}}]
searchers: [random]
initial: [float, linear]
baselines: []
budget: {{evaluations: [8]}}
sampling: {{warmup_ms: 0, min_samples: 3, max_samples: 3}}
confirmation: {{builds: 3, rounds: 2, samples: 3}}
"""


def experiment(folder: Path, more: str = "") -> Experiment:
    builder = GraphBuilder("net", seed=1)
    x = builder.op("Relu", builder.conv(builder.input("x", (1, 8, 16, 16)), 8, 3, pad=1))
    x = builder.op("Relu", builder.conv(x, 8, 3, pad=1))
    builder.output(builder.conv(x, 8, 3, pad=1), name="y")
    return parse_experiment(YAML.format(model=builder.save(folder / "net.onnx")) + more, "test", folder)


def answers_of(folder: Path, config: Experiment) -> list[EarlyAnswer]:
    answers: list[EarlyAnswer] = []
    run_experiment(config, out=folder / "out", observer=NullProgress(), answers=answers.append)
    return answers


@pytest.fixture
def compared(monkeypatch):
    """Return the list to which each comparison of an early answer appends the digest of its row."""
    digests: list[str] = []

    def record(comparison: PairedComparison, *arguments: Any) -> tuple[TurnEvent, ...]:
        digests.extend(row.name for row in comparison.rows)
        return run_comparison(comparison, *arguments)

    monkeypatch.setattr("harness.run.early_answer.run_comparison", record)
    return digests


def test_first_answer_precedes_search_and_speedups_increase(tmp_path, compared):
    answers: list[EarlyAnswer] = []
    files: list[bytes] = []

    def keep(answer: EarlyAnswer) -> None:
        answers.append(answer)
        files.append(answer.file.read_bytes())

    run_experiment(experiment(tmp_path), out=tmp_path / "out", observer=NullProgress(), answers=keep)
    assert answers[0].evaluations == 0
    assert answers[0].digest not in compared, "it was timed with the noise floor"
    assert {answer.digest for answer in answers[1:]} <= set(compared)
    speedups = [answer.speedup for answer in answers]
    assert speedups == sorted(speedups)
    assert speedups[0] > 1.05
    for answer, file in zip(answers, files, strict=True):
        made = onnx.load_model_from_string(file)
        assert answer.pairs > 0
        assert any(node.op_type == "QuantizeLinear" for node in made.graph.node)
        assert answer.summary.rows[answer.digest].verdict == "faster"
        assert set(answer.summary.rows) == {answer.digest, "float"}
    (floor,) = (tmp_path / "out").glob("*/noise_floor.json")
    assert {event["row"] for event in read_json(floor)["events"]} == {"float", "A/A twin"}


def test_first_answer_under_accuracy_bound_follows_scoring(tmp_path, compared, monkeypatch):
    def bounded(*arguments: Any, **options: Any) -> EarlyAnswers:
        return EarlyAnswers(*arguments, **{**options, "metric": "top1"})

    monkeypatch.setattr("harness.run.runner.EarlyAnswers", bounded)
    answers = answers_of(tmp_path, experiment(tmp_path))
    assert answers[0].evaluations == 2
    assert answers[0].digest not in compared


def test_an_interrupted_run_keeps_the_confirmed_file(tmp_path, monkeypatch, capsys):
    def stop(answer: EarlyAnswer, out: Path, observer: object) -> str:
        (out / "kept.onnx").write_bytes(answer.file.read_bytes())
        return "take kept.onnx"

    monkeypatch.setattr("harness.ship.results_bundle.ship_answer", stop)
    monkeypatch.setattr("harness.run.runner.select_final", lambda *arguments: interrupt())
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run_and_report(experiment(tmp_path), out, anytime=True)
    assert capsys.readouterr().err.strip().endswith("take kept.onnx")
    assert onnx.load(out / "kept.onnx").graph.node
    (journal,) = out.glob("*/runs/*.jsonl")
    assert sum(1 for _ in read_journal(journal)) >= 8


def interrupt() -> None:
    raise KeyboardInterrupt


def test_no_early_answer_with_parallel_workers(tmp_path):
    assert not answers_of(tmp_path, experiment(tmp_path, more="executor: {workers: 2}"))


def test_run_without_time_left_evaluates_answered_placements(tmp_path):
    config = experiment(tmp_path)
    config = config.model_copy(update={"budget": config.budget.model_copy(update={"task_minutes": 1e-5})})
    answers = answers_of(tmp_path, config)
    (journal,) = (tmp_path / "out").glob("*/runs/*.jsonl*")
    evaluated = {entry.proposal.digest for entry in read_journal(tmp_path / journal) if entry.result}
    assert evaluated == {answer.digest for answer in answers} | {"e3b0c44298fc1c14"}, "and the float model"


def test_a_run_that_continues_after_an_answer_keeps_it_as_a_finalist(tmp_path, monkeypatch):
    answers: list[EarlyAnswer] = []

    def interrupted(answer: EarlyAnswer) -> None:
        answers.append(answer)
        raise KeyboardInterrupt

    config, out = experiment(tmp_path), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run_experiment(config, out=out, observer=NullProgress(), answers=interrupted)
    (file,) = out.glob("*/work/answers/*.onnx")
    file.write_bytes(b"of an interrupted write")
    run_experiment(config, out=out, observer=NullProgress(), answers=answers.append)
    (rows,) = out.glob("*/rows.json")
    evaluated = {entry.proposal.digest for entry in read_journal(*out.glob("*/runs/*.jsonl*")) if entry.result}
    assert answers[0].digest in evaluated
    assert all(onnx.load(path).graph.node for path in rows.parent.glob("models/*.onnx"))


def test_failed_initial_placement_does_not_prevent_answer(tmp_path):
    text = YAML.replace("noise: 0.001", "noise: 0.001, failure_rate: 0.5, seed: 3").replace("[float, ", "[float, all, ")
    config = parse_experiment(text.format(model=experiment(tmp_path).models[0].use), "test", tmp_path)
    answers = answers_of(tmp_path, config)
    assert answers
    assert all(answer.speedup > 1 for answer in answers)


def test_search_without_initial_placements_gives_answers(tmp_path, compared):
    text = YAML.replace("[random]", "[{{use: random, without: [initial]}}]")
    config = parse_experiment(text.format(model=experiment(tmp_path).models[0].use), "test", tmp_path)
    answers = answers_of(tmp_path, config)
    assert answers
    assert {answer.digest for answer in answers} <= set(compared), "nothing was timed with the noise floor"


def test_answer_is_confirmed_later_if_baseline_lacks_memory(tmp_path, compared, monkeypatch):
    def refuse(comparison: PairedComparison, *arguments: Any) -> tuple[TurnEvent, ...]:
        if comparison.rows and comparison.name.startswith("A/A"):
            raise UserError("the baseline failed: more than 0.4 GB of memory")
        return run_comparison(comparison, *arguments)

    monkeypatch.setattr("harness.run.confirm.confirmation.run_comparison", refuse)
    answers = answers_of(tmp_path, experiment(tmp_path))
    assert answers[0].evaluations == 2
    assert answers[0].digest in compared
