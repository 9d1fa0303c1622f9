"""One placement at several shapes: an engine for each, one combined reading, and every shape's own figures."""

import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx_models import activation_ranges, run_onnxruntime
from small import qdq

from harness.base.errors import BuildFailed, UserError
from harness.base.files import read_json
from harness.base.progress import NullProgress
from harness.config.experiment import load_experiment, parse_experiment
from harness.graph.builder import GraphBuilder
from harness.graph.load import load, save_to_folder
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import load_dialect
from harness.insight.attribution import attribute_row
from harness.measure.turn_log import summarize_parts, summarize_turns
from harness.plugins import registry
from harness.plugins.api import Candidate, ReportsParts
from harness.report.tables.catalog import build_tables
from harness.results.deploy_folder import read_bundle
from harness.results.folder import load as load_results
from harness.results.turns import CONFIRMATION_LOG_NAME, read_comparison
from harness.run.early_answer import EarlyAnswer
from harness.run.runner import run_experiment
from harness.run.verify.dynamic_check import write_dynamic_model
from harness.runtimes.shape_set import ShapeSet, TimedShape
from harness.runtimes.simulated import SimulatedBenchmarker
from harness.ship.bundle import deploy_script, find_target, run_script, write_bundle
from harness.ship.results_bundle import confirmation_facts, ship_answer

SHAPES = (TimedShape(label="batch=1", share=0.75, float_ms=2.0), TimedShape(label="batch=4", share=0.25, float_ms=4.0))
TASK = "net-simulated-int8"
EXPERIMENT = """
experiment: shapes
models:
  - use: net.onnx
    calibration: {samples: 2}
    shape_set: {objective: OBJECTIVE, shapes: [{dims: {batch: 1}}, {dims: {batch: 4, time: 6}}]}
    dims: {time: 3}
backends: [{use: simulated, params: {seed: 5, noise: 0.0}}]
searchers: [random]
initial: [float, all]
baselines: [all]
budget: {evaluations: [12]}
confirmation: {builds: 3, rounds: 2, samples: 3}
"""
FACTS: dict[str, Any] = {
    **dict.fromkeys(("metric", "score", "float_score", "drop", "bound")),
    "answer": "net.onnx", "method": "auto", "decision": "ship: fastest", "speedup": [2.0, 1.9, 2.1],
    "latency_ms": [1.0, 0.9, 1.1], "float_latency_ms": [2.0, 1.9, 2.1], "p99_ms": 1.2, "float_p99_ms": 2.2, "builds": 3,
    "noise_floor": 0.01, "python": "3", "packages": {}, "dynamic_remark": "", "experiment": {},
    "calibration": {"data": "8 samples", "method": "minmax", "ranges": "0"},
}  # fmt: skip
LABELS = ("batch=1", "batch=4, time=6")


def save_net(path: Path) -> Path:
    """Write a model that computes the shape of its Reshape from those of its inputs."""
    g, rng = GraphBuilder("net", seed=1), np.random.default_rng(0)
    x = g.input("x", ("batch", "time", 8))
    batch = g.op("Gather", g.op("Shape", x), g.const(np.array([0])))
    for rows in (8, 16):
        x = g.op("Relu", g.op("MatMul", x, g.const(rng.standard_normal((rows, 16)).astype(np.float32) / 4)))
    x = g.op("Reshape", x, g.op("Concat", batch, g.const(np.array([-1, 2, 8])), axis=0))
    weight = rng.standard_normal((8, 4)).astype(np.float32)
    g.output(g.op("MatMul", x, g.const(weight)), ("batch", "time", 2, 4), name="y")
    return g.save(path)


def test_weighted_objective_is_the_weighted_mean_latency():
    shapes = ShapeSet(objective="weighted", float_file=Path("f.onnx"), shapes=SHAPES)
    np.testing.assert_allclose(shapes.combine(np.array([[1.0, 2.0], [4.0, 8.0]])), [1.75, 3.5])
    assert shapes.text == "weighted mean over batch=1 (0.75); batch=4 (0.25)"


@pytest.mark.parametrize(("latencies_ms", "ratio"), [([1.0, 3.0], 0.75), ([1.9, 1.0], 0.95), ([2.0, 4.0], 1.0)])
def test_worst_objective_is_the_largest_ratio_to_float(latencies_ms, ratio):
    shapes = ShapeSet(objective="worst", float_file=Path("f.onnx"), shapes=SHAPES)
    one, base = (shapes.combine(np.array(each)[:, None]) for each in (latencies_ms, [2.0, 4.0]))
    np.testing.assert_allclose(one / base, ratio)
    np.testing.assert_allclose(base, 3.0)


def test_worst_objective_selects_the_shape_by_medians():
    shapes = ShapeSet(objective="worst", float_file=Path("f.onnx"), shapes=SHAPES)
    found = shapes.combine(np.array([[1.0, 9.0, 1.0], [3.0, 3.0, 3.0]]))
    np.testing.assert_allclose(found, [2.25] * 3)


@pytest.fixture(scope="module", params=["weighted", "worst"])
def done(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    save_net(folder / "net.onnx")
    (folder / "e.yaml").write_text(EXPERIMENT.replace("OBJECTIVE", request.param))
    run_experiment(load_experiment(folder / "e.yaml"), out=folder / request.param, observer=NullProgress())
    return folder / request.param


def test_a_search_minimises_the_objective_and_reports_every_shape(done):
    events, landscape = read_comparison(done / TASK / CONFIRMATION_LOG_NAME), SimulatedBenchmarker(seed=5, noise=0.0)
    whole, parts = summarize_turns(events, "float"), summarize_parts(events, "float")
    assert tuple(parts) == LABELS
    speedups = {row: [parts[label].rows[row].speedup.value for label in LABELS] for row in whole.rows}
    assert len({round(value, 6) for own in speedups.values() for value in own}) > 3, "shapes differ, and rows do"
    for row, summary in whole.rows.items():
        wanted = min(speedups[row]) if done.name == "worst" else 2 / sum(1 / each for each in speedups[row])
        assert summary.speedup.value == pytest.approx(wanted, rel=1e-6)
    assert parts[LABELS[0]].rows["float"].latency_ms.value == pytest.approx(landscape.truth_ms(()))


def test_tables_and_facts_name_the_shapes(done):
    facts = read_json(done / TASK / "task.json")
    assert facts["shapes"] == {"batch=1": {"x": [1, 3, 8]}, "batch=4, time=6": {"x": [4, 6, 8]}}
    assert facts["inputs"] == {"x": [1, 3, 8]}
    results = load_results(done)
    (task,) = results.tasks
    quantized = next(row for row in task.summaries if row != "float")
    shipped = confirmation_facts(task, task.events, quantized, facts["shapes"])["shapes"]
    assert {label: each["inputs"] for label, each in shipped.items()} == facts["shapes"]
    assert all(len(each["speedup"]) == 3 for each in shipped.values())
    tables = {table.name: table for table in build_tables(results)}
    assert all("latency" in table.note and "batch=4, time=6" in table.note for table in tables.values())
    assert {f"{label}, speedup" for label in LABELS} < set(tables["shapes"].cells)
    assert (done / TASK / "shapes.json").exists() == (done.name == "worst")


def test_the_file_with_dynamic_axes_is_checked_at_the_shapes(done):
    remarks = [each["remark"] for each in read_json(done / TASK / "dynamic.json").values() if isinstance(each, dict)]
    assert remarks
    assert all("checked at batch 4, time 6" in remark for remark in remarks)


def make_candidate(tmp_path: Path, use: str) -> tuple[Candidate, ShapeSet]:
    path = save_net(tmp_path / "net.onnx")
    model, other = (load(path, dims={"batch": batch, "time": 3}) for batch in (1, 4))
    dialect = load_dialect(use)
    space = build_space(model, dialect, precisions=("int8",))
    feeds = [{"x": np.random.default_rng(seed).random((1, 3, 8), np.float32)} for seed in range(2)]
    inserter = Inserter(model, dialect, activation_ranges(model, feeds))
    edges = space.resolve(space.quantize_all())
    file = inserter.write(edges, tmp_path, name="all")
    shapes = (SHAPES[0], replace(SHAPES[1], file=save_to_folder(other, tmp_path / "4")))
    made = ShapeSet(objective="weighted", float_file=save_to_folder(model, tmp_path / "1"), shapes=shapes)
    return Candidate(digest="all", edges=edges, source=lambda: file), made


@pytest.mark.parametrize(("use", "params"), [("openvino", {"precision": "f32"}), ("onnxruntime", {})])
def test_placement_is_built_at_every_shape(tmp_path, use, params):
    candidate, shapes = make_candidate(tmp_path, use)
    benchmarker = shapes(registry.create_plugin("benchmarker", use, params))
    feeds = {"x": np.random.default_rng(9).random((1, 3, 8), np.float32)}
    (tmp_path / "w").mkdir()
    with benchmarker.open(benchmarker.build(candidate, tmp_path / "w")) as probe:
        assert isinstance(probe, ReportsParts)
        readings = probe.sample(3)
        parts = probe.parts_ms(3)
        answer = probe.infer(feeds)["y"]
    assert len(readings) == 3
    assert set(parts) == {"batch=1", "batch=4"}
    (expected,) = run_onnxruntime(candidate.source(), feeds)
    np.testing.assert_allclose(answer, expected, atol=0.05)
    (moved,) = tmp_path.glob("w/*.onnx")
    four = {"x": np.repeat(feeds["x"], 4, axis=0)}
    np.testing.assert_allclose(run_onnxruntime(moved, four)[0], np.repeat(expected, 4, axis=0), atol=1e-5)
    assert benchmarker.describe()["options"]["shapes"] == shapes.text


def test_outputs_at_the_search_shape_use_a_separate_engine(tmp_path):
    candidate, shapes = make_candidate(tmp_path, "onnxruntime")
    only_other = replace(shapes, shapes=shapes.shapes[1:])
    benchmarker = only_other(registry.create_plugin("benchmarker", "onnxruntime", {}))
    (tmp_path / "w").mkdir()
    with benchmarker.open(benchmarker.build(candidate, tmp_path / "w")) as probe:
        assert probe.infer({"x": np.zeros((1, 3, 8), np.float32)})["y"].shape == (1, 3, 2, 4)


def test_file_with_unknown_nodes_fails_one_candidate(tmp_path):
    candidate, shapes = make_candidate(tmp_path, "onnxruntime")
    builder = GraphBuilder("other")
    builder.output(builder.op("Relu", builder.input("x", (1, 3, 8))), name="y")
    other = replace(candidate, source=lambda: builder.save(tmp_path / "other.onnx"))
    benchmarker = shapes(registry.create_plugin("benchmarker", "onnxruntime", {}))
    with pytest.raises(BuildFailed, match=r"at batch=4"):
        benchmarker.build(other, tmp_path)
    benchmarker.build(replace(other, alone=True), tmp_path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{shapes: [{dims: {batch: 1}}]}", "at least 2"),
        ("{shapes: [{dims: {batch: 1}}, {dims: {batch: 1}, weight: 2}]}", "'batch=1' appears twice"),
        ("{objective: worst, shapes: [{dims: {batch: 1}, weight: 2}, {dims: {batch: 2}}]}", "only for the objective"),
    ],
)
def test_invalid_shape_set_is_refused(entry, message):
    with pytest.raises(UserError, match=message):
        parse_experiment(f"experiment: e\nmodels: [{{use: zoo:mlp, shape_set: {entry}}}]", "e.yaml")


def test_unknown_symbols_are_refused_by_check(tmp_path, capsys):
    save_net(tmp_path / "net.onnx")
    (tmp_path / "e.yaml").write_text(EXPERIMENT.replace("OBJECTIVE", "worst").replace("batch: 4", "samples: 4"))
    assert qdq("run", str(tmp_path / "e.yaml"), "--check") == 2
    assert "shape_set.shapes.1" in capsys.readouterr().err


@pytest.mark.parametrize("several", [True, False])
def test_early_answer_has_the_dynamic_file_and_shapes(tmp_path, several):
    save_net(tmp_path / "net.onnx")

    def ship(answer: EarlyAnswer) -> None:
        runtime = dict(registry.create_plugin("benchmarker", "onnxruntime", {}).describe())
        ship_answer(replace(answer, runtime=runtime), tmp_path, NullProgress())
        raise KeyboardInterrupt

    text = EXPERIMENT.replace("OBJECTIVE", "weighted").replace("noise: 0.0", "noise: 0.001, wanted_share: 0.9")
    if not several:
        text = "\n".join(line for line in text.splitlines() if "shape_set" not in line)
    experiment = parse_experiment(text, "e.yaml", tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(experiment, out=tmp_path / "out", observer=NullProgress(), answers=ship)
    facts = read_bundle(tmp_path / "ship" / TASK)
    assert (tmp_path / "ship" / TASK / facts["dynamic_file"]).exists()
    inputs = {label: each["inputs"] for label, each in facts.get("shapes", {}).items()}
    assert inputs == (dict(zip(LABELS, [{"x": [1, 3, 8]}, {"x": [4, 6, 8]}], strict=True)) if several else {})
    if several:
        assert not facts["experiment"]["models"][0]["shapes"], "qdq apply takes each shape of the set"


@pytest.mark.parametrize("command", ["inspect sensitivity", "bench record", "bench noise"])
def test_studies_refuse_a_shape_set(tmp_path, command, capsys):
    save_net(tmp_path / "net.onnx")
    (tmp_path / "e.yaml").write_text(EXPERIMENT.replace("OBJECTIVE", "worst"))
    assert qdq(*command.split(), str(tmp_path / "e.yaml"), "--out", str(tmp_path / "out")) == 2
    assert "shape_set" in capsys.readouterr().err


def test_explain_measures_a_row_at_all_shapes(done):
    found, _ = attribute_row(done, "all", base=done.parent, observer=NullProgress())
    (task,) = load_results(done).tasks
    recorded = task.summaries[found.row].speedup.value
    assert found.speedup.value == pytest.approx(recorded, rel=0.05)


def test_deploy_script_fixes_the_dynamic_file_to_a_shape(tmp_path):
    candidate, _ = make_candidate(tmp_path, "onnxruntime")
    model = load(tmp_path / "net.onnx", dims={"batch": 1, "time": 3})
    dynamic = write_dynamic_model(model, candidate.source(), "onnxruntime", [{"x": (4, 3, 8)}])
    assert dynamic.file is not None
    figures = {key: [2.0, 1.9, 2.1] for key in ("speedup", "latency_ms", "float_latency_ms")}
    shapes = {"batch=4": {**figures, "inputs": {"x": [4, 3, 8]}}}
    runtimes = [dict(registry.create_plugin("benchmarker", use, {}).describe()) for use in ("onnxruntime", "openvino")]
    feeds = {"x": np.random.default_rng(9).random((4, 3, 8), np.float32)}
    (expected,) = run_onnxruntime(dynamic.file, feeds)
    for runtime in runtimes:
        target = find_target(runtime)
        assert target is not None
        script = tmp_path / f"{runtime['name']}.py"
        script.write_text(deploy_script(candidate.source(), runtime, target, {"batch=4": {"x": [4, 3, 8]}}))
        found = runpy.run_path(str(script))["load"](dynamic.file, {"x": [4, 3, 8]})(feeds)
        np.testing.assert_allclose(found["y"], expected, atol=0.05)
    folder, floating = tmp_path / "ship/net", tmp_path / "1" / "model.onnx"
    facts = {**FACTS, "runtime": runtimes[-1], "shapes": shapes}
    write_bundle(folder, candidate.source(), floating, facts, NullProgress(), dynamic_model=dynamic.file)
    assert "| batch=4 | 2.000 [1.900, 2.100] |" in (folder / "report.md").read_text()
    reported = run_script(sys.executable, folder / "deploy.py", "--repeat", "2", "--at", "batch=4")
    assert reported["outputs"] == {"y": [4, 3, 2, 4]}
