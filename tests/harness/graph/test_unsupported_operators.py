"""Models with subgraphs, recurrences, operators of other domains: what can be quantized is, the rest is untouched."""

import logging
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx_models import by_name, everywhere, loaded, normal, run_onnxruntime
from small import qdq

from harness.graph.builder import GraphBuilder
from harness.graph.partition.regions import discover_regions
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.qdq_graph import QDQGraph
from harness.graph.rules.dialects import ONNXRUNTIME, OPENVINO, TENSORRT


def body(name, op, x):
    inner = GraphBuilder(name)
    scaled = inner.op("Mul", x, inner.const(2.0, f"{name}_factor"), outputs=f"{name}_scaled")
    inner.output(inner.op(op, scaled, outputs=f"{name}_out"), (4, 1, 16))
    return inner.graph()


def with_if(g, x):
    flag = g.input("flag", (), "bool")
    then, other = body("then", "Tanh", x), body("other", "Relu", x)
    return g.op("If", flag, then_branch=then, else_branch=other, outputs="odd")


def with_loop(g, x):
    inner = GraphBuilder("inside")
    inner.input("turn", (), "int64")
    go, carried = inner.input("go", (), "bool"), inner.input("carried", (4, 1, 16))
    inner.output(inner.op("Identity", go))
    product = inner.op("MatMul", carried, "square", outputs="inner_product")
    inner.output(inner.op("Add", product, x, outputs="inner_sum"), (4, 1, 16))
    return g.op("Loop", g.const(3), g.const(np.array(True)), x, body=inner.graph(), outputs="odd")


def with_scan(g, x):
    inner = GraphBuilder("inside")
    state, row = inner.input("state", (1, 16)), inner.input("row", (1, 16))
    total = inner.op("Add", state, row, outputs="inner_sum")
    inner.output(inner.op("Identity", total, outputs="inner_state"))
    inner.output(inner.op("Tanh", total, outputs="inner_row"))
    start = g.const(np.zeros((1, 16), np.float32))
    return g.op("Scan", start, x, body=inner.graph(), num_scan_inputs=1, outputs=["final", "odd"])[1]


def with_lstm(g, x):
    weights = [g.const(np.full((1, 64, 16), 0.1, np.float32)) for _ in range(2)]
    outputs = g.op("LSTM", x, *weights, hidden_size=16, outputs=["sequence"])
    return g.op("Squeeze", outputs[0], g.const([1]))


def with_custom(g, x):
    return g.op("Whirl", x, domain="com.example", outputs="odd")


CASES = {
    "If": (with_if, "subgraphs of If stay float"),
    "Loop": (with_loop, "subgraphs of Loop stay float"),
    "Scan": (with_scan, "subgraphs of Scan stay float"),
    "LSTM": (with_lstm, "has no point at LSTM: they stay float"),
    "Whirl": (with_custom, "operators that ONNX does not define stay float: com.example.Whirl"),
}


def odd(make):
    g = GraphBuilder("odd", opset=17)
    g.const(np.eye(16, dtype=np.float32), "square")
    x = make(g, g.linear(g.input("x", (4, 1, 16)), 16, name="before"))
    weight = g.const(np.eye(16, dtype=np.float32), "after_weight")
    g.output(g.op("MatMul", x, weight, name="after"), (4, 1, 16), name="y")
    proto = g.build()
    if make is with_custom:  # what the operator makes is known from the file alone
        proto.graph.value_info.append(helper.make_tensor_value_info("odd", TensorProto.FLOAT, [4, 1, 16]))
    return proto


@by_name("dialect", [OPENVINO, ONNXRUNTIME, TENSORRT])
@pytest.mark.parametrize("op", CASES)
def test_other_operators_are_quantized_with_a_warning(op, dialect, caplog):
    make, message = CASES[op]
    with caplog.at_level(logging.WARNING):
        model = loaded(odd(make), "odd.onnx")
        resolved = everywhere(model, dialect)
    assert f"odd.onnx: {'dialect ' + dialect.name + ' ' if op == 'LSTM' else ''}{message}" in caplog.messages
    assert sum(len(leaf.nodes) for leaf in discover_regions(model).iter_leaves()) == len(model.nodes)
    quantized = {edge.consumer for edge, _ in resolved}
    # ONNX infers no shape of what a Loop carries, and tensors of unknown type stay float.
    assert ({"before"} if op == "Loop" else {"before", "after"}) <= quantized
    proto = Inserter(model, dialect, {name: (-1.0, 1.0) for name in model.types}).insert(resolved)
    if op != "Whirl":
        onnx.checker.check_model(proto, full_check=True)
    assert QDQGraph(proto).edges == dict(resolved)
    (kept,) = (node for node in proto.graph.node if node.op_type == op)
    (own,) = (node for node in model.proto.graph.node if node.op_type == op)
    assert kept == own
    assert own.name not in quantized


@pytest.mark.parametrize("op", ["If", "Loop", "Scan"])
def test_results_around_subgraphs_stay_right(op):
    proto = odd(CASES[op][0])
    model = loaded(proto, "odd.onnx")
    feeds = {"x": normal(4, 1, 16)} | ({"flag": np.array(True)} if op == "If" else {})
    inserter = Inserter(model, ONNXRUNTIME, dict.fromkeys(model.types, (-16.0, 16.0)))
    (want,) = run_onnxruntime(proto, feeds)
    np.testing.assert_array_equal(run_onnxruntime(inserter.insert(()), feeds)[0], want)
    (got,) = run_onnxruntime(inserter.insert(everywhere(model, ONNXRUNTIME)), feeds)
    assert 0 < np.abs(got - want).max() < 0.2 * np.abs(want).max()


@by_name("dialect", [OPENVINO, ONNXRUNTIME, TENSORRT])
def test_omitted_outputs_and_inputs_are_not_connected(dialect):
    """An LSTM that is asked for its last state alone, and far behind it a Clip without a lower bound.

    The batch is above MAX_SEQUENCE_ROWS, so that the products are no small ones, which OpenVINO computes wrongly.
    """
    g = GraphBuilder("left_out")
    weights = [g.const(np.full((1, 64, 16), 0.1, np.float32)) for _ in range(2)]
    last = g.op("LSTM", g.input("x", (4, 16, 16)), *weights, hidden_size=16, outputs=["sequence", "last"])[1]
    x = g.op("Squeeze", last, g.const([0]))
    for number in range(6):
        x = g.op("Relu", g.gemm(x, 16, name=f"layer_{number}"))
    g.output(g.op("Clip", x, "", g.const(6.0)), name="y")
    proto = g.build()
    next(node for node in proto.graph.node if node.op_type == "LSTM").output[0] = ""
    model = loaded(proto, "left_out")
    resolved = everywhere(model, dialect)
    assert {f"layer_{number}" for number in range(6)} <= {edge.consumer for edge, _ in resolved}
    made = Inserter(model, dialect, {name: (-1.0, 1.0) for name in model.types}).insert(resolved)
    assert QDQGraph(made).edges == dict(resolved)


EXPERIMENT = """
experiment: odd
models: [{{use: odd.onnx, calibration: {{samples: 2}}}}]
backends: [{backend}]
searchers: [random]
initial: [float, all, linear]
baselines: [all]
budget: {{evaluations: [4]}}
sampling: {{warmup_ms: 1, min_samples: 3, max_samples: 5, max_ms: 20}}
confirmation: {{builds: 3, rounds: 2, samples: 3, candidates: 1}}
"""
SIMULATED = "{use: simulated, params: {seed: 5, noise: 0.0}}"
REAL = "{use: 'here:OpenVINO', label: openvino, params: {threads: 1, precision: f32}}"


def with_token_ids(g, x):
    table = g.const(np.ones((8, 16), np.float32))
    return g.op("Add", g.op("Gather", table, g.input("ids", (1,), "int64")), x)


def with_constant_nodes(g, x):
    weight = g.op("Constant", value=onnx.numpy_helper.from_array(np.eye(16, dtype=np.float32)))
    return g.op("MatMul", x, weight)


@pytest.mark.parametrize(
    ("make", "kept", "backend"),
    [
        *((CASES[op][0], op, REAL) for op in ("If", "Loop", "LSTM")),
        (with_custom, "Whirl", SIMULATED),
        (with_token_ids, "Gather", REAL),
        (with_constant_nodes, "", REAL),
    ],
)
def test_run_warns_and_keeps_unsupported_operators_float(
    make, kept, backend,
    tmp_path, monkeypatch, capsys,
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    onnx.save(odd(make), "odd.onnx")
    (tmp_path / "odd.yaml").write_text(EXPERIMENT.format(backend=backend))
    assert qdq("run", "odd.yaml", "--out", "out") == 0
    shown = capsys.readouterr()
    assert "| all" in shown.out
    assert "UNFINISHED" not in shown.out
    if kept in CASES:
        assert CASES[kept][1] in shown.err
    exported = [onnx.load(path) for path in Path("out").glob("*/models/*.onnx")]
    assert any(QDQGraph(proto).edges for proto in exported)
    assert all(sum(node.op_type == kept for node in proto.graph.node) == bool(kept) for proto in exported)


def test_run_of_a_model_with_string_input_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    g = GraphBuilder("words")
    g.output(g.gemm(g.input("x", (1, 16)), 16), name="y")
    g.output(g.op("StringNormalizer", g.input("words", (4,), "string"), case_change_action="LOWER"), name="lower")
    onnx.save(g.build(), "odd.onnx")
    (tmp_path / "odd.yaml").write_text(EXPERIMENT.format(backend=REAL))
    assert qdq("run", "odd.yaml", "--out", "out") == 2
    assert "odd.onnx: input 'words' is of type 'string'" in capsys.readouterr().err
