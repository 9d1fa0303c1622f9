"""Tensors that are always 0 on calibration data, or hold sentinels such as -1e9, stay float, and are named.

Outputs, or slices of one, that quantization kills decide the fidelity of the model.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from checks_of import running
from fidelity_of import quantizer, scales
from onnx_models import by_name, normal, pair

from harness.accuracy.calibration.range_estimators import finite_ranges, range_warnings, require_quantizable
from harness.accuracy.calibration.ranges import CalibrationKey, cached_ranges, calibrate
from harness.accuracy.metrics.fidelity import Fidelity
from harness.base.errors import UserError
from harness.base.progress import NullProgress
from harness.compat.tao_specs.evaluate import rank_layers
from harness.graph.builder import GraphBuilder
from harness.graph.rules.dialects import ONNXRUNTIME_7BIT, OPENVINO_7BIT
from harness.graph.rules.sentinels import MagnitudeHistogram, holds_sentinel
from harness.plugins.api import Accuracy
from harness.plugins.registry import installed_plugins
from search.space import Space

TOKENS, WIDTH, HEADS = 16, 32, 4
METHODS = [plugin.name for plugin in installed_plugins("range estimator")]


def attention(largest: float = -1e4) -> onnx.ModelProto:
    """A layer of BERT over embedded tokens, with an additive mask of the padding."""
    g = GraphBuilder("attention", seed=3)
    x, mask = g.input("x", (1, TOKENS, WIDTH)), g.input("mask", (1, TOKENS), "int64")
    kept = g.op("Unsqueeze", g.op("Cast", mask, to=1), g.const([1, 2]))
    hidden = g.op("Sub", g.const(1.0), kept, outputs="padding")
    hidden = g.op("Mul", hidden, g.const(np.float32(largest)), outputs="hidden")

    def heads(perm: list[int]) -> str:
        split = g.op("Reshape", g.linear(x, WIDTH), g.const([1, TOKENS, HEADS, WIDTH // HEADS]))
        return g.op("Transpose", split, perm=perm)

    scores = g.op("MatMul", heads([0, 2, 1, 3]), heads([0, 2, 3, 1]), outputs="scores")
    weights = g.op("Softmax", g.op("Add", scores, hidden, outputs="masked"), axis=-1)
    mixed = g.op("Transpose", g.op("MatMul", weights, heads([0, 2, 1, 3])), perm=[0, 2, 1, 3])
    mixed = g.linear(g.op("Reshape", mixed, g.const([1, TOKENS, WIDTH])), WIDTH)
    g.output(g.op("ReduceMean", g.layer_norm(g.op("Add", x, mixed)), axes=[1], keepdims=0), name="y")
    return g.build()


def sentences(count: int, seed: int, *, padded: bool) -> list[Mapping[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        mask = np.ones((1, TOKENS), np.int64)
        mask[0, int(rng.integers(6, 14)) if padded else TOKENS :] = 0
        found.append({"x": 2 * rng.normal(size=(1, TOKENS, WIDTH)).astype(np.float32), "mask": mask})
    return found


@by_name("dialect", [OPENVINO_7BIT, ONNXRUNTIME_7BIT])
def test_attention_mask_works_without_padding_in_calibration(dialect, tmp_path):
    made = quantizer(attention(), dialect, sentences(8, 0, padded=False), tmp_path)
    assert {"padding", "hidden"}.isdisjoint(edge.tensor for edge, _ in made.resolved)
    assert {"scores", "masked"} <= {edge.tensor for edge, _ in made.resolved}
    (line,) = range_warnings(made.ranges)
    assert "'hidden'" in line
    assert "float" in line
    for padded in (True, False):
        assert made.decibels(made.write(), sentences(4, 5, padded=padded)) > 20


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e-9])
def test_tiny_ranges_are_treated_as_dead(value):
    ranges = {"dead": (-value, value), "small": (0.0, 1e-6)}
    assert set(finite_ranges(ranges)) == {"small"}
    assert "'dead'" in range_warnings(ranges)[0]


def test_a_model_with_nothing_but_dead_tensors_is_refused(tmp_path):
    g = GraphBuilder("dead")
    dead = g.op("Mul", g.input("x", (1, 4, 8, 8)), g.const(np.zeros((1, 4, 8, 8), np.float32)), outputs="dead")
    g.output(g.op("Relu", dead), name="y")
    made = quantizer(g.build(), OPENVINO_7BIT, [{"x": np.zeros((1, 4, 8, 8), np.float32)}], tmp_path)
    assert not made.resolved
    with pytest.raises(UserError, match=r"calibration leaves nothing to quantize.*'dead'"):
        require_quantizable(Space(()), made.ranges, "m.onnx")


@pytest.mark.parametrize("method", METHODS)
def test_every_method_leaves_dead_tensors_float(method, tmp_path):
    made = quantizer(attention(), OPENVINO_7BIT, sentences(2, 0, padded=False), tmp_path, method)
    assert "hidden" not in finite_ranges(made.ranges)


DIALECTS = [OPENVINO_7BIT, ONNXRUNTIME_7BIT]
PADS = [0, 0, 1, 1, 0, 0, 1, 1]


def stem(none: float, *, joined: bool = False) -> onnx.ModelProto:
    """Conv, Pad with a sentinel, MaxPool, Conv, as converters write it; or a Concat that pads."""
    g = GraphBuilder("stem", seed=4)
    x = g.conv(g.input("x", (1, 3, 32, 32)), 16, 3, name="first")
    low = np.full((1, 16, 32, 1), none, np.float32)
    x = (
        g.op("Concat", x, g.const(low), axis=3, outputs="padded", name="pad")
        if joined
        else g.op("Pad", x, g.const(PADS), g.const(np.float32(none)), outputs="padded", name="pad")
    )
    x = g.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], outputs="pooled", name="pool")
    x = g.op("Relu", g.conv(x, 16, 3, name="second"))
    g.output(g.op("GlobalAveragePool", g.conv(x, 16, 3, name="third")), name="y")
    return g.build()


def images(count: int = 2) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{"x": rng.normal(size=(1, 3, 32, 32)).astype(np.float32)} for _ in range(count)]


@pytest.mark.parametrize("method", ["minmax", "percentile", "mse"])
@pytest.mark.parametrize("none", [-1e4, -1e9, -65504.0])
@by_name("dialect", DIALECTS)
def test_pool_behind_sentinel_padding_has_its_own_scale(dialect, none, method, tmp_path):
    made = quantizer(stem(none), dialect, images(), tmp_path, method)
    assert "padded" not in finite_ranges(made.ranges)
    assert "pooled" in finite_ranges(made.ranges)
    assert any("'padded'" in line for line in range_warnings(made.ranges))
    assert made.decibels(made.write(), images()) > 25
    assert made.decibels(made.write({"first", "second", "third"}), images()) > 25


@by_name("dialect", DIALECTS)
def test_constant_sentinel_does_not_widen_concat_scales(dialect, tmp_path):
    made = quantizer(stem(-1e4, joined=True), dialect, images(), tmp_path)
    path = made.write()
    assert max(scale for scale, _ in scales(path).values()) < 1
    assert made.decibels(path, images()) > 25


def mask_ranges(none: float, method: Any, folder: Path) -> dict[str, tuple[float, float]]:
    g = GraphBuilder("masked")
    scores, mask = g.input("scores", (1, 4, 16)), g.input("mask", (1, 4, 16))
    masked = g.op("Add", scores, g.op("Mul", mask, g.const(np.float32(none)), outputs="hidden"), outputs=["masked"])
    g.output(g.op("Softmax", masked[0], outputs="weights"))
    rng = np.random.default_rng(0)
    quiet, padded = np.zeros((1, 4, 16), np.float32), np.zeros((1, 4, 16), np.float32)
    padded[..., 12:] = 1
    batches = [{"scores": rng.normal(size=(1, 4, 16)).astype(np.float32), "mask": m} for m in (quiet, padded)]
    tensors = ["scores", "mask", "hidden", "masked", "weights"]
    return dict(calibrate(g.save(folder / "masked.onnx"), tensors, batches, method=method))


@pytest.mark.parametrize("none", [-1e4, -1e9, 1e4])
@pytest.mark.parametrize("method", METHODS)
def test_attention_mask_and_its_sum_stay_float(none, method, tmp_path):
    ranges = mask_ranges(none, method, tmp_path)
    assert set(finite_ranges(ranges)) == {"scores", "mask", "weights"}
    (line,) = range_warnings(ranges)
    assert "'hidden', 'masked'" in line
    assert ranges["mask"] == (0.0, 1.0)


@pytest.mark.parametrize("method", METHODS)
def test_range_of_a_two_valued_tensor_has_both_values(method, tmp_path):
    g = GraphBuilder("flags")
    g.output(g.op("Relu", g.input("x", (1, 100_000))), name="y")
    x = np.zeros((1, 100_000), np.float32)
    batches = [{"x": x}, {"x": np.where(np.arange(100_000) == 7, np.float32(1), x)}]
    path = g.save(tmp_path / "flags.onnx")
    assert calibrate(path, ["x"], batches, method=method, percentile=99.0) == {"x": (0.0, 1.0)}


def test_ranges_with_sentinels_are_cached(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    g = GraphBuilder("padded")
    g.output(g.op("Pad", g.input("x", (1, 2, 8, 8)), g.const(PADS), g.const(-1e4)), name="y")
    path = g.save(tmp_path / "padded.onnx")
    key = CalibrationKey(model_sha256="0", data="images", samples=1)
    batches = [{"x": normal(1, 2, 8, 8)}]
    first, second = (cached_ranges(key, path, ["x", "y"], batches) for _ in range(2))
    assert first == second
    assert range_warnings(first) == range_warnings(second) != ()


def _normal(count: int = 40_000, deviation: float = 1.0) -> np.ndarray:
    return np.random.default_rng(5).normal(0, deviation, count)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.append(_normal(), [-1e4] * 400), True),
        (np.append(_normal(), _normal(400) - 1e4), True),
        (np.concatenate([_normal(), _normal(400) - 1e4, _normal(400) - 2e4]), True),
        (np.append(_normal(), [-1e4, 1e4] * 200), True),
        (np.append(_normal(deviation=0.1), [-100.0] * 400), True),
        (np.full(8, -1e9), True),
        (np.append(_normal(), [-1e4]), False),  # an outlier
        (np.append(_normal(deviation=0.3), 450 * (1 + 0.05 * _normal(48))), False),  # massive activations
        (np.append(np.zeros(100), [1.0] * 5), False),
        (np.append(np.zeros(100), [255.0] * 5), False),
        (np.append(_normal(deviation=1e-3), [1.0] * 400), False),  # saturated probabilities
        (np.random.default_rng(5).standard_cauchy(40_000), False),
        (np.arange(0, 640, 8.0), False),
        (np.zeros(0), False),
    ],
)
def test_holds_sentinel_distinguishes_outliers(values, expected):
    assert holds_sentinel(values) == expected
    spread = MagnitudeHistogram()
    for part in np.array_split(values, 3):
        spread.add(part)
    assert spread.has_sentinel == expected


SIZE = 16


class Builder(GraphBuilder):
    """Adds Q/DQ pairs where they are asked for."""

    def __init__(self, quantized: bool) -> None:
        super().__init__("net", opset=17)
        self.rng, self._quantized = np.random.default_rng(0), quantized

    def head(self, x: str, channels: int) -> str:
        weights = self.rng.normal(size=(channels, 3, 1, 1)).astype(np.float32)
        return self.op("Conv", x, self.const(weights), name="head")

    def pair(self, x: str, amax: float) -> str:
        """Symmetric INT8 with one scale, where the model is quantized."""
        return pair(self, x, amax / 127) if self._quantized else x


def boxes_and_scores(quantized: bool, axis: int) -> onnx.ModelProto:
    """As detectors are exported: boxes in pixels and scores joined along `axis`, one scale for both."""
    b = Builder(quantized)
    x = b.input("x", (1, 3, SIZE, SIZE))
    boxes = b.op("Mul", b.op("Sigmoid", b.head(x, 4)), b.const(640.0))
    scores = b.op("Sigmoid", b.op("Sub", b.head(x, 6), b.const(3.0)))
    joined = b.op("Concat", boxes, scores, axis=1)
    rows = b.op("Reshape", joined, b.const(np.array([1, 10, SIZE * SIZE])))
    rows = rows if axis == 1 else b.op("Transpose", rows, perm=[0, 2, 1])
    b.output(b.op("Relu", b.pair(rows, 640)), name="output0")
    return b.build()


def two_heads(quantized: bool, _: int = 0) -> onnx.ModelProto:
    """One head dies of an outlier that it does not read; the other is not quantized at all."""
    b = Builder(quantized)
    x = b.input("x", (1, 3, SIZE, SIZE))
    loud = b.op("Mul", x, b.const(np.array([1e5, 1, 1], np.float32).reshape(1, 3, 1, 1)))
    weights = b.rng.normal(size=(8, 3, 1, 1)).astype(np.float32)
    weights[:, 0] = 0
    b.output(b.op("Conv", b.pair(loud, 4e5), b.const(weights), name="depth_conv"), name="depth")
    b.output(b.linear(b.op("Flatten", b.op("GlobalAveragePool", x)), 10), name="cls")
    return b.build()


def scored(plain: onnx.ModelProto, quantized: onnx.ModelProto, folder: Path) -> Accuracy:
    evaluator = Fidelity(folder / "reference.npz", {"x": ("float", (1, 3, SIZE, SIZE))}, samples=4)
    onnx.save(plain, folder / "plain.onnx")
    onnx.save(quantized, folder / "quantized.onnx")
    with running(folder / "plain.onnx", folder, optimization="disabled") as infer:
        evaluator.prepare(infer)
        assert evaluator.score(infer).metrics["sqnr_db"] == 120
    with running(folder / "quantized.onnx", folder, optimization="disabled") as infer:
        return evaluator.score(infer)


@pytest.mark.parametrize(
    ("build", "axis", "worst"),
    [
        (boxes_and_scores, 1, "output 'output0', axis 1 slices 4..9"),
        (boxes_and_scores, 2, "output 'output0', axis 2 slices 4..9"),
        (two_heads, 0, "output 'depth'"),
    ],
)
def test_worst_output_slice_decides_fidelity_and_is_named(build, axis, worst, tmp_path):
    found = scored(build(False, axis), build(True, axis), tmp_path)
    assert found.metrics["sqnr_db"] < 3
    assert worst in found.note


def test_rank_layers_uses_the_worst_output(tmp_path):
    path = tmp_path / "two.onnx"
    onnx.save(two_heads(True), path)
    feeds = [{"x": normal(1, 3, SIZE, SIZE, seed=i)} for i in range(4)]
    ranked = rank_layers(path, feeds, NullProgress())
    assert ranked[0][1] < 3
