"""Contents of the Q/DQ pairs: estimators of weights, scales by channel, zero points."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx_models import everywhere, run_onnxruntime

from harness.accuracy.calibration.ranges import calibrate
from harness.base.errors import UserError
from harness.graph.builder import GraphBuilder
from harness.graph.load import load
from harness.graph.model import Model
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.space import build_space
from harness.graph.quantize.numeric_choices import DEFAULT_CHOICES, NumericChoices, channel_name, depthwise_inputs
from harness.graph.quantize.weight_estimators import least_squares
from harness.graph.quantize.weights import quantize_weight
from harness.graph.rules.dialects import ONNXRUNTIME, OPENVINO, TENSORRT, Dialect

SHAPE = (1, 4, 8, 8)
GAINS = np.array([0.01, 1, 10, 0], np.float32).reshape(1, 4, 1, 1)


@pytest.fixture
def model(tmp_path):
    """Channels of different sizes, one of them dead, into a depthwise Conv and an Add."""
    builder = GraphBuilder("depthwise", seed=0)
    x = builder.op("Mul", builder.input("x", SHAPE), builder.const(GAINS), outputs="scaled")
    loud = np.repeat(1 / np.maximum(GAINS, 0.01), 2).reshape(8, 1, 1, 1)  # quiet channels count as much
    weight = builder.const((np.random.default_rng(0).standard_t(3, (8, 1, 9, 9)) * loud).astype(np.float32))
    bias = builder.const(np.linspace(-1, 1, 8, dtype=np.float32))
    y = builder.op("Conv", x, weight, bias, group=4, pads=[4, 4, 4, 4], kernel_shape=[9, 9], name="depthwise")
    builder.output(builder.conv(y, 4, 1), name="y")
    builder.output(builder.op("Add", x, builder.const(1.0)), name="z")
    return load(builder.save(tmp_path / "depthwise.onnx"), min_opset=17)


def _batch() -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(1).normal(0, 1, SHAPE).astype(np.float32)}


def _insert(model: Model, dialect: Dialect, choices: NumericChoices, roles: tuple[str, ...] = ()) -> onnx.ModelProto:
    space = build_space(model, dialect)
    tensors = {e.tensor for d in space.dimensions for e in d.edges if e.tensor not in model.constants}
    file = Path(model.source).with_suffix(".float.onnx")
    onnx.save(model.proto, file)
    ranges = calibrate(file, tensors, [_batch()], channels=depthwise_inputs(model))
    placement = space.quantize_roles(roles) if roles else space.quantize_all()
    return Inserter(model, dialect, ranges, choices).insert(space.resolve(placement))


def _error(model: Model, proto: onnx.ModelProto) -> float:
    outputs = [run_onnxruntime(each, _batch(), ["y"], optimize=False)[0] for each in (model.proto, proto)]
    return float(np.square(outputs[0] - outputs[1]).sum() / np.square(outputs[0]).sum())


def _arrays(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}


def test_depthwise_conv_reads_per_channel_scales(model):
    proto = _insert(model, OPENVINO, NumericChoices(depthwise="channel"))
    pairs = {node.output[0]: node for node in proto.graph.node if node.op_type == "QuantizeLinear"}
    by_channel = next(node for name, node in pairs.items() if name.startswith("scaled") and "channels" in name)
    scale, zero = (_arrays(proto)[name] for name in by_channel.input[1:])
    assert scale.shape == zero.shape == (4,)
    assert scale[3] == scale.max(), "a dead channel takes the largest scale"
    assert sum(name.startswith("scaled") for name in pairs) == 2, "the Add has a pair of its own"
    readers = [node.op_type for node in proto.graph.node if by_channel.output[0] in node.input]
    assert readers == ["DequantizeLinear"]
    assert _error(model, proto) < 0.9 * _error(model, _insert(model, OPENVINO, DEFAULT_CHOICES))


def test_int32_bias_uses_per_channel_activation_scales(model):
    unfused = replace(ONNXRUNTIME, channel_activations=True)
    proto = _insert(model, unfused, NumericChoices(depthwise="channel"))
    arrays = _arrays(proto)
    bias = next(name for name in arrays if ".channels" in name and "int32" in name and name.endswith(".scale"))
    assert arrays[bias].shape == (8,)
    assert _error(model, proto) < _error(model, _insert(model, ONNXRUNTIME, DEFAULT_CHOICES))


def test_weights_by_least_squares_have_smaller_scales_and_errors():
    weight = np.random.default_rng(0).standard_t(3, (4, 3000)).astype(np.float32)
    plain, best = quantize_weight(weight, 0, "int8"), quantize_weight(weight, 0, "int8", estimator=least_squares)
    errors = [np.square(w.values * w.scale[:, None] - weight, dtype=np.float64).sum(axis=1) for w in (plain, best)]
    assert (best.scale <= plain.scale).all()
    assert (errors[1] <= errors[0]).all()
    assert errors[1].sum() < errors[0].sum()


def test_weight_estimator_changes_the_model(model):
    coarse = replace(TENSORRT, weight_limit=3)  # so that clipping few values pays
    protos = [_insert(model, coarse, NumericChoices(weights=name), ("linear",)) for name in ("max", "mse")]
    assert len({proto.SerializeToString(deterministic=True) for proto in protos}) == 2


@pytest.mark.parametrize(("dialect", "symmetric"), [(OPENVINO, True), (OPENVINO, False), (ONNXRUNTIME, True)])
def test_symmetric_choice_decides_zero_points(model, dialect, symmetric):
    proto = _insert(model, dialect, NumericChoices(symmetric=symmetric))
    arrays = _arrays(proto)
    zeros = {
        int(arrays[node.input[2]])
        for node in proto.graph.node
        if node.op_type == "QuantizeLinear" and arrays[node.input[2]].ndim == 0
    }
    assert (zeros <= {0, 128}) == symmetric
    assert _error(model, proto) < 1.5 * _error(model, _insert(model, dialect, DEFAULT_CHOICES))


@pytest.mark.parametrize(
    ("choices", "word"),
    [(NumericChoices(depthwise="channel"), "depthwise"), (NumericChoices(symmetric=False), "symmetric")],
)
def test_tensorrt_refuses_per_channel_and_affine_choices(model, choices, word):
    with pytest.raises(UserError, match=word):
        Inserter(model, TENSORRT, {}, choices)


def test_text_lists_choices_that_differ_from_defaults(model):
    assert not DEFAULT_CHOICES.text
    choices = NumericChoices(activations="percentile", weights="mse", depthwise="channel", symmetric=True)
    assert choices.text == "activations percentile 99.99, weights mse, depthwise channel, symmetric"
    assert NumericChoices(percentile=99).text == DEFAULT_CHOICES.text, "no other estimator reads it"
    ranges = {name: (-1.0, 2.0) for name in ("x", "scaled", "y", "z", *model.producer)}
    assert channel_name("scaled", 0) not in ranges
    edges = everywhere(model, OPENVINO)
    default, same = (Inserter(model, OPENVINO, ranges, c).insert(edges) for c in (DEFAULT_CHOICES, choices))
    assert len(default.graph.node) == len(same.graph.node)
