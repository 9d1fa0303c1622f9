"""A runtime that computes something else than the file says is found without labels, and its rows are not delivered."""

import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pandas as pd
import pytest
from onnx import TensorProto, helper, numpy_helper
from small import qdq, save_chain
from stored import forget_task

from harness.base.files import read_json
from harness.base.progress import NullProgress
from harness.config.sections import Limits
from harness.graph.qdq.reduce_model import find_exact_outputs
from harness.measure.records import Failed
from harness.plugins.api import Candidate
from harness.results.artifacts import read_finalists
from harness.results.folder import load
from harness.results.manifest import read_manifest
from harness.run.verify.output_comparison import compare_float, compare_with_file
from harness.run.verify.runtime_checker import CheckPlan, RuntimeChecker
from harness.workers.engines import BuiltEngine
from search.space import edges_digest

PLUGINS = """
from harness.plugins.api import Capabilities
import onnx
import onnxruntime
from onnx import helper
from harness.runtimes.simulated import SimulatedBenchmarker


class Faulty(SimulatedBenchmarker):
    '''Computes what the file says, but for one convolution, whose sign is wrong where its data are quantized.'''

    capabilities = Capabilities(dialect="openvino")

    def build(self, candidate, workdir):
        built = super().build(candidate, workdir)
        proto = onnx.load(candidate.source())
        built.engine._latency_ms = self.base_ms / (1 + len(candidate.edges))
        made_by = {name: node.op_type for node in proto.graph.node for name in node.output}
        for index, node in enumerate(proto.graph.node):
            if node.name == "BAD" and made_by.get(node.input[0]) == "DequantizeLinear":
                output, node.output[0] = node.output[0], node.output[0] + "_right"
                proto.graph.node.insert(index + 1, helper.make_node("Neg", [node.output[0]], [output]))
                break
        options = onnxruntime.SessionOptions()  # fused integer kernels saturate on processors without VNNI
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        names = [value.name for value in session.get_outputs()]
        built.engine.infer = lambda feeds: dict(zip(names, session.run(names, feeds)))
        return built

    def describe(self):
        return {**super().describe(), "name": "faulty"}
"""
EXPERIMENT = """
experiment: faulty
models: [{use: net.onnx, calibration: {samples: 4}}]
backends: [{use: 'check_plugins:Faulty', label: bench, params: {noise: 0.0}}]
searchers: [random]
initial: [float, all, linear]
baselines: [all]
budget: {evaluations: [12]}
confirmation: {builds: 3, rounds: 2, samples: 3}
"""
TASK = "net-bench-int8"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faulty")
    save_chain(folder / "net.onnx", (8, 8, 12, 12))
    proto = onnx.load(folder / "net.onnx")
    convolutions = [node for node in proto.graph.node if node.op_type == "Conv"]
    convolutions[2].name = "BAD"
    onnx.save(proto, folder / "net.onnx")
    (folder / "check_plugins.py").write_text(PLUGINS)
    (folder / "faulty.yaml").write_text(EXPERIMENT)
    assert qdq("run", str(folder / "faulty.yaml"), "--out", str(folder / "out")) == 0
    return folder


def test_a_wrong_row_has_its_own_verdict_and_is_never_shipped(folder):
    table = pd.read_csv(folder / "out" / "report" / "main.csv").set_index("method")
    assert table.loc["all", "verdict"] == "wrong result in faulty"
    assert table.loc["all", "decision"] == "not shipped: wrong result in faulty"
    assert not table.loc["all", "best"]
    assert table.loc["all", "speedup"] > table.loc["random", "speedup"] > 1, "it is the fastest by far"
    note = (folder / "out" / "report" / "main.md").read_text()
    assert "Conv 'BAD'" in note
    assert "wrong_result" in note


def test_search_selects_the_best_correct_placement(folder):
    rows, picks = read_finalists(folder / "out" / TASK)
    chosen = next(pick.row for pick in picks if pick.kind == "search")
    task = load(folder / "out").task(TASK)
    assert task.checks[chosen].verdict == "right"
    assert task.summaries[chosen].verdict == "faster"
    assert sum(search.successes for search in task.searches) > 3
    assert chosen != next(row.id for row in rows if task.wrong(row.id))


def test_wrong_result_has_a_minimal_model(folder):
    task = load(folder / "out").task(TASK)
    (found,) = [check for row, check in task.checks.items() if task.wrong(row)]
    assert found.operator == "Conv 'BAD'"
    assert found.engine_db < found.file_db - 6
    model = onnx.load(folder / "out" / TASK / found.model)
    operators = [node for node in model.graph.node if node.op_type not in ("QuantizeLinear", "DequantizeLinear")]
    assert [node.name for node in operators] == ["BAD"]
    arrays = np.load((folder / "out" / TASK / found.model).with_suffix(".npz"))
    assert {key.partition(":")[0] for key in arrays} == {"input", "expected", "found"}
    text = (folder / "out" / TASK / found.model).with_suffix(".txt").read_text()
    assert "Conv 'BAD'" in text
    assert "faulty" in text


def test_verify_reports_a_wrong_result(folder, capsys):
    rows, _ = read_finalists(folder / "out" / TASK)
    task = load(folder / "out").task(TASK)
    for wrong, status in ((True, 1), (False, 0)):
        row = next(row for row in rows if task.wrong(row.id) == wrong and row.pairs)
        file = folder / "out" / TASK / "models" / row.file
        assert qdq("verify", str(file), "--base", str(folder)) == status
        assert ("wrong result" in capsys.readouterr().out) == wrong


def test_resumed_run_keeps_selection_and_checks(folder):
    task = folder / "out" / TASK
    kept = {
        name: (task / name).read_bytes() for name in ("rows.json", "final_selection.jsonl.gz", "runtime_check.json")
    }
    forget_task(task)
    assert qdq("run", str(folder / "faulty.yaml"), "--out", str(folder / "out")) == 0
    assert {name: (task / name).read_bytes() for name in kept} == kept
    assert read_manifest(task.parent)["complete"]


def test_results_without_runtime_checks_are_readable(folder, tmp_path):
    import shutil

    shutil.copytree(folder / "out", tmp_path / "out")
    forget_task(tmp_path / "out" / TASK)
    (tmp_path / "out" / TASK / "runtime_check.json").unlink()
    task = load(tmp_path / "out").task(TASK)
    assert not task.checks
    assert task.summaries["all" if "all" in task.summaries else next(iter(task.summaries))].verdict


def noisy(rng, arrays, db):
    """Return the arrays with noise that is this number of dB below them."""
    scale = 10 ** (-db / 20)
    return [{"y": a["y"] + scale * np.std(a["y"]) * rng.standard_normal(a["y"].shape)} for a in arrays]


@pytest.mark.parametrize(
    ("file_db", "engine_db", "precision", "verdict"),
    [
        (30, 120, "f32", "right"),
        (30, 26, "f32", "right"),  # rounding ties
        (30, 22, "f32", "wrong result"),
        (30, 0, "f32", "wrong result"),
        (80, 60, "f32", "wrong result"),
        (110, 90, "f32", "right"),  # round-off
        (80, 42, "bf16", "right"),  # the noise of BF16
        (80, 20, "bf16", "wrong result"),
    ],
)
def test_compare_with_file_verdict_by_distance(file_db, engine_db, precision, verdict):
    rng = np.random.default_rng(0)
    floats = [{"y": rng.standard_normal((1, 500))} for _ in range(4)]
    file = noisy(rng, floats, file_db)
    engine, own = noisy(rng, file, engine_db), noisy(rng, floats, 110 if precision == "f32" else 40)
    assert compare_with_file(floats, file, engine, own, precision=precision).verdict == verdict


@pytest.mark.parametrize(("steps", "verdict"), [(1, "right"), (8, "wrong result")])
def test_file_that_equals_the_float_model_may_be_one_step_off(steps, verdict):
    saturated = [{"y": np.array([[0.0, 1.0]])} for _ in range(4)]
    engine = [{"y": np.array([[0.0, 1.0 - steps / 255]])} for _ in range(4)]
    assert compare_with_file(saturated, saturated, engine, saturated).verdict == verdict


def test_output_that_no_pair_changes_must_be_exact():
    """ONNX Runtime 1.24.4 quantizes a cache that is passed on if a pair is behind its Transpose: 48 dB."""
    rng = np.random.default_rng(0)
    cache = [{"y": rng.uniform(-1, 1, (1, 500))} for _ in range(4)]
    engine = [{"y": np.round(each["y"] * 127.5) / 127.5} for each in cache]
    assert compare_with_file(cache, cache, engine, cache).verdict == "right"
    assert compare_with_file(cache, cache, engine, cache, exact={"y"}).verdict == "wrong result"
    more, rough = ([{**each, "z": other["y"]} for each, other in zip(cache, z, strict=True)] for z in (cache, engine))
    assert compare_with_file(more, rough, rough, more, exact={"y"}).output == "z", "its distances are of interest"


def test_outputs_behind_a_pair_or_a_branch_are_not_exact(tmp_path):
    pair = [
        helper.make_node("QuantizeLinear", ["x", "s"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s"], ["d"]),
    ]
    info = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in ("x", "a", "b", "c")}
    branch = helper.make_graph([helper.make_node("Abs", ["x"], ["t"])], "branch", [], [info["x"]])
    branch.output[0].name = "t"
    nodes = [
        helper.make_node("Abs", ["x"], ["a"]),
        *pair,
        helper.make_node("Add", ["a", "d"], ["b"]),
        helper.make_node("If", ["yes"], ["c"], then_branch=branch, else_branch=branch),
    ]
    tensors = {"s": np.float32(0.1), "yes": np.array(True)}
    ends = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])], [info["a"], info["b"], info["c"]]
    made = helper.make_graph(nodes, "g", *ends, [numpy_helper.from_array(np.array(v), n) for n, v in tensors.items()])
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    assert find_exact_outputs(tmp_path / "m.onnx") == {"a"}


def test_nan_in_engine_is_wrong_and_in_file_not_checked():
    rng = np.random.default_rng(0)
    floats = [{"y": rng.standard_normal((1, 500))}]
    nan = [{"y": np.full((1, 500), np.nan)}]
    assert compare_with_file(floats, floats, nan).verdict == "wrong result"
    found = compare_with_file(floats, nan, floats)
    assert found.verdict == "not checked"
    assert "NaN" in found.reason
    assert compare_with_file(*[[{"y": np.arange(5)}]] * 3).verdict == "not checked", "no float output"


def test_infinite_values_of_the_file_are_ignored():
    rng = np.random.default_rng(0)
    floats = [{"y": rng.standard_normal((1, 500))}]
    floats[0]["y"][0, 3] = np.inf
    engine = [{"y": np.nan_to_num(floats[0]["y"], posinf=3.0)}]
    assert compare_with_file(floats, floats, engine).verdict == "right"
    assert compare_float(floats, engine, "f32").verdict == "right"
    engine[0]["y"][0, 4] = np.inf
    assert compare_with_file(floats, floats, engine).verdict == "wrong result"


def test_missing_engine_output_is_a_wrong_result():
    rng = np.random.default_rng(0)
    floats = [{"y": rng.standard_normal((1, 500)), "z": rng.standard_normal((1, 20))}]
    flat = [{"y": floats[0]["y"].ravel(), "z": floats[0]["z"]}]
    assert compare_with_file(floats, floats, flat).verdict == "right"
    for engine in ({"y": floats[0]["y"]}, {"y": floats[0]["y"], "z": np.zeros((1, 20))}, {**flat[0], "z": np.zeros(5)}):
        found = compare_with_file(floats, floats, [engine])
        assert (found.verdict, found.output) == ("wrong result", "z")


def test_compare_float_finds_a_wrong_float_engine():
    rng = np.random.default_rng(0)
    floats = [{"y": rng.standard_normal((1, 500))}]
    assert compare_float(floats, noisy(rng, floats, 90), "f32").verdict == "right"
    assert compare_float(floats, noisy(rng, floats, 20), "f32").verdict == "wrong result"
    assert compare_float(floats, noisy(rng, floats, 20), "bf16").verdict == "right"


def save(path, nodes, ends, tensors):
    """Write a model of nodes as (operator, inputs, output, attributes); `ends` has shapes, of the input first."""
    made = [helper.make_node(op, inputs.split(), [output], **attributes) for op, inputs, output, attributes in nodes]
    types = {name: TensorProto.INT64 if name == "index" else TensorProto.FLOAT for name in ends}
    values = [helper.make_tensor_value_info(name, types[name], shape) for name, shape in ends.items()]
    stored = [numpy_helper.from_array(np.array(value), name) for name, value in tensors.items()]
    graph = helper.make_graph(made, "g", values[:1], values[1:], stored)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


PAIR = [("QuantizeLinear", "x s z", "xq", {}), ("DequantizeLinear", "xq s z", "xd", {})]


def checker(folder, engines, floating, feeds, **changes):
    """The checker of the models of a float model on these engines."""
    plan = CheckPlan(
        float_file=floating, floats={"main": floating}, feeds=feeds, folder=folder, work=folder / "work",
        limits=Limits(), **changes,
    )  # fmt: skip
    return RuntimeChecker(plan, engines, NullProgress())


class Saturating:
    """An engine of one product as a processor without VNNI computes it: pairs of products add up in 16 bits."""

    def __init__(self, *, broken=False):
        self._broken = broken
        self._models = {}

    def build(self, candidate, benchmarker="main"):
        handle = len(self._models)
        self._models[handle] = onnx.load(candidate.source())
        return BuiltEngine(handle=handle, build_s=0.0)

    def infer(self, handle, feeds):
        proto = self._models[handle]
        known = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
        x = feeds["x"]
        if not any(node.op_type == "MatMul" for node in proto.graph.node):
            return Failed(stage="evaluate", reason="it has products alone")
        if not any(node.op_type == "DequantizeLinear" for node in proto.graph.node):
            return {"y": x @ known["w"]}
        weight = next(
            node for node in proto.graph.node if node.op_type == "DequantizeLinear" and node.input[0] in known
        )
        data = next(node for node in proto.graph.node if node.op_type == "QuantizeLinear")
        scale, w, w_scale = known[data.input[1]], known[weight.input[0]].astype(np.int32), known[weight.input[1]]
        q = np.clip(np.round(x / scale), 0, 255).astype(np.int32)
        pairs = q[:, 0::2, None] * w[None, 0::2] + q[:, 1::2, None] * w[None, 1::2]
        total = np.clip(pairs, -32768, 32767).sum(axis=1)
        return {"y": (-1 if self._broken else 1) * (total * scale * w_scale).astype(np.float32)}

    def release(self, handle):
        pass

    def describe(self, benchmarker="main"):
        return {"name": "openvino", "version": "1", "float_precision": "f32", "options": {}, "device": "a processor"}


def product(path, *, quantized):
    """A product of positive data with large weights, float or with UINT8 data and INT8 weights."""
    rng = np.random.default_rng(3)
    q = rng.choice([-1, 1], (64, 1)) * rng.integers(110, 128, (64, 8))
    tensors, nodes = {"w": (q * 0.01).astype(np.float32)}, [("MatMul", "x w", "y", {"name": "product"})]
    if quantized:
        scales = {"s": np.float32(1 / 255), "z": np.uint8(0), "ws": np.float32(0.01), "wz": np.int8(0)}
        weight = ("DequantizeLinear", "w ws wz", "wd", {})
        tensors, nodes = {"w": q.astype(np.int8), **scales}, [*PAIR, weight, ("MatMul", "xd wd", "y", nodes[0][3])]
    return save(path, nodes, {"x": [4, 64], "y": [4, 8]}, tensors)


@pytest.mark.parametrize(
    ("without_vnni", "broken", "verdict"),
    [(True, False, "saturates"), (False, False, "wrong result"), (True, True, "wrong result")],
)
def test_saturation_has_a_verdict_of_its_own(tmp_path, without_vnni, broken, verdict):
    floating = product(tmp_path / "float.onnx", quantized=False)
    quantized = product(tmp_path / "quantized.onnx", quantized=True)
    rng = np.random.default_rng(0)
    feeds = [{"x": rng.uniform(0.5, 1, (4, 64)).astype(np.float32)} for _ in range(2)]
    with checker(tmp_path, Saturating(broken=broken), floating, feeds, saturates=without_vnni) as checking:
        found = checking.check(Candidate(digest="q", edges=(), source=lambda: quantized))
        own = checking.check(Candidate(digest=edges_digest(()), edges=(), source=lambda: floating))
    assert own.verdict == "right"
    assert found.verdict == verdict
    assert found.label == {"saturates": "saturates", "wrong result": "wrong result in openvino"}[verdict]
    stored = read_json(tmp_path / "runtime_check.json")["checks"]["q main"]
    assert stored["verdict"] == verdict
    if verdict == "wrong result":
        assert found.operator == "MatMul 'product'"
        text = (tmp_path / found.model).with_suffix(".txt").read_text()
        script = text[text.index("import numpy") :].replace("import openvino as ov", "raise SystemExit('to openvino')")
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=(tmp_path / found.model).parent,
            capture_output=True,
            text=True,
            check=False,
        )
        assert "to openvino" in done.stderr, "the reference part of the script runs"


class Indexing:
    """ONNX Runtime as it is, but for the sign of what ArgMax reads."""

    def build(self, candidate, benchmarker="main"):
        proto = onnx.load(candidate.source())
        for node in proto.graph.node:
            if node.name == "scores" and any(name.endswith("d") for name in node.input):
                node.op_type = "Neg"
        self._session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
        return BuiltEngine(handle=0, build_s=0.0)

    def infer(self, handle, feeds):
        names = [value.name for value in self._session.get_outputs()]
        return dict(zip(names, self._session.run(names, dict(feeds)), strict=True))

    def release(self, handle):
        pass

    def describe(self, benchmarker="main"):
        return {"name": "indexing", "version": "1", "float_precision": "f32"}


def test_index_outputs_are_compared_by_their_scores(tmp_path):
    """The output is the place of the largest value, which is an integer."""
    ends, tensors = {"x": [4, 64], "index": [4, 1]}, {"s": np.float32(1 / 32), "z": np.int8(0)}
    files = []
    for name, pair, data in (("float", [], "x"), ("quantized", PAIR, "xd")):
        nodes = [*pair, ("Abs", data, "scored", {"name": "scores"}), ("ArgMax", "scored", "index", {"axis": 1})]
        files.append(save(tmp_path / f"{name}.onnx", nodes, ends, tensors if pair else {}))
    floating, quantized = files
    rng = np.random.default_rng(0)
    feeds = [{"x": rng.standard_normal((4, 64)).astype(np.float32)} for _ in range(2)]
    with checker(tmp_path, Indexing(), floating, feeds) as checking:
        found = checking.check(Candidate(digest="q", edges=(), source=lambda: quantized))
        assert checking.check(Candidate(digest=edges_digest(()), edges=(), source=lambda: floating)).verdict == "right"
    assert (found.verdict, found.output, found.operator) == ("wrong result", "scored", "Abs 'scores'")


def test_a_model_that_the_reference_cannot_run_is_not_checked(tmp_path):
    floating = product(tmp_path / "float.onnx", quantized=False)
    proto = onnx.load(product(tmp_path / "quantized.onnx", quantized=True))
    proto.graph.node[-1].op_type, proto.graph.node[-1].domain = "Secret", "plug.in"
    proto.opset_import.append(helper.make_opsetid("plug.in", 1))
    onnx.save(proto, tmp_path / "plugin.onnx")
    feeds = [{"x": np.ones((4, 64), np.float32)}]
    with checker(tmp_path, Saturating(), floating, feeds) as checking:
        found = checking.check(Candidate(digest="q", edges=(), source=lambda: tmp_path / "plugin.onnx"))
    assert found.verdict == "not checked"
    assert "Secret" in found.reason


def test_autotune_delivers_no_wrong_model(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    command = f"--onnx_path net.onnx --output_dir {tmp_path / 'out'} --max_evals 12 --timing_runs 3".split()
    assert qdq("autotune", *command, "--backend", "check_plugins:Faulty", "--searcher", "random") == 0
    record = read_json(tmp_path / "out" / "runtime_check.json")["checks"]
    assert "wrong result" in {found["verdict"] for found in record.values()}
    final = onnx.load(tmp_path / "out" / "optimized_final.onnx")
    made_by = {name: node.op_type for node in final.graph.node for name in node.output}
    bad = next(node for node in final.graph.node if node.name == "BAD")
    assert made_by[bad.input[0]] != "DequantizeLinear"
    assert "DequantizeLinear" in made_by.values(), "the next right one"
    assert "left out" in (tmp_path / "out" / "logs" / "final.log").read_text()
    assert list((tmp_path / "out" / "wrong_result").glob("*.onnx"))


def test_outputs_whose_shape_follows_that_of_the_inputs_are_compared():
    """Without groups of samples, a shape that differs between them is one that depends on values."""
    rng = np.random.default_rng(0)
    floats = [{"y": rng.standard_normal((1, n, 4)).astype(np.float32)} for n in (3, 5, 3)]
    groups = [sample["y"].shape for sample in floats]
    for db, verdict in ((50, "right"), (10, "wrong result")):
        engine = noisy(rng, floats, db)
        assert compare_with_file(floats, noisy(rng, floats, 40), engine, groups=groups).verdict == verdict
        assert compare_float(floats, engine, "f32", groups=groups).verdict == verdict
        assert compare_float(floats, engine, "f32").verdict == "not checked"
    other = [floats[0], floats[1], {"y": floats[2]["y"][:, :2]}]
    assert compare_float(other, other, "f32", groups=groups).verdict == "not checked"
