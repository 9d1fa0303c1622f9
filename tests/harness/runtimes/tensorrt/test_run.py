"""A whole experiment on TensorRT: searched, exported, scored and confirmed; on the fakes of both majors."""

import json
from pathlib import Path
from typing import Any

import onnx
import pytest

from harness.base.errors import UserError
from harness.base.progress import NullProgress
from harness.config.experiment import parse_experiment
from harness.graph.builder import GraphBuilder
from harness.graph.io.digests import digest_file
from harness.results.lines import read_lines
from harness.run.prepare.preflight import check_experiment
from harness.run.runner import run_experiment
from harness.run.verify.verify import verify
from harness.runtimes.tensorrt import benchmarker, options
from harness.runtimes.tensorrt.options import read_structure
from harness.workers.helper_process import call_in_helper_process

YAML = """
experiment: trt
models:
  - use: {model}
    label: net
    evaluator: {{use: fidelity, params: {{samples: 2}}}}
backends: [{{use: 'fake_machine:{backend}', label: tensorrt, params: {{precision: {precision}}}}}]
precision: [int8]
searchers: [random]
initial: none
baselines: [{baselines}]
budget: {{evaluations: [3]}}
sampling: {{warmup_ms: 0, min_samples: 3, max_samples: 3}}
confirmation: {{builds: 3, rounds: 2, samples: 3}}
"""


def run(folder: Path, **choices: str) -> Path:
    """The folder of the only task of an experiment that was run."""
    builder = GraphBuilder("net", seed=1)
    x = builder.op("Relu", builder.conv(builder.input("x", (1, 3, 8, 8)), 4, 3, pad=1))
    builder.output(builder.conv(x, 2, 1), name="y")
    text = YAML.format(model=builder.save(folder / "net.onnx"), **choices)
    out = folder / "out"
    out.mkdir(exist_ok=True)
    (out / "experiment.yaml").write_text(text)
    run_experiment(parse_experiment(text, "test", folder), out=out, observer=NullProgress())
    (task,) = [path for path in out.iterdir() if (path / "rows.json").exists()]
    return task


def rows_of(task: Path) -> dict[str, Any]:
    return {row["id"]: row for row in json.loads((task / "rows.json").read_text())["rows"]}


@pytest.mark.parametrize("major", [10, 11])
def test_experiment_runs_to_the_report(major, tmp_path):
    task = run(tmp_path, backend=f"TensorRT{major}", precision="f32", baselines="all, linear")
    facts = json.loads((task / "task.json").read_text())
    assert facts["backend"]["version"].startswith(f"{major}.")
    events = [json.loads(line) for _, line in read_lines(task / "confirmation.jsonl")]
    assert not [event for event in events if "failed" in json.dumps(event).lower()]
    files = {row["file"] for row in rows_of(task).values()}
    assert len(files) > 1
    for name in files:
        proto = onnx.load(task / "models" / name)
        zeros = {t.data_type for t in proto.graph.initializer if t.name.startswith("@qdq.zero")}
        assert zeros <= {onnx.TensorProto.INT8}


@pytest.fixture
def parsed(monkeypatch):
    """Each file that TensorRT was given, with its hash."""
    found: list[tuple[Path, str]] = []
    build = benchmarker.build_plan

    def noting(library: Any, source: Any, *args: Any) -> Any:
        found.append((source.path, digest_file(source.path)))
        return build(library, source, *args)

    monkeypatch.setattr(benchmarker, "build_plan", noting)
    return found


@pytest.mark.parametrize("major", [10, 11])
def test_fp16_delivered_files_equal_the_built_files(major, tmp_path, parsed, monkeypatch):
    casts: list[str] = []

    def counting(what: str, work: Any, path: Path, precision: str, **limits: float) -> onnx.ModelProto:
        casts.append(precision)
        return call_in_helper_process(what, work, path, precision, **limits)

    monkeypatch.setattr(options, "call_in_helper_process", counting)
    task = run(tmp_path, backend=f"HalfAndFull{major}", precision="f16", baselines="all, linear, ort_static")
    assert casts == ["f16"] * 2  # the float model and the PTQ tool's; no candidate
    rows = rows_of(task)
    assert {"float", "float-f32", "ort_static"} < rows.keys()
    confirmed = {digest for path, digest in parsed if path.parent == task / "models"}
    assert confirmed == {row["sha256"] for row in rows.values()}
    for name, row in rows.items():
        file = task / "models" / row["file"]
        assert digest_file(file) == row["sha256"]
        proto = read_structure(file)
        kinds = {t.data_type for t in proto.graph.initializer} - {onnx.TensorProto.INT8, onnx.TensorProto.INT64}
        assert kinds == {onnx.TensorProto.FLOAT if name == "float-f32" else onnx.TensorProto.FLOAT16}, name
        ends = {v.type.tensor_type.elem_type for v in (*proto.graph.input, *proto.graph.output)}
        assert ends == {onnx.TensorProto.FLOAT}


def test_a_delivered_fp16_file_can_be_verified(tmp_path):
    task = run(tmp_path, backend="TensorRT11", precision="f16", baselines="all")
    row = next(row for row in rows_of(task).values() if row["choices"] and any(row["choices"]))
    checks = verify(task / "models" / row["file"], NullProgress(), base=tmp_path)
    assert {check.what: check.holds for check in checks} == dict.fromkeys([c.what for c in checks], True), checks
    assert {"file", "edges", "accuracy"} <= {check.what for check in checks}


def test_missing_driver_is_reported_before_the_model_is_opened(tmp_path, monkeypatch):
    def late(*_: Any, **__: Any) -> Any:
        raise AssertionError("the model was opened first")

    monkeypatch.setattr("harness.run.prepare.task.open_model", late)
    with pytest.raises(UserError, match=r"no NVIDIA driver is loaded on this machine; install one"):
        run(tmp_path, backend="NoDriver", precision="auto", baselines="all, modelopt_ptq")


def test_the_check_of_an_experiment_needs_no_driver(tmp_path):
    text = YAML.format(model="zoo:resnet18", backend="NoDriver", precision="auto", baselines="all")
    assert check_experiment(parse_experiment(text.replace("evaluator", "# evaluator"), "test", tmp_path)) == ()
