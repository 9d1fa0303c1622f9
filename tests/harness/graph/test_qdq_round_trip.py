"""Models of the zoo and of the assets, in every dialect, at every precision: the whole way there and back."""

import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from onnx_models import loaded

from harness import zoo
from harness.graph.load import load
from harness.graph.model import Model
from harness.graph.partition.regions import discover_regions
from harness.graph.qdq.import_placement import import_placement
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.qdq_graph import diff_edges
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import ONNXRUNTIME, OPENVINO, TENSORRT
from harness.zoo import transformer

CASES = [(OPENVINO, "int8"), (OPENVINO, "fp8"), (ONNXRUNTIME, "int8"), (TENSORRT, "int8"), (TENSORRT, "fp8")]
SHAPES = {
    "deit_tiny_patch16_224": {"input": "1x3x224x224"},
    "mobilenet_v1_0.75_224": {"input": "1x3x224x224"},
    "squeezenet1.1": {"data": "1x3x224x224"},
}
ASSETS = ("deeplabv3_mnv2_voc_513", "nanodet_m_320", "yolox_nano", *SHAPES)
# The other models of the zoo repeat these blocks, or are these without the joined outputs of an export.
ZOO = ("resnet18", "mobilenetv2", "yolo_tiny_export", "shapes_yolo")
TRANSFORMERS = {"encoder2": partial(transformer.encoder, 2, width=64), "vit2": partial(transformer.vit_tiny, 2)}


def assert_there_and_back(model: Model) -> None:
    root = discover_regions(model)
    assert sorted(node for leaf in root.iter_leaves() for node in leaf.nodes) == list(range(len(model.nodes)))
    ranges = {tensor: (-1.0, 2.0) for tensor in model.types}
    for dialect, precision in CASES:
        space = build_space(model, dialect, precisions=(precision,), root=root)
        inserter = Inserter(model, dialect, ranges)
        for placement in (space.quantize_all(), space.random(np.random.default_rng(0))):
            asked = space.resolve(placement)
            proto = inserter.insert(asked)
            assert diff_edges(asked, proto) == ((), ())
            found = import_placement(proto, model)
            assert found == dict(asked)
            assert space.digest(space.nearest(found)) == space.digest(placement)


@pytest.mark.parametrize("name", ZOO)
def test_zoo_models_round_trip(name, tmp_path):
    assert_there_and_back(load(zoo.write_model(name, tmp_path / f"{name}.onnx"), min_opset=19))


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_zoo_transformers_round_trip(name):
    assert_there_and_back(loaded(TRANSFORMERS[name](), min_opset=19))


@pytest.mark.assets
@pytest.mark.skipif(not os.environ.get("QDQ_ASSETS"), reason="QDQ_ASSETS is not set")
@pytest.mark.parametrize("name", ASSETS)
def test_real_models_round_trip(name):
    path = Path(os.environ["QDQ_ASSETS"]) / "models" / f"{name}.onnx"
    assert_there_and_back(load(path, source=name, shapes=SHAPES.get(name, {}), min_opset=19))
