"""The zoo's models: valid, the same every time, and alive (finite, varied outputs)."""

import hashlib
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from harness.base.errors import UserError
from harness.zoo import model_names, write_model
from harness.zoo.transformer import encoder

NODES = {
    "resnet18": 69,
    "resnet50": 175,
    "mobilenetv2": 100,
    "vit_tiny": 368,
    "encoder6": 6 * 87 + 11,
    "encoder48": 48 * 87 + 11,
    "yolo_tiny": 323,
    "yolo_tiny_export": 327,
}
LARGE = {"resnet50", "encoder48"}
EVERY = [pytest.param(name, marks=pytest.mark.slow if name in LARGE else ()) for name in model_names()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("zoo")


def written(name: str, folder: Path) -> Path:
    path = folder / f"{name}.onnx"
    return path if path.exists() else write_model(name, path)


@pytest.mark.parametrize("name", EVERY)
def test_a_model_is_valid_and_has_one_static_float_input(name, folder):
    model = onnx.load(written(name, folder))
    onnx.checker.check_model(model, full_check=True)
    (info,) = model.graph.input
    shape = "x".join(str(dim.dim_value) for dim in info.type.tensor_type.shape.dim)
    assert info.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    assert model_names()[name].endswith(f"; {info.name} {shape}")
    assert {opset.domain: opset.version for opset in model.opset_import} == {"": 17}
    assert len(model.graph.node) == NODES.get(name, len(model.graph.node))


@pytest.mark.parametrize("name", [name for name in model_names() if name not in LARGE])
def test_two_writes_give_the_same_bytes(name, folder, tmp_path):
    first = hashlib.sha256(written(name, folder).read_bytes()).digest()
    assert hashlib.sha256(write_model(name, tmp_path / "again" / "model.onnx").read_bytes()).digest() == first


@pytest.mark.parametrize("name", EVERY)
def test_activations_stay_finite_and_varied(name, folder):
    model = onnx.load(written(name, folder))
    del model.graph.output[1:]
    watched = [node.output[0] for node in model.graph.node if node.op_type in {"Conv", "MatMul", "Gemm"}]
    model.graph.output.extend(onnx.ValueInfoProto(name=tensor) for tensor in {watched[0], *watched[-8:]})
    outputs = run(model)
    for name_, values in outputs.items():
        assert np.isfinite(values).all(), name_
        assert 0.01 < values.std() < 100, name_
        assert np.abs(values).max() < 6e4, f"{name_} leaves the range of half precision"


def test_the_input_decides_the_output(folder):
    model = onnx.load(written("yolo_tiny", folder))
    one, other = run(model, seed=1)["scores"], run(model, seed=2)["scores"]
    assert np.abs(one - other).max() > 0.01


def test_resnet18_has_batch_normalization_after_each_conv(folder):
    operators = [node.op_type for node in onnx.load(written("resnet18", folder)).graph.node]
    assert operators.count("BatchNormalization") == operators.count("Conv") == 20


def test_all_shapes_of_an_encoder_can_be_inferred(folder):
    model = onnx.shape_inference.infer_shapes(onnx.load(written("encoder6", folder)), strict_mode=True, data_prop=True)
    known = {info.name: info.type.tensor_type.shape for info in (*model.graph.value_info, *model.graph.output)}
    products = [known[node.output[0]] for node in model.graph.node if node.op_type == "MatMul"]
    assert len(products) == 6 * 8
    assert all(dim.dim_value > 0 for shape in products for dim in shape.dim)


def test_encoder_layers_have_equal_node_counts():
    counts = [len(encoder(layers, width=16, tokens=8).build().graph.node) for layers in (1, 2, 4)]
    assert counts == [98, 185, 359]


@pytest.mark.parametrize(("layers", "width"), [(0, 64), (1, 66)])
def test_invalid_encoder_sizes_are_refused(layers, width):
    with pytest.raises(ValueError, match=r"layers >= 1 and width divisible by heads, but got layers="):
        encoder(layers, width=width)


def test_unknown_name_suggests_the_nearest(tmp_path):
    with pytest.raises(UserError, match=r"zoo:resnet81: no such model; did you mean 'resnet18'"):
        write_model("resnet81", tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_unwritable_path_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"zoo:shapes_detector: cannot write .*file/model.onnx: "):
        write_model("shapes_detector", tmp_path / "file" / "model.onnx")


def run(model: onnx.ModelProto, seed: int = 0) -> dict[str, np.ndarray]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (info,) = session.get_inputs()
    rng = np.random.default_rng(seed)
    values = rng.random(info.shape) if len(info.shape) == 4 else rng.standard_normal(info.shape)
    outputs = [output.name for output in session.get_outputs()]
    return dict(zip(outputs, session.run(outputs, {info.name: values.astype(np.float32)}), strict=True))
