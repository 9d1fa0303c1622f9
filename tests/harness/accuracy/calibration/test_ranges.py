"""Ranges are exact, streamed, kept on disk, and refuse what no scale can hold."""

import dataclasses
import gc
import json
import logging
import os
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnxruntime.quantization.calibrate import MinMaxCalibrater

from harness.accuracy.calibration.histogram_calibrators import (
    ActivationObserver,
    EntropyCalibrator,
    MSECalibrator,
    PercentileCalibrator,
)
from harness.accuracy.calibration.range_estimators import AbsMaxCalibrator, finite_ranges, range_warnings
from harness.accuracy.calibration.ranges import CalibrationKey, cached_ranges, calibrate
from harness.accuracy.data.batching import InputBatches
from harness.base.errors import UserError
from harness.base.random_inputs import random_feeds
from harness.graph.builder import GraphBuilder
from harness.plugins.registry import installed_plugins

METHODS = [plugin.name for plugin in installed_plugins("range estimator")]


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


def _batches(count: int = 5, seed: int = 0) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [{"x": rng.normal(0, 1 + i, (2, 4)).astype(np.float32)} for i in range(count)]


def test_minmax_equals_numpy(arithmetic):
    x = np.stack([batch["x"] for batch in _batches()])
    ranges = calibrate(arithmetic, ["x", "r", "y", "d", "out"], iter(_batches()))
    r = np.maximum(x, 0)
    y = r * np.float32(3)
    assert ranges == {
        "d": (0.0, 0.0),
        "out": (float(y.min()), float(y.max())),
        "r": (float(r.min()), float(r.max())),
        "x": (float(x.min()), float(x.max())),
        "y": (float(y.min()), float(y.max())),
    }


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
    expected = {name: data.range_value for name, data in theirs.compute_data().items()}
    ranges = calibrate(path, list(expected), batches)
    assert ranges.keys() == expected.keys()
    for name, (low, high) in ranges.items():
        np.testing.assert_allclose([low, high], np.ravel(expected[name]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", [method for method in METHODS if method != "max"])
def test_every_method_gives_a_range_inside_of_minmax(arithmetic, method):
    full = calibrate(arithmetic, ["x", "r", "d"], _batches(8))
    ranges = calibrate(arithmetic, ["x", "r", "d"], _batches(8), method=method, percentile=90.0)  # type: ignore[arg-type]
    for name, (low, high) in ranges.items():
        assert full[name][0] <= low <= high <= full[name][1]
    assert ranges["d"] == (0.0, 0.0)


def test_percentile_cuts_the_outlier_and_so_does_entropy(tmp_path):
    builder = GraphBuilder("identity")
    builder.output(builder.op("Identity", builder.input("x", (1, 20_000))), name="out")
    path = builder.save(tmp_path / "identity.onnx")
    x = np.random.default_rng(0).normal(0, 1, (1, 20_000)).astype(np.float32)
    x[0, 7] = 50.0
    assert calibrate(path, ["x"], [{"x": x}])["x"][1] == 50.0
    low, high = calibrate(path, ["x"], [{"x": x}], method="percentile", percentile=99.0)["x"]
    assert np.allclose([low, high], np.quantile(x, [0.005, 0.995]), atol=0.1)  # within two bins of 100 / 2048
    assert calibrate(path, ["x"], [{"x": x}], method="entropy")["x"][1] < 25.0


_VALUES = hnp.arrays(
    np.float32, hnp.array_shapes(max_dims=2), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
)


@settings(max_examples=60)
@given(st.lists(_VALUES, min_size=1, max_size=4), st.floats(50.5, 100))
def test_histograms_take_any_finite_values(parts, percentile):
    histograms = PercentileCalibrator(percentile)
    for part in parts:
        histograms.collect({"t": [part]})
    low, high = histograms.ranges()["t"]
    assert min(p.min() for p in parts) <= low <= high <= max(p.max() for p in parts)
    assert len(histograms.histogram_dict["t"][0]) <= 5 * 2048


def test_small_first_batch_does_not_inflate_the_histogram():
    rng = np.random.default_rng(0)
    histograms = EntropyCalibrator()
    for scale in (1e-9, 1e-3, 1.0, 1.1):
        histograms.collect({"t": [rng.normal(0, scale, 1000).astype(np.float32)]})
    counts = histograms.histogram_dict["t"][0]
    assert counts.sum() == 4000
    assert len(counts) < 5 * 511


def test_float16_activations_have_ranges_too(tmp_path):
    builder = GraphBuilder("half")
    builder.output(builder.op("Relu", builder.input("x", (64,), "float16"), outputs=["r"])[0])
    path = builder.save(tmp_path / "half.onnx")
    x = np.linspace(-1, 1, 64).astype(np.float16)
    for method, error in (("minmax", 0.0), ("entropy", 0.5), ("percentile", 0.01)):
        ranges = calibrate(path, ["x", "r"], [{"x": x}], method=method)  # type: ignore[arg-type]
        assert ranges["r"][0] == 0.0
        assert ranges["r"][1] == pytest.approx(1.0, abs=error)


def test_max_is_symmetric_except_for_one_sided_tensors():
    magnitudes = AbsMaxCalibrator()
    for values in ([-3.0, 1.0], [2.0]):
        magnitudes.collect({"both": [np.array(values)], "up": [np.abs(values)], "down": [-np.abs(values)]})
    assert magnitudes.ranges() == {"both": (-3.0, 3.0), "up": (0.0, 3.0), "down": (-3.0, 0.0)}


def _error(values: np.ndarray, low: float, high: float) -> float:
    """Mean squared error of 8-bit integers over a range, 0 included, that values beyond are clipped to."""
    low, high = min(low, 0.0), max(high, 0.0)
    step = (high - low) / 255
    return float(np.mean((values - np.clip(np.rint(values / step) * step, low, high)) ** 2))


@pytest.mark.parametrize("shape", ["normal", "laplace", "relu", "outlier", "uniform"])
def test_mse_finds_the_clipping_with_the_least_error(shape):
    rng = np.random.default_rng(1)
    values = {
        "normal": rng.normal(0, 1, 100_000),
        "laplace": rng.laplace(0, 1, 100_000),
        "relu": np.maximum(rng.laplace(0, 1, 100_000), 0),
        "outlier": np.append(rng.normal(0, 1, 100_000), 90.0),
        "uniform": rng.uniform(-1, 2, 100_000),
    }[shape].astype(np.float32)
    histograms = MSECalibrator()
    for part in np.array_split(values, 3):
        histograms.collect({"t": [part]})
    low, high = histograms.ranges()["t"]
    amax = float(np.abs(values).max())
    tried = [amax * share for share in np.linspace(0.02, 1, 200)]
    least = min(_error(values, max(float(values.min()), -t), min(float(values.max()), t)) for t in tried)
    assert _error(values, low, high) <= 1.05 * least


def test_dead_tensor_has_an_empty_range_for_all_methods(arithmetic):
    for method in METHODS:
        assert calibrate(arithmetic, ["d"], _batches(2), method=method) == {"d": (0.0, 0.0)}


@pytest.mark.parametrize("method", ["minmax", "max", "percentile"])
@pytest.mark.parametrize("value", [-1.0, 0.0])
def test_activation_with_nan_or_infinity_stays_float(tmp_path, method, value):
    builder = GraphBuilder("log")
    log = builder.op("Log", builder.input("x", (1, 100)), outputs=["log"])[0]
    builder.output(builder.op("Relu", log), name="out")
    path = builder.save(tmp_path / "log.onnx")
    x = np.ones((1, 100), np.float32)
    x[0, 57] = value
    quiet = np.ones((1, 100), np.float32)
    for batches in ([{"x": x}, {"x": quiet}], [{"x": quiet}, {"x": x}]):
        ranges = calibrate(path, ["x", "log"], batches, method=method)  # type: ignore[arg-type]
        assert set(finite_ranges(ranges)) == {"x"}
        assert range_warnings(ranges) == ("NaN, infinite or huge on calibration data, so they stay float: 'log'",)
    with pytest.raises(UserError, match="every activation has NaN, infinite or huge values; check the model and"):
        calibrate(path, ["log"], [{"x": x}], method=method)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float", "float16"])
@pytest.mark.parametrize("method", METHODS)
def test_activation_with_mask_sentinel_stays_float(tmp_path, method, dtype):
    """-3.4e38, in float16 -65504, stands for minus infinity: 8 bits over it leave one level for all that counts."""
    builder = GraphBuilder("masked")
    scores = builder.input("scores", (1, 4, 16), dtype)
    mask = builder.input("mask", (1, 4, 16), dtype)
    masked = builder.op("Add", scores, mask, outputs=["masked"])[0]
    builder.output(builder.op("Softmax", masked, outputs=["weights"])[0])
    path = builder.save(tmp_path / "masked.onnx")
    kind = {"float": np.float32, "float16": np.float16}[dtype]
    hidden = np.triu(np.full((4, 16), np.finfo(kind).min, kind), 1)[None]
    batch = {"scores": np.random.default_rng(0).normal(0, 1, (1, 4, 16)).astype(kind), "mask": hidden}
    tensors = ["scores", "mask", "masked", "weights"]
    ranges = calibrate(path, tensors, [batch, batch], method=method)  # type: ignore[arg-type]
    assert set(finite_ranges(ranges)) == {"scores", "weights"}
    assert range_warnings(ranges) == (
        "NaN, infinite or huge on calibration data, so they stay float: 'mask', 'masked'",
    )


def test_data_with_nan_are_refused_with_batch_and_input(arithmetic):
    broken = [*_batches(2), {"x": np.full((2, 4), np.nan, np.float32)}]
    with pytest.raises(UserError, match="calibration batch 3: input 'x' has NaN or infinite values"):
        calibrate(arithmetic, ["r"], broken)


def test_range_warnings_name_dead_tensors_in_short():
    assert range_warnings({"a": (0.0, 1.0)}) == ()
    (line,) = range_warnings({f"t{i}": (0.0, 0.0) for i in range(7)} | {"a": (-1.0, 0.0)})
    assert line.startswith(
        "always 0, or without values, on calibration data (dead): 't0', 't1', 't2', 't3', 't4' and 2"
    )


def test_batches_are_streamed(arithmetic):
    alive: list[weakref.ref[np.ndarray]] = []
    peak = 0

    def stream() -> Iterator[dict[str, np.ndarray]]:
        nonlocal peak
        for batch in (dict(b) for b in _batches(6)):
            array = batch["x"].copy()
            alive.append(weakref.ref(array))
            peak = max(peak, sum(ref() is not None for ref in alive))
            yield {"x": array}

    seen: list[int] = []
    calibrate(arithmetic, ["x", "r"], stream(), progress=seen.append)
    assert peak <= 2  # the one at work and the one just read
    assert seen == [1, 2, 3, 4, 5, 6]


def test_activations_are_released_after_each_batch(arithmetic, tmp_path):
    class Watch:
        def __init__(self) -> None:
            self.refs: list[weakref.ref[np.ndarray]] = []
            self.left_over: list[int] = []

        def collect(self, arrays: dict[str, list[np.ndarray]]) -> None:
            gc.collect()
            self.left_over.append(sum(ref() is not None for ref in self.refs))
            self.refs += [weakref.ref(part) for parts in arrays.values() for part in parts]

        def ranges(self) -> dict[str, tuple[float, float]]:
            return {}

    watch = Watch()
    observer = ActivationObserver(arithmetic, tmp_path, ["r", "y"], watch)  # type: ignore[arg-type]
    for batch in _batches(4):
        observer.observe(batch)
    assert watch.left_over == [0, 0, 0, 0]


def test_calibration_writes_and_prints_nothing(arithmetic, capfd):
    folder = arithmetic.parent
    before = sorted(folder.iterdir())
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        for method in ("minmax", "entropy", "percentile"):
            calibrate(arithmetic, ["x", "r"], _batches(2), method=method)  # type: ignore[arg-type]
    finally:
        folder.chmod(stat.S_IRWXU)
    assert sorted(folder.iterdir()) == before
    assert capfd.readouterr() == ("", "")


def test_model_with_external_data_is_calibrated(tmp_path):
    builder = GraphBuilder("external")
    builder.output(builder.gemm(builder.input("x", (1, 64)), 64), name="out")
    path = tmp_path / "external.onnx"
    onnx.save_model(builder.build(), path, save_as_external_data=True, location="external.onnx.data")
    ranges = calibrate(path, ["x", "out"], [{"x": np.ones((1, 64), np.float32)}])
    assert ranges["x"] == (1.0, 1.0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["external.onnx", "external.onnx.data"]


def test_no_tensor_needs_no_run(tmp_path):
    assert calibrate(tmp_path / "missing.onnx", [], []) == {}


def test_no_data_is_refused(arithmetic):
    with pytest.raises(UserError, match=r"calibration of arithmetic\.onnx: there is no data"):
        calibrate(arithmetic, ["x"], [])


def test_an_unknown_tensor_is_named(arithmetic):
    with pytest.raises(UserError, match="'nowhere' cannot be observed; only float activations"):
        calibrate(arithmetic, ["x", "nowhere"], _batches())


def test_an_unknown_method_is_named(arithmetic):
    with pytest.raises(UserError, match="'percentil'; did you mean 'percentile'"):
        calibrate(arithmetic, ["x"], _batches(), method="percentil")  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", [{}, {"y": np.zeros((2, 4), np.float32)}, {"x": np.zeros((7,), np.float32)}])
def test_mismatched_data_is_a_user_error(arithmetic, batch):
    with pytest.raises(
        UserError, match=r"calibration of arithmetic\.onnx: batch 1: the float model does not run: .*\w"
    ):
        calibrate(arithmetic, ["x"], [batch])


def test_exception_of_the_data_is_passed_on(arithmetic):
    def broken() -> Iterator[dict[str, np.ndarray]]:
        yield _batches()[0]
        raise ValueError("image 7 cannot be read")

    with pytest.raises(ValueError, match=r"^image 7 cannot be read$"):
        calibrate(arithmetic, ["x"], broken())


@pytest.fixture
def key():
    return CalibrationKey(model_sha256="ab" * 32, data="images", preprocess="plain", samples=5)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "qdq-bench" / "ranges"


def test_infinite_ranges_are_cached(tmp_path, cache, key):
    builder = GraphBuilder("log")
    builder.output(builder.op("Log", builder.input("x", (3,)), outputs=["log"])[0])
    path = builder.save(tmp_path / "log.onnx")
    x = np.array([0.0, 1.0, 1.0], np.float32)
    for _ in range(2):
        ranges = cached_ranges(key, path, ["x", "log"], [{"x": x}])
        assert ranges == {"log": (-np.inf, 0.0), "x": (0.0, 1.0)}
    assert len(list(cache.iterdir())) == 1


def _forbidden() -> Iterator[dict[str, np.ndarray]]:
    raise AssertionError("the data were read")
    yield {}


def test_a_second_time_neither_model_nor_data_are_needed(arithmetic, cache, key):
    first = cached_ranges(key, arithmetic, ["x", "r"], _batches())
    assert cached_ranges(key, Path("gone.onnx"), ["r", "x"], _forbidden()) == first
    assert [p.suffix for p in cache.iterdir()] == [".json"]


@pytest.mark.parametrize(
    "change",
    [{"model_sha256": "cd" * 32}, {"data": "other"}, {"preprocess": "b"}, {"method": "entropy"}, {"samples": 4}],
)
def test_cache_key_depends_on_model_data_and_method(arithmetic, cache, key, change):
    cached_ranges(key, arithmetic, ["x"], _batches())
    cached_ranges(dataclasses.replace(key, **change), arithmetic, ["x"], _batches())  # type: ignore[arg-type]
    assert len(list(cache.iterdir())) == 2


def test_percentile_is_in_the_cache_key_of_its_method_only(arithmetic, cache, key):
    for method, count in (("minmax", 1), ("percentile", 3)):
        for percentile in (99.0, 99.9):
            cached_ranges(
                dataclasses.replace(key, method=method, percentile=percentile),  # type: ignore[arg-type]
                arithmetic, ["x"], _batches(),
            )  # fmt: skip
        assert len(list(cache.iterdir())) == count


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"ranges": {}}',
        '{"ranges": {"x": [0]}}',
        '{"ranges": {"x": [0, NaN]}}',
        '{"ranges": {"x": "ab"}}',
    ],
)
def test_corrupt_cache_file_is_rewritten(arithmetic, cache, key, caplog, text):
    first = cached_ranges(key, arithmetic, ["x"], _batches())
    (path,) = cache.iterdir()
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert cached_ranges(key, arithmetic, ["x"], _batches()) == first
    assert f"{path}: calibration ranges cannot be read and are made again" in caplog.text
    assert json.loads(path.read_text())["ranges"].keys() == {"x"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_unwritable_cache_folder_is_not_used(arithmetic, cache, key, caplog):
    cache.mkdir(parents=True)
    cache.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert cached_ranges(key, arithmetic, ["x"], _batches()).keys() == {"x"}
    assert "calibration ranges are not kept" in caplog.text


def test_missing_cache_folder_is_not_required(arithmetic, tmp_path, key, caplog, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cached_ranges(key, arithmetic, ["x"], _batches()).keys() == {"x"}
    assert "calibration ranges are not kept: no cache folder" in caplog.text


def test_errors_name_the_model_and_the_data_of_the_batch(arithmetic):
    batches = [{"x": np.ones((2, 4), np.float32)}, {"x": np.full((2, 4), np.nan, np.float32)}]
    read = InputBatches(count=2, make=lambda i: batches[i], batch_label=lambda _: "feeds.npz")
    with pytest.raises(UserError, match=r"calibration batch 2 \(feeds\.npz\): input 'x' has NaN"):
        calibrate(arithmetic, ["r"], read)
    wrong = InputBatches(count=1, make=lambda _: {"x": np.zeros(7, np.float32)}, batch_label=lambda _: "feeds.npz")
    with pytest.raises(UserError, match=r"calibration of mine\.onnx: batch 1 \(feeds\.npz\): the float model"):
        calibrate(arithmetic, ["r"], wrong, source="mine.onnx")
