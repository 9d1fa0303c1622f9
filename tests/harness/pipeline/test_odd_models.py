"""Models that are no plain image network run all the same: what cannot be quantized stays float."""

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, load, numpy_helper, save
from small import qdq

from harness.graph.qdq.qdq_graph import read_qdq_edges

EXPERIMENT = """
experiment: odd
models: [{{use: {file}, label: odd, calibration: {{samples: 2}}}}]
backends: [{{use: 'here:OpenVINO', label: openvino, params: {{threads: 1, precision: f32}}}}]
searchers: [random]
initial: [float, all, linear]
baselines: [all]
budget: {{evaluations: [4]}}
sampling: {{warmup_ms: 1, min_samples: 3, max_samples: 5, max_ms: 20}}
confirmation: {{builds: 3, rounds: 2, samples: 3, candidates: 1}}
"""


def constant(name, shape, seed=0):
    return numpy_helper.from_array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32), name)


def linear(source, target, name, weight="w"):
    return helper.make_node("Gemm", [source, weight, "bias"], [target], name=name)


def branch(name, scale):
    factor = numpy_helper.from_array(np.float32(scale), f"{name}_factor")
    node = helper.make_node("Mul", ["h", f"{name}_factor"], [f"{name}_out"], name=f"{name}_mul")
    out = helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, [1, 16])
    return helper.make_graph([node], name, [], [out], [factor])


def with_if():
    nodes = [
        linear("x", "h", "first"),
        helper.make_node(
            "If", ["flag"], ["b"], name="choose", then_branch=branch("then", 2.0), else_branch=branch("else", 3.0)
        ),
        linear("b", "y", "second"),
    ]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 16]),
        helper.make_tensor_value_info("flag", TensorProto.BOOL, []),
    ]
    return nodes, inputs


def with_loop():
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["carried", "w"], ["product"], name="step"),
            helper.make_node("Tanh", ["product"], ["next"], name="squash"),
            helper.make_node("Identity", ["go"], ["go_on"], name="keep_going"),
        ],
        "body",
        [
            helper.make_tensor_value_info("turn", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("carried", TensorProto.FLOAT, [1, 16]),
        ],
        [
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, [1, 16]),
        ],
    )
    turns = numpy_helper.from_array(np.array(3, np.int64))
    always = numpy_helper.from_array(np.array(True))
    nodes = [
        helper.make_node("Constant", [], ["turns"], name="turns", value=turns),
        helper.make_node("Constant", [], ["always"], name="always", value=always),
        linear("x", "h", "first"),
        helper.make_node("Loop", ["turns", "always", "h"], ["b"], name="repeat", body=body),
        linear("b", "y", "second"),
    ]
    return nodes, [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 16])]


def with_token_ids():
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["h"], name="embed"),
        helper.make_node("Add", ["h", "x"], ["s"], name="sum"),
        linear("s", "y", "project"),
    ]
    inputs = [
        helper.make_tensor_value_info("ids", TensorProto.INT64, [1]),
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 16]),
    ]
    return nodes, inputs


def with_constant_nodes():
    value = numpy_helper.from_array(np.random.default_rng(1).standard_normal((16, 16)).astype(np.float32))
    nodes = [
        helper.make_node("Constant", [], ["c"], name="weight", value=value),
        linear("x", "h", "first", weight="c"),
        linear("h", "y", "second"),
    ]
    return nodes, [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 16])]


def with_lstm():
    parts = [
        constant(name, shape, seed) for seed, (name, shape) in enumerate({"wx": (1, 64, 16), "wh": (1, 64, 16)}.items())
    ]
    nodes = [
        *(helper.make_node("Constant", [], [part.name], name=f"make_{part.name}", value=part) for part in parts),
        linear("x", "h", "first"),
        helper.make_node("Unsqueeze", ["h", "axis"], ["sequence"], name="as_sequence"),
        helper.make_node("LSTM", ["sequence", "wx", "wh"], ["", "last"], name="recurrent", hidden_size=16),
        helper.make_node("Squeeze", ["last", "axis"], ["s"], name="as_rows"),
        linear("s", "y", "second"),
    ]
    axis = helper.make_node("Constant", [], ["axis"], name="axis", value=numpy_helper.from_array(np.array([0])))
    return [axis, *nodes], [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 16])]


@pytest.mark.parametrize(
    ("make", "kept"),
    [(with_if, "If"), (with_loop, "Loop"), (with_lstm, "LSTM"), (with_token_ids, "Gather"), (with_constant_nodes, "")],
)
def test_it_runs_to_the_table_and_leaves_those_parts_alone(make, kept, tmp_path: Path, capsys):
    nodes, inputs = make()
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 16])
    graph = helper.make_graph(
        nodes,
        "odd",
        inputs,
        [output],
        [constant("w", (16, 16)), constant("bias", (16,), 3), constant("table", (8, 16), 2)],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "odd.onnx")
    (tmp_path / "odd.yaml").write_text(EXPERIMENT.format(file="odd.onnx"))
    assert qdq("run", str(tmp_path / "odd.yaml"), "--out", str(tmp_path / "out")) == 0
    table = capsys.readouterr().out
    assert "| all" in table
    assert "baseline" in table
    assert "UNFINISHED" not in table
    exported = [load(path) for path in tmp_path.glob("out/*/models/*.onnx")]
    assert any(read_qdq_edges(proto) for proto in exported)
    for proto in exported:
        assert sum(node.op_type == kept for node in proto.graph.node) == bool(kept)


def test_a_model_that_reads_strings_is_refused(tmp_path: Path, capsys):
    nodes = [
        linear("x", "y", "project"),
        helper.make_node("StringNormalizer", ["words"], ["lower"], name="normalize", case_change_action="LOWER"),
    ]
    words, lower = (helper.make_tensor_value_info(name, TensorProto.STRING, [4]) for name in ("words", "lower"))
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 16]) for name in ("x", "y"))
    graph = helper.make_graph(
        nodes, "words", [x, words], [y, lower], [constant("w", (16, 16)), constant("bias", (16,))]
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "odd.onnx")
    (tmp_path / "odd.yaml").write_text(EXPERIMENT.format(file="odd.onnx"))
    assert qdq("run", str(tmp_path / "odd.yaml"), "--out", str(tmp_path / "out")) == 2
    assert "odd.onnx: input 'words' is of type 'string'" in capsys.readouterr().err
