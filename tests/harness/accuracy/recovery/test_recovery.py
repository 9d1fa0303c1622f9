"""Recovery steps keep their contract, gain on samples that they have not seen, and are undone otherwise."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from harness.accuracy.calibration.range_estimators import Ranges, finite_ranges
from harness.accuracy.calibration.ranges import calibrate
from harness.accuracy.recovery.pipeline import (
    Feeds,
    PlacedModel,
    RecoveryStepContract,
    create_steps,
    leave_float,
    measure_sqnr_db,
    quantized_layers,
    rank_groups,
    recover,
    split_held_out,
)
from harness.accuracy.recovery.steps import round_compensated
from harness.base.errors import UserError
from harness.base.progress import NullProgress
from harness.graph.builder import GraphBuilder
from harness.graph.load import load, save_to_folder
from harness.graph.model import Model
from harness.graph.qdq.file_checks import find_refused_qdq
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.qdq_graph import QDQGraph, read_qdq_graph
from harness.graph.qdq.space import build_space
from harness.graph.quantize.numeric_choices import DEFAULT_CHOICES
from harness.graph.quantize.weights import quantize_weight, replace_constants, with_own_biases
from harness.graph.rules.dialects import ONNXRUNTIME, OPENVINO, TENSORRT, TENSORRT_RTX, Dialect
from harness.graph.segmented_run import channel_maxima, measure_layer_shifts, sum_outputs
from harness.plugins import registry
from harness.plugins.registry import installed_plugins
from harness.run.select.recovery import list_choices
from search.space import Placement

STEPS = [plugin.name for plugin in installed_plugins("recovery step")]
BATCHES = [{"x": np.random.default_rng(i).normal(0.5, 1, (1, 4, 8, 8)).astype(np.float32)} for i in range(8)]


def _conv_net(folder: Path) -> Model:
    """Convolutions with weights of few levels, so that their errors have a mean, and one without a bias."""
    net, rng = GraphBuilder("convs", seed=0), np.random.default_rng(0)
    x = net.input("x", (1, 4, 8, 8))
    for number, gain in enumerate((1.0, 30.0, 1.0)):
        spread = np.exp(rng.normal(0, 2, (6, 1, 1, 1))) * gain
        weight = rng.normal(0.3, 1, (6, 4 if number == 0 else 6, 3, 3)) * spread
        inputs = (x, net.const(weight.astype(np.float32)), net.const(rng.normal(0, 1, 6).astype(np.float32)))
        made = net.op(
            "Conv", *inputs[: 2 if number == 1 else 3], pads=[1] * 4, name=f"conv{number}", kernel_shape=[3, 3]
        )
        x = net.op("Relu", made) if number < 2 else made
    net.output(x, name="y")
    return load(net.save(folder / "convs.onnx"), min_opset=19)


def _norm_net(folder: Path) -> Model:
    """LayerNorm into two MatMuls with an Add behind each, with loud channels."""
    net, rng = GraphBuilder("norm", seed=0), np.random.default_rng(0)
    x = net.op("Reshape", net.input("x", (1, 4, 8, 8)), net.const(np.array([1, 16, 16])))
    gamma = np.ones(16, np.float32)
    gamma[3] = 60
    x = net.op("LayerNormalization", x, net.const(gamma), net.const(np.zeros(16, np.float32)), axis=-1)
    for name in ("y", "z"):
        weight = rng.normal(0.2, 1, (16, 12)).astype(np.float32)
        y = net.op("MatMul", x, net.const(weight), name=name)
        net.output(net.op("Add", y, net.const(np.zeros(12, np.float32))), name=f"sum_{name}")
    return load(net.save(folder / "norm.onnx"), min_opset=17)


def _ranges(model: Model, folder: Path) -> Ranges:
    tensors = [name for name in model.types if name not in model.constants and model.types[name].dtype == "float"]
    return finite_ranges(calibrate(save_to_folder(model, folder / "ranges"), tensors, BATCHES))


def _placed(model: Model, folder: Path, dialect: Dialect = OPENVINO, ranges: Any = None) -> PlacedModel:
    coarse = replace(dialect, weight_limit=7)
    space = build_space(model, coarse)
    resolved = space.resolve(space.quantize_roles(("linear",)))
    found = _ranges(model, folder) if ranges is None else ranges
    return PlacedModel(model=model, reference=model, dialect=coarse, ranges=found, resolved=resolved)


def _apply(name: str, placed: PlacedModel, folder: Path, batches: Any = None) -> Any:
    return create_steps([name])[name].apply(placed, BATCHES if batches is None else batches, folder)


def _recover(placed: PlacedModel, names: Sequence[str], folder: Path) -> tuple[PlacedModel, list[tuple[str, bool]]]:
    found, gains = recover(placed, create_steps(names), BATCHES, lambda m: _ranges(m, folder), NullProgress())
    return found, [(gain.step, gain.kept) for gain in gains]


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("net", [_conv_net, _norm_net])
class TestSteps(RecoveryStepContract):
    @pytest.fixture(autouse=True)
    def _build(self, name, net, tmp_path):
        self.step, self.folder = create_steps([name])[name], tmp_path
        self.placed, self.batches = _placed(net(tmp_path), tmp_path), BATCHES


@pytest.mark.parametrize("step", ["fast_bias_correction", "bias_correction"])
@pytest.mark.parametrize("dialect", [OPENVINO, ONNXRUNTIME])
def test_bias_correction_gains_and_changes_no_pair(step, dialect, tmp_path):
    placed = _placed(_conv_net(tmp_path), tmp_path, dialect)
    found, gains = _recover(placed, [step], tmp_path)
    assert gains == [(step, True)]
    proto = Inserter(found.model, found.dialect, found.ranges).insert(found.resolved)
    assert tuple(sorted(QDQGraph(proto).edges.items())) == placed.resolved
    for name, constant in found.model.constants.items():
        assert constant == placed.model.constants.get(name) or len(constant.dims) == 1


def test_sequential_bias_correction_removes_the_mean_error(tmp_path):
    placed = _placed(_conv_net(tmp_path), tmp_path)
    model, biases = with_own_biases(placed.model, quantized_layers(placed))
    assert set(biases) == {"conv0", "conv1", "conv2"}
    axes, file = dict.fromkeys(biases, 1), save_to_folder(model, tmp_path / "f")
    left, first = (
        measure_layer_shifts(file, each.export(tmp_path / "q.onnx"), axes, BATCHES, True)
        for each in (_apply("bias_correction", placed, tmp_path), replace(placed, model=model))
    )
    for name in axes:
        assert np.abs(left[name]).max() < 0.05 * np.abs(first[name]).max()


def test_smoothing_gains_behind_a_norm_with_an_outlier_channel(tmp_path):
    found, gains = _recover(_placed(_norm_net(tmp_path), tmp_path), ["smoothing", "equalization"], tmp_path)
    assert gains == [("smoothing", True), ("equalization", False)]
    assert found.reference is found.model


def test_equalization_balances_per_tensor_weights(tmp_path):
    model = _apply("equalization", _placed(_conv_net(tmp_path), tmp_path), tmp_path).model
    weights = [model.constant_array(node.inputs[1]) for node in model.nodes if node.op == "Conv"]
    first, second = np.abs(weights[0]).max(axis=(1, 2, 3)), np.abs(weights[1]).max(axis=(0, 2, 3))
    np.testing.assert_allclose(first, second, rtol=0.05)


class _Spoiler:
    """Step that makes the model worse."""

    keeps_function = False

    def apply(self, placed: PlacedModel, batches: Sequence[Feeds], folder: Path) -> PlacedModel | None:
        model, biases = with_own_biases(placed.model, quantized_layers(placed))
        spoilt = replace_constants(model, {name: model.constant_array(name) + 5 for name in biases.values()})
        return replace(placed, model=spoilt)


def test_a_step_that_does_not_gain_is_undone(tmp_path):
    placed = _placed(_conv_net(tmp_path), tmp_path)
    found, gains = recover(placed, {"spoil": _Spoiler()}, BATCHES, lambda m: _ranges(m, tmp_path), NullProgress())
    assert found is placed
    assert [gain.kept for gain in gains] == [False]
    assert gains[0].after_db < gains[0].before_db
    assert "undone" in str(gains[0])


def test_steps_do_not_see_held_out_samples():
    seen, held = split_held_out(BATCHES)
    assert len(held) == 2
    assert not {id(batch) for batch in seen} & {id(batch) for batch in held}
    with pytest.raises(UserError, match="4 calibration samples"):
        split_held_out(BATCHES[:3])


def test_operators_without_a_changeable_bias_are_not_corrected(tmp_path):
    net = GraphBuilder("odd", seed=0)
    x, weight, bias = net.input("x", (1, 8)), np.ones((8, 3), np.float32), np.ones(3, np.float32)
    net.output(net.op("Relu", net.op("MatMul", x, net.const(weight))), name="bare")
    for beta in (0.5, 1.0):
        net.output(net.op("Gemm", x, net.const(weight), net.const(bias), beta=beta), name=f"beta {beta}")
    placed = _placed(load(net.save(tmp_path / "odd.onnx"), min_opset=17), tmp_path, ranges={})
    assert [node.outputs for node in quantized_layers(placed)] == [("beta 1.0",)]


def _sqnr_db(reference: np.ndarray, found: np.ndarray) -> float:
    return float(10 * np.log10(np.square(reference).sum() / np.square(found - reference).sum()))


def test_activation_takes_the_estimator_of_least_reader_error(tmp_path):
    net, rng = GraphBuilder("two", seed=0), np.random.default_rng(0)
    weight = net.const(rng.normal(0, 1, (2, 2, 1, 1)).astype(np.float32))
    for name in ("spiky", "even"):
        x = net.input(name, (1, 2, 16, 16))
        net.output(net.op("Conv", x, weight, kernel_shape=[1, 1], name=f"conv_{name}"), name=f"y_{name}")
    model = load(net.save(tmp_path / "two.onnx"), min_opset=17)
    batches = []
    for number in range(8):
        spiky, even = (rng.uniform(-1, 1, (1, 2, 16, 16)).astype(np.float32) for _ in range(2))
        spiky[0, 0, 0, number] = 40  # a value that costs every other one its resolution
        batches.append({"spiky": spiky, "even": even})
    file = save_to_folder(model, tmp_path / "ranges")
    ranges = finite_ranges(calibrate(file, ["spiky", "even"], batches))
    placed = _placed(model, tmp_path, ranges=ranges)
    found = _apply("estimator_selection", placed, tmp_path, batches)
    assert found.ranges["spiky"][1] == pytest.approx(40, rel=0.02), "one value of 512 at 40 has most of the energy"
    assert max(map(abs, found.ranges["even"])) <= 1.001
    assert found.model.proto == placed.model.proto, "a shared weight keeps its values"


def test_adjusted_weight_is_restored_by_any_estimator(tmp_path):
    net, rng = GraphBuilder("heavy", seed=0), np.random.default_rng(0)
    x = net.input("x", (1, 4, 8, 8))
    weight = net.const(rng.normal(0, 1, (6, 4, 3, 3)).astype(np.float32))
    net.output(net.op("Conv", x, weight, pads=[1] * 4, kernel_shape=[3, 3], name="conv"), name="y")
    model = load(net.save(tmp_path / "heavy.onnx"), min_opset=17)
    placed = _placed(model, tmp_path)
    found = _apply("estimator_selection", placed, tmp_path)
    weights = [each.model.constant_array(model.nodes[0].inputs[1]) for each in (placed, found)]
    assert np.abs(weights[1] - weights[0]).max() > 0, "clipped by least squares"
    for name in ("max", "mse"):
        stored = quantize_weight(
            weights[1], 0, "int8", limit=7, estimator=registry.load_plugin("weight estimator", name)
        )
        np.testing.assert_allclose(stored.values * stored.scale.reshape(-1, 1, 1, 1), weights[1], rtol=1e-5)


@pytest.mark.parametrize("groups", [1, 4])
def test_compensated_rounding_loses_less_than_rounding_to_nearest(groups):
    rng = np.random.default_rng(0)
    mixing = rng.normal(0, 1, (groups, 16, 4)) @ rng.normal(0, 1, (groups, 4, 2000))  # correlated inputs
    data = mixing + 0.1 * rng.normal(0, 1, mixing.shape)
    weight = rng.normal(0, 1, (groups, 5, 16))
    scale = np.abs(weight).max(axis=2, keepdims=True) / 7
    stored = np.rint(weight / scale)
    found = round_compensated(weight, stored, scale, data @ np.swapaxes(data, 1, 2))
    assert _sqnr_db(weight @ data, found @ data) > _sqnr_db(weight @ data, stored * scale @ data) + 3
    np.testing.assert_allclose(found / scale, np.rint(found / scale), atol=1e-6)
    np.testing.assert_allclose(np.abs(found).max(axis=2, keepdims=True), scale * 7, rtol=1e-6)


def test_rounding_gains_and_keeps_the_scales(tmp_path):
    placed = _placed(_conv_net(tmp_path), tmp_path)
    found, gains = _recover(placed, ["rounding"], tmp_path)
    assert gains == [("rounding", True)]
    scales = [
        {
            t.name: numpy_helper.to_array(t)
            for t in onnx.load(each.export(tmp_path / "scales.onnx")).graph.initializer
            if t.name.endswith(".scale")
        }
        for each in (placed, found)
    ]
    assert scales[0].keys() == scales[1].keys()
    for name, scale in scales[0].items():
        np.testing.assert_allclose(scales[1][name], scale, rtol=1e-5)


@pytest.mark.parametrize("dialect", [TENSORRT, TENSORRT_RTX], ids=lambda each: each.name)
@pytest.mark.parametrize("precisions", [("int8",), ("fp8",), ("int8", "fp8")], ids="+".join)
def test_recovered_models_pass_the_rules_of_tensorrt(dialect, precisions, tmp_path):
    model = _conv_net(tmp_path)
    space = build_space(model, dialect, precisions=precisions)
    choices = [len(each.choices) - 1 - number % len(precisions) for number, each in enumerate(space.dimensions)]
    resolved = space.resolve(Placement(tuple(choices)))
    assert {precision for _, precision in resolved} == set(precisions)
    placed = PlacedModel(
        model=model, reference=model, dialect=dialect, ranges=_ranges(model, tmp_path), resolved=resolved
    )
    for name, step in create_steps(STEPS).items():
        changed = step.apply(placed, BATCHES, tmp_path)
        if changed is None:
            continue
        if step.keeps_function:
            changed = replace(changed, reference=changed.model, ranges=_ranges(changed.model, tmp_path))
        file = changed.export(tmp_path / f"{name}.onnx")
        assert not list(find_refused_qdq(read_qdq_graph(file), (8, 9), dialect)), name
        pairs = [node for node in onnx.load(file).graph.node if node.op_type == "QuantizeLinear"]
        constants = {t.name: numpy_helper.to_array(t) for t in onnx.load(file).graph.initializer}
        assert all(constants[node.input[1]].ndim == 0 for node in pairs), "one scale for each activation"
        assert not any(constants[node.input[2]].astype(float).any() for node in pairs), "zero points are 0"
        placed = changed


@pytest.mark.parametrize(("dialect", "count"), [(TENSORRT, 2), (TENSORRT_RTX, 2), (ONNXRUNTIME, 2), (OPENVINO, 4)])
def test_per_channel_scales_are_tried_where_supported(dialect, count, tmp_path):
    net = GraphBuilder("depthwise", seed=0)
    weight = net.const(np.ones((4, 1, 3, 3), np.float32))
    net.output(
        net.op("Conv", net.input("x", (1, 4, 8, 8)), weight, group=4, pads=[1] * 4, kernel_shape=[3, 3]), name="y"
    )
    model = load(net.save(tmp_path / "depthwise.onnx"), min_opset=17)
    found = list_choices(SimpleNamespace(model=model, dialect=dialect, choices=DEFAULT_CHOICES))  # type: ignore[arg-type]
    assert len(found) == count
    assert found[0] == DEFAULT_CHOICES


def test_sensitive_groups_that_mask_each_other_are_found(tmp_path):
    net, rng = GraphBuilder("hidden", seed=0), np.random.default_rng(0)
    x = net.input("x", (1, 4, 8, 8))
    scale = np.array([0.01, 1, 9, 20], np.float32).reshape(1, 4, 1, 1)  # one scale of INT8 for channels that differ
    for name in ("bad0", "bad1"):
        weight = (rng.normal(0.3, 1, (4, 1, 3, 3)) / scale.reshape(4, 1, 1, 1)).astype(np.float32)
        x = net.op("Mul", x, net.const(scale))
        x = net.op("Conv", x, net.const(weight), group=4, pads=[1] * 4, kernel_shape=[3, 3], name=name)
        x = net.op("Relu", net.conv(net.op("Relu", x), 4, 1))
    net.output(x, name="y")
    model = load(net.save(tmp_path / "hidden.onnx"), min_opset=19)
    space = build_space(model, OPENVINO)
    placed = PlacedModel(
        model=model, reference=model, dialect=OPENVINO, ranges=_ranges(model, tmp_path),
        resolved=space.resolve(space.quantize_all()),
    )  # fmt: skip
    ranked = rank_groups(placed, BATCHES, NullProgress())
    worst = [group for group in ranked if {"bad0", "bad1"} & set(group.nodes)]
    assert worst == ranked[:2]
    assert [group.nodes for group in ranked if group.at_outputs] == [("Conv_1", "Relu_3")]
    assert sum(len(group.nodes) for group in ranked) == len({edge.consumer for edge, _ in placed.resolved})
    left = (worst[0].nodes, worst[1].nodes, (*worst[0].nodes, *worst[1].nodes))
    first, second, both = measure_sqnr_db([leave_float(placed, names) for names in left], BATCHES)
    assert max(first, second) + 6 < both, "one of them alone is no remedy"


def test_outputs_and_channels_are_gathered_over_batches(tmp_path):
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[2,3] x) => (float s)
        { t = Neg(x) s = ReduceSum<keepdims=0>(t) }"""
    path = tmp_path / "m.onnx"
    onnx.save(parser.parse_model(text), path)
    batches = [{"x": np.array(rows, np.float32)} for rows in ([[1, -2, 3], [0, 1, 0]], [[4, 0, 0], [-1, 0, -5]])]
    assert sum_outputs(path, batches) == {"s": pytest.approx(-1.0)}
    assert channel_maxima(path, ["t"], batches)["t"].tolist() == [4.0, 2.0, 5.0]
