"""What other tools place, our space can place: their placements, read back and resolved, give the same Q/DQ edges."""

import os
from collections import Counter
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx_models import activation_ranges, applied, everywhere, loaded, normal
from onnxruntime.quantization import QuantType
from onnxruntime.quantization.calibrate import CalibrationMethod, TensorData, TensorsData
from onnxruntime.quantization.qdq_quantizer import QDQQuantizer
from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry

from harness.accuracy.tools.ptq import quantize
from harness.base.random_inputs import random_feeds
from harness.graph.builder import GraphBuilder
from harness.graph.load import load, save_to_folder
from harness.graph.model import Model
from harness.graph.partition.regions import discover_regions
from harness.graph.qdq.import_placement import import_placement
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.qdq_graph import QDQGraph, diff_edges
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import ONNXRUNTIME, OPENVINO, TENSORRT
from harness.zoo import transformer, write_model
from search.space import Edge

TRANSFORMERS = {"encoder": partial(transformer.encoder, 2, width=64), "vit": partial(transformer.vit_tiny, 1)}


@cache
def zoo(name: str, folder: Path) -> Model:
    return loaded(TRANSFORMERS[name]()) if name in TRANSFORMERS else load(write_model(name, folder / f"{name}.onnx"))


def static(model: Model, bounds: Mapping[str, tuple[float, float]], **options: bool) -> onnx.ModelProto:
    """What `quantize_static` makes with its default operators, from these ranges."""
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    ranges = {
        name: TensorData(lowest=np.float32(low), highest=np.float32(high)) for name, (low, high) in bounds.items()
    }
    operators = sorted({*QLinearOpsRegistry, *QDQRegistry})
    options = {"ActivationSymmetric": False, "WeightSymmetric": True, **options}
    weights, activations = QuantType.QInt8, QuantType.QUInt8
    quantizer = QDQQuantizer(
        proto, True, False, weights, activations, TensorsData(CalibrationMethod.MinMax, ranges), None, None, operators,
        options,
    )  # fmt: skip
    made: onnx.ModelProto = quantizer.quantize_model()
    return made


def differences(model: Model, asked: dict[Edge, str], dialect: Any) -> tuple[Counter[str], Counter[str]]:
    """Edges of a placement that the nearest one of our space lacks, and that it adds; by operator and slot."""
    space = build_space(model, dialect)
    found = dict(space.resolve(space.nearest(asked)))
    operators = {node.name: node.op for node in model.nodes}
    lost = Counter(f"{operators[edge.consumer]}.{edge.slot}" for edge in asked.keys() - found.keys())
    added = Counter(f"{operators[edge.consumer]}.{edge.slot}" for edge in found.keys() - asked.keys())
    return lost, added


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2", *TRANSFORMERS])
def test_onnxruntime_space_contains_quantize_static_edges(name, tmp_path_factory):
    model = zoo(name, tmp_path_factory.getbasetemp())
    # Ranges that need no calibration, and no activation removed: each edge counts here, and no kernel.
    proto = static(model, dict.fromkeys(model.types, (-1.0, 2.0)), QDQKeepRemovableActivations=True)
    asked = import_placement(proto, model)
    assert asked.keys() == QDQGraph(proto).edges.keys()
    lost, added = differences(model, asked, ONNXRUNTIME)
    # ONNX Runtime has no integer kernel for LayerNormalization: its quantized scale only costs accuracy. A pair in
    # front of Relu or Clip is removed by the runtime at best; the one behind does the same. The variance of a
    # decomposed LayerNormalization, and the epsilon (1e-5) that is added to it, lead to a denominator, where a small
    # value must not become 0.
    assert lost.keys() <= {"LayerNormalization.1", "Clip.0", "Relu.0", "Add.0", "Add.1", "Sqrt.0"}
    variances = sum(node.op == "Sqrt" for node in model.nodes)
    assert lost["Add.0"] == lost["Add.1"] == lost["Sqrt.0"] == variances
    assert not added
    activations = [node for node in model.nodes if node.op in ("Clip", "Relu")]
    assert all(Edge(node.outputs[0], *reader(model, node.outputs[0])) in asked for node in activations)


def reader(model: Model, tensor: str) -> tuple[str, int]:
    index, slot = model.consumers[tensor][0]
    return model.nodes[index].name, slot


@pytest.mark.slow
def test_nearly_every_edge_of_modelopt_is_in_the_space_of_tensorrt(tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    encoder = loaded(transformer.encoder(3, width=64))
    models = {"resnet18": zoo("resnet18", folder), "encoder3": encoder}
    found = {}
    for name, model in models.items():
        path, made = save_to_folder(model, folder / f"for-modelopt-{name}"), folder / f"{name}-ptq.onnx"
        types = {name: (model.types[name].dtype, model.types[name].shape) for name in model.inputs}
        quantize("modelopt_ptq", path, made, random_feeds(types, 1, 0), dialect_name="tensorrt")
        proto = onnx.load(made)
        asked = import_placement(proto, model)
        assert asked.keys() == QDQGraph(proto).edges.keys()
        found[name] = differences(model, asked, TENSORRT)
    assert found["resnet18"] == ({}, {})
    # Of equal blocks ModelOpt treats the first and the last in its own way, where they meet an input or an output of
    # the model; blocks of one pattern share a scheme, so the majority decides.
    assert sum(map(Counter.total, found["encoder3"])) <= 3


def kernels(path: Path) -> Counter[str]:
    """The operators of a model as ONNX Runtime runs it."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(path.with_suffix(".optimized.onnx"))
    options.log_severity_level = 3
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    nodes = onnx.load(options.optimized_model_filepath, load_external_data=False).graph.node
    return Counter(node.op_type for node in nodes)


def ranges(model: Model) -> dict[str, tuple[float, float]]:
    """Ranges of one run on random data."""
    rng = np.random.default_rng(0)
    kinds = {name: model.types[name] for name in model.inputs}
    feeds = {name: rng.normal(size=k.shape).astype("bool" if k.dtype == "bool" else "f4") for name, k in kinds.items()}
    return activation_ranges(model, [feeds])


def both(model: Model, folder: Path) -> tuple[Counter[str], Counter[str]]:
    """The kernels of what `quantize_static` makes, and those of our form of its placement."""
    found = ranges(model)
    proto = static(model, found)
    onnx.save(proto, folder / "static.onnx")
    space = build_space(model, ONNXRUNTIME)
    resolved = space.resolve(space.nearest(import_placement(proto, model)))
    ours = Inserter(model, ONNXRUNTIME, found).export(resolved, folder / "ours.onnx")
    return kernels(folder / "static.onnx"), kernels(ours)


@pytest.mark.parametrize("name", ["resnet18", "encoder", "mobilenetv2"])
def test_the_placement_of_quantize_static_runs_in_the_same_kernels(name, tmp_path, tmp_path_factory):
    model = zoo(name, tmp_path_factory.getbasetemp())
    theirs, ours = both(model, tmp_path)
    variances = sum(node.op == "Sqrt" for node in model.nodes)  # they lead to a denominator: theirs alone has pairs
    theirs.subtract({"QuantizeLinear": variances, "QLinearAdd": variances, "DequantizeLinear": variances})
    theirs["Add"] += variances
    assert ours == theirs
    assert ours["QLinearConv"] + ours["QLinearMatMul"] >= 16


def relu(g, x):
    return g.op("Relu", g.conv(x, 8, 1))


def squeezed(g, x, gate):
    """Squeeze and excitation."""
    return g.op("Mul", x, g.op(gate, g.conv(relu(g, g.op("GlobalAveragePool", x)), 8, 1)))


def shuffled(g, x):
    parts = g.op("Transpose", g.op("Reshape", x, g.const([1, 2, 4, 8, 8])), perm=[0, 2, 1, 3, 4])
    return g.op("Reshape", parts, g.const([1, 8, 8, 8]))


BETWEEN = {
    "activation": applied("LeakyRelu", alpha=0.1),
    "average pooling": applied("AveragePool", kernel_shape=[2, 2], strides=[2, 2]),
    "channel shuffle": shuffled,
    "comparison": lambda g, x: g.op("Where", g.op("Greater", x, g.const([0.0])), x, relu(g, x)),
    "concat of signed and absorbed": lambda g, x: g.op("Concat", x, relu(g, x), axis=1),
    "hard swish": lambda g, x: g.op("Mul", x, g.op("HardSigmoid", x)),
    # Mode linear is a known fault of ONNX Runtime 1.24.4, so that Resize stays float there.
    "enlargement": lambda g, x: g.op("Resize", x, "", g.const([1.0, 1.0, 2.0, 2.0]), mode="nearest"),
    "max pooling": applied("MaxPool", kernel_shape=[2, 2], strides=[2, 2]),
    "negation": applied("Neg"),
    "padding": applied("Pad", [0, 0, 1, 1, 0, 0, 1, 1]),
    "residual": lambda g, x: g.op("Relu", g.op("Add", x, relu(g, x))),
    "slice": applied("Slice", [0], [6], [2], [1]),
    "squeeze, hard sigmoid": lambda g, x: squeezed(g, x, "HardSigmoid"),
    "squeeze, sigmoid": lambda g, x: squeezed(g, x, "Sigmoid"),
    "swish": lambda g, x: g.op("Mul", x, g.op("Sigmoid", x)),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_convs_around_other_operators_run_in_integers(name, tmp_path):
    g = GraphBuilder("between", opset=19)
    y = BETWEEN[name](g, g.conv(g.input("x", (1, 8, 8, 8)), 8, 1))
    g.output(g.conv(y, 8, 1))
    theirs, ours = both(loaded(g), tmp_path)
    assert ours == theirs
    assert {"Conv", "FusedConv"}.isdisjoint(ours)


def test_conv_before_unabsorbed_clip_runs_in_integers(tmp_path):
    g = GraphBuilder("clip")
    y = g.op("Clip", g.conv(g.input("x", (1, 8, 8, 8)), 8, 1), g.const(-1.0), g.const(1.0))
    g.output(g.conv(y, 8, 1))
    found = runs_as(loaded(g), tmp_path)
    assert found["QLinearConv"] == 2
    assert {"Conv", "FusedConv"}.isdisjoint(found)


def runs_as(model: Model, folder: Path) -> Counter[str]:
    """The kernels of a model with every point quantized."""
    return kernels(Inserter(model, ONNXRUNTIME, ranges(model)).write(everywhere(model, ONNXRUNTIME), folder))


def test_relu_and_clip_are_absorbed_by_the_pair_behind_them(tmp_path):
    g = GraphBuilder("absorbed")
    x = g.op("Relu", g.conv(g.input("x", (1, 8, 8, 8)), 16, 3))
    x = g.op("Clip", g.conv(x, 16, 3), g.const(0.0), g.const(6.0))
    y = g.op("Relu", g.op("Add", g.conv(x, 16, 1), x))
    g.output(g.conv(y, 8, 1))
    model = loaded(g)
    ends = {"QuantizeLinear": 1, "DequantizeLinear": 1, "Transpose": 2}
    assert runs_as(model, tmp_path) == {"QLinearConv": 4, "QLinearAdd": 1, **ends}
    space = build_space(model, ONNXRUNTIME)
    activations = {node.name for node in model.nodes if node.op in ("Relu", "Clip")}
    assert activations.isdisjoint(edge.consumer for dimension in space.dimensions for edge in dimension.edges)


def constant_beside(op: str, g: GraphBuilder, x: str) -> str:
    constant = g.const(np.random.default_rng(0).uniform(-1, 1, (1, 8, 8, 8)).astype(np.float32))
    if op == "Concat":
        return g.op(op, constant, x, axis=1)
    return g.op(op, g.input("mask", (1, 8, 8, 8), "bool"), x, constant) if op == "Where" else g.op(op, x, constant)


@pytest.mark.parametrize("op", ["Add", "Mul", "Concat", "Where"])
def test_an_operator_with_a_constant_runs_on_integers(op, tmp_path):
    g = GraphBuilder("constant")
    y = g.conv(g.input("x", (1, 8, 8, 8)), 8, 1)
    g.output(g.conv(constant_beside(op, g, y), 8, 1))
    model = loaded(g)
    found = runs_as(model, tmp_path)
    assert found[f"QLinear{op}"] == 1
    assert op not in found


def test_a_table_of_embeddings_is_read_as_integers(tmp_path):
    g = GraphBuilder("embedding")
    table = g.const(normal(32, 16))
    x = g.op("Gather", table, g.op("Cast", g.input("x", (1, 4)), to=onnx.TensorProto.INT64))
    g.output(g.linear(x, 8, bias=False))
    model = loaded(g)
    proto = Inserter(model, ONNXRUNTIME, ranges(model)).insert(everywhere(model, ONNXRUNTIME))
    gather = next(node for node in proto.graph.node if node.op_type == "Gather")
    assert gather.input[0].endswith(".dq")
    assert next(t for t in proto.graph.initializer if t.dims == [32, 16]).data_type == onnx.TensorProto.UINT8


CASES = [(OPENVINO, "int8"), (OPENVINO, "fp8"), (ONNXRUNTIME, "int8"), (TENSORRT, "int8"), (TENSORRT, "fp8")]
SHAPES = {
    "deit_tiny_patch16_224": {"input": "1x3x224x224"},
    "mobilenet_v1_0.75_224": {"input": "1x3x224x224"},
    "squeezenet1.1": {"data": "1x3x224x224"},
}
ASSETS = ("deeplabv3_mnv2_voc_513", "nanodet_m_320", "yolox_nano", *SHAPES)
# The other models of the zoo repeat these blocks, or are these without the joined outputs of an export.
ZOO = ("resnet18", "mobilenetv2", "yolo_tiny_export", "shapes_yolo")
SMALL_TRANSFORMERS = {"encoder2": partial(transformer.encoder, 2, width=64), "vit2": partial(transformer.vit_tiny, 2)}


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
    assert_there_and_back(load(write_model(name, tmp_path / f"{name}.onnx"), min_opset=19))


@pytest.mark.parametrize("name", SMALL_TRANSFORMERS)
def test_zoo_transformers_round_trip(name):
    assert_there_and_back(loaded(SMALL_TRANSFORMERS[name](), min_opset=19))


@pytest.mark.assets
@pytest.mark.skipif(not os.environ.get("QDQ_ASSETS"), reason="QDQ_ASSETS is not set")
@pytest.mark.parametrize("name", ASSETS)
def test_real_models_round_trip(name):
    path = Path(os.environ["QDQ_ASSETS"]) / "models" / f"{name}.onnx"
    assert_there_and_back(load(path, source=name, shapes=SHAPES.get(name, {}), min_opset=19))
