"""OpenVINO computes some quantized operators wrongly: their files are caught, and the operator is named."""

import numpy as np
import onnx
import pytest
from machine import exact_int8
from onnx import TensorProto, helper, numpy_helper

from harness.api import Candidate
from harness.measure.engines import MAIN, WorkerSpec
from harness.measure.sandbox import open_engines
from harness.run.config import Limits, Use
from harness.run.observe import Silent
from harness.run.runtime_checker import CheckPlan, RuntimeChecker

SHAPES = {"tokens": (2, 49, 32), "product": (1, 12, 16)}


def model(kind, path, *, quantized):
    """The mean over the tokens of a batch, or the product with a matrix of weights and no bias behind it."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((16, 24)).astype(np.float32) / 4}
    nodes = [helper.make_node("Relu", ["x"], ["r"], name="relu")]
    data, weight = "r", "w"
    if quantized:
        scale = float(np.abs(weights["w"]).max() / 127)
        weights = {"w": np.round(weights["w"] / scale).astype(np.int8)}
        weights |= {"s": np.array(4 / 255, np.float32), "z": np.array(0, np.uint8)}
        weights |= {"ws": np.array(scale, np.float32), "wz": np.array(0, np.int8)}
        nodes += [
            helper.make_node("QuantizeLinear", ["r", "s", "z"], ["rq"]),
            helper.make_node("DequantizeLinear", ["rq", "s", "z"], ["rd"]),
            helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wd"]),
        ]
        data, weight = "rd", "wd"
    nodes.append(
        helper.make_node("ReduceMean", [data], ["m"], name="mean", axes=[1], keepdims=0)
        if kind == "tokens"
        else helper.make_node("MatMul", [data, weight], ["m"], name="mean")
    )
    nodes.append(helper.make_node("Tanh", ["m"], ["y"], name="last"))
    nodes = [node for node in nodes if kind == "product" or node.output[0] != "wd"]
    used = {name for node in nodes for name in node.input}
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items() if name in used]
    ends = [helper.make_tensor_value_info("x", TensorProto.FLOAT, SHAPES[kind])]
    out = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "g", ends, out, tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def checked(kind, folder, backend):
    floating = model(kind, folder / "float.onnx", quantized=False)
    quantized = model(kind, folder / "quantized.onnx", quantized=True)
    rng = np.random.default_rng(1)
    plan = CheckPlan(
        float_file=floating,
        floats={MAIN: floating},
        feeds=[{"x": rng.standard_normal(SHAPES[kind]).astype(np.float32)} for _ in range(4)],
        folder=folder,
        work=folder / "work",
        limits=Limits(),
    )
    worker = WorkerSpec(benchmarkers={MAIN: backend}, workdir=folder / "engines")
    with open_engines(worker, Limits()) as engines, RuntimeChecker(plan, engines, Silent()) as checker:
        return checker.check(Candidate(digest="imported", edges=(), source=lambda: quantized))


@exact_int8
@pytest.mark.parametrize("kind", ["tokens", "product"])
def test_a_wrong_result_is_told_with_its_operator_and_a_small_model(kind, tmp_path):
    found = checked(kind, tmp_path, Use(use="openvino", params={"precision": "f32"}))
    assert found.label == "wrong result in openvino"
    assert found.engine_db < 10 < found.file_db
    assert "'mean'" in found.operator
    small = onnx.load(tmp_path / found.model)
    assert {node.name for node in small.graph.node if "quantize" not in node.op_type.lower()} == {"mean"}


@pytest.mark.parametrize("kind", ["tokens", "product"])
def test_a_runtime_that_computes_the_same_file_as_it_says_is_right(kind, tmp_path):
    assert checked(kind, tmp_path, Use(use="onnxruntime")).verdict == "right"
