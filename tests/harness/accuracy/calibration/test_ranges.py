"""Ranges are exact, streamed, kept on disk, and refuse what no scale can hold."""

import dataclasses
import gc
import json
import logging
import os
import stat
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnxruntime.quantization.calibrate import MinMaxCalibrater

from harness.accuracy.calibration.histogram_calibrators import ActivationObserver, EntropyCalibrator
from harness.accuracy.calibration.range_estimators import (
    RangeEstimator,
    RangeEstimatorContract,
    create_estimator,
    finite_ranges,
    range_warnings,
    restrict_space,
)
from harness.accuracy.calibration.ranges import CalibrationKey, cached_ranges, calibrate, calibrate_by_methods
from harness.accuracy.data.batching import InputBatches
from harness.base.errors import UserError
from harness.base.progress import NullProgress
from harness.base.random_inputs import random_feeds
from harness.config.experiment import parse_experiment
from harness.config.sections import Calibration
from harness.graph.builder import GraphBuilder
from harness.graph.load import load_proto
from harness.graph.qdq.space import build_space
from harness.graph.quantize.numeric_choices import channel_name
from harness.graph.quantize.weight_estimators import WeightEstimatorContract
from harness.graph.rules.dialects import ONNXRUNTIME, OPENVINO, TENSORRT
from harness.plugins.registry import installed_plugins, load_plugin
from harness.run.runner import run_experiment
from search.space import Dimension, Edge, Space

METHODS = [plugin.name for plugin in installed_plugins("range estimator")]
BROKEN = "NaN, infinite or huge on calibration data, so they stay float: "


@pytest.mark.parametrize("name", METHODS)
class TestRangeEstimators(RangeEstimatorContract):
    @pytest.fixture(autouse=True)
    def _name(self, name):
        self.name = name

    def make(self) -> RangeEstimator:
        return create_estimator(self.name, 99.0)


@pytest.mark.parametrize("name", [plugin.name for plugin in installed_plugins("weight estimator")])
class TestWeightEstimators(WeightEstimatorContract):
    @pytest.fixture(autouse=True)
    def _name(self, name):
        type(self).estimator = staticmethod(load_plugin("weight estimator", name))


@pytest.fixture
def arithmetic(tmp_path):
    """x -> Relu "r" -> "y" = 3 r, with a dead tensor "d" = 0 x."""
    builder = GraphBuilder("arithmetic")
    x = builder.input("x", (2, 4))
    r = builder.op("Relu", x, outputs=["r"])[0]
    y = builder.op("Mul", r, builder.const(3.0), outputs=["y"])[0]
    d = builder.op("Mul", x, builder.const(0.0), outputs=["d"])[0]
    builder.output(builder.op("Add", y, d, outputs=["out"])[0])
    return builder.save(tmp_path / "arithmetic.onnx")


def one_op(folder: Path, op: str, shape: tuple[int, ...], dtype: str = "float") -> Path:
    builder = GraphBuilder("single")
    builder.output(builder.op(op, builder.input("x", shape, dtype), outputs=["made"])[0])
    return builder.save(folder / f"{op}.onnx")


def data(count: int = 5) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{"x": rng.normal(0, 1 + i, (2, 4)).astype(np.float32)} for i in range(count)]


def test_minmax_mean_and_max_of_known_data(arithmetic):
    r = np.maximum(np.stack([batch["x"] for batch in data()]), 0)
    tensors = ["x", "r", "y", "d", "out"]
    reads: list[int] = []
    counted = (reads.append(i) or batch for i, batch in enumerate(data()))  # type: ignore[func-returns-value]
    found = calibrate_by_methods(arithmetic, tensors, counted, methods=METHODS)
    assert reads == [0, 1, 2, 3, 4], "one pass"
    x = np.stack([batch["x"] for batch in data()])
    y = (0.0, float((r * np.float32(3)).max()))
    expected = {"d": (0.0, 0.0), "out": y, "r": (0.0, float(r.max())), "x": (float(x.min()), float(x.max())), "y": y}
    assert found["minmax"] == expected
    assert found["mean"]["x"] == pytest.approx((x.min(axis=(1, 2)).mean(), x.max(axis=(1, 2)).mean()))
    assert found["max"] == {**expected, "x": (-np.abs(x).max(), np.abs(x).max())}
    for method, ranges in found.items():
        assert ranges == calibrate(arithmetic, tensors, data(), method=method)
        assert ranges["d"] == (0.0, 0.0)
        for name, (low, high) in ranges.items() if method != "max" else ():
            assert expected[name][0] <= low <= high <= expected[name][1]


def test_minmax_equals_onnx_runtime(tmp_path):
    builder = GraphBuilder("conv")
    x = builder.op("Relu", builder.conv(builder.input("x", (1, 3, 8, 8)), 4, 3))
    builder.output(builder.gemm(builder.op("Flatten", builder.conv(x, 2, 3, stride=2)), 5), name="logits")
    path = builder.save(tmp_path / "conv.onnx")
    batches = list(random_feeds({"x": ("float", (1, 3, 8, 8))}, 4, 1))

    class Reader:
        rest = iter(batches)

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.rest, None)

    theirs = MinMaxCalibrater(path, augmented_model_path=str(tmp_path / "augmented.onnx"))
    theirs.augment_graph()
    theirs.create_inference_session()
    theirs.collect_data(Reader())
    expected = {name: np.ravel(data.range_value) for name, data in theirs.compute_data().items()}
    ranges = calibrate(path, list(expected), batches)
    assert ranges.keys() == expected.keys()
    for name, pair in ranges.items():
        np.testing.assert_allclose(pair, expected[name], rtol=1e-5, atol=1e-6)


def estimate(method: str, *parts: np.ndarray, percentile: float = 99.0) -> tuple[float, float]:
    estimator = create_estimator(method, percentile)
    for part in parts:
        estimator.collect({"t": [part]})
    return estimator.ranges()["t"]


VALUES = hnp.arrays(
    np.float32, hnp.array_shapes(max_dims=2), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
)


@settings(max_examples=60)
@given(st.lists(VALUES, min_size=1, max_size=4), st.floats(50.5, 100))
def test_histograms_take_any_finite_values(parts, percentile):
    low, high = estimate("percentile", *parts, percentile=percentile)
    assert min(p.min() for p in parts) <= low <= high <= max(p.max() for p in parts)


def test_small_first_batch_does_not_inflate_the_histogram():
    rng, histograms = np.random.default_rng(0), EntropyCalibrator()
    for scale in (1e-9, 1e-3, 1.0, 1.1):
        histograms.collect({"t": [rng.normal(0, scale, 1000).astype(np.float32)]})
    counts = histograms.histogram_dict["t"][0]
    assert counts.sum() == 4000
    assert len(counts) < 5 * 511


def error(values: np.ndarray, low: float, high: float) -> float:
    """Mean squared error of 8-bit integers over a range, 0 included, that values beyond are clipped to."""
    low, high = min(low, 0.0), max(high, 0.0)
    step = (high - low) / 255
    return float(np.mean((values - np.clip(np.rint(values / step) * step, low, high)) ** 2))


@pytest.mark.parametrize("shape", ["normal", "laplace", "relu", "outlier", "uniform", "tail"])
def test_mse_and_l2_find_the_clipping_with_the_least_error(shape):
    rng = np.random.default_rng(1)
    values = {
        "normal": rng.normal(0, 1, 100_000),
        "laplace": rng.laplace(0, 1, 100_000),
        "relu": np.maximum(rng.laplace(0, 1, 100_000), 0),
        "outlier": np.append(rng.normal(0, 1, 100_000), 90.0),
        "uniform": rng.uniform(-1, 2, 100_000),
        "tail": np.concatenate([rng.normal(0, 1, 50_000), [-40.0], [4.5] * 5]),
    }[shape].astype(np.float32)
    mse, l2 = (error(values, *estimate(method, *np.array_split(values, 3))) for method in ("mse", "l2"))
    amax, least = float(np.abs(values).max()), np.inf
    for bound in amax * np.linspace(0.02, 1, 200):
        least = min(least, error(values, max(float(values.min()), -bound), min(float(values.max()), bound)))
    assert mse <= 1.05 * least
    assert l2 <= 1.02 * mse


def test_percentile_and_entropy_cut_an_outlier():
    x = np.random.default_rng(0).normal(0, 1, (1, 20_000)).astype(np.float32)
    x[0, 7] = 50.0
    assert np.allclose(estimate("percentile", x), np.quantile(x, [0.005, 0.995]), atol=0.1)  # two bins of 100 / 2048
    assert estimate("entropy", x)[1] < 25.0


def test_max_is_symmetric_except_for_one_sided_tensors():
    values = np.array([-3.0, 1.0])
    pairs = [estimate("max", part, part[:1]) for part in (values, np.abs(values), -np.abs(values))]
    assert pairs == [(-3.0, 3.0), (0.0, 3.0), (-3.0, 0.0)]


@pytest.mark.parametrize(("method", "tolerance"), [("minmax", 0.0), ("entropy", 0.5), ("percentile", 0.01)])
def test_float16_activations_have_ranges_too(tmp_path, method, tolerance):
    x = np.linspace(-1, 1, 64).astype(np.float16)
    low, high = calibrate(one_op(tmp_path, "Relu", (64,), "float16"), ["made"], [{"x": x}], method=method)["made"]
    assert low == 0.0
    assert high == pytest.approx(1.0, abs=tolerance)


@pytest.mark.parametrize("method", ["minmax", "max", "percentile"])
@pytest.mark.parametrize("value", [-1.0, 0.0])
def test_activation_with_nan_or_infinity_stays_float(tmp_path, method, value):
    path, quiet = one_op(tmp_path, "Log", (1, 100)), np.ones((1, 100), np.float32)
    x = quiet.copy()
    x[0, 57] = value
    for batches in ([{"x": x}, {"x": quiet}], [{"x": quiet}, {"x": x}]):
        ranges = calibrate(path, ["x", "made"], batches, method=method)
        assert set(finite_ranges(ranges)) == {"x"}
        assert range_warnings(ranges) == (f"{BROKEN}'made'",)
    with pytest.raises(UserError, match="every activation has NaN, infinite or huge values"):
        calibrate(path, ["made"], [{"x": x}], method=method)


@pytest.mark.parametrize("kind", [np.float32, np.float16])
@pytest.mark.parametrize("method", METHODS)
def test_activation_with_mask_sentinel_stays_float(tmp_path, method, kind):
    """-3.4e38, in float16 -65504, stands for minus infinity: 8 bits over it leave one level for all that counts."""
    builder = GraphBuilder("masked")
    dtype = "float" if kind is np.float32 else "float16"
    scores, mask = (builder.input(name, (1, 4, 16), dtype) for name in ("scores", "mask"))
    masked = builder.op("Add", scores, mask, outputs=["masked"])[0]
    builder.output(builder.op("Softmax", masked, outputs=["weights"])[0])
    path = builder.save(tmp_path / "masked.onnx")
    hidden = np.triu(np.full((4, 16), np.finfo(kind).min, kind), 1)[None]
    batch = {"scores": np.random.default_rng(0).normal(0, 1, (1, 4, 16)).astype(kind), "mask": hidden}
    ranges = calibrate(path, ["scores", "mask", "masked", "weights"], [batch, batch], method=method)
    assert set(finite_ranges(ranges)) == {"scores", "weights"}
    assert range_warnings(ranges) == (f"{BROKEN}'mask', 'masked'",)


def test_channel_ranges_without_warning_for_dead_channels(tmp_path):
    x = np.random.default_rng(0).normal(0, 1, (1, 3, 4)).astype(np.float32) * np.array([[[1], [0], [5]]], np.float32)
    found = calibrate(one_op(tmp_path, "Neg", (1, 3, 4)), ["x", "made"], [{"x": x}], channels={"made": 3})
    assert found.keys() == {"x", "made", *(channel_name("made", i) for i in range(3))}
    assert found[channel_name("made", 2)] == pytest.approx((-x[:, 2].max(), -x[:, 2].min()))
    assert found[channel_name("made", 1)] == (0, 0)
    assert not range_warnings(found)
    assert finite_ranges(found).keys() == found.keys()
    assert calibrate(tmp_path / "missing.onnx", [], []) == {}, "no tensor needs no run"


def test_range_warnings_name_dead_tensors_in_short():
    (line,) = range_warnings({f"t{i}": (0.0, 0.0) for i in range(7)} | {"a": (-1.0, 0.0)})
    assert "(dead): 't0', 't1', 't2', 't3', 't4' and 2" in line


def test_batches_and_activations_are_streamed(arithmetic, tmp_path):
    alive: list[weakref.ref[np.ndarray]] = []
    peaks: list[int] = []

    def stream() -> Iterator[dict[str, np.ndarray]]:
        for batch in data(6):
            array = batch["x"].copy()
            alive.append(weakref.ref(array))
            peaks.append(sum(ref() is not None for ref in alive))
            yield {"x": array}

    seen: list[int] = []
    calibrate(arithmetic, ["x", "r"], stream(), progress=seen.append)
    assert max(peaks) <= 2  # the one at work and the one just read
    assert seen == [1, 2, 3, 4, 5, 6]

    class Watch:
        def __init__(self) -> None:
            self.refs: list[weakref.ref[np.ndarray]] = []
            self.left_over: list[int] = []

        def collect(self, arrays: dict[str, list[np.ndarray]]) -> None:
            gc.collect()
            self.left_over.append(sum(ref() is not None for ref in self.refs))
            self.refs += [weakref.ref(part) for parts in arrays.values() for part in parts]

    watch = Watch()
    observer = ActivationObserver(arithmetic, tmp_path, ["r", "y"], watch)  # type: ignore[arg-type]
    for batch in data(4):
        observer.observe(batch)
    assert watch.left_over == [0, 0, 0, 0]


def test_calibration_writes_and_prints_nothing(arithmetic, tmp_path, capfd):
    builder = GraphBuilder("external")
    builder.output(builder.gemm(builder.input("x", (2, 4)), 64), name="out")
    path = tmp_path / "external.onnx"
    onnx.save_model(builder.build(), path, save_as_external_data=True, location="external.onnx.data")
    before = sorted(tmp_path.iterdir())
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        for method in ("minmax", "entropy", "percentile"):
            assert calibrate(arithmetic, ["x", "r"], data(2), method=method).keys() == {"x", "r"}
            assert calibrate(path, ["x", "out"], data(2), method=method).keys() == {"x", "out"}
    finally:
        tmp_path.chmod(stat.S_IRWXU)
    assert sorted(tmp_path.iterdir()) == before
    assert capfd.readouterr() == ("", "")


def labelled(count: int, make: Any) -> InputBatches:
    return InputBatches(count=count, make=make, batch_label=lambda _: "feeds.npz")


@pytest.mark.parametrize(
    ("tensors", "batches", "options", "message"),
    [
        (["x"], [], {}, r"calibration of arithmetic\.onnx: there is no data"),
        (["x", "nowhere"], data(), {}, "'nowhere' cannot be observed"),
        (["x"], data(), {"method": "percentil"}, "did you mean 'percentile'"),
        (["x"], [{}], {}, r"arithmetic\.onnx: batch 1: the float model does not run"),
        (["x"], [{"x": np.zeros(7, np.float32)}], {"source": "mine.onnx"}, r"mine\.onnx: batch 1: the float"),
        (["x"], labelled(1, lambda _: {"x": np.zeros(7, np.float32)}), {}, r"batch 1 \(feeds\.npz\): the float model"),
        (["r"], [*data(2), {"x": np.full((2, 4), np.nan, np.float32)}], {}, "batch 3: input 'x' has NaN"),
        (["r"], labelled(2, lambda i: {"x": np.full((2, 4), np.nan ** i, np.float32)}), {}, r"2 \(feeds\.npz\)"),
    ],
)  # fmt: skip
def test_unusable_data_are_refused_with_model_and_batch(arithmetic, tensors, batches, options, message):
    with pytest.raises(UserError, match=message):
        calibrate(arithmetic, tensors, batches, **options)


def test_exception_of_the_data_is_passed_on(arithmetic):
    def broken() -> Iterator[dict[str, np.ndarray]]:
        yield data()[0]
        raise ValueError("image 7 cannot be read")

    with pytest.raises(ValueError, match=r"^image 7 cannot be read$"):
        calibrate(arithmetic, ["x"], broken())


@pytest.mark.parametrize("key", ["method", "weights"])
def test_unknown_estimator_is_refused_at_validation(key):
    with pytest.raises(ValueError, match="estimator is called 'mes'; did you mean 'mse'"):
        Calibration.model_validate({key: "mes"})


# The cache

KEY = CalibrationKey(model_sha256="ab" * 32, data="images", preprocess="plain", samples=5)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "qdq-bench" / "ranges"


def forbidden() -> Iterator[dict[str, np.ndarray]]:
    raise AssertionError("the data were read")
    yield {}


def test_a_second_time_neither_model_nor_data_are_needed(tmp_path, cache):
    path = one_op(tmp_path, "Log", (3,))
    first = cached_ranges(KEY, path, ["x", "made"], [{"x": np.array([0.0, 1.0, 1.0], np.float32)}])
    assert first == {"made": (-np.inf, 0.0), "x": (0.0, 1.0)}
    assert cached_ranges(KEY, Path("gone.onnx"), ["made", "x"], forbidden()) == first
    assert [p.suffix for p in cache.iterdir()] == [".json"]


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ([{"model_sha256": "cd" * 32}], 2),
        ([{"data": "other"}], 2),
        ([{"preprocess": "b"}], 2),
        ([{"samples": 4}], 2),
        ([{"percentile": 99.0}], 1),
        ([{"method": "percentile"}, {"method": "percentile", "percentile": 99.0}], 3),
    ],
)
def test_cache_key_depends_on_model_data_and_method(arithmetic, cache, changes, count):
    for change in ({}, *changes):
        cached_ranges(dataclasses.replace(KEY, **change), arithmetic, ["x"], data())
    assert len(list(cache.iterdir())) == count


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"ranges": {}}',
        '{"ranges": {"x": [0, NaN]}}',
        '{"ranges": {"x": [0]}}',
        '{"ranges": {"x": "ab"}}',
    ],
)
def test_corrupt_cache_file_is_rewritten(arithmetic, cache, caplog, text):
    first = cached_ranges(KEY, arithmetic, ["x"], data())
    (path,) = cache.iterdir()
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert cached_ranges(KEY, arithmetic, ["x"], data()) == first
    assert f"{path}: calibration ranges cannot be read" in caplog.text
    assert json.loads(path.read_text())["ranges"].keys() == {"x"}


def test_cache_folder_is_not_required(arithmetic, tmp_path, caplog, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cached_ranges(KEY, arithmetic, ["x"], data()).keys() == {"x"}
    assert "calibration ranges are not kept: no cache folder" in caplog.text


# Tensors without a usable range

EXPERIMENT = """
experiment: odd
models: [{use: odd.onnx, calibration: {samples: 2}}]
backends: [{use: simulated, params: {seed: 5, noise: 0.0}}]
searchers: [random]
initial: [float, all]
baselines: [all]
budget: {evaluations: [4]}
confirmation: {builds: 3, rounds: 2, samples: 3}
"""


def test_unusable_and_dead_activations_are_recorded(tmp_path):
    builder = GraphBuilder("odd", seed=1)
    x = builder.op("Relu", builder.conv(builder.input("x", (1, 3, 8, 8)), 4, 3, pad=1))
    log = builder.op("Log", x, outputs=["log"])[0]  # of 0 is minus infinity
    dead = builder.op("Mul", builder.conv(x, 4, 3, pad=1), builder.const(0.0), outputs=["dead"])[0]
    pooled = builder.op("MaxPool", log, kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    tail = builder.op("Add", builder.conv(dead, 4, 3, pad=1), builder.op("Exp", pooled))
    builder.output(builder.op("GlobalAveragePool", tail))
    builder.save(tmp_path / "odd.onnx")
    said: list[str] = []

    class Ears(NullProgress):
        def say(self, text: str) -> None:
            said.append(text)

    run_experiment(parse_experiment(EXPERIMENT, "odd.yaml", tmp_path), out=tmp_path / "out", observer=Ears())
    facts = json.loads((tmp_path / "out" / "odd-simulated-int8" / "task.json").read_text())
    assert facts["calibrated_on"] == "random data"
    broken, quiet = facts["calibration_remarks"]
    assert broken.startswith(BROKEN)
    assert "'log'" in broken
    assert "'dead'" in quiet
    assert [line for line in said if "'log'" in line] == [f"odd.onnx: {broken}"]


def test_restrict_space_removes_edges_of_unusable_tensors():
    def dimension(name: str, *tensors: str) -> Dimension:
        edges = tuple(Edge(tensor, f"/{tensor}", 0) for tensor in tensors)
        return Dimension(name=name, group="g", kind="node_input", choices=("float", "int8"), edges=edges)

    space = Space((dimension("both", "a", "b"), dimension("one", "b"), dimension("constant", "w")))
    kept = restrict_space(space, {"a": (0.0, 1.0), "b": (float("-inf"), 1.0)})
    assert [(d.name, [e.tensor for e in d.edges]) for d in kept.dimensions] == [("both", ["a"]), ("constant", ["w"])]


@pytest.mark.parametrize("dialect", [OPENVINO, ONNXRUNTIME, TENSORRT], ids=lambda d: d.name)
def test_operands_of_an_unusable_tensor_stay_float(dialect):
    """The weight of a convolution, a constant factor, the other side of a product; but not the rest of a Concat."""
    builder = GraphBuilder("odd", opset=19)
    x = builder.input("x", (1, 4, 8, 8))
    log = builder.op("Log", x, outputs=["log"])[0]
    builder.output(builder.conv(log, 4, 3, name="conv"), name="convolved")
    builder.output(builder.op("Mul", log, builder.const(np.ones((1, 4, 1, 1), np.float32)), name="mul"), name="scaled")
    builder.output(builder.op("MatMul", x, log, name="product"), name="multiplied")
    builder.output(builder.op("Concat", log, x, axis=1, name="concat"), name="joined")
    model = load_proto(builder.build(), source="odd", sha256="0")
    activations = model.types.keys() - model.constants.keys()
    ranges = {name: (-1.0, 1.0) for name in activations} | {"log": (float("-inf"), 1.0)}
    kept = restrict_space(build_space(model, dialect), ranges)
    read = {(edge.consumer, edge.slot) for edge, _ in kept.resolve(kept.quantize_all())}
    assert {place for place in read if place[0] in ("conv", "mul", "product", "concat")} == {("concat", 1)}


# Memory

PROGRAM = """
import os, resource, sys, tempfile
from pathlib import Path
from harness.accuracy.calibration.ranges import calibrate
from harness.base.random_inputs import random_feeds
from harness.graph.load import load, save_to_folder

with tempfile.TemporaryDirectory() as folder:
    model = load(Path(os.environ["QDQ_ASSETS"]) / "models" / "yolox_nano.onnx")
    path = save_to_folder(model, Path(folder))
    types = {name: (model.types[name].dtype, model.types[name].shape) for name in model.inputs}
    outputs = {name for node in model.nodes for name in node.outputs}
    tensors = [n for n in (*model.inputs, *outputs) if n in model.types and model.types[n].dtype == "float"]
    for count in (2, 10):
        observed = [n for n in tensors if n not in model.constants]
        calibrate(path, observed, random_feeds(types, count), method=sys.argv[1])
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""


@pytest.mark.assets
@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("QDQ_ASSETS"), reason="QDQ_ASSETS is not set")
@pytest.mark.parametrize("method", ["minmax", "mse"])
def test_peak_memory_is_independent_of_the_image_count(method):
    done = subprocess.run([sys.executable, "-c", PROGRAM, method], capture_output=True, text=True, check=True)
    few, many = map(float, done.stdout.split())
    assert many < few + 0.1
    # Activations grow with the area; the rest of the process, libraries and weights, does not.
    assert many * (640 / 416) ** 2 < 4.0
