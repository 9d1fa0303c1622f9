"""Every range estimator keeps the contract; one pass serves several, and channels."""

import numpy as np
import pytest

from harness.accuracy.calibration.histogram_calibrators import L2Calibrator, MSECalibrator
from harness.accuracy.calibration.range_estimators import (
    RangeEstimator,
    RangeEstimatorContract,
    create_estimator,
    finite_ranges,
    range_warnings,
)
from harness.accuracy.calibration.ranges import calibrate, calibrate_by_methods
from harness.config.sections import Calibration
from harness.graph.builder import GraphBuilder
from harness.graph.quantize.numeric_choices import channel_name
from harness.graph.quantize.weight_estimators import WeightEstimatorContract
from harness.plugins import registry
from harness.plugins.registry import installed_plugins

ESTIMATORS = [plugin.name for plugin in installed_plugins("range estimator")]


@pytest.mark.parametrize("name", ESTIMATORS)
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
        type(self).estimator = staticmethod(registry.load_plugin("weight estimator", name))


@pytest.fixture
def doubled(tmp_path):
    builder = GraphBuilder("doubled")
    builder.output(builder.op("Mul", builder.input("x", (1, 3, 4)), builder.const(2.0), outputs=["y"])[0])
    return builder.save(tmp_path / "doubled.onnx")


def test_mean_is_that_of_the_extremes_of_each_sample(doubled):
    batches = [{"x": np.random.default_rng(i).normal(0, 1 + i, (1, 3, 4)).astype(np.float32)} for i in range(5)]
    low, high = calibrate(doubled, ["y"], batches, method="mean")["y"]
    assert low == pytest.approx(np.mean([2 * each["x"].min() for each in batches]))
    assert high == pytest.approx(np.mean([2 * each["x"].max() for each in batches]))


def test_one_pass_for_all_estimators_equals_separate_passes(doubled):
    batches = [{"x": np.random.default_rng(i).normal(0, 1, (1, 3, 4)).astype(np.float32)} for i in range(3)]
    reads: list[int] = []
    counted = (reads.append(i) or batch for i, batch in enumerate(batches))  # type: ignore[func-returns-value]
    found = calibrate_by_methods(doubled, ["x", "y"], counted, methods=ESTIMATORS)
    assert reads == [0, 1, 2]
    assert found == {name: calibrate(doubled, ["x", "y"], batches, method=name) for name in ESTIMATORS}


def test_channel_ranges_without_warning_for_dead_channels(doubled):
    x = np.random.default_rng(0).normal(0, 1, (1, 3, 4)).astype(np.float32) * np.array([[[1], [0], [5]]], np.float32)
    found = calibrate(doubled, ["x", "y"], [{"x": x}], channels={"y": 3})
    assert found.keys() == {"x", "y", *(channel_name("y", i) for i in range(3))}
    assert found[channel_name("y", 2)] == pytest.approx((2 * x[:, 2].min(), 2 * x[:, 2].max()))
    assert found[channel_name("y", 1)] == (0, 0)
    assert not range_warnings(found)
    assert finite_ranges(found).keys() == found.keys()


def _squared_error(values: np.ndarray, low: float, high: float) -> float:
    step = (max(high, 0) - min(low, 0)) / 255
    return float(np.square(values - np.rint(np.clip(values, low, high) / step) * step).sum())


def test_l2_is_at_least_as_near_as_mse_on_values_with_one_long_tail():
    values = np.concatenate([np.random.default_rng(0).normal(0, 1, 50_000), [-40.0], [4.5] * 5]).astype(np.float32)
    errors = []
    for estimator in (L2Calibrator(), MSECalibrator()):
        estimator.collect({"x": [values]})
        errors.append(_squared_error(values, *estimator.ranges()["x"]))
    assert errors[0] <= 1.02 * errors[1]


@pytest.mark.parametrize("key", ["method", "weights"])
def test_unknown_estimator_is_refused_at_validation(key):
    with pytest.raises(ValueError, match="estimator is called 'mes'; did you mean 'mse'"):
        Calibration.model_validate({key: "mes"})
