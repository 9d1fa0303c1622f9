"""TensorRT on an NVIDIA GPU: timer, noise floor, searches, verdicts; and the same comparisons on simulated libraries.

`experiments/scripts/validate_gpu.py` runs all tests with the mark `gpu` and packs their results.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import compiler_cases
import pytest

from harness import zoo
from harness.base.errors import BuildFailed, CandidateError, UserError
from harness.base.files import read_json
from harness.base.paths import hide_paths
from harness.graph.builder import GraphBuilder
from harness.graph.qdq.file_checks import FP8_CAPABILITY
from harness.plugins.registry import create_plugin
from harness.results.manifest import find_changed_files
from harness.runtimes.cuda import GpuTimer, open_device
from harness.runtimes.tensorrt.benchmarker import TensorRTBenchmarker, profile_layers
from harness.runtimes.tensorrt.library import TensorRTHandle, TimingCache, build_plan, load_engine, open_library
from harness.runtimes.tensorrt.options import ParsedSource, TensorRTParameters, read_structure
from harness.runtimes.testing import file_candidate
from harness.workers.helper_process import RUNTIME_FACTOR, HelperCallFailed, call_in_helper_process

ROOT = Path(__file__).parents[3]
ROUNDS, READINGS = 10, 50
"""Rounds of a comparison in turns, and inferences of a turn."""
MAX_DIFFERENCE, MAX_DIFFERENCE_MS = 0.02, 0.002
"""Two timings agree if they differ by less than this share of the second, or by less than the resolution in ms."""
EXPERIMENT = """experiment: gpu_{model}
models: [{{use: "zoo:{model}", evaluator: {{use: fidelity, params: {{samples: 4}}}}}}]
backends: [tensorrt]
precision: [{precisions}]
initial: [float, all, linear, linear_add, movers]
searchers: [{searchers}]
baselines: [{baselines}]
budget: {{evaluations: [40]}}
"""


@pytest.fixture
def results(tmp_path):
    """Folder of results that a repeated test continues."""
    return Path(os.environ.get("QDQ_GPU_RESULTS", tmp_path))


def require_gpu() -> Any:
    try:
        return open_device()
    except UserError as error:
        pytest.skip(str(error))


def require_runtime(use: str, **params: Any) -> Any:
    try:
        made = create_plugin("benchmarker", use, params)
        made.describe()
    except (UserError, CandidateError) as error:
        pytest.skip(" ".join(str(error).split()))
    return made


def run_qdq(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "harness.cli.main", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or done.stdout


def require_agreement(one_ms: list[float], other_ms: list[float]) -> str:
    """Require that two timings, taken in turns, agree; return the figures, with the ratio in each turn."""
    one, other = median(one_ms), median(other_ms)
    ratios = sorted(a / b for a, b in zip(one_ms, other_ms, strict=True))
    figures = f"{one:.4f} and {other:.4f} ms; ratio {one / other:.4f}, in turns {ratios[0]:.4f} to {ratios[-1]:.4f}"
    assert abs(one - other) <= max(MAX_DIFFERENCE * other, MAX_DIFFERENCE_MS), figures
    return figures


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2**26, 2**30])
def test_timer_agrees_with_itself(size, record_property):
    """The timer reads memsets equally with and without a CUDA graph, and on repetition (A/A)."""
    compare_timers(size, record_property)


def compare_timers(size: int, record_property: Any) -> None:
    cuda, device = require_gpu()
    size = min(size, device.memory_bytes // 4)
    pointer = cuda.call("cudaMalloc", size)

    def enqueue(stream: int) -> None:
        cuda.call("cudaMemsetAsync", pointer, 0, size, stream)

    try:
        with GpuTimer(cuda, enqueue, graph=False) as plain, GpuTimer(cuda, enqueue) as graph:
            plain.warm_up(200.0)
            turns = [(plain.read(READINGS), graph.read(READINGS), graph.read(READINGS)) for _ in range(ROUNDS)]
    finally:
        cuda.call("cudaFree", pointer)
    plain_ms, graph_ms, again_ms = ([median(turn[side].gpu_ms) for turn in turns] for side in range(3))
    record_property("with and without a graph", require_agreement(plain_ms, graph_ms))
    record_property("A/A", require_agreement(again_ms, graph_ms))
    assert max(each.host_bound for turn in turns for each in turn[1:]) == 0, "a reading includes waiting for the host"


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [True, False])
def test_timer_agrees_with_trtexec(graph, tmp_path, record_property):
    path = zoo.write_model("resnet18", tmp_path / "model.onnx")
    record_property("figures", compare_with_trtexec(path, graph=graph))


def compare_with_trtexec(path: Path, *, graph: bool) -> str:
    """Compare the timer with the GPU compute time that trtexec exports, on trtexec's own engine."""
    theirs, ours = (require_runtime(use, cuda_graph=graph) for use in ("trtexec", "tensorrt"))
    built = theirs.build(file_candidate(path), path.parent)
    with theirs.open(built) as one, ours.open(ours.load(built.engine.plan)) as other:
        turns = [(median(other.sample(READINGS)), median(one.sample(READINGS))) for _ in range(ROUNDS)]
    return require_agreement(*map(list, zip(*turns, strict=True)))


@pytest.mark.gpu
def test_noise_floor_of_rebuilt_model_is_measured(results):
    require_runtime("tensorrt")
    run_qdq("bench", "noise", "zoo:resnet18", "--backend", "tensorrt", "--out", str(results / "noise"))


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["resnet18", "encoder6"])
class TestSearches:
    """Searches on a CNN and a transformer; ModelOpt's tools are added to the results of `auto`."""

    def test_search_by_auto_times_every_row(self, model, results):
        self._search(model, results, "auto", "all, linear")

    def test_search_with_modelopt_times_every_row(self, model, results):
        pytest.importorskip("modelopt")
        self._search(model, results, "auto, modelopt", "all, linear, modelopt_ptq")

    def _search(self, model: str, results: Path, searchers: str, baselines: str) -> None:
        require_runtime("tensorrt")
        precisions = "int8, fp8" if open_device()[1].capability >= FP8_CAPABILITY else "int8"
        file, out = results / f"{model}.yaml", results / f"results-{model}"
        shown = {"model": model, "precisions": precisions, "searchers": searchers, "baselines": baselines}
        file.write_text(EXPERIMENT.format(**shown))
        run_qdq("run", str(file), "--out", str(out))
        with (out / "report" / "main.csv").open(newline="", encoding="utf-8") as table:
            untimed = [(row["method"], row["reason"]) for row in csv.DictReader(table) if not row["latency_ms"]]
        assert not untimed


@pytest.mark.gpu
def test_verdicts_of_tensorrt_are_compared_with_those_of_the_compiler(results, record_property):
    require_runtime("tensorrt")
    for name, figure in compare_verdicts(results / "verdicts.jsonl"):
        record_property(name, figure)


def compare_verdicts(journal: Path, cases: Any = compiler_cases) -> Iterator[tuple[str, str]]:
    """Yield the small models that only one of TensorRT and TensorRT-RTX's compiler accepts, with both verdicts.

    Verdicts are kept in the journal, so that an interrupted comparison continues. A difference is a finding; the only
    failure is a missing verdict.
    """
    recorded = cases.read_verdicts()
    lines = journal.read_text(encoding="utf-8").splitlines() if journal.exists() else []
    found = {row["case"]: row for row in map(json.loads, lines)}
    with journal.open("a", encoding="utf-8") as log:
        for case in cases.cases():
            if case.name not in found:
                path = cases.save(case, journal.with_name("case.onnx"))
                found[case.name] = {"case": case.name, **tensorrt_verdict(path, compiler_cases.node_name(case))}
                log.write(json.dumps(found[case.name]) + "\n")
                log.flush()
    for name, row in found.items():
        if (recorded[name] in ("parser", "builder")) != (row["verdict"] in ("parser", "builder", "crash", "error")):
            yield name, f"TensorRT-RTX {recorded[name]}, TensorRT {row['verdict']} {row['message']}"
    known = sum(row["verdict"] != "error" for row in found.values())
    assert known == len(recorded), f"{known} of {len(recorded)} verdicts"


def tensorrt_verdict(path: Path, node: str) -> dict[str, str]:
    """Return TensorRT's verdict in the words of `compiler_cases.verdict`, "crash" or "error", with its message."""
    try:
        precisions = call_in_helper_process(path.name, build_precisions, path, node, factor=RUNTIME_FACTOR)
    except BuildFailed as error:
        stage = "parser" if "cannot parse" in str(error) else "builder"
        return {"verdict": stage, "message": hide_paths(str(error))}
    except HelperCallFailed as error:
        return {"verdict": "crash", "message": error.how}
    except UserError:
        raise  # no GPU: no other model has a verdict either
    except Exception as error:  # of the bindings or of ours: one model only
        return {"verdict": "error", "message": hide_paths(f"{type(error).__name__}: {error}")}
    low = [kind for kind in precisions if kind in ("int8", "fp8")]
    return {"verdict": (low or ["float" if precisions else "built"])[0], "message": ""}


def build_precisions(path: Path, node: str) -> tuple[str, ...]:
    """Build an engine, without our checks before a build, and return the precisions of the layers of a node."""
    cuda, device = open_device()
    library, options = open_library(), TensorRTParameters(precision="tf32", profile=True)
    source = ParsedSource(path, read_structure(path), {})
    cache = TimingCache("cold", path.with_suffix(".none"))
    content, _ = build_plan(library, source, options, cache)
    engine = load_engine(library, content, path.name)
    ready = TensorRTHandle(library=library, cuda=cuda, device=device, cache=cache)
    return tuple(layer.precision for layer in profile_layers(ready, engine, 1) if node in layer.origin)


@pytest.mark.usefixtures("machine")
def test_wrong_timings_are_found_on_simulated_gpu(tmp_path, monkeypatch):
    import fake_trt

    compare_timers(2**20, lambda *_: None)
    builder = GraphBuilder("net", seed=1)
    x = builder.op("Relu", builder.conv(builder.input("x", (1, 3, 8, 8)), 4, 3, pad=1))
    builder.output(builder.conv(x, 2, 1), name="y")
    path = builder.save(tmp_path / "net.onnx")
    built = TensorRTBenchmarker().build(file_candidate(path), tmp_path)
    monkeypatch.setattr(TensorRTBenchmarker, "load", lambda self, path: built)
    with pytest.raises(AssertionError, match="ratio"):
        compare_with_trtexec(path, graph=True)
    monkeypatch.setattr(fake_trt, "KERNEL_MS", 0.78)
    compare_with_trtexec(path, graph=True)


class FewCases:
    """Some of the small models, with the verdicts of the compiler."""

    def __init__(self, recorded: dict[str, str]) -> None:
        self._recorded, self.saved = recorded, 0

    def read_verdicts(self) -> dict[str, str]:
        return self._recorded

    def cases(self) -> list[Any]:
        return [case for case in compiler_cases.cases() if case.name in self._recorded]

    def save(self, case: Any, path: Path) -> Path:
        self.saved += 1
        return compiler_cases.save(case, path)


@pytest.mark.usefixtures("machine")
def test_verdicts_are_compared_and_kept(tmp_path):
    small = FewCases({"MatMul int8 int8": "int8", "MatMul int8-zero=3 int8": "parser"})
    for _ in range(2):
        found = dict(compare_verdicts(tmp_path / "verdicts.jsonl", small))
        assert found.keys() == {"MatMul int8-zero=3 int8"}
        assert "TensorRT-RTX parser, TensorRT" in found["MatMul int8-zero=3 int8"]
    assert small.saved == 2


@pytest.mark.parametrize(
    ("failure", "verdict", "message"),
    [
        (BuildFailed("net: cannot parse the model"), "parser", "cannot parse the model"),
        (BuildFailed("net: builds no engine"), "builder", "builds no engine"),
        (HelperCallFailed("net", "was ended by SIGSEGV", crashed=True), "crash", "was ended by SIGSEGV"),
        (KeyError("name"), "error", "KeyError"),
    ],
)
def test_failed_build_is_a_verdict_on_one_model(tmp_path, monkeypatch, failure, verdict, message):
    def fail(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr(sys.modules[__name__], "call_in_helper_process", fail)
    found = tensorrt_verdict(tmp_path / "case.onnx", "node")
    assert found["verdict"] == verdict
    assert message in found["message"]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("validate_gpu", ROOT / "experiments" / "scripts" / "validate_gpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


STEPS = """
import os, pathlib, pytest
RESULTS = pathlib.Path(os.environ.get("QDQ_GPU_RESULTS", "."))

@pytest.mark.gpu
class TestPassing:
    def test_one(self, record_property):
        record_property("figure", 1.5)
        (RESULTS / "a.json").write_text("fridolin")
        (RESULTS / "b.json").write_text("fine")
        (RESULTS / "m.onnx").write_text("model")
        print("fridolin in", RESULTS)

    @pytest.mark.parametrize("case", [1, 2])
    def test_two(self, case): pytest.skip("one skipped test does not skip the step")

@pytest.mark.gpu
def test_failing():
    with (RESULTS / "n.txt").open("a") as file: file.write("x")
    assert False, "the reason " + (RESULTS / "n.txt").read_text()

@pytest.mark.gpu
def test_skipped():
    if not pathlib.Path(__file__).with_name("library").exists(): pytest.skip("no library")

@pytest.mark.gpu
def test_crashing(): os.kill(os.getpid(), 11)

def test_without_gpu(): raise AssertionError("not selected")
"""


def test_script_records_each_step_and_packs_results_without_names(tmp_path, monkeypatch, script):
    monkeypatch.setattr(script.getpass, "getuser", lambda: "fridolin")
    monkeypatch.setattr(script, "ROOT", tmp_path)
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["gpu: needs a GPU"]\n')
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_steps.py").write_text(STEPS)
    first = script.validate(tmp_path / "out")
    assert [(each["name"], each["status"]) for each in first] == [
        ("steps-TestPassing", "passed"), ("steps-failing", "failed"), ("steps-skipped", "skipped"),
        ("steps-crashing", "failed"),
    ]  # fmt: skip
    reasons = [each["reason"] for each in first]
    assert "the reason x" in reasons[1]
    assert "no library" in reasons[2]
    assert "signal 11" in reasons[3]
    (tmp_path / "tests" / "library").touch()
    again = script.validate(tmp_path / "out")
    assert [each["status"] for each in again] == ["passed", "failed", "passed", "failed"]
    assert again[1]["reason"] == reasons[1]
    retried = script.validate(tmp_path / "out", retry_failed=True)
    assert "the reason xx" in retried[1]["reason"]
    sent = tmp_path / "out" / "send"
    manifest = read_json(sent / "manifest.json")
    assert manifest["records"] == retried
    assert manifest["left_out"] == ["steps/steps-TestPassing/a.json"]
    passing = {file.removeprefix("steps/steps-TestPassing/") for file in manifest["files"] if "Passing" in file}
    assert passing == {"b.json", "log.txt", "record.json", "report.xml"}
    assert '"figure" value="1.5"' in (sent / "steps/steps-TestPassing/report.xml").read_text()
    assert not list(find_changed_files(sent, manifest["files"]))
    assert "fridolin" not in "".join(path.read_text() for path in sent.rglob("*.*") if path.is_file())


def test_script_refuses_the_results_of_another_gpu(tmp_path, monkeypatch, script):
    gpu = {"name": "A", "driver_version": "1"}
    monkeypatch.setattr(script, "describe_environment", lambda: {"gpus": [dict(gpu)]})
    monkeypatch.setattr(script, "list_steps", lambda: {})
    script.validate(tmp_path / "out")
    gpu["name"] = "B"
    with pytest.raises(UserError, match="started with something else"):
        script.validate(tmp_path / "out")
