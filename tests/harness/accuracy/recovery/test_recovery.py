"""Recovery steps keep their contract, gain on samples that they have not seen, and are undone otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.accuracy.calibration.ranges import Ranges, calibrate, finite_ranges
from harness.accuracy.recovery.pipeline import (
    Feeds,
    PlacedModel,
    RecoveryStepContract,
    create_steps,
    quantized_layers,
    recover,
    split_held_out,
)
from harness.errors import UserError
from harness.graph.builder import GraphBuilder
from harness.graph.constant_edits import bias_place, with_own_biases
from harness.graph.load import load, save_to_folder
from harness.graph.model import Model
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.qdq_graph import read_qdq_edges
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import ONNXRUNTIME, OPENVINO, Dialect
from harness.graph.segmented_run import measure_layer_shifts
from harness.progress import NullProgress
from harness.registry import installed_plugins

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
    return load(net.save(folder / "convs.onnx"), min_opset=17)


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


def _placed(model: Model, folder: Path, dialect: Dialect = OPENVINO) -> PlacedModel:
    coarse = replace(dialect, weight_limit=7)
    space = build_space(model, coarse)
    resolved = space.resolve(space.quantize_roles(("linear",)))
    return PlacedModel(model=model, reference=model, dialect=coarse, ranges=_ranges(model, folder), resolved=resolved)


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
def test_bias_correction_gains_and_changes_no_pair(step: str, dialect: Dialect, tmp_path: Path) -> None:
    placed = _placed(_conv_net(tmp_path), tmp_path, dialect)
    found, gains = _recover(placed, [step], tmp_path)
    assert gains == [(step, True)]
    proto = Inserter(found.model, found.dialect, found.ranges).insert(found.resolved)
    assert tuple(sorted(read_qdq_edges(proto).items())) == placed.resolved
    changed = [
        name for name in found.model.constants if found.model.constants[name] != placed.model.constants.get(name)
    ]
    assert all("bias" in name or len(found.model.constants[name].dims) == 1 for name in changed)


def test_sequential_shifts_leave_no_mean_error_at_the_end(tmp_path: Path) -> None:
    placed = _placed(_conv_net(tmp_path), tmp_path)
    model, biases = with_own_biases(placed.model, quantized_layers(placed))
    assert set(biases) == {"conv0", "conv1", "conv2"}
    step = create_steps(["bias_correction"])["bias_correction"]
    corrected = step.apply(placed, BATCHES, tmp_path)
    assert corrected is not None
    file = replace(placed, model=corrected).export(tmp_path / "corrected.onnx")
    axes = dict.fromkeys(biases, 1)
    left = measure_layer_shifts(save_to_folder(model, tmp_path / "f"), file, axes, BATCHES, True)
    first = measure_layer_shifts(
        save_to_folder(model, tmp_path / "f"),
        replace(placed, model=model).export(tmp_path / "q.onnx"),
        axes,
        BATCHES,
        True,
    )
    for name in axes:
        assert np.abs(left[name]).max() < 0.05 * np.abs(first[name]).max()


def test_smoothing_gains_behind_a_norm_with_a_loud_channel(tmp_path: Path) -> None:
    found, gains = _recover(_placed(_norm_net(tmp_path), tmp_path), ["smoothing", "equalization"], tmp_path)
    assert gains == [("smoothing", True), ("equalization", False)]
    assert found.reference is found.model


def test_equalization_evens_out_weights_of_one_scale(tmp_path: Path) -> None:
    placed = _placed(_conv_net(tmp_path), tmp_path)
    model = create_steps(["equalization"])["equalization"].apply(placed, BATCHES, tmp_path)
    assert model is not None
    weights = [model.constant_array(node.inputs[1]) for node in model.nodes if node.op == "Conv"]
    first, second = np.abs(weights[0]).max(axis=(1, 2, 3)), np.abs(weights[1]).max(axis=(0, 2, 3))
    np.testing.assert_allclose(first, second, rtol=0.05)


class _Spoiler:
    """Step that makes the model worse."""

    keeps_function = False

    def apply(self, placed: PlacedModel, batches: Sequence[Feeds], folder: Path) -> Model | None:
        model, biases = with_own_biases(placed.model, quantized_layers(placed))
        from harness.graph.constant_edits import replace_constants

        return replace_constants(model, {name: model.constant_array(name) + 5 for name in biases.values()})


def test_a_step_that_does_not_gain_is_undone(tmp_path: Path) -> None:
    placed = _placed(_conv_net(tmp_path), tmp_path)
    found, gains = recover(placed, {"spoil": _Spoiler()}, BATCHES, lambda m: _ranges(m, tmp_path), NullProgress())
    assert found is placed
    assert [gain.kept for gain in gains] == [False]
    assert gains[0].after_db is not None
    assert gains[0].after_db < gains[0].before_db
    assert "undone" in str(gains[0])


def test_steps_never_see_what_decides_about_them() -> None:
    seen, held = split_held_out(BATCHES)
    assert len(held) == 2
    assert not {id(batch) for batch in seen} & {id(batch) for batch in held}
    with pytest.raises(UserError, match="4 calibration samples"):
        split_held_out(BATCHES[:3])


def test_a_bias_that_cannot_be_changed_has_no_place(tmp_path: Path) -> None:
    net = GraphBuilder("odd", seed=0)
    x = net.input("x", (1, 8))
    y = net.op("MatMul", x, net.const(np.ones((8, 3), np.float32)), name="bare")
    net.output(net.op("Relu", y), name="y")
    z = net.op(
        "Gemm", x, net.const(np.ones((8, 3), np.float32)), net.const(np.ones(3, np.float32)), beta=0.5, name="half"
    )
    net.output(z, name="z")
    model = load(net.save(tmp_path / "odd.onnx"), min_opset=17)
    assert [bias_place(model, node) for node in model.nodes if node.name in ("bare", "half")] == [None, None]
