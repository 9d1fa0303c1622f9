"""Models that declare more than any machine holds: one message, before memory is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from mutations import onnx_files
from onnx import TensorProto, helper, numpy_helper

from harness.base.errors import UserError
from harness.cli.main import main
from harness.graph.io.digests import digest_file
from harness.graph.io.files import copy_model
from harness.graph.load import load

HUGE = (1, 2**40)
EXPERIMENT = """
experiment: huge
models: [{use: huge.onnx, calibration: {samples: 2}}]
backends: [{use: simulated, params: {seed: 5, noise: 0.0}}]
searchers: [random]
initial: [float]
baselines: [all]
budget: {evaluations: [3]}
confirmation: {builds: 3, rounds: 2, samples: 3}
"""


def write_model(path: Path, what: str) -> None:
    """A convolution behind whatever is huge."""
    x = helper.make_tensor_value_info("x", 1, (1, 3, 2**20, 2**20) if what == "input" else (1, 3, 8, 8))
    dims, raw = (HUGE, b"x" * 16) if what == "weight" else ((4, 3, 3, 3), b"\0" * 432)
    weights = [
        TensorProto(name="w", data_type=TensorProto.FLOAT, dims=dims, raw_data=raw),
        helper.make_tensor("s", TensorProto.INT64, [4], (1, 4, *HUGE[1:], 1)),
    ]
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], name="conv", pads=[1] * 4)]
    if what == "tensor":
        nodes += [
            helper.make_node("ConstantOfShape", ["s"], ["z"], name="fill"),
            helper.make_node("ReduceMax", ["z"], ["m"], name="max"),
            helper.make_node("Add", ["y", "m"], ["a"], name="add"),
        ]
    end = helper.make_tensor_value_info(nodes[-1].output[0], 1, None)
    graph = helper.make_graph(nodes, "huge", [x], [end], weights)
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("weight", "huge.onnx: the tensor 'w' of shape [1, 1099511627776] has 16 bytes, but needs 4398046511104;"),
        ("input", "huge.onnx: input 'x' has 3,298,534,883,328 elements by its shape"),
        ("tensor", "the constant 'z' has 17,592.2 GB by its shape, and at most 2.1 GB are computed;"),
    ],
)
def test_huge_declared_shapes_are_refused_with_one_message(tmp_path, capsys, what, said):
    write_model(tmp_path / "huge.onnx", what)
    (tmp_path / "e.yaml").write_text(EXPERIMENT)
    with pytest.raises(SystemExit) as end:
        main(["run", str(tmp_path / "e.yaml"), "--out", str(tmp_path / "out")])
    error = " ".join(capsys.readouterr().err.split())
    assert end.value.code == 2, error
    assert said in error
    assert "huge.onnx" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("place", ["subgraph", "main graph", "constant"])
def test_weights_beyond_the_limit_of_protobuf_are_refused_with_their_name(place, tmp_path, monkeypatch):
    """Weights and Constant nodes of the main graph do not count, because they are kept apart from the model."""
    monkeypatch.setattr("harness.graph.io.model_reader.MAX_ENCODED_BYTES", 1000)
    table = numpy_helper.from_array(np.ones(300, np.float32), "table")
    one = helper.make_tensor_value_info("y", 1, None)
    inner = [helper.make_node("Add", ["x", "table"], ["y"], name="add")]
    branch = helper.make_graph(inner, "branch", [], [one], [table] if place == "subgraph" else [])
    nodes = [helper.make_node("If", ["c"], ["z"], name="if", then_branch=branch, else_branch=branch)]
    if place == "constant":
        nodes.insert(0, helper.make_node("Constant", [], ["table"], name="made", value=table))
    inputs = [helper.make_tensor_value_info("x", 1, (300,)), helper.make_tensor_value_info("c", TensorProto.BOOL, ())]
    end = helper.make_tensor_value_info("z", 1, None)
    graph = helper.make_graph(nodes, "g", inputs, [end], [table] if place == "main graph" else [])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    if place != "subgraph":
        assert "table" in load(tmp_path / "m.onnx").constants
        return
    with pytest.raises(UserError, match=r"m\.onnx: .*'table'.*2 GiB.*protobuf") as error:
        load(tmp_path / "m.onnx")
    assert "damaged" not in str(error.value)


def test_constants_beyond_the_limit_of_protobuf_are_not_folded(tmp_path, monkeypatch):
    """A large table stays transposed at run time; small constants next to it are folded."""
    monkeypatch.setattr("harness.graph.passes.simplify.MAX_COMPUTED_BYTES", 40_000)
    monkeypatch.setattr("harness.graph.passes.simplify.MAX_FOLDED_BYTES", 20_000)
    values = {"table": np.ones((100, 101), np.float32), "a": np.ones(4, np.float32), "b": np.ones(4, np.float32)}
    nodes = [
        helper.make_node("Transpose", ["table"], ["turned"], name="turn"),
        helper.make_node("Add", ["a", "b"], ["c"], name="fold"),
        helper.make_node("Gather", ["turned", "ids"], ["rows"], name="gather"),
        helper.make_node("ReduceSum", ["c"], ["d"], name="sum"),
        helper.make_node("Mul", ["rows", "d"], ["y"], name="mul"),
    ]
    ends = [helper.make_tensor_value_info("ids", TensorProto.INT64, (3,)), helper.make_tensor_value_info("y", 1, None)]
    constants = [numpy_helper.from_array(value, name) for name, value in values.items()]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    assert [node.name for node in load(tmp_path / "m.onnx").nodes] == ["turn", "gather", "mul"]


def constant_of_5_gb(op: str) -> tuple[list[onnx.NodeProto], list[TensorProto]]:
    """Nodes that compute `big` from small constants."""
    count = 1_250_000_000
    values: dict[str, Any] = {
        "size": np.array([count]), "quarter": np.array([count // 4]), "four": np.array([4]),
        "one": np.ones(1, np.float32), "start": np.float32(0), "limit": np.float32(count), "step": np.float32(1),
    }  # fmt: skip
    chains = {
        "ConstantOfShape": [("ConstantOfShape", ["size"], "big")],
        "Range": [("Range", ["start", "limit", "step"], "big")],
        "Expand": [("Expand", ["one", "size"], "big")],
        "Tile": [("Tile", ["one", "size"], "big")],
        "Concat": [("Expand", ["one", "quarter"], "part"), ("Concat", ["part"] * 4, "big")],
        "computed": [("Mul", ["quarter", "four"], "product"), ("ConstantOfShape", ["product"], "big")],
    }
    nodes = [
        helper.make_node(name, inputs, [output], name=output, **({"axis": 0} if name == "Concat" else {}))
        for name, inputs, output in chains[op]
    ]
    read = {name for node in nodes for name in node.input}
    return nodes, [numpy_helper.from_array(np.asarray(v), name) for name, v in values.items() if name in read]


@pytest.mark.parametrize("op", ["ConstantOfShape", "Range", "Expand", "Tile", "Concat", "computed"])
def test_a_constant_of_5_gb_is_refused_before_it_is_computed(tmp_path, op):
    nodes, constants = constant_of_5_gb(op)
    nodes += [
        helper.make_node("ReduceMax", ["big"], ["most"], name="most", keepdims=0),
        helper.make_node("Add", ["x", "most"], ["y"], name="add"),
    ]
    ends = [helper.make_tensor_value_info(name, 1, (1, 4)) for name in "xy"]
    graph = helper.make_graph(nodes, "huge", ends[:1], ends[1:], constants)
    path = tmp_path / "huge.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())
    with pytest.raises(UserError, match=r"huge\.onnx: the constant 'big' has 5\.0 GB by its shape, and at most"):
        load(path)


@pytest.mark.parametrize("part", ["weight", "many", "sparse weight"])
def test_external_data_beyond_the_memory_are_refused_unread(tmp_path, part):
    """A file with a hole of 2 TB takes no space on disk; many tensors may read the same bytes."""
    proto = onnx.ModelProto.FromString(onnx_files()[0])
    size = 2**41 if part != "many" else 2**30
    with (tmp_path / "m.data").open("wb") as file:
        file.truncate(size)

    def refer(tensor: TensorProto) -> TensorProto:
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="m.data")
        return tensor

    if part == "sparse weight":
        sparse = proto.graph.sparse_initializer.add(dims=[4])
        refer(sparse.values).name = "s"
    for number in range(2000 if part == "many" else part == "weight"):
        refer(proto.graph.initializer.add(name=f"w{number}", dims=[2**28], data_type=TensorProto.FLOAT))
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    for read in (load, digest_file, lambda path: copy_model(path, tmp_path, "copy.onnx")):
        with pytest.raises(UserError, match=r"m\.onnx: its external data have 2,\d+ GB, more than the \d+ GB"):
            read(tmp_path / "m.onnx")
