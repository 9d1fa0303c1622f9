"""Placements read back from the outputs of ModelOpt and of ONNX Runtime."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

from harness.accuracy.tools.ptq import quantize
from harness.base.errors import UserError
from harness.graph.builder import GraphBuilder
from harness.graph.load import load, load_proto, save_to_folder
from harness.graph.model import Model
from harness.graph.qdq.import_placement import import_placement, read_placement
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import ONNXRUNTIME, OPENVINO, TENSORRT
from harness.zoo import transformer
from search.space import Edge


@pytest.fixture(scope="module")
def model():
    g = GraphBuilder("residual", opset=19, seed=5)
    x = g.input("x", (1, 3, 16, 16))
    x = g.op("Relu", g.conv(x, 32, 3, name="stem"), name="stem_relu")
    y = g.op("Relu", g.conv(x, 32, 3, name="inner"), name="inner_relu")
    y = g.op("Add", g.conv(y, 32, 3, name="outer"), x, name="residual")
    y = g.op("Flatten", g.op("GlobalAveragePool", y, name="pool"), name="flatten")
    g.output(g.gemm(y, 32, name="head"), name="logits")
    return load_proto(g.build(), source="residual", sha256="0")


def images() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=(1, 3, 16, 16)).astype(np.float32) for _ in range(3)]


class Reader(CalibrationDataReader):
    def __init__(self) -> None:
        self._rest: Iterator[np.ndarray] = iter(images())

    def get_next(self) -> dict[str, np.ndarray] | None:
        image = next(self._rest, None)
        return None if image is None else {"x": image}


def ends(edges: dict[Edge, str]) -> set[tuple[str, int]]:
    return {(edge.consumer, edge.slot) for edge in edges}


@pytest.mark.parametrize("per_channel", [False, True])
def test_quantize_static_is_read_back(model, tmp_path, per_channel):
    path = tmp_path / "static.onnx"
    quantize_static(
        save_to_folder(model, tmp_path), path, Reader(), quant_format=QuantFormat.QDQ, per_channel=per_channel,
        activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
    )  # fmt: skip
    edges = import_placement(path, model)
    linear = {(name, slot) for name in ("stem", "inner", "outer", "head") for slot in (0, 1)}
    assert linear <= ends(edges)
    assert {("residual", 0), ("residual", 1), ("pool", 0), ("", 0)} <= ends(edges)
    assert not {(name, 2) for name in ("stem", "head")} & ends(edges)  # biases are no edges
    assert set(edges.values()) == {"int8"}
    assert all(model.nodes[[n.name for n in model.nodes].index(e.consumer)].inputs[e.slot] == e.tensor
               for e in edges if e.consumer)  # fmt: skip


@pytest.mark.slow
def test_modelopt_ptq_is_read_back_and_can_be_inserted(model, tmp_path):
    path, batches = tmp_path / "ptq.onnx", [{"x": image} for image in images()]
    quantize("modelopt_ptq", save_to_folder(model, tmp_path), path, batches, dialect_name="tensorrt")
    edges = import_placement(path, model)
    assert {(name, slot) for name in ("inner", "outer") for slot in (0, 1)} <= ends(edges)
    assert ("residual", 1) in ends(edges)  # the branch that the convolution is not fused with
    assert ("residual", 0) not in ends(edges)
    ranges = {name: (-4.0, 4.0) for name in model.types}
    asked = tuple(sorted(edges.items()))
    assert import_placement(Inserter(model, OPENVINO, ranges).insert(asked), model) == edges


def as_pt2e_export(model: Model) -> onnx.ModelProto:
    """Quantize the convolutions of a model in the form in which `torch.onnx.export` writes a PT2E graph."""
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    nodes: list[onnx.NodeProto] = []
    constants: dict[str, np.ndarray] = {"one": np.array(0.02, np.float32), "middle": np.array(117, np.uint8)}
    for node in proto.graph.node:
        if node.op_type == "Conv":
            weight, number = model.constant_array(node.input[1]), len(constants)
            assert weight is not None
            scale = np.abs(weight).max(axis=(1, 2, 3)) / np.float32(127)
            names = [f"_frozen_param{number}", f"val_{number}", f"val_{number + 1}"]
            integers = np.round(weight / scale[:, None, None, None]).astype(np.int8)
            constants |= dict(zip(names, (integers, scale, np.zeros(len(scale), np.int8)), strict=True))
            pair = [f"quantize_per_tensor_{number}", f"dequantize_per_tensor_{number}"]
            nodes += [
                helper.make_node("DequantizeLinear", names, [f"dequantize_per_channel_{number}"], axis=0),
                helper.make_node("QuantizeLinear", [node.input[0], "one", "middle"], pair[:1]),
                helper.make_node("DequantizeLinear", [pair[0], "one", "middle"], pair[1:]),
            ]
            node.input[0], node.input[1] = pair[1], f"dequantize_per_channel_{number}"
        node.name = f"node_{node.op_type.lower()}_{len(nodes)}"
        nodes.append(node)
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    proto.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    return proto


def test_a_pt2e_graph_of_torch_is_read_back(model):
    edges = import_placement(as_pt2e_export(model), model)
    assert ends(edges) == {(name, slot) for name in ("stem", "inner", "outer") for slot in (0, 1)}
    assert set(edges.values()) == {"int8"}


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_import_from_the_pt2e_program_in_the_docs(tmp_path, monkeypatch):
    import torch

    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[4] / "docs/how-to/deploy.md").read_text(encoding="utf-8")
    (program,) = (text for text in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "pt2e" in text)
    layers = [torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 3)]
    example = (torch.zeros(1, 3, 16, 16),)
    exec(
        program,
        {"module": torch.nn.Sequential(*layers).eval(), "example": example, "batches": [torch.randn(1, 3, 16, 16)]},
    )
    model = load(Path("float.onnx"))
    convolutions = [node.name for node in model.nodes if node.op == "Conv"]
    edges = import_placement(Path("theirs.onnx"), model)
    assert {(name, slot) for name in convolutions for slot in (0, 1)} <= ends(edges)
    assert len(read_placement(Path("theirs.onnx"), model).ranges) >= len(convolutions)


def test_a_tensor_and_operator_match_where_node_names_are_lost(model):
    asked = ((Edge("x", "stem", 0), "int8"),)
    proto = Inserter(model, OPENVINO, {"x": (-1.0, 1.0)}).insert(asked)
    for node in proto.graph.node:
        node.name = ""
    assert import_placement(proto, model) == dict(asked)


def test_nodes_with_equal_names_are_imported_separately():
    """Loading tells them apart by numbers in the order of the file; so does the reader of the Q/DQ model."""
    g = GraphBuilder("twice", opset=19, seed=5)
    x = g.conv(g.input("x", (1, 4, 8, 8)), 4, 3, name="conv")
    g.output(g.conv(x, 4, 3, name="conv"), name="y")
    model = load_proto(g.build(), source="twice", sha256="0")
    space = build_space(model, OPENVINO)
    asked = space.resolve(space.quantize_all())
    proto = Inserter(model, OPENVINO, {name: (-1.0, 1.0) for name in model.types}).insert(asked)
    for node in proto.graph.node:
        if node.op_type == "Conv":
            node.name = "conv"
    assert import_placement(proto, model) == dict(asked)


def renamed(proto: onnx.ModelProto) -> onnx.ModelProto:
    """With every node and tensor called otherwise."""
    names: dict[str, str] = {}
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)

    def new(name: str) -> str:
        return names.setdefault(name, f"n{len(names)}") if name else ""

    for node in copy.graph.node:
        node.name = f"node_{new('node ' + node.name)}"
        for field in (node.input, node.output):
            field[:] = [new(name) for name in field]
    for value in (*copy.graph.initializer, *copy.graph.input, *copy.graph.output):
        value.name = new(value.name)
    del copy.graph.value_info[:]
    onnx.checker.check_model(copy)
    return copy


@pytest.mark.parametrize("dialect", [OPENVINO, ONNXRUNTIME, TENSORRT], ids=lambda d: d.name)
@pytest.mark.parametrize("name", ["residual", "encoder"])
def test_a_model_whose_names_all_changed_is_read_back(name, dialect, model):
    if name == "encoder":
        model = load_proto(transformer.encoder(2, width=16, heads=2, tokens=4).build(), source="encoder", sha256="0")
    space = build_space(model, dialect)
    inserter = Inserter(model, dialect, {tensor: (-1.0, 2.0) for tensor in model.types})
    for seed in range(4):
        asked = dict(space.resolve(space.random(np.random.default_rng(seed))))
        found = import_placement(renamed(inserter.insert(tuple(asked.items()))), model)
        assert found.items() >= asked.items()
        # Both operands of a product behind operators that move quantized values: the product is quantized too.
        moves = {"MatMul", "Reshape", "Transpose"}
        assert {
            node.op for node in model.nodes for edge in found.keys() - asked.keys() if node.name == edge.consumer
        } <= moves


def test_import_of_quantized_weights_and_per_channel_scales(model):
    """Q folded away by the other tool: an INT8 initializer and a DequantizeLinear alone, one scale a channel."""
    inserter = Inserter(model, OPENVINO, {tensor: (-1.0, 2.0) for tensor in model.types})
    asked = tuple(sorted((Edge(model.nodes[0].inputs[slot], "stem", slot), "int8") for slot in (0, 1)))
    proto = inserter.insert(asked)
    makers = {name: node for node in proto.graph.node for name in node.output}
    dequantize = makers[next(node for node in proto.graph.node if node.name == "stem").input[1]]
    stored = {tensor.name: tensor for tensor in proto.graph.initializer}
    assert stored[dequantize.input[0]].data_type == onnx.TensorProto.INT8
    assert list(stored[dequantize.input[1]].dims) == [32]
    assert dequantize.input[0] not in makers
    assert import_placement(proto, model) == import_placement(renamed(proto), model) == dict(asked)


def test_qoperator_models_are_refused(model, tmp_path):
    path = tmp_path / "qoperator.onnx"
    quantize_static(save_to_folder(model, tmp_path), path, Reader(), quant_format=QuantFormat.QOperator)
    with pytest.raises(
        UserError, match=r"qoperator\.onnx: QLinearConv '.*' is of the QOperator format.*QuantFormat\.QDQ"
    ):
        import_placement(path, model)


def test_a_model_without_matching_pairs_is_refused(model):
    with pytest.raises(UserError, match="the Q/DQ model: holds no Q/DQ pair, so there is no placement"):
        import_placement(model.proto, model)
    builder = GraphBuilder("stranger")
    x, scale, zero = builder.input("other", (1, 4)), builder.const(np.float32(0.1)), builder.const(np.uint8(0))
    x = builder.op("DequantizeLinear", builder.op("QuantizeLinear", x, scale, zero), scale, zero)
    builder.output(builder.op("Relu", x))
    with pytest.raises(UserError, match="the Q/DQ model: none of its 1 quantized edges belongs to residual"):
        import_placement(builder.build(), model)


def test_missing_file_is_refused(model, tmp_path):
    with pytest.raises(UserError, match="no such file"):
        import_placement(tmp_path / "missing.onnx", model)


def test_edges_of_added_operators_are_ignored(model):
    proto = Inserter(model, OPENVINO, {"x": (-1.0, 1.0)}).insert(((Edge("x", "stem", 0), "int8"),))
    dequantized = next(node.output[0] for node in proto.graph.node if node.op_type == "DequantizeLinear")
    proto.graph.node.append(helper.make_node("Identity", [dequantized], ["spare"], name="extra"))
    proto.graph.output.append(helper.make_tensor_value_info("spare", onnx.TensorProto.FLOAT, [1, 3, 16, 16]))
    assert ends(import_placement(proto, model)) == {("stem", 0)}
