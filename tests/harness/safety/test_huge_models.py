"""Models that declare more than any machine holds: one message, before memory is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from mutations import onnx_files
from onnx import TensorProto, helper, numpy_helper
from onnx_models import net

from harness.base.errors import UserError
from harness.cli.main import main
from harness.graph.io.digests import digest_file
from harness.graph.io.files import copy_model
from harness.graph.load import load
from harness.graph.protos import encoded_size_bytes

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


def node(op: str, inputs: Sequence[str], output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, [output], name=output, **attributes)


def write_model(path: Path, what: str) -> None:
    """A convolution behind whatever is huge."""
    nodes = [node("Conv", ["x", "w"], "y", pads=[1] * 4)]
    if what == "tensor":
        nodes += [node("ConstantOfShape", ["s"], "z"), node("ReduceMax", ["z"], "m"), node("Add", ["y", "m"], "a")]
    shape = (1, 3, 2**20, 2**20) if what == "input" else (1, 3, 8, 8)
    constants = {"w": np.zeros((4, 3, 3, 3), np.float32), "s": np.array([1, 4, *HUGE[1:], 1])}
    proto = net(nodes, {"x": shape}, {nodes[-1].output[0]: None}, constants)
    if what == "weight":
        huge = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=HUGE, raw_data=b"x" * 16)
        proto.graph.initializer[0].CopyFrom(huge)
    onnx.save(proto, path)


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


def test_size_of_a_tensor_is_known_without_encoding_it():
    """Protobuf fails to encode a tensor above 2 GiB, also to find its size."""

    class Table:
        data_type, dims = TensorProto.FLOAT, (530_000, 1024)

        def HasField(self, name: str) -> bool:
            return name == "raw_data"

    packed = TensorProto(data_type=TensorProto.INT4, dims=[2**22 + 1], raw_data=b"")
    small = numpy_helper.from_array(np.zeros(7, np.int64), "shape")
    sizes = [encoded_size_bytes(tensor) for tensor in (Table(), packed, small)]
    assert sizes == [530_000 * 1024 * 4, 2**21 + 1, small.ByteSize()]


@pytest.mark.parametrize("place", ["subgraph", "main graph", "constant"])
def test_weights_beyond_the_limit_of_protobuf_are_refused_with_their_name(place, tmp_path, monkeypatch):
    """Weights and Constant nodes of the main graph do not count, because they are kept apart from the model."""
    monkeypatch.setattr("harness.graph.io.model_reader.MAX_ENCODED_BYTES", 1000)
    table = numpy_helper.from_array(np.ones(300, np.float32), "table")
    one = helper.make_tensor_value_info("y", 1, None)
    inner = [node("Add", ["x", "table"], "y")]
    branch = helper.make_graph(inner, "branch", [], [one], [table] if place == "subgraph" else [])
    made = [node("Constant", [], "table", value=table)] if place == "constant" else []
    nodes = [*made, node("If", ["c"], "z", then_branch=branch, else_branch=branch)]
    constants = {"table": np.ones(300, np.float32)} if place == "main graph" else {}
    inputs = {"x": (300,), "c": ()}
    onnx.save(net(nodes, inputs, {"z": None}, constants, kinds={"c": TensorProto.BOOL}), tmp_path / "m.onnx")
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
        node("Transpose", ["table"], "turned"),
        node("Add", ["a", "b"], "c"),
        node("Gather", ["turned", "ids"], "rows"),
        node("ReduceSum", ["c"], "d"),
        node("Mul", ["rows", "d"], "y"),
    ]
    onnx.save(net(nodes, {"ids": (3,)}, {"y": None}, values, kinds={"ids": TensorProto.INT64}), tmp_path / "m.onnx")
    assert [each.name for each in load(tmp_path / "m.onnx").nodes] == ["turned", "rows", "y"]


COUNT = 1_250_000_000
BIG_CONSTANTS = {
    "ConstantOfShape": [("ConstantOfShape", ["size"], "big")],
    "Range": [("Range", ["start", "limit", "step"], "big")],
    "Expand": [("Expand", ["one", "size"], "big")],
    "Tile": [("Tile", ["one", "size"], "big")],
    "Concat": [("Expand", ["one", "quarter"], "part"), ("Concat", ["part"] * 4, "big")],
    "computed": [("Mul", ["quarter", "four"], "product"), ("ConstantOfShape", ["product"], "big")],
}
"""Nodes that compute `big`, of 5 GB, from small constants."""


@pytest.mark.parametrize("op", BIG_CONSTANTS)
def test_a_constant_of_5_gb_is_refused_before_it_is_computed(tmp_path, op):
    values = {
        "size": np.array([COUNT]), "quarter": np.array([COUNT // 4]), "four": np.array([4]),
        "one": np.ones(1, np.float32), "start": np.float32(0), "limit": np.float32(COUNT), "step": np.float32(1),
    }  # fmt: skip
    nodes = [node(*each, **({"axis": 0} if each[0] == "Concat" else {})) for each in BIG_CONSTANTS[op]]
    read = {name for each in nodes for name in each.input}
    nodes += [node("ReduceMax", ["big"], "most", keepdims=0), node("Add", ["x", "most"], "y")]
    constants = {name: value for name, value in values.items() if name in read}
    onnx.save(net(nodes, {"x": (1, 4)}, {"y": (1, 4)}, constants), tmp_path / "huge.onnx")
    with pytest.raises(UserError, match=r"huge\.onnx: the constant 'big' has 5\.0 GB by its shape, and at most"):
        load(tmp_path / "huge.onnx")


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
