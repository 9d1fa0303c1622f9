"""`qdq init`: the first experiment file of a model, which `qdq run --check` accepts."""

import numpy as np
import onnx
import pytest
import yaml
from PIL import Image
from small import qdq

from harness.graph.builder import GraphBuilder

CELLS = 84  # of strides 8, 16 and 32 for 64 x 64


def save(path, shape, outputs, symbols=()):
    g = GraphBuilder("net")
    x = g.input("x", shape)
    for number, dims in enumerate(outputs):
        total = g.op("ReduceMean", x, axes=[1, 2, 3][: len(shape) - 1], keepdims=0)
        g.output(g.op("Expand", total, g.const(np.array(dims))), name=f"y{number}")
    proto = g.build()
    for axis, symbol in symbols:
        proto.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = symbol
    onnx.save(proto, path)


@pytest.mark.parametrize(
    ("shape", "outputs", "expected"),
    [
        ((1, 3, 64, 64), [(1, 10)], ("torch_imagenet", "top1")),
        ((1, 64, 64, 3), [(1, 10)], ("torch_imagenet", "top1")),
        ((1, 3, 64, 64), [(1, CELLS, 85)], ("yolox", "coco_map")),
        ((1, 3, 64, 64), [(1, 24, CELLS)], ("ultralytics", "coco_map")),
        ((1, 7), [(1, 10)], ("NAME", "NAME")),
    ],
    ids=["classifier", "channels last", "yolox", "ultralytics", "no images"],
)
def test_the_file_is_accepted_and_names_what_the_shapes_tell(tmp_path, monkeypatch, shape, outputs, expected):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "net.onnx", shape, outputs)
    assert qdq("init", "net.onnx", "-o", "mine.yaml", "--backend", "simulated") == 0
    text = (tmp_path / "mine.yaml").read_text()
    assert f"# preprocess: {expected[0]} " in text
    assert f"# evaluator: {{use: {expected[1]}," in text
    assert qdq("run", "mine.yaml", "--check") == 0


def test_data_and_dynamic_axes_are_filled_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "net.onnx", (1, 3, 64, 64), [(1, 10)], symbols=[(0, "batch")])
    (tmp_path / "val").mkdir()
    for number in range(4):
        Image.fromarray(np.full((64, 64, 3), 40 * number, np.uint8)).save(tmp_path / "val" / f"{number}.png")
    (tmp_path / "labels.txt").write_text("".join(f"{number}.png {number}\n" for number in range(4)))
    given = ("--images", "val", "--labels", "labels.txt", "--backend", "simulated")
    assert qdq("init", "net.onnx", *given, "-o", "mine.yaml") == 0
    (model,) = yaml.safe_load((tmp_path / "mine.yaml").read_text())["models"]
    assert model["dims"] == {"batch": 1}
    assert model["calibration"]["data"] == {"use": "images", "images": "val"}
    assert model["evaluator"]["params"]["data"]["labels"] == "labels.txt"
    assert qdq("run", "mine.yaml", "--check") == 0


def test_a_file_is_not_replaced_and_wrong_paths_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "net.onnx", (1, 7), [(1, 10)])
    (tmp_path / "mine.yaml").touch()
    assert qdq("init", "net.onnx", "-o", "mine.yaml") == 2
    assert "mine.yaml: exists" in capsys.readouterr().err
    assert qdq("init", "net.onnx", "-o", "new.yaml", "--images", "gone") == 2
    assert "--images gone" in capsys.readouterr().err
