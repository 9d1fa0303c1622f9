"""The builder of models and the zoo: valid, the same every time, and alive (finite, varied outputs)."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx_models import run_onnxruntime
from pycocotools import mask
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from harness.base.errors import UserError
from harness.graph.builder import MAX_IR_VERSION, GraphBuilder
from harness.zoo import model_names, write_model
from harness.zoo.catalog import TRAINED_MODEL_PATH
from harness.zoo.shapes import CLASS_NAMES, IMAGE_SIZE_PX, draw_split
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
    (info,) = model.graph.input
    shape, rng = [dim.dim_value for dim in info.type.tensor_type.shape.dim], np.random.default_rng(seed)
    values = rng.random(shape) if len(shape) == 4 else rng.standard_normal(shape)
    names = [value.name for value in model.graph.output]
    return dict(zip(names, run_onnxruntime(model, {info.name: values.astype(np.float32)}, names), strict=True))


Floats = np.ndarray


def test_the_committed_file_is_below_one_megabyte():
    assert TRAINED_MODEL_PATH.stat().st_size < 1_000_000
    assert len(list(TRAINED_MODEL_PATH.parent.glob("*.onnx"))) == 1


def test_output_rows_are_cells_with_boxes_and_scores():
    infer = session(TRAINED_MODEL_PATH)
    centres = [((np.arange(side * side) % side + 0.5) * stride, (np.arange(side * side) // side + 0.5) * stride)
               for side, stride in ((16, 8), (8, 16))]  # fmt: skip
    x, y = (np.concatenate([centre[axis] for centre in centres]) for axis in (0, 1))
    for image in draw_split("evaluation", 10).images:
        found = infer(image)
        assert found.shape == (320, 4 + len(CLASS_NAMES))
        assert found[:, 4:].min() >= 0
        assert found[:, 4:].max() <= 1
        sure = found[:, 4:].max(1) > 0.5
        assert sure.any()
        assert np.abs(found[sure, 0] - x[sure]).max() < 40
        assert np.abs(found[sure, 1] - y[sure]).max() < 40
        assert found[sure, 2:4].min() > 8
        assert found[sure, 2:4].max() < IMAGE_SIZE_PX


def test_openvino_agrees_with_onnx_runtime():
    openvino = pytest.importorskip("openvino")
    compiled = openvino.Core().compile_model(str(TRAINED_MODEL_PATH), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    image = draw_split("evaluation", 1).images[0]
    np.testing.assert_allclose(compiled(blob(image))[0][0], session(TRAINED_MODEL_PATH)(image), rtol=1e-3, atol=1e-3)


def test_map_by_a_decoder_apart_from_that_of_the_package():
    infer, shapes, found = session(TRAINED_MODEL_PATH), draw_split("evaluation", 30), []
    for number, image in enumerate(shapes.images, 1):
        rows = infer(image)
        boxes = np.concatenate([rows[:, :2] - rows[:, 2:4] / 2, rows[:, 2:4]], 1)
        for category, scores in enumerate(rows[:, 4:].T, 1):
            left = [index for index in np.argsort(-scores) if scores[index] > 0.01]
            while left:
                best, *others = left
                found.append([number, *boxes[best], scores[best], category])
                overlaps = mask.iou(boxes[[best]].astype(float), boxes[others].astype(float), [0] * len(others))
                left = [index for index, overlap in zip(others, np.ravel(overlaps), strict=True) if overlap <= 0.65]
    truth = COCO()
    truth.dataset = shapes.coco
    truth.createIndex()
    evaluation = COCOeval(truth, truth.loadRes(np.array(found)), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    assert evaluation.stats[0] > 0.8


def blob(image: np.ndarray) -> Floats:
    return image.transpose(2, 0, 1)[None].astype(np.float32) / 255


def session(path: Path) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    engine = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda image: engine.run(["detections"], {"images": blob(image)})[0][0]


def test_detector_has_operators_sensitive_to_int8():
    operators = {node.op_type for node in onnx.load(TRAINED_MODEL_PATH).graph.node}
    assert {"Conv", "Sigmoid", "Mul", "Add", "Concat", "Resize", "Exp"} <= operators
    assert "BatchNormalization" not in operators


def classifier(seed: int = 0) -> GraphBuilder:
    builder = GraphBuilder("classifier", seed=seed)
    x = builder.input("image", (1, 3, 16, 16))
    x = builder.op("Relu", builder.batch_norm(builder.conv(x, 8, 3, stride=2)))
    x = builder.op("Relu", builder.conv(x, 8, (3, 1), groups=-1, bias=False))
    x = builder.op("Flatten", builder.op("GlobalAveragePool", x))
    builder.output(builder.layer_norm(builder.linear(builder.gemm(x, 6), 5)), name="logits")
    return builder


def test_saved_model_runs(tmp_path):
    path = classifier().save(tmp_path / "folder" / "m.onnx")
    (found,) = run_onnxruntime(path, {"image": np.ones((1, 3, 16, 16), np.float32)}, ["logits"])
    assert found.shape == (1, 5)
    assert onnx.load(path).ir_version <= MAX_IR_VERSION


def test_every_tensor_is_typed_and_every_name_unique():
    graph = classifier().build().graph
    typed = {value.name for value in (*graph.value_info, *graph.output)}
    assert {name for node in graph.node for name in node.output} == typed
    names = [node.name for node in graph.node]
    assert len(set(names)) == len(names)


def test_shapes_follow_from_the_operators():
    builder = GraphBuilder("shapes")
    x = builder.input("x", (2, 6, 8, 8))
    assert builder.shape(builder.conv(x, 4, 5, stride=2, groups=2)) == (2, 4, 4, 4)
    assert builder.shape(builder.conv(x, 4, 3, pad=0)) == (2, 4, 6, 6)
    parts = builder.op("Split", x, builder.const([2, 4]), outputs=2, axis=1)
    assert [builder.shape(part) for part in parts] == [(2, 2, 8, 8), (2, 4, 8, 8)]
    assert builder.shape(builder.op("Reshape", x, builder.const([2, -1]))) == (2, 384)
    assert builder.shape(builder.op("Resize", x, "", builder.const([1.0, 1.0, 2.0, 2.0]), mode="nearest"))[2:] == (
        16,
        16,
    )
    assert builder.shape(builder.input("dynamic", ("N", None, 3))) == (-1, -1, 3)


def test_constants_keep_the_type_of_arrays():
    builder = GraphBuilder("constants")
    made = {
        builder.const(1.5): onnx.TensorProto.FLOAT,
        builder.const([1, 2]): onnx.TensorProto.INT64,
        builder.const(np.float64(2)): onnx.TensorProto.DOUBLE,
        builder.const(np.int8(2), "zero"): onnx.TensorProto.INT8,
        builder.const(np.int8(3), "zero"): onnx.TensorProto.INT8,
    }
    tensors = {tensor.name: tensor.data_type for tensor in builder.graph().initializer}
    assert tensors == made
    assert "zero_1" in tensors


def test_invalid_calls_are_refused():
    builder = GraphBuilder("wrong")
    x = builder.input("x", (2, 3))
    with pytest.raises(ValueError, match=r"wrong: MatMul 'MatMul': .*Incompatible dimensions"):
        builder.op("MatMul", x, x)
    with pytest.raises(ValueError, match="the shape of tensor 'nowhere' is not known"):
        builder.linear("nowhere", 3)
    with pytest.raises(ValueError, match="'x' is not the output of a node"):
        builder.output(x, name="y")
    with pytest.raises(ValueError, match="the name 'x' is taken"):
        builder.output(builder.op("Relu", x), name="x")
