"""Hostile ONNX files: read or refused with one message; none takes the driver down or leads it elsewhere."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from forks import in_fork
from mutations import onnx_files
from onnx import TensorProto, helper
from onnx_models import net

from harness.base.errors import UserError
from harness.graph.load import load, load_proto, read_signature
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import OPENVINO


def use(path: Path) -> str:
    """All that the driver does with a file before a benchmarker sees it."""
    try:
        model = load(path)
        space = build_space(model, OPENVINO)
        edges = {edge.tensor for dimension in space.dimensions for edge in dimension.edges}
        ranges = dict.fromkeys(edges - set(model.constants), (-1.0, 1.0))
        if len(space):
            Inserter(model, OPENVINO, ranges).insert(space.resolve(space.quantize_all()))
    except UserError:
        return "refused"
    return "used"


def test_doc_string_with_invalid_utf8_is_accepted(tmp_path):
    proto = onnx.load_model_from_string(onnx_files()[0])
    proto.producer_name = proto.doc_string = "marker"
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString().replace(b"marker", b"mark\xf6r"))
    assert use(tmp_path / "m.onnx") == "used"


@pytest.mark.parametrize(
    "location", ["../secret.bin", "/etc/passwd", "a/../../secret.bin", "..\\secret.bin", "link.bin", ""]
)
def test_external_data_outside_of_the_models_folder_is_refused(tmp_path, location):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret.bin").write_bytes(b"x" * 64)
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    proto = onnx.ModelProto.FromString(onnx_files()[1])
    tensor = proto.graph.initializer[0]
    tensor.ClearField("float_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    tensor.external_data.add(key="length", value="64")
    (folder / "m.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(UserError, match=r"m\.onnx: .*(external data|outside|link)"):
        load(folder / "m.onnx")


def test_a_cycle_is_refused(tmp_path):
    nodes = [helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("Relu", ["a"], ["b"])]
    path = tmp_path / "cycle.onnx"
    path.write_bytes(net(nodes, {"x": [2]}, {"b": [2]}).SerializeToString())
    with pytest.raises(UserError, match=r"cycle\.onnx: "):
        load(path)


def nested(depth: int) -> bytes:
    """Subgraphs within subgraphs, as wire bytes: protobuf for Python would not even build them."""

    def field(number: int, payload: bytes) -> bytes:
        size, head = len(payload), [number << 3 | 2]
        while size > 127:
            head.append(size & 127 | 128)
            size >>= 7
        return bytes([*head, size]) + payload

    graph = field(2, b"g")
    for _ in range(depth):
        attribute = field(1, b"then_branch") + b"\xa0\x01\x05" + field(6, graph)
        graph = field(1, field(4, b"If") + field(5, attribute)) + field(2, b"g")
    return b"\x08\x08" + field(7, graph) + field(8, b"\x10\x11")


@pytest.mark.parametrize("depth", [3, 30, 90, 150, 5000])
def test_deep_nesting_is_read_or_refused(tmp_path, depth):
    path = tmp_path / "deep.onnx"
    path.write_bytes(nested(depth))
    assert in_fork(lambda: use(path)) in ("refused", "used")


def calling_functions(calls: dict[str, list[str]], *, wrapped: bool = False) -> onnx.ModelProto:
    """A model that calls `f0`; each function calls others, in a branch of an If if `wrapped`."""

    def node(name: str) -> onnx.NodeProto:
        call = helper.make_node(name, ["x"], ["y"], domain="f")
        if not wrapped:
            return call
        branch = helper.make_graph([call], "branch", [], [helper.make_tensor_value_info("y", 1, [1])])
        return helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)

    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
    functions = [
        helper.make_function("f", name, ["x", "c"], ["y"], [node(each) for each in called], opsets)
        for name, called in calls.items()
    ]
    values = [helper.make_tensor_value_info(name, 1, [1]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("f0", ["x", ""], ["y"], domain="f")], "calls", values[:1], values[1:])
    return helper.make_model(graph, functions=functions, opset_imports=opsets, ir_version=9)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    ("calls", "cause"),
    [
        ({"f0": ["f0"]}, r"calls itself \(f0 -> f0\)"),
        ({"f0": ["f1"], "f1": ["f2"], "f2": ["f1"]}, "calls itself"),
        ({f"f{level}": [f"f{level + 1}"] * 2 for level in range(40)} | {"f40": []}, "100,000 are inlined"),
    ],
)
def test_recursive_functions_are_refused_before_native_code(calls, cause, wrapped, tmp_path, monkeypatch):
    proto = calling_functions(calls, wrapped=wrapped)
    onnx.save(proto, tmp_path / "f.onnx")
    monkeypatch.setattr("harness.workers.helper_process._process_helper", None)
    for read in (load, read_signature):
        with pytest.raises(UserError, match=rf"f\.onnx: .*{cause}"):
            read(tmp_path / "f.onnx")
    with pytest.raises(UserError, match=cause):
        load_proto(proto, source="f", sha256="")


def test_a_long_chain_of_functions_is_read(tmp_path):
    chain = {f"f{level}": [f"f{level + 1}"] for level in range(300)}
    proto = calling_functions(chain | {"f300": []})
    proto.functions[-1].node.append(helper.make_node("Relu", ["x"], ["y"]))
    onnx.save(proto, tmp_path / "f.onnx")
    assert [node.op for node in load(tmp_path / "f.onnx").nodes] == ["Relu"]
