"""A trained detector, a small classifier, and folders of images with labels, all made by code."""

import json

import numpy as np
import pytest
from PIL import Image

from harness import zoo
from harness.accuracy.data.datasets import open_data
from harness.accuracy.data.preprocess import open_preprocess
from harness.graph.builder import GraphBuilder
from harness.zoo import shapes


@pytest.fixture(scope="session")
def detector(tmp_path_factory):
    """The trained detector with YOLO11's output."""
    return zoo.write_model("shapes_yolo", tmp_path_factory.mktemp("detector") / "model.onnx")


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A classifier of 8 x 8 images with a dynamic batch and names as PyTorch exports them."""
    g = GraphBuilder("small", opset=19, seed=5)
    x = g.input("images", ("N", 3, 8, 8))
    x = g.op("Relu", g.conv(x, 32, 3, name="/backbone/conv1/Conv"), name="/backbone/relu1/Relu")
    y = g.conv(x, 32, 3, name="/backbone/conv2/Conv")
    x = g.op("Relu", g.op("Add", y, x, name="/backbone/add/Add"), name="/backbone/relu2/Relu")
    x = g.op("Flatten", g.op("GlobalAveragePool", x, name="/head/pool/GlobalAveragePool"), name="/head/flatten/Flatten")
    g.output(g.gemm(x, 32, name="/head/fc/Gemm"), ("N", 32), name="logits")
    return g.save(tmp_path_factory.mktemp("small") / "model.onnx")


@pytest.fixture(scope="session")
def coco(tmp_path_factory):
    """A folder laid out as that of COCO: train2017, val2017, annotations."""
    root = tmp_path_factory.mktemp("data") / "coco"
    (root / "annotations").mkdir(parents=True)
    for part, name, count in (("calibration", "train2017", 8), ("evaluation", "val2017", 24)):
        drawn = shapes.draw_split(part, count)
        (root / name).mkdir()
        for image, facts in zip(drawn.images, drawn.coco["images"], strict=True):
            Image.fromarray(image).save(root / name / facts["file_name"])
        (root / "annotations" / f"instances_{name}.json").write_text(json.dumps(drawn.coco))
    return root


@pytest.fixture(scope="session")
def calibration(tmp_path_factory):
    """Prepared inputs of the detector."""
    data, prepare = open_data({"use": "shapes", "split": "calibration", "count": 8}), open_preprocess("shapes")
    path = tmp_path_factory.mktemp("calibration") / "calib.npy"
    np.save(path, np.stack([prepare.prepare(data.image(i), (128, 128)).tensor for i in range(8)]))
    return path


@pytest.fixture(scope="session")
def noise(tmp_path_factory):
    """Inputs of the classifier."""
    path = tmp_path_factory.mktemp("noise") / "calib.npy"
    np.save(path, np.random.default_rng(0).normal(size=(4, 3, 8, 8)).astype(np.float32))
    return path
