"""Pre-screening: what the compiler refuses or knows is neither built nor timed, and is in the journal."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
from compiler_cases import INT8, Case, Pair, save

from harness.base.errors import BuildFailed, UserError
from harness.base.progress import NullProgress
from harness.config.experiment import Experiment, parse_experiment
from harness.graph.builder import GraphBuilder
from harness.measure.records import Failed, Measured, Outcome
from harness.plugins.api import Candidate
from harness.results.journal import JournalEntry, read_journal
from harness.results.lines import read_lines
from harness.run.prepare import preflight
from harness.run.prepare.preflight import check_experiment
from harness.run.runner import run_experiment
from harness.run.search import prescreening
from harness.run.search.prescreening import Prescreening, count_prescreened, kernels_digest
from harness.runtimes.rtx_compile.compiler import Compilation, Kernel, KernelTensor, Refusal

INSTALLED = pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="needs the extra rtx")
TIMED = Measured(samples_ms=(1.0, 1.1), build_s=2.0, measure_s=3.0)


def kernel(name: str = "a", kind: str = "conv", storage: str = "int8") -> Kernel:
    tensor = KernelTensor(name=name, shape=(1, 8), type=storage)
    return Kernel(name=name, kind=kind, inputs=(tensor,), constants=(), outputs=(tensor,), tactic="t", origin=(name,))


def built(*kernels: Kernel) -> Compilation:
    return Compilation(target="sm89", version="1.7", build_s=1.0, kernels=kernels)


def refused(**more: Any) -> Compilation:
    return replace(built(), refusal=Refusal(stage="parser", node="n", message="no kernel", **more))


@pytest.fixture
def screen(monkeypatch):
    """Runs candidates with these verdicts; returns their outcomes and the digests of those that were timed."""

    def screen(screening: Prescreening, verdicts: dict[str, Any]) -> tuple[list[Outcome], list[str]]:
        def compile_file(path: Path, target: str) -> Compilation:
            assert target == "sm89"
            verdict = verdicts[path.name]
            if isinstance(verdict, Exception):
                raise verdict
            return verdict

        timed: list[str] = []

        def trial(candidate: Candidate, incumbent: Any) -> Outcome:
            timed.append(candidate.digest)
            return replace(TIMED, info={"engine": candidate.digest})

        monkeypatch.setattr(prescreening, "compile_file", compile_file)
        attempt = screening.wrap(trial, SimpleNamespace(examine=lambda candidate, look: look(candidate.source())))
        made = [Candidate(digest=name, edges=(), source=lambda n=name: Path(n)) for name in verdicts]
        return [attempt(candidate, None) for candidate in made], timed

    return screen


def test_refused_and_equal_candidates_are_not_timed(screen):
    verdicts = {"a": built(kernel()), "b": built(kernel("b")), "c": refused(), "d": built(kernel(storage="fp8"))}
    outcomes, timed = screen(Prescreening("sm89", (), reuse=True), verdicts)
    first, second, third, _ = outcomes
    assert timed == ["a", "d"]
    assert second.info == {**first.info, "equal_kernels": "a"}
    assert (second.samples_ms, second.build_s, second.measure_s) == (first.samples_ms, 0.0, 0.0)
    assert third.stage == "build"
    assert "no kernel" in third.reason
    assert count_prescreened(outcomes) == {"timed": 2, "equal": 1, "refused": 1}


def test_prescreening_reuses_outcomes_of_journal(screen):
    (first,), _ = screen(Prescreening("sm89", (), reuse=True), {"a": built(kernel())})
    asked: Any = type("Asked", (), {"digest": "a"})
    result: Any = type("Result", (), {"outcome": first})
    entries = [JournalEntry(proposal=asked, result=result), JournalEntry(proposal=asked)]
    (again,), timed = screen(Prescreening("sm89", entries, reuse=True), {"b": built(kernel())})
    assert (again.info["equal_kernels"], timed) == ("a", [])


def test_equal_kernels_are_not_reused_with_accuracy(screen):
    verdicts = {"a": built(kernel()), "b": built(kernel()), "c": refused()}
    outcomes, timed = screen(Prescreening("sm89", (), reuse=False), verdicts)
    assert timed == ["a", "b"]
    assert isinstance(outcomes[2], Failed)


def test_compiler_crash_is_no_refusal(screen):
    verdicts = {"a": refused(crashed=True), "b": BuildFailed("a log of an unknown form")}
    assert screen(Prescreening("sm89", (), reuse=True), verdicts)[1] == ["a", "b"]


YAML = """
experiment: screened
models: [{model}]
backends: [{{use: 'fake_machine:TensorRT11', label: tensorrt, params: {{precision: f32}}}}]
searchers: [random]
initial: none
baselines: []
budget: {{evaluations: [{count}]}}
sampling: {{warmup_ms: 0, min_samples: 3, max_samples: 3}}
confirmation: {{builds: 3, rounds: 2, samples: 3}}
prescreening: sm89
"""


def experiment(folder: Path, count: int, more: str = "") -> Experiment:
    builder = GraphBuilder("net", seed=1)
    x = builder.op("Relu", builder.conv(builder.input("x", (1, 3, 8, 8)), 4, 3, pad=1))
    x = builder.op("Relu", builder.conv(x, 4, 3, pad=1))
    builder.output(builder.conv(x, 2, 1), name="y")
    text = YAML.format(model=builder.save(folder / "net.onnx"), count=count) + more
    return parse_experiment(text, "test", folder)


@pytest.mark.parametrize("more", ["", "executor: {workers: 2}\n"])
def test_resumed_search_compiles_each_candidate_once(more, tmp_path, monkeypatch):
    """The stand-in of the compiler makes one kernel of each model, by the number of its pairs modulo 3."""
    compiled: list[str] = []

    def compile_file(path: Path, target: str) -> Compilation:
        compiled.append(path.name)
        pairs = sum(node.op_type == "QuantizeLinear" for node in onnx.load(path).graph.node)
        return refused() if pairs % 3 == 2 else built(kernel(kind=f"k{pairs % 3}"))

    monkeypatch.setattr(prescreening, "compile_file", compile_file)
    out = tmp_path / "out"
    run_experiment(experiment(tmp_path, 4, more), out=out, observer=NullProgress())
    (journal,) = [path.with_suffix("") for path in out.glob("*/runs/*.jsonl.gz")]
    first = [entry.result for entry in read_journal(journal) if entry.result]
    run_experiment(experiment(tmp_path, 8, more), out=out, observer=NullProgress())
    assert [entry.result for entry in read_journal(journal) if entry.result][:4] == first
    outcomes = [entry.result.outcome for entry in read_journal(journal) if entry.result]
    assert len(compiled) == len(outcomes)
    counts = count_prescreened(outcomes)
    assert counts.total() == len(outcomes) == 8
    assert counts["equal"] > 0 or more  # two workers may take equal ones at once
    assert counts["refused"] > 0
    assert b'"prescreening":"sm89"' in next(read_lines(journal))[1]


def test_prescreening_needs_compiler_and_tensorrt_backend(tmp_path, monkeypatch):
    def missing() -> None:
        raise UserError("no compiler: pip install it")

    monkeypatch.setattr(preflight, "import_compiler", missing)
    text = "experiment: e\nmodels: [zoo:resnet18]\nbackends: [openvino, tensorrt]\nprescreening: sm89\n"
    with pytest.raises(UserError) as caught:
        check_experiment(parse_experiment(text, "test", tmp_path))
    assert "backends.0" in str(caught.value)
    assert "backends.1" not in str(caught.value)
    assert "prescreening: no compiler" in str(caught.value)
    with pytest.raises(UserError, match="prescreening"):
        parse_experiment(text.replace("sm89", "sm90"), "test", tmp_path)


@INSTALLED
def test_the_compiler_itself_gives_equal_kernels_for_pairs_without_effect(tmp_path):
    from harness.runtimes.rtx_compile.compiler import compile_file

    def digest(case: Case) -> str:
        return kernels_digest(compile_file(save(case, tmp_path / "case.onnx"), "sm89").kernels)

    plain = digest(Case(operator="MatMul", pairs=(INT8, INT8)))
    assert digest(Case(operator="MatMul", pairs=(INT8, Pair(storage="int8", scale=0.07)))) == plain
    assert digest(Case(operator="MatMul", pairs=(Pair(), Pair()))) != plain
