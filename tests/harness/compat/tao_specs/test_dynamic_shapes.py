"""Models with dynamic inputs: their sizes come from the calibration arrays, and their layers can be ranked."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from spec_runs import layer, quantize_model

from harness.base.errors import UserError
from harness.base.progress import NullProgress
from harness.compat.tao_specs import ptq as command
from harness.compat.tao_specs.evaluate import rank_layers
from harness.compat.tao_specs.quantize import QuantizationResult
from harness.graph.qdq.qdq_graph import QDQGraph


def saved(nodes: list[Any], inputs: list[Any], weights: dict[str, Any], path: Path) -> Path:
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "net", inputs, [output], tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def tokens(path: Path, names: tuple[str, ...] = ("input_ids",), dims: Any = ("batch", "seq")) -> Path:
    """Sums of embedded token ids with a MatMul behind them."""
    random = np.random.default_rng(0).normal(size=(2, 50, 32)).astype(np.float32)
    nodes = [helper.make_node("Gather", ["table", name], [f"{name}_embedded"]) for name in names]
    total = helper.make_node("Sum", [f"{name}_embedded" for name in names], ["h"])
    nodes += [total, helper.make_node("MatMul", ["h", "w"], ["y"], name="fc")]
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, dims) for name in names]
    return saved(nodes, inputs, {"table": random[0], "w": random[1][:32]}, path)


def run_quantize(model: Path, data: Path, folder: Path, loader: Any = None) -> QuantizationResult:
    dataset = f"calibration_data: {data}" if loader is None else ""
    return quantize_model(model, folder, layer("MatMul"), dataset=dataset, loader=loader)


@pytest.fixture
def modelopt(monkeypatch):
    """Shapes of the batches that ModelOpt would get, and its arguments."""
    found: list[Any] = []

    def by_modelopt(path: Path, target: Path, batches: Any, arguments: Any) -> None:
        found.append(([{n: a.shape for n, a in batch.items()} for batch in batches], arguments))
        target.write_bytes(path.read_bytes())

    monkeypatch.setattr(command, "quantize_with_modelopt", by_modelopt)
    return found


def test_ptq_takes_dynamic_sizes_from_the_arrays(tmp_path, modelopt):
    model = tokens(tmp_path / "m.onnx", ("input_ids", "mask"))
    ids = np.ones((3, 12), np.int64)
    np.savez(tmp_path / "calib.npz", input_ids=ids, mask=ids)
    asked = ["--onnx_path", str(model), "--calibration_data", str(tmp_path / "calib.npz")]
    command.run_ptq(asked)
    command.run_ptq([*asked, "--calibrate_per_node"])
    command.run_ptq([*asked, "--calibration_shapes", "mask:3x12,input_ids:3x12"])
    batches, arguments = modelopt[0]
    assert batches == [{"input_ids": (1, 12), "mask": (1, 12)}] * 3
    assert "calibration_shapes" not in arguments
    assert modelopt[1][1]["calibration_shapes"] == "input_ids:1x12,mask:1x12"
    assert modelopt[2][0] == [{"input_ids": (3, 12), "mask": (3, 12)}]


@pytest.mark.parametrize(("dims", "array", "batch"), [
    (("N", 3, "H", "W"), (5, 3, 8, 6), (1, 3, 8, 6)),
    ((4, 3, "H", "W"), (8, 3, 8, 6), (4, 3, 8, 6)),
    (("N", 3, "H", "W"), (5, 2, 3, 8, 6), (2, 3, 8, 6)),
    (("N", 3, 8, 6), (5, 2, 3, 8, 6), (2, 3, 8, 6)),
    (None, (5, 3, 8, 6), (1, 3, 8, 6)),
])  # fmt: skip
def test_ptq_takes_the_shape_of_images(tmp_path, modelopt, dims, array, batch):
    weight = np.ones((4, 3, 1, 1), np.float32)
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)
    model = saved([helper.make_node("Conv", ["x", "w"], ["y"])], [value], {"w": weight}, tmp_path / "m.onnx")
    np.save(tmp_path / "calib.npy", np.zeros(array, np.float32))
    command.run_ptq(["--onnx_path", str(model), "--calibration_data", str(tmp_path / "calib.npy")])
    assert {shape for each in modelopt[0][0] for shape in each.values()} == {batch}


@pytest.mark.parametrize(("arrays", "message"), [
    ({"input_ids": (3, 12, 4, 4)}, "a sample of 'input_ids' is 12 x 4 x 4, but the input takes"),
    ({"other": (3, 12)}, "'input_ids' is .* no array for it: give --dim seq=128, or --cal.*_shapes input_ids:1x128"),
    ({}, "'input_ids' is .*: give --dim seq=128, or --calibration_shapes input_ids:1x128"),
])  # fmt: skip
def test_arrays_without_usable_sizes_are_refused(tmp_path, modelopt, arrays, message):
    asked = ["--onnx_path", str(tokens(tmp_path / "m.onnx"))]
    if arrays:
        zeros: dict[str, Any] = {name: np.zeros(shape, np.int64) for name, shape in arrays.items()}
        np.savez(tmp_path / "c.npz", **zeros)
        asked += ["--calibration_data", str(tmp_path / "c.npz")]
    with pytest.raises(UserError, match=message):
        command.run_ptq(asked)


def test_quantize_takes_dynamic_sizes_from_arrays_and_loaders(tmp_path, caplog):
    model = tokens(tmp_path / "m.onnx")
    np.savez_compressed(tmp_path / "calib.npz", input_ids=np.arange(36, dtype=np.int64).reshape(3, 12))
    found = run_quantize(model, tmp_path / "calib.npz", tmp_path)
    dims = onnx.load(found.path).graph.input[0].type.tensor_type.shape.dim
    assert [dim.dim_value for dim in dims] == [1, 12]
    assert "fixed in the result: input_ids 1x12" in caplog.text
    loader = iter([np.ones((2, 7), np.int64), np.ones((2, 7), np.int64)])
    again = run_quantize(model, tmp_path, tmp_path / "again", loader)
    assert [d.dim_value for d in onnx.load(again.path).graph.input[0].type.tensor_type.shape.dim] == [1, 7]


def test_layers_of_a_model_with_dynamic_inputs_are_ranked(tmp_path):
    """Its dynamic sizes become those of the feeds: ONNX Runtime's benchmarker takes static ones alone."""
    model = tokens(tmp_path / "m.onnx", dims=(2, 12))
    np.savez(tmp_path / "calib.npz", input_ids=np.arange(48, dtype=np.int64).reshape(4, 12))
    proto = onnx.load(run_quantize(model, tmp_path / "calib.npz", tmp_path).path)
    for dim, name in zip(proto.graph.input[0].type.tensor_type.shape.dim, ("batch", "seq"), strict=True):
        dim.dim_param = name
    del proto.graph.value_info[:]
    onnx.save(proto, tmp_path / "dynamic.onnx")
    assert QDQGraph(proto).edges
    feeds = [{"input_ids": np.arange(24, dtype=np.int64).reshape(2, 12) + i} for i in range(3)]
    assert [node for node, _ in rank_layers(tmp_path / "dynamic.onnx", feeds, NullProgress())] == ["fc"]
