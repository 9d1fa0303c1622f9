"""Model files as TensorRT takes them: what is refused beforehand, casting, and FP8 scales."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from fake_machine import GPU
from onnx import TensorProto, helper, numpy_helper

from harness.base.errors import BuildFailed
from harness.graph.builder import GraphBuilder
from harness.graph.load import load
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import TENSORRT
from harness.runtimes.tensorrt import options as models
from harness.runtimes.tensorrt.options import (
    TensorRTParameters,
    cast_model,
    dominant_float_type,
    has_qdq,
    read_profiles,
    read_structure,
)

HOPPER, AMPERE = (9, 0), (8, 0)


def check(path: Path, capability: tuple[int, int]) -> None:
    TensorRTParameters(precision="f32").source(path, path.parent, replace(GPU, capability=capability))


def pair(path: Path, zero: TensorProto | None, scale: float = 0.5) -> Path:
    """x through one Q/DQ pair."""
    names = ["scale"] + (["zero"] if zero is not None else [])
    nodes = [
        helper.make_node("QuantizeLinear", ["x", *names], ["q"], name="quantize_x"),
        helper.make_node("DequantizeLinear", ["q", *names], ["y"], name="dequantize_x"),
    ]
    constants = [numpy_helper.from_array(np.array(scale, np.float32), "scale"), *([zero] if zero is not None else [])]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "pair", ends[:1], ends[1:], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)]), path)
    return path


def zero_of(kind: int, value: int = 0) -> TensorProto:
    return helper.make_tensor("zero", kind, [], [value])


@pytest.mark.parametrize(
    ("zero", "scale", "message"),
    [
        (zero_of(TensorProto.UINT8), 0.5, r"QuantizeLinear 'quantize_x' is UINT8; TensorRT accepts only INT8"),
        (None, 0.5, r"QuantizeLinear 'quantize_x' is UINT8"),
        (zero_of(TensorProto.INT8, 3), 0.5, "has a zero point that is not 0; TensorRT accepts only symmetric"),
        (zero_of(TensorProto.FLOAT8E4M3FN), 0.5, r"is FP8, which needs compute capability 8.9 .* this GPU has 8.0"),
        (zero_of(TensorProto.FLOAT8E5M2), 0.5, "E5M2; TensorRT accepts only E4M3"),
        (zero_of(TensorProto.INT8), 0.0, "has a scale that is not positive"),
    ],
)
def test_unsupported_pairs_are_refused_before_a_build(zero, scale, message, tmp_path):
    path = pair(tmp_path / "m.onnx", zero, scale)
    with pytest.raises(BuildFailed, match=message):
        check(path, AMPERE)


def test_int8_and_fp8_pairs_are_accepted(tmp_path):
    for kind in (TensorProto.INT8, TensorProto.FLOAT8E4M3FN):
        path = pair(tmp_path / "m.onnx", zero_of(kind))
        check(path, HOPPER)
        assert has_qdq(read_structure(path))


def test_computed_zero_point_is_not_checked(tmp_path):
    """Constant -> Cast -> QuantizeLinear is a form that it takes."""
    path = pair(tmp_path / "m.onnx", zero_of(TensorProto.INT8))
    model = onnx.load(path)
    model.graph.initializer[1].CopyFrom(helper.make_tensor("wide", TensorProto.INT32, [], [0]))
    model.graph.node.insert(0, helper.make_node("Cast", ["wide"], ["zero"], to=TensorProto.INT8))
    onnx.save(model, path)
    check(path, AMPERE)


def test_input_shapes_and_types_are_read(tmp_path):
    path = pair(tmp_path / "m.onnx", zero_of(TensorProto.FLOAT8E4M3FN))
    model = onnx.load(path)
    model.graph.input.append(helper.make_tensor_value_info("zero", TensorProto.FLOAT8E4M3FN, []))  # as before IR 4
    model.graph.input.append(helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", 7]))
    assert models.read_input_shapes(model) == {"x": (2,), "ids": (-1, 7)}
    assert list(models.read_io_dtypes(model)[0]) == ["x", "ids"]
    assert models.has_fp8(model)
    assert not models.has_fp8(read_structure(quantized(tmp_path)))


def test_quantized_biases_are_refused(tmp_path):
    builder = GraphBuilder("bias", opset=19)
    bias = builder.op("DequantizeLinear", builder.const(np.ones(4, np.int32)), builder.const(np.float32(0.1)))
    builder.output(builder.op("Add", builder.input("x", (1, 4)), bias), name="y")
    path = builder.save(tmp_path / "m.onnx")
    with pytest.raises(BuildFailed, match=r"INT32.*quantized biases"):
        check(path, HOPPER)


def quantized(folder: Path) -> Path:
    builder = GraphBuilder("net", seed=1)
    x = builder.op("Relu", builder.conv(builder.input("x", (1, 3, 8, 8)), 4, 3, pad=1))
    builder.output(builder.conv(x, 2, 1), name="y")
    model = load(builder.save(folder / "net.onnx"), min_opset=19)
    space = build_space(model, TENSORRT)
    ranges = {edge.tensor: (-4.0, 4.0) for d in space.dimensions for edge in d.edges}
    return Inserter(model, TENSORRT, ranges).export(space.resolve(space.quantize_all()), folder / "q.onnx")


@pytest.mark.parametrize(("precision", "kind"), [("f16", TensorProto.FLOAT16), ("bf16", TensorProto.BFLOAT16)])
def test_cast_keeps_inputs_and_outputs_and_converts_scales(precision, kind, tmp_path):
    path = quantized(tmp_path)
    cast = cast_model(path, precision, tmp_path)
    model = onnx.load(cast)
    assert model.opset_import[0].version >= 19
    ends = {value.name: value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)}
    assert ends == {"x": TensorProto.FLOAT, "y": TensorProto.FLOAT}
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    pairs = [node for node in model.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert {types[node.input[1]] for node in pairs} == {kind}
    assert dominant_float_type(read_structure(cast)) == precision
    assert cast_model(cast, precision, tmp_path / "again") == cast  # what is delivered is what is built
    assert cast_model(path, "f32", tmp_path) == path


def test_models_beyond_2_gib_are_not_cast(tmp_path, monkeypatch):
    path = quantized(tmp_path)
    monkeypatch.setattr(models, "MAX_PROTOBUF_BYTES", 100)
    with pytest.raises(BuildFailed, match=r"larger than 2 GiB, which protobuf cannot read"):
        read_structure(path)
    monkeypatch.setattr(models, "MAX_PROTOBUF_BYTES", path.stat().st_size + 10**9)
    external = onnx.load(path)
    external.graph.initializer[0].data_location = TensorProto.EXTERNAL
    external.graph.initializer[0].external_data.add(key="length", value=str(3 * 10**9))
    path.write_bytes(external.SerializeToString())
    with pytest.raises(
        BuildFailed, match=r"more than 2 GB of weights cannot be cast to f16 here; cast the model before"
    ):
        cast_model(path, "f16", tmp_path)


def test_invalid_profiles_are_refused_naming_the_key():
    profile = read_profiles({"x": {"min": "1x3", "opt": [2, 3], "max": "4x3"}})["x"]
    assert (profile.min, profile.opt, profile.max) == ((1, 3), (2, 3), (4, 3))
    assert str(profile) == "1x3 to 4x3"
    with pytest.raises(ValueError, match=r"profiles\.x\.min: a shape such as 1x3x224x224, but got '0x3'"):
        read_profiles({"x": {"min": "0x3", "opt": "1x3", "max": "1x3"}})
